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

Step time estimators of a pool: per engine, with the mean of the pool as prior.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from extproc.endpoint import DEFAULT_STEP_TIMES, EngineCounters, Load, StepTimeModel
from extproc.pool.engine_counters import CounterReader, WorkCounters

#: Shortest window that is a row (s), and fewest iterations in it: counters move by whole ones, and
#: with long prompts one takes a second.
_WINDOW_S, _WINDOW_STEPS = 0.5, 4

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

#: Share by which an engine must differ from the pool to count as different.
_ALIKE = 0.3

#: Share by which the time of a window may differ from what was foretold and still be usual.
_USUAL = 0.25

#: Windows with adapter loads remembered, and wanted before their median counts. Loads are seen a
#: scrape late or early now and then, so some windows say nonsense.
_MOST_LOADS, _ENOUGH_LOADS = 9, 3

#: Share of a new mean in the running one.
_ALPHA = 0.2

#: Bounds of a, b, c, d and l: beyond them a row was not what it seemed.
_BOUNDS = ((1e-4, 2.0), (1e-7, 1e-2), (1e-7, 5e-2), (1e-9, 1e-4), (1e-3, 60.0))

#: Where l stands among them.
_LOADING = 4


class StepTimeEstimator:
    """Estimates the step times of one engine.

    Args:
        prior: Step times until the engine shows others.

    Attributes:
        rates: Learned step times, near the prior where there is no evidence.
    """

    __slots__ = (
        "_counter_reader",
        "_last",
        "_loads",
        "_off",
        "_outputs",
        "_prior",
        "_prior_seconds",
        "_seconds",
        "_shown",
        "_squares",
        "_start",
        "_steps",
        "_weight",
        "rates",
    )

    def __init__(self, prior: StepTimeModel = DEFAULT_STEP_TIMES) -> None:
        self.rates = msgspec.structs.replace(prior, evidence=0.0)
        self._prior = _unknowns(prior)
        self._weight = _WEAK
        self._counter_reader = CounterReader()
        self._off = 0.0  # of the last row, if it was unusual
        self._seconds = self._prior_seconds = 0.0  # of the rows, and by the prior
        self._loads: deque[float] = deque(maxlen=_MOST_LOADS)
        self._squares = RecursiveLeastSquares(_BOUNDS)
        self._start: WorkCounters | None = None
        self._last: Load | None = None
        self._outputs: EngineCounters | None = None
        self._steps: float | None = None  # at the last scrape
        self._shown = False  # by the engine, how long adapters take

    def set_prior(self, prior: StepTimeModel) -> None:
        """Take another prior.

        Args:
            prior: Step times that several engines of the pool have shown, from `pool_mean`; ignored
                while it has no evidence.
        """
        if prior.evidence:
            self._prior = _unknowns(prior)
            self._weight = _STRONG

    def update(
        self, load: Load, *, ran: Iterable[str] = (), idled: int = 0, shared: float = 0.0
    ) -> None:
        """Take in the next scrape.

        Args:
            load: Its `at` must not be before the last one's.
            ran: Adapters of requests that ended since the last scrape.
            idled: How often nothing of ours was left on the engine (count, ever). A window in which
                that grew has time in which nothing ran.
            shared: Tokens of context that running requests have from each other's blocks: the cache
                holds them once, and every iteration reads them once for each.
        """
        last, self._last = self._last, load
        if last is not None and engine_restarted(last, load):
            self._start = None
            self._outputs = None
            self._counter_reader = CounterReader()
            last = None
        self._learn_output(load.counters)
        self._learn_adapters(last, load)
        here = self._counter_reader.read(load, ran=ran, idled=idled, shared=shared)
        # In the middle of an iteration its time has passed and its tokens do not count yet: windows
        # begin and end just after one.
        moved = here is not None and here.steps != self._steps
        self._steps = None if here is None else here.steps
        start = self._start
        if start is not None and (here is None or start.idled != here.idled):
            start = self._start = None
        if here is None or not load.running:
            self._start = None
        elif moved and start is None:
            self._start = here
        elif moved and start is not None:
            steps = here.steps - start.steps
            if here.at - start.at >= _WINDOW_S and steps >= _WINDOW_STEPS:
                self._start = here
                self._row(start, here)
        if load.running and here is not None and here.context is not None:
            mean = here.context / max(1.0, load.running)
            self.rates = msgspec.structs.replace(self.rates, context_tokens=mean)

    def _row(self, start: WorkCounters, end: WorkCounters) -> None:
        seconds = end.at - start.at - max(0.0, end.loading_s - start.loading_s)
        steps = end.steps - start.steps
        if steps < 1 or seconds <= 0:
            return
        generated = end.generated - start.generated
        if start.context is None or end.context is None:
            context = generated * self.rates.context_tokens
        else:
            context = 0.5 * (start.context + end.context) * steps
        computed = max(0.0, end.computed - start.computed)
        loads = end.loads - start.loads
        row = (steps, computed, generated, context, loads)
        foretold = zip(_unknowns(self.rates), row, strict=True)
        self._weigh(row, seconds, seconds - sum(rate * count for rate, count in foretold))
        evidence = self.rates.evidence * _KEEP + steps
        solution = self._squares.solve(self._anchored, self._weight)
        if self._loading_known:
            solution[_LOADING] = self.rates.adapter_load_s if self._shown else median(self._loads)
        self.rates = msgspec.structs.replace(
            _with_unknowns(solution, self.rates), evidence=evidence
        )

    def _weigh(self, row: Sequence[float], seconds: float, rest: float) -> None:
        """Add a row, weighted by its distance from the prediction.

        Args:
            row: Counts.
            seconds: The time they took.
            rest: Seconds beyond the prediction.
        """
        off = rest / seconds
        usual = abs(off) <= _USUAL
        changed = not usual and off * self._off > 0.0
        keep, weight = _KEEP_LESS if changed else _KEEP, 1.0
        loads = row[_LOADING]
        if loads:
            low, high = _BOUNDS[_LOADING]
            load_s = self.rates.adapter_load_s + rest / loads
            self._loads.append(min(high, max(low, load_s)))
            keep, weight = _KEEP, 1.0 if usual else _USUAL / abs(off)
        else:
            prior_s = sum(rate * count for rate, count in zip(self._prior, row, strict=True))
            self._seconds = keep * self._seconds + seconds
            self._prior_seconds = keep * self._prior_seconds + prior_s
        self._off = 0.0 if usual or loads else off
        self._squares.add(row, seconds, keep=keep, weight=weight)

    @property
    def _slowness(self) -> float:
        """Seconds of this engine for one second of the prior; 1 while they are alike.

        One number is known after a few windows, where the rows of an engine several times slower
        than its pool are too small beside the prior to move five.
        """
        if not self._prior_seconds:
            return 1.0
        ratio = self._seconds / self._prior_seconds
        return ratio if max(ratio, 1.0 / ratio) > 1.0 + _ALIKE else 1.0

    @property
    def _anchored(self) -> Sequence[float]:
        """The prior at the speed of this engine, a weak default behind it.

        Where rows do not tell unknowns apart, engines that lean on their mean would drift together:
        simulated H100 with long prompts came to eleven times their time per sequence.
        """
        is_strong = self._weight is _STRONG
        share, slowness = (_WEAK / _STRONG, self._slowness) if is_strong else (0.0, 1.0)
        usual = _unknowns(DEFAULT_STEP_TIMES)[:_LOADING]
        return [
            *(
                slowness * (theirs + share * (ours - theirs))
                for theirs, ours in zip(self._prior, usual, strict=False)
            ),
            self._prior[_LOADING],
        ]

    @property
    def pooled_rates(self) -> StepTimeModel:
        """Learned step times where they differ from the pool's, else the pool's."""
        own = self.rates
        if self._weight is _WEAK:
            return own
        if not own.evidence:
            return _with_unknowns(self._prior, own)
        settled = [
            theirs if abs(ours - theirs) <= _ALIKE * theirs else ours
            for ours, theirs in zip(_unknowns(own), self._prior, strict=True)
        ]
        if not self._loading_known:
            settled[_LOADING] = self._prior[_LOADING]
        return _with_unknowns(settled, own)

    @property
    def _loading_known(self) -> bool:
        """True when adapter load times of this engine are known."""
        return self._shown or len(self._loads) >= _ENOUGH_LOADS

    def _learn_output(self, totals: EngineCounters) -> None:
        """Running mean of generated tokens per finished request."""
        if totals.finished is None or totals.generated_tokens is None:
            return
        before = self._outputs
        if before is None or before.finished is None or before.generated_tokens is None:
            self._outputs = totals
            return
        finished = totals.finished - before.finished
        generated = totals.generated_tokens - before.generated_tokens
        # Tokens come before their request is finished: ten of them make the edges small.
        if finished < 10 or generated <= 0:
            return
        self._outputs = totals
        mean = generated / finished
        old = self.rates.output_tokens
        new = mean if not self.rates.evidence else old + _ALPHA * (mean - old)
        self.rates = msgspec.structs.replace(self.rates, output_tokens=max(1.0, new))

    def _learn_adapters(self, last: Load | None, load: Load) -> None:
        """Running mean of seconds per adapter load, where the engine tells them."""
        if last is None:
            return
        old, new = last.counters, load.counters
        if None in (old.adapter_loads, old.adapter_load_s, new.adapter_loads, new.adapter_load_s):
            return
        loads = (new.adapter_loads or 0.0) - (old.adapter_loads or 0.0)
        seconds = (new.adapter_load_s or 0.0) - (old.adapter_load_s or 0.0)
        if loads < 1 or seconds < 0:
            return
        mean = self.rates.adapter_load_s + _ALPHA * (seconds / loads - self.rates.adapter_load_s)
        self.rates = msgspec.structs.replace(self.rates, adapter_load_s=mean)
        self._shown = True


