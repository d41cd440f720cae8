"""RFC 9113, section 5.2 and 6.9: flow control both ways."""

from __future__ import annotations

import pytest

from extproc.http2.frames import ErrorCode
from extproc.http2.messages import GrpcStatus
from extproc.http2.sender import SendBudget
from extproc.http2.stream import CallTerminated, MessageReceived
from tests.support.http2_frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    RawClient,
    frame,
    message,
    number,
    parse,
    setting,
)


def sent(client, stream_id=1):
    """Payloads of DATA of a stream so far."""
    return b"".join(
        answer.payload
        for answer in client.frames
        if answer.kind == DATA and answer.stream_id == stream_id
    )


def reset(client):
    client.core.reset_call(1, ErrorCode.CANCEL)
    return client.read()


def reset_stalled(client):
    client.core.reset_stalled()
    client.core.reset_stalled()
    return client.read()


def fail_lazily(client):
    client.core.end_call(1, GrpcStatus.INTERNAL)
    return client.read()


def reset_by_peer(client):
    return client.send(frame(RST_STREAM, 0, 1, number(8)))


def test_section_6_9_data_waits_for_the_window_of_its_stream():
    client = RawClient()
    client.send(frame(SETTINGS, 0, 0, setting(4, 10)))
    client.call(flags=END_HEADERS | END_STREAM)
    client.core.send_messages(1, [b"0123456789", b"ab"])
    client.core.end_call(1)
    client.read()
    assert len(sent(client)) == 10
    assert client.core.num_streams == 1
    client.send(frame(WINDOW_UPDATE, 0, 1, number(5)))
    client.send(frame(WINDOW_UPDATE, 0, 1, number(7)))
    assert sent(client) == message(b"0123456789") + message(b"ab")
    assert client.frames[-1].flags == END_HEADERS | END_STREAM
    assert client.core.num_streams == 0


def test_section_6_9_data_waits_for_the_window_of_the_connection():
    client = RawClient()
    client.send(frame(SETTINGS, 0, 0, setting(4, 1 << 20)))
    data = {1: b"a" * 50_000, 3: b"b" * 50_000, 5: b"c" * 10}
    for stream_id, text in data.items():
        client.call(stream_id)
        client.core.send_messages(stream_id, [text])
    client.read()
    assert sum(len(sent(client, stream_id)) for stream_id in data) == 65_535
    client.send(frame(WINDOW_UPDATE, 0, 0, number(1 << 20)))
    assert {stream_id: sent(client, stream_id)[5:] for stream_id in data} == data


def test_section_6_9_2_a_smaller_initial_window_may_become_negative():
    client = RawClient()
    client.call()
    client.core.send_messages(1, [bytes(95)])
    client.send(frame(SETTINGS, 0, 0, setting(4, 0)))
    client.core.send_messages(1, [b"x"])
    client.send(frame(WINDOW_UPDATE, 0, 1, number(100)))
    assert len(sent(client)) == 100
    client.send(frame(SETTINGS, 0, 0, setting(4, 6)))
    assert sent(client)[100:] == message(b"x")


def test_section_6_9_1_a_window_that_overflows_ends_its_stream():
    client = RawClient()
    client.call()
    (answer,) = client.send(frame(WINDOW_UPDATE, 0, 1, number(0x7FFF_FFFF)))
    assert (answer.kind, answer.number) == (RST_STREAM, ErrorCode.FLOW_CONTROL_ERROR)
    client.call(3)
    (answer,) = client.send(frame(WINDOW_UPDATE, 0, 3, number(0)))
    assert (answer.kind, answer.number) == (RST_STREAM, ErrorCode.PROTOCOL_ERROR)


def test_section_6_9_2_settings_that_overflow_a_window_end_the_connection():
    client = RawClient()
    client.call()
    client.send(frame(WINDOW_UPDATE, 0, 1, number(100_000)))
    client.send(frame(SETTINGS, 0, 0, setting(4, 0x7FFF_FFFF)))
    assert client.ended_with == ErrorCode.FLOW_CONTROL_ERROR


