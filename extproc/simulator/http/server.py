"""The simulated engine as an OpenAI HTTP server: sockets, the clock, one engine loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable

import msgspec
from aiohttp import web

from extproc import errors
from extproc.simulator import api_requests, api_responses, core, faults, profiles, prompt, stats
from extproc.simulator.http import (
    adapters,
    engine_runner,
    exposition,
    kv_publisher,
    responses,
)

#: Bodies the server takes; far above the 32 MiB that data planes are tested with.
_MAX_BODY_BYTES = 1 << 28
_VERSION = "0.32.0"
_RANK = "x-data-parallel-rank"
#: Errors of bodies that are no request: no JSON, other types, or nested too deep.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
#: Requests in flight get this long when the server stops; aiohttp reads 0 as for ever.
_SHUTDOWN_S = 0.01


class EngineServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated engine.

    Attributes:
        profile: The machine, at speed 1.
        model: Name of the base model.
        loras: Names of the adapters that can be asked for at start.
        speed: How many times faster than the machine everything goes.
        seed: Seed of request ids, and of faults that hit a share of requests.
        output_tokens: Tokens of an answer whose request names no maximum.
        coalesce_s: Tokens that come within this time share a chunk; a busy vLLM does the same.
        show_cached: Whether usage carries `prompt_tokens_details.cached_tokens`
            (`--enable-prompt-tokens-details`).
        keepalive_s: Idle connections are closed after this time; uvicorn's default is 5 s.
        pod: Value of the `x-inference-pod` response header; empty means `engine-PORT`.
        faults: Faults armed from the start, in the grammar of `faults`.
        kv_events: KV events that it publishes, rank r on the ports plus r; None for none.
        ranks: Data-parallel ranks behind its port, each with a machine of its own. The header
            `x-data-parallel-rank` chooses; without it, the one with the least to do does.
    """

    profile: profiles.EngineProfile
    model: str = "demo"
    loras: tuple[str, ...] = ()
    speed: float = 1.0
    seed: int = 0
    output_tokens: int = 64
    coalesce_s: float = 0.005
    show_cached: bool = True
    keepalive_s: float = 5.0
    pod: str = ""
    faults: tuple[str, ...] = ()
    kv_events: kv_publisher.KvPublisherSettings | None = None
    ranks: int = 1


class EngineRank:
    """One data-parallel rank: its engine, statistics, loop and events.

    Args:
        index: Its number, from 0.

    Attributes:
        received: Inference requests that it got (count).
    """

    def __init__(self, settings: EngineServerSettings, index: int, trouble: faults.Faults) -> None:
        self.received = 0
        self.engine = core.SimulatedEngine(settings.profile.faster(settings.speed))
        self.stats = stats.Stats(self.engine)
        self.publisher = (
            None
            if settings.kv_events is None
            else kv_publisher.KvPublisher(
                settings.kv_events.of_rank(index),
                self.engine.pool,
                block_tokens=settings.profile.block_tokens,
                trouble=trouble,
            )
        )
        self.runner = engine_runner.Runner(
            self.engine,
            self.stats,
            trouble,
            coalesce_s=settings.coalesce_s,
            on_step=self.publish,
        )

    @property
    def load(self) -> int:
        """Running requests and four times those waiting, as the load balancer of vLLM counts."""
        return self.engine.running + 4 * self.engine.waiting

    def publish(self) -> None:
        """Publish the changes of blocks since the last call."""
        if self.publisher is not None:
            self.publisher.flush()


