"""The modules that one common request enters, in order, traced with `sys.setprofile`.

    python -m tests.docs.request_walk

prints the tables. The request is a chat completion, streamed in full duplex, to the default strategy
over two scraped endpoints; it runs through the servicer from the bytes that Envoy sends to the end
of the stream. Only a second request of the same kind is traced: caches are warm then. The second
table has the modules of the native transport, from the frames of HTTP/2 on.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from types import FrameType

import grpc

from extproc.config.settings import LimitsSection
from extproc.endpoint import Load
from extproc.http2.limits import ReceiveBudget
from extproc.protocol.body_buffer import BufferBudget
from extproc.protocol.exchange import ExchangeSettings
from extproc.routing.pool_selector import PoolRoute, PoolSelector
from extproc.server import native_ext_proc, native_server, stream_context
from extproc.server.ext_proc_servicer import ExternalProcessorServicer
from extproc.server.http2_protocol import Http2Protocol
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.stream_recorder import StreamRecorder
from extproc.wire import codec
from extproc.wire.pb import ext_proc_pb2 as pb
from tests.docs import reference
from tests.support import http2_frames
from tests.support.pool_fixture import PoolFixture

BODY = b'{"model":"llama","messages":[{"role":"user","content":"' + b"hello " * 200 + b'"}]}'


class ScriptedContext:
    """The gRPC context of one stream: messages to read, and what was written."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        self.messages = list(messages)
        self.written: list[bytes] = []

    async def read(self) -> object:
        """The next event, or the end of the stream."""
        return codec.decode(self.messages.pop(0)) if self.messages else grpc.aio.EOF

    async def write(self, message: bytes) -> None:
        """Take a reply."""
        self.written.append(message)


def messages() -> list[bytes]:
    """A chat completion and its response, as Envoy shows them."""
    head, body, answered, ended = (pb.ProcessingRequest() for _ in range(4))
    for name, value in {":method": "POST", ":path": "/v1/chat/completions"}.items():
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    body.request_body.body = BODY
    body.request_body.end_of_stream = True
    answered.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    ended.response_trailers.SetInParent()
    return [message.SerializeToString() for message in (head, body, answered, ended)]


class WriteTransport(asyncio.Transport):
    """A transport of asyncio that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: object) -> None:
        """Take bytes."""
        assert isinstance(data, bytes)
        self.written.append(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing waits to be written."""

    def is_closing(self) -> bool:
        """It stays open."""
        return False


def build_context() -> stream_context.StreamContext:
    """Dependencies of streams over two idle endpoints with the default strategy."""
    load = Load(at=99.0, waiting=0, running=1, kv_usage=0.1)
    pool_fixture = PoolFixture({"10.0.0.1:8000": load, "10.0.0.2:8000": load}, profile="adaptive")
    return stream_context.StreamContext(
        pool_selector=PoolSelector([PoolRoute("", pool_fixture.director)]),
        exchange_settings=ExchangeSettings(max_body_bytes=1 << 20),
        body_budget=BufferBudget(1 << 30),
        observer=StreamRecorder(ProcessCounters(), DecisionLog(10), lambda: pool_fixture.now),
        clock=lambda: pool_fixture.now,
        rng=random.Random(1),
        settings=stream_context.StreamSettings(max_streams=100),
    )


def grpcio_request() -> Callable[[], Awaitable[None]]:
    """Build the function that serves one request on grpcio."""
    subject = ExternalProcessorServicer(build_context())

    async def serve() -> None:
        context = ScriptedContext(messages())
        await subject.process(None, context)
        assert len(context.written) == 4, context.written

    return serve


def native_request() -> Callable[[], Awaitable[None]]:
    """Build the function that serves one request on the native transport."""
    subject = native_ext_proc.NativeExternalProcessor(build_context())
    server = native_server.build_server(
        subject.routes(), LimitsSection(), budget=ReceiveBudget(1 << 30), counts=Counter()
    )
    peer, socket = http2_frames.RawClient(), WriteTransport()
    connection = Http2Protocol(server)
    connection.connection_made(socket)
    connection.data_received(
        http2_frames.PREFACE
        + http2_frames.frame(http2_frames.SETTINGS)
        + http2_frames.frame(http2_frames.SETTINGS, http2_frames.ACK)
    )
    fields = [
        (name, native_ext_proc.PATH if name == ":path" else value)
        for name, value in http2_frames.CALL
    ]
    stream_id = -1

    async def serve() -> None:
        nonlocal stream_id
        stream_id += 2
        block = peer.encoder.encode(fields)
        connection.data_received(
            http2_frames.frame(http2_frames.HEADERS, http2_frames.END_HEADERS, stream_id, block)
        )
        for message in messages():
            data = http2_frames.message(message)
            connection.data_received(http2_frames.frame(http2_frames.DATA, 0, stream_id, data))
        del socket.written[:]
        connection.data_received(
            http2_frames.frame(http2_frames.DATA, http2_frames.END_STREAM, stream_id)
        )
        assert [answer.kind for answer in http2_frames.parse(b"".join(socket.written))] == [
            http2_frames.HEADERS
        ]

    return serve


def modules(build_request: Callable[[], Callable[[], Awaitable[None]]]) -> list[str]:
    """The modules of the package that a request enters, in the order of its first call."""
    entered: dict[str, None] = {}

    def trace(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("extproc.") and frame.f_code.co_name != "<module>":
            entered.setdefault(name, None)

    async def run() -> None:
        serve = build_request()
        await serve()
        sys.setprofile(trace)
        try:
            await serve()
        finally:
            sys.setprofile(None)

    asyncio.run(run())
    return list(entered)


def block() -> str:
    """One row for each module that a request enters on any transport."""
    common = set(modules(grpcio_request))
    return _rows([name for name in modules(native_request) if name in common])


def native_block() -> str:
    """One row for each module that a request enters on the native transport only."""
    common = set(modules(grpcio_request))
    return _rows([name for name in modules(native_request) if name not in common])


def _rows(walked: Sequence[str]) -> str:
    """Rows with the first line of the docstring of each module."""
    rows = ["| | module | what it does |", "|---|---|---|"]
    for number, name in enumerate(walked, 1):
        module = importlib.import_module(name)
        first = (inspect.getdoc(module) or "").partition("\n\n")[0]
        path = name.replace(".", "/") + ".py"
        rows.append(
            f"| {number} | [`{name.removeprefix('extproc.')}`](../../{path}) | {reference.cell(first)} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(block(), native_block(), sep="\n\n")
