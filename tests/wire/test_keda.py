from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from extproc.wire import keda
from extproc.wire.pb import keda_pb2 as pb

PROTO = Path(__file__).parent.parent.parent / "proto" / "keda.proto"


def test_the_generated_module_matches_proto(tmp_path):
    """`make proto` was run after the last change of proto/keda.proto."""
    output = tmp_path / "set"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO.parent}"]
    subprocess.run([*command, f"--descriptor_set_out={output}", PROTO.name], check=True)
    (compiled,) = FileDescriptorSet.FromString(output.read_bytes()).file
    generated = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(generated)
    for descriptor in (compiled, generated):
        for message in [
            *descriptor.message_type,
            *(n for m in descriptor.message_type for n in m.nested_type),
        ]:
            for field in message.field:
                field.ClearField("json_name")
    assert compiled == generated


def test_bytes_that_are_no_message_are_none():
    """Reading is total."""
    for strange in (b"\xff", b"\x0a\x05x", b"\x1a\x05x"):
        assert keda.decode_scaled_object(strange) is None
    for strange in (b"\xff", b"\x0a\x05x", b"\x0a\x02\x0a\x05"):
        assert keda.decode_metrics_request(strange) is None
    assert keda.decode_scaled_object(b"") == keda.ScaledObjectRef("", "", {})


def test_older_readers_get_integers():
    """Rounded up, and a target is never 0: KEDA divides by it."""
    spec = pb.GetMetricSpecResponse.FromString(keda.encode_metric_spec("m", 0.5)).metric_specs[0]
    assert (spec.target_size, spec.target_size_float) == (1, 0.5)
    value = pb.GetMetricsResponse.FromString(keda.encode_metric_value("m", 2.5)).metric_values[0]
    assert (value.metric_value, value.metric_value_float) == (3, 2.5)