class EngineServer:
    """Routes and answers. One per process or test; `serving` gives it a port."""

    def __init__(self, settings: EngineServerSettings) -> None:
        self.settings = settings
        self.port = 0
        self.adapters = adapters.Adapters(
            settings.model, settings.loras, max_model_len=settings.profile.max_model_len
        )
        self.in_flight = 0
        self.most_in_flight = 0
        self.received: dict[str, int] = {}
        self._rng = random.Random(settings.seed)
        self.faults = faults.Faults(self._rng)
        self.faults.arm([faults.parse(text) for text in settings.faults], time.monotonic())
        self.ranks = [EngineRank(settings, rank, self.faults) for rank in range(settings.ranks)]
        first = self.ranks[0]
        #: Those of the first rank.
        self.engine, self.stats, self.publisher = first.engine, first.stats, first.publisher
        born = time.time()
        self._http = exposition.HttpCounts(born)
        self._page = exposition.ExpositionPage(
            [rank.stats for rank in self.ranks],
            self._http,
            model=settings.model,
            profile=settings.profile,
            created=born,
        )
        self._frozen: bytes | None = None

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._around], client_max_size=_MAX_BODY_BYTES)
        app.on_response_prepare.append(self._add_headers)
        for path in api_responses.SURFACES:
            app.router.add_post(path, self._infer)
        for path, handler in {
            "/v1/models": self.adapters.models,
            "/health": self._health,
            "/ping": self._health,
            "/version": self._version,
            "/metrics": self._metrics,
            "/load": self._load,
            "/admin/state": self._state,
        }.items():
            app.router.add_get(path, handler)
        app.router.add_post("/ping", self._health)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions/render", self._render_chat)
        app.router.add_post("/v1/completions/render", self._render_completions)
        app.router.add_post("/v1/load_lora_adapter", self.adapters.load)
        app.router.add_post("/v1/unload_lora_adapter", self.adapters.unload)
        app.router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        app.router.add_route("*", "/admin/faults", self._faults)
        return app

    # Around every request.

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the header that names the engine."""
        del request
        response.headers["x-inference-port"] = str(self.port)
        response.headers["x-inference-pod"] = self.settings.pod or f"engine-{self.port}"

    @web.middleware
    async def _around(self, request: web.Request, handler: responses.Handler) -> web.StreamResponse:
        """Middleware: counts requests, applies faults, answers unknown paths as FastAPI does."""
        path, began = request.path, time.monotonic()
        handled = path if request.match_info.http_exception is None else "none"
        counted = path not in exposition.UNCOUNTED and not path.startswith("/admin/")
        if counted:
            self.received[handled] = self.received.get(handled, 0) + 1
        inference = path in api_responses.SURFACES
        self.in_flight += inference
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            response = await self._apply_fault(request, handler, inference=inference)
        except web.HTTPException as error:
            response = responses.detail(error.status, error.reason)
        except ConnectionResetError:
            response = web.Response()  # the client left, which is no error of the server
        finally:
            self.in_flight -= inference
        if path == api_responses.MESSAGES_PATH:
            response = responses.to_anthropic_failure(response)
        if counted:
            self._http.observe(
                handled,
                request.method,
                status=response.status,
                seconds=time.monotonic() - began,
                sizes=(request.content_length or 0, response.content_length or 0),
            )
        return response

    async def _apply_fault(
        self, request: web.Request, handler: responses.Handler, *, inference: bool
    ) -> web.StreamResponse:
        """Apply a fault to the answer: from a header on any path, armed ones on inference only."""
        if request.path.startswith("/admin/"):
            return await handler(request)
        fault, header = None, request.headers.get("x-engine-fault")
        if header:
            try:
                fault = faults.parse(header, faults.REQUEST_KINDS)
            except errors.ConfigError as error:
                return responses.bad_request(str(error))
        elif inference:
            fault = self.faults.hit(faults.REQUEST_KINDS, time.monotonic())
        if fault is not None:
            answered = await responses.apply_fault(request, fault)
            if answered is not None:
                return answered
        if "x-engine-echo" in request.headers:
            return await responses.echo(request)
        if inference and not self.faults.ready(time.monotonic()):
            return responses.failure("The engine is starting", "ServiceUnavailable", 503)
        if inference and request.method == "POST":
            return await self._infer(request, fault)
        return await handler(request)

    # Inference.

    async def _infer(
        self, request: web.Request, fault: faults.Fault | None = None
    ) -> web.StreamResponse:
        """Handle any generating API; faults that strike during generation apply here."""
        surface, body = api_responses.SURFACES[request.path], await request.read()
        try:
            ask = surface.read(body)
        except _UNREADABLE as error:
            return responses.bad_request(str(error))
        name = self.settings.model if ask.model is None else ask.model
        adapter = name if name in self.adapters.names else ""
        if not adapter and name != self.settings.model:
            message = f"The model `{name}` does not exist."
            return responses.failure(message, "NotFoundError", 404, "model")
        rank = self._rank_of(request)
        if rank is None:
            return responses.bad_request(
                f"data_parallel_rank {request.headers[_RANK]} is out of range "
                f"[0, {len(self.ranks)})."
            )
        limit = self.engine.profile.longest - prompt.count(ask.prompt)
        tokens = self.settings.output_tokens if ask.max_tokens is None else ask.max_tokens
        if tokens < 1:
            return responses.bad_request(f"max_tokens must be at least 1, got {tokens}.")
        turn = responses.GenerationExchange(
            ask=ask,
            writer=surface.writer,
            id=request.headers.get("x-request-id") or f"{self._rng.getrandbits(128):032x}",
            name=name,
            adapter=adapter,
            tokens=max(1, min(tokens, limit)),
            show_cached=self.settings.show_cached,
            fault=fault if fault is not None and fault.kind.endswith("-after") else None,
        )
        rank.received += 1
        return await responses.generate(request, rank.runner, turn, rank.publisher)

    def _rank_of(self, request: web.Request) -> EngineRank | None:
        """The rank that a request names, or the one with the least to do; None for no such rank."""
        named = request.headers.get(_RANK, "")
        if not named:
            return min(self.ranks, key=lambda rank: rank.load)
        if not (named.isascii() and named.isdigit() and len(named) < 5):
            return None
        return self.ranks[int(named)] if int(named) < len(self.ranks) else None

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        """Count tokens; the ids are the 4-byte words themselves."""
        try:
            text = api_requests.tokenize(await request.read()).prompt
        except _UNREADABLE as error:
            return responses.bad_request(str(error))
        ids = prompt.token_ids(text)
        longest = self.settings.profile.max_model_len
        return web.json_response({"count": len(ids), "max_model_len": longest, "tokens": ids})

    async def _render_chat(self, request: web.Request) -> web.StreamResponse:
        """Tokens of a chat request, as vLLM renders it."""
        return await _render(request, api_requests.chat)

    async def _render_completions(self, request: web.Request) -> web.StreamResponse:
        """Tokens of a completions request: a list with a single prompt."""
        return await _render(request, api_requests.completions)

    # About the engine.

    async def _health(self, request: web.Request) -> web.StreamResponse:
        """200 without a body, or 503 while not ready."""
        del request
        return web.Response(status=200 if self.faults.ready(time.monotonic()) else 503)

    async def _version(self, request: web.Request) -> web.StreamResponse:
        """The version whose behavior is simulated."""
        del request
        return web.json_response({"version": _VERSION})

    async def _load(self, request: web.Request) -> web.StreamResponse:
        """Inference requests in the server."""
        del request
        return web.json_response({"server_load": self.in_flight})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        """Answer with the metrics page, or the page as altered by a fault."""
        del request
        fault = self.faults.hit(faults.METRICS_KINDS, time.monotonic())
        kind = "" if fault is None else fault.kind
        body = self._page.render()
        self._frozen = (self._frozen or body) if kind == "metrics-freeze" else None
        if fault is not None and kind == "metrics-slow":
            await asyncio.sleep(fault.value)
        if kind == "metrics-garble":
            body = (
                b'<html>vllm:num_requests_running{engine="0" NaN\x00\xff\n}{} 1 2 3\n' + body[::-1]
            )
        status = int(fault.value) if fault is not None and kind == "metrics-status" else 200
        return web.Response(
            status=status,
            body=b"" if kind == "metrics-empty" else self._frozen or body,
            headers={"Content-Type": exposition.CONTENT_TYPE},
        )

    # Changing it.

    async def _reset_prefix_cache(self, request: web.Request) -> web.StreamResponse:
        """Evict every unreferenced cached block, as vLLM does in development mode."""
        del request
        for rank in self.ranks:
            rank.engine.pool.clear()
            rank.publish()
        return web.Response()

    async def _faults(self, request: web.Request) -> web.StreamResponse:
        """GET lists, POST adds, PUT replaces, DELETE clears: `{"faults": ["status=503,count=2"]}`."""
        now = time.monotonic()
        if request.method in {"PUT", "POST"}:
            try:
                read = msgspec.json.decode(await request.read(), type=dict[str, list[str]])
                new = [faults.parse(text) for text in read["faults"]]
            except (msgspec.DecodeError, errors.ConfigError, KeyError) as error:
                return responses.bad_request(f'expected {{"faults": [...]}}: {error}')
            if request.method == "PUT":
                self.faults.clear()
            self.faults.arm(new, now)
        elif request.method == "DELETE":
            self.faults.clear()
        return web.json_response({"faults": [str(fault) for fault in self.faults.armed(now)]})

    async def _state(self, request: web.Request) -> web.StreamResponse:
        """Answer with the engine state as JSON, for tests."""
        del request
        engine = self.engine
        return web.json_response(
            {
                "running": engine.running,
                "waiting": engine.waiting,
                "deferred": engine.deferred,
                "kv_blocks": engine.pool.size,
                "kv_blocks_used": engine.pool.used,
                "kv_blocks_cached": engine.pool.cached,
                "prefix_queries": engine.prefix_queries,
                "prefix_hits": engine.prefix_hits,
                "preemptions": engine.preemptions,
                "adapters": engine.slots.resident,
                "received": self.received,
                "ended": {
                    key.partition("/")[2]: count
                    for key, count in self.stats.totals.items()
                    if key.startswith("request_success/")
                },
                "in_flight": self.in_flight,
                "most_in_flight": self.most_in_flight,
                "fault_hits": self.faults.hits,
                "ranks": [
                    {
                        "received": rank.received,
                        "running": rank.engine.running,
                        "waiting": rank.engine.waiting,
                        "prefix_queries": rank.engine.prefix_queries,
                        "prefix_hits": rank.engine.prefix_hits,
                    }
                    for rank in self.ranks
                ],
            }
        )


@contextlib.asynccontextmanager
async def serving(
    settings: EngineServerSettings, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[EngineServer]:
    """A running server; leaving stops it at once, whatever is in flight.

    Args:
        port: Port; 0 picks a free one, which is then `EngineServer.port`.

    Raises:
        OSError: The port is taken.
        ConfigError: A port of KV events is.
    """
    server = EngineServer(settings)
    runner = web.AppRunner(
        server.app(),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=settings.keepalive_s,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=1024)
        await site.start()
        server.port = runner.addresses[0][1]
        # Before the group, which would wrap the error of a taken port.
        for rank in server.ranks:
            if rank.publisher is not None:
                rank.publisher.bind(host)
        async with asyncio.TaskGroup() as group:
            tasks = []
            for rank in server.ranks:
                tasks.append(group.create_task(rank.runner.run(), name="engine-steps"))
                if rank.publisher is not None:
                    tasks.append(group.create_task(rank.publisher.run(), name="engine-kv-events"))
            yield server
            for task in tasks:
                task.cancel()
    finally:
        await runner.cleanup()
        for rank in server.ranks:
            if rank.publisher is not None:
                rank.publisher.close()


async def _render(
    request: web.Request, read: Callable[[bytes], api_requests.GenerationRequest]
) -> web.StreamResponse:
    try:
        text = read(await request.read()).prompt
    except _UNREADABLE as error:
        return responses.bad_request(str(error))
    rendered = {"token_ids": prompt.token_ids(text), "features": None}
    is_chat = read is api_requests.chat
    return web.json_response(rendered if is_chat else [rendered])
