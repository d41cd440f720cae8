"""Simulated requests, their sessions, and the keys of the blocks of their prompts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import msgspec

from extproc.decision import Rejection
from extproc.request import MediaSpan

#: Tokens of one block key; the block size of the engines (vLLM's default on CUDA).
KEY_TOKENS = 16

#: Blocks of one stream; 16 M tokens.
_LONGEST_STREAM = 1 << 20


class RequestSpec(msgspec.Struct, frozen=True, gc=False):
    """Ground truth of one request.

    Attributes:
        prompt_tokens: Prompt length, at least 1.
        output_tokens: Length of the answer, at least 1. Pickers do not know it.
        keys: One key per full block of `KEY_TOKENS`, root first, continued over the answer where
            a later prompt repeats it. Equal keys are equal prompts up to there.
        adapter: LoRA adapter; empty for the base model.
        session: What ties turns of a conversation together; empty when nothing does.
        opening: Beginning of the first user message, as text.
        tenant: Tenant of the request; empty for none.
        priority: Priority of its objective.
        node: Index of the only engine it may go to; -1 for any.
        media: Images, videos and audio in it; pickers know their tokens.
        model: Model that it names; empty for the adapter, or the base model of all.
        profile: Scheduling profile that its header names, where the picker has one of that name.
    """

    prompt_tokens: int
    output_tokens: int
    keys: Sequence[int]
    adapter: str = ""
    session: str = ""
    opening: str = ""
    tenant: str = ""
    priority: int = 0
    node: int = -1
    media: tuple[MediaSpan, ...] = ()
    model: str = ""
    profile: str = ""


class SimSession(msgspec.Struct, frozen=True, gc=False):
    """Session of requests; every request waits for the previous answer.

    Attributes:
        specs: In order.
        think_s: Seconds between an answer and the next request, one less than works; empty for
            none.
        at: When it begins, virtual seconds; None where the client says.
    """

    specs: Sequence[RequestSpec]
    think_s: Sequence[float] = ()
    at: float | None = None


class SimRequest:
    """Request that was sent. Mutable; owned by the simulation.

    Attributes:
        id: Unique in the simulation.
        work: Ground truth of the request.
        held_s: Seconds it waited in the client for its turn.
        sent_at: When it left the client, virtual seconds.
        node: Index of the engine it went to; -1 for none.
        first_s: Seconds to the first token.
        took_s: Seconds to the last token.
        cached_tokens: Prompt tokens the engine found cached.
        predicted_tokens: Prompt tokens the picker predicted as cached.
        prefill_node: Index of the engine that computes its prompt for `node`; -1 where `node` does.
        received_tokens: Prompt tokens that came from there.
        preemptions: How often the engine recomputed it.
        failure: Why it failed; empty while it did not.
        refused_s: Seconds until it was refused; NaN while it was not.
        retry_after_s: Value of `Retry-After` of the rejection, in seconds; 0 for none.
    """

    __slots__ = (
        "cached_tokens",
        "failure",
        "first_s",
        "held_s",
        "id",
        "node",
        "predicted_tokens",
        "preemptions",
        "prefill_node",
        "received_tokens",
        "refused_s",
        "retry_after_s",
        "sent_at",
        "took_s",
        "work",
    )

    def __init__(self, name: str, work: RequestSpec, now: float) -> None:
        self.id = name
        self.work = work
        self.held_s = 0.0
        self.sent_at = now
        self.node = -1
        self.first_s = math.nan
        self.took_s = math.nan
        self.cached_tokens = 0
        self.predicted_tokens = 0
        self.prefill_node = -1
        self.received_tokens = 0
        self.preemptions = 0
        self.failure = ""
        self.refused_s = math.nan
        self.retry_after_s = 0

    def refused(self, why: Rejection, now: float) -> None:
        """Record the rejection of the request."""
        self.failure = f"rejected {why.status}"
        self.refused_s = now - self.sent_at
        self.retry_after_s = why.retry_after_s or 0


class Streams:
    """Endless texts, each known by a name: keys of equal names and equal positions are equal.

    A conversation is one stream that is read further with every turn. A prompt that begins with a
    shared system prompt reads that stream first and its own from there on.
    """

    def __init__(self) -> None:
        self._bases: dict[Hashable, int] = {}

    def keys(self, name: Hashable, tokens: int) -> range:
        """Keys of the full blocks in the first `tokens` tokens of a stream."""
        base = self._bases.setdefault(name, (len(self._bases) + 1) * _LONGEST_STREAM)
        return range(base, base + tokens // KEY_TOKENS)

    def joined(self, shared: Hashable, own: Hashable, *, first: int, tokens: int) -> Sequence[int]:
        """Keys of a text that reads another stream first.

        Args:
            shared: The stream it begins with.
            own: Its own stream.
            first: Tokens of `shared` it begins with; the block in which it changes is its own.
            tokens: Tokens of the whole.
        """
        keys = self.keys(own, tokens)
        common = self.keys(shared, min(first, tokens))
        return [*common, *keys[len(common) :]] if common else keys
