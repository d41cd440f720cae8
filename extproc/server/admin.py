"""Admin HTTP server on the metrics port: metrics, probes and debug pages."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, assert_never

import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError

from extproc.decision import Decision, Deferral, DirectResponse, Outcome, Rejection
from extproc.pool.snapshot import Pool
from extproc.request import HttpRequest
from extproc.scheduling.shadow import ShadowScheduler
from extproc.server import admin_access, debug_pages, transport
from extproc.server.admin_access import AdminAccess
from extproc.server.decision_recording import MAX_CLIENT_S, MAX_CLIENTS, DecisionRecorder
from extproc.server.health import Readiness
from extproc.supervision import ExceptionLog
from extproc.telemetry import explanation, pool_state
from extproc.telemetry.decision_log import RESULTS, DecisionLog, DecisionRecord, RejectionRecord
from extproc.telemetry.exposition import Exposition

#: Names under which `/debug/explain` takes the path and headers of the request to explain.
PATH_HEADER = "x-explain-path"
HEADER_PREFIX = "x-explain-header-"

#: Media type of the format that has exemplars.
_OPENMETRICS: Final = "application/openmetrics-text"

#: An item of `Accept` with it is refused.
_NO_QUALITY: Final = re.compile(r"q *= *0(\.0*)?")

#: Seconds that requests under way have to end when the server closes, and again once they are cancelled.
_CLOSE_S: Final = 1.0

#: Seconds in which a client that records must take what was written to it.
_WRITE_S: Final = 30.0

#: Seconds of rendering after which other work has its turn.
_RENDER_TURN_S: Final = 0.002

#: Exceptions of malformed requests.
_MALFORMED: Final = (HttpProcessingError, web.RequestPayloadError)

#: Answer to a result that no request has.
_UNKNOWN_RESULT: Final = Rejection(400, f"expected ?result= as one of {', '.join(RESULTS)}")


class AdminPages(msgspec.Struct, frozen=True, kw_only=True):
    """Handlers of the admin HTTP endpoints.

    Attributes:
        dry_run: Routes a request without a reservation.
    """

    exposition: Exposition
    readiness: Readiness
    pools: Callable[[], Mapping[str, Pool]]
    dry_run: Callable[[HttpRequest], Awaitable[Outcome | DirectResponse]]
    decisions: DecisionLog
    decision_recorder: DecisionRecorder
    clock: Callable[[], float]
    access: AdminAccess
    max_body_bytes: Callable[[], int]
    shadows: Callable[[], Mapping[str, ShadowScheduler]] = dict

    def application(self) -> web.Application:
        """Build the web application with all routes."""
        application = web.Application(middlewares=[self.access.middleware(), debug_pages.serve])
        application.cleanup_ctx.append(self.access.run)
        application.add_routes(
            [
                web.get("/metrics", self.metrics),
                web.get("/healthz", self.healthz),
                web.get("/readyz", self.readyz),
                web.get("/debug", self.debug),
                web.get("/debug/pool", self.pool),
                web.get("/debug/pools", self.all_pools),
                web.post("/debug/explain", self.explain),
                web.get("/debug/decisions", self.latest_decisions),
                web.get("/debug/decisions/{id:[^/]+}", self.decision),
                web.get("/debug/decision", self.decision_of_query),
                web.get("/debug/shadow", self.shadow),
                web.get("/debug/record", self.record),
            ]
        )
        return application

    async def metrics(self, request: web.Request) -> web.Response:
        """Metrics as Prometheus text, or as OpenMetrics where the scraper accepts it."""
        is_openmetrics = _accepts_openmetrics(request.headers.getall("accept", ()))
        kind = f"{_OPENMETRICS}; version=1.0.0" if is_openmetrics else "text/plain; version=0.0.4"
        pieces = self.exposition.pieces(is_openmetrics=is_openmetrics)
        body = await _join_in_turns(piece.encode(errors="replace") for piece in pieces)
        return web.Response(body=body, headers={"content-type": f"{kind}; charset=utf-8"})

    async def healthz(self, _: web.Request) -> web.Response:
        """Liveness probe: 200 while the process answers."""
        return web.Response(text="ok\n")

    async def readyz(self, _: web.Request) -> web.Response:
        """Readiness probe: 503 before discovery is complete and while draining; lists problems."""
        ready = self.readiness.ready
        lines = ["ok" if ready else "not ready", *self.readiness.notes()]
        return web.Response(status=200 if ready else 503, text="\n".join(lines) + "\n")

    async def debug(self, _: web.Request) -> web.Response:
        """Index of the debug pages, one per line."""
        return web.Response(text=debug_pages.format_index())

    async def pool(self, request: web.Request) -> web.Response:
        """Endpoints of a pool, with loads and reservations; of several, `?pool=` names it."""
        pools = self.pools()
        name = request.query.get("pool", next(iter(pools)) if len(pools) == 1 else "")
        pool = pools.get(name)
        if pool is None:
            return refuse_unknown_pool(name, pools)
        body = await _join_in_turns(pool_state.render_pool(pool, self.clock()))
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def all_pools(self, _: web.Request) -> web.Response:
        """All pools by name, in the form of `/debug/pool`."""
        pieces = pool_state.render_pools(self.pools(), self.clock())
        body = await _join_in_turns(itertools.chain((b'{"pools": ',), pieces, (b"}",)))
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def latest_decisions(self, request: web.Request) -> web.Response:
        """The last decisions, newest first; `?limit=` of them, 50 by default.

        `?pool=` selects those of that pool, `?result=` those that are `ok`, `failed`, `refused` or
        `open`, `?slower_than=` those that took more seconds or are open for longer, and `?id=`,
        `?model=` and `?endpoint=` those that contain the text there.
        """
        limit, result = _to_count(request.query.get("limit", "50")), request.query.get("result", "")
        pool = request.query.get("pool", "")
        if limit is None:
            return debug_pages.refuse(
                Rejection(400, "expected a number as ?limit=; write how many are wanted")
            )
        if result and result not in RESULTS:
            return debug_pages.refuse(_UNKNOWN_RESULT)
        slower_than_s = _to_seconds(request.query.get("slower_than", "0"))
        if slower_than_s is None:
            return debug_pages.refuse(
                Rejection(400, "expected seconds as ?slower_than=; write a number")
            )
        # Requests of a pool that is gone remain in the log.
        known = itertools.chain(self.pools(), map(_find_pool, self.decisions.latest()))
        if pool and pool not in known:
            return refuse_unknown_pool(pool, self.pools())
        now = self.clock()
        is_wanted = _build_filter(request.query, slower_than_s=slower_than_s, now=now)
        records = itertools.islice(filter(is_wanted, self.decisions.latest()), limit)
        return web.json_response(
            {"decisions": [explanation.summarize_record(record, now) for record in records]}
        )

    async def decision(self, request: web.Request) -> web.Response:
        """Newest record by request id: the decision with its result, or why it was refused.

        Clients may send an id again: `num_same_id` is the number of its records, and
        `same_id_sequences` has the sequence numbers of the newest ten. `?sequence=` and `?result=`
        select among them.
        """
        return await self._describe_decision(request, request.match_info["id"])

    async def decision_of_query(self, request: web.Request) -> web.Response:
        """Recorded request of `?id=`, as of `/debug/decisions/{id}`, or of `?sequence=` alone.

        Browsers drop the ids `.` and `..` from a path.
        """
        return await self._describe_decision(request, request.query.get("id"))

    async def _describe_decision(
        self, request: web.Request, request_id: str | None
    ) -> web.Response:
        result, text = request.query.get("result", ""), request.query.get("sequence")
        if result and result not in RESULTS:
            return debug_pages.refuse(_UNKNOWN_RESULT)
        if request_id is None and text is None:
            wanted = "expected ?id= or ?sequence=; write the id of a request"
            return debug_pages.refuse(Rejection(400, wanted))
        sequence = None if text is None else _to_count(text)
        if sequence is None and text is not None:
            return debug_pages.refuse(
                Rejection(400, "expected a number as ?sequence=; the list has them")
            )
        log = self.decisions
        record = log.find(request_id, result=result, sequence=sequence)
        if record is None:
            return debug_pages.refuse(_build_missing(request_id, num_decisions=len(log)))
        same_id = log.list_same_id(record)
        return await _respond(explanation.explain_record(record, self.clock(), same_id=same_id))

    async def shadow(self, _: web.Request) -> web.Response:
        """Shadows by name of their pool: agreement, expected seconds, their cost, last differences."""
        now = self.clock()
        shadows = {
            name: explanation.describe_shadow(shadow, now)
            for name, shadow in self.shadows().items()
        }
        return web.json_response({"pools": shadows})

    async def record(self, request: web.Request) -> web.StreamResponse:
        """Decisions from now on as JSON lines, for `extproc record`; `?seconds=` of them, 60 by default.

        At most 86400, and for four clients at a time; one that takes nothing for 30 s is disconnected.
        """
        seconds = _to_seconds(request.query.get("seconds", "60"))
        if seconds is None or not 1.0 <= seconds <= MAX_CLIENT_S:
            return debug_pages.refuse(
                Rejection(400, f"expected ?seconds= from 1 to {MAX_CLIENT_S:.0f}; write a number")
            )
        if not self.decision_recorder.has_room:
            return debug_pages.refuse(
                Rejection(429, f"{MAX_CLIENTS} clients record already; try again when one ended")
            )
        response = web.StreamResponse(headers={"content-type": "application/jsonl"})
        await response.prepare(request)
        recorded = self.decision_recorder.stream(seconds, is_gone=lambda: _is_gone(request))
        try:
            async with contextlib.aclosing(recorded) as pieces:
                async for lines in pieces:
                    async with asyncio.timeout(_WRITE_S):
                        await response.write(lines)
            if self.decision_recorder.is_closed and request.transport is not None:
                request.transport.close()  # without the last chunk: the recording is cut short
                return response
            async with asyncio.timeout(_WRITE_S):
                await response.write_eof()
        except ConnectionError:
            pass  # the client left
        except TimeoutError:
            if request.transport is not None:  # aiohttp would wait for the client without end
                request.transport.abort()
        return response

    async def explain(self, request: web.Request) -> web.Response:
        """Decision a request would get now, with reasons; nothing is reserved."""
        headers = {":method": "POST", ":path": ""}
        for name, value in request.headers.items():
            lower = name.lower()
            # As from Envoy: bytes as Latin-1, while the HTTP server takes them as UTF-8.
            text = value.encode("utf-8", "surrogateescape").decode("latin-1")
            if lower == PATH_HEADER:
                headers[":path"] = text
            elif lower.startswith(HEADER_PREFIX):
                headers[lower.removeprefix(HEADER_PREFIX)] = text
        try:
            body = await request.clone(client_max_size=self.max_body_bytes()).read()
        except web.RequestPayloadError:
            request.content.feed_eof()  # aiohttp would read what is left, and raise again
            wanted = "expected a body in the encoding of its headers"
            response = debug_pages.refuse(
                Rejection(400, f"{wanted}; send it without content-encoding")
            )
            response.force_close()
            return response
        outcome = await self.dry_run(HttpRequest(headers, body))
        match outcome:
            case Decision():
                return await self._explained(outcome)
            case Deferral():
                return debug_pages.refuse(outcome.rejection)
            case Rejection():
                return debug_pages.refuse(outcome)
            case DirectResponse():
                return web.Response(
                    status=outcome.status, body=outcome.body, content_type="application/json"
                )
            case _:
                assert_never(outcome)

    async def _explained(self, decision: Decision) -> web.Response:
        pool = self.pools().get(decision.pool)
        health = (
            None
            if pool is None
            else explanation.health(pool_state.describe_pool_state(pool, self.clock()))
        )
        return await _respond(explanation.explain(decision, health=health))


class AdminServer:
    """HTTP server of the metrics port."""

    def __init__(self) -> None:
        self._runner: web.AppRunner | None = None

    async def start(self, application: web.Application, *, host: str, port: int) -> int:
        """Listen, on every address where `host` is empty; returns the port, that of IPv4 if they differ.

        Raises:
            ConfigError: The port is taken, or the host is none of this machine.
        """
        runner = self._runner = web.AppRunner(
            application,
            access_log=None,
            logger=_build_server_log(),
            keepalive_timeout=admin_access.KEEPALIVE_S,
            shutdown_timeout=_CLOSE_S,
        )
        await runner.setup()
        _hide_software(runner)
        if runner.server is not None:
            admin_access.ConnectionLimiter(runner.server)
        try:
            await web.TCPSite(runner, host or None, port).start()
        except (OSError, UnicodeError) as error:
            raise transport.bind_error("--metrics-port", host, port, error) from error
        # With port 0, IPv4 and IPv6 get ports of their own, in any order; an IPv4 address is a pair.
        return int(min(runner.addresses, key=len)[1])

    async def close(self) -> None:
        """Close all connections, if it was started; those with requests after two seconds at most."""
        if self._runner is not None:
            await self._runner.cleanup()


class _ErrorHandler(logging.Handler):
    """Handler of what aiohttp logs, whose messages and exceptions quote requests.

    Malformed requests are mistakes of clients, which get status 400; others are logged as bugs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._exceptions = ExceptionLog(Counter(), time.monotonic)

    def emit(self, record: logging.LogRecord) -> None:
        """Log the exception of a record without its message."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, _MALFORMED):
            self._exceptions.record(error)


def _build_server_log() -> logging.Logger:
    """Build a logger of one server, which the handlers of the process do not see."""
    logger = logging.Logger("aiohttp.server", logging.ERROR)  # noqa: LOG001 - a shared one propagates
    logger.addHandler(_ErrorHandler())
    return logger


class _Request(web.Request):
    """Request whose response does not name the server software."""

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        await super()._prepare_hook(response)
        response.headers.pop("Server", None)


def _hide_software(runner: web.AppRunner) -> None:
    """Remove the name of the server software from all responses of a runner.

    The signal `on_response_prepare` does not see answers to what is no HTTP.
    """
    if runner.server is not None:
        make = runner.app._make_request  # noqa: SLF001 - aiohttp has no public hook for all answers
        runner.server.request_factory = functools.partial(make, _cls=_Request)


def _accepts_openmetrics(headers: Iterable[str]) -> bool:
    """True if headers `Accept` name OpenMetrics, and not with a quality of 0."""
    for item in ",".join(headers).lower().split(","):
        kind, *parameters = map(str.strip, item.split(";"))
        if kind == _OPENMETRICS and not any(map(_NO_QUALITY.fullmatch, parameters)):
            return True
    return False


def _is_gone(request: web.Request) -> bool:
    """True if the client of a request closed the connection."""
    return request.transport is None or request.transport.is_closing()


def _build_filter(
    query: Mapping[str, str], *, slower_than_s: float, now: float
) -> Callable[[DecisionRecord | RejectionRecord], bool]:
    """Build the filter of `/debug/decisions` from the query of its address."""
    wanted = {name: query.get(name, "").lower() for name in ("id", "model", "endpoint")}
    result, wanted_pool = query.get("result", ""), query.get("pool", "")

    def is_wanted(record: DecisionRecord | RejectionRecord) -> bool:
        if result and record.result != result:
            return False
        if wanted_pool and _find_pool(record) != wanted_pool:
            return False
        if slower_than_s and _find_duration(record, now) <= slower_than_s:
            return False
        if isinstance(record, RejectionRecord):
            model, endpoint = record.model, ""
        else:
            model = record.decision.request.target
            endpoint = record.decision.endpoints[0].address
        texts = (explanation.show_id(record), model, endpoint)
        return all(part in text.lower() for part, text in zip(wanted.values(), texts, strict=True))

    return is_wanted


def _find_pool(record: DecisionRecord | RejectionRecord) -> str:
    """Name of the pool of a recorded request."""
    return record.pool if isinstance(record, RejectionRecord) else record.decision.pool


def _find_duration(record: DecisionRecord | RejectionRecord, now: float) -> float:
    """Seconds that a request took, or is open; 0 for a refused one."""
    if isinstance(record, RejectionRecord):
        return 0.0
    return now - record.at if record.seconds is None else record.seconds


def _to_count(text: str) -> int | None:
    """Number of a query; None for what is none of at most nine digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _build_missing(request_id: str | None, *, num_decisions: int) -> Rejection:
    """Build the answer to an id, or to a sequence number, that no record has."""
    name = "sequence number" if request_id is None else "request id"
    return Rejection(
        404,
        f"no decision of that {name} among the last {num_decisions}; the id is "
        "the x-request-id header, decisions.decisions says how many are kept, and other "
        "replicas have those that they routed",
    )


def _to_seconds(text: str) -> float | None:
    """Seconds of a query; None for what is no number from 0."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if seconds >= 0.0 else None


async def _respond(page: explanation.Json) -> web.Response:
    body = await _join_in_turns(debug_pages.render(page))
    return web.Response(body=body, content_type="application/json", charset="utf-8")


async def _join_in_turns(pieces: Iterable[bytes]) -> bytes:
    """Joins pieces of a page, with turns for other work while they are rendered."""
    body, started = bytearray(), time.perf_counter()
    for piece in pieces:
        body += piece
        if time.perf_counter() - started > _RENDER_TURN_S:
            await asyncio.sleep(0)  # requests are routed in between
            started = time.perf_counter()
    return bytes(body)


def refuse_unknown_pool(name: str, pools: Iterable[str]) -> web.Response:
    """Answer to a query for a pool that does not exist: 404 with the names of those that do."""
    known = ", ".join(map(repr, pools)) or "none"
    return debug_pages.refuse(Rejection(404, f"no pool is called {name!r}; there are: {known}"))
