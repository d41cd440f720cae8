from __future__ import annotations

import pytest

from extproc.autoscaling.demand_estimator import PickerCounters
from extproc.autoscaling.interface import Demand, ScalingDecision, ScalingReason
from extproc.autoscaling.runtime.scaling_history import ScalingHistory


def test_the_four_charts():
    """Depth now and over the window, requests per second over 3 minutes, replicas."""
    charts = ScalingHistory()
    assert charts.figures().gauges == {}
    for now, held in ((0.0, 0), (30.0, 6), (60.0, 12)):
        demand = Demand(now=now, spec=3, available=2, held=held)
        counters = {
            "a": PickerCounters(arrived=now * 2),
            "b": PickerCounters(arrived=now),
            "c": None,
        }
        charts.record(demand, ScalingDecision(3, ScalingReason.UP), counters)
    charts.changed(ScalingReason.UP)
    shown = charts.figures()
    assert shown.gauges["queue_depth"] == 6.0
    assert shown.gauges["queue_depth_mean"] == pytest.approx((3.0 + 6.0) / 2)
    assert shown.gauges["requests_per_second"] == pytest.approx(3.0)
    assert shown.gauges["desired_replicas"] == 3.0
    assert shown.replicas == {"asked": 3, "available": 2, "starting": 1}
    assert shown.changes == {"up": 1}


def test_a_picker_that_began_again_is_no_negative_rate():
    """Its counters start at 0."""
    charts = ScalingHistory()
    for now, arrived in ((0.0, 50.0), (20.0, 0.0)):
        demand = Demand(now=now, spec=1, available=1)
        charts.record(
            demand, ScalingDecision(1, ScalingReason.STEADY), {"a": PickerCounters(arrived=arrived)}
        )
    assert charts.figures().gauges["requests_per_second"] == 0.0
