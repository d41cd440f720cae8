"""The table: what each event does in each phase.

Two rules. A phase and a kind that are not in the table do not fit, and the peer broke the
protocol. A stream may start in any phase (header modes can be SKIP), so IDLE takes every kind.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TypeVar

from extproc.errors import ProtocolError
from extproc.protocol.messages import Kind

#: The last six kinds of an exchange are kept in one integer, for the error message.
KIND_BITS = 4
HISTORY = (1 << 6 * KIND_BITS) - 1


class Asked(enum.IntEnum):
    """How far the request is."""

    IDLE = 0
    """Nothing was said of the request."""
    GATHERING = 1
    """Headers are here, body messages are awaited."""
    DECIDING = 2
    """The request is complete and waits for its outcome."""
    ROUTED = 3
    """The request was answered with a pick."""
    ABANDONED = 4
    """The response began before the request was complete; it is never answered."""
    REFUSED = 5
    """An immediate response was sent; nothing else ever is."""


class Told(enum.IntEnum):
    """How far the response is."""

    IDLE = 0
    STARTED = 1
    ENDED = 2


class Act(enum.IntEnum):
    """What to do with an event."""

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
    """Say nothing."""


_REQUEST: Mapping[tuple[Asked, Kind], Act] = {
    (Asked.IDLE, Kind.REQUEST_HEADERS): Act.OPEN,
    (Asked.IDLE, Kind.REQUEST_BODY): Act.GATHER,
    (Asked.IDLE, Kind.REQUEST_TRAILERS): Act.CLOSE,
    (Asked.GATHERING, Kind.REQUEST_BODY): Act.GATHER,
    (Asked.GATHERING, Kind.REQUEST_TRAILERS): Act.CLOSE,
    (Asked.DECIDING, Kind.REQUEST_BODY): Act.LATE,
    (Asked.DECIDING, Kind.REQUEST_TRAILERS): Act.TRAILERS,
    (Asked.ROUTED, Kind.REQUEST_BODY): Act.LATE,
    (Asked.ROUTED, Kind.REQUEST_TRAILERS): Act.TRAILERS,
    (Asked.ABANDONED, Kind.REQUEST_BODY): Act.LATE,
    (Asked.ABANDONED, Kind.REQUEST_TRAILERS): Act.TRAILERS,
    **{(Asked.REFUSED, kind): Act.IGNORE for kind in Kind},
    **{(phase, Kind.UNKNOWN): Act.IGNORE for phase in Asked},
}

_RESPONSE: Mapping[tuple[Told, Kind], Act] = {
    (Told.IDLE, Kind.RESPONSE_HEADERS): Act.HEADERS,
    (Told.IDLE, Kind.RESPONSE_BODY): Act.BODY,
    (Told.IDLE, Kind.RESPONSE_TRAILERS): Act.TRAILERS,
    (Told.STARTED, Kind.RESPONSE_BODY): Act.BODY,
    (Told.STARTED, Kind.RESPONSE_TRAILERS): Act.TRAILERS,
    (Told.ENDED, Kind.RESPONSE_BODY): Act.LATE,
    (Told.ENDED, Kind.RESPONSE_TRAILERS): Act.TRAILERS,
}


Taker = TypeVar("Taker")
Places = Sequence[Sequence[Sequence[Taker | None]]]


def _act(asked: Asked, told: Told, kind: Kind) -> Act | None:
    act = _REQUEST.get((asked, kind))
    return _RESPONSE.get((told, kind)) if act is None else act


def places(takers: Mapping[Act, Taker]) -> Places[Taker]:
    """The table by position, which costs a message less than look-ups of pairs.

    Args:
        takers: What stands for each act.

    Returns:
        `places[asked][told][kind]`; None where the event does not fit.
    """
    acts = [[[_act(asked, told, kind) for kind in Kind] for told in Told] for asked in Asked]
    return tuple(
        tuple(tuple(None if act is None else takers[act] for act in row) for row in rows)
        for rows in acts
    )


def misfit(asked: Asked, told: Told, history: int) -> ProtocolError:
    """The error for an event that is not in the table.

    Args:
        asked: Phase of the request.
        told: Phase of the response.
        history: The last kinds, `KIND_BITS` bits each; the lowest is the one that does not fit.
    """
    kinds = []
    while history:
        kinds.append(Kind(history & (1 << KIND_BITS) - 1).name)
        history >>= KIND_BITS
    return ProtocolError(
        wanted=f"an event that fits request {asked.name}, response {told.name}",
        found=f"{kinds[0]} (last events: {', '.join(reversed(kinds))})",
        fix="check the processing modes of the data plane",
    )