def test_frames_are_as_large_as_the_peer_takes():
    client = RawClient()
    client.send(frame(SETTINGS, 0, 0, setting(4, 1 << 20) + setting(5, 20_000)))
    client.send(frame(WINDOW_UPDATE, 0, 0, number(1 << 20)))
    client.call()
    client.core.send_messages(1, [bytes(45_000)])
    sizes = [len(answer.payload) for answer in client.read() if answer.kind == DATA]
    assert sizes == [20_000, 20_000, 5_005]


def test_more_data_than_the_window_ends_the_stream():
    client = RawClient(stream_window_bytes=100)
    client.call()
    client.core.pause_call(1)
    client.send(frame(DATA, 0, 1, message(bytes(90))))
    (answer,) = client.send(frame(DATA, 0, 1, message(b"123456")))
    assert (answer.kind, answer.number) == (RST_STREAM, ErrorCode.FLOW_CONTROL_ERROR)
    assert client.events[-1] == CallTerminated(1)


def test_a_paused_call_gets_no_window():
    client = RawClient(stream_window_bytes=100)
    client.call()
    client.core.pause_call(1)
    assert client.send(frame(DATA, 0, 1, message(bytes(75)))) == []
    client.core.resume_call(1)
    assert client.read() == [(WINDOW_UPDATE, 0, 1, number(80))]
    assert client.budget.held_bytes == 0


def test_a_call_that_used_less_than_half_of_its_window_gets_no_more_when_it_resumes():
    client = RawClient(stream_window_bytes=100)
    client.call()
    client.core.pause_call(1)
    client.send(frame(DATA, 0, 1, message(bytes(40))))
    client.core.resume_call(1)
    assert client.read() == []
    assert client.send(frame(DATA, 0, 1, message(b""))) == [(WINDOW_UPDATE, 0, 1, number(50))]


def test_the_window_of_the_connection_follows_what_came():
    client = RawClient(connection_window_bytes=100_000, max_message_bytes=1 << 20)
    client.call()
    client.send(frame(DATA, 0, 1, bytes(1) + number(60_000)))
    answers = client.send(*(frame(DATA, 0, 1, bytes(10_000)) for _ in range(6)))
    assert answers == [(WINDOW_UPDATE, 0, 0, number(50_005))]
    assert client.events[-1] == MessageReceived(1, bytes(60_000))


def test_a_peer_that_takes_no_answers_may_send_no_more():
    """It gets no window for its own data until it takes what waits for it."""
    client = RawClient(connection_window_bytes=100_000, max_unsent_bytes=1000)
    client.send(frame(SETTINGS, 0, 0, setting(4, 0)))
    client.call(flags=END_HEADERS | END_STREAM)
    client.core.send_messages(1, [bytes(2000)])
    client.call(3)
    pieces = [frame(DATA, 0, 3, message(bytes(9_995))) for _ in range(10)]
    assert all(answer.stream_id for answer in client.send(*pieces))
    assert client.ended_with is None
    answers = client.send(frame(WINDOW_UPDATE, 0, 1, number(3000)))
    assert (WINDOW_UPDATE, 0, 0, number(100_000)) in answers
    client.core.send_messages(1, [bytes(5000)])
    client.send(*pieces, pieces[0])
    assert client.ended_with == ErrorCode.FLOW_CONTROL_ERROR


@pytest.mark.parametrize("drop", [reset, reset_stalled, fail_lazily, reset_by_peer])
def test_a_peer_may_send_more_once_the_answers_it_did_not_take_are_dropped(drop):
    client = RawClient(connection_window_bytes=100_000, max_unsent_bytes=1000)
    client.send(frame(SETTINGS, 0, 0, setting(4, 0)))
    client.call(flags=END_HEADERS | END_STREAM)
    client.core.send_lazily(1, iter([(bytes(2000),)]))
    client.call(3)
    client.send(*(frame(DATA, 0, 3, message(bytes(9_995))) for _ in range(10)))
    answers = drop(client)
    assert (WINDOW_UPDATE, 0, 0, number(100_000)) in answers
    assert client.ended_with is None


