"""Usage in the gRPC responses of vLLM."""

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from extproc.parsing import usage, vllm_grpc_usage
from extproc.protocol import response_handling
from tests.parsing.builders import field, frame, varint


def numbers(first, *values):
    """Fields of consecutive numbers; as protobuf, none for 0."""
    return b"".join(field(first + place, value) for place, value in enumerate(values) if value)


def chunk(ids, *counts):
    """Frame of a GenerateStreamChunk with prompt, completion and cached tokens."""
    packed = field(1, b"".join(map(varint, ids))) if ids else b""
    return frame(field(1, packed + numbers(2, *counts)))


def complete(*counts, ids=()):
    """Frame of a GenerateComplete with prompt, completion and cached tokens."""
    packed = field(1, b"".join(map(varint, ids))) if ids else b""
    return frame(field(2, packed + field(2, b"stop") + numbers(3, *counts)))


def counted(prompt, completion, cached):
    return {"prompt": prompt, "completion": completion, "cached": cached}


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (complete(7, 10, 4, ids=[1, 300, 70_000]), counted(7, 10, 4)),
        (chunk([1, 2, 3]) + complete(7, 10), counted(7, 10, 0)),
        (chunk([1], 7, 1, 4) + chunk([2], 7, 10, 4), counted(7, 10, 4)),
        (chunk([1], 7, 1, 4) + complete(), counted(7, 1, 4)),
        (chunk([1], 7, 1, 4) + complete(8, 0, 5), counted(8, 1, 5)),
        (chunk([1, 300], 7, 2) + chunk([70_000], 7, 1) + complete(7, 1), counted(7, 3, 0)),
        (chunk(range(300), 7, 300) + complete(7, 1), counted(7, 300, 0)),
        (complete(7, 10, 4) + b"\0\0\0", counted(7, 10, 4)),
        (chunk([1], 7, 1) + chunk([2], 7, 1) + chunk([3], 7, 1)[:-1], {"prompt": 7, "cached": 0}),
        (complete(0, 10, 4), {"completion": 10}),
        (complete(7, 10, 9), counted(7, 10, 7)),
        (complete(7, 2**31), {"prompt": 7, "cached": 0}),
        (complete(7, 2**32 + 10), counted(7, 10, 0)),
        (frame(field(2, field(3, b"7") + field(4, 10))), {"completion": 10}),
        (frame(field(2, numbers(3, 7, 10)), flag=1), {}),
        (frame(field(3, numbers(3, 7, 10))), {}),
        (frame(field(2, 7)), {}),
        (frame(b"\x12\x04\x18\x07"), {}),
        (chunk([1, 2, 3]), {}),
        (b'{"usage":{"prompt_tokens":7}}', {}),
        (b"", {}),
    ],
)
def test_usage_of_generate(tail, expected):
    """The last message with numbers counts, and at least as many tokens as the chunks have."""
    assert usage.read(tail, "grpc_generate") == expected


_EMBEDDING = field(1, bytes(4 * 1024))


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (frame(_EMBEDDING + field(2, 7) + field(3, 1024)), {"prompt": 7}),
        (frame(_EMBEDDING + field(2, 2**31)), {}),
        (frame(_EMBEDDING + field(2, b"7")), {}),
        (frame(_EMBEDDING), {}),
        (frame(_EMBEDDING + field(2, 7))[:-1], {}),
        (frame(field(2, 7), flag=1), {}),
        (b"", {}),
    ],
)
def test_usage_of_embed(tail, expected):
    """An embedding has tokens of the prompt alone."""
    assert usage.read(tail, "grpc_embed") == expected


