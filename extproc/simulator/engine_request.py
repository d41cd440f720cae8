"""Requests to an engine core and the results of its steps, as frozen values."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec


class EngineRequest(msgspec.Struct, frozen=True, gc=False):
    """Inference request in the terms of the engine core.

    Attributes:
        id: Unique among the jobs in the engine.
        prompt_tokens: Prompt length in tokens, at least 1.
        output_tokens: Tokens to generate, at least 1.
        hashes: One chained hash per full block of the prompt, continued over the answer where the
            caller knows it; non-negative. May be shorter than the blocks: the rest is never
            found in the cache. Adapter and salt are the caller's part of the hash.
        adapter: LoRA adapter; empty for the base model.
        received_tokens: Leading prompt tokens whose KV cache came from another engine.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    hashes: Sequence[int] = ()
    adapter: str = ""
    received_tokens: int = 0


class EngineRejection(enum.Enum):
    """Reason of an engine to reject a request."""

    TOO_LONG = enum.auto()  #: Prompt plus output never fit the model or the KV cache.
    BUSY = enum.auto()  #: As many requests in the engine as `max_queued` allows.
    NO_LORA = enum.auto()  #: The job names an adapter and the engine runs without LoRA.


class RequestAdmitted(msgspec.Struct, frozen=True, gc=False):
    """Request that entered the batch for the first time.

    Attributes:
        cached_tokens: Prompt tokens that the prefix cache had, on the device or in the memory of the host.
    """

    id: str
    cached_tokens: int


class FirstTokenProduced(msgspec.Struct, frozen=True, gc=False):
    """Request whose first token was computed.

    Attributes:
        after_s: Seconds since it was submitted.
        computed_tokens: Prompt tokens that were not cached when it first entered the batch.
    """

    id: str
    after_s: float
    computed_tokens: int


class RequestFinished(msgspec.Struct, frozen=True, gc=False):
    """Request that was completed.

    Attributes:
        submitted_at: When it arrived; as all times the caller's monotonic seconds.
        started_at: When it first entered the batch.
        first_token_at: When its prefill first ended.
        finished_at: When its last token was there.
        cached_tokens: As of `RequestAdmitted`.
        preemptions: How often it lost its blocks and was recomputed.
    """

    job: EngineRequest
    submitted_at: float
    started_at: float
    first_token_at: float
    finished_at: float
    cached_tokens: int
    preemptions: int


class Outstanding(msgspec.Struct, frozen=True, gc=False):
    """Remaining work of a request in the engine.

    Attributes:
        waiting: Whether it has not entered the batch.
        prompt_left: Tokens to compute before its next token; of a waiting job all, since what the
            cache will have then is not known.
        output_left: Tokens it has still to get.
        context: Tokens it holds in KV once they are computed, without those still to come.
    """

    id: str
    waiting: bool
    prompt_left: int
    output_left: int
    context: int
    adapter: str


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """Result of one or more iterations over the same batch.

    Attributes:
        started_at: When the first iteration began.
        duration_s: Seconds all iterations took together.
        steps: Iterations; more than one only while nothing but decoding goes on.
        decoding: Sequences that got one token in every iteration.
        prefill_tokens: Prompt tokens computed.
        started: Jobs that entered the batch for the first time.
        tokens: Output tokens that came, over all sequences and iterations.
        first_tokens: Jobs whose first token came at the end.
        resumed_s: Seconds since the token before, of preempted jobs that got one again at the end.
        finished: Jobs that got their last token at the end.
        preempted: Jobs that lost their blocks before the iteration.
    """

    started_at: float
    duration_s: float
    steps: int
    decoding: int
    prefill_tokens: int
    started: Sequence[RequestAdmitted]
    tokens: int
    first_tokens: Sequence[FirstTokenProduced]
    resumed_s: Sequence[float]
    finished: Sequence[RequestFinished]
    preempted: Sequence[str]
