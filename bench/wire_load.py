"""A lean HTTP/1.1 backend and closed-loop client, so that the measured server is the bottleneck.

Both are asyncio protocols over uvloop that understand just what these benches send. All traffic
stays on 127.0.0.1.

    python bench/wire_load.py backend PORT [--body-bytes N] [--chunks N]
"""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

#: How long a chunked answer takes.
STREAM_S = 2.0


class WireBackend(asyncio.Protocol):
    """Reads a whole request, answers 200; chunked answers of `chunks` pieces if asked."""

    def __init__(self, *, chunks: int) -> None:
        self._buffer = bytearray()
        self._searched = 0
        payload = b'{"ok":true}'
        if chunks:
            piece = b"data: {}\n\n"
            self._answer = (
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            self._pieces = [b"%x\r\n%b\r\n" % (len(piece), piece)] * chunks + [b"0\r\n\r\n"]
        else:
            self._answer = (
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(payload), payload)
            )
            self._pieces = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            end = _request_end(self._buffer, self._searched)
            self._searched = 0 if end else len(self._buffer)
            if not end:
                return
            del self._buffer[:end]
            if self._pieces:
                asyncio.get_running_loop().create_task(self._stream())
            else:
                self._transport.write(self._answer)

    async def _stream(self) -> None:
        """Spread the pieces over the time, so that answers of few and of many last the same."""
        self._transport.write(self._answer)
        pause_s = STREAM_S / len(self._pieces)
        for piece in self._pieces:
            if self._transport.is_closing():
                return
            self._transport.write(piece)
            await asyncio.sleep(pause_s)


def _request_end(buffer: bytearray, searched: int = 0) -> int:
    """End of the first complete message; 0 if there is none yet.

    Args:
        searched: Bytes in which no end was found before: a body of 64 MiB comes in hundreds of pieces,
            and to search all of it for each would hold the other connections for seconds.
    """
    head = buffer.find(b"\r\n\r\n")
    if head < 0:
        return 0
    lower = bytes(buffer[:head]).lower()
    at = lower.find(b"content-length:")
    if at >= 0:
        length = int(lower[at + 15 : lower.find(b"\r", at) if b"\r" in lower[at:] else None])
        return head + 4 + length if len(buffer) >= head + 4 + length else 0
    if b"transfer-encoding: chunked" in lower:
        done = buffer.find(b"0\r\n\r\n", max(head + 2, searched - 4))
        return done + 5 if done >= 0 else 0
    return head + 4


class WireClient(asyncio.Protocol):
    """One connection that sends the same request again and again."""

    def __init__(
        self, request: bytes, done: asyncio.Event, stats: list[float], stop_at: float
    ) -> None:
        self._request = request
        self._done = done
        self._stats = stats
        self._stop_at = stop_at
        self._buffer = bytearray()
        self.failed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = _request_end(self._buffer)
        if not end:
            return
        now = time.perf_counter()
        if not self._buffer.startswith(b"HTTP/1.1 200"):
            self.failed += 1
        self._stats.append(now - self._sent)
        del self._buffer[:end]
        if now < self._stop_at:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        self._done.set()


async def load(port: int, request: bytes, *, connections: int, seconds: float) -> dict[str, float]:
    """Closed loop; returns requests, seconds, failures and latency percentiles (seconds)."""
    loop = asyncio.get_running_loop()
    stats: list[float] = []
    stop_at = time.perf_counter() + seconds
    started = time.perf_counter()
    clients = []
    events = []
    for _ in range(connections):
        done = asyncio.Event()
        events.append(done)
        _, client = await loop.create_connection(
            lambda done=done: WireClient(request, done, stats, stop_at), "127.0.0.1", port
        )
        clients.append(client)
    await asyncio.gather(*(done.wait() for done in events))
    took = time.perf_counter() - started
    stats.sort()
    count = len(stats)
    return {
        "requests": count,
        "seconds": took,
        "failed": sum(client.failed for client in clients),
        "p50": stats[count // 2],
        "p95": stats[int(count * 0.95)],
        "p99": stats[int(count * 0.99)],
        "max": stats[-1],
    }


def post(path: str, body: bytes) -> bytes:
    """A keep-alive POST of a JSON body."""
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return (head + f"content-length: {len(body)}\r\n\r\n").encode() + body


async def backend(port: int, *, chunks: int) -> None:
    """Serve for ever."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: WireBackend(chunks=chunks), "127.0.0.1", port)
    print(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(backend(int(sys.argv[2]), chunks=int(sys.argv[3]) if len(sys.argv) > 3 else 0))
