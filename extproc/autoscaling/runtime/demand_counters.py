"""Counters of this process for a pool, as input of the demand estimation."""

from __future__ import annotations

import math

from extproc.autoscaling.demand_estimator import PickerCounters, TargetObservation
from extproc.pool import step_time_estimator
from extproc.pool.snapshot import Pool
from extproc.server.pool_runtime import PoolRuntime
from extproc.telemetry.counters import PoolCounters

#: Refusals of requests that wanted capacity, and will come again.
_WANTED = frozenset({429, 503})


class DemandCounters:
    """Reads the counters of a pool. Totals never decrease, even if a part of them does.

    Args:
        counters: Metrics of the pool.
    """

    def __init__(self, runtime: PoolRuntime, counters: PoolCounters) -> None:
        self._runtime = runtime
        self._counters = counters
        self._arrived = 0.0
        self._prompt_tokens = 0.0
        self._answered = 0
        self._reports = 0
        self._reported_tokens = 0
        self._answer_tokens = 0.0

    @property
    def held(self) -> int:
        """Queued requests (count)."""
        controller = self._runtime.flow_controller
        return 0 if controller is None else controller.queue.count

    @property
    def available(self) -> int:
        """Ready replicas (count)."""
        return available(self._runtime.parts.store.pool)

    def observe_target(self, spec: int, now: float) -> TargetObservation:
        """Replicas, scraped load and engine speed of the scale target.

        Args:
            spec: Requested replicas.
        """
        pool = self._runtime.parts.store.pool
        stale_after_s = self._runtime.parts.director.routing.settings.stale_after_s
        fresh = [member.load for member in pool.members if now - member.load.at < stale_after_s]
        return TargetObservation(
            spec=spec,
            available=available(pool),
            waiting=math.fsum(load.waiting or 0.0 for load in fresh),
            running=math.fsum(load.running or 0.0 for load in fresh),
            rates=step_time_estimator.pool_mean([member.rates for member in pool.members])
            if pool.members
            else None,
        )

    def read(self) -> PickerCounters:
        """Current counters of this process."""
        counters, pool = self._counters, self._runtime.parts.store.pool
        flow_controller = self._runtime.flow_controller
        held, held_tokens = (
            (0, 0)
            if flow_controller is None
            else (flow_controller.queue.count, flow_controller.queue.tokens)
        )
        refused = sum(
            count for (status, _), count in counters.rejections.items() if status in _WANTED
        )
        # A request that stops waiting is counted elsewhere a moment later.
        self._arrived = max(self._arrived, float(counters.routed_total + refused + held))
        tokens = counters.prompt_tokens - counters.matched_tokens
        tokens += held_tokens
        self._prompt_tokens = max(self._prompt_tokens, float(tokens))
        self._read_answers(pool)
        return PickerCounters(
            held=held,
            in_flight=sum(member.account.own for member in pool.members),
            arrived=self._arrived,
            prompt_tokens=self._prompt_tokens,
            answered=float(self._answered),
            answer_tokens=self._answer_tokens,
        )

    def _read_answers(self, pool: Pool) -> None:
        """Add answer tokens; an answer without usage counts with the mean of the engines."""
        counters = self._counters
        answered = counters.answered_total - self._answered
        reports = counters.reported_total - self._reports
        reported_tokens = counters.usage["completion"] - self._reported_tokens
        self._answered, self._reports = counters.answered_total, counters.reported_total
        self._reported_tokens = counters.usage["completion"]
        usual = step_time_estimator.pool_mean(
            [member.rates for member in pool.members]
        ).output_tokens
        self._answer_tokens += reported_tokens + max(0, answered - reports) * usual


def available(pool: Pool) -> int:
    """Ready replicas (count); a replica with several ports counts once."""
    return len(
        {member.endpoint.uid or member.endpoint.address for member in pool.members if member.is_up}
    )
