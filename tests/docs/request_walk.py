"""The modules that one common request enters, in order, traced with `sys.setprofile`.

    python -m tests.docs.request_walk

prints the table. The request is a chat completion, streamed in full duplex, to the default strategy
over two scraped endpoints; it runs through the servicer from the bytes that Envoy sends to the end
of the stream. Only a second request of the same kind is traced: caches are warm then.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import random
import sys
from collections.abc import Sequence
from types import FrameType

import grpc

from extproc.endpoint import Load
from extproc.protocol.body_buffer import BufferBudget
from extproc.protocol.exchange import ExchangeSettings
from extproc.routing.pool_selector import PoolRoute, PoolSelector
from extproc.server import stream_handler
from extproc.server.ext_proc_servicer import ExternalProcessorServicer
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.request_recorder import StreamRecorder
from extproc.wire import codec
from extproc.wire.pb import ext_proc_pb2 as pb
from tests.docs import reference
from tests.support.pool_fixture import House

BODY = b'{"model":"llama","messages":[{"role":"user","content":"' + b"hello " * 200 + b'"}]}'


class Context:
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


def servicer() -> ExternalProcessorServicer:
    """A servicer over two idle endpoints with the default strategy."""
    load = Load(at=99.0, waiting=0, running=1, kv_usage=0.1)
    house = House({"10.0.0.1:8000": load, "10.0.0.2:8000": load}, profile="adaptive")
    return ExternalProcessorServicer(
        stream_handler.StreamContext(
            pool_selector=PoolSelector([PoolRoute("", house.dispatcher)]),
            exchange_settings=ExchangeSettings(max_body_bytes=1 << 20),
            body_budget=BufferBudget(1 << 30),
            observer=StreamRecorder(ProcessCounters(), DecisionLog(10), lambda: house.now),
            clock=lambda: house.now,
            rng=random.Random(1),
            settings=stream_handler.StreamSettings(max_streams=100),
        )
    )


def modules() -> list[str]:
    """The modules of the package that the request enters, in the order of its first call."""
    entered: dict[str, None] = {}

    def trace(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("extproc.") and frame.f_code.co_name != "<module>":
            entered.setdefault(name, None)

    async def serve() -> None:
        subject = servicer()
        await subject.process(None, Context(messages()))
        context = Context(messages())
        sys.setprofile(trace)
        try:
            await subject.process(None, context)
        finally:
            sys.setprofile(None)
        assert len(context.written) == 4, context.written

    asyncio.run(serve())
    return list(entered)


def block() -> str:
    """One row for each module, with the first line of its docstring."""
    walked = modules()
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
    print(block())
