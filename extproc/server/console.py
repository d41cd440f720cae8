"""Console: a page in the browser about endpoints, decisions and configuration, and its data.

The files of the page have no data in them and load nothing from elsewhere; a strict
Content-Security-Policy holds that. All data come from `/debug` pages, which `AdminAccess` guards.
The console changes nothing.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, Final

import msgspec
from aiohttp import web

from extproc import distribution
from extproc.server import admin
from extproc.server.health import Readiness
from extproc.server.reload import ReloadHistory
from extproc.telemetry import pool_state, problems
from extproc.telemetry.control_plane_metrics import ScalingMetrics
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.decision_log import DecisionLog, DecisionRecord, StrategyComparison
from extproc.telemetry.pool_state import PoolView
from extproc.telemetry.traffic_history import INTERVAL_S, NO_TREND, TrafficHistory

#: Seconds for which a description of the endpoints serves all who ask: many tabs cost as much as one.
_CACHE_S: Final = 1.0

#: Endpoints that are described before other work has its turn (count).
_TURN_ENDPOINTS: Final = 50

#: Candidates of recorded decisions that strategies are compared on (count), some 10 us each.
_MAX_COMPARED_CANDIDATES: Final = 4000

_CONTENT_TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_HEADERS: Final[Mapping[str, str]] = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'; require-trusted-types-for 'script'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class ConsoleFile(msgspec.Struct, frozen=True):
    """A file of the page.

    Attributes:
        etag: Changes with the content.
    """

    body: bytes
    content_type: str
    etag: str


@functools.cache
def read_files() -> Mapping[str, ConsoleFile]:
    """Read the files of the page from the package, by name."""
    files = {}
    for file in (resources.files("extproc.server") / "console_files").iterdir():
        kind = _CONTENT_TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            body = file.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            files[file.name] = ConsoleFile(body, kind, etag)
    return files


class ConsolePages(msgspec.Struct, eq=False, kw_only=True):
    """Handlers of the console.

    Attributes:
        recording_error: Returns why decisions are not recorded; empty while they are, or are not to be.
        scaling: Returns the metrics of autoscaling by pool.
        about: Returns the labels of the process, such as its profile.
    """

    counters: ProcessCounters
    views: Callable[[], Mapping[str, PoolView]]
    history: TrafficHistory
    decisions: DecisionLog
    reloads: ReloadHistory
    readiness: Readiness
    recording_error: Callable[[], str]
    scaling: Callable[[], Mapping[str, ScalingMetrics]]
    about: Callable[[], Mapping[str, str]]
    clock: Callable[[], float]
    _overview: dict[str, Any] = {}
    _overview_at: float = -math.inf
    _overview_lock: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)

    def routes(self) -> list[web.RouteDef]:
        """Routes of the page and of its data."""
        return [
            web.get("/", self.redirect),
            web.get("/console", self.redirect),
            web.get("/console/", self.index),
            web.get("/console/{file}", self.file),
            web.get("/debug/overview", self.overview),
            web.get("/debug/strategies", self.strategies),
            web.get("/debug/configuration", self.configuration),
        ]

    async def redirect(self, _: web.Request) -> web.Response:
        """Redirect to `/console/`."""
        return web.Response(status=308, headers={"location": "console/"})

    async def index(self, request: web.Request) -> web.Response:
        """The [console](../operations/console.md), a page for browsers."""
        return _serve(request, "index.html")

    async def file(self, request: web.Request) -> web.Response:
        """Scripts and styles of the console."""
        return _serve(request, request.match_info["file"])

    async def overview(self, request: web.Request) -> web.Response:
        """Problems, pools with their endpoints, and traffic of the last quarter of an hour.

        `?pool=` has the traffic of that pool in place of all together.
        """
        pool = request.query.get("pool", "")
        if pool and pool not in (views := self.views()):
            return admin.refuse_unknown_pool(pool, views)
        async with self._overview_lock:  # who asks meanwhile waits for the same
            now = self.clock()
            if now - self._overview_at >= _CACHE_S:
                self._overview = await self._describe(now)
                self._overview_at = now
        points = self.history.points_of(pool) if pool else self.history.points
        return _json(msgspec.json.encode({**self._overview, "traffic": list(points)}))

    async def strategies(self, _: web.Request) -> web.Response:
        """Strategies side by side on the last requests; estimates."""
        records: list[DecisionRecord] = []
        candidates = 0
        for record in self.decisions.latest():
            if isinstance(record, DecisionRecord):
                candidates += len(record.decision.candidates)
                if records and candidates > _MAX_COMPARED_CANDIDATES:
                    break
                records.append(record)
        comparison = StrategyComparison()
        for record in reversed(records):
            comparison.add(record)
            await asyncio.sleep(0)  # requests are routed in between
        body = {"num_requests": comparison.num_requests, "strategies": comparison.results()}
        return _json(msgspec.json.encode(body))

    async def configuration(self, _: web.Request) -> web.Response:
        """Settings that differ from their defaults, and the reloads of this process."""
        return _json(msgspec.json.encode(self.reloads.describe(self.clock())))

    async def _describe(self, now: float) -> dict[str, Any]:
        views, reloads = self.views(), self.reloads
        listed = problems.find_process_problems(
            is_ready=self.readiness.ready,
            reload_error=reloads.error,
            needs_restart=reloads.needs_restart,
            degraded=self.counters.supervisor.degraded,
            recording_error=self.recording_error(),
        )
        pools, scaling = [], self.scaling()
        for name, view in views.items():
            scaled = scaling.get(name)
            desired = None if scaled is None else scaled.gauges.get("desired_replicas")
            listed += problems.find_pool_problems(
                name, view, self.history, now, desired_replicas=desired
            )
            pools.append(await self._describe_pool(name, view, now))
            await asyncio.sleep(0)  # many small pools are as much work as a large one
        return {
            "version": distribution.installed_version(),
            "profile": self.about().get("profile", ""),
            "is_ready": self.readiness.ready,
            "streams_open": self.counters.streams_open,
            "problems": problems.sort_problems(listed),
            "pools": msgspec.Raw(msgspec.json.encode(pools)),
            "interval_s": INTERVAL_S,
            "now": now,
        }

    async def _describe_pool(self, name: str, view: PoolView, now: float) -> dict[str, Any]:
        trends = self.history.trends(name)
        endpoints = []
        for at, member in enumerate(view.pool.members):
            if at % _TURN_ENDPOINTS == _TURN_ENDPOINTS - 1:
                await asyncio.sleep(0)  # requests are routed in between
            state = pool_state.describe_endpoint(member, now)
            trend = trends.get(state.address, NO_TREND)
            endpoints.append({"state": state, "trend": trend})
        queue = None
        if view.queue is not None:
            queue = {"requests": view.queue[0], "capacity": view.queue_capacity}
        in_flight = view.pool.count_requests()
        return {"name": name, "queue": queue, "in_flight": in_flight, "endpoints": endpoints}


def _serve(request: web.Request, name: str) -> web.Response:
    file = read_files().get(name)
    if file is None:
        return web.Response(status=404, text="no such file\n")
    headers = {**_HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.body, headers={**headers, "content-type": file.content_type})


def _json(body: bytes) -> web.Response:
    headers = {
        "cache-control": "no-store",
        "content-type": "application/json",
        "x-content-type-options": "nosniff",
    }
    return web.Response(body=body, headers=headers)
