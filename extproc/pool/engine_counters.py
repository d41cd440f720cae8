"""Work of engines from scraped counters: steps, answers, adapter loads, and the share of other EPPs.

Work counters are the ends of the windows from which step times are learned.

Replicas need not talk. Each knows from scrapes how much of the engines' work is not its own, and how
much of all prompts the engines find in their caches. How long the prompts of others are no page
tells: they are taken to be as long as our own (`request_tokens.TypicalWork`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from extproc.endpoint import EngineCounters, Load


class IdleTime(NamedTuple):
    """Time in which an account had no open request.

    Attributes:
        seconds: Until the latest request was opened (cumulative).
        since: Monotonic seconds since when there is none; infinity if there is any.
        times: How often the last one ended (count, cumulative).
    """

    seconds: float = 0.0
    since: float = math.inf
    times: int = 0

    def until(self, at: float) -> float:
        """Seconds until a time of which nothing else is known (cumulative)."""
        return self.seconds + max(0.0, at - self.since)


#: Requests that run at least where they have all places (count): fewer are the sign of an engine in
#: trouble, or of prompts that are not cached as predicted, rather than of a limit.
_LEAST_LIMIT: Final = 8.0

#: Seconds for which a limit stands that no page shows again: what was shown once may have been an
#: engine in trouble, which then gets too few requests to show that it runs more.
_LIMIT_STANDS_S: Final = 60.0


class BatchLimitEstimator:
    """Estimates how many requests an engine runs at a time (vLLM's `max_num_seqs`).

    Attributes:
        limit: Requests (count); None while the engine has not shown it.
    """

    __slots__ = ("_at", "limit")

    def __init__(self) -> None:
        self.limit: float | None = None
        self._at = math.inf

    def update(self, load: Load, *, is_held_up: bool) -> float | None:
        """Take in a page; returns the limit.

        Requests may wait for the prompts before them, for memory, for an adapter, or for a place in
        the batch. Where it is none of the first three, those that run have all places.

        Args:
            is_held_up: Whether a request waits for longer than the prompts before it take, and
                neither for memory nor for an adapter.
        """
        running = load.running or 0.0
        if is_held_up and running >= _LEAST_LIMIT:
            self.limit, self._at = running, load.at
        elif running > (self.limit or running) or load.at - self._at > _LIMIT_STANDS_S:
            self.limit = None
        return self.limit


class AdapterSlotState(msgspec.Struct, frozen=True, gc=False):
    """Adapter slot state of one endpoint, valid until its account or load changes.

    Attributes:
        load: Load that it was computed from.
        known: Names that were known to be adapters then.
        idle: Adapters predicted as loaded, in use or not.
    """

    load: Load
    known: frozenset[str]
    full: bool
    room: bool = False
    idle: frozenset[str] = frozenset()


class AdapterSlotTracker:
    """Adapters predicted on one device, from the adapters that ran there.

    An engine lists adapters with running requests; one that ran and is in no slot was loaded. Of
    idle ones the least recently used makes room, as in vLLM.

    Attributes:
        loads: Adapters that came onto the device since the first scrape (count).
    """

    __slots__ = ("_resident", "loads")

    def __init__(self) -> None:
        self.loads = 0
        self._resident: dict[str, None] | None = None  # least recently used first

    def update(self, load: Load, ran: Iterable[str]) -> None:
        """Record a scrape; nothing happens while the engine names neither slots nor adapters.

        Args:
            ran: Adapters of requests that ended since the one before.
        """
        running, size = load.adapters, load.adapter_slots
        if running is None or size is None:
            return
        first = self._resident is None
        resident = self._resident or {}
        self._resident = resident
        # What still runs was used last.
        for name in (*sorted(set(ran) - running), *sorted(running)):
            if name in resident:
                del resident[name]
            elif not first:
                self.loads += 1
            resident[name] = None
        idle = [name for name in resident if name not in running]
        for name in idle[: max(0, len(resident) - size)]:
            del resident[name]


#: Finished requests from which on spans count: of a few, much of the time may lie before their first page.
_SERVED: Final = 10

#: Iterations of sequences for each preemption, below which these say nothing: a preempted sequence
#: waits between two tokens for hundreds of them.
_PREEMPTED_STEPS: Final = 1000


class Spans(msgspec.Struct, frozen=True, gc=False):
    """Time that sequences had in the batch, whatever else the engine did meanwhile (cumulative).

    Attributes:
        gaps: Iterations of sequences that had their first token (count, one for each sequence).
        gaps_s: Seconds from token to token, summed over them.
        prompts: Finished requests (count).
        prompts_s: Seconds in the batch until their first tokens, summed.
        prefilled: Their prompt tokens that were computed.
        preemptions: Sequences that waited between two tokens, which counts in `gaps_s` (count).
    """

    gaps: float = 0.0
    gaps_s: float = 0.0
    prompts: float = 0.0
    prompts_s: float = 0.0
    prefilled: float = 0.0
    preemptions: float = 0.0

    @classmethod
    def read(cls, totals: EngineCounters) -> Spans | None:
        """Read those of a page; None where it does not have all of them."""
        gaps, gaps_s, prompts = totals.gaps, totals.gaps_s, totals.finished
        prompts_s, prefilled = totals.prefill_s, totals.prefill_tokens
        if gaps is None or gaps_s is None or prompts is None:
            return None
        if prompts_s is None or prefilled is None:
            return None
        return cls(gaps, gaps_s, prompts, prompts_s, prefilled, totals.preemptions or 0.0)

    def since(self, before: Spans) -> Spans:
        """Subtract those of an earlier page."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(before), strict=True)
        return Spans(*(here - there for here, there in pairs))

    def rows(self, steps: float) -> Iterator[tuple[tuple[float, float, float], float]]:
        """Iterations, prompt tokens and generated ones that together took so many seconds.

        With B sequences in the batch an iteration counts B times, so seconds are divided by the mean
        of B. What ran beside a prompt, and prompts beside what generates, follow from it.

        Args:
            steps: Iterations in the same time (count).
        """
        gaps, prompts, prefilled = self.gaps, self.prompts, max(0.0, self.prefilled)
        batch = max(1.0, (gaps + prompts) / max(1.0, steps))
        if gaps >= 1.0 and self.gaps_s > 0.0:
            beside = prefilled * (1.0 - 1.0 / batch)
            yield (gaps / batch, beside, gaps), self.gaps_s / batch
        if prompts > 0.0 and self.prompts_s > 0.0:
            together = max(1.0, batch * prompts / (gaps + prompts))
            others = prompts * (batch - together) / together
            yield (prompts / together, prefilled, others), self.prompts_s / together


class SpanReader:
    """Reads the spans of one life of one engine, since it began or since the last ones that count."""

    __slots__ = ("_since", "_steps")

    def __init__(self) -> None:
        self._since = Spans()
        self._steps = 0.0  # at that time

    def skip(self, load: Load) -> None:
        """Begin the next ones at this page."""
        spans = Spans.read(load.counters)
        if spans is not None:
            self._since, self._steps = spans, load.counters.steps or 0.0

    def read(self, load: Load) -> Iterable[tuple[tuple[float, float, float], float]]:
        """Rows as `Spans.rows` has them; empty while fewer than ten requests ended.

        Iterations may have waited for sequences that were preempted and for adapters: what such an
        engine did shows nothing. Counters that went back begin anew. Of ranks all are counted: the
        time that sequences had is summed over them as well.
        """
        until = Spans.read(load.counters)
        if until is None:
            return ()
        spans = until.since(self._since)
        steps = (load.counters.steps or 0.0) - self._steps
        went_back = steps < 0.0 or min(msgspec.structs.astuple(spans)) < 0.0
        if spans.prompts < _SERVED and not went_back:
            return ()
        self.skip(load)
        if went_back or load.adapters or spans.preemptions * _PREEMPTED_STEPS > spans.gaps:
            return ()
        return spans.rows(steps)


class PrefillCounter:
    """Counts the requests of one engine whose prompts are being computed.

    Of those that run, the others have a first token and did not finish. Requests that clients gave up
    are in one of these counters only, so their difference is kept between none and all that run.
    """

    __slots__ = ("_given_up",)

    def __init__(self) -> None:
        self._given_up = 0.0  # requests with a first token that never count as finished

    def update(self, load: Load) -> float:
        """Take in a page; returns the count, 0 where the page does not show it."""
        first_tokens, finished = load.counters.first_tokens, load.counters.finished
        if first_tokens is None or finished is None:
            return 0.0
        running = load.running or 0.0
        shown = first_tokens - finished - self._given_up
        decoding = min(running, max(0.0, shown))
        self._given_up += shown - decoding
        return running - decoding


class OutputReader:
    """Reads generated tokens and finished requests between two pages of one engine process."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since: tuple[float, float] | None = None

    def read(self, totals: EngineCounters) -> tuple[float, float] | None:
        """Tokens generated and requests finished since the first page or the last result.

        None at the first page, while none finished, after counters went back, and where the page
        lacks one of them.
        """
        if totals.finished is None or totals.generated_tokens is None:
            return None
        here, before = (totals.generated_tokens, totals.finished), self._since
        if before is None:
            self._since = here
            return None
        generated, finished = here[0] - before[0], here[1] - before[1]
        if finished < 0.0 or generated < 0.0:
            self._since = here
        elif finished >= 1.0 and generated > 0.0:
            self._since = here
            return generated, finished
        return None


class WorkCounters(msgspec.Struct, frozen=True, gc=False):
    """Work counters of an engine at one end of a window.

    Attributes:
        at: Monotonic seconds.
        computed: Prompt tokens computed.
        context: Tokens of context that running requests have; None when unknown.
        loads: Adapters that were loaded onto the device (count).
        loading_s: Seconds of adapter loads where the engine tells them, else 0; the mean of its ranks.
        idle_s: Seconds in which nothing ran, as far as known (cumulative).
        idled: Times at which our last request ended (count); -1 where nothing but ours runs.
        rank_steps: Iterations of each rank where the engine shows several as one; empty for one.
    """

    at: float
    steps: float
    computed: float
    generated: float
    context: float | None
    loads: int
    loading_s: float
    idle_s: float
    idled: int
    rank_steps: tuple[float, ...] = ()

    def steps_since(self, start: WorkCounters) -> float:
        """Iterations since the start of a window; of ranks, which run beside each other, the most."""
        pairs = zip(start.rank_steps, self.rank_steps, strict=True)
        return max((end - begin for begin, end in pairs), default=self.steps - start.steps)

    def can_begin(self, end: WorkCounters) -> bool:
        """True if a window may last from here to there: no counter went back."""
        return (
            self.idled == end.idled
            and len(self.rank_steps) == len(end.rank_steps)
            and self.steps <= end.steps
            and self.generated <= end.generated
            # Prompt tokens alone may be counted after those that are generated with them.
            and self.computed + self.generated <= end.computed + end.generated
            and self.loads <= end.loads
        )


class CounterReader:
    """Reads the counts of one life of one engine."""

    __slots__ = ("_device", "_last", "_passes")

    def __init__(self) -> None:
        self._device = AdapterSlotTracker()
        self._last: Load | None = None
        self._passes = 0.0

    def read(
        self, load: Load, *, ran: Iterable[str], idle: IdleTime, is_alone: bool, shared: float
    ) -> WorkCounters | None:
        """Record the next scrape.

        Args:
            idle: Time in which none of our requests was on the engine.
            is_alone: Whether nothing else runs on it then.
            shared: Tokens of context that the cache holds once for several running requests.

        Returns:
            Its counts; None where the engine does not have all of them.
        """
        last, self._last = self._last, load
        self._device.update(load, ran)
        work = self._work(last, load)
        if work is None:
            return None
        capacity, usage = load.kv_tokens, load.kv_usage
        adapter_load_s = load.counters.adapter_load_s
        return WorkCounters(
            load.at,
            *work,
            None if capacity is None or usage is None else max(0.0, capacity * usage + shared),
            self._device.loads if adapter_load_s is None else 0,
            (adapter_load_s or 0.0) / max(1, len(load.counters.rank_steps)),
            idle.until(load.at) if is_alone else 0.0,
            -1 if is_alone else idle.times,
            load.counters.rank_steps,
        )

    def _work(self, last: Load | None, load: Load) -> tuple[float, float, float] | None:
        """Iterations, prompt tokens computed, tokens generated.

        An engine that does not count iterations generates one token for each running request in
        each of them: in simulation within a tenth of the true count, scraped every 0.5 or 2 s.
        """
        totals = load.counters
        generated = totals.generated_tokens
        if totals.steps is not None and totals.step_tokens is not None and generated is not None:
            return totals.steps, totals.step_tokens - generated, generated
        computed, decoded = totals.computed_tokens, totals.decoded_tokens
        if computed is None or decoded is None:
            return None
        before = None if last is None else last.counters.decoded_tokens
        if last is not None and before is not None:
            batch = 0.5 * ((last.running or 0.0) + (load.running or 0.0))
            self._passes += max(0.0, decoded - before) / max(1.0, batch)
        return self._passes, computed, decoded


def adapter_load_s(before: Load, after: Load) -> float | None:
    """Mean seconds of the adapter loads between two pages; None where the engine shows none."""
    old, new = before.counters, after.counters
    if None in (old.adapter_loads, old.adapter_load_s, new.adapter_loads, new.adapter_load_s):
        return None
    loads = (new.adapter_loads or 0.0) - (old.adapter_loads or 0.0)
    seconds = (new.adapter_load_s or 0.0) - (old.adapter_load_s or 0.0)
    return None if loads < 1 or seconds < 0 else seconds / loads


#: Weight of a scrape in the share of others. At 0.02 a fleet of eight shows a picker that came or
#: went within some two seconds.
_ALPHA = 0.02


class ForeignTraffic:
    """Moving average of foreign requests, over the pool. Mutable; owned by `PoolStore`.

    Attributes:
        share: Share of the requests in the engines that others sent, 0..1.
    """

    __slots__ = ("_others", "_ours", "share")

    def __init__(self) -> None:
        self._ours = 0.0
        self._others = 0.0
        self.share = 0.0

    def update(self, own: float, foreign: float) -> None:
        """Fold one scrape of one endpoint into the averages."""
        self._ours += _ALPHA * (own - self._ours)
        self._others += _ALPHA * (foreign - self._others)
        requests = self._ours + self._others
        self.share = self._others / requests if requests else 0.0


def engine_restarted(before: Load, after: Load) -> bool:
    """True if the engine is another process than at the last scrape.

    An earlier start time shows it too: the clock of its machine may have been set back. Some engines
    show no start time (SGLang), and no counter before their first request has ended.
    """
    if before.started_at is not None and after.started_at is not None:
        return abs(after.started_at - before.started_at) > 1.0  # an exporter may round
    pairs = (
        (before.prefix_queries, after.prefix_queries),
        (before.counters.generated_tokens, after.counters.generated_tokens),
    )
    if after.engine and all(new is None for _, new in pairs):
        return any(old for old, _ in pairs)
    return any(old is not None and new is not None and new < old for old, new in pairs)
