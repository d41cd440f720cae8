from __future__ import annotations

import importlib.util

from extproc.autoscaling.scaling_history import HistoryRow
from extproc.demo import scaling_plot

ROWS = [(0.0, 0.0, 0, 0), (1.0, 2.0, 2, 0), (2.0, 8.0, 2, 2), (3.0, 0.0, 0, 0)]


def chart():
    plot = scaling_plot.ScalingPlot()
    for at_s, depth, requested, available in ROWS:
        plot.add(
            HistoryRow(
                at_s=at_s,
                depth=depth,
                depth_mean=depth,
                queries_per_s=depth,
                spec=requested,
                available=available,
            )
        )
    return plot


def test_the_charts_are_lines_of_text():
    """Four titles with their highest values, and a bar for every look."""
    text = scaling_plot.as_text(chart())
    assert text.startswith("3 s")
    assert "queue depth per replica, up to 8\n  | ▂█ |" in text
    assert "replicas available, up to 2\n  |  █ |" in text
    assert scaling_plot.as_text(scaling_plot.ScalingPlot()) == "no samples"


def test_the_charts_are_drawn(tmp_path):
    """A file where matplotlib is; a folder that cannot be made is said."""
    path = tmp_path / "new" / "charts.png"
    assert scaling_plot.save_plot(chart(), path) == f"The plot: {path}"
    assert path.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").write_text("")
    assert "could not be written" in scaling_plot.save_plot(chart(), tmp_path / "file" / "x.png")


def test_without_matplotlib_there_is_a_hint(tmp_path, monkeypatch):
    """And no file."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    hint = scaling_plot.save_plot(chart(), tmp_path / "charts.png")
    assert hint.startswith("For a plot: ")
    assert hint.endswith(" -m pip install 'extproc-epp[plots]'")
    assert not list(tmp_path.iterdir())