@pytest.mark.parametrize("size", [100, 1000, 65_536, 100_000])
@pytest.mark.parametrize(
    ("completion", "expected"),
    [(1, {"prompt": 700, "cached": 640}), (9000, counted(700, 9000, 640))],
    ids=["of-the-last-chunk", "of-all-chunks"],
)
def test_usage_of_a_cut_stream(size, completion, expected):
    """The frames behind the gap are found; a number below that of the chunks shown is none."""
    chunks = [chunk([token], 700, 1, 640) for token in range(9000)]
    body = b"".join([*chunks, complete(700, completion, 640)])
    tail = response_handling.TailBuffer()
    for start in range(0, len(body), size):
        tail.add(body[start : start + size])
    joined = tail.joined()
    assert len(joined) < len(body)
    assert usage.read(joined, "grpc_generate") == expected


@pytest.mark.parametrize(
    "tail",
    [
        bytes(65_536),
        b"\1" + bytes(65_536),
        b"\1" + frame(b"\x0a") * 11_000 + b"\1",
        chunk([1], 7, 1) * (vllm_grpc_usage.MAX_FRAMES + 1),
        frame(field(1, bytes(70_000)))[:65_536],
    ],
    ids=["empty-frames", "no-start", "no-end", "too-many", "long"],
)
def test_bodies_of_many_frames_report_nothing(tail):
    """The number of frames that are read is bounded, also where none of them leads to the end."""
    assert usage.read(tail, "grpc_generate") == {}


_PARTS = st.one_of(
    st.binary(max_size=40),
    st.builds(complete, *[st.integers(0, 2**64 - 1)] * 3),
    st.builds(chunk, st.lists(st.integers(0, 2**32 - 1), max_size=3), *[st.integers(0, 99)] * 3),
    st.builds(frame, st.binary(max_size=20), st.integers(0, 2)),
    st.builds(field, st.integers(1, 5), st.binary(max_size=20)),
)


@given(st.lists(_PARTS, max_size=8).map(b"".join), st.sampled_from(["grpc_generate", "grpc_embed"]))
def test_no_bytes_make_reading_fail(tail, api):
    """Whatever the bytes are, numbers are in range, and cached tokens are of the prompt."""
    counts = usage.read(tail, api)
    assert counts.keys() <= {"prompt", "completion", "cached"}
    assert all(0 <= tokens <= usage.MAX_TOKENS for tokens in counts.values())
    assert counts.get("cached", 0) <= counts.get("prompt", 0)


def response_class():
    """Class of protobuf for GenerateResponse."""
    uint32, text, message = 13, 9, 11
    file = descriptor_pb2.FileDescriptorProto(name="r.proto", package="r", syntax="proto3")
    for name, fields in {
        "Chunk": [("ids", 1, uint32), *_count_fields(2)],
        "Complete": [("ids", 1, uint32), ("reason", 2, text), *_count_fields(3)],
        "Response": [("Chunk", 1, message), ("Complete", 2, message)],
    }.items():
        described = file.message_type.add(name=name)
        for field_name, number, kind in fields:
            entry = described.field.add(name=field_name.lower(), number=number, type=kind)
            entry.label = 3 if field_name == "ids" else 1
            if kind == message:
                entry.type_name, entry.oneof_index = f".r.{field_name}", 0
    file.message_type[-1].oneof_decl.add(name="response")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("r.Response"))


def _count_fields(first):
    return [
        (kind, first + place, 13) for place, kind in enumerate(("prompt", "completion", "cached"))
    ]


_UINT32 = st.integers(0, 2**31 - 1)


@given(
    st.sampled_from(["chunk", "complete"]),
    st.lists(_UINT32, max_size=200),
    _UINT32,
    _UINT32,
    _UINT32,
)
def test_messages_of_protobuf_are_read(response, ids, prompt, completion, cached):
    """Messages that protobuf writes are read with their numbers."""
    message = response_class()()
    part = getattr(message, response)
    part.ids.extend(ids)
    part.prompt, part.completion, part.cached = prompt, completion, cached
    if response == "complete":
        part.reason = "stop"
    num_shown = len(ids) if response == "chunk" else 0
    expected = {}
    if prompt or completion:
        expected["completion"] = max(completion, num_shown)
    if prompt:
        expected |= {"prompt": prompt, "cached": min(cached, prompt)}
    assert usage.read(frame(message.SerializeToString()), "grpc_generate") == expected
