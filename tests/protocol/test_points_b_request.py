"""Points of section B: request bodies, modes and the order of answers."""

from __future__ import annotations

import pytest

from extproc.decision import Decision
from extproc.request import InferenceRequest
from tests.protocol.request_points import CHAT, build_pool
from tests.support import ext_proc_script, peer


def test_017_headers_answer_precedes_every_body_answer():
    """The request headers are answered before any body, with and without trailers."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.request_body(b"ab", ends=True),
            ext_proc_script.route(),
            ext_proc_script.hand_on(b"ab", ends=True),
        ]
    )
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.request_body(b"ab"),
            ext_proc_script.request_trailers(),
            ext_proc_script.route(),
            ext_proc_script.hand_on(b"ab"),
            ext_proc_script.go_on("request_trailers"),
        ]
    )


def test_018_no_reply_before_the_body_is_complete():
    """Body pieces that are not the last one get no answer."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.request_body(b"a"),
            ext_proc_script.request_body(b""),
            ext_proc_script.request_body(b"b"),
            ext_proc_script.request_body(b"c", ends=True),
            ext_proc_script.route(),
            ext_proc_script.hand_on(b"abc", ends=True),
        ]
    )


def test_018_a_websocket_is_decided_by_its_headers():
    """Its client waits for the answer; what it sends then passes piece by piece."""
    upgrade = {":method": "GET", ":path": "/v1/realtime", "upgrade": "WebSocket"}
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(upgrade),
            ext_proc_script.route(),
            ext_proc_script.request_body(b"a"),
            ext_proc_script.hand_on(b"a"),
            ext_proc_script.request_body(b"b", ends=True),
            ext_proc_script.hand_on(b"b", ends=True),
        ]
    )


def test_018_other_upgrades_wait_for_the_body():
    """Clients offer HTTP/2 with an ordinary request."""
    offer = {":method": "POST", ":path": "/v1/completions", "upgrade": "h2c"}
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(offer),
            ext_proc_script.request_body(b"a", ends=True),
            ext_proc_script.route(),
            ext_proc_script.hand_on(b"a", ends=True),
        ]
    )


def test_019_duplex_body_answers_are_streamed_responses():
    """In full duplex both directions answer bodies by streamed_response only."""
    queued = ext_proc_script.Talk()
    for message in (
        ext_proc_script.request_headers(),
        ext_proc_script.request_body(b"x" * 130_000, ends=True),
        ext_proc_script.response_headers(),
        ext_proc_script.response_body(b""),
        ext_proc_script.response_body(b"y", ends=True),
    ):
        for reply in queued.hear(message):
            if reply.part.endswith("_body"):
                assert reply.body is not None


@pytest.mark.parametrize(
    ("size", "pieces"), [(0, 1), (61000, 1), (62000, 1), (62001, 2), (63000, 2), (125000, 3)]
)
def test_020_pieces_are_at_most_62000_bytes(size: int, pieces: int):
    """A body is handed on in pieces of at most 62,000 bytes."""
    queued = ext_proc_script.Talk()
    queued.hear(ext_proc_script.request_headers())
    _, *replies = queued.hear(ext_proc_script.request_body(b"x" * size, ends=True))
    assert len(replies) == pieces
    assert max(len(piece.body) for piece in replies) <= 62000
    assert sum(len(piece.body) for piece in replies) == size


@pytest.mark.parametrize("size", [0, 1, 62000, 62001, 200_000])
def test_021_end_of_stream_once_on_the_last_piece(size: int):
    """The body's end is said exactly once, on its last piece."""
    queued = ext_proc_script.Talk()
    queued.hear(ext_proc_script.request_headers())
    _, *replies = queued.hear(ext_proc_script.request_body(b"x" * size, ends=True))
    assert [piece.ends for piece in replies] == [False] * (len(replies) - 1) + [True]


@pytest.mark.parametrize("size", [1, 62001])
def test_022_trailers_end_the_body(size: int):
    """A body ended by trailers is handed on without end_of_stream, and the trailers are answered."""
    queued = ext_proc_script.Talk()
    queued.hear(ext_proc_script.request_headers())
    assert queued.hear(ext_proc_script.request_body(b"x" * size)) == []
    route, *pieces, last = queued.hear(ext_proc_script.request_trailers())
    assert route == ext_proc_script.route()
    assert last == ext_proc_script.go_on("request_trailers")
    assert b"".join(piece.body for piece in pieces) == b"x" * size
    assert not any(piece.ends for piece in pieces)


