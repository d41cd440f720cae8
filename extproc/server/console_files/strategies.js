// Strategies side by side on the last requests.

import { fetchJson } from "./api.js";
import { byId, element, table } from "./dom.js";
import { count, duration, percent } from "./format.js";

export function createStrategies() {
  const button = byId("strategies-run");
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      byId("strategies-result").replaceChildren(comparison(await fetchJson("../debug/strategies")));
    } finally {
      button.disabled = false;
    }
  });
  return { title: "Strategies", isLive: false, async refresh() {} };
}

function comparison({ num_requests: numRequests, strategies }) {
  if (numRequests === 0) {
    return element("p", { class: "card" }, "No request was routed yet.");
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
        { class: row.is_in_force ? "chosen" : null },
        element("th", { scope: "row" }, `${row.name} `, row.is_in_force ? element("span", { class: "badge chosen" }, "in force") : null),
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
