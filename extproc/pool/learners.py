"""Step time estimators of a pool: per engine, with the mean of the pool as prior."""

from __future__ import annotations

import math

from extproc.endpoint import DEFAULT_STEP_TIMES, StepTimeModel
from extproc.pool.step_time_estimator import StepTimeEstimator, pool_mean

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
        """Estimator of an endpoint, its prior the pool mean, at most a second old.

        Args:
            incarnation: Of the endpoint.
            now: Monotonic seconds.
        """
        if now - self._at >= _STANDS_S:
            self._at, self._pooled = now, self._now()
        learner = self._by_incarnation[incarnation]
        learner.set_prior(self._pooled)
        return learner

    def _now(self) -> StepTimeModel:
        return pool_mean([learner.rates for learner in self._by_incarnation.values()])
