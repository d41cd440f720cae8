"""An engine that serves requests and whose metrics pages lie, fail, hang or are far too large.

python -m bench.hostile_engine KIND [--host IP]

KIND is one of `PAGES`, or `all` for another one at each scrape.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

from tests.e2e import http1

#: Seconds an answer takes.
ANSWER_S = 0.05

#: Bytes of a page that is too large, and seconds between two bytes of one that drips.
_LARGE_BYTES = 50 << 20
_DRIP_S = 0.2

#: What a page is sent in.
_PIECE = b'vllm:num_requests_waiting{model_name="demo",pod="x"} 1\n' * 1000


def _gauges(value: str) -> bytes:
    """A page whose every number is one value."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    lines = [f'vllm:{name}{{model_name="demo"}} {value}' for name in names]
    lines += [f'vllm:{name}_total{{model_name="demo"}} {value}' for name in ("prompt_tokens",)]
    lines.append(f'vllm:cache_config_info{{block_size="{value}",num_gpu_blocks="{value}"}} 1')
    lines.append(f'vllm:lora_requests_info{{max_lora="{value}",running_lora_adapters="a"}} {value}')
    return ("\n".join(lines) + "\n").encode()


#: A page as others have it.
GAUGES = _gauges("1")


def _adapters() -> bytes:
    names = ",".join(f"adapter-{at}" for at in range(100_000))
    return f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{names}"}} 1\n'.encode()


def chunked(body: bytes) -> bytes:
    """An answer in chunks of a byte."""
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"1\r\n%c\r\n" % byte for byte in body)


#: Answers that are more framing than content.
FRAMES: dict[str, bytes] = {
    "tiny chunks": chunked(b"x" * 1_000_000),
    "interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" * 300_000,
}

#: Pages by kind. None: the page drips and never ends.
PAGES: dict[str, Callable[[], bytes] | None] = {
    "overflow": lambda: _gauges("1e300"),
    "largest": lambda: _gauges("1.7e308"),
    "NaN": lambda: _gauges("NaN"),
    "infinite": lambda: _gauges("+Inf"),
    "negative": lambda: _gauges("-1e300"),
    "adapters": _adapters,
    "garbage": lambda: bytes(range(256)) * 400,
    "half": lambda: GAUGES[:-9],
    "large": lambda: b"",
    "drip": None,
    **{kind: partial(FRAMES.__getitem__, kind) for kind in FRAMES},
}


class HostileEngine:
    """Answers on one address.

    Args:
        kind: Of its pages.
    """

    def __init__(self, kind: str) -> None:
        self._pages: Iterator[str] = itertools.cycle([*PAGES] if kind == "all" else [kind])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, AssertionError):
            while (head := await http1.read_head(reader)) is not None:
                await http1.Body(reader, head).rest()
                await self.answer(writer, head.line.split()[1])
                await writer.drain()
        writer.close()

    async def answer(self, writer: asyncio.StreamWriter, path: str) -> None:
        """Answer a request for a path."""
        if path == "/metrics":
            await self._page(writer)
        elif path == "/v1/models":
            say(writer, json.dumps(_models()).encode())
        else:
            await asyncio.sleep(ANSWER_S)
            say(writer, _answer())

    async def _page(self, writer: asyncio.StreamWriter) -> None:
        kind = next(self._pages)
        make = PAGES[kind]
        if kind in FRAMES:
            return writer.write(FRAMES[kind])
        if make is not None and kind != "large":
            return say(writer, make())
        size = _LARGE_BYTES - _LARGE_BYTES % len(_PIECE)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        async for piece in _pieces(size, drips=make is None):
            writer.write(piece)
            await writer.drain()
        return None


async def _pieces(size: int, *, drips: bool) -> AsyncIterator[bytes]:
    if not drips:
        for _ in range(size // len(_PIECE)):
            yield _PIECE
        return
    for byte in itertools.cycle(_PIECE):
        yield bytes([byte])
        await asyncio.sleep(_DRIP_S)


def say(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Answer with a body."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)


def _models() -> object:
    return {"data": [{"id": "demo"}, {"id": "n" * 2000}, {"id": 7}, {"id": "\ud800"}, {}, None]}


def _answer() -> bytes:
    usage = b'{"prompt_tokens":%b,"completion_tokens":1e308,"total_tokens":-1}' % (b"9" * 400)
    return b'{"id":"x","model":"demo","choices":[{"index":0,"text":"a"}],"usage":%b}' % usage


async def main(kind: str, host: str) -> None:
    """Serve until the process ends."""
    server = await asyncio.start_server(HostileEngine(kind).serve, host, 0)
    print("listening on {}:{}".format(*server.sockets[0].getsockname()[:2]), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    where = sys.argv[sys.argv.index("--host") + 1] if "--host" in sys.argv else "127.0.0.1"
    asyncio.run(main(sys.argv[1], where))
