from __future__ import annotations

import json
import tracemalloc
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.protocol.headers import DESTINATION, SCORES
from extproc.protocol.messages import (
    BodyMode,
    BodyModes,
    ContinueResponse,
    ImmediateResponse,
    LbMetadata,
    MessageKind,
    ProcessingRequest,
    ProcessingResponse,
    ResponseHeadersMutation,
    RouteResponse,
    StreamedBodyResponse,
    WithDecision,
    attach_decision,
)
from extproc.wire import codec
from tests.support import ext_proc_script, peer
from tests.support.peer import DecodedReply

#: A first run imports lazily; time is not what is tested.
calm = settings(deadline=None)

PARTS = {
    MessageKind.REQUEST_HEADERS: "request_headers",
    MessageKind.REQUEST_BODY: "request_body",
    MessageKind.REQUEST_TRAILERS: "request_trailers",
    MessageKind.RESPONSE_HEADERS: "response_headers",
    MessageKind.RESPONSE_BODY: "response_body",
    MessageKind.RESPONSE_TRAILERS: "response_trailers",
}
addresses = st.one_of(
    st.just(""), st.just("10.0.0.1:8000"), st.just("[fd00::1]:1,a:2"), st.text("a.:,", max_size=300)
)
names = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=30)
values = st.text(st.characters(max_codepoint=255), max_size=60)
headers = st.lists(st.tuples(names, values), max_size=5).map(tuple)
body_kinds = st.sampled_from([MessageKind.REQUEST_BODY, MessageKind.RESPONSE_BODY])


def metadata_of(destination: str) -> dict[str, object]:
    return ext_proc_script.destination_metadata(destination) if destination else {}


def decoded(reply: ProcessingResponse) -> DecodedReply:
    data = codec.encode(reply)
    assert isinstance(data, bytes)
    return peer.read(data)


@given(
    kind=body_kinds,
    # Around the lengths at which a varint grows by a byte, at each of the nested levels.
    size=st.one_of(
        st.integers(0, 300), st.integers(16360, 16400), st.integers(61990, 62000), st.just(2097152)
    ),
    ends=st.booleans(),
    destination=addresses,
    view=st.booleans(),
)
@calm
def test_fast_encoded_chunks_decode_equally(
    kind: MessageKind, size: int, *, ends: bool, destination: str, view: bool
):
    """A body piece framed by hand parses as that piece, whatever its size, end and destination."""
    body = b"\x0a\x1a\x00\xff"[: size % 5] + b"x" * (size - min(size, size % 5, 4))
    reply = StreamedBodyResponse(kind, memoryview(body) if view else body, ends, destination)
    assert decoded(reply) == DecodedReply(
        PARTS[kind], body=body, ends=ends, metadata=metadata_of(destination)
    )
    assert b"".join(codec.encode_pieces(reply)) == codec.encode(reply)


@given(kind=st.sampled_from(sorted(PARTS)), destination=addresses)
@calm
def test_continue_responses_decode_equally(kind: MessageKind, destination: str):
    """Every kind can be let pass, with or without a destination in the metadata."""
    assert decoded(ContinueResponse(kind, destination)) == DecodedReply(
        PARTS[kind], metadata=metadata_of(destination)
    )


@given(
    kind=st.sampled_from([MessageKind.REQUEST_HEADERS, MessageKind.REQUEST_BODY]),
    destination=addresses.filter(bool),
    sets=headers,
    removes=st.lists(names, max_size=4).map(tuple),
)
@calm
def test_route_responses_decode_equally(kind, destination, sets, removes):
    """A pick parses as its header, its metadata and its other mutations, in order."""
    for _ in range(2):  # the second time from the cache, if there is one
        assert decoded(RouteResponse(kind, destination, sets, removes)) == ext_proc_script.route(
            destination, part=PARTS[kind], sets=sets, removes=removes
        )


@given(sets=headers, size=st.sampled_from([0, 1, 127, 128, 16_383, 16_384, 40_000]))
@calm
def test_routes_with_a_body_and_scores_decode_equally(sets, size):
    """The body replaces that of the request, and scores are beside the destination."""
    body, scores = b"x" * size, (("10.0.0.1:8000", 1.5), ("10.0.0.2:8000", 0.25))
    reply = RouteResponse(MessageKind.REQUEST_BODY, "10.0.0.1:8000", sets, (), body, scores)
    routed = ext_proc_script.route("10.0.0.1:8000", part="request_body", sets=sets)
    parsed = decoded(reply)
    assert (parsed.part, parsed.sets, parsed.clears_route) == (routed.part, routed.sets, True)
    assert parsed.replaces == body
    (balancer,) = parsed.metadata.values()
    assert balancer == {DESTINATION: "10.0.0.1:8000", SCORES: dict(scores)}


