"""Exchange: state machine of one HTTP exchange, from the first message to the last.

`receive` takes a message and returns the immediate replies. If it leaves a request in `pending`,
the caller decides, and `apply_outcome` turns the outcome into replies. In between, the request may
be queued, and `DeferredResponses` has the replies that are withheld until then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, TypeAlias

import msgspec

from extproc.decision import Decision, DirectResponse, Rejection
from extproc.protocol import messages, model_name_restorer, response_handling, transitions
from extproc.protocol.body_buffer import BodyBuffer, BufferBudget
from extproc.protocol.headers import (
    SELECTION,
    edited_length,
    endpoint_scores,
    steer_engine,
    tokens,
)
from extproc.protocol.messages import (
    BODY_MODE_TRAITS,
    CHUNK_BYTES,
    DEFAULT_BODY_MODES,
    NO_HEADERS,
    BodyModes,
    ContinueResponse,
    Headers,
    ImmediateResponse,
    MessageKind,
    ProcessingRequest,
    ProcessingResponse,
    RouteResponse,
    StreamedBodyResponse,
    chunks,
    run_after,
)
from extproc.protocol.trace_context import TRACEPARENT
from extproc.protocol.transitions import Action, RequestState, ResponseState
from extproc.request import HttpRequest


class DeferredResponses(msgspec.Struct):
    """Replies that a request waits for.

    Attributes:
        headers: The reply to its headers.
        trailers: The reply to the trailers that ended its body.
        others: Replies to messages that arrived while it was queued.
        scores: Scores of the endpoints, sent with the decision.
    """

    headers: bool = False
    trailers: bool = False
    others: tuple[ProcessingResponse, ...] = ()
    scores: tuple[tuple[str, float], ...] = ()

    def release_buffered(
        self,
        destination: str,
        set_headers: Headers,
        *,
        remove_headers: tuple[str, ...],
        body_shown: bool,
        body: bytes | None = None,
    ) -> tuple[ProcessingResponse, ...]:
        """All withheld replies, if Envoy sends the body on itself.

        Args:
            body_shown: Whether a body message waits for its answer.
            body: The replacement of the body; None leaves it unchanged.
        """
        if self.headers:
            kind = _REQUEST_HEADERS
        elif body_shown:
            kind = _REQUEST_BODY
        else:
            return self._trailing_replies(destination)
        return (
            RouteResponse(kind, destination, set_headers, remove_headers, body, self.scores),
            *self._trailing_replies(""),
        )

    def release_streamed(
        self,
        buffer: BodyBuffer,
        destination: str,
        set_headers: Headers,
        *,
        remove_headers: tuple[str, ...],
    ) -> Iterable[ProcessingResponse]:
        """All withheld replies and the body, which is held until its chunks are written."""
        first: tuple[ProcessingResponse, ...] = ()
        if self.headers:
            first = (
                RouteResponse(
                    _REQUEST_HEADERS, destination, set_headers, remove_headers, None, self.scores
                ),
            )
            destination = ""
        body = buffer.joined()
        ends = not self.trailers
        if len(body) <= CHUNK_BYTES:
            buffer.release()
            return (
                *first,
                StreamedBodyResponse(_REQUEST_BODY, bytes(body), ends, destination),
                *self._trailing_replies(""),
            )
        pieces = chunks(_REQUEST_BODY, body, end_of_stream=ends, destination=destination)
        return run_after(itertools.chain(first, pieces, self._trailing_replies("")), buffer.release)

    def _trailing_replies(self, destination: str) -> tuple[ProcessingResponse, ...]:
        """The trailing replies; they name the destination if no other reply could."""
        if not self.trailers:
            return self.others
        return (ContinueResponse(_REQUEST_TRAILERS, destination), *self.others)


class ExchangeSettings(msgspec.Struct, frozen=True):
    """Settings that all exchanges of a server share.

    Attributes:
        response_marker: Put `x-went-into-resp-headers: true` on responses.
        conformance: Honor `test-epp-endpoint-selection` and report the served endpoint.
        feedback: Ask for the bodies of answers by `mode_override` where the request mode allows.
        restore_model: Put the client's name for its model back into answers, and ask for their
            bodies where a name was changed.
        scores: Tell the data plane what endpoints were compared by.
        request_id: Put the request id on responses, direct ones and refusals included.
    """

    max_body_bytes: int
    response_marker: bool = True
    conformance: bool = False
    feedback: bool = True
    restore_model: bool = True
    scores: bool = False
    request_id: bool = False


# An enum's members, where every message passes: a global costs less than the look-up in the enum.
_GATHERING, _DECIDING, _ROUTED = RequestState.GATHERING, RequestState.DECIDING, RequestState.ROUTED
_STARTED, _ENDED = ResponseState.STARTED, ResponseState.ENDED
_REQUEST_HEADERS, _REQUEST_BODY = MessageKind.REQUEST_HEADERS, MessageKind.REQUEST_BODY
_REQUEST_TRAILERS, _RESPONSE_BODY = MessageKind.REQUEST_TRAILERS, MessageKind.RESPONSE_BODY

_NO_REPLIES: tuple[ProcessingResponse, ...] = ()
#: The reply that lets a message pass, by kind.
_CONTINUE = tuple((ContinueResponse(kind),) for kind in MessageKind)


_Handler: TypeAlias = (
    "Callable[[Exchange, ProcessingRequest, BodyModes], Iterable[ProcessingResponse]]"
)


class Exchange(msgspec.Struct):
    """State machine of a stream. Not for use after `close`.

    Args:
        budget: Bytes all exchanges together may gather.

    Attributes:
        pending: The complete request while it waits for its outcome, else None.
        status: HTTP status of the response as text, see `response_status`; empty until it is known.
        tail: The end of the response body, and the beginning of a long one, where it is visible.
        edited: Whether the request body was given another model name.
        is_stream: Whether the response is a stream of events, or of messages of vLLM's gRPC API.
        is_response_streamed: Whether the response body is to be shown chunk by chunk.
        rejection: Why an immediate response was sent; None if none was.
    """

    _settings: ExchangeSettings
    _budget: BufferBudget
    watch_stream: bool = False
    request_state: RequestState = RequestState.IDLE
    response_state: ResponseState = ResponseState.IDLE
    pending: HttpRequest | None = None
    status: str = ""
    tail: response_handling.TailBuffer | None = None
    rejection: Rejection | None = None
    edited: bool = False
    is_stream: bool = False
    is_response_streamed: bool = False
    _modes: BodyModes | None = None
    _headers: Mapping[str, str] = NO_HEADERS
    _deferred: DeferredResponses = msgspec.field(default_factory=DeferredResponses)
    #: Headers plugins want on the answer.
    _response_headers: Headers = ()
    _subset: tuple[str, ...] | None = None
    _body_buffer: BodyBuffer | None = None
    #: What the engine was asked for, and what the client calls it.
    _model_names: tuple[str, str] = ("", "")
    _response_rewriter: response_handling.ModelNameResponseRewriter | None = None
    _has_selection: bool = False
    _has_grpc_stream: bool = False
    _is_websocket: bool = False
    _history: int = 0

    @property
    def request_id(self) -> str:
        """The `x-request-id` that the data plane sent; empty without one."""
        return self._headers.get("x-request-id", "")

    @property
    def headers(self) -> Mapping[str, str]:
        """Request headers, names in lower case; empty before they arrive."""
        return self._headers

    @property
    def arriving_bytes(self) -> int | None:
        """Bytes received of an incomplete request body; None if no body is arriving."""
        if self.request_state is not _GATHERING:
            return None
        return 0 if self._body_buffer is None else self._body_buffer.size_bytes

    @property
    def response_bytes(self) -> int | None:
        """Bytes of a complete response body; None where it is incomplete or was not shown."""
        return self.tail.total_bytes if self.tail and self.response_state is _ENDED else None

    def receive(self, event: ProcessingRequest) -> Iterable[ProcessingResponse]:
        """Take one event.

        Returns:
            What to answer now, in order. Consume it before the next call.

        Raises:
            ProtocolError: The event does not fit the phase.
        """
        kind = event.kind
        self._history = (self._history << transitions.KIND_BITS | kind) & transitions.HISTORY
        modes = self._modes
        if modes is None:
            modes = self._modes = event.modes or DEFAULT_BODY_MODES
        hints = event.hints
        if hints is not None and hints.subset is not None:
            self._take_subset(hints.subset)
        handler = _HANDLERS[self.request_state][self.response_state][kind]
        if handler is None:
            raise transitions.unexpected_message_error(
                self.request_state, self.response_state, self._history
            )
        return handler(self, event, modes)

    def apply_outcome(
        self, outcome: Decision | Rejection, *, request_id: str = "", traceparent: str = ""
    ) -> Iterable[ProcessingResponse]:
        """Answer the pending request.

        Args:
            request_id: Value for `x-request-id` if the client sent none; empty sets nothing.
            traceparent: Value for `traceparent` of a traced request; empty leaves it as it is.

        Raises:
            RuntimeError: Nothing is pending, which is a bug of the caller.
        """
        pending = self.pending
        if pending is None:
            raise RuntimeError(
                "nothing is pending; call apply_outcome once after receive set pending"
            )
        self.pending = None
        if isinstance(outcome, Rejection):
            return (self.reject(outcome),)
        self.request_state = _ROUTED
        self._has_grpc_stream = outcome.request.stream and outcome.request.api == "grpc_generate"
        self._response_headers = tuple(outcome.answer_headers)
        if self._settings.request_id:
            self._response_headers += (("x-request-id", request_id or self.request_id),)
        # Only the destination: the answers may wait for the peer, and a prompt must not with them.
        destination = ",".join([endpoint.host_port for endpoint in outcome.endpoints])
        set_headers, removed = steer_engine(outcome, self._headers)
        if request_id:
            set_headers += (("x-request-id", request_id),)
        if traceparent:
            set_headers += ((TRACEPARENT, traceparent),)
        buffer = self._body_buffer
        mode = BODY_MODE_TRAITS[(self._modes or DEFAULT_BODY_MODES).request]
        body = None
        if outcome.body_edit is not None and buffer is not None and mode.awaits_body:
            set_headers += edited_length(pending, outcome.body_edit)
            body = buffer.apply_edit(outcome.body_edit)
            self.edited = True
            if self._settings.restore_model:
                self._model_names = (outcome.model_rewrite, outcome.client_model)
        if self._settings.scores:
            self._deferred.scores = endpoint_scores(outcome)
        if buffer is not None and mode.is_returned:
            return self._deferred.release_streamed(
                buffer, destination, set_headers, remove_headers=removed
            )
        self.close()
        return self._deferred.release_buffered(
            destination,
            set_headers,
            remove_headers=removed,
            body_shown=buffer is not None,
            body=None if body is None else bytes(body),
        )

    def reject(self, rejection: Rejection) -> ImmediateResponse:
        """End the exchange with the immediate response of a rejection."""
        self.rejection = rejection
        return self._end(messages.immediate_response(rejection, self._headers))

    def answer(self, response: DirectResponse) -> ImmediateResponse:
        """End the exchange with a direct response."""
        headers = (("content-type", "application/json"),)
        return self._end(ImmediateResponse(response.status, headers, response.body))

    def _end(self, response: ImmediateResponse) -> ImmediateResponse:
        """End the exchange with an immediate response, which gets the request id if set."""
        self.request_state = RequestState.REFUSED
        self.pending = None
        self.close()
        if self._settings.request_id and self.request_id:
            headers = (*response.headers, ("x-request-id", self.request_id))
            return msgspec.structs.replace(response, headers=headers)
        return response

    def close(self) -> None:
        """Release the resources of the exchange; idempotent."""
        if self._body_buffer is not None:
            self._body_buffer.release()
            self._body_buffer = None

    def _take_subset(self, subset: tuple[str, ...]) -> None:
        # The hint may come on any message of the request; a later non-empty one wins. The
        # selection header beats them all, and Envoy repeats the hint on every message.
        if (subset or self._subset is None) and not self._has_selection:
            self._subset = subset

    def _close_by_trailers(
        self, _: ProcessingRequest, __: BodyModes
    ) -> Iterable[ProcessingResponse]:
        self._deferred.trailers = True
        self._complete_request()
        return _NO_REPLIES

    def _trailers(self, event: ProcessingRequest, _: BodyModes) -> Iterable[ProcessingResponse]:
        if event.kind is not MessageKind.RESPONSE_TRAILERS:
            return self._continue(event.kind)
        self._abandon_request()
        self.response_state = _ENDED
        restoration = self._response_rewriter
        held = () if restoration is None else restoration.trailers()
        return (*held, *self._continue(event.kind))

    def _late_body(
        self, event: ProcessingRequest, modes: BodyModes
    ) -> Iterable[ProcessingResponse]:
        is_request = event.kind is _REQUEST_BODY
        if is_request and self._is_websocket and self.request_state is _ROUTED:
            return chunks(_REQUEST_BODY, event.body, end_of_stream=event.end_of_stream)
        if not is_request:
            self._abandon_request()
        mode = modes.request if is_request else modes.response
        return _NO_REPLIES if BODY_MODE_TRAITS[mode].is_returned else self._continue(event.kind)

    def _ignore(self, _: ProcessingRequest, __: BodyModes) -> Iterable[ProcessingResponse]:
        return _NO_REPLIES

    def _continue(self, kind: MessageKind) -> Iterable[ProcessingResponse]:
        """Continue a message; for a held request, after the reply to its headers."""
        if self.request_state is _DECIDING and kind <= _REQUEST_TRAILERS:
            self._deferred.others += _CONTINUE[kind]
            return _NO_REPLIES
        return _CONTINUE[kind]

    def _open_request(
        self, event: ProcessingRequest, modes: BodyModes
    ) -> Iterable[ProcessingResponse]:
        headers = self._headers = event.headers
        if self._settings.conformance and SELECTION in headers:
            # Beats the metadata hint (docs/spec/protocol.md#gateway-conformance-tests).
            self._has_selection = True
            self._subset = tokens(headers[SELECTION])
        self._deferred.headers = True
        mode = BODY_MODE_TRAITS[modes.request]
        # The client of a WebSocket sends nothing before the answer to its headers.
        self._is_websocket = mode.is_returned and headers.get("upgrade", "").lower() == "websocket"
        if event.end_of_stream or not mode.awaits_body or self._is_websocket:
            self._complete_request()
            return _NO_REPLIES
        self.request_state = _GATHERING
        if not mode.is_buffered:
            return _NO_REPLIES
        self._deferred.headers = False
        return _CONTINUE[_REQUEST_HEADERS]

    def _buffer_body(
        self, event: ProcessingRequest, modes: BodyModes
    ) -> Iterable[ProcessingResponse]:
        buffer = self._body_buffer
        if buffer is None:
            buffer = self._body_buffer = BodyBuffer(self._budget, self._settings.max_body_bytes)
        if event.body:
            rejection = buffer.add(event.body)
            if rejection is not None:
                return (self.reject(rejection),)
        mode = BODY_MODE_TRAITS[modes.request]
        if not event.end_of_stream and mode.is_returned:
            self.request_state = _GATHERING
        else:
            # A buffered body is one message: without end_of_stream trailers follow, or it is cut.
            self._complete_request(truncated=mode.is_cut and not event.end_of_stream)
        return _NO_REPLIES

    def _complete_request(self, *, truncated: bool = False) -> None:
        self.request_state = _DECIDING
        body = self._body_buffer.joined() if self._body_buffer is not None else b""
        self.pending = HttpRequest(self._headers, body, truncated, self._subset)

    def _abandon_request(self) -> None:
        """Abandon the request, because its response began before the decision."""
        if self.request_state is _GATHERING or self.request_state is _DECIDING:
            self.request_state = RequestState.ABANDONED
            self.pending = None
            self.close()

    def _answer_response_headers(
        self, event: ProcessingRequest, modes: BodyModes
    ) -> Iterable[ProcessingResponse]:
        self._abandon_request()
        self.status = response_handling.response_status(event.headers)
        self.response_state = _ENDED if event.end_of_stream else _STARTED
        settings, restorer, mode = self._settings, None, None
        content_type = event.headers.get("content-type", "").lower()
        # A call of gRPC that failed at once has its status in the headers, and no message.
        is_failed_call = event.end_of_stream or "grpc-status" in event.headers
        has_messages = self._has_grpc_stream and not is_failed_call
        self.is_stream = has_messages or "text/event-stream" in content_type
        if self._model_names[1] and not event.end_of_stream:
            restorer = model_name_restorer.for_response(event.headers, *self._model_names)
        if not event.end_of_stream:
            mode = response_handling.response_body_mode_override(
                modes,
                event.headers,
                is_stream=self.is_stream,
                is_read=settings.feedback or restorer is not None,
                watch_stream=self.watch_stream or restorer is not None,
            )
        drops_length = False
        shown = BODY_MODE_TRAITS[mode or modes.response]
        self.is_response_streamed = shown.is_streamed
        if restorer is not None:
            # A buffered body carries its length itself.
            drops_length = shown.is_streamed
            length = event.headers.get("content-length", "")
            self._response_rewriter = response_handling.ModelNameResponseRewriter(
                restorer, shown, length=length
            )
        return response_handling.response_headers_reply(
            event,
            mode,
            marker=settings.response_marker,
            conformance=settings.conformance,
            headers=self._response_headers,
            drops_length=drops_length,
        )

    def _pass_response_body(
        self, event: ProcessingRequest, modes: BodyModes
    ) -> Iterable[ProcessingResponse]:
        self._abandon_request()
        self.response_state = _ENDED if event.end_of_stream else _STARTED
        if self.tail is None:
            self.tail = response_handling.TailBuffer()
        self.tail.add(bytes(event.body))
        if self._response_rewriter is not None:
            return self._response_rewriter.body(event)
        if not BODY_MODE_TRAITS[modes.response].is_returned:
            return _CONTINUE[_RESPONSE_BODY]
        return chunks(_RESPONSE_BODY, event.body, end_of_stream=event.end_of_stream)

    #: What takes an event, by place in the table of transitions.
    handlers: ClassVar[Sequence[Sequence[Sequence[_Handler | None]]]] = (
        transitions.build_handler_table(
            {
                Action.OPEN: _open_request,
                Action.GATHER: _buffer_body,
                Action.CLOSE: _close_by_trailers,
                Action.HEADERS: _answer_response_headers,
                Action.BODY: _pass_response_body,
                Action.TRAILERS: _trailers,
                Action.LATE: _late_body,
                Action.IGNORE: _ignore,
            }
        )
    )


_HANDLERS = Exchange.handlers
