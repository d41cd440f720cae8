"""Scripts of one ext_proc stream: what Envoy says, what we say, and the difference.

A script is a list of `Message` (built by the functions under "Envoy says") and `DecodedReply` (built by
those under "we say"). `play` feeds the messages through the codec and the exchange, without gRPC,
and compares the whole conversation.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from extproc.decision import Decision, Outcome
from extproc.endpoint import Endpoint
from extproc.protocol.body_buffer import BufferBudget
from extproc.protocol.exchange import Exchange, ExchangeSettings
from extproc.request import HttpRequest, InferenceRequest
from extproc.wire import codec
from tests.support import peer
from tests.support.canary import AUTHORIZATION
from tests.support.peer import DecodedReply

DUPLEX = ("DUPLEX", "DUPLEX")
MARKER = ("x-went-into-resp-headers", "true")
ADDRESS = "10.0.0.1:8000"
PLAIN = {
    ":method": "POST",
    ":path": "/v1/chat/completions",
    "x-request-id": "r",
    AUTHORIZATION[0]: AUTHORIZATION[1],
}
SSE = {":status": "200", "content-type": "text/event-stream"}
JSON = {":status": "200", "content-type": "application/json"}

Decide = Callable[[HttpRequest], Outcome]


class Message(msgspec.Struct, frozen=True):
    """One message of Envoy's.

    Attributes:
        part: Which member of the request's oneof it sets.
        content: HttpHeaders, HttpBody or HttpTrailers of the peer.
        metadata: `metadata_context` of the peer, if any.
    """

    part: str
    content: Any
    metadata: Any = None

    def encode(self, modes: tuple[str, str] | None) -> bytes:
        """The bytes on the wire; with `protocol_config` when modes are given."""
        fields = {self.part: self.content}
        if self.metadata is not None:
            fields["metadata_context"] = self.metadata
        if modes is not None:
            fields["protocol_config"] = peer.configuration(*modes)
        return bytes(peer.ext_proc.ProcessingRequest(**fields))

    def __str__(self) -> str:
        content = self.content
        facts = []
        if isinstance(content, peer.ext_proc.HttpBody):
            facts.append(f"{len(content.body)} bytes {content.body[:60]!r}")
        if getattr(content, "end_of_stream", False):
            facts.append("ends")
        return " ".join([self.part, *facts])


# Envoy says


def request_headers(
    headers: peer.Pairs = PLAIN, *, ends: bool = False, raw: bool = True, metadata: Any = None
) -> Message:
    """The request headers."""
    content = peer.ext_proc.HttpHeaders(
        headers=peer.header_map(headers, raw=raw), end_of_stream=ends
    )
    return Message("request_headers", content, metadata)


def request_body(body: bytes, *, ends: bool = False, metadata: Any = None) -> Message:
    """A piece of the request body."""
    content = peer.ext_proc.HttpBody(body=body, end_of_stream=ends)
    return Message("request_body", content, metadata)


def request_trailers() -> Message:
    """The request trailers."""
    return Message("request_trailers", peer.ext_proc.HttpTrailers())


def response_headers(
    headers: peer.Pairs = JSON, *, ends: bool = False, metadata: Any = None
) -> Message:
    """The response headers."""
    content = peer.ext_proc.HttpHeaders(headers=peer.header_map(headers), end_of_stream=ends)
    return Message("response_headers", content, metadata)


def response_body(body: bytes, *, ends: bool = False) -> Message:
    """A piece of the response body."""
    return Message("response_body", peer.ext_proc.HttpBody(body=body, end_of_stream=ends))


def response_trailers() -> Message:
    """The response trailers."""
    return Message("response_trailers", peer.ext_proc.HttpTrailers())


# We say


def destination_metadata(destination: str) -> dict[str, Any]:
    """Dynamic metadata that names a destination."""
    return {peer.BALANCER: {peer.DESTINATION: destination}}


def route(
    destination: str = ADDRESS,
    *,
    part: str = "request_headers",
    sets: Iterable[tuple[str, str]] = (),
    removes: Iterable[str] = (),
    replaces: bytes | None = None,
) -> DecodedReply:
    """The pick."""
    return DecodedReply(
        part,
        sets=((peer.DESTINATION, destination), *sets),
        removes=tuple(sorted(removes)),
        clears_route=True,
        replaces=replaces,
        metadata=destination_metadata(destination),
    )


def hand_on(body: bytes, *, ends: bool = False, part: str = "request_body") -> DecodedReply:
    """Body bytes in FULL_DUPLEX_STREAMED."""
    return DecodedReply(part, body=body, ends=ends)


def go_on(part: str) -> DecodedReply:
    """Nothing to change."""
    return DecodedReply(part)


def answer_headers(*sets: tuple[str, str], override: dict[str, int] | None = None) -> DecodedReply:
    """The reply to the response headers, with the marker first."""
    return DecodedReply("response_headers", sets=(MARKER, *sets), override=override or {})


def refuse(
    status: int,
    *,
    message: str,
    kind: str,
    reason: str = "",
    retry_after: str = "",
    grpc_status: int | None = None,
) -> DecodedReply:
    """An immediate response with an OpenAI-shaped body; for gRPC, with the message alone."""
    error: object = {"error": {"message": message, "type": kind, "code": status}}
    sets = [("content-type", "application/json")]
    if grpc_status is not None:
        error, sets = message, []
    if reason:
        sets.append(("x-llm-d-request-dropped-reason", reason))
    if retry_after:
        sets.append(("retry-after", retry_after))
    return DecodedReply(
        "immediate_response",
        sets=tuple(sets),
        status=status,
        error=error,
        grpc_status=grpc_status,
    )


# The conversation


def always(*addresses: str) -> Decide:
    """Decide for the same endpoints whatever is asked."""
    endpoints = [Endpoint(address) for address in addresses or (ADDRESS,)]
    return lambda raw: Decision(InferenceRequest("opaque", subset=raw.subset), endpoints)


class Talk:
    """One stream without gRPC.

    Args:
        decide: Stands for the dispatcher.
        modes: Body modes by name; None sends no `protocol_config`.
        settings: Of the exchange.
        budget: Shared with other talks, if any.
        request_id: What a request without id is given.

    Attributes:
        decided: Every request that was decided.
        transcript: Both sides, line by line.
    """

    def __init__(
        self,
        decide: Decide | None = None,
        *,
        modes: tuple[str, str] | None = DUPLEX,
        settings: ExchangeSettings | None = None,
        budget: BufferBudget | None = None,
        request_id: str = "",
    ) -> None:
        self.budget = budget or BufferBudget(1 << 30)
        self.exchange = Exchange(settings or ExchangeSettings(1 << 26), self.budget)
        self.decided: list[HttpRequest] = []
        self.transcript: list[str] = []
        self._decide = decide or always()
        self._modes = modes
        self._request_id = request_id

    def hear(self, message: Message) -> list[DecodedReply]:
        """One message in, all answers to it out."""
        self.transcript.append(f"Envoy: {message}")
        event = codec.decode(message.encode(self._modes))
        self._modes = None
        replies = [codec.encode(reply) for reply in self.exchange.receive(event)]
        pending = self.exchange.pending
        if pending is not None:
            self.decided.append(pending)
            outcome = self._decide(pending)
            answers = self.exchange.apply_outcome(outcome, request_id=self._request_id)
            replies += [codec.encode(reply) for reply in answers]
        decoded = [peer.read(reply) for reply in replies]
        self.transcript += [f"we:    {answer}" for answer in decoded]
        return decoded


def play(
    script: Sequence[Message | DecodedReply], decide: Decide | None = None, **settings: Any
) -> Talk:
    """Hold a conversation and compare all of it; also, nothing may be held at its end.

    Args:
        script: Both sides in order.
        decide: Stands for the dispatcher; by default `ADDRESS` for every request.
        settings: See `Talk`.
    """
    talk = Talk(decide, **settings)
    lines: list[Message | DecodedReply] = []
    for line in script:
        if isinstance(line, Message):
            lines += [line, *talk.hear(line)]
    talk.exchange.close()
    if lines != list(script):
        wanted = [
            f"{'Envoy:' if isinstance(line, Message) else 'we:   '} {line}" for line in script
        ]
        raise AssertionError(
            "\n".join(
                difflib.unified_diff(
                    wanted, talk.transcript, "script", "happened", n=99, lineterm=""
                )
            )
        )
    assert talk.budget.held_bytes == 0
    return talk
