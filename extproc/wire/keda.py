"""KEDA's external scaler protocol: bytes to questions, answers to bytes.

Reading is total, as with ext_proc: bytes that are no message are None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from google.protobuf.message import DecodeError

from extproc.wire.pb import keda_pb2 as pb

#: Of the gRPC methods.
SERVICE = "externalscaler.ExternalScaler"


class ScaledObjectRef(msgspec.Struct, frozen=True):
    """A question.

    Attributes:
        name: Of the ScaledObject.
        namespace: Where it is.
        metadata: What its trigger says.
        metric: Which metric, where one is asked for.
    """

    name: str
    namespace: str
    metadata: Mapping[str, str]
    metric: str = ""


def reference(data: bytes) -> ScaledObjectRef | None:
    """What IsActive, StreamIsActive and GetMetricSpec are asked with."""
    try:
        return _scaled_object_ref(pb.ScaledObjectRef.FromString(data))
    except DecodeError:
        return None


def metrics_request(data: bytes) -> ScaledObjectRef | None:
    """What GetMetrics is asked with."""
    try:
        request = pb.GetMetricsRequest.FromString(data)
    except DecodeError:
        return None
    return _scaled_object_ref(request.scaled_object_ref, metric=request.metric_name)


def active(*, result: bool) -> bytes:
    """Whether there should be a replica at all."""
    return pb.IsActiveResponse(result=result).SerializeToString()


def metric_spec(name: str, target: float) -> bytes:
    """The metric there is, and how much of it a replica is for.

    Args:
        name: Of the metric.
        target: Above 0.
    """
    spec = pb.MetricSpec(
        metric_name=name, target_size=max(1, math.ceil(target)), target_size_float=target
    )
    return pb.GetMetricSpecResponse(metric_specs=[spec]).SerializeToString()


def metric_value(name: str, value: float) -> bytes:
    """The value of a metric, 0 or more."""
    metric = pb.MetricValue(
        metric_name=name, metric_value=math.ceil(value), metric_value_float=value
    )
    return pb.GetMetricsResponse(metric_values=[metric]).SerializeToString()


def _scaled_object_ref(ref: pb.ScaledObjectRef, *, metric: str = "") -> ScaledObjectRef:
    return ScaledObjectRef(ref.name, ref.namespace, dict(ref.scaler_metadata), metric)
