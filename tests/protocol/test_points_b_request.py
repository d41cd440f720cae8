from __future__ import annotations

import pytest

from extproc.decision import Decision
from extproc.protocol.headers import CONTROL_HEADERS
from extproc.protocol.settings import ExchangeSettings
from extproc.request import Request
from tests.support import conversation as talk
from tests.support import peer
from tests.support.house import House, load

CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
THREE = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")


def house(*addresses: str) -> House:
    return House({address: load(0, 0.0) for address in addresses or (talk.ONE,)})


def test_017_headers_answer_precedes_every_body_answer():
    """The request headers are answered before any body, with and without trailers."""
    talk.play(
        [
            talk.request_headers(),
            talk.request_body(b"ab", ends=True),
            talk.route(),
            talk.hand_on(b"ab", ends=True),
        ]
    )
    talk.play(
        [
            talk.request_headers(),
            talk.request_body(b"ab"),
            talk.request_trailers(),
            talk.route(),
            talk.hand_on(b"ab"),
            talk.go_on("request_trailers"),
        ]
    )


def test_018_nothing_is_said_before_the_body_is_whole():
    """Body pieces that are not the last one get no answer."""
    talk.play(
        [
            talk.request_headers(),
            talk.request_body(b"a"),
            talk.request_body(b""),
            talk.request_body(b"b"),
            talk.request_body(b"c", ends=True),
            talk.route(),
            talk.hand_on(b"abc", ends=True),
        ]
    )


def test_019_duplex_body_answers_are_streamed_responses():
    """In full duplex both directions answer bodies by streamed_response only."""
    held = talk.Talk()
    for message in (
        talk.request_headers(),
        talk.request_body(b"x" * 130_000, ends=True),
        talk.response_headers(),
        talk.response_body(b""),
        talk.response_body(b"y", ends=True),
    ):
        for said in held.hear(message):
            if said.part.endswith("_body"):
                assert said.body is not None


@pytest.mark.parametrize(
    ("size", "pieces"), [(0, 1), (61000, 1), (62000, 1), (62001, 2), (63000, 2), (125000, 3)]
)
def test_020_pieces_are_at_most_62000_bytes(size: int, pieces: int):
    """A body is handed on in pieces of at most 62,000 bytes."""
    held = talk.Talk()
    held.hear(talk.request_headers())
    _, *said = held.hear(talk.request_body(b"x" * size, ends=True))
    assert len(said) == pieces
    assert max(len(piece.body) for piece in said) <= 62000
    assert sum(len(piece.body) for piece in said) == size


@pytest.mark.parametrize("size", [0, 1, 62000, 62001, 200_000])
def test_021_end_of_stream_once_on_the_last_piece(size: int):
    """The body's end is said exactly once, on its last piece."""
    held = talk.Talk()
    held.hear(talk.request_headers())
    _, *said = held.hear(talk.request_body(b"x" * size, ends=True))
    assert [piece.ends for piece in said] == [False] * (len(said) - 1) + [True]


@pytest.mark.parametrize("size", [1, 62001])
def test_022_trailers_end_the_body(size: int):
    """A body ended by trailers is handed on without end_of_stream, and the trailers are answered."""
    held = talk.Talk()
    held.hear(talk.request_headers())
    assert held.hear(talk.request_body(b"x" * size)) == []
    route, *pieces, last = held.hear(talk.request_trailers())
    assert route == talk.route()
    assert last == talk.go_on("request_trailers")
    assert b"".join(piece.body for piece in pieces) == b"x" * size
    assert not any(piece.ends for piece in pieces)


def test_022_trailers_without_any_body():
    """Trailers right after the headers complete the request."""
    talk.play(
        [
            talk.request_headers(),
            talk.request_trailers(),
            talk.route(),
            talk.go_on("request_trailers"),
        ]
    )


def test_023_headers_are_set_by_raw_value_alone():
    """Every header we set carries raw_value and no value, on picks, responses and refusals."""
    held = talk.Talk(house().decide, request_id="made")
    messages = (
        talk.request_headers({":path": "/v1/models"}, ends=True),
        talk.response_headers(),
    )
    # The peer refuses to read a header that has `value` set.
    said = [said for message in messages for said in held.hear(message)]
    assert [len(each.sets) for each in said] == [2, 1]
    refused = talk.Talk(House({}).decide).hear(talk.request_headers(ends=True))
    assert len(refused[0].sets) == 3


def test_024_header_and_metadata_agree():
    """The destination stands in the header and, equal, in the envoy.lb metadata."""
    (said,) = talk.Talk(talk.always(*THREE)).hear(talk.request_headers(ends=True))
    assert said.headers[peer.DESTINATION] == ",".join(THREE)
    assert said.told == {"envoy.lb": {peer.DESTINATION: said.headers[peer.DESTINATION]}}


