// Configuration: what differs from the defaults, and the reloads since the start.

import { fetchJson } from "./api.js";
import { byId, element, table } from "./dom.js";
import { duration } from "./format.js";

export function createConfiguration() {
  return {
    title: "Configuration",
    isLive: false,
    async refresh() {
      const configuration = await fetchJson("../debug/configuration");
      byId("configuration-result").replaceChildren(settingsCard(configuration), historyCard(configuration));
    },
  };
}

function settingsCard({ settings }) {
  const { node, body } = table("Settings that differ from their defaults", [
    { title: "Field" },
    { title: "Value" },
    { title: "Default", kind: "wide" },
    { title: "A change takes effect" },
  ]);
  for (const { path, before, after, is_live: isLive } of settings) {
    body.append(
      element(
        "tr",
        {},
        element("th", { scope: "row" }, element("code", {}, path)),
        element("td", {}, element("code", {}, after)),
        element("td", { class: "wide" }, element("code", {}, before)),
        element("td", {}, isLive ? "at once" : "after a restart"),
      ),
    );
  }
  return element(
    "section",
    { class: "card" },
    element("h2", {}, "In force"),
    settings.length === 0
      ? element("p", {}, "Every setting has its default.")
      : element("div", { class: "scroll", role: "region", "aria-label": "Settings in force", tabindex: "0" }, node),
  );
}

function historyCard({ reloads, started_s_ago: startedAgo }) {
  const items = reloads.map((reload) =>
    element(
      "li",
      {},
      element("p", {}, element("b", {}, titleOf(reload)), ` ${duration(reload.seconds_ago)} ago`),
      reload.error ? element("pre", { class: "failure" }, reload.error) : null,
      reload.changes.length > 0
        ? element(
            "ul",
            {},
            reload.changes.map(({ path, before, after }) =>
              element("li", {}, element("code", {}, path), ": ", element("code", {}, before), " became ", element("code", {}, after)),
            ),
          )
        : null,
      reload.restart.length > 0 ? element("p", {}, `Waiting for a restart: ${reload.restart.join(", ")}`) : null,
    ),
  );
  items.push(element("li", {}, element("p", {}, element("b", {}, "Started"), ` ${duration(startedAgo)} ago`)));
  return element("section", { class: "card" }, element("h2", {}, "History"), element("ol", { class: "history" }, items));
}

function titleOf({ error, changes }) {
  if (error) {
    return "Refused; the configuration stayed as it was";
  }
  return changes.length > 0 ? "In force" : "Read again, nothing changed";
}
