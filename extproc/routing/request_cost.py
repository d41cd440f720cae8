"""Request cost: token cost of a response, as dynamic metadata on the last message.

Source: docs/spec/protocol.md#header-names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from extproc.parsing import usage
from extproc.protocol.messages import (
    MessageKind,
    ProcessingRequest,
    ProcessingResponse,
    WithRequestCost,
)


def is_last_response_message(event: ProcessingRequest) -> bool:
    """True if a message is the last of a response body."""
    kind = event.kind
    return (
        kind is MessageKind.RESPONSE_BODY and event.end_of_stream
    ) or kind is MessageKind.RESPONSE_TRAILERS


def attach_request_cost(
    replies: Iterable[ProcessingResponse], tail: bytes, weights: Mapping[usage.UsageKind, float]
) -> Iterable[ProcessingResponse]:
    """Attach the token cost of a response to the last reply.

    `cost = max(0, sum of weight * tokens)` over the kinds of tokens the answer reports.

    Args:
        replies: To that message.
        tail: The end of the answer's body.
        weights: By kind of token, as `usage.read` has them.

    Returns:
        The same where the answer reports nothing that has a weight.
    """
    used = usage.read(tail)
    if used.keys().isdisjoint(weights):
        return replies
    cost = max(0.0, sum(weight * used.get(kind, 0) for kind, weight in weights.items()))
    messages = tuple(replies)
    return (*messages[:-1], WithRequestCost(messages[-1], cost)) if messages else messages
