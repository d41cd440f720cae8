// The console: shows the view that the address names, and keeps it up to date.

import { RequestError, setToken, whenUnauthorized } from "./api.js";
import { createConfiguration } from "./configuration.js";
import { createDecision, createDecisions } from "./decisions.js";
import { byId, setText } from "./dom.js";
import { createDryRun } from "./dry_run.js";
import { createOverview } from "./overview.js";
import { createStrategies } from "./strategies.js";

const INTERVAL_MS = 2000;

const views = {
  overview: createOverview(),
  decisions: createDecisions(),
  decision: createDecision(),
  "dry-run": createDryRun(),
  strategies: createStrategies(),
  configuration: createConfiguration(),
};

let current = "";
let isPaused = false;
let hasFailed = false;
let timer = null;
let numRefreshes = 0;

/** Show the view of the address; `isFirst` leaves the focus where it is. */
function showView(isFirst) {
  if (location.hash === "#main" && !isFirst) {
    return; // the skip link; the address keeps it when the page is loaded again
  }
  const [, name, parameter, sequence] = location.hash.split("/", 4);
  current = Object.hasOwn(views, name) ? name : "overview";
  const view = views[current];
  for (const other of Object.keys(views)) {
    byId(other).hidden = other !== current;
  }
  view.show?.(decode(parameter ?? ""), sequence);
  document.title = `${view.title} · extproc`;
  const section = current === "decision" ? "decisions" : current;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${section}`) {
      link.setAttribute("aria-current", "page");
    } else {
      link.removeAttribute("aria-current");
    }
  }
  if (!isFirst) {
    byId(`${current}-title`).focus();
    window.scrollTo(0, 0);
  }
  refresh();
}

/** A part of the address as text; as it is where it cannot be decoded. */
function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Read the data of the current view, and again after a while where it is live or that failed. */
async function refresh() {
  clearTimeout(timer);
  const name = current;
  const started = ++numRefreshes;
  try {
    await views[name].refresh();
    if (started === numRefreshes) {
      onAnswer();
    }
  } catch (error) {
    if (started === numRefreshes) {
      onFailure(error);
    }
  } finally {
    if (started === numRefreshes) {
      timer = setTimeout(repeat, INTERVAL_MS);
    }
  }
}

function repeat() {
  if ((views[current].isLive || hasFailed) && !isPaused && !document.hidden) {
    refresh();
  }
}

function onAnswer() {
  hasFailed = false;
  byId("failure").hidden = true;
  byId("token-form").hidden = true;
  const text = !views[current].isLive ? "connected" : isPaused ? "paused" : "live";
  setText(byId("state"), text);
  byId("state").dataset.state = text;
}

function onFailure(error) {
  hasFailed = true;
  if (error.status === 401) {
    return; // `askForToken` says so
  }
  byId("state").dataset.state = "lost";
  setText(byId("state"), error.status === 0 ? "connection lost" : "error");
  const lost = `The picker does not answer. ${isPaused ? "Press Pause again to go on." : "Trying again."}`;
  setText(byId("failure"), error.status === 0 ? lost : error.message);
  byId("failure").hidden = false;
  if (!(error instanceof RequestError)) {
    throw error; // a fault of the page: the console of the browser shows its stack
  }
}

function askForToken() {
  byId("state").dataset.state = "lost";
  setText(byId("state"), "token needed");
  byId("token-form").hidden = false;
  byId("failure").hidden = true;
}

whenUnauthorized(askForToken);
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(byId("token").value.trim());
  byId("token").value = "";
  refresh();
});
byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  refresh();
});
views.decisions.onChange(refresh);
views.overview.onChange(refresh);
document.addEventListener("visibilitychange", repeat);
window.addEventListener("hashchange", () => showView(false));
showView(true);