def test_022_trailers_without_any_body():
    """Trailers right after the headers complete the request."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.request_trailers(),
            ext_proc_script.route(),
            ext_proc_script.go_on("request_trailers"),
        ]
    )


@pytest.mark.parametrize("mode", ["DUPLEX", "NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL"])
def test_025_the_pick_clears_the_route_cache(mode: str):
    """The answer with the destination clears the route cache in every mode."""
    queued = ext_proc_script.Talk(modes=(mode, "NONE"))
    replies = queued.hear(ext_proc_script.request_headers()) + (
        queued.hear(ext_proc_script.request_body(b"x", ends=True)) if mode != "NONE" else []
    )
    assert [reply.clears_route for reply in replies if reply.metadata] == [True]


@pytest.mark.parametrize(
    "body",
    [
        b'{ "prompt" :\t"a",\r\n "model":"m" }\n',
        b'{"z":1,"model":"m","prompt":"b","a":2}',
        '{"model":"m","prompt":"\u4e16\u754c \U0001f600 \\u00e9 \\/"}'.encode(),
        b'{"model":"m","prompt":"x","seed":123456789012345678901234567890,"t":1.0E+2}',
        b'{"model":"m","prompt":"x","model":"m"}',
    ],
    ids=["whitespace", "key order", "unicode", "big numbers", "duplicate keys"],
)
def test_026_body_bytes_are_unchanged(body: bytes):
    """The body is handed on byte for byte."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers({**ext_proc_script.PLAIN, ":path": "/v1/completions"}),
            ext_proc_script.request_body(body, ends=True),
            ext_proc_script.route(),
            ext_proc_script.hand_on(body, ends=True),
        ],
        build_pool().decide,
    )


@pytest.mark.parametrize("cut", [11, 12, 40])
def test_028_a_body_cut_inside_a_token_is_joined(cut: int):
    """Pieces are joined before they are parsed, wherever they were cut."""
    queued = ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.request_body(CHAT[:cut]),
            ext_proc_script.request_body(CHAT[cut:], ends=True),
            ext_proc_script.route(),
            ext_proc_script.hand_on(CHAT, ends=True),
        ],
        build_pool().decide,
    )
    assert queued.decided[0].body == CHAT


@pytest.mark.parametrize("extra", [b"", b"tail"])
def test_029_a_second_end_of_stream_is_ignored(extra: bytes):
    """Body messages after the first end_of_stream get no answer and change nothing."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.request_body(b"ab", ends=True),
            ext_proc_script.route(),
            ext_proc_script.hand_on(b"ab", ends=True),
            ext_proc_script.request_body(extra, ends=True),
            ext_proc_script.request_body(extra, ends=True),
            ext_proc_script.response_headers(),
            ext_proc_script.answer_headers(),
        ]
    )


def test_030_an_empty_body_is_routed_like_none():
    """Headers without end_of_stream and then one empty piece: a pick and one empty piece."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.request_body(b"", ends=True),
            ext_proc_script.route(),
            ext_proc_script.hand_on(b"", ends=True),
        ],
        build_pool().decide,
    )


@pytest.mark.parametrize("mode", ["DUPLEX", "NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL"])
def test_031_bodiless_gets_exactly_one_answer(mode: str):
    """A request without body is answered by its headers answer alone, in every mode."""
    ext_proc_script.play(
        [ext_proc_script.request_headers(ends=True), ext_proc_script.route()],
        build_pool().decide,
        modes=(mode, "NONE"),
    )


@pytest.mark.parametrize("path", ["/primary", "/test-primary-gateway", "/v1/models", "/", "/a?b=c"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE"])
def test_032_bodiless_on_any_path_is_routed(method: str, path: str):
    """Requests without body are routed whatever their path."""
    headers = {":method": method, ":path": path, "x-request-id": "r"}
    ext_proc_script.play(
        [ext_proc_script.request_headers(headers, ends=True), ext_proc_script.route()],
        build_pool().decide,
    )


def test_033_post_on_an_unknown_path_is_routed():
    """The conformance suite posts model and prompt to paths of its own."""
    body = b'{"model":"conformance-fake-model","prompt":"Write as if you were a critic"}'
    headers = {**ext_proc_script.PLAIN, ":path": "/primary-gateway-test"}
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(headers),
            ext_proc_script.request_body(body, ends=True),
            ext_proc_script.route(),
            ext_proc_script.hand_on(body, ends=True),
        ],
        build_pool().decide,
    )


