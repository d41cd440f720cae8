// Overview: problems, figures, charts, endpoints and the last decisions.

import { RequestError, fetchJson } from "./api.js";
import { drawLines } from "./charts.js";
import { decisionTable } from "./decisions.js";
import { byId, descriptions, element, setClass, setText, svgElement, table, updateRows } from "./dom.js";
import { UNKNOWN, count, duration, percent, rate } from "./format.js";

const NUM_LAST = 12;

/** Seconds that the charts may cover: the smallest that holds all points. */
const SPANS_S = [120, 300, 900];

const HEALTH_RANKS = { down: 0, ejected: 1, probing: 2, suspect: 3, healthy: 4 };

export function createOverview() {
  const choice = createPoolChoice();
  const last = decisionTable("Last decisions, newest first");
  byId("last-decisions").append(last.node);
  const endpoints = endpointTable();
  byId("endpoints").append(endpoints.node);
  let overview = null;
  let drawn = null;

  function draw() {
    if (overview === null) {
      return;
    }
    const state = `${overview.traffic.at(-1)?.at} ${byId("rate-chart").clientWidth} ${choice.pool}`;
    if (state !== drawn) {
      drawCharts(overview);
      drawn = state;
    }
  }
  function drawEndpoints() {
    if (overview !== null) {
      endpoints.update(choice.select(overview.pools), byId("endpoints-filter").value.toLowerCase());
    }
  }
  byId("endpoints-filter").addEventListener("input", drawEndpoints);
  new ResizeObserver(draw).observe(byId("rate-chart"));
  return {
    title: "Overview",
    isLive: true,
    show(pool) {
      choice.pool = pool;
    },
    /** Call a function whenever another pool is chosen. */
    onChange(change) {
      byId("pool").addEventListener("change", change);
    },
    async refresh() {
      const { pool } = choice;
      const part = pool === "" ? "" : `pool=${encodeURIComponent(pool)}`;
      let pages;
      try {
        pages = await Promise.all([
          fetchJson(`../debug/overview?${part}`),
          fetchJson(`../debug/decisions?limit=${NUM_LAST}&${part}`),
        ]);
      } catch (error) {
        if (!(error instanceof RequestError) || error.status !== 404 || pool === "") {
          throw error;
        }
        if (pool === choice.pool) {
          choice.leave();
          await this.refresh();
        }
        return;
      }
      if (pool !== choice.pool) {
        return; // the pool was changed meanwhile, and is read by now
      }
      const [state, { decisions }] = pages;
      overview = state;
      drawProblems(overview.problems);
      choice.update(overview.pools);
      drawFigures(overview, choice.select(overview.pools));
      drawEndpoints();
      last.update(decisions);
      draw();
      setText(byId("version"), `${overview.version ?? ""} ${overview.profile}`.trim());
    },
  };
}

/** The choice of a pool, which the address keeps; an empty one is all of them. */
function createPoolChoice() {
  const list = byId("pool");
  let pool = "";
  function choose(name) {
    pool = name;
    byId("pool-gone").hidden = true;
  }
  list.addEventListener("change", () => {
    choose(list.value);
    history.replaceState(null, "", `#/overview/${encodeURIComponent(pool)}`);
  });
  return {
    get pool() {
      return pool;
    },
    set pool(name) {
      choose(name);
    },
    /** Choose all pools in place of one that is gone; the address keeps it, since it may come back. */
    leave() {
      setText(byId("pool-gone"), `There is no pool ${pool} now: all together are shown.`);
      choose("");
      byId("pool-gone").hidden = false;
    },
    /** Pools of the overview that are shown. */
    select(pools) {
      return pool === "" ? pools : pools.filter(({ name }) => name === pool);
    },
    /** Offer the pools. */
    update(pools) {
      const names = pools.map(({ name }) => name);
      byId("pool-choice").hidden = names.length < 2;
      const state = JSON.stringify(names);
      if (list.dataset.state !== state) {
        list.dataset.state = state;
        list.replaceChildren(
          element("option", { value: "" }, "all together"),
          ...names.map((name) => element("option", { value: name }, name)),
        );
      }
      list.value = pool;
    },
  };
}

function drawProblems(problems) {
  const node = byId("problems");
  const state = JSON.stringify(problems.map(({ kind, endpoint, pool, severity }) => [kind, endpoint, pool, severity]));
  if (node.dataset.state === state) {
    node.querySelectorAll("li").forEach((item, at) => {
      setText(item.querySelector("b"), problems[at].title);
      setText(item.querySelector("p"), problems[at].advice);
    });
    return;
  }
  node.dataset.state = state;
  setText(byId("problems-status"), problems.map(({ title }) => title).join(". "));
  if (problems.length === 0) {
    node.replaceChildren(element("p", { class: "card problem none" }, element("b", {}, "No problems"), " in the last minute."));
    return;
  }
  node.replaceChildren(
    element(
      "ul",
      {},
      problems.map(({ severity, title, advice }) =>
        element("li", { class: `card problem ${severity}` }, element("span", { class: `badge ${severity}` }, severity), element("div", {}, element("b", {}, title), element("p", {}, advice))),
      ),
    ),
  );
}

function drawFigures({ traffic }, pools) {
  const states = pools.flatMap((pool) => pool.endpoints.map(({ state }) => state));
  const point = traffic.at(-1);
  const queues = pools.map(({ queue }) => queue).filter((queue) => queue !== null);
  const queued = queues.reduce((total, queue) => total + queue.requests, 0);
  const capacity = queues.reduce((total, queue) => total + queue.capacity, 0);
  const healthy = states.filter(({ health }) => health === "healthy").length;
  byId("figures").replaceChildren(
    ...descriptions([
      ["Healthy endpoints", `${healthy} of ${states.length}`],
      ["Requests / s", rate(point?.routed)],
      ["In flight", count(pools.reduce((total, pool) => total + pool.in_flight, 0))],
      ["TTFT median", duration(point?.ttft_p50_s)],
      ["TTFT p95", duration(point?.ttft_p95_s)],
      ["Queued", queues.length === 0 ? "" : `${count(queued)} of ${count(capacity)}`],
    ]),
  );
}

