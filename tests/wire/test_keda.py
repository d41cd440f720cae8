from __future__ import annotations

from extproc.wire import keda
from extproc.wire.pb import keda_pb2 as pb


def test_bytes_that_are_no_message_are_none():
    """Reading is total."""
    for strange in (b"\xff", b"\x0a\x05x", b"\x1a\x05x"):
        assert keda.decode_scaled_object(strange) is None
    for strange in (b"\xff", b"\x0a\x05x", b"\x0a\x02\x0a\x05"):
        assert keda.decode_metrics_request(strange) is None
    assert keda.decode_scaled_object(b"") == keda.ScaledObjectRef({})


def test_older_readers_get_integers():
    """Rounded up, and a target is never 0: KEDA divides by it."""
    spec = pb.GetMetricSpecResponse.FromString(keda.encode_metric_spec("m", 0.5)).metric_specs[0]
    assert (spec.target_size, spec.target_size_float) == (1, 0.5)
    value = pb.GetMetricsResponse.FromString(keda.encode_metric_value("m", 2.5)).metric_values[0]
    assert (value.metric_value, value.metric_value_float) == (3, 2.5)
