"""Step time estimators of a pool: per engine, with the mean of the pool as prior."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import msgspec

from extproc.endpoint import DEFAULT_STEP_TIMES, StepTimeModel
from extproc.pool import step_time_estimator
from extproc.pool.request_tokens import AnswerTokens
from extproc.pool.snapshot import EndpointSnapshot
from extproc.pool.step_time_estimator import StepTimeEstimator

#: Seconds for which what the pool has shown stands: to work it out is a walk over all members.
_STANDS_S = 1.0


class PoolStepTimeEstimators:
    """Step time estimators of one pool, by incarnation. Mutable; owned by `PoolStore`."""

    __slots__ = (
        "_answers",
        "_at",
        "_by_incarnation",
        "_fastest",
        "_is_changed",
        "_pooled",
        "_shared",
    )

    def __init__(self, answers: AnswerTokens | None = None) -> None:
        self._answers = answers or AnswerTokens()
        self._by_incarnation: dict[int, StepTimeEstimator] = {}
        self._at = -math.inf
        self._pooled = self._fastest = self._shared = DEFAULT_STEP_TIMES
        self._is_changed = False

    def on_endpoint_added(self, incarnation: int) -> StepTimeEstimator:
        """Start the estimator of a new endpoint at the mean of the pool."""
        learner = StepTimeEstimator(self._pooled, self._answers)
        self._by_incarnation[incarnation] = learner
        return learner

    def on_endpoint_removed(self, incarnation: int) -> None:
        """Drop the estimator of an endpoint."""
        del self._by_incarnation[incarnation]

    def with_pool_prior(self, incarnation: int, now: float) -> StepTimeEstimator:
        """Estimator of an endpoint, its prior the pool mean, at most a second old."""
        if now - self._at >= _STANDS_S:
            self._at = now
            self._pooled, self._fastest = self._now()
            self._is_changed = self._is_changed or not step_time_estimator.are_close(
                self._pooled, self._shared
            )
        learner = self._by_incarnation[incarnation]
        learner.set_prior(self._fastest if learner.is_unexplored else self._pooled)
        return learner

    def share(self, members: Sequence[EndpointSnapshot], now: float) -> Sequence[EndpointSnapshot]:
        """Members, with what the pool shows now for those that have shown no step times.

        The same object while what the pool shows is what it was the last time.
        """
        if not self._is_changed:
            return members
        self._is_changed, self._shared = False, self._pooled
        return tuple(
            member
            if member.rates.evidence
            else msgspec.structs.replace(
                member, rates=self.with_pool_prior(member.endpoint.incarnation, now).pooled_rates
            )
            for member in members
        )

    def _now(self) -> tuple[StepTimeModel, StepTimeModel]:
        """Mean of the engines with evidence, at the speed of the median and of the fastest one."""
        shown = [learner for learner in self._by_incarnation.values() if learner.rates.evidence]
        if not shown:
            return DEFAULT_STEP_TIMES, DEFAULT_STEP_TIMES
        mean = step_time_estimator.pool_mean([learner.rates_at_pool_speed for learner in shown])
        mean = msgspec.structs.replace(mean, evidence=float(len(shown)))
        slowness = [learner.slowness for learner in shown]
        return step_time_estimator.scaled(mean, median(slowness)), step_time_estimator.scaled(
            mean, min(slowness)
        )
