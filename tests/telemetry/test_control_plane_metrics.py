from __future__ import annotations

from extproc.telemetry import control_plane_metrics

STATES = ("synced", "forbidden")


def test_watch_series_show_the_state_and_the_age_of_every_watch():
    """One state is 1, and two watches of a kind differ in namespace or selector."""
    watches = [
        control_plane_metrics.WatchMetrics("pods", "a", "", "synced", STATES, 0.0),
        control_plane_metrics.WatchMetrics("pods", "b", "app=vllm", "forbidden", STATES, 12.0),
    ]
    state, unsynced = control_plane_metrics.watch_families(watches)
    first = '{collection="pods",namespace="a",selector=""'
    second = '{collection="pods",namespace="b",selector="app=vllm"'
    assert state.samples == [
        (first + ',state="synced"}', 1.0),
        (first + ',state="forbidden"}', 0.0),
        (second + ',state="synced"}', 0.0),
        (second + ',state="forbidden"}', 1.0),
    ]
    assert unsynced.samples == [(first + "}", 0.0), (second + "}", 12.0)]


def test_watch_series_exist_without_kubernetes():
    """So that a dashboard finds their names."""
    state, unsynced = control_plane_metrics.watch_families([])
    assert (state.samples, unsynced.samples) == ([], [])