@pytest.mark.parametrize("body", [b"passthrough-parser", b"\x00\xff\xfe", b"{", b"[]", b"null"])
def test_034_bytes_that_are_no_json_pass(body: bytes):
    """A body that is not JSON is routed unchanged on a path that is not an inference surface."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers({**ext_proc_script.PLAIN, ":path": "/upload"}),
            ext_proc_script.request_body(body, ends=True),
            ext_proc_script.route(),
            ext_proc_script.hand_on(body, ends=True),
        ],
        build_pool().decide,
    )


@pytest.mark.parametrize("mode", ["BUFFERED", "BUFFERED_PARTIAL"])
@pytest.mark.parametrize("ends", [True, False])
def test_041_buffered_is_answered_one_to_one(mode: str, ends: bool):  # noqa: FBT001
    """Buffered: headers go on, the pick answers the body; trailers may follow."""
    script = [
        ext_proc_script.request_headers(),
        ext_proc_script.go_on("request_headers"),
        ext_proc_script.request_body(CHAT, ends=ends),
        ext_proc_script.route(part="request_body"),
    ]
    if not ends:
        script += [ext_proc_script.request_trailers(), ext_proc_script.go_on("request_trailers")]
    script += [ext_proc_script.response_headers(), ext_proc_script.answer_headers()]
    script += [
        ext_proc_script.response_body(b"x", ends=True),
        ext_proc_script.go_on("response_body"),
    ]
    queued = ext_proc_script.play(script, build_pool().decide, modes=(mode, "STREAMED"))
    assert queued.decided[0].truncated is (mode == "BUFFERED_PARTIAL" and not ends)


def test_041_streamed_is_answered_one_to_one():
    """Streamed: the pick answers the headers, and every piece is answered unchanged."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.route(),
            ext_proc_script.request_body(b"a"),
            ext_proc_script.go_on("request_body"),
            ext_proc_script.request_body(b"", ends=True),
            ext_proc_script.go_on("request_body"),
            ext_proc_script.response_headers(ext_proc_script.SSE),
            ext_proc_script.answer_headers(),
            ext_proc_script.response_body(b"data: {}"),
            ext_proc_script.go_on("response_body"),
            ext_proc_script.response_body(b"", ends=True),
            ext_proc_script.go_on("response_body"),
        ],
        build_pool().decide,
        modes=("STREAMED", "STREAMED"),
    )


def test_041_none_is_decided_on_the_headers():
    """No body shown: the pick answers the headers at once."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.route(),
            ext_proc_script.request_trailers(),
            ext_proc_script.go_on("request_trailers"),
            ext_proc_script.response_headers(),
            ext_proc_script.answer_headers(),
            ext_proc_script.response_trailers(),
            ext_proc_script.go_on("response_trailers"),
        ],
        build_pool().decide,
        modes=("NONE", "NONE"),
    )


@pytest.mark.parametrize("mode", ["STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "DUPLEX"])
def test_041_a_stream_may_start_with_the_request_body(mode: str):
    """Without a headers message the pick rides on the first complete body answer."""
    queued = ext_proc_script.Talk(modes=(mode, "NONE"))
    (reply,) = queued.hear(ext_proc_script.request_body(b"x", ends=True))
    assert reply.part == "request_body"
    assert reply.metadata == ext_proc_script.destination_metadata(ext_proc_script.ADDRESS)
    assert (reply.body, reply.ends) == ((b"x", True) if mode == "DUPLEX" else (None, False))


def test_041_undeclared_modes_mean_full_duplex():
    """A data plane that sends no protocol_config is answered in full duplex."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.request_body(b"a", ends=True),
            ext_proc_script.route(),
            ext_proc_script.hand_on(b"a", ends=True),
        ],
        modes=None,
    )


def test_041_messages_of_a_queued_request_are_answered_after_its_headers():
    """One-to-one answers that fall due while a request is held come after the headers answer."""
    queued = ext_proc_script.Talk(modes=("STREAMED", "NONE"))
    exchange = queued.exchange
    first = ext_proc_script.request_headers().encode(("STREAMED", "NONE"))
    replies = [*exchange.receive(ext_proc_script.codec.decode(first))]
    raw = exchange.pending
    for message in (
        ext_proc_script.request_body(b"a", ends=False),
        ext_proc_script.request_trailers(),
    ):
        replies += exchange.receive(ext_proc_script.codec.decode(message.encode(None)))
    assert replies == []
    assert exchange.pending is raw
    answers = exchange.apply_outcome(
        Decision(InferenceRequest("opaque"), [ext_proc_script.Endpoint(ext_proc_script.ADDRESS)])
    )
    parts = [peer.read(ext_proc_script.codec.encode(reply)).part for reply in answers]
    assert parts == ["request_headers", "request_body", "request_trailers"]
