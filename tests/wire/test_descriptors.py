from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from extproc.wire.pb import ext_proc_pb2 as pb
from extproc.wire.pb import keda_pb2, xds_pb2
from tests.support import peer, xds_peer

PROTO = Path(__file__).parent.parent.parent / "proto"

#: Envoy's modules that define our messages.
MODULES = (
    peer.ext_proc,
    xds_peer.discovery,
    xds_peer.clusters,
    xds_peer.endpoints,
    xds_peer.upstreams,
    xds_peer.override_host,
    xds_peer.least_request,
    xds_peer.metadata,
    peer.core,
    xds_peer.types,
)

#: Messages that others define, or that have a name of their own where two of Envoy's share one.
ELSEWHERE = {
    "ProcessingMode": peer.filters.ProcessingMode,
    "CommonHttpProtocolOptions": peer.core.HttpProtocolOptions,
    "Status": xds_peer.Status,
}

#: Python types of Envoy's fields that hold messages of protobuf itself.
WELL_KNOWN = {"Duration": "timedelta", "UInt32Value": "int", "BoolValue": "bool"}

#: Fields that Envoy declares as enums and we read as numbers: the same varint on the wire, and a
#: number we do not know does not fail the message.
OPEN_ENUMS = {
    "HttpStatus.code",
    "ProtocolConfiguration.request_body_mode",
    "ProtocolConfiguration.response_body_mode",
    *(
        f"ProcessingMode.{direction}_{part}_mode"
        for direction in ("request", "response")
        for part in ("header", "body", "trailer")
    ),
}

TYPES = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_ENUM: "enum",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_MESSAGE: "message",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_UINT32: "uint32",
}


def messages(kinds: Iterable[Descriptor]) -> Iterator[Descriptor]:
    """Messages and those within them, without the entries of maps."""
    for kind in kinds:
        if not kind.GetOptions().map_entry:
            yield kind
            yield from messages(kind.nested_types)


MESSAGES = [
    message
    for module in (pb, xds_pb2)
    for message in messages(module.DESCRIPTOR.message_types_by_name.values())
]


def their_name(ours: Descriptor) -> str:
    """Name of Envoy's class: those of nested messages start with the name of the outer one."""
    return ours.full_name.removeprefix(ours.file.package + ".").replace(".", "")


def theirs(ours: Descriptor) -> Any:
    """Envoy's message of that name."""
    name = their_name(ours)
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    return next(getattr(module, name) for module in MODULES if hasattr(module, name))


def described(field: FieldDescriptor) -> tuple[object, ...]:
    """Number, type, repetition and oneof of one of our fields."""
    where = f"{field.containing_type.name}.{field.name}"
    kind = "enum" if where in OPEN_ENUMS else TYPES[field.type]
    entry = field.message_type
    is_map = entry is not None and entry.GetOptions().map_entry
    oneof = field.containing_oneof
    return (
        field.number,
        "map" if is_map else kind,
        is_map or field.is_repeated,
        oneof.name if oneof is not None else None,
    )


def their_description(message: Any, name: str) -> tuple[object, ...]:
    """The same of Envoy's field."""
    meta = message.__dataclass_fields__[name].metadata["betterproto"]
    is_map = meta.map_meta is not None
    return (meta.number, meta.proto_type, is_map or meta.repeated, meta.group)


def their_class(ours: Descriptor) -> str:
    """Name of Envoy's class for one of our messages."""
    name: str = theirs(ours).__name__
    return name


@pytest.mark.parametrize("ours", MESSAGES, ids=their_name)
def test_every_field_is_envoys(ours: Descriptor):
    """Each field has the number, type, repetition and oneof of Envoy's field of that name."""
    message = theirs(ours)
    descriptors = {field.name: described(field) for field in ours.fields}
    assert descriptors == {name: their_description(message, name) for name in descriptors}


@pytest.mark.parametrize("ours", MESSAGES, ids=their_name)
def test_message_fields_have_envoys_types(ours: Descriptor):
    """A field that holds a message holds the one of the same name as Envoy's."""
    message = theirs(ours)
    for field in ours.fields:
        entry = field.message_type
        if entry is None:
            continue
        if entry.GetOptions().map_entry:
            entry = entry.fields_by_name["value"].message_type
            if entry is None:
                continue
        hint = str(message.__dataclass_fields__[field.name].type)
        is_well_known = entry.file.package == "google.protobuf"
        wanted = WELL_KNOWN.get(entry.name, entry.name) if is_well_known else their_class(entry)
        assert wanted in re.findall(r"\w+", hint)


def test_every_part_envoy_sends_is_known():
    """Every part of a request that Envoy may send is one we decode."""
    part = pb.ProcessingRequest.DESCRIPTOR.oneofs_by_name["request"]
    known = {field.name for field in part.fields}
    envoys = {
        name
        for name, field in peer.ext_proc.ProcessingRequest.__dataclass_fields__.items()
        if field.metadata["betterproto"].group == "request"
    }
    assert known == envoys


@pytest.mark.parametrize(
    "module", [pb, keda_pb2, xds_pb2], ids=lambda generated: generated.DESCRIPTOR.name
)
def test_the_generated_module_matches_proto(module: ModuleType, tmp_path: Path):
    """Compiling proto/ anew gives the descriptor that is committed."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}"]
    output = tmp_path / "set"
    subprocess.run(
        [*command, f"--descriptor_set_out={output}", module.DESCRIPTOR.name],
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    (compiled,) = FileDescriptorSet.FromString(output.read_bytes()).file
    committed = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(committed)
    for file in (compiled, committed):
        file.ClearField("name")  # relative to another folder
        forget_json_names(file.message_type)
    assert compiled == committed


def forget_json_names(messages: Iterable[DescriptorProto]) -> None:
    """Drop what only protoc's descriptor set carries."""
    for message in messages:
        for field in message.field:
            field.ClearField("json_name")
        forget_json_names(message.nested_type)
