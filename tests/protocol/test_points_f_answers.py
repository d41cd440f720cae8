"""Section F of the checklist: the answer names the client's model, in every mode that shows it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.decision import Decision, Outcome
from extproc.pool.inference_policy import InferencePolicy, RewriteRule, TargetModel
from extproc.protocol.exchange import ExchangeSettings
from extproc.request import HttpRequest
from tests.support import ext_proc_script
from tests.support.peer import DecodedReply
from tests.support.pool_fixture import PoolFixture, load
from tests.support.seeded import examples

REQUEST = b'{"model": "big", "messages": [{"role": "user", "content": "x"}]}'
BODY = b'{"id": "c", "model": "big-v2", "choices": []}'
NEW = BODY.replace(b"big-v2", b"big")
PIECES = (
    b'data: {"model":"big-v2","a":1}\n\n',
    b'data: {"model": "big-v2"}\n\n',
    b"data: [DONE]\n\n",
)
JSON = {**ext_proc_script.JSON, "content-length": str(len(BODY))}
STREAMED, BUFFERED = {"response_body_mode": 1}, {"response_body_mode": 2}


def build_pool() -> PoolFixture:
    queued = PoolFixture({ext_proc_script.ADDRESS: load(0, 0.0)})
    queued.store.set_policy(
        InferencePolicy(rules=(RewriteRule(("big",), (TargetModel("big-v2"),)),))
    )
    return queued


def answering(
    modes: tuple[str, str], decide: ext_proc_script.Decide | None = None, **how: object
) -> ext_proc_script.Talk:
    """A stream whose request was routed and edited."""
    queued = ext_proc_script.Talk(decide or build_pool().decide, modes=modes, **how)
    queued.hear(ext_proc_script.request_headers())
    queued.hear(ext_proc_script.request_body(REQUEST, ends=True))
    return queued


def heading(override: dict[str, int] | None = None, *removes: str) -> list[DecodedReply]:
    """The reply to the response headers."""
    return [
        DecodedReply(
            "response_headers",
            sets=(ext_proc_script.MARKER,),
            removes=removes,
            override={**override, "response_header_mode": 1, "response_trailer_mode": 1}
            if override
            else {},
        )
    ]


def replaced(body: bytes, *sets: tuple[str, str]) -> list[DecodedReply]:
    return [DecodedReply("response_body", replaces=body, sets=sets)]


def test_086_duplex_json():
    """Full duplex: the changed bytes are handed on, and the length, which is another, goes."""
    queued = answering(ext_proc_script.DUPLEX)
    assert queued.hear(ext_proc_script.response_headers(JSON)) == heading(None, "content-length")
    cut = BODY.index(b"-v2")
    # What may begin the name waits for the rest.
    assert queued.hear(ext_proc_script.response_body(BODY[:cut])) == [
        ext_proc_script.hand_on(b'{"id": "c", ', part="response_body")
    ]
    assert queued.hear(ext_proc_script.response_body(BODY[cut:], ends=True)) == [
        ext_proc_script.hand_on(NEW[12:], ends=True, part="response_body")
    ]


def test_086_duplex_events():
    """Every event passes at once, changed; [DONE] and the empty last piece as they are."""
    queued = answering(ext_proc_script.DUPLEX)
    assert queued.hear(ext_proc_script.response_headers(ext_proc_script.SSE)) == heading(
        None, "content-length"
    )
    for piece in (*PIECES, b""):
        ends = not piece
        assert queued.hear(ext_proc_script.response_body(piece, ends=ends)) == [
            ext_proc_script.hand_on(
                piece.replace(b"big-v2", b"big"), ends=ends, part="response_body"
            )
        ]


def test_086_duplex_ended_by_trailers():
    """Withheld bytes are sent before the reply to the trailers."""
    queued = answering(ext_proc_script.DUPLEX)
    queued.hear(ext_proc_script.response_headers(ext_proc_script.JSON))
    assert queued.hear(ext_proc_script.response_body(b'{"model": "bi')) == [
        ext_proc_script.hand_on(b"{", part="response_body")
    ]
    assert queued.hear(ext_proc_script.response_body(b"g")) == []
    assert queued.hear(ext_proc_script.response_trailers()) == [
        ext_proc_script.hand_on(b'"model": "big', part="response_body"),
        ext_proc_script.go_on("response_trailers"),
    ]


@pytest.mark.parametrize(
    ("modes", "override"),
    [(("BUFFERED", "NONE"), BUFFERED), (("DUPLEX", "BUFFERED"), None)],
)
def test_086_buffered_json(modes: tuple[str, str], override: dict[str, int] | None):
    """Buffered: asked for where it is not shown; one message, changed, with its length."""
    queued = answering(modes)
    assert queued.hear(ext_proc_script.response_headers(JSON)) == heading(override)
    length = ("content-length", str(len(NEW)))
    assert queued.hear(ext_proc_script.response_body(BODY, ends=True)) == replaced(NEW, length)


@pytest.mark.parametrize("response", ["NONE", "STREAMED", "BUFFERED"])
@pytest.mark.parametrize(
    "headers",
    [
        ext_proc_script.SSE,
        {**ext_proc_script.JSON, "content-length": "262145"},
        ext_proc_script.JSON,
    ],
)
def test_086_streams_piece_by_piece(response: str, headers: dict[str, str]):
    """Events, and answers too large to buffer: every piece is asked for and answered by another."""
    queued = answering(("BUFFERED", response))
    override = None if response == "STREAMED" else STREAMED
    assert queued.hear(ext_proc_script.response_headers(headers)) == heading(
        override, "content-length"
    )
    assert queued.hear(ext_proc_script.response_body(b'{"model":')) == replaced(b"{")
    assert queued.hear(ext_proc_script.response_body(b'"big-v2"')) == replaced(b'"model":"big"')
    assert queued.hear(ext_proc_script.response_body(b"}\n\n", ends=True)) == [
        ext_proc_script.go_on("response_body")
    ]


def test_086_a_cut_buffer_keeps_the_length_of_the_body():
    """BUFFERED_PARTIAL: the rest follows as it is, and the length changes by the difference."""
    queued = answering(("DUPLEX", "BUFFERED_PARTIAL"))
    queued.hear(
        ext_proc_script.response_headers({**ext_proc_script.JSON, "content-length": "9000"})
    )
    length = ("content-length", str(9000 - len("-v2")))
    assert queued.hear(ext_proc_script.response_body(BODY[:40])) == replaced(
        BODY[:40].replace(b"big-v2", b"big"), length
    )


@pytest.mark.parametrize(
    ("engine_model", "client"), [("big-v2", ""), ("", "big"), ("big-v2", "big-v2")], ids=repr
)
def test_086_equal_or_empty_names_change_no_answer(engine_model: str, client: str):
    """Nothing is asked for and nothing changed."""

    def decide(raw: HttpRequest) -> Outcome:
        decision = build_pool().decide(raw)
        assert isinstance(decision, Decision)
        return Decision(
            decision.request,
            decision.endpoints,
            body_edit=decision.body_edit,
            model_rewrite=engine_model,
            client_model=client,
        )

    queued = answering(("BUFFERED", "STREAMED"), decide)
    assert queued.hear(ext_proc_script.response_headers(ext_proc_script.SSE)) == heading()
    assert queued.hear(ext_proc_script.response_body(PIECES[0], ends=True)) == [
        ext_proc_script.go_on("response_body")
    ]


@pytest.mark.parametrize(
    ("headers", "chosen"),
    [
        ({**ext_proc_script.SSE, "content-encoding": "gzip"}, {}),
        ({**ext_proc_script.SSE, "content-type": "audio/mpeg"}, {}),
        (ext_proc_script.SSE, {"restore_model": False}),
    ],
    ids=["compressed", "sound", "switched off"],
)
def test_086_a_body_that_cannot_be_read_is_unchanged(
    headers: dict[str, str], chosen: dict[str, bool]
):
    """Compressed bodies and other types, and everything where the setting is off."""
    queued = answering(("BUFFERED", "NONE"), settings=ExchangeSettings(1 << 20, **chosen))
    assert queued.hear(ext_proc_script.response_headers(headers)) == heading()


def test_086_the_answer_of_an_unedited_request_is_unchanged():
    """The engine answers to the name it was given: the client's own."""
    queued = ext_proc_script.Talk(build_pool().decide, modes=("STREAMED", "STREAMED"))
    queued.hear(
        ext_proc_script.request_headers(
            {**ext_proc_script.PLAIN, "x-llm-d-model-name-rewrite": "big-v2"}
        )
    )
    queued.hear(ext_proc_script.request_body(REQUEST, ends=True))
    assert queued.hear(ext_proc_script.response_headers(ext_proc_script.SSE)) == heading()
    assert queued.hear(ext_proc_script.response_body(PIECES[0])) == [
        ext_proc_script.go_on("response_body")
    ]


