"""HTTP responses of an engine: one generation streamed or whole, errors, faults, body echo."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from extproc.simulator import api_requests, api_responses, engine_request, faults, prompt
from extproc.simulator.http import engine_runner
from extproc.simulator.http.kv_publisher import KvPublisher

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_JSON = {"Content-Type": "application/json"}
_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_BUSY = (
    "The engine is currently busy and cannot take more requests. "
    "Please try again later or use a different instance."
)


class GenerationExchange(msgspec.Struct, frozen=True, kw_only=True):
    """One inference request that can be answered.

    Attributes:
        ask: What is asked.
        writer: How its API answers.
        id: Request id without the API's prefix.
        name: The model name to answer with.
        adapter: The LoRA adapter; empty for the base model.
        tokens: Output tokens to generate.
        show_cached: Whether usage tells the cached tokens.
        fault: `reset-after` or `stall-after`, if it is to end that way.
    """

    ask: api_requests.GenerationRequest
    writer: api_responses.ResponseWriter
    id: str
    name: str
    adapter: str
    tokens: int
    show_cached: bool
    fault: faults.Fault | None = None

    def answer(self, text: str, *, cached_tokens: int) -> api_responses.GenerationAnswer:
        """The answer with this text."""
        return api_responses.GenerationAnswer(
            id=self.id,
            model=self.name,
            created=int(time.time()),
            prompt_tokens=prompt.count(self.ask.prompt),
            cached_tokens=cached_tokens if self.show_cached else None,
            text=text,
            output_tokens=self.tokens,
            finish=self.finish,
        )

    @property
    def finish(self) -> str:
        """Finish reason; a request with a maximum of tokens always reaches it."""
        return "stop" if self.ask.max_tokens is None else "length"


def failure(message: str, kind: str, status: int, param: str | None = None) -> web.Response:
    """An error as vLLM words it."""
    body = api_responses.failure(message, kind, status, param)
    return web.Response(status=status, body=body, headers=_JSON)


def to_anthropic_failure(response: web.StreamResponse) -> web.StreamResponse:
    """A failure in the form of Anthropic's API; other responses as they are."""
    body = response.body if isinstance(response, web.Response) else None
    if not isinstance(body, bytes) or not body.startswith(b'{"error":'):
        return response
    body = api_responses.anthropic_failure(body)
    return web.Response(status=response.status, body=body, headers=_JSON)


def bad_request(message: str) -> web.Response:
    """The body or a header cannot be understood."""
    return failure(message, "BadRequestError", 400)


def detail(status: int, reason: str) -> web.Response:
    """An error as FastAPI words it: unknown path, wrong method."""
    body = msgspec.json.encode({"detail": reason})
    return web.Response(status=status, body=body, headers=_JSON)


async def generate(
    request: web.Request,
    runner: engine_runner.Runner,
    turn: GenerationExchange,
    publisher: KvPublisher | None = None,
) -> web.StreamResponse:
    """Run a turn through the engine and answer it."""
    profile, prompt_text = runner.engine.profile, turn.ask.prompt
    if (
        prompt.count(prompt_text) + turn.tokens > profile.longest
    ):  # before hashing what may be megabytes
        return bad_request(
            f"This model's maximum context length is {profile.longest} tokens. However, you "
            f"requested {prompt.count(prompt_text) + turn.tokens} tokens in the messages and completion."
        )
    text = prompt.answer(prompt_text, turn.tokens)
    salt = f"{turn.adapter}\n{turn.ask.salt}"
    conversation = prompt_text + text.encode()
    new = engine_request.EngineRequest(
        runner.next_id(),
        prompt.count(prompt_text),
        turn.tokens,
        prompt.hashes(conversation, salt=salt, block_tokens=profile.block_tokens),
        turn.adapter,
    )
    if publisher is not None:
        publisher.note(new.hashes, conversation, adapter=turn.adapter, salt=turn.ask.salt)
    generation = runner.submit(new, stream=turn.ask.stream)
    match generation:
        case engine_request.EngineRejection.BUSY:
            return failure(_BUSY, "ServiceUnavailableError", 503)
        case engine_request.EngineRejection.NO_LORA:
            return bad_request("LoRA is not enabled")
        case engine_request.EngineRejection.TOO_LONG:
            raise AssertionError(new)  # checked above
    try:
        if turn.ask.stream:
            return await _stream(request, generation, turn, text)
        await generation.end()
        if turn.fault is not None:
            await cut(request, turn.fault)
        answer = turn.answer(text, cached_tokens=generation.cached_tokens)
        headers = _JSON | _load_headers(request, runner)
        return web.Response(body=turn.writer.body(answer), headers=headers)
    finally:
        runner.close(generation, turn.finish)


