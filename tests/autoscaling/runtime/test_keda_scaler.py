from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from extproc.discovery.endpoint_list import DiscoveredPool
from extproc.endpoint import Endpoint
from tests.support import ext_proc_script, serving
from tests.support.scaling import configured

STRING, INT64, DOUBLE, BOOL, MESSAGE = 9, 3, 1, 8, 11


def messages():
    """KEDA's own messages, described here and nowhere else of ours."""
    file = descriptor_pb2.FileDescriptorProto(
        name="externalscaler.proto", package="externalscaler", syntax="proto3"
    )

    def message(name, *fields):
        descriptor = file.message_type.add(name=name)
        for number, (field, kind, *rest) in enumerate(fields, 1):
            label = 3 if "repeated" in rest else 1
            type_name = f".externalscaler.{rest[0]}" if kind == MESSAGE else None
            descriptor.field.add(
                name=field, number=number, type=kind, label=label, type_name=type_name
            )
        return descriptor

    ref = message(
        "ScaledObjectRef",
        ("name", STRING),
        ("namespace", STRING),
        ("scalerMetadata", MESSAGE, "ScaledObjectRef.ScalerMetadataEntry", "repeated"),
    )
    entry = ref.nested_type.add(name="ScalerMetadataEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=STRING, label=1)
    entry.field.add(name="value", number=2, type=STRING, label=1)
    message("IsActiveResponse", ("result", BOOL))
    message("GetMetricSpecResponse", ("metricSpecs", MESSAGE, "MetricSpec", "repeated"))
    message(
        "MetricSpec", ("metricName", STRING), ("targetSize", INT64), ("targetSizeFloat", DOUBLE)
    )
    message(
        "GetMetricsRequest", ("scaledObjectRef", MESSAGE, "ScaledObjectRef"), ("metricName", STRING)
    )
    message("GetMetricsResponse", ("metricValues", MESSAGE, "MetricValue", "repeated"))
    message(
        "MetricValue", ("metricName", STRING), ("metricValue", INT64), ("metricValueFloat", DOUBLE)
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClassesForFiles([file.name], pool)


KEDA = messages()


def message_class(name):
    return KEDA[f"externalscaler.{name}"]


class KedaClient:
    """The calls of KEDA."""

    def __init__(self, channel, **metadata):
        self._channel = channel
        self.ref = message_class("ScaledObjectRef")(
            name="engines", namespace="models", scalerMetadata=metadata
        )

    def stream(self):
        return self._channel.unary_stream(
            "/externalscaler.ExternalScaler/StreamIsActive",
            request_serializer=message_class("ScaledObjectRef").SerializeToString,
            response_deserializer=message_class("IsActiveResponse").FromString,
        )(self.ref)

    async def active(self):
        return (await self._ask("IsActive", self.ref, "IsActiveResponse")).result

    async def spec(self):
        (metric,) = (
            await self._ask("GetMetricSpec", self.ref, "GetMetricSpecResponse")
        ).metricSpecs
        return metric.metricName, metric.targetSize, metric.targetSizeFloat

    async def value(self, name):
        request = message_class("GetMetricsRequest")(scaledObjectRef=self.ref, metricName=name)
        (metric,) = (await self._ask("GetMetrics", request, "GetMetricsResponse")).metricValues
        assert metric.metricName == name
        return metric.metricValue, metric.metricValueFloat

    async def _ask(self, method, request, answer):
        call = self._channel.unary_unary(
            f"/externalscaler.ExternalScaler/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=message_class(answer).FromString,
        )
        return await call(request)


@contextlib.asynccontextmanager
async def picker():
    settings = configured(
        holding={"enabled": True},
        scaling={"max": 4},
        autoscaling={"keda": {"enabled": True, "port": 0}},
        pool={"kubernetes": {"inference_pool": "p", "namespace": "n"}},
    )
    async with serving.running(settings) as running:
        picker = running.picker
        # Not `sync`: there is no API server; what it would say is said here.
        picker.pool_registry.on_pools_changed({"n/p": DiscoveredPool()}, ())
        await picker.autoscaler.start()
        loop = asyncio.ensure_future(picker.autoscaler.run())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.ports.keda}") as channel:
            yield running, channel
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)