@pytest.mark.parametrize("mode", ["DUPLEX", "NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL"])
def test_025_the_pick_clears_the_route_cache(mode: str):
    """The answer with the destination clears the route cache in every mode."""
    held = talk.Talk(modes=(mode, "NONE"))
    said = held.hear(talk.request_headers()) + (
        held.hear(talk.request_body(b"x", ends=True)) if mode != "NONE" else []
    )
    assert [each.clears_route for each in said if each.told] == [True]


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
    talk.play(
        [
            talk.request_headers({**talk.PLAIN, ":path": "/v1/completions"}),
            talk.request_body(body, ends=True),
            talk.route(),
            talk.hand_on(body, ends=True),
        ],
        house().decide,
    )


@pytest.mark.parametrize("cut", [11, 12, 40])
def test_028_a_body_cut_inside_a_token_is_joined(cut: int):
    """Pieces are joined before they are parsed, wherever they were cut."""
    held = talk.play(
        [
            talk.request_headers(),
            talk.request_body(CHAT[:cut]),
            talk.request_body(CHAT[cut:], ends=True),
            talk.route(),
            talk.hand_on(CHAT, ends=True),
        ],
        house().decide,
    )
    assert held.asked[0].body == CHAT


@pytest.mark.parametrize("extra", [b"", b"tail"])
def test_029_a_second_end_of_stream_is_ignored(extra: bytes):
    """Body messages after the first end_of_stream get no answer and change nothing."""
    talk.play(
        [
            talk.request_headers(),
            talk.request_body(b"ab", ends=True),
            talk.route(),
            talk.hand_on(b"ab", ends=True),
            talk.request_body(extra, ends=True),
            talk.request_body(extra, ends=True),
            talk.response_headers(),
            talk.answer_headers(),
        ]
    )


def test_030_an_empty_body_is_routed_like_none():
    """Headers without end_of_stream and then one empty piece: a pick and one empty piece."""
    talk.play(
        [
            talk.request_headers(),
            talk.request_body(b"", ends=True),
            talk.route(),
            talk.hand_on(b"", ends=True),
        ],
        house().decide,
    )


@pytest.mark.parametrize("mode", ["DUPLEX", "NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL"])
def test_031_bodiless_gets_exactly_one_answer(mode: str):
    """A request without body is answered by its headers answer alone, in every mode."""
    talk.play([talk.request_headers(ends=True), talk.route()], house().decide, modes=(mode, "NONE"))