def pool_mean(rates: Sequence[StepTimeModel]) -> StepTimeModel:
    """Mean step times of the engines with evidence: the prior of a new engine.

    Its `evidence` is how many those are if there are several, else 0: one engine is no pool.
    """
    shown = [model for model in rates if model.evidence]
    if not shown:
        return DEFAULT_STEP_TIMES
    count = len(shown)
    means = [sum(column) / count for column in zip(*map(_unknowns, shown), strict=True)]
    facts = StepTimeModel(
        output_tokens=sum(model.output_tokens for model in shown) / count,
        context_tokens=sum(model.context_tokens for model in shown) / count,
        evidence=float(count) if count > 1 else 0.0,
    )
    return _with_unknowns(means, facts)


def engine_restarted(before: Load, after: Load) -> bool:
    """True if the engine is another process than at the last scrape.

    Args:
        before: The scrape before.
        after: The last one.
    """
    if before.started_at is not None and after.started_at is not None:
        # Whole seconds: an exporter may round.
        return after.started_at > before.started_at + 1.0
    pairs = (
        (before.prefix_queries, after.prefix_queries),
        (before.counters.generated_tokens, after.counters.generated_tokens),
    )
    return any(old is not None and new is not None and new < old for old, new in pairs)


def _unknowns(rates: StepTimeModel) -> tuple[float, float, float, float, float]:
    """The numbers a, b, c, d and l in rates."""
    return (
        rates.step_s,
        rates.prefill_s,
        rates.decode_s,
        rates.context_s,
        rates.adapter_load_s,
    )


