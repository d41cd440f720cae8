"""Guard around a third-party plugin: time budget, exceptions, copies of inputs.

A plugin that overruns its time is bypassed for a while, and whatever it raises is counted. Python
cannot interrupt a plugin that runs: the first slow calls are paid for in full, and one that never
returns holds everything.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, TypeVar

import msgspec

from extproc.decision import CostResult, Decision
from extproc.endpoint import Candidate, Endpoint
from extproc.scheduling.framework import (
    BypassedError,
    MoveObserver,
    Observer,
    SchedulingContext,
    Signal,
    is_response_header,
)

ArgumentT = TypeVar("ArgumentT")

#: Value of a header (RFC 9110, 5.5): visible text.
_VALUE = re.compile(r"[\x20-\x7e]*")


class PluginExitError(Exception):
    """A plugin tried to end the process or its task; distinct from an intended exit."""


class GuardLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Time budget of a plugin, and the rule that bypasses it.

    Attributes:
        budget_s: Seconds one call may take. 2 ms are several decisions of the built-in plugins
            over 100 endpoints; all streams of the process wait that long.
        max_overruns: Overruns among the last calls that end in a bypass (count). 3, because a pause of
            the machine makes one, and hardly three in ten.
        calls: Window of calls in which overruns count.
        bypass_s: Seconds without it, until one call is tried. 30 keep a plugin that takes a whole
            second to 3 % of the time.
    """

    budget_s: float = 0.002
    max_overruns: int = 3
    calls: int = 10
    bypass_s: float = 30.0


class PluginCounters:
    """Counts of plugin faults, by role and kind; they outlive a configuration.

    Attributes:
        overruns: Calls above the budget.
        bypasses: Times a plugin was bypassed.
        exceptions: Calls that raised.
    """

    def __init__(self) -> None:
        self.overruns: Counter[tuple[str, str]] = Counter()
        self.bypasses: Counter[tuple[str, str]] = Counter()
        self.exceptions: Counter[tuple[str, str]] = Counter()

    def notify_committed(
        self, observers: Sequence[Observer], decision: Decision, now: float
    ) -> None:
        """Notify plugins of a committed decision; an exception does not fail the request."""
        for observer in observers:
            try:
                observer.on_committed(decision, now)
            except Exception:  # noqa: BLE001 - counted, and the request is decided already
                self._count_exception(observer)

    def notify_moved(
        self, observers: Sequence[Observer], decision: Decision, served: Endpoint, now: float
    ) -> None:
        """Notify plugins of the endpoint that answered in the place of the first one."""
        for observer in observers:
            try:
                if isinstance(observer, MoveObserver):
                    observer.on_moved(decision, served, now)
            except Exception:  # noqa: BLE001 - counted, and the request is answered already
                self._count_exception(observer)

    def _count_exception(self, observer: Observer) -> None:
        self.exceptions["observer", getattr(observer, "kind", type(observer).__name__)] += 1


class GuardFactory(msgspec.Struct, frozen=True):
    """Clock, counters and limits that the guards of one process share.

    Attributes:
        stopwatch: Seconds from any start, never going back.
        counts: Where facts go.
        limits: Limits of every plugin.
    """

    stopwatch: Callable[[], float]
    counts: PluginCounters
    limits: GuardLimits = GuardLimits()


