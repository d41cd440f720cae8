import hypothesis
import pytest
from hypothesis import strategies as st

from extproc.scrape import client


def fed(*pieces, cap_bytes=1000, end=False):
    answer = client.HttpResponseParser(cap_bytes=cap_bytes)
    for piece in pieces:
        answer.feed(piece)
    if end:
        answer.end()
    return answer


OK = b"HTTP/1.1 200 OK\r\n"
COUNTED = OK + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nt: v\r\n\r\n"
CLOSED = OK + b"connection: close\r\n\r\nhello"


@pytest.mark.parametrize("wire", [COUNTED, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + COUNTED])
def test_a_body_arrives_in_any_pieces(wire):
    """Every split into two gives the body and a connection to keep."""
    for at in range(len(wire) + 1):
        answer = fed(*(piece for piece in (wire[:at], wire[at:]) if piece))
        assert (answer.done, answer.failure, answer.body) == (True, "", b"hello"), at
        assert answer.reusable


@pytest.mark.parametrize("wire", [COUNTED, CHUNKED])
def test_a_body_arrives_byte_by_byte(wire):
    """Single bytes give the body."""
    assert fed(*(bytes([byte]) for byte in wire)).body == b"hello"


def test_a_body_without_length_ends_with_the_connection():
    """Close-delimited bodies are taken and the connection is not kept."""
    answer = fed(CLOSED, end=True)
    assert (answer.done, answer.body, answer.reusable) == (True, b"hello", False)


@pytest.mark.parametrize(
    ("wire", "failure"),
    [
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno", "status 503"),
        (b"HTTP/1.1 302\r\nlocation: /x\r\n\r\n", "status 302"),
        (OK + b"content-length: 1001\r\n\r\n", "too large"),
        (OK + b"transfer-encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001, "too large"),
        (OK + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 70_000, "too large"),
        (OK + b"transfer-encoding: chunked\r\n\r\n0\r\nt: " + b"x" * 70_000, "too large"),
        (OK + b"\r\n" + b"x" * 1001, "too large"),
        (OK + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 16_385, "too large"),
        (OK + b"content-encoding: gzip\r\ncontent-length: 1\r\n\r\n", "encoded"),
        (OK + b"transfer-encoding: gzip, chunked\r\n\r\n", "encoded"),
        (OK + b"content-length: -1\r\n\r\n", "not HTTP"),
        (OK + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", "not HTTP"),
        (OK + b"transfer-encoding: chunked\r\n\r\n1\r\nab\r\n", "not HTTP"),
        (OK + b"transfer-encoding: chunked\r\n\r\n" + b"1" * 300, "not HTTP"),
        (b"SSH-2.0-x\r\n\r\n", "not HTTP"),
        (b"x" * 20_000, "not HTTP"),
    ],
)
def test_invalid_responses_have_a_reason(wire, failure):
    """Each way of not being a page has its reason, and ends the connection."""
    answer = fed(wire, cap_bytes=100_000 if len(wire) > 90_000 else 1000)
    assert (answer.done, answer.failure, answer.reusable) == (True, failure, False)


@pytest.mark.parametrize("wire", [b"", OK, COUNTED[:-1], CHUNKED[:-3]])
def test_a_connection_that_ends_early_is_a_failure(wire):
    """Half an answer is none."""
    assert fed(wire, end=True).failure == "closed"


@pytest.mark.parametrize(
    "wire",
    [
        COUNTED + b"x",
        CHUNKED + b"x",
        COUNTED.replace(b"1.1", b"1.0"),
        OK + b"connection: close\r\ncontent-length: 5\r\n\r\nhello",
    ],
)
def test_a_connection_with_an_uncertain_end_is_not_reused(wire):
    """Extra bytes, HTTP/1.0 and `close` give the page but not the connection."""
    answer = fed(wire)
    assert (answer.body, answer.reusable) == (b"hello", False)


@hypothesis.given(
    st.lists(
        st.sampled_from([OK, b"\r\n", b"0", b"5", b":", b"hello", CHUNKED[17:47]])
        | st.binary(max_size=8),
        max_size=30,
    )
)
@hypothesis.settings(deadline=None)
def test_any_bytes_end_in_a_state(pieces):
    """Arbitrary bytes never raise, and the body never exceeds the cap."""
    answer = fed(*pieces, cap_bytes=10, end=True)
    assert answer.done
    assert len(answer.body) <= 10
    assert not (answer.failure and answer.reusable)
