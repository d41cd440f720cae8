from __future__ import annotations

import pytest

from extproc.protocol.body_buffer import BufferBudget
from extproc.protocol.exchange import ExchangeSettings
from extproc.protocol.messages import DEFAULT_BODY_MODES
from tests.support import ext_proc_script, peer


@pytest.mark.parametrize("mode", ["DUPLEX", "BUFFERED"])
def test_124_bodies_over_the_limit(mode: str):
    """A body over the limit is refused with 413 at the piece that crosses it."""
    queued = ext_proc_script.Talk(modes=(mode, "NONE"), settings=ExchangeSettings(100))
    queued.hear(ext_proc_script.request_headers())
    (reply,) = queued.hear(ext_proc_script.request_body(b"x" * 101))
    assert reply.status == 413
    assert "100 bytes" in reply.error["error"]["message"]
    assert queued.budget.held_bytes == 0


def test_124_a_body_of_exactly_the_limit_passes():
    """The limit itself is allowed, also in pieces."""
    body = b"x" * 100
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.request_body(body[:99]),
            ext_proc_script.request_body(body[99:], ends=True),
            ext_proc_script.route(),
            ext_proc_script.hand_on(body, ends=True),
        ],
        settings=ExchangeSettings(100),
    )


def test_124_all_bodies_together_are_bounded():
    """A piece beyond a quarter of what others leave is refused with 429; small bodies get in."""
    budget = BufferBudget(1_000_000)
    first, second, third = (ext_proc_script.Talk(budget=budget) for _ in range(3))
    for queued in (first, second, third):
        queued.hear(ext_proc_script.request_headers())
    assert first.hear(ext_proc_script.request_body(b"x" * 200_000)) == []
    (reply,) = second.hear(ext_proc_script.request_body(b"x" * 200_001))
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    assert budget.held_bytes == 200_000
    assert (
        third.hear(ext_proc_script.request_body(b"x" * 200_000, ends=True))[0]
        == ext_proc_script.route()
    )
    assert (
        first.hear(ext_proc_script.request_body(b"x" * 50_000, ends=True))[0]
        == ext_proc_script.route()
    )
    assert budget.held_bytes == 0


@pytest.mark.parametrize("mode", ["BUFFERED", "STREAMED", "BUFFERED_PARTIAL"])
def test_124_a_body_that_envoy_buffers_is_released_once_decided(mode: str):
    """If Envoy sends the body on, none of its bytes count while the answer runs."""
    budget = BufferBudget(1_000_000)
    queued = ext_proc_script.Talk(modes=(mode, "NONE"), budget=budget)
    queued.hear(ext_proc_script.request_headers())
    queued.hear(ext_proc_script.request_body(b"x" * 1000, ends=True))
    assert budget.held_bytes == 0


@pytest.mark.parametrize(
    "modes", [ext_proc_script.DUPLEX, ("BUFFERED", "NONE"), ("STREAMED", "NONE")]
)
def test_125_unknown_messages_are_ignored(modes: tuple[str, str]):
    """A message without a known part gets no answer and disturbs nothing."""
    queued = ext_proc_script.Talk(modes=modes)
    replies = []
    for message in (
        ext_proc_script.request_headers(),
        ext_proc_script.request_body(b"x", ends=True),
    ):
        for unknown in (b"", b"\xa2\x06\x02hi", b"\x50\x01"):
            event = ext_proc_script.codec.decode(unknown)
            assert list(queued.exchange.receive(event)) == []
        replies += queued.hear(message)
    assert len(replies) == 2


def test_125_unknown_fields_are_ignored():
    """Fields of newer protocol versions inside a known message are skipped."""
    known = ext_proc_script.request_headers(ends=True).encode(ext_proc_script.DUPLEX)
    event = ext_proc_script.codec.decode(known + b"\xa2\x06\x02hi\xa8\x06\x01")
    assert event == ext_proc_script.codec.decode(known)


def test_125_unknown_messages_first_declare_modes_too():
    """Body modes are taken from the first message even if its part is unknown."""
    unknown = peer.ext_proc.ProcessingRequest(
        protocol_config=peer.configuration("BUFFERED", "NONE")
    )
    queued = ext_proc_script.Talk(modes=None)
    assert list(queued.exchange.receive(ext_proc_script.codec.decode(bytes(unknown)))) == []
    assert queued.hear(ext_proc_script.request_headers()) == [
        ext_proc_script.go_on("request_headers")
    ]


def test_125_a_newer_body_mode_streams():
    """A body mode this version does not know is answered like full duplex."""
    event = ext_proc_script.codec.decode(b"\x12\x00\x5a\x02\x08\x63")
    assert event.modes is not None
    assert event.modes.request is DEFAULT_BODY_MODES.request
