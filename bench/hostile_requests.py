"""Hostile requests and clients, for bench.hostile and bench.chaos.

Each kind of body is one that costs a parser more than its size, or that a parser might trip over.
Each kind of client takes a port on loopback and does what no well-behaved client does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import msgspec

from tests.e2e import http1

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
UPLOAD = "/v1/audio/transcriptions"

#: Longest header value that Envoy takes with its default limit of 60 KiB for all headers.
_HEADER_BYTES = 50 * 1024

#: A message that nothing is wrong with, and the field that holds it alone.
_MESSAGE = {"role": "user", "content": "x"}
_SHORT = b'"messages":[%b],' % json.dumps(_MESSAGE).encode()

#: Seconds that any one hostile request may take before its client gives up.
PATIENCE_S = 30.0


class Request(msgspec.Struct, frozen=True):
    """One request as a client sends it.

    Attributes:
        path: Request path.
        body: Sent with its length.
        headers: Further headers.
    """

    path: str
    body: bytes
    headers: Sequence[tuple[str, str]] = ()


def harmless(size_bytes: int) -> Request:
    """A chat with one long message of plain words."""
    text = "the quick brown fox jumps over the lazy dog " * (size_bytes // 44 + 1)
    return Request(CHAT, _chat([{"role": "user", "content": text[:size_bytes]}]))


def hostile(size_bytes: int) -> dict[str, Request]:
    """One request of each kind, by name.

    Args:
        size_bytes: About the size of each body.
    """
    return {
        "messages of {}": _build(CHAT, b'"messages":[', b"{}", size_bytes),
        "parts of {}": _build(
            CHAT, b'"messages":[{"role":"user","content":[', b"{}", size_bytes, 2
        ),
        "metadata of {}": _build(CHAT, _SHORT + b'"metadata":[', b"{}", size_bytes),
        "metadata of keys": _keys(size_bytes),
        "prompt of numbers": _build(TEXT, b'"prompt":[', b"1", size_bytes),
        "prompt of lists": _build(TEXT, b'"prompt":[', b"[1]", size_bytes),
        "tools of {}": _build(CHAT, _SHORT + b'"tools":[', b"{}", size_bytes),
        "backslashes": Request(CHAT, b'{"model":"m","messages":"' + b"\\" * size_bytes),
        "surrogates": Request(CHAT, _chat("\\ud800" * (size_bytes // 6), raw=True)),
        "deep lists": Request(CHAT, b'{"messages":' + b"[" * size_bytes),
        "deep objects": Request(CHAT, b'{"a":' * (size_bytes // 5)),
        "many multipart parts": _multipart(size_bytes),
        "long model name": Request(TEXT, _json(model="m" * size_bytes, prompt="x")),
        "long adapter name": Request(TEXT, _json(model="m", lora_path="a" * size_bytes)),
        "long session": Request(TEXT, _json(model="m", prompt="x", user="u" * size_bytes)),
        "long headers": _headers(),
        "numbers of any size": Request(TEXT, _numbers()),
        "wrong types": Request(CHAT, b'{"model":[1],"messages":{"role":[]},"user":{"a":1}}'),
        "invalid UTF-8": Request(TEXT, b'{"model":"m","prompt":"' + b"\xff\xfe" * 500 + b'"}'),
        "NUL bytes": Request(CHAT, b"\0" * size_bytes),
        "no JSON": Request(CHAT, random.Random(1).randbytes(size_bytes)),
    }


def names() -> Iterator[Request]:
    """Requests without end, of which each names another model and another session."""
    for at in itertools.count():
        model = f"model-{at}-" + "n" * 400
        yield Request(TEXT, _json(model=model, prompt="x", user=f"user-{at}"))


def prompts() -> Iterator[Request]:
    """Harmless requests without end, no two of which have the same prompt."""
    for at in itertools.count():
        yield Request(CHAT, _chat([{"role": "user", "content": f"question {at} " * 100}]))


async def send(port: int, request: Request) -> str:
    """Send a request to its end; the status, or what went wrong."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer = await http1.ask(port, request.path, request.body, headers=request.headers)
    except TimeoutError:
        return "timeout"
    except (OSError, AssertionError, asyncio.IncompleteReadError):
        return "closed"
    return str(answer.status)


