from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.decision import BodyEdit, Decision, Outcome, Rejection
from extproc.endpoint import Endpoint
from extproc.errors import ProtocolError
from extproc.protocol.body_buffer import BufferBudget
from extproc.protocol.exchange import Exchange, ExchangeSettings
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
)
from extproc.request import InferenceRequest
from tests.support.seeded import examples

DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
ONE_TO_ONE = tuple(mode for mode in BodyMode if mode is not DUPLEX)
BUFFERED = (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL)
PICK = Decision(InferenceRequest("opaque"), [Endpoint("10.0.0.1:8000")])
REFUSAL = Rejection(503, "nobody")
LIMIT = 200

bodies = st.binary(max_size=60)
mode_pairs = st.builds(BodyModes, st.sampled_from(BodyMode), st.sampled_from(BodyMode))
hints = st.one_of(
    st.none(),
    st.builds(
        LbMetadata,
        st.one_of(st.none(), st.lists(st.just("10.0.0.1:8000"), max_size=1).map(tuple)),
        st.booleans(),
        st.just("x"),
    ),
)
headers = st.sampled_from(
    [
        {},
        {":status": "200", "content-type": "text/event-stream"},
        {":status": "500", "content-length": "10"},
        {"content-type": "application/grpc", "test-epp-endpoint-selection": "10.0.0.1"},
    ]
)
events = st.builds(
    ProcessingRequest,
    st.sampled_from(MessageKind),
    headers=headers,
    body=bodies,
    end_of_stream=st.booleans(),
    modes=st.none(),
    hints=hints,
)
calm = settings(deadline=None, max_examples=examples(200))


def exchange_of(budget: BufferBudget, *, conformance: bool = False) -> Exchange:
    return Exchange(ExchangeSettings(LIMIT, conformance=conformance), budget, watch_stream=True)


def converse(
    exchange: Exchange, events: Iterable[ProcessingRequest], outcome: Outcome = PICK
) -> list[list[ProcessingResponse]]:
    """The answers to each event, deciding at once."""
    replies_by_event = []
    for event in events:
        replies = list(exchange.receive(event))
        if exchange.pending is not None:
            replies += exchange.apply_outcome(outcome)
        replies_by_event.append(replies)
    return replies_by_event


def cut(body: bytes, places: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(body) + 1) for place in places), len(body)]
    return [body[start:stop] for start, stop in pairwise(edges)]


@given(
    body=st.binary(max_size=LIMIT),
    places=st.lists(st.integers(0, 1000), max_size=8),
    trailers=st.booleans(),
)
@calm
def test_any_chunking_gives_the_same_outcome(body: bytes, places: list[int], *, trailers: bool):
    """However a request body is cut: the same request is seen and the same answers are given."""
    pieces = cut(body, places)
    last = len(pieces) - 1
    conversation = [ProcessingRequest(MessageKind.REQUEST_HEADERS, modes=BodyModes(DUPLEX, DUPLEX))]
    conversation += [
        ProcessingRequest(
            MessageKind.REQUEST_BODY, body=piece, end_of_stream=not trailers and at == last
        )
        for at, piece in enumerate(pieces)
    ]
    if trailers:
        conversation.append(ProcessingRequest(MessageKind.REQUEST_TRAILERS))
    budget = BufferBudget(LIMIT)
    exchange = exchange_of(budget)
    for event in conversation[:-1]:
        assert list(exchange.receive(event)) == []
        assert exchange.pending is None
    assert list(exchange.receive(conversation[-1])) == []
    assert exchange.pending is not None
    assert exchange.pending.body == body
    expected: list[ProcessingResponse] = [
        RouteResponse(MessageKind.REQUEST_HEADERS, "10.0.0.1:8000"),
        StreamedBodyResponse(MessageKind.REQUEST_BODY, body, not trailers),
    ]
    if trailers:
        expected.append(ContinueResponse(MessageKind.REQUEST_TRAILERS))
    assert list(exchange.apply_outcome(PICK)) == expected
    assert budget.held_bytes == 0


