import functools
import io
import struct

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from extproc.parsing import canonical_prompt, vllm_grpc
from tests.parsing import builders
from tests.parsing.builders import field, frame, varint

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
EMBED = "/vllm.grpc.engine.VllmEngine/Embed"
INVALID = "invalid or unsupported gRPC payload"


def packed(*ids):
    return struct.pack(f"<{len(ids)}I", *ids)


def pack_varints(run):
    """Packed ids; None where they are refused."""
    rows = io.BytesIO()
    vllm_grpc.reserve(rows, vllm_grpc.count_varints(run))
    return rows.getvalue() if vllm_grpc.pack_varints(run, rows) else None


IDS = (5, 300, 70_000, 3_000_000, 2**32 - 2)
TOKENIZED = field(1, b"text") + field(2, b"".join(map(varint, IDS)))
MESSAGE = field(1, b"id") + field(2, TOKENIZED) + field(4, field(8, 64)) + field(5, 1)


def test_generate():
    """Point 107: tokens, bound and stream flag; the model comes from a header, if at all."""
    request = builders.parsed(GENERATE, frame(MESSAGE), x_llm_d_model_name_rewrite="m")
    assert (request.api, request.model) == ("grpc_generate", "m")
    assert (request.prompt, request.prompt_tokens) == (packed(*IDS), len(IDS))
    assert (request.max_tokens, request.stream) == (64, True)


def test_generate_from_text():
    """Text is an input like any other."""
    request = builders.parsed(GENERATE, frame(field(3, b"hello there")))
    assert (request.prompt, request.prompt_tokens) == (b"hello there", 2)
    assert (request.max_tokens, request.stream) == (None, False)


@pytest.mark.parametrize(("sent", "read"), [(2**31 - 1, 2**31 - 1), (2**32 - 1, 2**31 - 1)])
def test_most_tokens_are_bounded_as_elsewhere(sent, read):
    """A uint32 may be twice as large as the largest bound of other surfaces."""
    request = builders.parsed(GENERATE, frame(field(3, b"hello") + field(4, field(8, sent))))
    assert request.max_tokens == read


def test_embed():
    """Point 107: Embed reads tokenized input."""
    request = builders.parsed(EMBED, frame(field(1, b"id") + field(2, TOKENIZED)))
    assert (request.api, request.prompt) == ("grpc_embed", packed(*IDS))


def test_ids_that_are_not_packed():
    """A repeated number may be sent one field each."""
    message = field(2, b"".join(field(2, token) for token in IDS))
    assert builders.parsed(EMBED, frame(message)).prompt == packed(*IDS)


def test_images_mark_their_placeholders():
    """Placeholders of different pictures differ, tokens around them stay."""

    def prompt(name):
        pictures = field(5, field(1, 1) + field(2, 2)) + field(6, name)
        return builders.parsed(GENERATE, frame(field(2, TOKENIZED) + field(7, pictures))).prompt

    first, other = prompt(b"a"), prompt(b"b")
    assert first[:4] == other[:4] == packed(5)
    assert first[4:12] != other[4:12]
    assert first[12:] == packed(*IDS)[12:]


@pytest.mark.parametrize(
    "body",
    [
        b"\0",
        b"\0\0\0\0",
        b"\0\0\0\0\x09abc",
        frame(MESSAGE)[:-1],
        frame(MESSAGE, flag=1),
        frame(MESSAGE, flag=128),
        frame(b""),
        frame(b"\x0b"),
        frame(b"\x80"),
        frame(b"\xff" * 11),
        frame(b"\x00\x01"),
        frame(field(1, b"id")),
        frame(field(2, field(2, b"\x80"))),
        frame(field(2, field(2, b"\x80" * 12 + b"\x01"))),
        frame(field(2, b"\x12\x7f")),
        frame(field(2, field(1, b"text"))),
        frame(field(2, 7)),
        frame(b"\x12\xff\xff\xff\xff\x0fab"),
    ],
    ids=range(18),
)
@pytest.mark.parametrize("path", [GENERATE, EMBED])
def test_bad_frames(path, body):
    """Point 109: a compressed, short or malformed frame, and one without input, is refused."""
    assert builders.refused(path, body) == INVALID


def test_embed_wants_tokens():
    """Text is no input for Embed."""
    assert builders.refused(EMBED, frame(field(3, b"text"))) == INVALID


def test_other_methods_are_opaque():
    """Point 110: another gRPC method is routed raw."""
    request = builders.parsed("/vllm.grpc.engine.VllmEngine/Abort", b"\1garbage")
    assert request.api == "opaque"


def test_unknown_fields_are_skipped():
    """Fixed-width and unknown fields are stepped over."""
    extra = varint(9 << 3 | 1) + b"8 bytes!" + varint(10 << 3 | 5) + b"four" + field(99, 2**63)
    assert builders.parsed(GENERATE, frame(extra + MESSAGE)).prompt == packed(*IDS)


