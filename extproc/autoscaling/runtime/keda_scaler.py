"""External scaler for KEDA.

A ScaledObject with a trigger `external-push` names the pool and the metric in its metadata:

- `pool`: of a process with several.
- `metric`: `desired-replicas`, the usual one, with a target of 1, so that the policy decides; or
  `queue-depth`, all requests that wait or run, so that the HPA does.
- `target`: of `queue-depth`, requests per replica.

What is not known is UNAVAILABLE, never 0: KEDA then keeps what it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import NoReturn, TypeAlias

import grpc

from extproc.autoscaling.runtime.control_loop import ControlLoop
from extproc.supervision import Supervisor
from extproc.wire import keda

#: Metrics there are, and how much of each a replica is for unless the trigger says so.
_TARGETS = {"desired-replicas": 1.0, "queue-depth": 5.0}
_USUAL = "desired-replicas"

#: Metrics whose target is what it is.
_FIXED = frozenset({_USUAL})

#: Largest target value: as an integer it fits into the messages of KEDA.
_MAX_TARGET = 1e9

Context = grpc.aio.ServicerContext[bytes, bytes]
Served: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"


class KedaExternalScaler:
    """Serves the `externalscaler.ExternalScaler` gRPC service."""

    def __init__(self, loops: Callable[[], Mapping[str, ControlLoop]]) -> None:
        self._loops = loops
        self._listening: dict[asyncio.Event, ControlLoop] = {}
        self._closing = False

    def notify(self, loop: ControlLoop) -> None:
        """Notify subscribers of a loop after its step."""
        for event, heard in self._listening.items():
            if heard is loop:
                event.set()

    def gone(self, loop: ControlLoop) -> None:
        """End the streams of a removed loop: KEDA has to subscribe again."""
        for event in [subscriber for subscriber, heard in self._listening.items() if heard is loop]:
            del self._listening[event]
            event.set()

    def release(self) -> None:
        """End all streams: KEDA goes to another replica."""
        self._closing = True
        for event in self._listening:
            event.set()

    async def is_active(self, data: bytes, context: Context) -> bytes:
        """Serve `IsActive`."""
        loop = await self._loop(keda.decode_scaled_object(data), context)
        return keda.encode_active(result=loop.active)

    async def stream_is_active(self, data: bytes, context: Context) -> AsyncIterator[bytes]:
        """Serve `StreamIsActive`: the current value, and every change at once."""
        loop = await self._loop(keda.decode_scaled_object(data), context, known=False)
        event = asyncio.Event()
        self._listening[event] = loop
        sent: bool | None = None
        try:
            while not self._closing and event in self._listening:
                if loop.desired is not None and loop.active is not sent:
                    sent = loop.active
                    yield keda.encode_active(result=sent)
                await event.wait()
                event.clear()
        finally:
            self._listening.pop(event, None)

    async def metric_spec(self, data: bytes, context: Context) -> bytes:
        """Serve `GetMetricSpec`."""
        reference = keda.decode_scaled_object(data)
        await self._loop(reference, context, known=False)
        return keda.encode_metric_spec(*await _metric(reference, context))

    async def metrics(self, data: bytes, context: Context) -> bytes:
        """Serve `GetMetrics`."""
        request = keda.decode_metrics_request(data)
        loop = await self._loop(request, context)
        name, _ = await _metric(request, context)
        value = 0.0
        if loop.demand is not None and loop.desired is not None:
            value = float(loop.desired.replicas) if name == _USUAL else loop.demand.requests
        return keda.encode_metric_value(
            request.metric if request and request.metric else name, value
        )

    async def _loop(
        self, reference: keda.ScaledObjectRef | None, context: Context, *, known: bool = True
    ) -> ControlLoop:
        """Find the loop a request names; with `known` it must have made a step."""
        if reference is None:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be read")
        name = reference.metadata.get("pool", "")
        loops = self._loops()
        loop = loops.get(name)
        if loop is None and not name and len(loops) == 1:
            loop = next(iter(loops.values()))
        if loop is None:
            there = ", ".join(known_name or "(unnamed)" for known_name in loops) or "none"
            fix = "leave pool out of the metadata" if "" in loops else "name one in the metadata"
            message = f"no pool {name!r} is scaled here; there are: {there}; {fix}"
            await _refuse(context, grpc.StatusCode.NOT_FOUND, message)
        if known and loop.desired is None:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, "the pool was not looked at yet")
        return loop


async def _metric(reference: keda.ScaledObjectRef | None, context: Context) -> tuple[str, float]:
    """Name and target value of the metric that a trigger names."""
    metadata = reference.metadata if reference is not None else {}
    name = metadata.get("metric", _USUAL)
    if name not in _TARGETS:
        message = f"no metric {name!r}; there are: {', '.join(_TARGETS)}"
        await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, message)
    written = metadata.get("target")
    if written is None or name in _FIXED:
        return name, _TARGETS[name]
    try:
        target = float(written)
    except ValueError:
        target = 0.0
    if not 0.0 < target <= _MAX_TARGET:
        message = f"target must be a number above 0 and at most {_MAX_TARGET:.0f}, not {written!r}"
        await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, message)
    return name, target


async def _refuse(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(code, message)
    raise RuntimeError("unreachable: abort raises")


def register(server: grpc.aio.Server, scaler: KedaExternalScaler, supervisor: Supervisor) -> None:
    """Register the service on a gRPC server; `extproc.wire.keda` encodes and decodes."""

    async def failed(error: Exception, context: Context) -> NoReturn:
        supervisor.record_error("keda", error)
        await _refuse(context, grpc.StatusCode.INTERNAL, "the call failed")

    def call(answer: Callable[[bytes, Context], Awaitable[bytes]]) -> Served:
        async def safe(data: bytes, context: Context) -> bytes:
            try:
                return await answer(data, context)
            except grpc.aio.BaseError:
                raise  # how a refusal leaves
            except Exception as error:  # noqa: BLE001 - gRPC would log what may quote the call
                await failed(error, context)

        return grpc.unary_unary_rpc_method_handler(safe)

    async def stream(data: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            async for answer in scaler.stream_is_active(data, context):
                yield answer
        except grpc.aio.BaseError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            await failed(error, context)

    handlers: dict[str, Served] = {
        "IsActive": call(scaler.is_active),
        "StreamIsActive": grpc.unary_stream_rpc_method_handler(stream),
        "GetMetricSpec": call(scaler.metric_spec),
        "GetMetrics": call(scaler.metrics),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(keda.SERVICE, handlers),))