@given(body=st.binary(max_size=300), places=st.lists(st.integers(0, 1000), max_size=8))
@calm
def test_response_pieces_pass_as_they_are(body: bytes, places: list[int]):
    """However a response body is cut: the same pieces come out, and the end once."""
    pieces = cut(body, places)
    conversation = [
        ProcessingRequest(MessageKind.RESPONSE_HEADERS, modes=BodyModes(DUPLEX, DUPLEX))
    ]
    conversation += [ProcessingRequest(MessageKind.RESPONSE_BODY, body=piece) for piece in pieces]
    conversation.append(ProcessingRequest(MessageKind.RESPONSE_BODY, end_of_stream=True))
    replies_by_event = converse(exchange_of(BufferBudget(LIMIT)), conversation)
    assert replies_by_event[1:] == [
        *(
            [StreamedBodyResponse(MessageKind.RESPONSE_BODY, piece, end_of_stream=False)]
            for piece in pieces
        ),
        [StreamedBodyResponse(MessageKind.RESPONSE_BODY, b"", end_of_stream=True)],
    ]


def answers(reply: ProcessingResponse) -> MessageKind | None:
    match reply:
        case ResponseHeadersMutation():
            return MessageKind.RESPONSE_HEADERS
        case ImmediateResponse():
            return None
        case _:
            return reply.answers


@given(
    modes=mode_pairs,
    script=st.lists(st.tuples(events, st.booleans()), max_size=12),
    outcome=st.sampled_from([PICK, REFUSAL]),
    consumed=st.integers(0, 9),
    conformance=st.booleans(),
)
@calm
def test_any_sequence_of_messages_keeps_the_invariants(
    modes: BodyModes,
    script: list[tuple[ProcessingRequest, bool]],
    outcome: Outcome,
    consumed: int,
    *,
    conformance: bool,
):
    """Any events, in any order, with requests held at will: the promises of an exchange hold.

    Only ProtocolError is raised. The request is answered at most once, its headers before anything
    else; each end of stream is said at most once; nothing follows a refusal; the body budget is
    whole again after close, however many of the answers were taken.
    """
    budget = BufferBudget(LIMIT)
    exchange = exchange_of(budget, conformance=conformance)
    replies: list[ProcessingResponse] = []
    first = True
    for event, queued in script:
        message = ProcessingRequest(
            event.kind,
            event.headers,
            event.body,
            event.end_of_stream,
            modes if first else None,
            event.hints,
        )
        first = False
        try:
            replies += exchange.receive(message)
        except ProtocolError:
            break
        if exchange.pending is not None and not queued:
            replies += exchange.apply_outcome(outcome)
        assert 0 <= budget.held_bytes <= LIMIT
    answers_left = iter(exchange.apply_outcome(outcome) if exchange.pending is not None else ())
    replies += islice(answers_left, consumed)
    exchange.close()
    assert budget.held_bytes == 0
    promises(replies)


def promises(replies: list[ProcessingResponse]) -> None:
    """Invariants of the replies of every exchange."""
    assert sum(isinstance(reply, RouteResponse) for reply in replies) <= 1
    refusals = [at for at, reply in enumerate(replies) if isinstance(reply, ImmediateResponse)]
    assert refusals in ([], [len(replies) - 1])
    picks = [reply for reply in replies if getattr(reply, "destination", "")]
    assert len(picks) + len(refusals) <= 1
    for start, parts in (
        (MessageKind.REQUEST_HEADERS, (MessageKind.REQUEST_BODY, MessageKind.REQUEST_TRAILERS)),
        (MessageKind.RESPONSE_HEADERS, (MessageKind.RESPONSE_BODY, MessageKind.RESPONSE_TRAILERS)),
    ):
        direction = [reply for reply in replies if answers(reply) in (start, *parts)]
        assert [at for at, reply in enumerate(direction) if answers(reply) is start] in ([], [0])
        ends = [
            at
            for at, reply in enumerate(direction)
            if isinstance(reply, StreamedBodyResponse) and reply.end_of_stream
        ]
        assert len(ends) <= 1
        after = direction[ends[0] + 1 :] if ends else []
        assert not any(isinstance(reply, StreamedBodyResponse) for reply in after)