async def test_a_queued_request_is_pushed_to_keda():
    """KEDA listens, hears that nothing is wanted, and hears otherwise when a request waits."""
    async with picker() as (running, channel):
        keda = KedaClient(channel)
        received = keda.stream()
        assert (await received.read()).result is False
        assert await keda.active() is False
        name, *target = await keda.spec()
        assert (name, target) == ("desired-replicas", [1, 1.0])
        assert await keda.value(name) == (0, 0.0)
        async with running.channel() as asking:
            stream = serving.Stream(asking)
            headers = {":method": "POST", ":path": "/v1/completions", "x-request-id": "r"}
            await stream.say(ext_proc_script.request_headers(headers, ends=True))
            assert (await received.read()).result is True
            assert await keda.active() is True
            assert await keda.value(name) == (1, 1.0)
            depth = KedaClient(channel, metric="queue-depth", target="2.5")
            name, *target = await depth.spec()
            assert (name, target) == ("queue-depth", [3, 2.5])
            assert await depth.value(name) == (1, 1.0)
            running.picker.pool_registry.on_pools_changed(
                {"n/p": DiscoveredPool((Endpoint("127.0.0.1:9"),))}, ()
            )
            await stream.hear()
            stream.call.cancel()
        await running.picker.control_planes.release()
        assert await received.read() is grpc.aio.EOF


async def test_the_stream_of_a_removed_pool_ends():
    """Its stream ends, so that KEDA hears of the loop that comes after."""
    async with picker() as (running, channel):
        received = KedaClient(channel).stream()
        await received.read()
        scaler = running.picker.autoscaler
        running.picker.control_planes.keda.gone(scaler.loops[""])
        assert await received.read() is grpc.aio.EOF


@pytest.mark.parametrize(
    ("metadata", "code", "message"),
    [
        (
            {"pool": "other"},
            grpc.StatusCode.NOT_FOUND,
            "there are: (unnamed); leave pool out of the metadata",
        ),
        ({"metric": "what"}, grpc.StatusCode.INVALID_ARGUMENT, "no metric 'what'"),
        ({"metric": "queue-depth", "target": "0"}, grpc.StatusCode.INVALID_ARGUMENT, "above 0"),
        ({"metric": "queue-depth", "target": "x"}, grpc.StatusCode.INVALID_ARGUMENT, "above 0"),
        (
            {"metric": "queue-depth", "target": "1e300"},
            grpc.StatusCode.INVALID_ARGUMENT,
            "at most 1000000000",
        ),
    ],
)
async def test_unknown_pools_and_metrics_are_refused(metadata, code, message):
    """An unknown pool or metric, or a target that is none, has a status of its own."""
    async with picker() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await KedaClient(channel, **metadata).spec()
        assert refused.value.code() == code
        assert message in refused.value.details()


async def test_an_unknown_metric_is_not_zero():
    """Before the first step KEDA keeps what it has; a strange message is refused."""
    settings = configured(scaling={}, autoscaling={"keda": {"enabled": True, "port": 0}})
    async with (
        serving.running(settings) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.ports.keda}") as channel,
    ):
        for ask in (KedaClient(channel).active(), KedaClient(channel).value("desired-replicas")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        strange = channel.unary_unary("/externalscaler.ExternalScaler/IsActive")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await strange(b"\xff")
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_call_that_raises_ends_no_other_call(caplog):
    """It ends with INTERNAL, what was said is not logged, and other calls are answered."""
    async with picker() as (running, channel):
        supervisor = running.picker.counters.supervisor
        loop = running.picker.autoscaler.loops[""]
        kind = type(loop)

        class BrokenActivity(kind):
            @property
            def active(self):
                raise OverflowError("what KEDA said")

        await KedaClient(channel).active()
        loop.__class__ = BrokenActivity
        for call in (KedaClient(channel).active(), KedaClient(channel).stream().read()):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            assert raised.value.code() is grpc.StatusCode.INTERNAL
        assert supervisor.failures["keda"] == 2
        loop.__class__ = kind
        assert await KedaClient(channel).active() is False
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await KedaClient(channel, pool="nobody").active()
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        assert supervisor.failures["keda"] == 2
    assert "what KEDA said" not in caplog.text
