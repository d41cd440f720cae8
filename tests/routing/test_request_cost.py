"""What an answer cost."""

from __future__ import annotations

import pytest

from extproc.protocol.messages import (
    ContinueResponse,
    MessageKind,
    ProcessingRequest,
    WithRequestCost,
)
from extproc.routing import request_cost

REPLIES = (
    ContinueResponse(MessageKind.RESPONSE_BODY),
    ContinueResponse(MessageKind.RESPONSE_TRAILERS),
)
TAIL = (
    b'{"usage":{"prompt_tokens":100,"completion_tokens":20,'
    b'"prompt_tokens_details":{"cached_tokens":60}}}'
)


@pytest.mark.parametrize(
    ("weights", "cost"),
    [
        ({"prompt": 1, "completion": 1}, 120.0),
        ({"prompt": 1, "cached": -0.5, "completion": 4}, 150.0),
        ({"completion": 2}, 40.0),
        ({"cached": -1}, 0.0),
    ],
)
def test_tokens_times_weights(weights: dict[str, float], cost: float):
    """Each kind counts by its weight, and nobody is paid for asking."""
    assert request_cost.attach_request_cost(REPLIES, TAIL, weights) == (
        REPLIES[0],
        WithRequestCost(REPLIES[1], cost),
    )


def test_nothing_reported_nothing_told():
    """No usage, or none of the kinds that have a weight, or nothing to put it on."""
    assert request_cost.attach_request_cost(REPLIES, b"{}", {"prompt": 1}) == REPLIES
    assert (
        request_cost.attach_request_cost(REPLIES, b'{"usage":{"prompt_tokens":1}}', {"cached": 1})
        == REPLIES
    )
    assert request_cost.attach_request_cost((), TAIL, {"prompt": 1}) == ()


def test_the_last_message_of_a_body():
    """A body message that ends the stream, or trailers."""
    assert request_cost.is_last_response_message(
        ProcessingRequest(MessageKind.RESPONSE_BODY, end_of_stream=True)
    )
    assert request_cost.is_last_response_message(ProcessingRequest(MessageKind.RESPONSE_TRAILERS))
    assert not request_cost.is_last_response_message(ProcessingRequest(MessageKind.RESPONSE_BODY))
    assert not request_cost.is_last_response_message(
        ProcessingRequest(MessageKind.REQUEST_BODY, end_of_stream=True)
    )