def test_an_answer_that_does_not_move_is_reset():
    client = RawClient()
    client.send(frame(SETTINGS, 0, 0, setting(4, 0)))
    for stream_id in (1, 3):
        client.call(stream_id)
        client.core.send_messages(stream_id, [b"x"])
    client.core.end_call(3)
    assert client.core.reset_stalled() == []
    client.send(frame(WINDOW_UPDATE, 0, 1, number(1)))
    assert client.core.reset_stalled() == []
    assert client.counts == {"stalled_answer": 1}
    assert client.core.reset_stalled() == [CallTerminated(1)]
    assert [answer.number for answer in client.read()] == [ErrorCode.CANCEL] * 2
    assert client.core.num_streams == 0


def test_what_a_reset_stream_had_to_send_is_dropped():
    client = RawClient(max_unsent_bytes=1)
    client.send(frame(SETTINGS, 0, 0, setting(4, 3)))
    client.call()
    client.core.send_messages(1, [b"abcdef"])
    client.send(frame(RST_STREAM, 0, 1, number(8)))
    client.read()
    assert client.send(frame(WINDOW_UPDATE, 0, 0, number(100))) == []
    assert client.send_budget.held_bytes == 0


@pytest.mark.parametrize(
    ("data", "status", "limit"),
    [
        (message(b"x", flag=1), GrpcStatus.INTERNAL, "grpc_message"),
        (message(bytes(1001))[:6], GrpcStatus.RESOURCE_EXHAUSTED, "message_bytes"),
    ],
)
def test_a_message_that_is_not_taken_ends_its_call(data, status, limit):
    client = RawClient(max_message_bytes=1000)
    client.call(data=message(bytes(1000)))
    answers = client.send(frame(DATA, 0, 1, data))
    assert client.fields(answers[0])["grpc-status"] == str(int(status))
    assert answers[1].number == ErrorCode.NO_ERROR
    assert client.events[-1] == CallTerminated(1)
    assert client.counts == {limit: 1}


def test_an_end_inside_of_a_message_ends_the_call():
    client = RawClient()
    client.call(data=message(b"abc")[:-1])
    (answer,) = client.send(frame(DATA, END_STREAM, 1))
    assert client.fields(answer)["grpc-status"] == "13"
    assert (answer.kind, client.budget.held_bytes) == (HEADERS, 0)


def test_incomplete_messages_have_a_budget_together():
    client = RawClient(budget=10_000)
    half = message(bytes(8000))[:4000]
    for stream_id in (1, 3, 5):
        client.call(stream_id, data=half)
    assert client.events[-1] == CallTerminated(5)
    assert client.counts == {"receive_budget": 1}
    client.send(frame(DATA, 0, 1, bytes(4005)))
    assert client.events[-1] == MessageReceived(1, bytes(8000))
    client.core.close()
    assert client.budget.held_bytes == 0


def test_pieces_of_one_byte_are_counted_with_their_cost():
    client = RawClient(budget=10_000)
    client.call(data=message(bytes(8000))[:5])
    client.send(*(frame(DATA, 0, 1, b"x") for _ in range(200)))
    assert client.counts == {"receive_budget": 1}


def test_streams_take_turns_when_the_window_of_the_connection_opens():
    client = RawClient()
    client.send(frame(SETTINGS, 0, 0, setting(4, 1 << 20)))
    for stream_id in (1, 3, 5):
        client.call(stream_id)
        client.core.send_messages(stream_id, [bytes(50_000)])
    client.read()
    client.send(*(frame(WINDOW_UPDATE, 0, 0, number(20_000)) for _ in range(3)))
    assert len(sent(client, 3)) > 15_000
    assert len(sent(client, 5)) > 15_000
    client.send(frame(WINDOW_UPDATE, 0, 0, number(1 << 20)))
    assert [len(sent(client, stream_id)) for stream_id in (1, 3, 5)] == [50_005] * 3


def test_a_stream_without_window_does_not_hold_up_the_others():
    client = RawClient()
    client.send(frame(SETTINGS, 0, 0, setting(4, 0)))
    for stream_id in (1, 3):
        client.call(stream_id)
        client.core.send_messages(stream_id, [bytes(70_000)])
    client.send(frame(WINDOW_UPDATE, 0, 3, number(80_000)))
    assert len(sent(client, 3)) == 65_535
    client.send(frame(WINDOW_UPDATE, 0, 0, number(80_000)))
    assert (len(sent(client, 1)), len(sent(client, 3))) == (0, 70_005)
    client.send(frame(SETTINGS, 0, 0, setting(4, 70_005)))
    assert len(sent(client, 1)) == 70_005


