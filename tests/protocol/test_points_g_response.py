from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.parsing import usage
from extproc.protocol import response_handling
from extproc.protocol.exchange import ExchangeSettings
from extproc.scheduling import session_affinity
from extproc.scheduling.pickers import MaxScorePicker
from extproc.scheduling.profile import SchedulerProfile
from tests.support import ext_proc_script, peer
from tests.support.ext_proc_script import ADDRESS, JSON, SSE
from tests.support.pool_fixture import PoolFixture

TEST_MODE = ExchangeSettings(1 << 20, conformance=True)
SERVED = "x-conformance-test-served-endpoint"
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 10,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 4},
}
COUNTED = {"prompt": 7, "completion": 10, "cached": 4}


def body(data: bytes, *, ends: bool = False) -> peer.DecodedReply:
    return ext_proc_script.hand_on(data, ends=ends, part="response_body")


def counted(*pieces: bytes) -> dict[str, int]:
    """The usage read from a response that passed in these pieces."""
    queued = ext_proc_script.Talk()
    for piece in pieces:
        queued.hear(ext_proc_script.response_body(piece))
    queued.hear(ext_proc_script.response_body(b"", ends=True))
    assert queued.exchange.tail is not None
    return dict(usage.read(queued.exchange.tail.joined()))


@pytest.mark.parametrize("headers", [JSON, SSE, {":status": "500"}, {}])
def test_089_response_headers_are_answered_at_once(headers: dict[str, str]):
    """Response headers are answered without waiting, with the marker."""
    ext_proc_script.play(
        [ext_proc_script.response_headers(headers), ext_proc_script.answer_headers()]
    )


@pytest.mark.parametrize(
    ("metadata", "value"),
    [
        (peer.metadata_of({"envoy.lb": {peer.SERVED_KEY: "10.0.0.2:3000"}}), "10.0.0.2:3000"),
        (None, "fail: missing envoy lb metadata"),
        (peer.metadata_of({"other": {}}), "fail: missing envoy lb metadata"),
        (
            peer.metadata_of({"envoy.lb": {"a": "b"}}),
            "fail: missing destination endpoint served metadata",
        ),
        (
            peer.metadata_of({"envoy.lb": {peer.SERVED_KEY: 7}}),
            "fail: missing destination endpoint served metadata",
        ),
    ],
)
def test_090_test_mode_reports_the_served_endpoint(metadata: Any, value: str):
    """In test mode the response names the endpoint that served, or says what was missing."""
    ext_proc_script.play(
        [
            ext_proc_script.response_headers(metadata=metadata),
            ext_proc_script.answer_headers((SERVED, value)),
        ],
        settings=TEST_MODE,
    )


def test_headers_of_plugins_go_on_the_answer():
    """Headers of plugins for the client are on the response, such as the token of a session."""
    keep = SchedulerProfile(
        "keep", (session_affinity.SessionAffinityFilter(),), (), MaxScorePicker()
    )
    pool_fixture = PoolFixture({ADDRESS: None}, profile=keep)
    served = peer.metadata_of({"envoy.lb": {peer.SERVED_KEY: ADDRESS}})
    token = ("x-session-token", session_affinity.token(pool_fixture.store.pool.members[0].endpoint))
    request = [ext_proc_script.request_headers(ends=True), ext_proc_script.route()]
    ext_proc_script.play(
        [*request, ext_proc_script.response_headers(), ext_proc_script.answer_headers(token)],
        pool_fixture.decide,
    )
    answered = ext_proc_script.answer_headers((SERVED, ADDRESS), token)
    script = [*request, ext_proc_script.response_headers(metadata=served), answered]
    ext_proc_script.play(script, pool_fixture.decide, settings=TEST_MODE)


def test_090_the_request_phase_does_not_count():
    """The served endpoint comes from the response message, not from earlier metadata."""
    served = peer.metadata_of({"envoy.lb": {peer.SERVED_KEY: "10.0.0.2:3000"}})
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(ends=True, metadata=served),
            ext_proc_script.route(),
            ext_proc_script.response_headers(),
            ext_proc_script.answer_headers((SERVED, "fail: missing envoy lb metadata")),
        ],
        settings=TEST_MODE,
    )


