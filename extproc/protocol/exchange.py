"""One HTTP exchange, from the first event to the last.

Two doors: `receive` takes an event and says what to answer at once; when it leaves a request in
`pending`, somebody decides, and `resolve` turns the outcome into answers. Between the doors a
request may be held.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

from extproc.decision import Outcome, Rejection
from extproc.errors import ProtocolError
from extproc.protocol import refusal
from extproc.protocol.events import NO_HEADERS, UNDECLARED, BodyMode, Event, Kind, Modes
from extproc.protocol.feedback import Tail, feedback_mode
from extproc.protocol.gathering import Budget, Gathering
from extproc.protocol.headers import (
    CONTROL_HEADERS,
    RESPONSE_MARKER,
    SELECTION,
    SERVED_HEADER,
)
from extproc.protocol.replies import (
    CHUNK_BYTES,
    Answered,
    Chunk,
    Continue,
    Headers,
    Refuse,
    Reply,
    Route,
    chunks,
)
from extproc.protocol.settings import ExchangeSettings
from extproc.protocol.transitions import REQUEST, RESPONSE, Asked, Told
from extproc.request import RawRequest

#: Modes are ordered: up to STREAMED headers go on before the body is seen, then the buffered
#: ones, then those that stream both ways.
_STREAMED = BodyMode.STREAMED
_DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
#: The last six kinds are kept in one integer, for the error message.
_KIND_BITS = 4
_HISTORY = (1 << 6 * _KIND_BITS) - 1
_REFUSED = Asked.REFUSED
_GATHERING = Asked.GATHERING
_DECIDING = Asked.DECIDING
_NOTHING: tuple[Reply, ...] = ()


class Exchange:
    """The state machine of one stream. Not for use after `close`.

    Args:
        settings: Shared by all exchanges of a server.
        budget: Bytes all exchanges together may gather.
        watch_stream: Whether a streamed answer of this exchange is sampled for its usage.

    Attributes:
        pending: The complete request while it waits for its outcome, else None.
        status: HTTP status of the response as text; empty until it is known.
        served: In conformance mode, what to report as the endpoint that served.
        tail: The end of the response body, where it is visible.
        rejection: Why an immediate response was sent; None if none was.
    """

    __slots__ = (
        "_budget",
        "_by_trailers",
        "_content_type",
        "_gathering",
        "_headers",
        "_headers_due",
        "_history",
        "_modes",
        "_owed",
        "_removed",
        "_selected",
        "_settings",
        "_subset",
        "_watch_stream",
        "asked",
        "pending",
        "rejection",
        "served",
        "status",
        "tail",
        "told",
    )

    def __init__(
        self, settings: ExchangeSettings, budget: Budget, *, watch_stream: bool = False
    ) -> None:
        self._settings = settings
        self._budget = budget
        self._watch_stream = watch_stream
        self._modes: Modes | None = None
        self._headers = NO_HEADERS
        self._headers_due = False
        self._removed: tuple[str, ...] = ()
        self._subset: tuple[str, ...] | None = None
        self._gathering: Gathering | None = None
        self._by_trailers = False
        self._owed: list[Kind] = []
        self._selected = False
        self._content_type = ""
        self._history = 0
        self.asked = Asked.IDLE
        self.told = Told.IDLE
        self.pending: RawRequest | None = None
        self.status = ""
        self.served = ""
        self.tail: Tail | None = None
        self.rejection: Rejection | None = None

    @property
    def refused(self) -> bool:
        """Whether an immediate response was sent; the stream ends with gRPC OK after it."""
        return self.asked is Asked.REFUSED

    def receive(self, event: Event) -> Iterable[Reply]:
        """Take one event.

        Returns:
            What to answer now, in order. Consume it before the next call.

        Raises:
            ProtocolError: The event does not fit the phase.
        """
        kind = event.kind
        self._history = (self._history << _KIND_BITS | kind) & _HISTORY
        modes = self._modes
        if modes is None:
            modes = self._modes = event.modes or UNDECLARED
        if event.hints is not None:
            self._take_hints(event)
        # One row per phase; a kind of the other direction is looked up in that one's row.
        act = REQUEST[self.asked][kind]
        if act is None:
            if self.asked == _REFUSED:
                return _NOTHING
            act = RESPONSE[self.told][kind]
            if act is None:
                raise self._misfit(kind)
        return self._acts[act](self, event, modes)

    def resolve(self, outcome: Outcome, *, request_id: str = "") -> Iterable[Reply]:
        """Answer the pending request.

        Args:
            outcome: What was decided.
            request_id: Value for `x-request-id` if the client sent none; empty sets nothing.

        Raises:
            RuntimeError: Nothing is pending, which is a bug of the caller.
        """
        if self.pending is None:
            raise RuntimeError("nothing is pending; call resolve once after receive set pending")
        self.pending = None
        if isinstance(outcome, Rejection):
            return (self.refuse(outcome),)
        self.asked = Asked.ROUTED
        set_headers: Headers = (("x-request-id", request_id),) if request_id else ()
        # Only the destination: the answers may wait for the peer, and a prompt must not with them.
        destination = ",".join([endpoint.address for endpoint in outcome.endpoints])
        return self._route(destination, set_headers)

    def refuse(self, rejection: Rejection) -> Refuse:
        """End the exchange with an immediate response."""
        self.asked = Asked.REFUSED
        self.pending = None
        self.rejection = rejection
        self.close()
        return refusal.refuse(rejection, grpc=self._content_type.startswith("application/grpc"))

    def close(self) -> None:
        """Give back what the exchange holds; further calls do nothing."""
        if self._gathering is not None:
            self._gathering.release()

    def _take_hints(self, event: Event) -> None:
        hints = event.hints
        if hints is None:
            return
        # The hint may come on any message of the request; a later non-empty one wins. The
        # selection header beats them all, and Envoy repeats the hint on every message.
        told = hints.subset is not None and (hints.subset or self._subset is None)
        if told and not self._selected:
            self._subset = hints.subset
        if event.kind is Kind.RESPONSE_HEADERS and self._settings.conformance:
            self.served = hints.served or (
                "fail: missing destination endpoint served metadata"
                if hints.balancer
                else "fail: missing envoy lb metadata"
            )

    def _close_by_trailers(self, _: Event, __: Modes) -> Iterable[Reply]:
        self._by_trailers = True
        self._ask()
        return _NOTHING

    def _trailers(self, event: Event, _: Modes) -> Iterable[Reply]:
        if event.kind is Kind.RESPONSE_TRAILERS:
            self._abandon()
            self.told = Told.ENDED
        return self._go_on(event.kind)

    def _late(self, event: Event, modes: Modes) -> Iterable[Reply]:
        mode = modes.request if event.kind is Kind.REQUEST_BODY else modes.response
        return _NOTHING if mode >= _DUPLEX else self._go_on(event.kind)

    def _ignore(self, _: Event, __: Modes) -> Iterable[Reply]:
        return _NOTHING

    def _go_on(self, kind: Kind) -> Iterable[Reply]:
        """Let a message pass; one of a held request after the answer to its headers."""
        if self.asked is Asked.DECIDING and kind <= Kind.REQUEST_TRAILERS:
            self._owed.append(kind)
            return _NOTHING
        return (Continue(kind),)

    def _open(self, event: Event, modes: Modes) -> Iterable[Reply]:
        headers = event.headers
        self._headers = headers
        self._content_type = headers.get("content-type", "")
        if not CONTROL_HEADERS.isdisjoint(headers):
            self._removed = tuple(name for name in CONTROL_HEADERS if name in headers)
        if self._settings.conformance and SELECTION in headers:
            # Beats the metadata hint (EPP protocol report 5).
            self._selected = True
            chosen = headers[SELECTION].split(",")
            self._subset = tuple(token.strip() for token in chosen if token.strip())
        self._headers_due = True
        if event.end_of_stream or modes.request <= _STREAMED:
            self._ask()
            return _NOTHING
        self.asked = Asked.GATHERING
        if _STREAMED < modes.request < _DUPLEX:
            # Envoy sends the buffered body only after the headers were answered.
            self._headers_due = False
            return (Continue(Kind.REQUEST_HEADERS),)
        return _NOTHING

    def _gather(self, event: Event, modes: Modes) -> Iterable[Reply]:
        if self._gathering is None:
            self._gathering = Gathering(self._budget, self._settings.max_body_bytes)
        refusal_ = self._gathering.add(event.body)
        if refusal_ is not None:
            return (self.refuse(refusal_),)
        self.asked = Asked.GATHERING
        # A buffered body is one message; without end_of_stream either trailers follow or, in
        # BUFFERED_PARTIAL, it was too large to be shown whole.
        if event.end_of_stream:
            self._ask()
        elif _STREAMED < modes.request < _DUPLEX:
            self._ask(truncated=modes.request is BodyMode.BUFFERED_PARTIAL)
        elif modes.request <= _STREAMED:
            self._ask(truncated=True)
        return _NOTHING

    def _ask(self, *, truncated: bool = False) -> None:
        self.asked = Asked.DECIDING
        body = self._gathering.joined() if self._gathering is not None else b""
        self.pending = RawRequest(self._headers, body, truncated, self._subset)

    def _route(self, destination: str, set_headers: Headers) -> Iterable[Reply]:
        # Stays in its place until it is handed on: `close` gives it back if the peer leaves first.
        gathering = self._gathering
        streamed = self._modes is not None and self._modes.request >= _DUPLEX
        replies: list[Reply] = []
        unsaid = ""
        if self._headers_due:
            replies.append(Route(Kind.REQUEST_HEADERS, destination, set_headers, self._removed))
        elif gathering is not None and not streamed:
            replies.append(Route(Kind.REQUEST_BODY, destination, set_headers, self._removed))
        else:
            unsaid = destination
        last: list[Reply] = []
        if self._by_trailers:
            handed_on = gathering is not None and streamed
            last.append(Continue(Kind.REQUEST_TRAILERS, "" if handed_on else unsaid))
        last += [Continue(kind) for kind in self._owed]
        if gathering is None or not streamed:
            self.close()
            return replies + last
        return self._hand_on(gathering, replies, last, unsaid)

    def _hand_on(
        self, gathering: Gathering, first: list[Reply], last: list[Reply], unsaid: str
    ) -> Iterable[Reply]:
        """The body behind the first replies; it is held until its pieces are written."""
        body = gathering.joined()
        ends = not self._by_trailers
        if len(body) <= CHUNK_BYTES:
            self.close()
            return [*first, Chunk(Kind.REQUEST_BODY, body, ends, unsaid), *last]
        pieces = chunks(Kind.REQUEST_BODY, body, end_of_stream=ends, destination=unsaid)
        return _then(itertools.chain(first, pieces, last), gathering.release)

    def _abandon(self) -> None:
        """The response began first; the request is never answered (EPP protocol report, S12)."""
        if self.asked == _GATHERING or self.asked == _DECIDING:  # noqa: PLR1714  per answer
            self.asked = Asked.ABANDONED
            self.pending = None
            self.close()

    def _answer_headers(self, event: Event, modes: Modes) -> Iterable[Reply]:
        self._abandon()
        headers = event.headers
        self.status = headers.get(":status", "")
        self.told = Told.ENDED if event.end_of_stream else Told.STARTED
        marks: Headers = (RESPONSE_MARKER,) if self._settings.response_marker else ()
        if self._settings.conformance:
            served = self.served or "fail: missing envoy lb metadata"
            marks = (*marks, (SERVED_HEADER, served))
        override = None
        if self._settings.feedback and not event.end_of_stream:
            override = feedback_mode(modes, headers, watch_stream=self._watch_stream)
        return (Answered(marks, override),)

    def _pass_response(self, event: Event, modes: Modes) -> Iterable[Reply]:
        self._abandon()
        self.told = Told.ENDED if event.end_of_stream else Told.STARTED
        if self.tail is None:
            self.tail = Tail()
        self.tail.add(event.body)
        if modes.response < _DUPLEX:
            return (Continue(Kind.RESPONSE_BODY),)
        return chunks(Kind.RESPONSE_BODY, event.body, end_of_stream=event.end_of_stream)

    def _misfit(self, kind: Kind) -> ProtocolError:
        past = self._history
        kinds = []
        while past:
            kinds.append(Kind(past & (1 << _KIND_BITS) - 1).name)
            past >>= _KIND_BITS
        seen = ", ".join(reversed(kinds))
        return ProtocolError(
            wanted=f"an event that fits request {self.asked.name}, response {self.told.name}",
            found=f"{kind.name} (last events: {seen})",
            fix="check the processing modes of the data plane",
        )

    #: What to do, in the order of `Act`.
    _acts: ClassVar[Sequence[Callable[[Exchange, Event, Modes], Iterable[Reply]]]] = (
        _open,
        _gather,
        _close_by_trailers,
        _answer_headers,
        _pass_response,
        _trailers,
        _late,
        _ignore,
    )


def _then(replies: Iterable[Reply], release: Callable[[], None]) -> Iterator[Reply]:
    try:
        yield from replies
    finally:
        release()