def _with_unknowns(unknowns: Sequence[float], facts: StepTimeModel) -> StepTimeModel:
    """Rates of these numbers, everything else taken from `facts`."""
    step_s, prefill_s, decode_s, context_s, adapter_load_s = unknowns
    return msgspec.structs.replace(
        facts,
        step_s=step_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        context_s=context_s,
        adapter_load_s=adapter_load_s,
    )


#: Seconds for which what the pool has shown stands: to work it out is a walk over all members.
_STANDS_S = 1.0


class PoolStepTimeEstimators:
    """Step time estimators of one pool, by incarnation. Mutable; owned by `PoolStore`."""

    __slots__ = ("_at", "_by_incarnation", "_pooled")

    def __init__(self) -> None:
        self._by_incarnation: dict[int, StepTimeEstimator] = {}
        self._at = -math.inf
        self._pooled = DEFAULT_STEP_TIMES

    def on_endpoint_added(self, incarnation: int) -> StepTimeEstimator:
        """Start the estimator of a new endpoint at the mean of the pool."""
        learner = self._by_incarnation[incarnation] = StepTimeEstimator(self._now())
        return learner

    def on_endpoint_removed(self, incarnation: int) -> None:
        """Drop the estimator of an endpoint."""
        del self._by_incarnation[incarnation]

    def with_pool_prior(self, incarnation: int, now: float) -> StepTimeEstimator:
        """Estimator of an endpoint, its prior the pool mean, at most a second old."""
        if now - self._at >= _STANDS_S:
            self._at, self._pooled = now, self._now()
        learner = self._by_incarnation[incarnation]
        learner.set_prior(self._pooled)
        return learner

    def _now(self) -> StepTimeModel:
        return pool_mean([learner.rates for learner in self._by_incarnation.values()])