def test_090_outside_test_mode_nothing_is_reported():
    """Without test mode the served endpoint is not put on the response."""
    served = peer.metadata_of({"envoy.lb": {peer.SERVED_KEY: "10.0.0.2:3000"}})
    ext_proc_script.play(
        [ext_proc_script.response_headers(metadata=served), ext_proc_script.answer_headers()]
    )


@pytest.mark.parametrize("headers", [SSE, JSON])
def test_091_pieces_pass_at_once(headers: dict[str, str]):
    """Every response piece is answered at once with the same bytes, the empty last one too."""
    last = b'data: {"usage":{}}\ndata: [DONE]'
    ext_proc_script.play(
        [
            ext_proc_script.response_headers(headers),
            ext_proc_script.answer_headers(),
            ext_proc_script.response_body(b"data: {}"),
            body(b"data: {}"),
            ext_proc_script.response_body(last),
            body(last),
            ext_proc_script.response_body(b"", ends=True),
            body(b"", ends=True),
        ]
    )


def test_093_json_in_two_pieces():
    """JSON in two pieces reaches the client with the same bytes and one end."""
    ext_proc_script.play(
        [
            ext_proc_script.response_headers(),
            ext_proc_script.answer_headers(),
            ext_proc_script.response_body(b'{"a":'),
            body(b'{"a":'),
            ext_proc_script.response_body(b"1}", ends=True),
            body(b"1}", ends=True),
        ]
    )


def test_094_an_empty_last_piece():
    """An empty last piece after JSON leaves the body as it is and ends it once."""
    ext_proc_script.play(
        [
            ext_proc_script.response_headers(),
            ext_proc_script.answer_headers(),
            ext_proc_script.response_body(b'{"a":1}'),
            body(b'{"a":1}'),
            ext_proc_script.response_body(b"", ends=True),
            body(b"", ends=True),
            ext_proc_script.response_body(b"", ends=True),
        ]
    )


@pytest.mark.parametrize("data", [b"no healthy upstream", b"{", b"\x00\xff"])
def test_095_broken_json_in_a_response_passes(data: bytes):
    """A response body is not judged."""
    ext_proc_script.play(
        [
            ext_proc_script.response_headers(),
            ext_proc_script.answer_headers(),
            ext_proc_script.response_body(data, ends=True),
            body(data, ends=True),
        ]
    )
    assert counted(data) == {}


@pytest.mark.parametrize("headers", [SSE, JSON])
def test_096_response_trailers_come_last(headers: dict[str, str]):
    """A response ended by trailers: pieces without end, then the trailers answer."""
    ext_proc_script.play(
        [
            ext_proc_script.response_headers(headers),
            ext_proc_script.answer_headers(),
            ext_proc_script.response_body(b"a"),
            body(b"a"),
            ext_proc_script.response_trailers(),
            ext_proc_script.go_on("response_trailers"),
        ]
    )


@pytest.mark.parametrize("ends", [True, False])
def test_097_long_pieces_are_split(ends: bool):  # noqa: FBT001
    """A response piece over 62,000 bytes is split, and only its last part may end the body."""
    data = bytes(range(256)) * 500
    queued = ext_proc_script.Talk()
    queued.hear(ext_proc_script.response_headers())
    replies = queued.hear(ext_proc_script.response_body(data, ends=ends))
    assert [len(reply.body) for reply in replies] == [62000, 62000, 4000]
    assert b"".join(reply.body for reply in replies) == data
    assert [reply.ends for reply in replies] == [False, False, ends]


