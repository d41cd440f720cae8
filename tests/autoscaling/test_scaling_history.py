from __future__ import annotations

import pytest

from extproc.autoscaling.scaling_history import CHARTS, HistoryRow, ScalingHistory, TimeWindow


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
    """Without available replicas the depth is the number of requests."""
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


def test_a_picker_counts_on_after_a_failed_read():
    """Requests that it received meanwhile count when it can be read again."""
    history = ScalingHistory(60.0)
    for now, arrived in ((0.0, {"a": 0.0}), (10.0, {}), (20.0, {"a": 100.0})):
        row = history.record(now, requests=0.0, available=1, spec=1, arrived=arrived)
    assert row.queries_per_s == pytest.approx(5.0)


def test_pickers_that_left_are_forgotten():
    """After a thousand others a name is that of a new picker, whose first count is its zero."""
    history = ScalingHistory(60.0)
    names = ["a", *(f"b{number}" for number in range(2000)), "a"]
    for now, name in enumerate(names):
        arrived = {name: 10.0 + now, "c": 7.0}
        row = history.record(float(now), requests=0.0, available=1, spec=1, arrived=arrived)
    assert row.queries_per_s == 0.0


def window_of(*samples, span_s=60.0):
    """A window that saw these."""
    window = TimeWindow()
    for at, value in samples:
        window = window.add(at, value, span_s=span_s)
    return window


def test_values_are_weighted_by_their_duration():
    """4 for the last 10 s, 1 for the 30 before."""
    assert window_of((0, 99), (30, 1), (40, 4)).mean(40, 60) == pytest.approx(
        (30 * 1 + 10 * 4) / 40
    )


def test_values_before_the_window_have_no_weight():
    """Only the part of a value's time that is within."""
    window = window_of((0, 0), (50, 7), (100, 1))
    assert window.mean(100, 60) == pytest.approx((10 * 7 + 50 * 1) / 60)
    assert window.max(100, 50) == 1
    assert window.max(100, 60) == 7
    assert window.min(100, 60) == 1


def test_a_single_value_is_the_mean():
    """There is nothing else; and nothing at all is 0."""
    assert window_of((5, 3)).mean(5, 60) == 3
    assert TimeWindow().mean(5, 60) == TimeWindow().max(5, 60) == TimeWindow().min(5, 60) == 0


def test_window_drops_older_samples():
    """And one value more, that says where the time of the next begins."""
    window = window_of(*((at, 1) for at in range(0, 1000, 10)))
    assert [at for at, _ in window.samples] == [930, 940, 950, 960, 970, 980, 990]
    assert window.begun == 0
    assert window.watched_s(990) == 990


def test_shift_time_moves_all_samples():
    """Nothing but the times is different."""
    window = window_of((0, 1), (10, 2)).shift_time(100)
    assert window.samples == ((100, 1), (110, 2))
    assert window.begun == 100
    assert TimeWindow().shift_time(100) == TimeWindow()
