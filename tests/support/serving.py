"""Real gRPC servers in this process, and a client that speaks the peer's messages."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

import grpc
import msgspec
from grpc_health.v1 import health_pb2

from extproc.config.pool_sections import PoolSource, SchedulingSection
from extproc.config.settings import LimitsSection, ScrapeSection, ServerSection, Settings
from extproc.decision import Decision
from extproc.http2.limits import ReceiveBudget
from extproc.parsing import usage
from extproc.protocol.body_buffer import BufferBudget
from extproc.protocol.exchange import ExchangeSettings
from extproc.protocol.trace_context import TraceSampler
from extproc.routing.director import Director
from extproc.routing.pool_selector import PoolRoute, PoolSelector
from extproc.server import ext_proc_servicer, health, native_ext_proc, native_server, stream_context
from extproc.server.app import EndpointPickerProcess
from extproc.server.flow_control_shell import AsyncFlowController
from extproc.server.http2_protocol import CallFactory
from extproc.server.native_server import Http2Server
from extproc.server.transport import ExtProcServicer, Keepalive, ListenAddresses, RpcServer
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.pool_log import LoggedRequestRecorder
from extproc.telemetry.stream_recorder import StreamRecorder
from tests.support import peer
from tests.support.ext_proc_script import DUPLEX, Message
from tests.support.pool_fixture import PoolFixture
from tests.support.transport import TRANSPORT

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHECK = "/grpc.health.v1.Health/Check"
LOCAL = "127.0.0.1"

USUAL = Keepalive()

#: Seconds anything may take on a busy machine.
LIMIT_S = 300.0

Result = TypeVar("Result")


def run(test: Coroutine[Any, Any, Result]) -> Result:
    """Run an asynchronous test; one that hangs fails."""
    return asyncio.run(asyncio.wait_for(test, LIMIT_S))  # noqa: TID251 - a test cancels none


class Stream:
    """One ext_proc stream, seen from the data plane.

    Args:
        channel: To the server.
        modes: Body modes by name.
        metadata: Metadata of the call.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        modes: tuple[str, str] | None = DUPLEX,
        *,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.call = channel.stream_stream(METHOD)(metadata=tuple(metadata))
        self._modes = modes

    async def say(self, *messages: Message) -> None:
        """Send messages."""
        for message in messages:
            await self.call.write(message.encode(self._modes))
            self._modes = None

    async def hear(self, count: int = 1) -> list[peer.DecodedReply]:
        """Read so many answers."""
        received = []
        for _ in range(count):
            data = await self.call.read()
            assert data is not grpc.aio.EOF, await self.call.details()
            received.append(peer.read(data))
        return received

    async def rest(self) -> list[peer.DecodedReply]:
        """Read to the end of the stream."""
        received = []
        while (data := await self.call.read()) is not grpc.aio.EOF:
            received.append(peer.read(data))
        return received

    async def end(self) -> grpc.StatusCode:
        """Half-close and read to the end; the status the server ended with."""
        await self.call.done_writing()
        await self.rest()
        return await self.call.code()


class Serving:
    """A servicer behind a port.

    Attributes:
        servicer: The one that serves.
        channel: A client's channel to it.
    """

    def __init__(self, servicer: ExtProcServicer[Any], channel: grpc.aio.Channel) -> None:
        self.servicer = servicer
        self.channel = channel

    def stream(self, modes: tuple[str, str] | None = DUPLEX) -> Stream:
        """Open a stream."""
        return Stream(self.channel, modes)

    async def drain(self, within_s: float, *, apart_s: float = 0.0) -> None:
        """Drain all streams; the native transport has no pause before the last of them."""
        if isinstance(self.servicer, native_ext_proc.NativeExternalProcessor):
            await self.servicer.drain_streams(within_s)
        else:
            await self.servicer.drain_streams(within_s, apart_s=apart_s)

    def arriving(self) -> list[int | None]:
        """Bytes of the body that each open stream receives."""
        if isinstance(self.servicer, native_ext_proc.NativeExternalProcessor):
            return [call.arriving_bytes for call in self.servicer._calls]
        return [entry.arriving_bytes for entry in self.servicer._streams.values()]

    def silent(self) -> list[bool]:
        """True for each open stream that waits for its first message."""
        if isinstance(self.servicer, native_ext_proc.NativeExternalProcessor):
            return [not call.has_begun for call in self.servicer._calls]
        return [entry.is_silent for entry in self.servicer._streams.values()]

    async def idle(self) -> None:
        """Wait until every handler has ended."""
        if isinstance(self.servicer, native_ext_proc.NativeExternalProcessor):
            while self.servicer._calls:
                await asyncio.sleep(0)
            return
        while tasks := list(self.servicer._streams):
            await asyncio.wait(tasks)