@given(text=st.text(max_size=200), size=st.sampled_from([0, 1, 90, 110, 127, 128, 16_383, 16_384]))
@calm
def test_decisions_decode_beside_the_destination(text, size):
    """Both are dynamic metadata; what UTF-8 cannot have is replaced."""
    text = f"{text}{'x' * size}"
    shown = {"extproc": {"decision": text.encode(errors="replace").decode()}}
    for destination in ("10.0.0.1:8000", ",".join(["10.0.0.1:8000"] * 20)):
        route = RouteResponse(MessageKind.REQUEST_HEADERS, destination)
        assert decoded(WithDecision(route, text)).metadata == metadata_of(destination) | shown
    scored = msgspec.structs.replace(route, scores=(("10.0.0.1:8000", 1.5),))
    parsed = decoded(WithDecision(scored, text)).metadata
    assert parsed == decoded(scored).metadata | shown
    unnamed = ContinueResponse(MessageKind.REQUEST_TRAILERS)
    assert decoded(WithDecision(unnamed, text)).metadata == shown


def test_decisions_with_scores_are_not_remembered():
    """Their scores never repeat, and each holds one of every endpoint."""
    addresses = [f"10.0.{at}.1:8000" for at in range(200)]
    tracemalloc.start()
    try:
        for number in range(50):
            scores = tuple((address, number / (1 + at)) for at, address in enumerate(addresses))
            route = RouteResponse(MessageKind.REQUEST_HEADERS, addresses[0], scores=scores)
            codec.encode(WithDecision(route, "why"))
            if not number:
                before, _ = tracemalloc.get_traced_memory()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held - before < 100_000


def test_the_first_of_many_replies_has_the_decision():
    """The others are as they were, and are made as they are consumed."""
    replies = [
        ContinueResponse(MessageKind.REQUEST_BODY),
        ContinueResponse(MessageKind.REQUEST_BODY),
    ]
    for build in (tuple, iter):
        first, second = attach_decision(build(replies), "why")
        assert (first, second) == (WithDecision(replies[0], "why"), replies[1])
        assert not list(attach_decision(build(()), "why"))


@given(sets=headers, mode=st.sampled_from([None, BodyMode.STREAMED, BodyMode.BUFFERED]))
@calm
def test_response_header_mutations_decode_equally(sets, mode):
    """The answer to response headers parses as its headers and its mode override."""
    override = {"response_header_mode": 1, "response_body_mode": mode, "response_trailer_mode": 1}
    assert decoded(ResponseHeadersMutation(sets, mode)) == DecodedReply(
        "response_headers", sets=sets, override={} if mode is None else override
    )


@given(
    status=st.sampled_from([400, 413, 429, 500, 503]),
    sets=headers,
    error=st.dictionaries(st.text(), st.text()),
    grpc_status=st.one_of(st.none(), st.integers(0, 16)),
)
@calm
def test_immediate_responses_decode_equally(status, sets, error, grpc_status):
    """An immediate response parses as its status, headers, body and gRPC status."""
    body = json.dumps(error).encode()
    assert decoded(ImmediateResponse(status, sets, body, grpc_status)) == DecodedReply(
        "immediate_response",
        sets=sets,
        status=status,
        error=error if grpc_status is None else body.decode(),
        grpc_status=grpc_status,
    )


@given(st.binary(max_size=200))
@calm
def test_decode_is_total(data: bytes):
    """Whatever the bytes, an event comes out."""
    assert isinstance(codec.decode(data), ProcessingRequest)


@given(
    st.data(),
    st.sampled_from(
        [
            ext_proc_script.request_headers(metadata=peer.hinted(["10.0.0.1:8000", 7])),
            ext_proc_script.request_body(b"some bytes", ends=True),
            ext_proc_script.request_trailers(),
            ext_proc_script.response_headers(metadata=peer.metadata_of({"envoy.lb": {"a": [1]}})),
        ]
    ),
)
@calm
def test_decode_is_total_on_damaged_messages(data, message):
    """Cut and overwritten messages decode to some event."""
    good = bytearray(message.encode(ext_proc_script.DUPLEX))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    assert isinstance(
        codec.decode(bytes(good[: data.draw(st.integers(0, len(good)))])), ProcessingRequest
    )


def test_bytes_that_are_no_message_are_garbage():
    """Bytes that cannot be parsed are GARBAGE; an empty message is UNKNOWN."""
    assert codec.decode(b"\xff\xff\xff").kind is MessageKind.GARBAGE
    assert codec.decode(b"").kind is MessageKind.UNKNOWN


@given(body=st.binary(max_size=300), ends=st.booleans(), kind=body_kinds)
@calm
def test_bodies_decode_equally(body: bytes, ends: bool, kind: MessageKind):  # noqa: FBT001
    """A body message decodes to its bytes and its end."""
    say = (
        ext_proc_script.request_body
        if kind is MessageKind.REQUEST_BODY
        else ext_proc_script.response_body
    )
    assert codec.decode(say(body, ends=ends).encode(None)) == ProcessingRequest(
        kind, body=body, end_of_stream=ends
    )


