"""Queued tokens: work that was sent to an endpoint and is estimated as not computed yet.

It is dead-reckoned: uncached prompt tokens are added when a request is sent and drain at the speed of
the engine. Engines serve first come first served, so a request that ended says that everything sent
before it was computed, and a scrape that shows w waiting requests says that the last w of ours were
not.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import Final, Literal, Protocol, TypeAlias, get_args

from extproc.decision import StageName
from extproc.endpoint import DEFAULT_STEP_TIMES, Load, StepTimeModel

#: Tokens of one engine iteration (`max_num_batched_tokens`): vLLM's default on cards below 70 GB
#: (docs/spec/engines.md#iteration-time). It only says how often a prefill pays for the decodes
#: beside it.
_BUDGET_TOKENS: Final = 2048

#: How much longer than the prompts before it take a request waits that waits for something else (a
#: factor): their number and the speed of the engine are estimates.
_HELD_UP: Final = 2.0

#: Longest prompts that fit into free memory where no request waits for memory (count).
_ROOMY: Final = 2.0


#: What an endpoint computes of a request; empty for all.
Stage: TypeAlias = Literal["", StageName, "decode", "prefill-decode"]


#: Seconds in which a request may reach an engine and not be shown yet: it is read and tokenized first.
_UNSHOWN_S = 0.25

#: Stages of requests that another endpoint serves.
PARTS: Final = frozenset(get_args(StageName))


class OpenRequest(Protocol):
    """A request that was sent to the endpoint and is open: what the account knows of it.

    Attributes:
        at: Monotonic seconds at which it was sent.
        sent: `QueuedWork.sent` with this request.
        prompt_tokens: Tokens of its prompt.
        uncached_tokens: Of these, not in the engine's prefix cache; at least 1.
        from_peers: Whether another replica sent it.
        stage: What the endpoint computes of it; empty for all.
        prefilled_at: Monotonic seconds at which another endpoint had computed the prompt; None for not.
    """

    at: float
    sent: float
    prompt_tokens: int
    uncached_tokens: int
    from_peers: bool
    stage: Stage
    prefilled_at: float | None

    def close(self, now: float, *, answered: bool = True) -> None:
        """Give back what was charged."""

    @property
    def entered_at(self) -> float:
        """Monotonic seconds since when it is in the engine; infinity where it may not be there."""


class QueuedWork:
    """Uncached prompt tokens in the queue of one endpoint. The base of its account.

    Attributes:
        sent: Uncached prompt tokens ever sent.
        done: Of these, computed as of `at`.
        at: Monotonic seconds at which `done` was true.
        tokens_per_s: Growth of `done` in tokens per second.
        kv_tokens_sent: KV tokens that requests ever sent take.
        kv_tokens_scraped: Of these, in the last scrape.
        iteration_s: Seconds of an iteration, as of the last scrape.
    """

    __slots__ = (
        "_open",
        "_prefills",
        "at",
        "done",
        "iteration_s",
        "kv_tokens_scraped",
        "kv_tokens_sent",
        "sent",
        "tokens_per_s",
    )

    def __init__(self) -> None:
        #: Open requests, in the order they were sent.
        self._open: dict[OpenRequest, None] = {}
        #: Those of them for prefill alone that pages may show as done.
        self._prefills: dict[OpenRequest, None] = {}
        # A float, because every candidate subtracts one from it: an integer takes several times as long.
        self.sent = 0.0
        self.done = 0.0
        self.at = 0.0
        self.tokens_per_s = 1.0 / DEFAULT_STEP_TIMES.prefill_s
        self.iteration_s = DEFAULT_STEP_TIMES.iteration_s(1.0)
        self.kv_tokens_sent = 0
        self.kv_tokens_scraped = 0

    def count_parts(self, *, own: bool = False) -> int:
        """Open requests for a stage of a request that another endpoint serves (count).

        Args:
            own: Without those of other replicas.
        """
        return sum(r.stage in PARTS and not (own and r.from_peers) for r in self._open)

    def watch_prefill(self, reservation: OpenRequest) -> None:
        """See `Reservation.watch`."""
        self._prefills[reservation] = None

    def settle_prefills(self, load: Load) -> None:
        """Close requests for prefill alone that the engine has done, as far as a page shows it.

        Of those that the page must show, the engine has no more than it shows in all, the last ones.
        """
        if not self._prefills or load.running is None or load.waiting is None:
            return
        until = load.at - _UNSHOWN_S
        parts = [part for part in self._prefills if part.at <= until]
        for part in parts[: max(0, len(parts) - int(load.running + load.waiting))]:
            part.close(load.at)

    def queued(self, now: float) -> float:
        """Uncached prompt tokens sent and estimated as not yet computed."""
        left = self.sent - self.done - (now - self.at) * self.tokens_per_s
        return max(0.0, left)

    def is_computed(self, request: OpenRequest, now: float) -> bool:
        """True if the prompt of an open request is estimated as computed."""
        return self.done + max(0.0, now - self.at) * self.tokens_per_s >= request.sent

    def set_drain_rate(self, rates: StepTimeModel, requests: float) -> None:
        """Set how fast queued work drains."""
        self.iteration_s = rates.iteration_s(requests)
        self.tokens_per_s = 1.0 / (rates.prefill_s + self.iteration_s / _BUDGET_TOKENS)

    def record_scrape(
        self,
        *,
        sent: float,
        written: int,
        waiting: float | None,
        at: float,
        now: float,
        running: float | None = None,
        free_tokens: float | None = None,
    ) -> bool:
        """Correct the queue by what a scrape shows.

        Args:
            sent: `sent` when the scrape was requested.
            written: `kv_tokens_sent` then.
            at: Monotonic seconds at which the page was true; the engine has computed since.
            waiting: Requests queued in the engine that must be ours; None when the page did not say.
            running: Requests in its batch; None when the page did not say. Of ours that are open, more
                than these wait: an engine reads and tokenizes a request before its page shows it.
            free_tokens: KV tokens that its memory has room for; None when the page did not say.

        Returns:
            True if a request in the engine's queue waits longer than the prompts before it take, and
            not for memory.
        """
        self.kv_tokens_scraped = written
        self._drain(now)
        if waiting is None:
            return False
        before = [r for r in self._open if r.sent <= sent and r.prefilled_at is None]
        largest = max((reservation.uncached_tokens for reservation in before), default=0)
        queueing = min(int(waiting), len(before))
        if running is not None and len(before) - int(running) > queueing:
            num_here = sum(reservation.entered_at < math.inf for reservation in before)
            queueing = max(queueing, num_here - int(running))
        # The first of those that wait, counted from the end, has everything before it admitted.
        admitted, waited_s = sent, 0.0
        for reservation in islice(reversed(before), queueing - 1, queueing) if queueing else ():
            admitted = reservation.sent - reservation.uncached_tokens
            waited_s = at - reservation.entered_at
        usual_s = (sent - admitted + largest) / self.tokens_per_s + self.iteration_s
        longest = max([reservation.prompt_tokens for reservation in before], default=0)
        lacks_memory = free_tokens is None or free_tokens < _ROOMY * longest
        # An engine whose requests wait for memory computes none of them.
        passed_s = 0.0 if waiting and lacks_memory else max(0.0, now - at)
        computed = passed_s * self.tokens_per_s
        # One admitted prompt may still be in the middle of its prefill.
        most = min(admitted + computed, self.sent)
        self.done = min(max(self.done, admitted - largest + computed), most)
        return bool(waiting) and not lacks_memory and waited_s > _HELD_UP * usual_s

    def _drain(self, now: float) -> None:
        passed = now - self.at
        if passed > 0.0:
            done = self.done + passed * self.tokens_per_s
            self.done = done if done < self.sent else self.sent  # noqa: FURB136
            self.at = now
