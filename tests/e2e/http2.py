"""One HTTP/2 request by hand: with trailers, and frame by frame."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)

from tests.e2e import http1

#: HTTP/2's smallest allowed maximum frame, which needs no agreement.
_FRAME_BYTES = 16_384


async def ask(
    port: int,
    path: str,
    body: bytes = b"",
    *,
    headers: Iterable[tuple[str, str]] = (),
    trailers: Iterable[tuple[str, str]] = (),
    cuts: Iterable[int] = (),
) -> http1.HttpAnswer:
    """A POST from start to end.

    Args:
        port: Where to.
        path: What for.
        body: What to send.
        headers: Further headers.
        trailers: Ends the body instead of its last frame.
        cuts: Where to cut the body into frames, each sent by itself.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    wire = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    wire.initiate_connection()
    stream = wire.get_next_available_stream_id()
    pseudo = [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "engines.test"),
        (":path", path),
    ]
    wire.send_headers(stream, [*pseudo, *headers])
    places = [0, *cuts, *range(_FRAME_BYTES, len(body), _FRAME_BYTES), len(body)]
    events: list[Event] = []
    for start, stop in zip(sorted(places), sorted(places)[1:], strict=False):
        while wire.local_flow_control_window(stream) < stop - start:
            events += await _receive(wire, reader)
        wire.send_data(stream, body[start:stop])
        writer.write(wire.data_to_send())
        await writer.drain()
    if trailers:
        wire.send_headers(stream, list(trailers), end_stream=True)
    else:
        wire.end_stream(stream)
    writer.write(wire.data_to_send())
    try:
        return await _answer(events, wire, reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()


async def _receive(wire, reader) -> list[Event]:
    data = await reader.read(65_536)
    if not data:
        raise EOFError("the connection ended within the answer")
    return wire.receive_data(data)


async def _answer(events, wire, reader, writer) -> http1.HttpAnswer:
    status, headers, trailers, body = "", [], [], []
    while True:
        for event in events:
            match event:
                case ResponseReceived():
                    fields = list(event.headers)
                    status = dict(fields)[":status"]
                    headers = [pair for pair in fields if not pair[0].startswith(":")]
                case DataReceived():
                    body.append(event.data)
                    wire.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case TrailersReceived():
                    trailers = list(event.headers)
                case StreamReset():
                    raise ConnectionResetError(f"stream reset: {event.error_code}")
                case StreamEnded():
                    head = http1.Head(f"HTTP/2 {status}", headers)
                    return http1.HttpAnswer(head, b"".join(body), trailers)
        writer.write(wire.data_to_send())
        events = await _receive(wire, reader)
