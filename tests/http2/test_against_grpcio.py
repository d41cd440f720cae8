"""The native server and grpcio's, under the same client: the same statuses and messages."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import http2_serving, serving
from tests.support.http2_client import CallAnswer, Http2Client
from tests.support.http2_frames import message

#: Largest message that both servers take.
LARGEST = 2000

PATH = "/test.Service/Echo"

CALL = {
    ":method": "POST",
    ":scheme": "http",
    ":authority": "localhost",
    ":path": PATH,
    "te": "trailers",
    "content-type": "application/grpc",
}


class ClientCall(msgspec.Struct, frozen=True):
    """Behavior of a client in one call.

    Attributes:
        fields: Header fields that differ; None leaves one out.
        messages: Messages of which the answers are awaited.
        rest: Further bytes of the body.
        cuts: Sizes of the DATA frames, used in turns; 0 is an empty frame.
        end: `empty` half-closes with an empty frame, `data` with the last bytes, `trailers` with
            trailers; `reset` resets the stream; `none` leaves it open.
    """

    fields: dict[str, str | None] = {}
    messages: tuple[bytes, ...] = ()
    rest: bytes = b""
    cuts: tuple[int, ...] = (16_384,)
    end: str = "empty"


async def echo_on_grpcio(requests, _):
    """Send every message back."""
    async for request in requests:
        yield request


@contextlib.asynccontextmanager
async def grpcio_server() -> AsyncIterator[int]:
    """Serve on grpcio; yields the port."""
    options = [("grpc.max_receive_message_length", LARGEST), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=options)
    handler = grpc.stream_stream_rpc_method_handler(echo_on_grpcio)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("test.Service", {"Echo": handler})]
    )
    port = server.add_insecure_port(f"{http2_serving.LOCAL}:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0.0)


@contextlib.asynccontextmanager
async def any_server(transport: str) -> AsyncIterator[int]:
    """Serve on a transport; yields the port."""
    if transport == "grpcio":
        async with grpcio_server() as port:
            yield port
    else:
        routes = {PATH: http2_serving.EchoCall}
        async with http2_serving.serve_native(routes, max_message_bytes=LARGEST) as (_, port):
            yield port


def send_cut(client: Http2Client, stream_id: int, data: bytes, call: ClientCall, *, ends: bool):
    """Send data in frames as the call cuts it."""
    at = turn = 0
    while at < len(data):
        size = call.cuts[turn % len(call.cuts)]
        piece = data[at : at + size]
        at, turn = at + size, turn + 1
        client.framing.send_data(stream_id, piece, end_stream=ends and at >= len(data))
    client.flush()


async def run_calls(port: int, calls: tuple[ClientCall, ...]) -> list[CallAnswer]:
    """Run calls on one connection: all begin and send, then all end."""
    client = await Http2Client.connect(port)
    # The server's settings, before anything is sent.
    await client.until(lambda: client.has_settings)
    streams = []
    for call in calls:
        fields = {**CALL, **call.fields}
        streams.append(client.open([(k, v) for k, v in fields.items() if v is not None]))
    for stream_id, call in zip(streams, calls, strict=True):
        body = b"".join(map(message, call.messages))
        send_cut(client, stream_id, body, call, ends=False)
    for stream_id, call in zip(streams, calls, strict=True):
        answer = client.answers[stream_id]
        await client.until(
            lambda answer=answer, call=call: (
                answer.is_over or len(answer.messages) == len(call.messages)
            )
        )
        if answer.is_over:
            continue
        send_cut(client, stream_id, call.rest, call, ends=call.end == "data")
        if call.end == "empty" or (call.end == "data" and not call.rest):
            client.framing.end_stream(stream_id)
        elif call.end == "trailers":
            client.framing.send_headers(stream_id, [("x-end", "1")], end_stream=True)
        elif call.end == "reset":
            client.framing.reset_stream(stream_id, 8)
            answer.is_over = True
        client.flush()
        await client.until(lambda answer=answer: answer.is_over)
    await client.close()
    return [client.answers[stream_id] for stream_id in streams]


def run_on(transport: str, *calls: ClientCall) -> list[CallAnswer]:
    """Run calls on a server of their own."""

    async def run():
        async with any_server(transport) as port:
            return await run_calls(port, calls)

    return serving.run(run())


def outcomes(answers: list[CallAnswer]) -> list[tuple[object, ...]]:
    """Statuses, messages, and the error code of each; NO_ERROR only says that the rest may stay away."""
    return [
        (answer.http_status, answer.grpc_status, answer.messages, answer.reset or None)
        for answer in answers
    ]


CUTS = st.lists(st.integers(0, 400), min_size=1, max_size=5).filter(any).map(tuple)

TEXTS = st.lists(st.binary(max_size=300), max_size=3)

#: Fields on whose effect both servers agree.
FIELDS = (
    {},
    {},
    {":path": "/test.Service/Missing"},
    {":path": "/missing.Service/Echo"},
    {"content-type": "application/grpc+proto"},
    {"grpc-encoding": "identity", "grpc-accept-encoding": "identity,gzip"},
    {"grpc-timeout": "1000S"},
    {"grpc-timeout": "10H"},
    {"x-any": "y" * 200, "x-any-bin": "AAEC"},
)

#: Messages that end a call: too large, or compressed without an encoding.
REFUSED = (message(bytes(LARGEST + 1)), message(b"any", 1))


def is_ended_by_one_reason(call: ClientCall) -> bool:
    """False where several of head, message and reset end a call: which is first is a race."""
    return sum([":path" in call.fields, call.rest in REFUSED, call.end == "reset"]) < 2


CALLS = st.builds(
    ClientCall,
    messages=TEXTS.map(tuple),
    rest=st.one_of(
        TEXTS.map(lambda texts: b"".join(map(message, texts))), st.sampled_from(REFUSED)
    ),
    cuts=CUTS,
    end=st.sampled_from(["empty", "data", "trailers", "reset"]),
    fields=st.sampled_from(FIELDS),
).filter(is_ended_by_one_reason)


@given(st.lists(CALLS, min_size=1, max_size=4))
def test_both_servers_answer_alike(calls):
    expected, actual = (outcomes(run_on(name, *calls)) for name in ("grpcio", "native"))
    assert actual == expected


@pytest.mark.parametrize("timeout", ["0S", "1n", "1m", "soon"])
def test_both_servers_end_a_call_by_its_timeout(timeout):
    call = ClientCall(fields={"grpc-timeout": timeout}, end="none")
    assert outcomes(run_on("native", call)) == outcomes(run_on("grpcio", call))


ECHO = (b"a",)
GRPC_ONLY = "a client that is not gRPC learns it by the HTTP status that gRPC over HTTP/2 names"
MALFORMED = "RFC 9113, section 8.1.1: a malformed request is a stream error"
TOO_LONG = "the limit is 16 KiB and 128 fields; RFC 6585 has a status for it"

#: Where the servers differ on purpose: the call, what grpcio and what the native server answers
#: (HTTP status, gRPC status, messages, error code of a reset), and the reason.
DIFFERENCES = {
    "text/html": (
        ClientCall(fields={"content-type": "text/html"}),
        ("200", "0", [], None),
        ("415", "2", [], None),
        GRPC_ONLY,
    ),
    "no content-type": (
        ClientCall(fields={"content-type": None}),
        ("200", "0", [], None),
        ("415", "2", [], None),
        GRPC_ONLY,
    ),
    "GET": (
        ClientCall(fields={":method": "GET"}),
        ("", "", [], 2),
        ("405", "13", [], None),
        GRPC_ONLY,
    ),
    "no te": (
        ClientCall(fields={"te": None}, messages=ECHO),
        ("", "", [], 2),
        ("200", "0", [b"a"], None),
        "te finds proxies that are not fit for gRPC; nothing here depends on it",
    ),
    "gzip": (
        ClientCall(fields={"grpc-encoding": "gzip"}, messages=ECHO),
        ("200", "0", [b"a"], None),
        ("200", "12", [], None),
        "data planes do not compress ext_proc, and bodies that expand are a hazard",
    ),
    "unknown encoding": (
        ClientCall(fields={"grpc-encoding": "x-any"}, messages=ECHO),
        ("200", "13", [], None),
        ("200", "12", [], None),
        "doc/compression.md of grpc/grpc demands UNIMPLEMENTED",
    ),
    "timeout of nine digits": (
        ClientCall(fields={"grpc-timeout": "123456789S"}, messages=ECHO),
        ("200", "0", [b"a"], None),
        ("200", "13", [], None),
        "gRPC over HTTP/2 allows eight digits",
    ),
    "end inside of a message": (
        ClientCall(messages=ECHO, rest=message(b"xx")[:-1], end="data"),
        ("200", "0", [b"a"], None),
        ("200", "13", [b"a"], None),
        "a body that was cut is no body, as in grpc-go",
    ),
    "header list of 20 kB": (
        ClientCall(fields={"x-any": "y" * 20_000}, messages=ECHO),
        ("200", "8", [], None),
        ("431", "8", [], None),
        TOO_LONG,
    ),
    "130 fields": (
        ClientCall(fields={f"x-{i}": "y" for i in range(130)}, messages=ECHO),
        ("200", "0", [b"a"], None),
        ("431", "8", [], None),
        TOO_LONG,
    ),
    "name in upper case": (
        ClientCall(fields={"Upper": "x"}),
        ("200", "13", [], None),
        ("", "", [], 1),
        MALFORMED,
    ),
    "empty path": (
        ClientCall(fields={":path": ""}),
        ("200", "12", [], None),
        ("", "", [], 1),
        MALFORMED,
    ),
    "no scheme": (
        ClientCall(fields={":scheme": None}),
        ("", "", [], 2),
        ("", "", [], 1),
        MALFORMED,
    ),
    "connection": (
        ClientCall(fields={"connection": "close"}),
        ("200", "0", [], None),
        ("", "", [], 1),
        MALFORMED,
    ),
    "space before a value": (
        ClientCall(fields={"x-any": " a"}, messages=ECHO),
        ("200", "0", [b"a"], None),
        ("", "", [], 1),
        MALFORMED,
    ),
    "te: gzip": (
        ClientCall(fields={"te": "gzip"}),
        ("200", "13", [], None),
        ("", "", [], 1),
        MALFORMED,
    ),
    "content-length of another size": (
        ClientCall(fields={"content-length": "7"}, messages=ECHO),
        ("200", "0", [b"a"], None),
        ("200", "", [b"a"], 1),
        MALFORMED,
    ),
    "no authority": (
        ClientCall(fields={":authority": None}, messages=ECHO),
        ("", "", [], 2),
        ("200", "0", [b"a"], None),
        "RFC 9113 requires no :authority, and nothing here depends on it",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_is_intended(name):
    call, on_grpcio, on_native, reason = DIFFERENCES[name]
    assert reason
    assert outcomes(run_on("grpcio", call)) == [on_grpcio]
    assert outcomes(run_on("native", call)) == [on_native]
