"""How fast an engine is, learnt from its own counters.

An iteration takes `step_s + prefill_s P + decode_s B` seconds (engines report 5.1). Between two
scrapes of a busy engine that adds up to

    elapsed = step_s S + prefill_s P + decode_s G

with S iterations, P prompt tokens computed and G tokens generated, all of which are differences of
counters. Windows of about a second are the rows of a least squares problem that forgets: its
normal equations are nine numbers. What the engine has not shown yet stays near the prior, which is
what the rest of the pool has shown.
"""

from __future__ import annotations

import msgspec

from extproc.endpoint import DEFAULT_RATES, Load, Rates, Totals

#: Shortest window that is a row (s): several iterations, and counters move by whole iterations.
_WINDOW_S = 0.5

#: Share of the past that a new row leaves. Some fifty rows count, about a minute of load.
_KEEP = 0.98

#: Weight of a prior against rows, whose squares are below 1 each: of one that nobody has shown, and
#: of what the rest of the pool has shown. What the rows do not tell apart stays with the prior:
#: engines of a pool mostly are alike, and a difference that is noise would send one of them more
#: than its share.
_WEAK, _STRONG = 0.05, 3.0

#: Share by which an engine must differ from the pool to count as different.
_ALIKE = 0.3

#: Share of a new mean in the running one.
_ALPHA = 0.2

#: Bounds of `step_s`, `prefill_s` and `decode_s`: beyond them a row was not what it seemed.
_BOUNDS = ((1e-4, 2.0), (1e-7, 1e-2), (1e-7, 5e-2))


class _Counts(msgspec.Struct, frozen=True, gc=False):
    """The counters a row is made of, all known."""

    at: float
    steps: float
    computed: float
    generated: float


class Learner:
    """Learns the rates of one engine.

    Args:
        prior: What to believe until the engine shows otherwise.
    """

    __slots__ = ("_last", "_matrix", "_outputs", "_prior", "_start", "_vector", "_weight", "rates")

    def __init__(self, prior: Rates = DEFAULT_RATES) -> None:
        self.rates = msgspec.structs.replace(prior, evidence=0.0)
        self._prior = (prior.step_s, prior.prefill_s, prior.decode_s)
        self._weight = _WEAK
        self._matrix = [0.0] * 6  # upper triangle, row by row
        self._vector = [0.0] * 3
        self._start: _Counts | None = None
        self._last: Load | None = None
        self._outputs: Totals | None = None

    def lean(self, prior: Rates) -> None:
        """Take another prior.

        Args:
            prior: What several engines of the pool have shown, from `pooled`; nothing happens
                while it has no evidence.
        """
        if prior.evidence:
            self._prior = (prior.step_s, prior.prefill_s, prior.decode_s)
            self._weight = _STRONG

    def feed(self, load: Load) -> None:
        """Take in the next scrape.

        Args:
            load: Its `at` must not be before the last one's.
        """
        last, self._last = self._last, load
        if last is not None and restarted(last, load):
            self._start = None
            self._outputs = None
            last = None
        self._learn_output(load.totals)
        self._learn_adapters(last, load)
        here = _counts(load)
        start = self._start
        if here is None or not load.running:
            self._start = None
        elif start is None:
            self._start = here
        elif here.at - start.at >= _WINDOW_S:
            self._start = here
            self._row(start, here)

    def _row(self, start: _Counts, end: _Counts) -> None:
        seconds = end.at - start.at
        row = (
            end.steps - start.steps,
            max(0.0, end.computed - start.computed),
            end.generated - start.generated,
        )
        if row[0] < 1:
            return
        # Every row weighs the same, however long its window: divide by its seconds.
        s, p, g = (count / seconds for count in row)
        m, v = self._matrix, self._vector
        for at, square in enumerate((s * s, s * p, s * g, p * p, p * g, g * g)):
            m[at] = m[at] * _KEEP + square
        for at, one in enumerate((s, p, g)):
            v[at] = v[at] * _KEEP + one
        evidence = self.rates.evidence * _KEEP + row[0]
        step_s, prefill_s, decode_s = self._solve()
        self.rates = msgspec.structs.replace(
            self.rates, step_s=step_s, prefill_s=prefill_s, decode_s=decode_s, evidence=evidence
        )

    def _solve(self) -> tuple[float, float, float]:
        """Least squares with the prior as a few more rows; in units of the prior.

        In those units all three unknowns are near 1, so one weight suits them all. An unknown that
        comes out of bounds is set to its bound and the others are solved again.
        """
        x0, x1, x2 = self._prior
        weight = self._weight
        scale = (x0, x1, x2)
        m = self._matrix
        a = [
            [m[0] * x0 * x0 + weight, m[1] * x0 * x1, m[2] * x0 * x2],
            [m[1] * x0 * x1, m[3] * x1 * x1 + weight, m[4] * x1 * x2],
            [m[2] * x0 * x2, m[4] * x1 * x2, m[5] * x2 * x2 + weight],
        ]
        b = [self._vector[at] * scale[at] + weight for at in range(3)]
        fixed: dict[int, float] = {}
        while True:
            found = _solved(a, b, fixed)
            outside = [
                at
                for at in range(3)
                if at not in fixed and not _BOUNDS[at][0] <= found[at] * scale[at] <= _BOUNDS[at][1]
            ]
            if not outside:
                step_s, prefill_s, decode_s = (
                    min(high, max(low, found[at] * scale[at]))
                    for at, (low, high) in enumerate(_BOUNDS)
                )
                return step_s, prefill_s, decode_s

            for at in outside:
                low, high = _BOUNDS[at]
                fixed[at] = min(high, max(low, found[at] * scale[at])) / scale[at]

    @property
    def settled(self) -> Rates:
        """What was learnt where it differs from the pool, and the pool's where it hardly does."""
        own = self.rates
        if self._weight is _WEAK:
            return own
        step_s, prefill_s, decode_s = (
            theirs if abs(ours - theirs) <= _ALIKE * theirs else ours
            for ours, theirs in zip(
                (own.step_s, own.prefill_s, own.decode_s), self._prior, strict=True
            )
        )
        return msgspec.structs.replace(own, step_s=step_s, prefill_s=prefill_s, decode_s=decode_s)

    def _learn_output(self, totals: Totals) -> None:
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
        old, new = last.totals, load.totals
        if None in (old.adapter_loads, old.adapter_load_s, new.adapter_loads, new.adapter_load_s):
            return
        loads = (new.adapter_loads or 0.0) - (old.adapter_loads or 0.0)
        seconds = (new.adapter_load_s or 0.0) - (old.adapter_load_s or 0.0)
        if loads < 1 or seconds < 0:
            return
        mean = self.rates.adapter_load_s + _ALPHA * (seconds / loads - self.rates.adapter_load_s)
        self.rates = msgspec.structs.replace(self.rates, adapter_load_s=mean)