def test_098_stream_true_streams_whatever_the_content_type():
    """Pieces pass at once after a request with stream: true, also without an SSE type."""
    request = b'{"model":"m","prompt":"x","stream":true}'
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.request_body(request, ends=True),
            ext_proc_script.route(),
            ext_proc_script.hand_on(request, ends=True),
            ext_proc_script.response_headers({":status": "200", "content-type": "text/plain"}),
            ext_proc_script.answer_headers(),
            ext_proc_script.response_body(b"a"),
            body(b"a"),
            ext_proc_script.response_body(b"b", ends=True),
            body(b"b", ends=True),
        ]
    )


@pytest.mark.parametrize("mode", ["DUPLEX", "BUFFERED", "BUFFERED_PARTIAL", "STREAMED"])
def test_099_a_stream_may_start_in_the_response(mode: str):
    """Response headers, body or trailers may be the first message of a stream."""
    passed = body(b"x", ends=True) if mode == "DUPLEX" else ext_proc_script.go_on("response_body")
    modes = ("NONE", mode)
    ext_proc_script.play(
        [
            ext_proc_script.response_headers(),
            ext_proc_script.answer_headers(),
            ext_proc_script.response_body(b"x", ends=True),
            passed,
        ],
        modes=modes,
    )
    ext_proc_script.play([ext_proc_script.response_body(b"x", ends=True), passed], modes=modes)
    ext_proc_script.play(
        [ext_proc_script.response_trailers(), ext_proc_script.go_on("response_trailers")],
        modes=modes,
    )


