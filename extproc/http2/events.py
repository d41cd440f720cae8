"""Events of a connection, in the order in which the peer caused them."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from extproc.http2.frames import ErrorCode


class CallStarted(msgspec.Struct, frozen=True, gc=False):
    """The peer calls a method.

    Attributes:
        stream_id: Names the call until it ends.
        path: `/package.Service/Method`.
        timeout_s: Seconds that the client waits for the end; None for ever.
        traceparent: Trace context of the client; empty without one.
    """

    stream_id: int
    path: str
    timeout_s: float | None
    traceparent: str = ""


class MessageReceived(msgspec.Struct, frozen=True, gc=False):
    """A message of a call is complete."""

    stream_id: int
    message: bytes


class CallHalfClosed(msgspec.Struct, frozen=True, gc=False):
    """The peer sends no further message of a call."""

    stream_id: int


class CallTerminated(msgspec.Struct, frozen=True, gc=False):
    """A call ended without the server having ended it: canceled, or it broke a rule or a limit."""

    stream_id: int


class ConnectionTerminated(msgspec.Struct, frozen=True, gc=False):
    """The connection ends because the peer broke a rule or a limit; no event follows.

    Attributes:
        code: Sent to the peer.
        detail: Violation in words.
    """

    code: ErrorCode
    detail: str


Http2Event: TypeAlias = (
    CallStarted | MessageReceived | CallHalfClosed | CallTerminated | ConnectionTerminated
)
