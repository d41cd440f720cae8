// The last decisions as a table, with filters, and one of them in detail.

import { fetchJson } from "./api.js";
import { byId, element, setClass, setText, table, updateRows } from "./dom.js";
import { decisionAddress, explanationNodes, resultText, updateResult } from "./explanation.js";
import { UNKNOWN, duration } from "./format.js";

const MAX_LISTED = 100;

/** A table of decisions: {node, update}. */
export function decisionTable(caption) {
  const { node, body } = table(caption, [
    { title: "Request" },
    { title: "Model", kind: "wide" },
    { title: "Endpoint" },
    { title: "Why", kind: "wide" },
    { title: "Result" },
    { title: "First token", kind: "number" },
    { title: "Age", kind: "number" },
  ]);
  return { node, update: (decisions) => updateRows(body, decisions, rowKey, createRow) };
}

/** Several requests may have the same id, and a restarted picker counts from 1 again. */
function rowKey({ id, sequence }) {
  return `${sequence} ${id}`;
}

function createRow({ id, sequence }) {
  const link = element("a", { href: decisionAddress(id, sequence), class: "address" }, id || "(no id)");
  const [model, endpoint, why, result, firstToken, age] = [
    element("td", { class: "wide name" }),
    element("td", { class: "address" }),
    element("td", { class: "wide why" }),
    element("td"),
    element("td", { class: "number" }),
    element("td", { class: "number" }),
  ];
  const badge = element("span");
  result.append(badge);
  return {
    node: element("tr", {}, element("th", { scope: "row", class: "id" }, link), model, endpoint, why, result, firstToken, age),
    update(decision) {
      setText(model, decision.model || UNKNOWN);
      setText(endpoint, decision.endpoint ?? UNKNOWN);
      setText(why, shortReason(decision.why));
      setText(badge, resultText(decision));
      setClass(badge, `badge ${decision.result}`);
      setText(firstToken, firstTokenText(decision));
      setText(age, duration(decision.seconds_ago));
    },
  };
}

/** Time to the first token, or to response headers where the picker does not see tokens. */
function firstTokenText({ first_token_s: firstTokenS, headers_s: headersS }) {
  if (firstTokenS === null && headersS !== null) {
    return `headers ${duration(headersS)}`;
  }
  return duration(firstTokenS);
}

/** The line of a decision without its profile and endpoint, which have columns. */
function shortReason(why) {
  const parts = why.split("; ").filter((part, at) => at > 0 && !part.startsWith("chose="));
  return parts.length > 0 ? parts.join(", ").replaceAll("=", " ") : why;
}

export function createDecisions() {
  const list = decisionTable("Decisions, newest first");
  byId("decisions-list").append(list.node);
  const form = byId("decisions-filter");
  async function refresh() {
    const query = new URLSearchParams({ limit: String(MAX_LISTED) });
    for (const [name, value] of new FormData(form)) {
      if (value) {
        query.set(name, value);
      }
    }
    const { decisions } = await fetchJson(`../debug/decisions?${query}`);
    list.update(decisions);
    const text = decisions.length < MAX_LISTED ? `${decisions.length} decisions` : `the newest ${MAX_LISTED} decisions`;
    setText(byId("decisions-count"), decisions.length === 0 ? "No decision matches." : text);
  }
  return {
    title: "Decisions",
    isLive: true,
    refresh,
    /** Call a function whenever the filters change. */
    onChange(change) {
      form.addEventListener("submit", (event) => event.preventDefault());
      form.addEventListener("input", change);
    },
  };
}

export function createDecision() {
  let id = "";
  let query = "";
  let isOpen = false;
  /** Sequence number of the decision that is shown; null where there is none. */
  let shown = null;
  return {
    title: "Decision",
    /** Until the request has ended, what came of it is read again. */
    get isLive() {
      return isOpen;
    },
    show(parameter, sequence) {
      id = parameter;
      query = sequence ? `&sequence=${sequence}` : "";
      isOpen = false;
      shown = null;
      setText(byId("decision-title"), `Request ${id}`);
      byId("decision-explanation").replaceChildren();
    },
    async refresh() {
      const wanted = `${encodeURIComponent(id)}${query}`;
      // A path that ends in the id `.` or `..` is another one to browsers.
      const outcome = await fetchJson(`../debug/decision?id=${wanted}`);
      if (wanted === `${encodeURIComponent(id)}${query}`) {
        isOpen = outcome.result === "open";
        const node = byId("decision-explanation");
        if (shown === outcome.sequence) {
          updateResult(node, outcome); // what was opened below stays open
        } else {
          node.replaceChildren(...explanationNodes(outcome));
        }
        shown = outcome.outcome === "decision" ? outcome.sequence : null;
      }
    },
  };
}
