"""The other end of the wire, written independently of us.

`envoy_data_plane` carries Envoy's own descriptors, so that our codec never tests itself: requests
are built with it and answers are read with it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

with warnings.catch_warnings():
    # pydantic deprecates a validator style that the generated classes use.
    warnings.filterwarnings("ignore", message=r"Using `@model_validator`")
    from envoy_data_plane.envoy.config.core import v3 as core
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as filters
    from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
    from envoy_data_plane.envoy.type import v3 as http  # noqa: F401 - for those who walk descriptors
    from envoy_data_plane.google.protobuf import ListValue, Struct, Value

BALANCER = "envoy.lb"
HINT = "envoy.lb.subset_hint"
HINT_KEY = "x-gateway-destination-endpoint-subset"
SERVED_KEY = "x-gateway-destination-endpoint-served"
DESTINATION = "x-gateway-destination-endpoint"

MODES = {"NONE": 0, "STREAMED": 1, "BUFFERED": 2, "BUFFERED_PARTIAL": 3, "DUPLEX": 4}

Pairs = Mapping[str, str] | Sequence[tuple[str, str]]


class DecodedReply(msgspec.Struct, frozen=True):
    """One answer of ours as the peer reads it; the default of each field is its absence.

    Attributes:
        part: Which member of the answer's oneof is set.
        sets: Headers to set, in order.
        removes: Headers to remove, sorted.
        clears_route: `clear_route_cache`.
        body: Bytes of a `streamed_response`; None when there is no body mutation.
        ends: `end_of_stream` of the `streamed_response`.
        replaces: Bytes of a plain `body` mutation, which the buffered modes take.
        metadata: Dynamic metadata as plain values.
        override: `mode_override` as plain values.
        status: HTTP status of an immediate response.
        error: Its JSON body, or its text with a gRPC status.
        grpc_status: Its gRPC status.
    """

    part: str
    sets: tuple[tuple[str, str], ...] = ()
    removes: tuple[str, ...] = ()
    clears_route: bool = False
    body: bytes | None = None
    ends: bool = False
    replaces: bytes | None = None
    metadata: Mapping[str, Any] = {}
    override: Mapping[str, int] = {}
    status: int = 0
    error: Any = None
    grpc_status: int | None = None

    def __str__(self) -> str:
        facts = [
            f"{name}={_short(value)}"
            for name, value in msgspec.structs.asdict(self).items()
            if name != "part" and value != getattr(_NOTHING, name)
        ]
        return " ".join([self.part, *facts])

    @property
    def headers(self) -> dict[str, str]:
        """The headers it sets."""
        return dict(self.sets)


_NOTHING = DecodedReply("")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:140]}...{len(text)} characters...{text[-60:]}"


def value_of(plain: Any) -> Value:
    """A protobuf Value from a plain one."""
    match plain:
        case None:
            return Value(null_value=0)
        case bool():
            return Value(bool_value=plain)
        case int() | float():
            return Value(number_value=float(plain))
        case str():
            return Value(string_value=plain)
        case Mapping():
            return Value(struct_value=struct_of(plain))
        case _:
            return Value(list_value=ListValue(values=[value_of(item) for item in plain]))


def struct_of(plain: Mapping[str, Any]) -> Struct:
    """A protobuf Struct from a mapping."""
    return Struct(fields={name: value_of(item) for name, item in plain.items()})


def plain_of(value: Value) -> Any:
    """The plain value of a protobuf Value."""
    if value.struct_value is not None:
        return {name: plain_of(item) for name, item in value.struct_value.fields.items()}
    if value.list_value is not None:
        return [plain_of(item) for item in value.list_value.values]
    for result in (value.string_value, value.number_value, value.bool_value):
        if result is not None:
            return result
    return None


def header_map(headers: Pairs, *, raw: bool = True) -> core.HeaderMap:
    """Headers as Envoy writes them (`raw_value`), or as other gateways do (`value`)."""
    pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers)
    return core.HeaderMap(
        headers=[
            core.HeaderValue(key=name, raw_value=value.encode("latin-1"))
            if raw
            else core.HeaderValue(key=name, value=value)
            for name, value in pairs
        ]
    )


def metadata_of(namespaces: Mapping[str, Mapping[str, Any]]) -> core.Metadata:
    """`metadata_context` from plain values by namespace."""
    return core.Metadata(
        filter_metadata={name: struct_of(fields) for name, fields in namespaces.items()}
    )


def hinted(subset: Any) -> core.Metadata:
    """`metadata_context` with a subset hint."""
    return metadata_of({HINT: {HINT_KEY: subset}})


def configuration(request: str, response: str) -> ext_proc.ProtocolConfiguration:
    """`protocol_config` with two body modes, by name."""
    mode = filters.ProcessingModeBodySendMode
    return ext_proc.ProtocolConfiguration(
        request_body_mode=mode(MODES[request]), response_body_mode=mode(MODES[response])
    )


def read(data: bytes) -> DecodedReply:
    """Read one answer strictly: every header by `raw_value` alone, no field we do not know of."""
    message = ext_proc.ProcessingResponse.parse(data)
    metadata = {
        name: plain_of(value)
        for name, value in (
            message.dynamic_metadata.fields if message.dynamic_metadata is not None else {}
        ).items()
    }
    override = (
        {name: int(value) for name, value in vars_of(message.mode_override).items() if int(value)}
        if message.mode_override is not None
        else {}
    )
    refusal = message.immediate_response
    if refusal is not None:
        sets, removes = _mutation(refusal.headers)
        body, status = refusal.body, refusal.grpc_status
        return DecodedReply(
            "immediate_response",
            sets=sets,
            removes=removes,
            metadata=metadata,
            override=override,
            status=int(refusal.status.code),
            error=json.loads(body) if status is None else body.decode(),
            grpc_status=None if status is None else status.status,
        )
    for part in ("request_trailers", "response_trailers"):
        trailers = getattr(message, part)
        if trailers is not None:
            sets, removes = _mutation(trailers.header_mutation)
            return DecodedReply(
                part, sets=sets, removes=removes, metadata=metadata, override=override
            )
    for part in ("request_headers", "request_body", "response_headers", "response_body"):
        answer = getattr(message, part)
        if answer is not None:
            return _common(part, answer.response, metadata, override)
    raise AssertionError(f"an answer without a part: {data!r}")


def vars_of(message: Any) -> dict[str, Any]:
    """The fields of a peer message by name."""
    return {name: getattr(message, name) for name in message.__dataclass_fields__}


def _common(
    part: str,
    common: ext_proc.CommonResponse | None,
    metadata: Mapping[str, Any],
    override: Mapping[str, int],
) -> DecodedReply:
    assert common is not None, f"{part} without a CommonResponse"
    assert int(common.status) == 0, "CONTINUE_AND_REPLACE is never used"
    assert common.trailers is None
    sets, removes = _mutation(common.header_mutation)
    body, ends, replaces = None, False, None
    if common.body_mutation is not None:
        streamed, replaces = common.body_mutation.streamed_response, common.body_mutation.body
        assert (streamed is None) is not (replaces is None), "clear_body is never used"
        if streamed is not None:
            body, ends = streamed.body, streamed.end_of_stream
    return DecodedReply(
        part,
        sets=sets,
        removes=removes,
        clears_route=common.clear_route_cache,
        body=body,
        ends=ends,
        replaces=replaces,
        metadata=metadata,
        override=override,
    )


def _mutation(
    mutation: ext_proc.HeaderMutation | None,
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    if mutation is None:
        return (), ()
    sets = []
    for option in mutation.set_headers:
        header = option.header
        assert header is not None
        assert header.value == "", f"{header.key} carries value; Envoy wants raw_value alone"
        assert option.append is None
        assert int(option.append_action) == 0
        sets.append((header.key, header.raw_value.decode("latin-1")))
    return tuple(sets), tuple(sorted(mutation.remove_headers))
