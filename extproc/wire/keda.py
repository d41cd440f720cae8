"""KEDA's external scaler protocol: decoding of requests, encoding of responses.

Reading is total, as with ext_proc: bytes that are no message are None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from google.protobuf.message import DecodeError

from extproc.wire.pb import keda_pb2

#: Of the gRPC methods.
SERVICE = "externalscaler.ExternalScaler"


class ScaledObjectRef(msgspec.Struct, frozen=True):
    """A request of KEDA for a scaled object.

    Attributes:
        metric: Name of the metric; empty if none is requested.
    """

    metadata: Mapping[str, str]
    metric: str = ""


def decode_scaled_object(data: bytes) -> ScaledObjectRef | None:
    """Decode the request of IsActive, StreamIsActive and GetMetricSpec."""
    try:
        reference = keda_pb2.ScaledObjectRef.FromString(data)
    except DecodeError:
        return None
    return ScaledObjectRef(dict(reference.scaler_metadata))


def decode_metrics_request(data: bytes) -> ScaledObjectRef | None:
    """Decode the request of GetMetrics."""
    try:
        request = keda_pb2.GetMetricsRequest.FromString(data)
    except DecodeError:
        return None
    return ScaledObjectRef(dict(request.scaled_object_ref.scaler_metadata), request.metric_name)


def encode_active(*, result: bool) -> bytes:
    """Encode the response of IsActive: whether at least one replica is needed."""
    return keda_pb2.IsActiveResponse(result=result).SerializeToString()


def encode_metric_spec(name: str, target: float) -> bytes:
    """Encode the metric and its target value per replica, above 0."""
    spec = keda_pb2.MetricSpec(
        metric_name=name, target_size=max(1, math.ceil(target)), target_size_float=target
    )
    return keda_pb2.GetMetricSpecResponse(metric_specs=[spec]).SerializeToString()


def encode_metric_value(name: str, value: float) -> bytes:
    """Encode the value of a metric, 0 or more."""
    metric = keda_pb2.MetricValue(
        metric_name=name, metric_value=math.ceil(value), metric_value_float=value
    )
    return keda_pb2.GetMetricsResponse(metric_values=[metric]).SerializeToString()