def test_100_an_early_response_is_the_only_thing_answered():
    """A response before the request was complete: the request is never answered."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.request_body(b"half"),
            ext_proc_script.response_headers(),
            ext_proc_script.answer_headers(),
            ext_proc_script.request_body(b"rest", ends=True),
            ext_proc_script.response_body(b"no", ends=True),
            body(b"no", ends=True),
        ]
    )


@pytest.mark.parametrize(
    "message",
    [
        ext_proc_script.response_headers(),
        ext_proc_script.response_body(b"x"),
        ext_proc_script.response_trailers(),
    ],
)
def test_100_a_queued_request_is_abandoned_when_the_response_begins(
    message: ext_proc_script.Message,
):
    """While a request is held, any response message takes it out of the queue."""
    queued = ext_proc_script.Talk()
    first = ext_proc_script.request_headers(ends=True).encode(ext_proc_script.DUPLEX)
    assert list(queued.exchange.receive(ext_proc_script.codec.decode(first))) == []
    assert queued.exchange.pending is not None
    assert (
        len(list(queued.exchange.receive(ext_proc_script.codec.decode(message.encode(None))))) == 1
    )
    assert queued.exchange.pending is None


def test_101_response_headers_are_not_echoed():
    """Only our own headers are set, so that two Set-Cookie reach the client as they came."""
    headers = [*JSON.items(), ("set-cookie", "a=1"), ("set-cookie", "b=2")]
    ext_proc_script.play(
        [ext_proc_script.response_headers(headers), ext_proc_script.answer_headers()]
    )


def test_102_usage_in_json():
    """Usage of a JSON answer is counted, also when it is cut anywhere."""
    data = json.dumps({"id": "c", "choices": [{"text": "x" * 99}], "usage": USAGE}).encode()
    assert counted(data) == COUNTED
    for at in range(0, len(data), 17):
        assert counted(data[:at], data[at:]) == COUNTED


@pytest.mark.parametrize("gap", ["", " "])
def test_102_usage_in_sse(gap: str):
    """Usage of a streamed answer is counted, with [DONE] in the same piece or another."""
    event = f"data:{gap}{json.dumps({'choices': [], 'usage': USAGE})}\n\n".encode()
    text = b'data: {"choices":[{"text":"hi"}],"usage":null}\n\n'
    done = b"data: [DONE]\n\n"
    assert counted(text, event + done) == COUNTED
    assert counted(text, text, event, done) == COUNTED
    assert counted(text + event[:30], event[30:] + done[:4], done[4:]) == COUNTED
    assert counted(text, done) == {}


def test_102_usage_at_the_end_of_a_long_answer():
    """Only the end of an answer is kept, and usage stands there."""
    text = b'data: {"choices":[{"text":"hi"}]}\n\n' * 1000
    event = f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\n".encode()
    assert counted(*[text] * 5, event) == COUNTED


@pytest.mark.parametrize("piece_bytes", [100, 5000, 40_000])
def test_102_usage_at_the_beginning_of_a_long_answer(piece_bytes: int):
    """Usage that stands before many reranked documents is counted."""
    document = {"index": 0, "document": {"text": "word " * 200}, "relevance_score": 0.5}
    answer = {"id": "r", "model": "m", "usage": {"prompt_tokens": 9}, "results": [document] * 100}
    data = json.dumps(answer).encode()
    pieces = [data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)]
    assert counted(*pieces) == {"prompt": 9}


def test_102_usage_in_two_events_of_a_long_answer():
    """Prompt tokens of the first event are counted with completion tokens of the last one."""
    first = b'data: {"message":{"usage":{"input_tokens":9,"output_tokens":0}}}\n\n'
    text = b'data: {"delta":{"text":"hi"}}\n\n' * 1000
    last = b'data: {"usage":{"output_tokens":12}}\n\n'
    assert counted(first, *[text] * 5, last) == {"prompt": 9, "completion": 12}


def test_102_usage_is_not_read_over_a_gap():
    """A number that begins in the kept beginning does not go on with the end of the answer."""
    start = b'{"usage":{"prompt_tokens":1'.rjust(response_handling.HEAD_BYTES)
    end = b"2}}".ljust(response_handling.TAIL_BYTES)
    assert counted(start + end) == {"prompt": 12}
    assert counted(start, b"0" * 10, end) == {}


def test_103_a_response_without_body():
    """Response headers that end the stream get their answer and nothing else."""
    ext_proc_script.play(
        [
            ext_proc_script.response_headers({":status": "204"}, ends=True),
            ext_proc_script.answer_headers(),
        ]
    )


@pytest.mark.parametrize("status", ["400", "429", "500", "503"])
def test_104_upstream_errors_pass_and_are_read_by_status(status: str):
    """An upstream error is not touched, and its status is read from :status."""
    queued = ext_proc_script.play(
        [
            ext_proc_script.response_headers({":status": status, "status": "200"}),
            ext_proc_script.answer_headers(),
            ext_proc_script.response_body(b"busy", ends=True),
            body(b"busy", ends=True),
        ]
    )
    assert queued.exchange.status == status


def test_106_no_response_message_but_the_last_body_carries_metadata():
    """Nothing is put on response messages but headers, where no cost is wanted."""
    queued = ext_proc_script.Talk()
    replies = [
        reply
        for message in (
            ext_proc_script.request_headers(ends=True),
            ext_proc_script.response_headers(),
            ext_proc_script.response_body(b"a"),
            ext_proc_script.response_body(b"", ends=True),
        )
        for reply in queued.hear(message)
    ]
    assert [bool(reply.metadata) for reply in replies] == [True, False, False, False]


@pytest.mark.parametrize(
    ("request_mode", "headers", "expected"),
    [
        ("BUFFERED", {**JSON, "content-length": "100"}, {"response_body_mode": 2}),
        ("BUFFERED", {**JSON, "content-length": "262145"}, {}),
        ("BUFFERED", SSE, {}),
        ("BUFFERED", JSON, {}),
        ("DUPLEX", {**JSON, "content-length": "100"}, {}),
        ("STREAMED", {**JSON, "content-length": "100"}, {}),
    ],
)
def test_a_buffered_response_is_requested_where_envoy_honors_it(
    request_mode: str, headers: dict[str, str], expected: dict[str, int]
):
    """mode_override asks for a small whole answer in BUFFERED, and keeps the end in sight."""
    override = (
        {**expected, "response_header_mode": 1, "response_trailer_mode": 1} if expected else {}
    )
    ext_proc_script.play(
        [
            ext_proc_script.response_headers(headers),
            ext_proc_script.answer_headers(override=override),
        ],
        modes=(request_mode, "NONE"),
    )
