"""ZMTP of publishers and replay sockets: any bytes, cut anywhere, have an answer."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.scrape.zmtp import ZmtpError, ZmtpParser

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
PING = b"\x04\x09\x04PING\x00\x00ab"
MAX_BYTES = 2000

messages = st.lists(st.binary(max_size=300), min_size=1, max_size=8)
cuts = st.lists(st.integers(0, 400), max_size=12)


def encoded(frames):
    """A message as a peer sends it; long frames have eight bytes of length."""
    sent = b""
    for number, frame in enumerate(frames, 1):
        flags, size = int(number < len(frames)), len(frame)
        sent += bytes([flags | 2]) + size.to_bytes(8) if size > 255 else bytes([flags, size])
        sent += frame
    return sent


def read(stream, lengths=(), *, socket_type=b"SUB"):
    """Messages, error and parser of a stream that arrives in pieces."""
    parser, received, error = ZmtpParser(socket_type, MAX_BYTES), [], ""
    try:
        for length in (*lengths, len(stream)):
            parser.feed(stream[:length])
            stream = stream[length:]
            while (frames := parser.receive()) is not None:
                received.append(frames)
    except ZmtpError as broken:
        error = str(broken)
    return received, error, parser


@given(st.lists(messages.filter(lambda frames: sum(map(len, frames)) <= MAX_BYTES)), cuts)
def test_messages_arrive_as_they_were_sent(sent, lengths):
    """However their bytes are cut, and with pings between."""
    stream = GREETING + READY + b"".join(encoded(frames) + PING for frames in sent)
    received, error, parser = read(stream, lengths)
    assert (received, error) == (sent, "")
    assert parser.num_buffered == 0
    assert parser.output.count(b"\x04\x07\x04PONGab") == len(sent)


@given(st.lists(st.one_of(st.binary(max_size=40), messages.map(encoded), st.just(PING))), cuts)
@example([b"\x00"], [])
@example([b"\x04\x00"], [])
def test_any_bytes_behind_the_handshake_have_an_answer(parts, lengths):
    """The same one however they are cut, and what is kept of them is bounded."""
    stream = GREETING + READY + b"".join(parts)
    received, error, parser = read(stream, lengths)
    assert (received, error) == read(stream)[:2]
    assert all(sum(map(len, frames)) <= MAX_BYTES and len(frames) <= 8 for frames in received)
    assert len(parser.output) < 300 + 2 * len(stream)


@given(st.binary(max_size=200), st.integers(0, 110), st.sampled_from([b"SUB", b"DEALER"]))
@example(b"X", 67, b"SUB")  # another command in place of READY
def test_any_handshake_has_an_answer(damage, position, socket_type):
    """A peer that does not keep to it gets no message through."""
    valid = GREETING + READY
    stream = valid[:position] + damage + valid[position + len(damage) :] + encoded([b"a"])
    received, _, parser = read(stream, socket_type=socket_type)
    assert parser.is_open or not received


@pytest.mark.parametrize(
    ("socket_type", "peer", "is_open"),
    [
        (b"SUB", b"PUB", True),
        (b"SUB", b"XPUB", True),
        (b"SUB", b"ROUTER", False),
        (b"DEALER", b"ROUTER", True),
        (b"DEALER", b"PUB", False),
    ],
)
def test_peers_have_a_socket_that_fits(socket_type, peer, is_open):
    """Any other is refused."""
    body = b"\x05READY\x0bSOCKET-type" + len(peer).to_bytes(4) + peer
    stream = GREETING + bytes([4, len(body)]) + body
    assert read(stream, socket_type=socket_type)[2].is_open == is_open


def test_what_is_sent_reads_as_it_was():
    """A request of a replay, behind an empty frame."""
    parser = ZmtpParser(b"DEALER", MAX_BYTES)
    parser.output.clear()
    parser.send([b"", bytes(8)])
    assert read(GREETING + READY + bytes(parser.output))[0] == [[b"", bytes(8)]]