@contextlib.asynccontextmanager
async def serving(
    house: PoolFixture,
    *,
    director: Director | None = None,
    max_body_bytes: int = 1 << 20,
    max_streams: int = 10_000,
    format_decision: Callable[[Decision], str] | None = None,
    describe_decision: Callable[[Decision], str] | None = None,
    request_cost: Mapping[usage.UsageKind, float] = {},
    trace_sampler: TraceSampler | None = None,
    flow_controllers: Mapping[str, AsyncFlowController] = {},
    transport: Literal["grpcio", "native"] = TRANSPORT,
    client_options: Sequence[tuple[str, int]] = (),
) -> AsyncIterator[Serving]:
    """Serve a house, on the transport that tests run on unless another is named.

    Args:
        client_options: Options of the client's channel.
    """
    shared = stream_context.StreamContext(
        pool_selector=PoolSelector([PoolRoute("", director or house.director)]),
        exchange_settings=ExchangeSettings(max_body_bytes),
        body_budget=BufferBudget(1 << 28),
        observer=StreamRecorder(
            ProcessCounters(), DecisionLog(100), lambda: house.now, LoggedRequestRecorder
        ),
        clock=lambda: house.now,
        rng=random.Random(1),
        settings=stream_context.StreamSettings(
            max_streams=max_streams,
            format_decision=format_decision,
            describe_decision=describe_decision,
            request_cost=request_cost,
        ),
        trace_sampler=trace_sampler,
        flow_controllers=flow_controllers,
    )
    servicer, server, port = _bind_grpcio(shared) if transport == "grpcio" else _bind_native(shared)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"{LOCAL}:{port}", options=client_options) as channel:
            yield Serving(servicer, channel)
    finally:
        await server.stop(None)


def _bind_grpcio(
    shared: stream_context.StreamContext,
) -> tuple[ExtProcServicer[Any], RpcServer, int]:
    servicer = ext_proc_servicer.ExternalProcessorServicer(shared)
    server = grpc.aio.server()
    ext_proc_servicer.register(server, servicer)
    return servicer, server, server.add_insecure_port(f"{LOCAL}:0")


def _bind_native(
    shared: stream_context.StreamContext,
) -> tuple[ExtProcServicer[Any], RpcServer, int]:
    servicer = native_ext_proc.NativeExternalProcessor(shared)
    server = _build_native(servicer.routes())
    return servicer, server, native_server.bind(server, f"{LOCAL}:0", flag="--grpc-port")


def _build_native(routes: Mapping[str, CallFactory], keepalive: Keepalive = USUAL) -> Http2Server:
    return native_server.build_server(
        routes,
        LimitsSection(),
        budget=ReceiveBudget(1 << 28),
        counts=Counter(),
        keepalive=keepalive,
    )


@contextlib.asynccontextmanager
async def serving_health(
    readiness: health.Readiness, keepalive: Keepalive = USUAL
) -> AsyncIterator[int]:
    """Serve nothing but health, on the transport that tests run on; the port."""
    server: RpcServer
    if TRANSPORT == "native":
        native = _build_native(native_server.health_routes(readiness), keepalive)
        server, port = native, native_server.bind(native, f"{LOCAL}:0", flag="--grpc-port")
    else:
        plain = ext_proc_servicer.build_server(1 << 20, keepalive=keepalive)
        ext_proc_servicer.register_health(plain, readiness)
        server, port = plain, ext_proc_servicer.bind(plain, f"{LOCAL}:0", flag="--grpc-port")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def settings(*endpoints: str, **server: Any) -> Settings:
    """A configuration on free loopback ports, over a static list that is not scraped."""
    ports = {"grpc_port": 0, "grpc_health_port": 0, "metrics_port": 0}
    return Settings(
        server=ServerSection(
            **{
                "host": LOCAL,
                "secure_serving": False,
                "transport": TRANSPORT,
                **ports,
                **server,
            }
        ),
        pool=PoolSource(endpoints=endpoints),
        scrape=ScrapeSection(enabled=False),
        scheduling=SchedulingSection(strategy="least-request"),
    )


class Running:
    """A whole picker, started, before or after its first sync.

    Attributes:
        picker: The composition root.
        ports: Where it listens.
    """

    def __init__(self, picker: EndpointPickerProcess, ports: ListenAddresses) -> None:
        self.picker = picker
        self.ports = ports
        self._loops: list[asyncio.Task[None]] = []

    async def sync(self) -> None:
        """Let discovery speak."""
        await self.picker.sync()
        self._loops = [asyncio.ensure_future(run()) for run in self.picker.loops().values()]

    async def stop(self) -> None:
        """End the loops and close everything."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self.picker.stop()

    async def health(self, name: str, *, port: int | None = None) -> str:
        """Health of a name; by default on the health port."""
        async with grpc.aio.insecure_channel(f"{LOCAL}:{port or self.ports.health}") as channel:
            check = channel.unary_unary(
                CHECK,
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            answer = await check(health_pb2.HealthCheckRequest(service=name))
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    def channel(self) -> grpc.aio.Channel:
        """A plaintext channel to the ext_proc port."""
        return grpc.aio.insecure_channel(f"{LOCAL}:{self.ports.grpc}")


@contextlib.asynccontextmanager
async def running(
    configuration: Settings, *, clock: Callable[[], float] = time.monotonic, **changes: Any
) -> AsyncIterator[Running]:
    """Start a whole picker; it has not synced yet."""
    picker = EndpointPickerProcess(msgspec.structs.replace(configuration, **changes), clock)
    started = Running(picker, await picker.start())
    try:
        yield started
    finally:
        await started.stop()
