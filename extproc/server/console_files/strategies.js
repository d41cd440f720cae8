// Strategies side by side on the last requests, and shadows on live ones.

import { RequestError, fetchJson } from "./api.js";
import { byId, element, table } from "./dom.js";
import { count, duration, percent } from "./format.js";

export function createStrategies() {
  const button = byId("strategies-run");
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      byId("strategies-result").replaceChildren(comparison(await fetchJson("../debug/strategies")));
    } catch (error) {
      if (!(error instanceof RequestError)) {
        throw error;
      }
      const text = `No comparison: ${error.message}. Press Compare again.`;
      byId("strategies-result").replaceChildren(element("p", { class: "card failure" }, text));
    } finally {
      button.disabled = false;
    }
  });
  async function refresh() {
    const { pools } = await fetchJson("../debug/shadow");
    byId("shadow-result").replaceChildren(...Object.keys(pools).length ? [shadows(pools)] : []);
  }
  return { title: "Strategies", isLive: false, refresh };
}

/** Shadows of `scheduling.shadow`: what they would have done with live requests. */
function shadows(pools) {
  const { node, body } = table("Shadows", [
    { title: "Pool" },
    { title: "Shadow" },
    { title: "Share of requests", kind: "number" },
    { title: "Compared", kind: "number" },
    { title: "Same endpoint", kind: "number" },
    { title: "Saving, by its own estimate", kind: "number" },
    { title: "Saving, by the strategy in force", kind: "number" },
    { title: "Dropped", kind: "number" },
    { title: "CPU", kind: "number" },
  ]);
  for (const [name, shadow] of Object.entries(pools)) {
    const { agreed = 0, differed = 0, rejected = 0, dropped = 0 } = shadow.results;
    const saving = shadow.expected_saving_s;
    const cells = [
      percent(shadow.sample_ratio),
      count(agreed + differed + rejected),
      percent(shadow.agreement),
      signedDuration(saving.shadow),
      signedDuration(saving.strategy),
      count(dropped),
      duration(shadow.seconds),
    ];
    body.append(
      element(
        "tr",
        {},
        element("th", { scope: "row" }, name || "default"),
        element("td", {}, shadow.profile),
        ...cells.map((text) => element("td", { class: "number" }, text)),
      ),
    );
  }
  return element(
    "section",
    { class: "card" },
    element("h2", {}, "Shadows on live requests"),
    element("div", { class: "scroll", role: "region", "aria-label": "Shadows", tabindex: "0" }, node),
  );
}

function signedDuration(seconds) {
  return seconds < 0 ? `-${duration(-seconds)}` : duration(seconds);
}

function comparison({ num_requests: numRequests, strategies }) {
  if (numRequests === 0) {
    return element("p", { class: "card" }, "No request can be compared yet.");
  }
  const { node, body } = table("Strategies", [
    { title: "Strategy" },
    { title: "Same endpoint", kind: "number" },
    { title: "First token, mean", kind: "number" },
    { title: "Cached tokens", kind: "number" },
    { title: "Most requests on an endpoint", kind: "number" },
    { title: "Endpoints used", kind: "number" },
  ]);
  for (const row of strategies) {
    body.append(
      element(
        "tr",
        { class: row.is_as_routed ? "chosen" : null },
        element("th", { scope: "row" }, `${row.name} `, row.is_as_routed ? element("span", { class: "badge chosen" }, "as routed") : null),
        element("td", { class: "number" }, percent(row.agreement_ratio)),
        element("td", { class: "number" }, duration(row.first_token_s)),
        element("td", { class: "number" }, percent(row.cached_ratio)),
        element("td", { class: "number" }, percent(row.max_share)),
        element("td", { class: "number" }, count(row.num_endpoints)),
      ),
    );
  }
  return element(
    "section",
    { class: "card" },
    element("h2", {}, `Last ${count(numRequests)} requests`),
    element("div", { class: "scroll", role: "region", "aria-label": "Strategies", tabindex: "0" }, node),
  );
}