@functools.cache
def a_message_class():
    """Class of protobuf for the part of GenerateRequest that is read."""
    kinds = {"uint32": 13, "string": 9, "bool": 8}
    file = descriptor_pb2.FileDescriptorProto(name="v.proto", package="v", syntax="proto3")
    for name, fields in {
        "Tokenized": [("input_ids", 2, "uint32", 3)],
        "Sampling": [("max_tokens", 8, "uint32", 1)],
        "Generate": [
            ("tokenized", 2, "Tokenized", 1),
            ("text", 3, "string", 1),
            ("sampling", 4, "Sampling", 1),
            ("stream", 5, "bool", 1),
        ],
    }.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind, label in fields:
            entry = message.field.add(name=field_name, number=number, label=label)
            if kind in kinds:
                entry.type = kinds[kind]
            else:
                entry.type, entry.type_name = 11, f".v.{kind}"
            if name == "Generate" and number in (2, 3):
                entry.oneof_index = 0
    file.message_type[-1].oneof_decl.add(name="input")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("v.Generate"))


_FIXED_IDS = varint(2 << 3 | 5) + bytes(4)
_FIELDS_OF_GENERATE = (
    field(2, field(2, b"\1\2\3")),
    field(2, field(2, 7) + _FIXED_IDS),
    field(2, b""),
    field(2, 9),
    field(3, b"hello"),
    field(4, field(8, 64)),
    field(4, field(11, b"stop")),
    field(4, varint(8 << 3 | 1) + bytes(8)),
    field(5, 1),
    field(5, 0),
    field(5, b"\1"),
    varint(5 << 3 | 5) + b"\0\0\0\0",
)


@given(st.lists(st.sampled_from(_FIELDS_OF_GENERATE), max_size=8))
def test_fields_are_read_as_protobuf_reads_them(fields):
    """Embedded messages are merged, the last input counts, and other wire types are unknown."""
    message = b"".join(fields)
    expected = a_message_class().FromString(message)
    ids = list(expected.tokenized.input_ids)
    if not ids and expected.WhichOneof("input") != "text":
        assert builders.refused(GENERATE, frame(message)) == INVALID
        return
    request = builders.parsed(GENERATE, frame(message))
    assert request.prompt == (packed(*ids) if ids else b"hello")
    assert request.stream == expected.stream
    assert (request.max_tokens or 0) == expected.sampling.max_tokens


def test_only_the_first_message_is_read():
    """Only the first message of a body counts."""
    assert vllm_grpc.message_of(frame(b"a") + frame(b"b")) == b"a"


@pytest.mark.parametrize("value", [0, 1, 127, 128, 2**14 - 1, 2**14, 2**21, 2**28, 2**32 - 1])
def test_varints(value):
    """Every width of a varint reads back, alone and between others."""
    run = varint(3) + varint(value) + varint(4)
    assert vllm_grpc.unpack_varints(run) == [3, value, 4]


def test_varints_of_64_bits():
    """A value above 32 bits is cut, as protobuf parsers do."""
    assert vllm_grpc.unpack_varints(varint(2**40 + 5)) == [5]
    assert vllm_grpc.unpack_varints(varint(2**64 - 1)) == [2**32 - 1]


@given(st.lists(st.one_of(*(st.integers(0, 2**bits) for bits in (7, 14, 21, 32, 63))), max_size=40))
def test_packed_varints_equal_single_decoding(ids):
    """Whatever the lengths of varints beside one another, each value is cut to four bytes."""
    run = b"".join(map(varint, ids))
    assert pack_varints(run) == canonical_prompt.pack(vllm_grpc.unpack_varints(run))


@pytest.mark.parametrize("value", [1, 2**14 - 1, 2**21 - 1, 2**32 - 1])
def test_packed_varints_of_many_chunks(value):
    """Chunks end between values."""
    ids = [value, 5, 300] * 30_000
    assert pack_varints(b"".join(map(varint, ids))) == canonical_prompt.pack(ids)


def test_packed_varints_beyond_an_uint32_are_few():
    """Values of more bytes than an uint32 takes are read in the first chunks and refused behind."""
    long = varint(2**40 + 5)
    assert pack_varints(long * 20_000) == canonical_prompt.pack([5] * 20_000)
    assert pack_varints(long * 50_000) is None
    assert pack_varints(b"\x01" * 200_000 + long) is not None


@pytest.mark.parametrize("run", [b"\x80", b"\x01\xff", b"\xff" * 11 + b"\x01"])
def test_packed_varints_cut_or_endless(run):
    """A varint without an end, or of more than ten bytes, makes the field malformed."""
    assert pack_varints(run) is None
