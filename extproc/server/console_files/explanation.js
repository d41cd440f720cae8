// The explanation of one decision or refusal: the answer, costs, candidates and what came of it.

import { stackedBar } from "./charts.js";
import { descriptions, element, table } from "./dom.js";
import { UNKNOWN, amount, count, duration, percent } from "./format.js";

const NUM_COLORS = 10;

/** Candidates that are drawn before the others are asked for. */
const MAX_BARS = 8;

/** The nodes that explain an outcome, as `/debug/decision` and `/debug/explain` describe it. */
export function explanationNodes(outcome) {
  if (outcome.outcome !== "decision") {
    return refusalNodes(outcome);
  }
  return [
    element("p", { class: "answer card" }, ...answer(outcome)),
    element("div", { class: "columns" }, resultCard(outcome), requestCard(outcome)),
    comparisonCard(outcome),
    candidatesCard(outcome),
    filtersCard(outcome),
  ].filter((node) => node !== null);
}

/** Show what came of a recorded decision by now; the rest of its explanation never changes. */
export function updateResult(node, outcome) {
  node.querySelector(".result").replaceWith(resultCard(outcome));
}

/** The address of a request in the console; several may have its id. */
export function decisionAddress(id, sequence) {
  return `#/decision/${encodeURIComponent(id)}/${sequence}`;
}

/** Links to other requests of the same id; null where there are none. */
function sameIdNodes({ id, sequence, num_same_id: numSameId, same_id_sequences: sequences }) {
  if (!(numSameId > 1)) {
    return null;
  }
  const others = sequences.filter((other) => other !== sequence);
  const links = others.flatMap((other) => [", ", element("a", { href: decisionAddress(id, other) }, String(other))]);
  const more = numSameId > sequences.length ? ", ..." : "";
  return element("span", {}, `${numSameId} requests: ${sequence}`, ...links, more);
}

function refusalNodes(outcome) {
  return [
    element(
      "p",
      { class: "answer card" },
      element("b", {}, `Refused with status ${outcome.status}`),
      `: ${outcome.message}`,
    ),
    element(
      "section",
      { class: "card" },
      element("h2", {}, "The refusal"),
      element(
        "dl",
        { class: "facts" },
        descriptions([
          ["Cause", outcome.cause],
          ["Reason for the client", outcome.reason],
          ["Try again after", outcome.retry_after_s === null ? null : duration(outcome.retry_after_s)],
          ["Model", outcome.model],
          ["Pool", outcome.pool],
          ["Same id", sameIdNodes(outcome)],
          ["Age", outcome.seconds_ago === undefined ? null : `${duration(outcome.seconds_ago)} ago`],
        ]),
      ),
    ),
  ];
}

/** One or two sentences: where the request went, and what spoke for that. */
function answer(outcome) {
  const chosen = outcome.endpoints[0];
  const verb = outcome.id === undefined ? "This request would go to " : "It went to ";
  const sentences = [verb, element("b", {}, chosen)];
  const rows = new Map(outcome.scored_candidates.map((row) => [row.endpoint, row]));
  const [first, second] = [rows.get(chosen), rows.get(outcome.runner_up)];
  if (first === undefined || second === undefined) {
    const others = outcome.candidates.length - 1;
    sentences.push(others > 0 ? `, by ${outcome.picker}.` : ", the only candidate.");
  } else if (outcome.cost) {
    sentences.push(...costSentences(outcome, first, second));
  } else if (outcome.scorers.length > 0) {
    sentences.push(` with a score of ${amount(first.total, "")}. `, "The next best, ", element("b", {}, second.endpoint), `, had ${amount(second.total, "")}.`);
  } else {
    sentences.push(`, by ${outcome.picker}.`);
  }
  if ("least-bad" in outcome.excluded_by_health) {
    sentences.push(" All endpoints were failing, so the least bad was tried.");
  }
  if (outcome.degraded) {
    sentences.push(` Part of the profile failed: ${outcome.degraded}.`);
  }
  return sentences;
}