def test_the_last_of_several_initial_windows_in_a_frame_counts():
    client = RawClient()
    client.call()
    windows = [setting(4, size) for size in (9, 0x7FFF_FFFF, 12)]
    client.send(frame(SETTINGS, 0, 0, b"".join(windows)))
    client.core.send_messages(1, [bytes(100)])
    client.read()
    assert len(sent(client)) == 12


def test_the_answer_that_waits_for_the_longest_time_is_dropped_first():
    """Whichever connection it is on; those that move are not touched."""
    budget = SendBudget(10_000)
    clients = [RawClient(send_budget=budget) for _ in range(3)]
    for client in clients:
        client.send(frame(SETTINGS, 0, 0, setting(4, 0)))
        client.call()
        client.core.send_messages(1, [bytes(4000)])
    clients[0].send(frame(WINDOW_UPDATE, 0, 1, number(5000)))
    clients[0].core.send_messages(1, [bytes(8000)])
    budget.enforce()
    answers = [[answer.kind for answer in client.read()][-1:] for client in clients]
    assert answers == [[DATA], [RST_STREAM], [RST_STREAM]]
    assert budget.held_bytes == 8005 - 995
    clients[0].core.close()
    assert (budget.held_bytes, budget.waiting) == (0, {})


def test_a_large_answer_leaves_in_outputs_of_a_bounded_size():
    """The next is built when the transport took the one before, and others are not held up."""
    client = RawClient()
    client.send(frame(SETTINGS, 0, 0, setting(4, 0x7FFF_FFFF)))
    client.send(frame(WINDOW_UPDATE, 0, 0, number(0x7000_0000)))
    client.call()
    client.call(3)
    built = []

    def build():
        for at in range(40):
            built.append(at)
            yield bytes([at]) * 65_000, memoryview(bytes([at]) * 536)

    assert not client.core.send_lazily(1, build())
    first = client.core.take_output()
    assert len(first) < 400_000
    assert len(built) < 12
    client.core.send_messages(3, [b"short"])
    client.core.end_call(3)
    client.core.end_call(1)
    client.frames += parse(first)
    client.read()
    assert sent(client) == b"".join(message(bytes([at]) * 65_536) for at in range(40))
    ends = [
        answer.stream_id for answer in client.frames if answer.kind == HEADERS and answer.flags & 1
    ]
    assert ends == [3, 1]
    assert client.core.num_streams == 0


def endless_messages(closed):
    """Large messages without end; adds to the list when it is closed."""
    try:
        while True:
            yield (bytes(20_000),)
    finally:
        closed.append(True)


def test_a_source_of_messages_is_closed_with_its_call():
    client = RawClient()
    client.call()
    closed = []
    assert not client.core.send_lazily(1, endless_messages(closed))
    client.send(frame(RST_STREAM, 0, 1, number(8)))
    assert closed == [True]
    assert client.send_budget.held_bytes == 0
    assert client.core.send_lazily(1, iter([(b"x",)]))


def test_a_call_that_fails_ends_without_the_messages_that_were_not_built():
    """Its handler has returned what they hold of limits; a peer without a window gets the status."""
    client = RawClient()
    client.send(frame(SETTINGS, 0, 0, setting(4, 100)))
    client.call()
    closed = []
    assert not client.core.send_lazily(1, endless_messages(closed))
    client.core.end_call(1, GrpcStatus.DEADLINE_EXCEEDED, "Deadline Exceeded")
    client.read()
    assert closed == [True]
    assert client.send_budget.held_bytes == 0
    assert client.core.num_streams == 0
    assert any(answer.kind == HEADERS and answer.flags & END_STREAM for answer in client.frames)


def test_section_6_5_3_settings_are_confirmed_before_the_data_that_they_allow():
    """The client has the larger window once it reads the confirmation, and not before."""
    client = RawClient()
    client.send(frame(SETTINGS, 0, 0, setting(4, 10)))
    client.call()
    client.core.send_messages(1, [bytes(100)])
    client.read()
    answers = client.send(frame(SETTINGS, 0, 0, setting(4, 1000)))
    assert [answer.kind for answer in answers] == [SETTINGS, DATA]
