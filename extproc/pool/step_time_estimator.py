"""Step times of an engine, learned from its own counters.

An iteration takes `a + b P + c B + d K` seconds (docs/spec/engines.md#iteration-time): P prompt
tokens computed, B sequences that decode, K tokens of context they have together. Some also bring an
adapter onto the device, which takes l. Between two scrapes of a busy engine that adds up to

    elapsed = a S + b P + c G + d K S + l L

with S iterations, P prompt tokens and G generated tokens, all of which are differences of counters;
K is the mean of what the KV cache held at both ends, and L are the adapters that came onto the
device. Windows of about a second are the rows of a least squares problem that forgets. What the
engine has not shown yet stays near the prior, which is what the rest of the pool has shown, times
the slowness of this engine: how much longer its windows took than the prior says.

Ranks that a page shows as one engine run beside each other: they are one engine whose iterations
compute what all of them do, and S is that of the busiest one.

Where no window shows it, as before the first scrape, beside other pickers, and where pages are so
old that the engine may have been idle between two of them, what an engine did shows in the time that
sequences had in the batch (`Spans`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from extproc.endpoint import DEFAULT_STEP_TIMES, EngineCounters, Load, StepTimeModel
from extproc.pool import engine_counters, step_time_values
from extproc.pool.engine_counters import IdleTime, WorkCounters
from extproc.pool.least_squares import RecursiveLeastSquares
from extproc.pool.reload_time import ReloadTimeEstimator
from extproc.pool.request_tokens import AnswerTokens

#: Shortest window that is a row (s), and fewest iterations in it: counters move by whole ones, and
#: with long prompts one takes a second.
_WINDOW_S, _WINDOW_STEPS = 0.5, 4

#: Shortest window that ends while a prompt is being computed (s): its tokens count with its first token
#: only, in the next window. With windows of 0.5 s, prompts of 0.4 s look 40 % shorter than they are.
#: Where adapters run, hardly a window of this length is without a load, and loads hide what prompts take.
_PART_WINDOW_S = 2.0

#: Share of the past that a new row leaves. Some fifty rows count, about a minute of load; 0.95
#: follows changes twice as fast, and doubles the error of the next window under steady load.
_KEEP = 0.98

#: The same from the second unusual row of one sign on: the engine changed. At half its speed the time
#: of an iteration is within 15 % again after 20 to 30 rows, with 0.9 after 40 to 60.
_KEEP_LESS = 0.8

#: Weight of a prior against rows, whose squares are below 1 each: of a default, and
#: of what the rest of the pool has shown. What the rows do not tell apart stays with the prior:
#: engines of a pool mostly are alike, and a difference that is noise would send one of them more
#: than its share.
_WEAK, _STRONG = 0.05, 3.0

#: Seconds for which a row stands in full, and in which what it has shown halves after that. An engine
#: that was slow gets no requests while others are idle: it must be tried again without them. One at
#: a fifth of the speed of its pool is taken to be within 40 % of it after 76 s.
_FRESH_S, _HALVES_S = 10.0, 20.0

#: Share by which the time of a window may differ from what was foretold and still be usual.
_USUAL = 0.25

#: Times of an engine of which nothing is known, as a share of those of the fastest one: a chosen guess.
#: Such an engine must look better than prefixes that others hold, or it gets no requests for minutes.
#: The more engines look like it, the less likely it differs from them: with n the difference counts 1 / n.
_UNTRIED = 0.25

#: Change of the pace of answers that rates follow, as a share of it.
_PACE_CHANGE = 0.1

#: Windows with adapter loads remembered, and wanted before their median counts. Loads are seen a
#: scrape late or early now and then, so some windows say nonsense.
_MOST_LOADS, _ENOUGH_LOADS = 9, 3

#: Share of a new mean in the running one.
_ALPHA = 0.2

#: Where l stands among the unknowns.
_LOADING = 4

#: Counts of one iteration of a usual batch, where an engine has shown none of its own.
_TYPICAL_ROW = (1.0, 100.0, 8.0, 8000.0, 0.0)


class StepTimeEstimator:
    """Estimates the step times of one engine.

    Args:
        answers: Answers of the pool; None for those of this engine alone.

    Attributes:
        rates: Learned step times, near the prior where there is no evidence.
    """

    __slots__ = (
        "_answers",
        "_batch_limit",
        "_counter_reader",
        "_fastest",
        "_has_spans",
        "_is_counting",
        "_is_idle",
        "_is_tried",
        "_last",
        "_loads",
        "_look_alikes",
        "_off",
        "_output_reader",
        "_pace",
        "_prefill_counter",
        "_prior",
        "_reload_time",
        "_row_at",
        "_rows",
        "_seconds",
        "_shown",
        "_span_reader",
        "_squares",
        "_start",
        "_steps",
        "_weight",
        "_windows",
        "rates",
    )

    def __init__(
        self, prior: StepTimeModel = DEFAULT_STEP_TIMES, answers: AnswerTokens | None = None
    ) -> None:
        self.rates = msgspec.structs.replace(prior, evidence=0.0)
        self._answers = AnswerTokens(prior.output_tokens) if answers is None else answers
        self._prior = self._fastest = step_time_values.unknowns_of(prior)
        self._weight = _WEAK
        self._look_alikes = 0.0
        self._begin_life()
        self._is_counting = self._is_idle = self._is_tried = False
        self._has_spans = False
        self._off = 0.0  # of the last row, if it was unusual
        # Sums of the windows, fading: seconds, counts of each unknown, and the windows themselves.
        self._seconds = self._windows = 0.0
        self._rows = [0.0] * len(step_time_values.BOUNDS)
        self._loads: deque[float] = deque(maxlen=_MOST_LOADS)
        self._squares = RecursiveLeastSquares(step_time_values.BOUNDS)
        self._row_at: float | None = None  # end of the last row
        self._last: Load | None = None
        self._steps: float | None = None  # at the last scrape
        self._shown = False  # by the engine, how long adapters take
        self._pace = 1.0  # seconds of this engine for one of the prior, by its answers

    def _begin_life(self) -> None:
        """Read the counters of another engine process."""
        self._start: WorkCounters | None = None
        self._counter_reader = engine_counters.CounterReader()
        self._prefill_counter = engine_counters.PrefillCounter()
        self._span_reader = engine_counters.SpanReader()
        self._output_reader = engine_counters.OutputReader()
        self._batch_limit = engine_counters.BatchLimitEstimator()
        self._reload_time = ReloadTimeEstimator()

    def set_prior(
        self,
        prior: StepTimeModel,
        fastest: StepTimeModel | None = None,
        *,
        look_alikes: float = 0.0,
    ) -> None:
        """Take another prior.

        Args:
            prior: Step times that engines of the pool have shown, its evidence how many; ignored
                while that is none, or none but this one.
            fastest: Those of the fastest one, None for the prior: what counts while this engine is
                unexplored.
            look_alikes: Engines behind the prior that look like this one (count).
        """
        if prior.evidence > bool(self.rates.evidence):
            self._prior = step_time_values.unknowns_of(prior)
            self._fastest = (
                self._prior if fastest is None else step_time_values.unknowns_of(fastest)
            )
            self._weight = _STRONG
            self._look_alikes = look_alikes

    def set_pace(self, slowness: float, answers: float, *, is_tried: bool) -> bool:
        """Take in how long answers take; that counts until the engine has shown step times.

        Args:
            slowness: Seconds of this engine for one second of the prior.
            answers: Answers that show it (count). Each is taken to differ by as much as it takes.
            is_tried: Whether it has requests of ours, or had some lately.

        Returns:
            True if rates change by it.
        """
        pace = step_time_values.shrunk(slowness, 1.0, noise=1.0 / (1.0 + answers))
        is_tried, self._is_tried = self._is_tried, is_tried
        if self.rates.evidence:
            return False
        if abs(pace - self._pace) <= _PACE_CHANGE * self._pace:
            return is_tried != self._is_tried
        self._pace = pace
        return True

    def update(
        self,
        load: Load,
        *,
        ran: Iterable[str] = (),
        idle: IdleTime = IdleTime(),  # noqa: B008 - a tuple
        shared: float = 0.0,
        is_alone: bool = False,
        is_held_up: bool = False,
    ) -> None:
        """Record the next scrape.

        Args:
            load: Its `at` must not be before the last one's.
            shared: Tokens of context that running requests have from each other's blocks: the cache
                holds them once, and every iteration reads them once for each.
            is_alone: Whether the requests of others are few. If they are not, what ran while nothing
                of ours was there is unknown, and such a window does not count.
            is_held_up: Whether a request waits there for longer than the prompts before it take, and
                neither for memory nor for an adapter.
        """
        last, self._last = self._last, load
        if last is not None and engine_counters.engine_restarted(last, load):
            self._begin_life()
            self.rates = msgspec.structs.replace(self.rates, reload_s=None, copied_ratio=0.0)
            last = None
        self._learn_output(load.counters)
        self._learn_adapters(last, load)
        self.rates = self._reload_time.update(load, self.rates)
        # Without evidence it is a guess how long prompts take, and an engine may hang.
        moved = last is not None and load.counters != last.counters
        is_held_up = is_held_up and moved and self.rates.evidence > 0.0
        limit = self._batch_limit.update(load, is_held_up=is_held_up)
        if limit != self.rates.max_num_seqs:
            self.rates = msgspec.structs.replace(self.rates, max_num_seqs=limit)
        is_part = self._prefill_counter.update(load) and not load.adapters
        window_s = _PART_WINDOW_S if is_part else _WINDOW_S
        here = self._counter_reader.read(load, ran=ran, idle=idle, is_alone=is_alone, shared=shared)
        self._is_counting, self._is_idle = here is not None, not load.running
        # In the middle of an iteration its time has passed and its tokens do not count yet: windows
        # begin and end just after one, or where none is under way.
        moved = here is not None and here.steps != self._steps
        self._steps = None if here is None else here.steps
        start = self._start
        if start is not None and (here is None or not start.can_begin(here)):
            start = self._start = None
        if here is None or not (load.running or is_alone):
            self._start = None
        elif start is None:
            self._start = here if moved or not load.running else None
        elif moved or not load.running:
            steps = here.steps_since(start)
            if _busy_s(start, here) >= window_s and steps >= _WINDOW_STEPS:
                self._start = here
                self._row(start, here)
                self._span_reader.skip(load)
        if start is None or self._start is None:  # no window goes on
            self._learn_spans(load)
        if load.running and here is not None and here.context is not None:
            mean = here.context / max(1.0, load.running)
            self.rates = msgspec.structs.replace(self.rates, context_tokens=mean)

    def _learn_spans(self, load: Load) -> None:
        """Add rows of what the engine did since the last row, where no window shows it."""
        for (ran, computed, generated), seconds in self._span_reader.read(load):
            self._has_spans = True
            row = (ran, computed, generated, generated * self.rates.context_tokens, 0.0)
            self._learn_row(row, seconds, at=load.at, began=load.at - seconds)

    def _row(self, start: WorkCounters, end: WorkCounters) -> None:
        seconds = _busy_s(start, end) - max(0.0, end.loading_s - start.loading_s)
        steps = end.steps_since(start)
        if steps < 1 or seconds <= 0:
            return
        generated = end.generated - start.generated
        if start.context is None or end.context is None or start.idle_s != end.idle_s:
            context = generated * self.rates.context_tokens
        else:
            context = 0.5 * (start.context + end.context) * steps
        computed = max(0.0, end.computed - start.computed)
        loads = end.loads - start.loads
        row = (steps, computed, generated, context, loads)
        self._learn_row(row, seconds, at=end.at, began=end.at - _busy_s(start, end))

    def _learn_row(self, row: Sequence[float], seconds: float, *, at: float, began: float) -> None:
        """Take in a row that took so many seconds.

        Args:
            at: Its end.
            began: Begin of its work, without the idle time before it.
        """
        bounds = step_time_values.BOUNDS
        if seconds < sum([low * count for (low, _), count in zip(bounds, row, strict=True)]):
            return  # counters of another process, as behind an address of several
        most = sum([high * count for (_, high), count in zip(bounds, row, strict=True)])
        seconds = min(seconds, step_time_values.SLACK * most)
        foretold = zip(step_time_values.unknowns_of(self.rates), row, strict=True)
        past_share = self._share_kept(began)
        self._weigh(
            row,
            seconds,
            seconds - sum(rate * count for rate, count in foretold),
            past_share=past_share,
        )
        self._row_at = at
        evidence = self.rates.evidence * _KEEP * past_share + row[0]
        solution = self._squares.solve(self._anchored, self._weight)
        if self._loading_known:
            solution[_LOADING] = self.rates.adapter_load_s if self._shown else median(self._loads)
        self.rates = msgspec.structs.replace(
            step_time_values.from_unknowns(solution, self.rates),
            evidence=evidence,
        )

    def _freshness(self, now: float) -> float:
        """Share of what was learned that still stands: 1 at the last row, 0 long after it."""
        if self._row_at is None:
            return 1.0
        return math.exp2(-max(0.0, now - self._row_at - _FRESH_S) / _HALVES_S)

    def _share_kept(self, now: float) -> float:
        """Share of earlier rows that a new one leaves because of their age, 0..1.

        While what they have shown stands by a share f, they weigh f against 1 - f of the new one.

        Args:
            now: Begin of the work of the new row, without the idle time before it.
        """
        fresh = self._freshness(now)
        past = (1.0 - fresh) * self._windows
        return min(1.0, fresh / past) if past else 1.0

    def _weigh(
        self, row: Sequence[float], seconds: float, rest: float, *, past_share: float
    ) -> None:
        """Add a row, weighted by its distance from the prediction.

        Args:
            rest: Seconds beyond the prediction.
            past_share: Share of the rows before it that their age leaves.
        """
        off = rest / seconds
        usual = abs(off) <= _USUAL
        changed = not usual and off * self._off > 0.0
        keep, weight = _KEEP_LESS if changed else _KEEP, 1.0
        loads = row[_LOADING]
        if loads:
            low, high = step_time_values.BOUNDS[_LOADING]
            load_s = self.rates.adapter_load_s + rest / loads
            self._loads.append(min(high, max(low, load_s)))
            keep, weight = _KEEP * past_share, 1.0 if usual else _USUAL / abs(off)
        else:
            keep *= past_share
            self._seconds = keep * self._seconds + seconds
            self._windows = keep * self._windows + 1.0
            self._rows = [
                keep * before + count for before, count in zip(self._rows, row, strict=True)
            ]
        self._off = 0.0 if usual or loads else off
        self._squares.add(row, seconds, keep=keep, weight=weight)

    @property
    def slowness(self) -> float:
        """Seconds of this engine for one second of the prior; 1 without windows.

        One number is known after a few windows, where the rows of an engine several times slower
        than its pool are too small beside the prior to move five.
        """
        if not self._seconds:
            return 1.0
        return self._seconds / step_time_values.seconds_of(self._prior, self._rows)

    @property
    def rates_at_pool_speed(self) -> StepTimeModel:
        """Step times as an engine of the speed of the prior would have them.

        The mean of these is the next prior. What rows do not tell apart is the prior times the
        slowness: with that in the mean each prior would exceed the one before.
        """
        return step_time_values.scaled(self.rates, 1.0 / self._likely(self.slowness, 1.0))

    @property
    def is_unexplored(self) -> bool:
        """True if nothing shows the speed of the engine yet, and nothing runs there as far as known.

        It is taken to be as fast as the fastest, and faster than that before its first request, so
        that it gets one and shows whether it is.
        """
        if self.rates.evidence or self.is_paced:
            return False
        return self._is_idle if self._is_counting else not self._is_tried

    @property
    def is_paced(self) -> bool:
        """True if the answers of an engine without step times say that it is unlike its pool."""
        return self._pace != 1.0 and not self.rates.evidence

    def _likely(self, shown: float, prior: float) -> float:
        """Estimate between a prior and what was shown: the prior where windows err by as much.

        Engines of a pool mostly are alike, and a difference that is noise would send one of them
        more than its share.
        """
        if not self._windows:
            return prior
        return step_time_values.shrunk(shown, prior, noise=_USUAL * _USUAL / self._windows)

    @property
    def _anchored(self) -> Sequence[float]:
        """The prior at the speed of this engine, a weak default of that speed behind it.

        The default keeps what no engine of the pool tells apart from going anywhere.
        """
        prior, slowness = self._prior, self._likely(self.slowness, 1.0)
        if self._weight is _WEAK and not self._has_spans:
            return prior
        if self._weight is _WEAK:
            return [*(slowness * value for value in prior[:_LOADING]), prior[_LOADING]]
        usual = step_time_values.unknowns_of(DEFAULT_STEP_TIMES)
        rows = self._rows if self._seconds else _TYPICAL_ROW
        speed = step_time_values.seconds_of(prior, rows) / step_time_values.seconds_of(usual, rows)
        share = _WEAK / _STRONG
        return [
            *(
                slowness * (theirs + share * (speed * ours - theirs))
                for theirs, ours in zip(prior[:_LOADING], usual, strict=False)
            ),
            prior[_LOADING],
        ]

    @property
    def pooled_rates(self) -> StepTimeModel:
        """Learned step times as far as they differ from the pool's, with the pool's answers."""
        own = msgspec.structs.replace(self.rates, output_tokens=self._answers.mean)
        if self._weight is _WEAK:
            return step_time_values.scaled(own, self._pace) if self.is_paced else own
        if self.is_unexplored:
            fastest = step_time_values.from_unknowns(self._fastest, own)
            if self._is_tried:
                return fastest
            return step_time_values.scaled(
                fastest, 1.0 - (1.0 - _UNTRIED) / max(1.0, self._look_alikes)
            )
        if not own.evidence:
            return step_time_values.scaled(
                step_time_values.from_unknowns(self._prior, own), self._pace
            )
        fresh = 1.0 if self._last is None else self._freshness(self._last.at)
        settled = [
            there + fresh * (self._likely(shown, anchor) - there)
            for shown, anchor, there in zip(
                step_time_values.unknowns_of(own), self._anchored, self._prior, strict=True
            )
        ]
        settled[_LOADING] = own.adapter_load_s if self._loading_known else self._prior[_LOADING]
        return step_time_values.from_unknowns(settled, own)

    @property
    def due_rates(self) -> StepTimeModel:
        """The same, by which answers are due: of an engine without evidence those of the prior."""
        return (
            self.pooled_rates
            if self.rates.evidence
            else step_time_values.from_unknowns(self._prior, self.rates)
        )

    @property
    def _loading_known(self) -> bool:
        """True when adapter load times of this engine are known."""
        return self._shown or len(self._loads) >= _ENOUGH_LOADS

    def _learn_output(self, totals: EngineCounters) -> None:
        """Add generated tokens and finished requests to the answers of the pool."""
        output = self._output_reader.read(totals)
        if output is not None:
            self._answers.add(*output)
            self.rates = msgspec.structs.replace(self.rates, output_tokens=self._answers.mean)

    def _learn_adapters(self, last: Load | None, load: Load) -> None:
        """Running mean of seconds per adapter load, where the engine tells them."""
        seconds = None if last is None else engine_counters.adapter_load_s(last, load)
        if seconds is not None:
            mean = self.rates.adapter_load_s + _ALPHA * (seconds - self.rates.adapter_load_s)
            self.rates = msgspec.structs.replace(self.rates, adapter_load_s=mean)
            self._shown = True


def _busy_s(start: WorkCounters, end: WorkCounters) -> float:
    """Seconds of a window in which there was something to do."""
    return (end.at - start.at) - (end.idle_s - start.idle_s)