function costSentences(outcome, first, second) {
  const { unit, terms } = outcome.cost;
  const differences = terms
    .map((name, at) => ({ name, value: second.terms[at] - first.terms[at] }))
    .sort((left, right) => right.value - left.value);
  const word = first.cost <= second.cost ? ", the lowest estimated cost: " : ", within the tolerance of the lowest cost: ";
  const sentences = [word, element("b", {}, amount(first.cost, unit)), ". "];
  const chosen = outcome.candidates.find((candidate) => candidate.endpoint === first.endpoint);
  if (chosen && chosen.matched_tokens > 0) {
    sentences.push(`It probably has ${count(chosen.matched_tokens)} of ${count(outcome.request.prompt_tokens)} prompt tokens in its cache. `);
  }
  sentences.push("The next best, ", element("b", {}, second.endpoint), `, would cost ${amount(second.cost, unit)}`);
  const largest = differences.filter(({ value }) => value > 0.05 * Math.abs(second.cost)).slice(0, 2);
  if (largest.length > 0) {
    const words = largest.map(({ name, value }) => `${name} +${amount(value, unit)}`);
    sentences.push(`, mostly by ${words.join(" and ")}`);
  }
  sentences.push(".");
  return sentences;
}

function resultCard(outcome) {
  if (outcome.id === undefined) {
    return null;
  }
  const usage = Object.entries(outcome.usage).map(([kind, tokens]) => `${kind} ${count(tokens)}`);
  return element(
    "section",
    { class: "card result" },
    element("h2", {}, "What came of it"),
    element(
      "dl",
      { class: "facts" },
      descriptions([
        ["Result", element("span", { class: `badge ${outcome.result}` }, resultText(outcome))],
        ["First token, predicted", duration(outcome.predicted_first_token_s)],
        ["First token, actual", outcome.first_token_s === null ? "not observed" : duration(outcome.first_token_s)],
        ["Response headers", duration(outcome.headers_s)],
        ["Whole request", duration(outcome.seconds)],
        ["Tokens reported", usage.join(", ")],
        ["Routed", `${duration(outcome.seconds_ago)} ago`],
        ["Trace", outcome.trace_id],
        ["Same id", sameIdNodes(outcome)],
      ]),
    ),
  );
}

export function resultText({ result, status }) {
  return status ? `${result} ${status}` : result;
}

function requestCard(outcome) {
  const { request } = outcome;
  return element(
    "section",
    { class: "card" },
    element("h2", {}, "The request"),
    element(
      "dl",
      { class: "facts" },
      descriptions([
        ["API", request.api],
        ["Model", request.model || "none"],
        ["Adapter", request.adapter],
        ["Sent to the engine as", outcome.model_rewrite ? outcome.model_rewrite.name : ""],
        ["Prompt", `${count(request.prompt_tokens)} tokens (estimate)`],
        ["Answer", answerText(request)],
        ["Objective", request.objective],
        ["Priority", request.priority === 0 ? "" : String(request.priority)],
        ["Pool", outcome.pool],
        ["Profile", `${outcome.profile}, picker ${outcome.picker}`],
        ["Fallbacks", outcome.endpoints.slice(1).join(", ")],
        ["Prefill by", stageText(outcome.disaggregation?.prefill)],
        ["Encode by", stageText(outcome.disaggregation?.encode)],
      ]),
    ),
  );
}

/** The endpoints that do a stage before the chosen one, or why that one does it. */
function stageText(stage) {
  if (!stage) {
    return "";
  }
  return stage.endpoints.join(", ") || `the chosen endpoint itself: ${stage.reason}`;
}

function answerText(request) {
  const most = request.max_tokens === null ? "no limit" : `${count(request.max_tokens)} tokens at most`;
  return request.stream ? `streamed, ${most}` : most;
}

/** Stacked bars of cost terms, or of weighted scores. */
function comparisonCard(outcome) {
  const isCost = outcome.cost !== null;
  const names = isCost ? outcome.cost.terms : outcome.scorers.map(({ name }) => name);
  if (names.length === 0 || outcome.scored_candidates.length === 0) {
    return null;
  }
  const unit = isCost ? outcome.cost.unit : "";
  const rows = outcome.scored_candidates
    .map((row) => ({
      endpoint: row.endpoint,
      values: isCost ? row.terms : row.weighted,
      total: isCost ? row.cost : row.total,
      role: roleOf(outcome, row.endpoint),
    }))
    .sort((left, right) => roleRank(left) - roleRank(right) || (isCost ? left.total - right.total : right.total - left.total));
  const most = Math.max(...rows.map((row) => sum(row.values)));
  const used = names.map((_, at) => rows.some((row) => row.values[at] > 0));
  const bars = element("ol", { class: "bars" });
  const show = (limit) => bars.replaceChildren(...rows.slice(0, limit).map((row) => barItem(row, names, unit, most)));
  show(MAX_BARS);
  const more = rows.length - MAX_BARS;
  const button = more > 0 ? element("button", { type: "button" }, `Show ${more} more`) : null;
  button?.addEventListener("click", () => {
    show(rows.length);
    button.remove();
  });
  return element(
    "section",
    { class: "card" },
    element("h2", {}, isCost ? `Estimated cost in ${unit || "points"}, lower is better` : "Score, higher is better"),
    element(
      "ul",
      { class: "legend" },
      names.map((name, at) => (used[at] ? element("li", {}, element("span", { class: `swatch ${termClass(at)}` }), name) : null)),
    ),
    bars,
    button,
    numbersTable(rows, names, unit),
  );
}