def pooled(rates: list[Rates]) -> Rates:
    """What to expect of an engine nobody knows: the mean of those that showed something.

    Its `evidence` is how many those are if there are several, else 0: one engine is no pool.
    """
    shown = [one for one in rates if one.evidence]
    if not shown:
        return DEFAULT_RATES
    count = len(shown)
    return Rates(
        step_s=sum(one.step_s for one in shown) / count,
        prefill_s=sum(one.prefill_s for one in shown) / count,
        decode_s=sum(one.decode_s for one in shown) / count,
        adapter_load_s=sum(one.adapter_load_s for one in shown) / count,
        output_tokens=sum(one.output_tokens for one in shown) / count,
        evidence=float(count) if count > 1 else 0.0,
    )


def restarted(before: Load, after: Load) -> bool:
    """Whether the engine is another process than at the last scrape.

    Args:
        before: The scrape before.
        after: The last one.
    """
    if before.started_at is not None and after.started_at is not None:
        # Whole seconds: an exporter may round.
        return after.started_at > before.started_at + 1.0
    pairs = (
        (before.prefix_queries, after.prefix_queries),
        (before.totals.generated_tokens, after.totals.generated_tokens),
    )
    return any(old is not None and new is not None and new < old for old, new in pairs)


def _counts(load: Load) -> _Counts | None:
    """The counters of a row; None where the engine does not have them all."""
    totals = load.totals
    if totals.steps is None or totals.step_tokens is None or totals.generated_tokens is None:
        return None
    return _Counts(
        load.at, totals.steps, totals.step_tokens - totals.generated_tokens, totals.generated_tokens
    )


def _solved(a: list[list[float]], b: list[float], fixed: dict[int, float]) -> list[float]:
    """Solve three symmetric equations by elimination, some unknowns being given."""
    free = [at for at in range(3) if at not in fixed]
    rows = [
        [a[i][j] for j in free] + [b[i] - sum(a[i][j] * x for j, x in fixed.items())] for i in free
    ]
    size = len(free)
    for i in range(size):
        pivot = rows[i][i]
        for k in range(i + 1, size):
            factor = rows[k][i] / pivot
            rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    found = [0.0] * 3
    for at, value in fixed.items():
        found[at] = value
    for i in reversed(range(size)):
        known = sum(rows[i][j] * found[free[j]] for j in range(i + 1, size))
        found[free[i]] = (rows[i][size] - known) / rows[i][i]
    return found
