"""Batch state of the engine core: sequences, the plan in progress, decoding sequences."""

from __future__ import annotations

import enum
import heapq
import math

from extproc.simulator import engine_request


class SequenceState(enum.Enum):
    """Phase of a sequence in the engine."""

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    GONE = enum.auto()


class Sequence:
    """Request inside the engine. Mutable; owned by the core.

    Attributes:
        target: Tokens to have in KV before the next token can come.
        computed: How many of these are there.
        held: Keys of its registered blocks, in prefix order.
        generated: Output tokens; current only while it does not decode.
        joined: Iteration counter minus generated tokens, while it decodes.
        end: The iteration that brings its last token, while it decodes.
        received: Tokens that came from another engine when it last entered the batch.
        reloaded: Tokens that were loaded from the memory of the host when it last entered the batch.
        stopped_at: When a preemption stopped its decoding; until then not a number.
    """

    __slots__ = (
        "cached",
        "computed",
        "end",
        "first_token_at",
        "generated",
        "hashes",
        "held",
        "job",
        "joined",
        "phase",
        "preemptions",
        "received",
        "reloaded",
        "started_at",
        "state",
        "stopped_at",
        "submitted_at",
        "target",
    )

    def __init__(self, the_job: engine_request.EngineRequest, now: float) -> None:
        self.job = the_job
        self.submitted_at = now
        self.started_at = math.nan
        self.first_token_at = math.nan
        self.stopped_at = math.nan
        self.state = SequenceState.WAITING
        self.hashes = the_job.hashes
        self.held: list[int] = []
        self.target = the_job.prompt_tokens
        self.computed = 0
        self.cached = 0
        self.received = self.reloaded = 0
        self.generated = 0
        self.joined = 0
        self.phase = 0
        self.end = 0
        self.preemptions = 0

    def finished(self, now: float) -> engine_request.RequestFinished:
        """Its record, with all tokens there at `now`."""
        return engine_request.RequestFinished(
            self.job,
            self.submitted_at,
            self.started_at,
            self.first_token_at,
            now,
            self.cached,
            self.preemptions,
        )


class StepPlan:
    """Iterations in progress.

    Attributes:
        start: When the first one began, monotonic seconds.
        steps: How many; they differ only in the context of the decodes.
        first_s: Length of the first one.
        growth_s: How much longer each next one is.
    """

    __slots__ = (
        "decoding",
        "first_s",
        "growth_s",
        "preempted",
        "prefills",
        "start",
        "started",
        "steps",
    )

    def __init__(self, start: float) -> None:
        self.start = start
        self.steps = 1
        self.first_s = 0.0
        self.growth_s = 0.0
        self.decoding = 0
        self.prefills: list[tuple[Sequence, int]] = []
        self.started: list[engine_request.RequestAdmitted] = []
        self.preempted: list[str] = []

    def until(self, steps: int) -> float:
        """Seconds from the start to the end of so many iterations."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) // 2)

    def begun(self, seconds: float) -> int:
        """Number of iterations that begin before so many seconds after the start; at least 1."""
        if seconds <= self.first_s:
            return 1
        # The smallest n with until(n) >= seconds; the loops mend what rounding broke.
        half = self.first_s - self.growth_s / 2
        root = math.sqrt(half * half + 2 * self.growth_s * seconds)
        steps = max(1, math.ceil(2 * seconds / (half + root)))
        while self.until(steps) < seconds:
            steps += 1
        while steps > 1 and self.until(steps - 1) >= seconds:
            steps -= 1
        return steps


class Decoding:
    """The decoding sequences of one engine and its iteration counter. Mutable; one owner.

    Every decoding sequence advances once per iteration, so nothing is done per token: a sequence's
    token count is a difference to the counter, its end is on a heap, and those that fill a block
    in the same iteration share a phase modulo the block size.

    Attributes:
        count: Sequences (B).
        context: Their prompt and generated tokens together (K).
        tick: Iterations since the engine started.
    """

    __slots__ = ("_ends", "_phases", "_pushed", "_size", "context", "count", "tick")

    def __init__(self, block_tokens: int) -> None:
        self.count = 0
        self.context = 0
        self.tick = 0
        self._size = block_tokens
        self._phases = [0] * block_tokens
        self._ends: list[tuple[int, int, Sequence]] = []
        self._pushed = 0

    def generated(self, seq: Sequence) -> int:
        """Output tokens of any sequence in the engine."""
        return self.tick - seq.joined if seq.state is SequenceState.DECODING else seq.generated

    def join(self, seq: Sequence) -> None:
        """A sequence ended its prefill: its next token comes with the next iteration."""
        seq.state = SequenceState.DECODING
        seq.joined = self.tick - seq.generated
        # It needs a block in iterations that begin with whole blocks of its tokens in KV.
        seq.phase = (self.tick - seq.target) % self._size
        self._phases[seq.phase] += 1
        seq.end = self.tick + seq.job.output_tokens - seq.generated - 1
        self._pushed += 1
        heapq.heappush(self._ends, (seq.end, self._pushed, seq))
        self.count += 1
        self.context += seq.job.prompt_tokens + seq.generated

    def leave(self, seq: Sequence) -> int:
        """A sequence stops decoding; returns its tokens in KV (its newest token is not there)."""
        seq.generated = self.tick - seq.joined
        tokens = seq.job.prompt_tokens + seq.generated
        self._phases[seq.phase] -= 1
        self.count -= 1
        self.context -= tokens
        return tokens - 1

    def advance(self, steps: int) -> list[Sequence]:
        """So many iterations pass; returns the sequences that have all tokens, still joined."""
        self.tick += steps
        self.context += self.count * steps
        done = []
        while self._ends and self._ends[0][0] < self.tick:
            end, _, seq = heapq.heappop(self._ends)
            if seq.state is SequenceState.DECODING and seq.end == end:
                done.append(seq)
        return done

    def steps_to_end(self) -> int:
        """Iterations until the first of them has all tokens; there must be one."""
        ends = self._ends
        while ends[0][2].state is not SequenceState.DECODING or ends[0][2].end != ends[0][0]:
            heapq.heappop(ends)  # it left before its end
        return ends[0][0] - self.tick + 1

    def growth(self, steps: int, *, skip: int = 0) -> int:
        """Blocks all of them together take in `steps` iterations, `skip` iterations from now."""
        size, phases, first = self._size, self._phases, self.tick + skip
        if steps == 1:
            return phases[first % size]
        rounds, rest = divmod(steps, size)
        return rounds * self.count + sum(phases[(first + ahead) % size] for ahead in range(rest))