function roleOf(outcome, endpoint) {
  if (endpoint === outcome.endpoints[0]) {
    return "chosen";
  }
  return endpoint === outcome.runner_up ? "runner-up" : "";
}

function roleRank({ role }) {
  return role === "chosen" ? 0 : role === "runner-up" ? 1 : 2;
}

function barItem(row, names, unit, most) {
  const parts = names.map((name, at) => ({
    name: `${name} ${amount(row.values[at], unit)}`,
    value: row.values[at],
    kind: termClass(at),
  }));
  const label = parts.filter(({ value }) => value > 0).map(({ name }) => name).join(", ");
  return element(
    "li",
    { class: row.role },
    element(
      "div",
      { class: "bar-head" },
      element("span", { class: "address" }, row.endpoint),
      " ",
      row.role ? element("span", { class: `badge ${row.role}` }, row.role) : null,
      element("b", {}, amount(row.total, unit)),
    ),
    stackedBar(parts, most, label || "zero"),
  );
}

function numbersTable(rows, names, unit) {
  const columns = [{ title: "Endpoint" }, ...[...names, "total"].map((title) => ({ title, kind: "number" }))];
  const { node, body } = table("Terms of each candidate", columns);
  for (const row of rows) {
    body.append(
      element(
        "tr",
        {},
        element("th", { scope: "row" }, row.endpoint),
        [...row.values, row.total].map((value) => element("td", { class: "number" }, amount(value, unit === "ms" ? "" : unit))),
      ),
    );
  }
  return element(
    "details",
    {},
    element("summary", {}, "Numbers"),
    element("div", { class: "scroll", role: "region", "aria-label": "Terms of each candidate", tabindex: "0" }, node),
  );
}

function termClass(at) {
  return `term-${at % NUM_COLORS}`;
}

function sum(values) {
  return values.reduce((total, value) => total + Math.max(0, value), 0);
}

function candidatesCard(outcome) {
  const { node, body } = table("State of the candidates at the decision", [
    { title: "Endpoint" },
    { title: "Health" },
    { title: "Cached", kind: "number" },
    { title: "In flight", kind: "number" },
    { title: "Running", kind: "number" },
    { title: "Waiting", kind: "number" },
    { title: "KV cache", kind: "number" },
    { title: "Queued tokens", kind: "number" },
    { title: "Adapters" },
    { title: "Age", kind: "number" },
  ]);
  for (const candidate of outcome.candidates) {
    const role = roleOf(outcome, candidate.endpoint);
    const health = outcome.health?.[candidate.endpoint];
    body.append(
      element(
        "tr",
        { class: role },
        element("th", { scope: "row" }, element("span", { class: "address" }, candidate.endpoint), " ", role ? element("span", { class: `badge ${role}` }, role) : null),
        element("td", {}, health ? `${health.state}${health.cause ? `: ${health.cause}` : ""}` : UNKNOWN),
        element("td", { class: "number" }, count(candidate.matched_tokens)),
        element("td", { class: "number" }, count(candidate.in_flight)),
        element("td", { class: "number" }, count(candidate.running)),
        element("td", { class: "number" }, count(candidate.waiting)),
        element("td", { class: "number" }, percent(candidate.kv_usage)),
        element("td", { class: "number" }, count(candidate.queued_tokens)),
        element("td", {}, candidate.adapters?.join(", ") || UNKNOWN),
        element("td", { class: "number" }, duration(candidate.age_s)),
      ),
    );
  }
  return element(
    "section",
    { class: "card" },
    element("h2", {}, "Candidates"),
    element("div", { class: "scroll", role: "region", "aria-label": "Candidates", tabindex: "0" }, node),
  );
}

function filtersCard(outcome) {
  if (outcome.filters.length === 0) {
    return null;
  }
  return element(
    "section",
    { class: "card" },
    element("h2", {}, "Filters"),
    element(
      "ol",
      {},
      outcome.filters.map(({ name, survivors, dropped }) =>
        element(
          "li",
          {},
          element("b", {}, name),
          dropped.length === 0 ? `: all ${survivors.length} stay` : `: ${survivors.length} stay; left out: ${dropped.join(", ")}`,
        ),
      ),
    ),
  );
}
