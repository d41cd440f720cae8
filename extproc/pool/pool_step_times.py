"""Step time estimators of a pool: per engine, with the mean of those that look alike as prior."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias

import msgspec

from extproc.endpoint import DEFAULT_STEP_TIMES, NO_LOAD, Load, StepTimeModel
from extproc.pool import step_time_values
from extproc.pool.answer_pace import AnswerPace
from extproc.pool.request_tokens import AnswerTokens
from extproc.pool.snapshot import EndpointSnapshot
from extproc.pool.step_time_estimator import StepTimeEstimator

#: Seconds for which what the pool has shown stands: to work it out is a walk over all members.
_STANDS_S = 1.0

#: Steps in which sizes of KV caches count as alike, as a share. Engines of one model on one machine
#: differ by a few blocks; half of the memory, or another model, is several steps.
_SIZE_STEP = 0.1

#: Answers, fading, up to which an engine counts as tried: for two minutes after one.
_TRIED = 0.25

#: Kind of an engine, by what its page says of it: engine type, and size of the KV cache in steps.
_Kind: TypeAlias = tuple[str, int]


class _Shown(NamedTuple):
    """Mean step times of engines with evidence, at the speed of the median and of the fastest one."""

    typical: StepTimeModel
    fastest: StepTimeModel


_NOTHING = _Shown(DEFAULT_STEP_TIMES, DEFAULT_STEP_TIMES)


class PoolStepTimeEstimators:
    """Step time estimators of one pool, by incarnation. Mutable; owned by `PoolStore`."""

    __slots__ = (
        "_answers",
        "_at",
        "_by_incarnation",
        "_is_changed",
        "_kinds",
        "_paced_at",
        "_paces",
        "_pool",
        "_shared",
        "_shown",
    )

    def __init__(self, answers: AnswerTokens | None = None) -> None:
        self._answers = answers or AnswerTokens()
        self._by_incarnation: dict[int, StepTimeEstimator] = {}
        self._kinds: dict[int, _Kind] = {}
        self._paces: dict[int, AnswerPace] = {}
        self._at = self._paced_at = -math.inf
        self._pool = _NOTHING
        self._shown: Mapping[_Kind, _Shown] = {}
        #: Typical step times that members without evidence were given, of the pool and by kind.
        self._shared: Mapping[_Kind | None, StepTimeModel] = {None: DEFAULT_STEP_TIMES}
        self._is_changed = False

    def on_endpoint_added(self, incarnation: int) -> StepTimeEstimator:
        """Start the estimator of a new endpoint at the mean of the pool."""
        learner = StepTimeEstimator(self._pool.typical, self._answers)
        self._by_incarnation[incarnation] = learner
        return learner

    def on_endpoint_removed(self, incarnation: int) -> None:
        """Drop the estimator of an endpoint."""
        del self._by_incarnation[incarnation]
        self._kinds.pop(incarnation, None)
        self._paces.pop(incarnation, None)

    def with_pool_prior(
        self, incarnation: int, now: float, load: Load = NO_LOAD
    ) -> StepTimeEstimator:
        """Estimator of an endpoint, its prior the mean of its kind, at most a second old.

        Where no engine of its kind has shown step times, it is the mean of the pool.

        Args:
            load: What its page says; without a page it is of no kind.
        """
        if now - self._at >= _STANDS_S:
            self._at = now
            self._learn()
        learner = self._by_incarnation[incarnation]
        shown, look_alikes = self._pool, 0.0
        kv_tokens = load.kv_tokens
        if kv_tokens:
            kind = self._kinds[incarnation] = _kind(load.engine, kv_tokens)
            if kind in self._shown:
                shown = self._shown[kind]
                look_alikes = shown.typical.evidence
        learner.set_prior(shown.typical, shown.fastest, look_alikes=look_alikes)
        return learner

    def share(
        self, members: Sequence[EndpointSnapshot], now: float, *, has_shown: bool
    ) -> Sequence[EndpointSnapshot]:
        """Members, with what others and their answers show now of those that have no step times.

        The same object while that is what it was the last time.

        Args:
            has_shown: Whether the member that was just scraped has shown step times.
        """
        if now - self._paced_at >= _STANDS_S:
            self._paced_at = now
            self._is_changed |= self._observe_answers(members, now)
        if not self._is_changed:
            return self._share_first(members, now) if has_shown else members
        self._is_changed, self._shared = False, self._typical()
        return tuple(
            member if member.rates.evidence else self._with_shared(member, now)
            for member in members
        )

    def _share_first(
        self, members: Sequence[EndpointSnapshot], now: float
    ) -> Sequence[EndpointSnapshot]:
        """Members, the first step times of a pool given at once to those without a page.

        Beside a guess, the engine whose page came first would look ten times faster or slower than
        those whose pages are on their way. From the next second on, they are to be tried (`share`).
        """
        if self._pool.typical.evidence or all(member.load is not NO_LOAD for member in members):
            return members
        self._at = now
        self._learn()
        self._is_changed = False  # until the next second
        return tuple(
            self._with_shared(member, now, is_first=True) if member.load is NO_LOAD else member
            for member in members
        )

    def _with_shared(
        self, member: EndpointSnapshot, now: float, *, is_first: bool = False
    ) -> EndpointSnapshot:
        learner = self.with_pool_prior(member.endpoint.incarnation, now, member.load)
        rates = learner.due_rates if is_first else learner.pooled_rates
        if is_first or learner.is_paced:
            member.account.set_drain_rate(rates, member.account.in_flight + member.foreign)
        return msgspec.structs.replace(member, rates=rates)

    def _observe_answers(self, members: Sequence[EndpointSnapshot], now: float) -> bool:
        """Note how long answers take where an engine shows no step times; True if that changed."""
        # With the prior of now: by what an engine has shown meanwhile, the answers of all are due.
        learners = [
            self.with_pool_prior(member.endpoint.incarnation, now, member.load)
            for member in members
        ]
        if all(learner.rates.evidence for learner in learners):
            return False
        paced: list[tuple[StepTimeEstimator, float, AnswerPace, bool]] = []
        counted: list[float] = []
        shown: list[float] = []
        for member, learner in zip(members, learners, strict=True):
            account, evidence = member.account, learner.rates.evidence
            pace = self._paces.setdefault(member.endpoint.incarnation, AnswerPace())
            pace.update(account, now)
            # Of an engine whose speed is known, a request that hangs says nothing.
            open_work = () if evidence else account.open_work(now)
            slowness = pace.slowness(account, learner.due_rates, open_work)
            is_tried = account.in_flight > 0 or pace.answers > _TRIED
            paced.append((learner, slowness, pace, is_tried))
            if pace.is_known:
                (counted if evidence else shown).append(slowness)
        # Answers that are longer than the counters say are so on all engines.
        usual = median(counted or shown or [1.0])
        changed = [
            # Where none counts, that also says how long answers are: of an engine without, nothing.
            learner.set_pace(
                slowness / usual if counted or is_tried else 1.0, pace.answers, is_tried=is_tried
            )
            for learner, slowness, pace, is_tried in paced
        ]
        return any(changed)

    def _learn(self) -> None:
        """Work out what the pool, and each kind of engine in it, has shown."""
        shown: dict[_Kind | None, list[StepTimeEstimator]] = defaultdict(list)
        for incarnation, learner in self._by_incarnation.items():
            if learner.rates.evidence:
                shown[None].append(learner)
                kind = self._kinds.get(incarnation)
                if kind is not None:
                    shown[kind].append(learner)
        self._pool = _summarize(shown[None])
        self._shown = {
            kind: _summarize(learners) for kind, learners in shown.items() if kind is not None
        }
        if not self._is_changed:
            here, before = self._typical(), self._shared
            self._is_changed = here.keys() != before.keys() or not all(
                step_time_values.are_close(typical, before[kind]) for kind, typical in here.items()
            )

    def _typical(self) -> dict[_Kind | None, StepTimeModel]:
        typical: dict[_Kind | None, StepTimeModel] = {None: self._pool.typical}
        typical.update((kind, shown.typical) for kind, shown in self._shown.items())
        return typical


def find_slowness(members: Sequence[EndpointSnapshot]) -> Sequence[float | None]:
    """Find how many times slower each endpoint computes than the quicker quarter of those like it.

    Endpoints are alike that have the same engine type and size of the KV cache. What is compared is
    the time of 1,000 uncached prompt tokens and 100 output tokens without other requests, by the
    learned step times, so that load and the lengths of requests make no difference.

    Returns:
        By position; None for an endpoint that has shown no step times.
    """
    times_s: list[float | None] = []
    alike: defaultdict[_Kind | None, list[float]] = defaultdict(list)
    kinds: list[_Kind | None] = []
    for member in members:
        rates, load = member.rates, member.load
        kinds.append(_kind(load.engine, load.kv_tokens) if load.kv_tokens else None)
        if not rates.evidence:
            times_s.append(None)
            continue
        seconds = 1000.0 * rates.prefill_s + 100.0 * (rates.step_s + rates.decode_s)
        times_s.append(seconds)
        alike[kinds[-1]].append(seconds)
    quick_s = {kind: sorted(values)[(len(values) - 1) // 4] for kind, values in alike.items()}
    return [
        None if seconds is None else seconds / quick_s[kind]
        for seconds, kind in zip(times_s, kinds, strict=True)
    ]


def _kind(engine: str, kv_tokens: int) -> _Kind:
    return engine, round(math.log(kv_tokens) / _SIZE_STEP)


def _summarize(shown: Iterable[StepTimeEstimator]) -> _Shown:
    learners = list(shown)
    if not learners:
        return _NOTHING
    mean = step_time_values.pool_mean([learner.rates_at_pool_speed for learner in learners])
    mean = msgspec.structs.replace(mean, evidence=float(len(learners)))
    slowness = [learner.slowness for learner in learners]
    return _Shown(
        step_time_values.bounded(step_time_values.scaled(mean, median(slowness))),
        step_time_values.bounded(step_time_values.scaled(mean, min(slowness))),
    )