async def _stream(
    request: web.Request, generation: engine_runner.Generation, turn: GenerationExchange, text: str
) -> web.StreamResponse:
    """Server-sent events as tokens come. The headers go out at once, as with a real server."""
    response = web.StreamResponse(headers=_EVENTS)
    await response.prepare(request)
    fault = turn.fault
    limit = generation.tokens if fault is None else min(int(fault.value), generation.tokens)
    encoded, size = text.encode(), prompt.BYTES_PER_TOKEN
    ready, num_sent = await generation.past(0), 0
    answer = turn.answer(text, cached_tokens=generation.cached_tokens)
    head, tail = turn.writer.frame(answer)
    pieces = turn.writer.opening(answer)
    while True:
        ready = min(ready, limit)
        pieces += head + encoded[num_sent * size : ready * size] + tail
        num_sent = ready
        if fault is not None and num_sent == limit:
            await response.write(pieces)
            await cut(request, fault)
        if num_sent == generation.tokens:
            usage = turn.ask.include_usage
            await response.write(pieces + turn.writer.closing(answer, include_usage=usage))
            await response.write_eof()
            return response
        await response.write(pieces)
        pieces = b""
        ready = await generation.past(num_sent)


def _load_headers(request: web.Request, runner: engine_runner.Runner) -> dict[str, str]:
    """Response headers with the ORCA load report, where the client requested one."""
    form = request.headers.get("endpoint-load-metrics-format", "").upper()
    waiting, usage = float(runner.engine.waiting), runner.engine.kv_usage
    if form == "TEXT":
        value = (
            f"TEXT named_metrics.num_requests_waiting={waiting}, "
            f"named_metrics.kv_cache_usage_perc={usage}"
        )
    elif form == "JSON":
        named = {"num_requests_waiting": waiting, "kv_cache_usage_perc": usage}
        value = "JSON " + msgspec.json.encode({"named_metrics": named}).decode()
    else:
        return {}
    return {"endpoint-load-metrics": value}


async def apply_fault(request: web.Request, fault: faults.Fault) -> web.StreamResponse | None:
    """Answer of a request fault, before the body is parsed; None lets the request go on."""
    match fault.kind:
        case "status":
            status = int(fault.value)
            return failure(f"Simulated status {status}", "SimulatedFault", status)
        case "sse-error":
            event = api_responses.failure_event(
                _BUSY, "ServiceUnavailableError", 503, path=request.path
            )
            return web.Response(body=event, headers=_EVENTS)
        case "reset":
            await cut(request, fault)
        case "hang":
            await request.read()
            await _forever()
        case "delay":
            await asyncio.sleep(fault.value)
    return None


async def cut(request: web.Request, fault: faults.Fault) -> None:
    """Reset the connection, or fall silent; either way only the client's leaving ends this."""
    transport = request.transport
    if fault.kind.startswith("reset") and transport is not None:
        # Lingering for no time turns the close into a reset, as a killed process would send.
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    await _forever()


async def _forever() -> None:
    """Wait until the client's leaving cancels the handler."""
    await asyncio.get_running_loop().create_future()


async def echo(request: web.Request) -> web.Response:
    """Answer with the hash and the size of the body as received."""
    digest, size = hashlib.sha256(), 0
    async for chunk in request.content.iter_any():
        digest.update(chunk)
        size += len(chunk)
    body = msgspec.json.encode({"sha256": digest.hexdigest(), "bytes": size})
    return web.Response(body=body, headers=_JSON)
