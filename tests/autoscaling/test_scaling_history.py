from __future__ import annotations

import pytest

from extproc.autoscaling.scaling_history import CHARTS, HistoryRow, ScalingHistory


def test_every_chart_shows_a_field_of_a_row():
    """The table of charts names fields of `HistoryRow` only."""
    assert set(CHARTS) <= set(HistoryRow.__struct_fields__)


def test_row_has_the_current_depth_and_its_mean():
    """Depth is divided by available replicas, and its mean covers the window."""
    history = ScalingHistory(60.0)
    for now, requests in ((0.0, 0.0), (30.0, 6.0), (60.0, 12.0)):
        row = history.record(now, requests=requests, available=2, spec=3, arrived={})
    assert history.latest is row
    assert (row.at_s, row.available, row.spec) == (60.0, 2, 3)
    assert row.depth == 6.0
    assert row.depth_mean == pytest.approx((3.0 + 6.0) / 2)


def test_depth_without_a_replica_counts_requests():
    """Where no replica is available, depth is the number of requests."""
    row = ScalingHistory(60.0).record(0.0, requests=5.0, available=0, spec=1, arrived={})
    assert row.depth == 5.0


def test_the_rate_sums_the_counters_of_all_pickers():
    """Increments of every picker count, over at most 3 minutes."""
    history = ScalingHistory(60.0)
    for now in (0.0, 100.0, 200.0, 300.0):
        arrived = {"a": 2.0 * now, "b": max(0.0, now - 100.0)}
        row = history.record(now, requests=0.0, available=1, spec=1, arrived=arrived)
    assert row.queries_per_s == pytest.approx(3.0)


def test_the_rate_is_scaled_down_while_the_observed_time_is_short():
    """After 5 seconds the rate counts half."""
    history = ScalingHistory(60.0)
    for now in (0.0, 5.0):
        row = history.record(now, requests=0.0, available=1, spec=1, arrived={"a": 4.0 * now})
    assert row.queries_per_s == pytest.approx(2.0)


def test_a_restarted_peer_gives_no_negative_rate():
    """A counter that falls back to zero counts as no arrivals."""
    history = ScalingHistory(60.0)
    for now, arrived in ((0.0, 50.0), (20.0, 0.0)):
        row = history.record(now, requests=0.0, available=1, spec=1, arrived={"a": arrived})
    assert row.queries_per_s == 0.0
