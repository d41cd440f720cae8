"""What was seen over the last seconds."""

import pytest

from extproc.autoscaling.time_window import TimeWindow


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
