"""When an answer is shown, so that its usage can be read."""

from __future__ import annotations

import pytest

from extproc.protocol import response_handling
from extproc.protocol.messages import BodyMode, BodyModes

NONE, STREAMED, BUFFERED = BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED
DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
SHORT = {"content-type": "application/json", "content-length": "100"}
LONG = {"content-length": str(response_handling.MAX_RESPONSE_BYTES + 1)}


@pytest.mark.parametrize(
    ("modes", "headers", "watch_stream", "mode"),
    [
        ((BUFFERED, NONE), SHORT, False, BUFFERED),
        ((BUFFERED, NONE), SHORT, True, BUFFERED),
        ((BUFFERED, NONE), LONG, False, None),
        ((BUFFERED, NONE), LONG, True, STREAMED),
        ((BUFFERED, NONE), {"content-length": "1e3"}, False, None),
        ((BUFFERED, NONE), {}, False, None),
        ((BUFFERED, NONE), {}, True, STREAMED),
        ((BUFFERED, NONE), EVENTS, True, STREAMED),
        ((BUFFERED, NONE), EVENTS, False, None),
        ((BUFFERED, NONE), {**EVENTS, "content-length": "100"}, False, None),
        ((BUFFERED, NONE), {**EVENTS, "content-length": "100"}, True, STREAMED),
        ((BUFFERED, STREAMED), SHORT, True, None),
        ((STREAMED, NONE), SHORT, True, None),
        ((DUPLEX, NONE), SHORT, True, None),
        ((NONE, NONE), SHORT, True, None),
    ],
)
def test_feedback_mode_buffers_short_answers_and_never_events(modes, headers, watch_stream, mode):
    """A whole answer is shown where its length is declared; a stream only where it is watched."""
    assert (
        response_handling.response_body_mode_override(
            BodyModes(*modes), headers, watch_stream=watch_stream
        )
        is mode
    )
