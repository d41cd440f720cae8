from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extproc.protocol.messages import MessageKind
from extproc.wire import codec, protobuf_decoder
from tests.support import ext_proc_script, peer
from tests.support.seeded import examples

calm = settings(deadline=None, max_examples=examples(200))

names = st.text("abcXYZ-:", min_size=0, max_size=200)
values = st.text(st.characters(max_codepoint=255), max_size=300)
pairs = st.lists(st.tuples(names, values), max_size=5)
metadata = st.sampled_from(
    [
        None,
        peer.metadata_of({}),
        peer.hinted(["10.0.0.1:8000"]),
        peer.metadata_of({"envoy.lb": {peer.SERVED_KEY: "a:1"}}),
    ]
)
ends = st.booleans()
messages = st.one_of(
    st.builds(ext_proc_script.request_headers, pairs, ends=ends, raw=ends, metadata=metadata),
    st.builds(ext_proc_script.response_headers, pairs, ends=ends, metadata=metadata),
    st.builds(ext_proc_script.request_body, st.binary(max_size=400), ends=ends, metadata=metadata),
    st.builds(ext_proc_script.response_body, st.binary(max_size=400), ends=ends),
    st.just(ext_proc_script.request_trailers()),
)
modes = st.sampled_from([None, ext_proc_script.DUPLEX, ("BUFFERED", "NONE")])


def agree(data: bytes) -> None:
    """The quick reader and the general parser see the same event, in a bytearray too."""
    expected = protobuf_decoder.decode(data)
    assert codec.decode(data) == expected
    assert codec.decode(bytearray(data)) == expected


@given(message=messages, modes=modes)
@calm
def test_common_messages_decode_as_with_protobuf(message, modes):
    """Reading by hand gives what the general parser gives."""
    agree(message.encode(modes))


#: Lengths of names and values: those of which a byte looks like a tag or a character of a name, those
#: that take more bytes, and none.
name_lengths = st.sampled_from([1, 10, 33, 37, 45, 97, 122, 126, 127, 128])
value_lengths = st.sampled_from([0, 1, 10, 120, 127, 128, 1240, 1300, 1390, 1407, 16_300, 16_384])


@given(lengths=st.lists(st.tuples(name_lengths, value_lengths), max_size=8))
@calm
@example([(37, 1300)] * 5 + [(1, 0)])
def test_headers_of_any_length_decode_as_with_protobuf(lengths):
    """A length is not taken for a part of a name, also where bytes left out make up for it."""
    headers = [
        (f"{at}".ljust(name, "k")[:name], "v" * value) for at, (name, value) in enumerate(lengths)
    ]
    agree(ext_proc_script.request_headers(headers).encode(None))


@given(message=messages, modes=modes, data=st.data())
@calm
def test_damaged_messages_decode_as_with_protobuf(message, modes, data):
    """Also of cut and overwritten messages, whose lengths lie."""
    raw = bytearray(message.encode(modes))
    for _ in range(data.draw(st.integers(0, 3))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    agree(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


@given(data=st.binary(max_size=40), tag=st.sampled_from(b"\x12\x1a\x22\x2a"))
@calm
@example(b"\x01\x0a", 0x12)
@example(b"\x03\x0a\x01\x0a", 0x12)
@example(b"\x04\x0a\x02\x0a\x00", 0x12)
@example(b"\x80", 0x22)
@example(b"\x01\x0a", 0x22)
def test_any_bytes_after_a_known_tag_decode_as_with_protobuf(data: bytes, tag: int):
    """Whatever follows the tag of a plain message, both readers agree."""
    agree(bytes((tag,)) + data)


def test_fields_after_the_message_are_read():
    """Modes and metadata behind the part are read, and a second part replaces the first."""
    first = ext_proc_script.request_body(b"a").encode(("BUFFERED", "NONE"))
    second = ext_proc_script.request_headers(ends=True, metadata=peer.hinted(["a:1"])).encode(None)
    agree(first)
    agree(first + second)
    agree(second + first)
    assert codec.decode(first + second).kind is MessageKind.REQUEST_HEADERS


@pytest.mark.parametrize("length", [1, 600])
def test_cached_response_headers_decode_equally(length: int):
    """Short headers of an answer are remembered, long ones are not; the event is the same."""
    data = ext_proc_script.response_headers({":status": "200", "server": "x" * length}).encode(None)
    agree(data)
    agree(data)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152, 3_000_000])
def test_bodies_of_any_size_use_the_fast_decoder(monkeypatch, size):
    """A length takes a byte for every 7 bits; the general parser would copy the body."""
    data = ext_proc_script.request_body(b"x" * size, ends=True).encode(ext_proc_script.DUPLEX)
    expected = protobuf_decoder.decode(data)
    monkeypatch.setattr(
        protobuf_decoder, "decode", lambda _: pytest.fail("the general parser was called")
    )
    assert codec.decode(data) == expected
    assert len(expected.body) == size
    large = bytearray(data)
    event = codec.decode(large)
    assert event == expected
    assert event.body is large or size <= 16
