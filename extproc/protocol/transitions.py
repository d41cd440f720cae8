"""Transition table: the action for each message in each state.

Two rules. A phase and a kind that are not in the table do not fit, and the peer broke the
protocol. A stream may start in any phase (header modes can be SKIP), so IDLE takes every kind.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from extproc.errors import ProtocolError
from extproc.protocol.messages import MessageKind

#: The last six kinds of an exchange are kept in one integer, for the error message.
KIND_BITS = 4
HISTORY = (1 << 6 * KIND_BITS) - 1


class RequestState(enum.IntEnum):
    """State of the request."""

    IDLE = 0
    """Nothing of the request was received."""
    GATHERING = 1
    """Headers are here, body messages are awaited."""
    DECIDING = 2
    """The request is complete and waits for its outcome."""
    ROUTED = 3
    """The request was answered with a decision."""
    ABANDONED = 4
    """The response began before the request was complete; it is never answered."""
    REFUSED = 5
    """An immediate response was sent; nothing else ever is."""


class ResponseState(enum.IntEnum):
    """State of the response."""

    IDLE = 0
    STARTED = 1
    ENDED = 2


class Action(enum.IntEnum):
    """Action for a message."""

    OPEN = 0
    """Take the request headers; the request is complete if no body will be shown."""
    GATHER = 1
    """Take body bytes; the request is complete at their end."""
    CLOSE = 2
    """Trailers end the request body."""
    HEADERS = 3
    """Answer response headers."""
    BODY = 4
    """Pass on response body."""
    TRAILERS = 5
    """Answer trailers."""
    LATE = 6
    """Body after its end or after the answer: the second end_of_stream of Envoy 1.35 and later in
    FULL_DUPLEX_STREAMED is ignored, the one-to-one modes are answered."""
    IGNORE = 7
    """Reply nothing."""


_REQUEST: Mapping[tuple[RequestState, MessageKind], Action] = {
    (RequestState.IDLE, MessageKind.REQUEST_HEADERS): Action.OPEN,
    (RequestState.IDLE, MessageKind.REQUEST_BODY): Action.GATHER,
    (RequestState.IDLE, MessageKind.REQUEST_TRAILERS): Action.CLOSE,
    (RequestState.GATHERING, MessageKind.REQUEST_BODY): Action.GATHER,
    (RequestState.GATHERING, MessageKind.REQUEST_TRAILERS): Action.CLOSE,
    (RequestState.DECIDING, MessageKind.REQUEST_BODY): Action.LATE,
    (RequestState.DECIDING, MessageKind.REQUEST_TRAILERS): Action.TRAILERS,
    (RequestState.ROUTED, MessageKind.REQUEST_BODY): Action.LATE,
    (RequestState.ROUTED, MessageKind.REQUEST_TRAILERS): Action.TRAILERS,
    (RequestState.ABANDONED, MessageKind.REQUEST_BODY): Action.LATE,
    (RequestState.ABANDONED, MessageKind.REQUEST_TRAILERS): Action.TRAILERS,
    **{(RequestState.REFUSED, kind): Action.IGNORE for kind in MessageKind},
    **{(phase, MessageKind.UNKNOWN): Action.IGNORE for phase in RequestState},
}

_RESPONSE: Mapping[tuple[ResponseState, MessageKind], Action] = {
    (ResponseState.IDLE, MessageKind.RESPONSE_HEADERS): Action.HEADERS,
    (ResponseState.IDLE, MessageKind.RESPONSE_BODY): Action.BODY,
    (ResponseState.IDLE, MessageKind.RESPONSE_TRAILERS): Action.TRAILERS,
    (ResponseState.STARTED, MessageKind.RESPONSE_BODY): Action.BODY,
    (ResponseState.STARTED, MessageKind.RESPONSE_TRAILERS): Action.TRAILERS,
    (ResponseState.ENDED, MessageKind.RESPONSE_BODY): Action.LATE,
    (ResponseState.ENDED, MessageKind.RESPONSE_TRAILERS): Action.TRAILERS,
}


def build_handler_table(handlers: Mapping[Action | None, Any]) -> Sequence[Sequence[Sequence[Any]]]:
    """Build the table by index, which is faster than a lookup by pair.

    Returns:
        `places[request_state][response_state][kind]`; None where the message does not fit.
    """
    return tuple(
        tuple(
            tuple(
                handlers.get(_REQUEST.get((request, kind), _RESPONSE.get((response, kind))))
                for kind in MessageKind
            )
            for response in ResponseState
        )
        for request in RequestState
    )


def unexpected_message_error(
    request_state: RequestState, response_state: ResponseState, history: int
) -> ProtocolError:
    """Build the error for a message without a transition.

    Args:
        history: The last kinds, `KIND_BITS` bits each; the lowest is the one that does not fit.
    """
    kinds = []
    while history:
        kinds.append(MessageKind(history & (1 << KIND_BITS) - 1).name)
        history >>= KIND_BITS
    return ProtocolError(
        wanted=f"an event that fits request {request_state.name}, response {response_state.name}",
        got=f"{kinds[0]} (last events: {', '.join(reversed(kinds))})",
        fix="check the processing modes of the data plane",
    )