@pytest.mark.parametrize("path", ["/primary", "/test-primary-gateway", "/v1/models", "/", "/a?b=c"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE"])
def test_032_bodiless_on_any_path_is_routed(method: str, path: str):
    """Requests without body are routed whatever their path."""
    headers = {":method": method, ":path": path, "x-request-id": "r"}
    talk.play([talk.request_headers(headers, ends=True), talk.route()], house().decide)


def test_033_post_on_an_unknown_path_is_routed():
    """The conformance suite posts model and prompt to paths of its own."""
    body = b'{"model":"conformance-fake-model","prompt":"Write as if you were a critic"}'
    headers = {**talk.PLAIN, ":path": "/primary-gateway-test"}
    talk.play(
        [
            talk.request_headers(headers),
            talk.request_body(body, ends=True),
            talk.route(),
            talk.hand_on(body, ends=True),
        ],
        house().decide,
    )


@pytest.mark.parametrize("body", [b"passthrough-parser", b"\x00\xff\xfe", b"{", b"[]", b"null"])
def test_034_bytes_that_are_no_json_pass(body: bytes):
    """A body that is not JSON is routed unchanged on a path that is not an inference surface."""
    talk.play(
        [
            talk.request_headers({**talk.PLAIN, ":path": "/upload"}),
            talk.request_body(body, ends=True),
            talk.route(),
            talk.hand_on(body, ends=True),
        ],
        house().decide,
    )


def test_035_request_headers_are_not_echoed():
    """Only our own headers are set, so that duplicates reach the engine as they came."""
    headers = [*talk.PLAIN.items(), ("cookie", "a=1"), ("cookie", "b=2")]
    headers += [("x-forwarded-for", "1.1.1.1"), ("x-forwarded-for", "2.2.2.2")]
    talk.play([talk.request_headers(headers, ends=True), talk.route()])


@pytest.mark.parametrize("raw", [True, False], ids=["raw_value", "value"])
def test_036_header_names_in_any_case_and_either_value(raw: bool):  # noqa: FBT001
    """Names are compared without case, and raw_value or value alone is read."""
    headers = {":path": "/x", "X-Request-ID": "r", "Content-Type": "text/Plain"}
    held = talk.play([talk.request_headers(headers, ends=True, raw=raw), talk.route()])
    assert held.asked[0].headers == {
        ":path": "/x",
        "x-request-id": "r",
        "content-type": "text/Plain",
    }


def test_036_raw_value_comes_before_value():
    """Of a header with both values, raw_value is read."""
    header = peer.core.HeaderValue(key="A", value="plain", raw_value=b"raw")
    content = peer.ext_proc.HttpHeaders(
        headers=peer.core.HeaderMap(headers=[header]), end_of_stream=True
    )
    held = talk.play([talk.Message("request_headers", content), talk.route()])
    assert held.asked[0].headers == {"a": "raw"}


def test_037_a_request_id_is_set_when_given():
    """The request id the shell makes for a request without one is set on the pick."""
    talk.play(
        [
            talk.request_headers({":path": "/"}, ends=True),
            talk.route(sets=[("x-request-id", "made")]),
        ],
        request_id="made",
    )
    talk.play(
        [
            talk.request_headers({":path": "/"}),
            talk.go_on("request_headers"),
            talk.request_body(b"x", ends=True),
            talk.route(part="request_body", sets=[("x-request-id", "made")]),
        ],
        request_id="made",
        modes=("BUFFERED", "NONE"),
    )


@pytest.mark.parametrize(
    "trace",
    [
        {},
        {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        {"TraceParent": "garbage", "tracestate": "a=b"},
    ],
)
def test_038_trace_context_passes(trace: dict[str, str]):
    """Trace headers are neither needed, replaced nor removed."""
    talk.play(
        [talk.request_headers({**talk.PLAIN, **trace}, ends=True), talk.route()], house().decide
    )


def test_039_a_clients_destination_is_overwritten():
    """The destination header of the client is set anew, and not appended to."""
    headers = {**talk.PLAIN, peer.DESTINATION: "6.6.6.6:66"}
    talk.play([talk.request_headers(headers, ends=True), talk.route()], house().decide)


@pytest.mark.parametrize("name", sorted(CONTROL_HEADERS))
def test_040_control_headers_are_removed(name: str):
    """A control header of the client is removed and never set."""
    headers = {**talk.PLAIN, name.title(): "x"}
    talk.play([talk.request_headers(headers, ends=True), talk.route(removes=[name])])


def test_040_control_headers_are_removed_with_a_buffered_body():
    """In the buffered modes the answer that carries the pick removes them."""
    headers = {**talk.PLAIN, "x-llm-d-inference-objective": "o"}
    talk.play(
        [
            talk.request_headers(headers),
            talk.go_on("request_headers"),
            talk.request_body(b"x", ends=True),
            talk.route(part="request_body", removes=["x-llm-d-inference-objective"]),
        ],
        modes=("BUFFERED", "NONE"),
    )


@pytest.mark.parametrize("mode", ["BUFFERED", "BUFFERED_PARTIAL"])
@pytest.mark.parametrize("ends", [True, False])
def test_041_buffered_is_answered_one_to_one(mode: str, ends: bool):  # noqa: FBT001
    """Buffered: headers go on, the pick answers the body; trailers may follow."""
    script = [
        talk.request_headers(),
        talk.go_on("request_headers"),
        talk.request_body(CHAT, ends=ends),
        talk.route(part="request_body"),
    ]
    if not ends:
        script += [talk.request_trailers(), talk.go_on("request_trailers")]
    script += [talk.response_headers(), talk.answer_headers()]
    script += [talk.response_body(b"x", ends=True), talk.go_on("response_body")]
    held = talk.play(script, house().decide, modes=(mode, "BUFFERED"))
    assert held.asked[0].truncated is (mode == "BUFFERED_PARTIAL" and not ends)


def test_041_streamed_is_answered_one_to_one():
    """Streamed: the pick answers the headers, and every piece is answered unchanged."""
    talk.play(
        [
            talk.request_headers(),
            talk.route(),
            talk.request_body(b"a"),
            talk.go_on("request_body"),
            talk.request_body(b"", ends=True),
            talk.go_on("request_body"),
            talk.response_headers(talk.SSE),
            talk.answer_headers(),
            talk.response_body(b"data: {}"),
            talk.go_on("response_body"),
            talk.response_body(b"", ends=True),
            talk.go_on("response_body"),
        ],
        house().decide,
        modes=("STREAMED", "STREAMED"),
    )


def test_041_none_is_decided_on_the_headers():
    """No body shown: the pick answers the headers at once."""
    talk.play(
        [
            talk.request_headers(),
            talk.route(),
            talk.request_trailers(),
            talk.go_on("request_trailers"),
            talk.response_headers(),
            talk.answer_headers(),
            talk.response_trailers(),
            talk.go_on("response_trailers"),
        ],
        house().decide,
        modes=("NONE", "NONE"),
    )


@pytest.mark.parametrize("mode", ["STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "DUPLEX"])
def test_041_a_stream_may_start_with_the_request_body(mode: str):
    """Without a headers message the pick rides on the first complete body answer."""
    held = talk.Talk(modes=(mode, "NONE"))
    (said,) = held.hear(talk.request_body(b"x", ends=True))
    assert said.part == "request_body"
    assert said.told == talk.told(talk.ONE)
    assert (said.body, said.ends) == ((b"x", True) if mode == "DUPLEX" else (None, False))


def test_041_undeclared_modes_mean_full_duplex():
    """A data plane that sends no protocol_config is answered in full duplex."""
    talk.play(
        [
            talk.request_headers(),
            talk.request_body(b"a", ends=True),
            talk.route(),
            talk.hand_on(b"a", ends=True),
        ],
        modes=None,
    )


def test_041_messages_of_a_held_request_are_answered_after_its_headers():
    """One-to-one answers that fall due while a request is held come after the headers answer."""
    held = talk.Talk(modes=("STREAMED", "NONE"))
    exchange = held.exchange
    first = talk.request_headers().encode(("STREAMED", "NONE"))
    said = [*exchange.receive(talk.codec.decode(first))]
    raw = exchange.pending
    for message in (talk.request_body(b"a", ends=False), talk.request_trailers()):
        said += exchange.receive(talk.codec.decode(message.encode(None)))
    assert said == []
    assert exchange.pending is raw
    answers = exchange.resolve(Decision(Request("opaque"), [talk.Endpoint(talk.ONE)]))
    parts = [peer.read(talk.codec.encode(reply)).part for reply in answers]
    assert parts == ["request_headers", "request_body", "request_trailers"]


@pytest.mark.parametrize(
    "metadata", [None, peer.metadata_of({}), peer.metadata_of({"other": {"a": "b"}})]
)
def test_043_metadata_is_optional(metadata: object):
    """No metadata, empty metadata and foreign metadata are legal and hint nothing."""
    held = talk.play(
        [talk.request_headers(ends=True, metadata=metadata), talk.route()], house().decide
    )
    assert held.asked[0].subset is None


@pytest.mark.parametrize("where", ["headers", "body", "both", "conflict"])
def test_044_a_hint_on_headers_or_body(where: str):
    """A hint counts on the headers, on a body message or on both; a later one wins."""
    hint = peer.hinted([THREE[1]])
    other = peer.hinted([THREE[0]]) if where == "conflict" else hint
    held = talk.play(
        [
            talk.request_headers(metadata=other if where != "body" else None),
            talk.request_body(CHAT, ends=True, metadata=hint if where != "headers" else None),
            talk.route(THREE[1]),
            talk.hand_on(CHAT, ends=True),
        ],
        house(*THREE).decide,
    )
    assert held.asked[0].subset == (THREE[1],)


def test_044_an_empty_later_hint_does_not_widen_or_close():
    """An empty hint after one that names endpoints does not replace it."""
    held = talk.Talk()
    held.hear(talk.request_headers(metadata=peer.hinted([THREE[1]])))
    held.hear(talk.request_body(b"", ends=True, metadata=peer.hinted([])))
    assert held.asked[0].subset == (THREE[1],)


@pytest.mark.parametrize("modes", [("DUPLEX", "DUPLEX"), ("BUFFERED", "NONE"), ("NONE", "NONE")])
@pytest.mark.parametrize(
    ("wanted", "profile"), [(True, "balanced"), (False, "balanced"), (True, "random")]
)
def test_024_scores_beside_the_destination(modes: tuple[str, str], profile: str, *, wanted: bool):
    """Where it is wanted and something was compared, every finalist's score is in the metadata."""
    held = House(dict.fromkeys(THREE, load(0, 0.0)), profile=profile)
    one = talk.Talk(held.decide, modes=modes, settings=ExchangeSettings(1 << 20, scores=wanted))
    said = one.hear(talk.request_headers())
    if modes[0] != "NONE":
        said += one.hear(talk.request_body(CHAT, ends=True))
    (told,) = [each.told[peer.BALANCER] for each in said if each.told]
    scores = told.pop("x-gateway-destination-endpoint-scores", None)
    assert list(told) == [peer.DESTINATION]
    if not wanted or profile == "random":
        assert scores is None
        return
    assert set(scores) == set(THREE)
    assert scores[told[peer.DESTINATION]] == max(scores.values())