async def flood(port: int, data: bytes) -> str:
    """Send bytes to a port of gRPC until the connection is closed, or nothing more comes of it."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(data)
                await writer.drain()
                while await reader.read(1 << 16):
                    pass
            finally:
                writer.transport.abort()
    except TimeoutError:
        return "open"
    except OSError:
        return "reset"
    return "closed"


#: A client on a port; returns the status, or what became of it.
Client = Callable[[int, random.Random], Awaitable[str]]


async def stall(port: int, rng: random.Random) -> str:
    """Send half of a large body, and then nothing."""
    size = rng.choice((2_000, 200_000, 2_000_000))
    return await _partly(port, size, size // 2, hold_s=rng.uniform(1.0, 4.0))


async def drip(port: int, rng: random.Random) -> str:
    """Send a body of a few bytes, a byte now and then."""
    with contextlib.suppress(OSError):
        async with http1.calling(port) as call:
            await call.start("POST", TEXT, [], chunked=True)
            for _ in range(rng.randint(5, 40)):
                await call.chunk(b"{")
                await asyncio.sleep(0.05)
            call.cut()
    return "cut"


async def vanish(port: int, rng: random.Random) -> str:
    """Reset the connection anywhere: in the head, in the body, or while the answer comes."""
    body = harmless(rng.choice((100, 10_000, 500_000))).body
    return await _partly(port, len(body), rng.choice((0, len(body) // 3, len(body))), body=body)


async def flood_headers(port: int, rng: random.Random) -> str:
    """Send headers as long as Envoy lets them be, of every name that means something."""
    del rng
    return await send(port, _headers())


#: Every kind of client that is not just a body.
CLIENTS: Mapping[str, Client] = {
    "stalled uploads": stall,
    "dripping uploads": drip,
    "vanished clients": vanish,
    "long headers": flood_headers,
}


async def _partly(
    port: int, size: int, sent: int, *, body: bytes = b"", hold_s: float = 0.0
) -> str:
    """Send part of a body, wait, and reset the connection."""
    with contextlib.suppress(OSError):
        async with http1.calling(port) as call:
            await call.start("POST", CHAT, [("content-length", str(size))])
            if sent:
                await call.send((body or b'{"model":"m","x":"' + b"x" * size)[:sent])
            await asyncio.sleep(hold_s)
            call.cut()
    return "cut"


def _json(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def _chat(content: object, *, raw: bool = False) -> bytes:
    if raw:
        start = b'{"model":"m","messages":[{"role":"user","content":"'
        return start + str(content).encode() + b'"}]}'
    return _json(model="m", messages=content, max_tokens=16)


def _build(path: str, start: bytes, item: bytes, size_bytes: int, depth: int = 1) -> Request:
    """A body that repeats an item; `depth` lists are open at its end, the last in an object."""
    items = b",".join([item] * (size_bytes // (len(item) + 1)))
    return Request(path, b'{"model":"m",' + start + items + b"]" + b"}]" * (depth - 1) + b"}")


def _keys(size_bytes: int) -> Request:
    metadata = {f"k{at}": at for at in range(size_bytes // 18)}
    return Request(CHAT, _json(model="m", messages=[_MESSAGE], metadata=metadata))


def _multipart(size_bytes: int) -> Request:
    part = b'--b\r\ncontent-disposition: form-data; name="x"\r\n\r\nv\r\n'
    body = part * (size_bytes // len(part)) + b"--b--\r\n"
    return Request(UPLOAD, body, [("content-type", "multipart/form-data; boundary=b")])


def _headers() -> Request:
    part = "h" * (_HEADER_BYTES // 5)
    named = ("x-session-id", "x-request-id", "x-llm-d-model-name-rewrite", "traceparent", "x-any")
    return Request(TEXT, _json(model="m", prompt="x"), [(name, part) for name in named])


def _numbers() -> bytes:
    huge = b"9" * 4000
    fields = (b"max_tokens", b"max_completion_tokens", b"priority", b"n", b"seed", b"temperature")
    inside = b",".join(b'"%b":%b' % (name, huge) for name in fields)
    return b'{"model":"m","prompt":[%b,1e308,-1],"top_p":1e308,%b}' % (huge, inside)