@given(
    pairs=st.lists(
        st.tuples(st.text("abcXYZ-:", min_size=1, max_size=8), values.filter(bool)), max_size=6
    ),
    ends=st.booleans(),
)
@calm
def test_headers_decode_in_lower_case_the_last_one_wins(pairs, ends):
    """Header names are read in lower case, and of duplicates the last value."""
    for say, kind in (
        (ext_proc_script.request_headers, MessageKind.REQUEST_HEADERS),
        (ext_proc_script.response_headers, MessageKind.RESPONSE_HEADERS),
    ):
        event = codec.decode(say(pairs, ends=ends).encode(None))
        assert event == ProcessingRequest(
            kind, {name.lower(): value for name, value in pairs}, end_of_stream=ends
        )


@pytest.mark.parametrize("request_mode", peer.MODES)
@pytest.mark.parametrize("response_mode", peer.MODES)
def test_declared_modes_are_read(request_mode: str, response_mode: str):
    """Every pair of body modes is read from protocol_config."""
    event = codec.decode(ext_proc_script.request_trailers().encode((request_mode, response_mode)))
    assert event.modes == BodyModes(
        BodyMode(peer.MODES[request_mode]), BodyMode(peer.MODES[response_mode])
    )


def test_metadata_is_read():
    """The subset hint and the served endpoint are read from their namespaces."""
    metadata = peer.metadata_of(
        {peer.HINT: {peer.HINT_KEY: ["a:1, b:2"]}, peer.BALANCER: {peer.SERVED_KEY: "c:3"}}
    )
    event = codec.decode(ext_proc_script.response_headers(metadata=metadata).encode(None))
    assert event.hints == LbMetadata(("a:1", "b:2"), balancer=True, served="c:3")
    assert event.modes is None


MIB = 1 << 20
HALF_MIB_OF_METADATA = peer.metadata_of({peer.BALANCER: {"other": "x" * (MIB // 2)}})


@pytest.mark.parametrize(
    ("message", "is_large"),
    [
        (ext_proc_script.request_body(b"x" * (3 * MIB), ends=True), False),
        (ext_proc_script.response_body(b"x" * (3 * MIB)), False),
        (ext_proc_script.request_body(b"x" * MIB, metadata=HALF_MIB_OF_METADATA), False),
        (
            ext_proc_script.request_body(
                b"x" * MIB, metadata=peer.metadata_of({peer.BALANCER: {"other": "x" * MIB}})
            ),
            True,
        ),
        (ext_proc_script.request_headers({"a": "x" * (MIB // 2)}), False),
        (ext_proc_script.request_headers({"a": "x" * MIB}), True),
        (ext_proc_script.response_headers({"a": "x" * MIB}), True),
        (
            ext_proc_script.request_headers({"a": "x" * (MIB // 2)}, metadata=HALF_MIB_OF_METADATA),
            True,
        ),
    ],
)
def test_bytes_besides_a_body_are_bounded(message, is_large):
    """Headers, metadata and both together, but no body of any size."""
    assert codec.has_large_head(message.encode(None)) == is_large
    assert codec.has_large_head(bytearray(message.encode(("DUPLEX", "BUFFERED")))) == is_large


@pytest.mark.parametrize(
    "start",
    [
        b"\x22\x05\x0a\x03abc",  # a short body, and what follows it
        b"\x22\x7f\xff\xff\xff\x7f\x0a",  # a short field, whose content reads like a length
        b"\x22\x80\x80\x80\x01\x0a\x03abc",  # a short body in a long field
        b"\x22\x86\x00\x0a\x80\x80\x80\x01",  # a body that is longer than its field
        b"\x22\x80\x80\x80\x01\x10\x01",  # something else before the body
        b"\x42\x00\x22\x80\x80\x80\x01\x0a\x80\x80\x80\x01",  # a body after metadata
        b"",
    ],
)
def test_messages_that_only_look_like_a_body_are_large(start: bytes):
    """A body counts where encoders put it."""
    assert codec.has_large_head(start + bytes(2 * MIB))


def test_the_service_has_envoys_name():
    """The gRPC method is Envoy's, though our proto package is not."""
    assert f"/{codec.SERVICE}/{codec.METHOD}" == (
        "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
    )


def test_every_reply_has_a_writer():
    """Whatever the protocol says can be written."""
    assert set(codec._WRITERS) == set(get_args(ProcessingResponse))


@pytest.mark.parametrize("size", [0, 127, 128, 16369, 16370, 16384])
@pytest.mark.parametrize("ends", [False, True])
def test_pieces_at_the_bounds_of_two_byte_lengths(size: int, *, ends: bool):
    """A piece whose lengths all take two bytes reads like its shorter and longer neighbors."""
    piece = decoded(StreamedBodyResponse(MessageKind.REQUEST_BODY, b"x" * size, ends))
    assert piece == ext_proc_script.hand_on(b"x" * size, ends=ends)