def well_formed(modes: BodyModes, *, trailers: bool) -> list[ProcessingRequest]:
    """A whole conversation as Envoy holds it in these modes."""
    conversation = []
    for mode, start in (
        (modes.request, MessageKind.REQUEST_HEADERS),
        (modes.response, MessageKind.RESPONSE_HEADERS),
    ):
        body, end = MessageKind(start + 1), MessageKind(start + 2)
        conversation.append(ProcessingRequest(start))
        if mode in BUFFERED:
            conversation.append(ProcessingRequest(body, body=b"ab", end_of_stream=not trailers))
        elif mode is not BodyMode.NONE:
            conversation.append(ProcessingRequest(body, body=b"a"))
            conversation.append(ProcessingRequest(body, body=b"b", end_of_stream=not trailers))
        if trailers:
            conversation.append(ProcessingRequest(end))
    return conversation


@pytest.mark.parametrize("trailers", [True, False])
@pytest.mark.parametrize("response", BodyMode)
@pytest.mark.parametrize("request_", BodyMode)
def test_all_modes_from_all_starting_phases(
    request_: BodyMode,
    response: BodyMode,
    trailers: bool,  # noqa: FBT001
):
    """Each mode, joined at any message: no misfit, one-to-one where the mode is, a pick if asked."""
    modes = BodyModes(request_, response)
    events = well_formed(modes, trailers=trailers)
    for start in range(len(events)):
        first, *rest = events[start:]
        conversation = [
            ProcessingRequest(first.kind, {}, first.body, first.end_of_stream, modes),
            *rest,
        ]
        budget = BufferBudget(LIMIT)
        exchange = exchange_of(budget)
        replies_by_event = converse(exchange, conversation)
        everything = [reply for replies in replies_by_event for reply in replies]
        promises(everything)
        for event, replies in zip(conversation, replies_by_event, strict=True):
            is_request = event.kind <= MessageKind.REQUEST_TRAILERS
            if (request_ if is_request else response) in ONE_TO_ONE:
                assert [answers(reply) for reply in replies] == [event.kind]
        request_events = [
            event for event in conversation if event.kind <= MessageKind.REQUEST_TRAILERS
        ]
        chosen = [reply for reply in everything if getattr(reply, "destination", "")]
        assert len(chosen) == bool(request_events)
        if request_ is DUPLEX and request_events:
            assert [
                kind
                for kind in map(answers, everything)
                if kind and kind <= MessageKind.REQUEST_TRAILERS
            ] == sorted({event.kind for event in request_events})
            pieces = [
                reply
                for reply in everything
                if isinstance(reply, StreamedBodyResponse)
                and reply.answers is MessageKind.REQUEST_BODY
            ]
            assert b"".join(piece.body for piece in pieces) == b"".join(
                event.body for event in request_events
            )
            assert [piece.end_of_stream for piece in pieces] in ([], [not trailers])
        exchange.close()
        assert budget.held_bytes == 0


def test_an_unexpected_message_error_names_state_and_history():
    """A message that does not fit is one error that says where the exchange was and what came."""
    exchange = exchange_of(BufferBudget(LIMIT))
    list(exchange.receive(ProcessingRequest(MessageKind.REQUEST_HEADERS)))
    with pytest.raises(ProtocolError, match=r"GATHERING.*REQUEST_HEADERS.*last events"):
        exchange.receive(ProcessingRequest(MessageKind.REQUEST_HEADERS))


def test_garbage_is_unexpected_in_every_state():
    """Bytes that are no message end the exchange with the error that names them."""
    with pytest.raises(ProtocolError, match="GARBAGE"):
        exchange_of(BufferBudget(LIMIT)).receive(ProcessingRequest(MessageKind.GARBAGE))