def test_086_a_name_the_body_lacked_is_not_put_back():
    """The header supplied a model: the client used none, and gets the engine's."""
    queued = ext_proc_script.Talk(PoolFixture({ext_proc_script.ADDRESS: load(0, 0.0)}).decide)
    queued.hear(
        ext_proc_script.request_headers(
            {**ext_proc_script.PLAIN, "x-llm-d-model-name-rewrite": "big-v2"}
        )
    )
    queued.hear(
        ext_proc_script.request_body(b'{"messages": [{"role": "user", "content": "x"}]}', ends=True)
    )
    queued.hear(ext_proc_script.response_headers(JSON))
    (reply,) = queued.hear(ext_proc_script.response_body(BODY, ends=True))
    assert reply.body == BODY


def test_086_an_answer_without_body():
    """Nothing to change, and its length stays."""
    queued = answering(ext_proc_script.DUPLEX)
    assert queued.hear(ext_proc_script.response_headers(JSON, ends=True)) == heading()


@settings(max_examples=examples(60), deadline=None)
@given(
    cuts=st.lists(st.integers(1, 200), max_size=12),
    mode=st.sampled_from([ext_proc_script.DUPLEX, ("BUFFERED", "STREAMED"), ("BUFFERED", "NONE")]),
    empty=st.booleans(),
    events=st.booleans(),
)
def test_086_any_cut_through_the_exchange(
    cuts: list[int], mode: tuple[str, str], *, empty: bool, events: bool
):
    """However the answer is cut: the same bytes, one end, and where it is due one answer each."""
    body = b"".join(PIECES) if events else BODY + b" " * 200
    places = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    pieces = [body[a:b] for a, b in itertools.pairwise(places)] + [b""] * empty
    queued = answering(mode)
    queued.hear(
        ext_proc_script.response_headers(ext_proc_script.SSE if events else ext_proc_script.JSON)
    )
    given_out, ends = b"", 0
    for at, piece in enumerate(pieces):
        replies = queued.hear(ext_proc_script.response_body(piece, ends=at == len(pieces) - 1))
        if mode is not ext_proc_script.DUPLEX:
            assert len(replies) == 1
        for reply in replies:
            ends += reply.ends
            if mode is ext_proc_script.DUPLEX:
                given_out += reply.body or b""
            else:
                given_out += piece if reply.replaces is None else reply.replaces
    assert given_out == body.replace(b"big-v2", b"big")
    assert ends == (mode is ext_proc_script.DUPLEX)
