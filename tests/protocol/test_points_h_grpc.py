from __future__ import annotations

import pytest

from extproc.parsing import surfaces
from tests.support import ext_proc_script
from tests.support.pool_fixture import PoolFixture

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
EMBED = "/vllm.grpc.engine.VllmEngine/Embed"
RESPONSE = {":status": "200", "content-type": "application/grpc"}


def field(number: int, value: bytes) -> bytes:
    """A length-delimited protobuf field under 128 bytes."""
    return bytes((number << 3 | 2, len(value))) + value


def frame(message: bytes, *, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


#: request_id and tokenized input, as vllm.grpc.engine lays them out.
TOKENS = field(1, b"some text") + field(2, bytes((1, 2, 3, 4)))
MESSAGE = field(1, b"request") + field(2, TOKENS)


def headers(path: str) -> dict[str, str]:
    return {**ext_proc_script.PLAIN, ":path": path, "content-type": "application/grpc"}


def build_pool() -> PoolFixture:
    return PoolFixture({ext_proc_script.ADDRESS: None})


@pytest.mark.parametrize("path", [GENERATE, EMBED])
def test_107_frames_are_parsed_and_pass_unchanged(path: str):
    """A gRPC request is read, routed, and handed on byte for byte."""
    body = frame(MESSAGE)
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(headers(path)),
            ext_proc_script.request_body(body, ends=True),
            ext_proc_script.route(),
            ext_proc_script.hand_on(body, ends=True),
        ],
        build_pool().decide,
    )


@pytest.mark.parametrize("cut", [1, 4, 5, 9])
def test_108_a_frame_cut_across_pieces_is_joined(cut: int):
    """A frame may be cut anywhere, also inside its length."""
    body = frame(MESSAGE)
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(headers(GENERATE)),
            ext_proc_script.request_body(body[:cut]),
            ext_proc_script.request_body(body[cut:], ends=True),
            ext_proc_script.route(),
            ext_proc_script.hand_on(body, ends=True),
        ],
        build_pool().decide,
    )


@pytest.mark.parametrize("path", [GENERATE, EMBED])
@pytest.mark.parametrize(
    "body", [frame(MESSAGE, flag=1), frame(MESSAGE)[:-1], b"\x00\x00", b"junk" * 5]
)
def test_109_compressed_or_short_frames_are_refused(path: str, body: bytes):
    """A compressed or short frame: 400 in the reference's words, INVALID_ARGUMENT in gRPC."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(headers(path)),
            ext_proc_script.request_body(body, ends=True),
            ext_proc_script.refuse(
                400,
                message="inference error: BadRequest - invalid or unsupported gRPC payload",
                kind="invalid_request_error",
                grpc_status=3,
            ),
        ],
        build_pool().decide,
    )


@pytest.mark.parametrize("body", [frame(MESSAGE), frame(b"", flag=1), b"junk"])
def test_110_unknown_methods_are_routed_raw(body: bytes):
    """An unknown gRPC method is routed unchanged, and its response is not watched."""
    routed = build_pool()
    queued = ext_proc_script.play(
        [
            ext_proc_script.request_headers(headers("/some.Service/Method")),
            ext_proc_script.request_body(body, ends=True),
            ext_proc_script.route(),
            ext_proc_script.hand_on(body, ends=True),
        ],
        routed.decide,
    )
    assert routed.decide(queued.decided[0]).request.api in surfaces.UNOBSERVED


def test_111_response_frames_then_trailers():
    """A gRPC response: frames without end of stream, then the trailers answer."""
    script = [ext_proc_script.response_headers(RESPONSE), ext_proc_script.answer_headers()]
    for data in (frame(b"one"), frame(b"\xff not protobuf")):
        script += [
            ext_proc_script.response_body(data),
            ext_proc_script.hand_on(data, part="response_body"),
        ]
    script += [ext_proc_script.response_trailers(), ext_proc_script.go_on("response_trailers")]
    ext_proc_script.play(script)


def test_111_a_response_without_an_answered_request():
    """Request headers without body, then a whole response: only the response is answered."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(headers(GENERATE)),
            ext_proc_script.response_headers(RESPONSE),
            ext_proc_script.answer_headers(),
            ext_proc_script.response_body(frame(b"one")),
            ext_proc_script.hand_on(frame(b"one"), part="response_body"),
            ext_proc_script.response_trailers(),
            ext_proc_script.go_on("response_trailers"),
        ],
        build_pool().decide,
    )