def test_resolving_twice_is_a_bug():
    """A request that is not pending cannot be resolved."""
    exchange = exchange_of(BufferBudget(LIMIT))
    with pytest.raises(RuntimeError, match="nothing is pending"):
        exchange.apply_outcome(PICK)
    list(exchange.receive(ProcessingRequest(MessageKind.REQUEST_HEADERS, end_of_stream=True)))
    list(exchange.apply_outcome(PICK))
    with pytest.raises(RuntimeError, match="nothing is pending"):
        exchange.apply_outcome(PICK)


def test_closing_twice_releases_once():
    """Closing an exchange again does nothing."""
    budget = BufferBudget(LIMIT)
    exchange, other = exchange_of(budget), exchange_of(budget)
    for stream in (exchange, other):
        list(stream.receive(ProcessingRequest(MessageKind.REQUEST_BODY, body=b"x" * 10)))
    exchange.close()
    exchange.close()
    assert budget.held_bytes == 10


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_disconnect_between_replies_releases_the_body(taken: int):
    """Close returns the body to the budget while answers are still to be taken."""
    budget = BufferBudget(LIMIT)
    exchange = exchange_of(budget)
    list(exchange.receive(ProcessingRequest(MessageKind.REQUEST_HEADERS)))
    list(
        exchange.receive(
            ProcessingRequest(MessageKind.REQUEST_BODY, body=b"x" * 10, end_of_stream=True)
        )
    )
    answers_left = iter(exchange.apply_outcome(PICK))
    for _ in range(taken):
        next(answers_left)
    exchange.close()
    assert budget.held_bytes == 0


@given(
    body=st.binary(min_size=1, max_size=LIMIT - 20),
    span=st.tuples(st.integers(0, 1000), st.integers(0, 1000)),
    content=st.binary(max_size=20),
    places=st.lists(st.integers(0, 1000), max_size=8),
    mode=st.sampled_from(BodyMode),
    trailers=st.booleans(),
    length=st.booleans(),
)
@calm
def test_an_edit_is_the_same_in_every_mode(
    body: bytes,
    span: tuple[int, int],
    content: bytes,
    places: list[int],
    *,
    mode: BodyMode,
    trailers: bool,
    length: bool,
):
    """However a body is shown and cut, the edited one is sent on, with its length."""
    start, stop = sorted(edge % (len(body) + 1) for edge in span)
    edited = body[:start] + content + body[stop:]
    headers = {"content-length": str(len(body))} if length else {}
    pieces = cut(body, places) if mode is DUPLEX else [body]
    conversation = [
        ProcessingRequest(
            MessageKind.REQUEST_HEADERS, headers=headers, modes=BodyModes(mode, BodyMode.NONE)
        )
    ]
    if mode is not BodyMode.NONE:
        conversation += [
            ProcessingRequest(
                MessageKind.REQUEST_BODY,
                body=piece,
                end_of_stream=not trailers and at == len(pieces),
            )
            for at, piece in enumerate(pieces, 1)
        ]
    if trailers:
        conversation.append(ProcessingRequest(MessageKind.REQUEST_TRAILERS))
    budget = BufferBudget(LIMIT)
    exchange = exchange_of(budget)
    outcome = msgspec.structs.replace(PICK, body_edit=BodyEdit(start, stop, content))
    all_replies = [
        reply for replies in converse(exchange, conversation, outcome) for reply in replies
    ]
    exchange.close()
    assert budget.held_bytes == 0
    (route,) = (reply for reply in all_replies if isinstance(reply, RouteResponse))
    passed = [bytes(reply.body) for reply in all_replies if isinstance(reply, StreamedBodyResponse)]
    if mode is DUPLEX:
        assert b"".join(passed) == edited
        assert route.body is None
    else:
        assert not passed
        assert route.body == (edited if mode in BUFFERED else None)
    cut_short = mode is BodyMode.BUFFERED_PARTIAL and trailers and not length
    tells = exchange.edited and not cut_short
    assert dict(route.set_headers) == ({"content-length": str(len(edited))} if tells else {})