class RecursiveLeastSquares:
    """Unknowns x of rows `total = x . row`, near a prior while the rows do not tell them apart.

    Its normal equations are a handful of numbers, whatever the number of rows.

    Args:
        bounds: Lowest and highest value of each unknown, in its unit.
    """

    __slots__ = ("_bounds", "_matrix", "_size", "_vector")

    def __init__(self, bounds: Sequence[tuple[float, float]]) -> None:
        self._bounds = bounds
        self._size = len(bounds)
        self._matrix = [[0.0] * self._size for _ in bounds]
        self._vector = [0.0] * self._size

    def add(self, row: Sequence[float], total: float, *, keep: float, weight: float) -> None:
        """Take in a row.

        Args:
            row: Factor of each unknown.
            total: Sum of the row, in any unit, above 0; its size does not change the weight of the
                row.
            keep: Share of the past that it leaves, 0..1.
        """
        vector = self._vector
        shares = [factor / total for factor in row]
        for i, (share, line) in enumerate(zip(shares, self._matrix, strict=True)):
            weighed = weight * share
            vector[i] = vector[i] * keep + weighed
            for j, other in enumerate(shares):
                line[j] = line[j] * keep + weighed * other

    def solve(self, prior: Sequence[float], weight: float) -> list[float]:
        """The unknowns, each within its bounds.

        The prior is one more row for each unknown, in units of the prior: there all unknowns are
        near 1, so that one weight suits them all. An unknown that comes out of bounds is set to its
        bound and the others are solved again; one that no row has is its prior.

        Args:
            prior: Values before any row, above 0, in the units of the unknowns.
            weight: Weight of the prior against rows, above 0.
        """
        estimate = list(prior)
        free = [at for at in range(self._size) if self._matrix[at][at]]
        fixed = [at for at in range(self._size) if not self._matrix[at][at]]
        while free:
            for at, value in zip(free, self._solved(free, fixed, estimate, weight), strict=True):
                estimate[at] = value * prior[at]
            outside = [
                at for at in free if not self._bounds[at][0] <= estimate[at] <= self._bounds[at][1]
            ]
            for at in outside:
                low, high = self._bounds[at]
                estimate[at] = min(high, max(low, estimate[at]))
            if not outside:
                break
            fixed = [*fixed, *outside]
            free = [at for at in free if at not in outside]
            for at in free:
                estimate[at] = prior[at]
        return estimate

    def _solved(
        self, free: Sequence[int], fixed: Sequence[int], estimate: Sequence[float], weight: float
    ) -> list[float]:
        """Solve for the free unknowns by Gaussian elimination.

        Args:
            free: Positions of the unknowns to solve for.
            fixed: Positions of the unknowns that keep their value.
            estimate: By position: the value of a fixed unknown, the unit of a free one.
            weight: Weight of the prior against rows, above 0.

        Returns:
            Values of the free unknowns in their units, aligned with `free`.
        """
        unit, rows = estimate, []
        for i in free:
            line = self._matrix[i]
            known = sum(line[j] * estimate[j] for j in fixed)
            rows.append(
                [
                    *[unit[i] * line[j] * unit[j] + (weight if i == j else 0.0) for j in free],
                    unit[i] * (self._vector[i] - known) + weight,
                ]
            )
        size = len(rows)
        for i in range(size):
            pivot = rows[i]
            for k in range(i + 1, size):
                factor = rows[k][i] / pivot[i]
                if factor:
                    rows[k] = [x - factor * y for x, y in zip(rows[k], pivot, strict=True)]
        values = [0.0] * size
        for i in reversed(range(size)):
            later = sum(rows[i][j] * values[j] for j in range(i + 1, size))
            values[i] = (rows[i][size] - later) / rows[i][i]
        return values