class GuardedPlugin:
    """One plugin behind its guard; fits every role its plugin fits, but for those of built-in plugins.

    Those are `SaturationDetector` and `MoveObserver`. A call while the plugin is bypassed raises `BypassedError`, which the profile takes as it takes
    a plugin's own exceptions. The plugin is given tuples, so that it cannot reorder what others
    read, and its answers are copied into plain numbers and text, which it cannot change afterwards
    and which always print. The account of time is per instance and also kept in dry runs: it says
    what the plugin costs, not what was decided.
    """

    __slots__ = (
        "_answer_headers",
        "_bypassed_until",
        "_keys",
        "_on_committed",
        "_on_trial",
        "_recent",
        "extra_metrics",
        "guards",
        "kind",
        "max_num_of_endpoints",
        "needs",
        "plugin",
    )

    def __init__(self, plugin: Any, guards: GuardFactory) -> None:
        self.plugin = plugin
        self.kind: str = plugin.kind
        self.needs: frozenset[Signal] = plugin.needs
        #: See `framework.ExtraMetricReader`.
        self.extra_metrics: frozenset[str] = getattr(plugin, "extra_metrics", frozenset())
        self._answer_headers = getattr(plugin, "answer_headers", None)
        self._on_committed = getattr(plugin, "on_committed", None)
        self._keys = getattr(plugin, "keys", None)
        width = getattr(plugin, "max_num_of_endpoints", 1)
        #: See `SchedulerProfile.max_endpoints`.
        self.max_num_of_endpoints = width if isinstance(width, int) else 1
        self.guards = guards
        #: The last calls as bits, the youngest lowest; 1 is an overrun.
        self._recent = 0
        self._bypassed_until = float("-inf")
        self._on_trial = False

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """See `framework.Filter`."""
        plugin, inputs = self.plugin, tuple(candidates)
        return self._run("filter", context.now, lambda: list(plugin.filter(context, inputs)))

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """See `framework.Scorer`."""
        plugin, inputs = self.plugin, tuple(candidates)
        return self._run(
            "scorer", context.now, lambda: list(map(float, plugin.score(context, inputs)))
        )

    def cost(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> CostResult:
        """See `framework.CostModel`."""
        plugin, inputs = self.plugin, tuple(candidates)
        return self._run(
            "cost", context.now, lambda: _copy_cost(plugin.cost(context, inputs), len(inputs))
        )

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        """See `framework.Picker`."""
        plugin, inputs, sums = self.plugin, tuple(candidates), tuple(totals)
        return self._run(
            "picker",
            context.now,
            lambda: list(map(index, plugin.pick(context, inputs, sums, count=count))),
        )

    def on_committed(self, decision: Decision, now: float) -> None:
        """See `framework.Observer`; what it raises is counted and goes no further."""
        remember = self._on_committed
        if remember is None:
            return
        with contextlib.suppress(Exception):  # counted, and the request is decided already
            self._run("observer", now, lambda: remember(decision, now))

    def keys(self, context: SchedulingContext) -> Mapping[str, str]:
        """See `framework.RequestKeyProvider`."""
        remember = self._keys
        if remember is None:
            return {}
        return self._run("observer", context.now, lambda: _check_texts(dict(remember(context))))

    def answer_headers(
        self, context: SchedulingContext, chosen: Endpoint
    ) -> Sequence[tuple[str, str]]:
        """See `framework.ResponseHeaderProvider`."""
        provide = self._answer_headers
        if provide is None:
            return ()
        return self._run(
            "answerer", context.now, lambda: _check_headers(dict(provide(context, chosen)))
        )

    def _run(self, role: str, now: float, act: Callable[[], ArgumentT]) -> ArgumentT:
        """Let the plugin act, unless it is bypassed.

        Args:
            now: Monotonic seconds; what a bypass is timed by.

        Raises:
            BypassedError: It overran too often.
            PluginExitError: It tried to leave.
        """
        if now < self._bypassed_until:
            raise BypassedError
        guards = self.guards
        started = guards.stopwatch()
        try:
            return act()
        except KeyboardInterrupt:
            raise
        except Exception:
            guards.counts.exceptions[role, self.kind] += 1
            raise
        except BaseException as error:
            # SystemExit and the like would take the process or the stream along.
            guards.counts.exceptions[role, self.kind] += 1
            raise PluginExitError from error
        finally:
            overran = guards.stopwatch() - started > guards.limits.budget_s
            if overran or self._recent or self._on_trial:
                self._note(role, now, overran=overran)

    def _note(self, role: str, now: float, *, overran: bool) -> None:
        """Remember a call, and bypass the plugin after too many overruns."""
        counts, limits = self.guards.counts, self.guards.limits
        self._recent = (self._recent << 1 | overran) & ((1 << limits.calls) - 1)
        if overran:
            counts.overruns[role, self.kind] += 1
            if self._on_trial or self._recent.bit_count() >= limits.max_overruns:
                counts.bypasses[role, self.kind] += 1
                self._bypassed_until = now + limits.bypass_s
                self._recent = 0
                self._on_trial = True
                return
        self._on_trial = False


def _copy_cost(priced: CostResult, size: int) -> CostResult:
    """The same costs as plain numbers, each term as long as the costs."""
    costs = list(map(float, priced.costs))
    terms = [(str(name), list(map(float, numbers))) for name, numbers in priced.terms]
    if any(len(numbers) != size for numbers in (costs, *(numbers for _, numbers in terms))):
        raise ValueError(f"expected {size} costs and as many of each term")
    return CostResult(str(priced.name), str(priced.unit), costs, terms)


def _check_texts(mapping: dict[Any, Any]) -> dict[str, str]:
    if not all(isinstance(text, str) for pair in mapping.items() for text in pair):
        raise TypeError("expected text for names and values")
    return mapping


def is_valid_header(name: str, value: str) -> bool:
    """True for a header that a third-party plugin may add to responses."""
    return is_response_header(name) and _VALUE.fullmatch(value) is not None


def _check_headers(mapping: dict[Any, Any]) -> list[tuple[str, str]]:
    headers = list(_check_texts(mapping).items())
    if not all(is_valid_header(name, value) for name, value in headers):
        raise ValueError(
            "expected headers for responses, names in lower case and values in visible ASCII"
        )
    return headers