function drawCharts({ traffic, now }) {
  const ages = traffic.map(({ at }) => Math.max(0, now - at));
  const shared = { ages, spanS: SPANS_S.find((span) => span >= (ages[0] ?? 0)) ?? SPANS_S.at(-1) };
  const valuesOf = (name) => traffic.map((point) => point[name]);
  drawLines(byId("rate-chart"), {
    ...shared,
    title: "Requests per s",
    format: rate,
    lines: [
      { name: "routed", kind: "line-a", values: valuesOf("routed") },
      { name: "failed", kind: "line-b", values: valuesOf("failed") },
      { name: "refused", kind: "line-c", values: valuesOf("refused") },
    ],
  });
  const hasStreams = traffic.some((point) => point.ttft_p95_s !== null);
  const hasAnswers = traffic.some((point) => point.complete_p95_s !== null);
  drawLines(byId("ttft-chart"), {
    ...shared,
    format: duration,
    ...(hasAnswers && !hasStreams
      ? {
          title: "Time to answer: none was streamed",
          lines: [{ name: "p95", kind: "line-c", values: valuesOf("complete_p95_s") }],
        }
      : {
          title: "Time to first token",
          lines: [
            { name: "p95", kind: "line-c", values: valuesOf("ttft_p95_s") },
            { name: "median", kind: "line-a", values: valuesOf("ttft_p50_s") },
          ],
        }),
  });
}

function endpointTable() {
  const { node, body } = table("Endpoints, those with problems first", [
    { title: "Endpoint" },
    { title: "Health" },
    { title: "In flight", kind: "number" },
    { title: "Running", kind: "number" },
    { title: "Waiting", kind: "number" },
    { title: "KV cache" },
    { title: "Cache hits", kind: "number" },
    { title: "Requests per s", kind: "number wide" },
    { title: "Headers after", kind: "number wide" },
    { title: "Adapters", kind: "wide" },
    { title: "Age", kind: "number" },
  ]);
  return {
    node,
    update(pools, filter) {
      const items = pools.flatMap((pool) => pool.endpoints.map((endpoint) => ({ pool: pool.name, ...endpoint })));
      const shown = items.filter((item) => filter === "" || searchText(item).includes(filter));
      shown.sort((left, right) => HEALTH_RANKS[left.state.health] - HEALTH_RANKS[right.state.health]);
      updateRows(body, shown, ({ pool, state }) => `${pool} ${state.address}`, createRow);
      const text = shown.length === items.length ? `${items.length}` : `${shown.length} of ${items.length}`;
      setText(byId("endpoints-count"), `${text}${pools.length > 1 ? `, ${pools.length} pools` : ""}`);
    },
  };
}

function searchText({ pool, state }) {
  return [pool, state.address, state.name, state.health, state.cause, ...(state.adapters ?? [])].join(" ").toLowerCase();
}

function createRow({ pool, state: { address, name } }) {
  const labels = [name === address ? "" : name, pool].filter((text) => text !== "").join(", ");
  const cells = {};
  for (const [cell, kind] of [
    ["inFlight", "number"],
    ["running", "number"],
    ["waiting", "number"],
    ["kv", ""],
    ["hits", "number"],
    ["requests", "number wide"],
    ["headers", "number wide"],
    ["adapters", "wide"],
    ["age", "number"],
  ]) {
    cells[cell] = element("td", { class: kind || null });
  }
  const badge = element("span");
  const cause = element("span", { class: "muted" });
  const kvText = element("span");
  const kvFill = svgElement("rect", { height: 8, width: 0 });
  cells.kv.append(svgElement("svg", { class: "gauge", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" }, kvFill), kvText);
  return {
    node: element(
      "tr",
      {},
      element("th", { scope: "row" }, element("span", { class: "address" }, address), " ", labels ? element("span", { class: "muted" }, labels) : null),
      element("td", {}, badge, " ", cause),
      Object.values(cells),
    ),
    update({ state, trend }) {
      setText(badge, state.health);
      setClass(badge, `badge ${state.health}`);
      setText(cause, causeText(state));
      setText(cells.inFlight, count(state.in_flight));
      setText(cells.running, count(state.running));
      setText(cells.waiting, count(state.waiting));
      setText(kvText, percent(state.kv_usage));
      kvFill.setAttribute("width", String(Math.round(100 * (state.kv_usage ?? 0))));
      setText(cells.hits, percent(trend.hit_ratio));
      setText(cells.requests, rate(trend.requests_per_s));
      setText(cells.headers, duration(trend.response_headers_s));
      setText(cells.adapters, state.adapters === null ? UNKNOWN : state.adapters.join(", "));
      setText(cells.age, duration(state.age_s));
    },
  };
}

/** Why an endpoint is not healthy, since when, and when it is tried again. */
function causeText(state) {
  const parts = [];
  if (state.cause) {
    parts.push(state.cause);
  }
  if (state.failure) {
    parts.push(`metrics: ${state.failure}`);
  }
  if (state.distrusted) {
    parts.push(`metrics are ${state.distrusted}`);
  }
  if (state.out_s !== null) {
    parts.push(`for ${duration(state.out_s)}`);
  }
  if (state.again_s !== null && state.health !== "healthy") {
    parts.push(`tried again in ${duration(state.again_s)}`);
  }
  return parts.join(", ");
}
