from __future__ import annotations

import pytest

from extproc.autoscaling.demand_estimator import PickerCounters
from extproc.autoscaling.interface import Demand, ScalingDecision, ScalingReason
from extproc.autoscaling.runtime.loop_metrics import LoopMetrics


def test_a_loop_without_a_step_has_no_gauges():
    """Before the first step only failures are counted."""
    metrics = LoopMetrics(60.0)
    metrics.failures += 1
    assert metrics.snapshot().gauges == {}
    assert metrics.snapshot().failures == 1


def test_metrics_show_demand_decision_and_changes():
    """Queue depth, request rate, replicas by state, and changes by reason are reported."""
    metrics = LoopMetrics(60.0)
    for now, held in ((0.0, 0), (30.0, 6), (60.0, 12)):
        demand = Demand(now=now, spec=3, available=2, held=held)
        counters = {
            "a": PickerCounters(arrived=now * 2),
            "b": PickerCounters(arrived=now),
            "c": None,
        }
        metrics.record(demand, ScalingDecision(3, ScalingReason.UP), counters)
    metrics.changed(ScalingReason.UP)
    shown = metrics.snapshot()
    assert shown.gauges["queue_depth"] == 6.0
    assert shown.gauges["queue_depth_mean"] == pytest.approx((3.0 + 6.0) / 2)
    assert shown.gauges["requests_per_second"] == pytest.approx(3.0)
    assert shown.gauges["desired_replicas"] == 3.0
    assert shown.replicas == {"spec": 3, "available": 2, "starting": 1}
    assert shown.changes == {"up": 1}
