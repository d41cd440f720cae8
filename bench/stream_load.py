"""A lean HTTP/2 client of ext_proc: one stream at a time on each connection, in a closed loop or at a rate.

It speaks what Envoy does for a request of FULL_DUPLEX_STREAMED: the headers and the body, then, once
the body came back, the response headers and the end of the stream. Everything else of HTTP/2 that a
server may send is skipped by its length.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
from collections.abc import Sequence
from typing import cast

from extproc.http2 import frames

#: Method of ext_proc.
METHOD = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_STARTED_S = 30.0

#: `x-request-id` of requests, whose end is a number of its own in each stream.
REQUEST_ID = b"b8e1c1e2-0000-4000-8000-1234567890ab"
_numbers = itertools.count()


def _field(name: bytes, value: bytes) -> bytes:
    """A header field as a literal without indexing."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


#: POST, http, and the rest as literals.
HEADER_BLOCK = b"\x83\x86" + b"".join(
    _field(name, value)
    for name, value in (
        (b":path", METHOD),
        (b":authority", b"bench"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)


def framed(messages: Sequence[bytes]) -> bytes:
    """Messages of gRPC with their lengths."""
    return b"".join(struct.pack(">BI", 0, len(message)) + message for message in messages)


class StreamClient(asyncio.Protocol):
    """One connection.

    Args:
        request: Framed messages of headers and body.
        response: Framed message of the response headers.
        body_bytes: Size of the body, which comes back.
        stop_at: When to begin no further stream (`time.perf_counter`).
        times: Seconds of each stream; filled here.
        interval_s: Seconds from one stream to the next; 0 begins the next one at once. A stream that
            takes longer delays the next one.
        delay_s: Seconds to the first stream.
    """

    def __init__(
        self,
        request: bytes,
        response: bytes,
        body_bytes: int,
        *,
        stop_at: float,
        times: list[float],
        interval_s: float = 0.0,
        delay_s: float = 0.0,
    ) -> None:
        self._interval_s = interval_s
        self._due_s = time.perf_counter() + delay_s
        self._request = request
        self._response = response
        self._body_bytes = body_bytes
        self._stop_at = stop_at
        self._times = times
        self.done = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport
        self._buffer = b""
        self._stream_id = -1
        self._initial_window = frames.DEFAULT_WINDOW_BYTES
        self._stream_window = 0
        self._window = frames.DEFAULT_WINDOW_BYTES
        self._unsent = b""
        self._unsent_at = 0
        self._received = self._unacknowledged = 0
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open all windows, and begin once the server's settings came."""
        self._transport = cast("asyncio.Transport", transport)
        most = frames.MAX_WINDOW_BYTES
        self._transport.write(
            frames.PREFACE
            + frames.build_settings([(frames.INITIAL_WINDOW_SIZE, most)])
            + frames.build_window_update(0, most - frames.DEFAULT_WINDOW_BYTES)
        )

    def connection_lost(self, error: Exception | None) -> None:
        """Fail, unless it is over."""
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        """Handle frames."""
        data = self._buffer + data
        at, end = 0, len(data)
        while end - at >= frames.HEAD_BYTES:
            high, low, kind, flags, stream_id = frames.unpack_head(data, at)
            start = at + frames.HEAD_BYTES
            stop = start + (high << 8 | low)
            if stop > end:
                break
            at = stop
            if kind == frames.DATA:
                self._on_data(stop - start)
            elif kind == frames.HEADERS:
                if flags & frames.END_STREAM:
                    self._on_end()
            else:
                self._on_control(kind, flags, stream_id, data[start:stop])
        self._buffer = data[at:]

    def _on_data(self, size: int) -> None:
        self._received += size
        self._unacknowledged += size
        if self._unacknowledged > 1 << 30:
            self._transport.write(frames.build_window_update(0, self._unacknowledged))
            self._unacknowledged = 0
        if self._received >= self._body_bytes and not self._is_answered:
            self._is_answered = True
            self._write_data(self._response)
            self._transport.write(
                frames.build_frame(frames.DATA, frames.END_STREAM, self._stream_id)
            )

    def _on_end(self) -> None:
        assert self._is_answered, "the stream ended before the body came back"
        self._times.append(time.perf_counter() - self._sent)
        self._due_s = max(self._due_s + self._interval_s, time.perf_counter())
        if self._due_s < self._stop_at:
            self._begin_when_due()
        else:
            self.done.set_result(None)
            self._transport.close()

    def _begin_when_due(self) -> None:
        delay_s = self._due_s - time.perf_counter()
        if delay_s > 0.0:
            asyncio.get_running_loop().call_later(delay_s, self._begin)
        else:
            self._begin()

    def _on_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.SETTINGS and not flags & frames.ACK:
            for name, value in frames.read_settings(payload):
                if name == frames.INITIAL_WINDOW_SIZE:
                    self._stream_window += value - self._initial_window
                    self._initial_window = value
            self._transport.write(frames.build_frame(frames.SETTINGS, frames.ACK, 0))
            if self._stream_id < 0:
                self._begin_when_due()
        elif kind == frames.PING and not flags & frames.ACK:
            self._transport.write(frames.build_frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.WINDOW_UPDATE:
            more = frames.read_number(payload)
            if not stream_id:
                self._window += more
            elif stream_id == self._stream_id:
                self._stream_window += more
            self._send()
        elif kind in (frames.RST_STREAM, frames.GOAWAY):
            raise ConnectionError(f"the server sent a frame of type {kind}: {payload!r}")

    def _begin(self) -> None:
        self._stream_id += 2
        self._stream_window = self._initial_window
        self._received, self._is_answered = 0, False
        self._sent = time.perf_counter()
        self._transport.write(
            frames.build_frame(frames.HEADERS, frames.END_HEADERS, self._stream_id, HEADER_BLOCK)
        )
        number = f"{next(_numbers) % 16**12:012x}".encode()
        self._write_data(self._request.replace(REQUEST_ID, REQUEST_ID[:-12] + number, 1))

    def _write_data(self, data: bytes) -> None:
        self._unsent, self._unsent_at = data, 0
        self._send()

    def _send(self) -> None:
        """Send what the windows allow."""
        output = []
        while True:
            left = len(self._unsent) - self._unsent_at
            size = min(left, frames.DEFAULT_FRAME_BYTES, self._window, self._stream_window)
            if size <= 0:
                break
            part = self._unsent[self._unsent_at : self._unsent_at + size]
            output.append(frames.build_frame(frames.DATA, 0, self._stream_id, part))
            self._unsent_at += size
            self._window -= size
            self._stream_window -= size
        if output:
            self._transport.write(b"".join(output))


async def load_streams(
    port: int,
    request: bytes,
    response: bytes,
    *,
    body_bytes: int,
    connections: int,
    seconds: float,
    rate_per_s: float = 0.0,
    times: list[float] | None = None,
) -> dict[str, float]:
    """Streams on `connections`; requests, seconds and percentiles of latency (seconds).

    Args:
        rate_per_s: Streams per second on all connections; 0 for a closed loop.
        times: Filled with the seconds of each stream at its end.
    """
    interval_s = connections / rate_per_s if rate_per_s else 0.0
    loop = asyncio.get_running_loop()
    times = [] if times is None else times
    started = time.perf_counter()
    clients = []
    for number in range(connections):
        _, client = await loop.create_connection(
            lambda number=number: StreamClient(
                request,
                response,
                body_bytes,
                stop_at=started + seconds,
                times=times,
                interval_s=interval_s,
                delay_s=interval_s * number / connections,
            ),
            "127.0.0.1",
            port,
        )
        clients.append(client)
    await asyncio.wait_for(asyncio.gather(*(it.done for it in clients)), seconds + _STARTED_S)
    took = time.perf_counter() - started
    times.sort()
    return {
        "requests": len(times),
        "seconds": took,
        "failed": 0,
        "p50": times[len(times) // 2],
        "p99": times[int(len(times) * 0.99)],
    }
