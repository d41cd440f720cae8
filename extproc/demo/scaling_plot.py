"""The four charts of autoscaling: as a plot with matplotlib, or as lines of text."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from extproc import distribution
from extproc.autoscaling.scaling_history import CHARTS, HistoryRow

#: From nothing to the highest value of a line.
_BARS = " ▁▂▃▄▅▆▇█"

#: Characters of a line of text.
_WIDTH = 72


class ScalingPlot:
    """Samples of the autoscaling demo. Mutable.

    Attributes:
        rows: In order of time.
    """

    def __init__(self) -> None:
        self.rows: list[HistoryRow] = []
        self._empty = asyncio.Event()

    def add(self, row: HistoryRow) -> None:
        """Add a sample."""
        self.rows.append(row)
        if row.spec or row.available:
            self._empty.clear()
        else:
            self._empty.set()

    async def empty(self) -> None:
        """True while no replica is requested and none is available."""
        await self._empty.wait()


def as_text(chart: ScalingPlot) -> str:
    """The charts as text, one line each."""
    rows = chart.rows
    if not rows:
        return "no samples"
    lines = [f"{rows[-1].at_s:.0f} s, from left to right:"]
    for field, title in CHARTS.items():
        values: list[float] = [getattr(row, field) for row in rows]
        lines.append(f"{title}, up to {max(values):.3g}")
        lines.append(f"  |{_line(values)}|")
    return "\n".join(lines)


def save_plot(chart: ScalingPlot, path: Path) -> str:
    """Draw them into a file, where matplotlib is; returns what became of it."""
    if importlib.util.find_spec("matplotlib") is None:
        return f"For a plot: {distribution.install_command('plots')}"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8))
    FigureCanvasAgg(figure)
    times = [row.at_s for row in chart.rows]
    for at, (field, title) in enumerate(CHARTS.items(), 1):
        axes = figure.add_subplot(len(CHARTS), 1, at)
        if field == "available":
            axes.step(times, [row.spec for row in chart.rows], where="post", label="requested")
        values = [getattr(row, field) for row in chart.rows]
        axes.step(times, values, where="post", label=field)
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=9, loc="left")
        axes.grid(visible=True, alpha=0.3)
        if field == "available":
            axes.legend(fontsize=8)
    axes.set_xlabel("seconds")
    figure.tight_layout()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        return f"The plot could not be written: {error}"
    return f"The plot: {path}"


def _line(values: Sequence[float]) -> str:
    """Highest values of equal pieces, as bars."""
    most = max(values) or 1.0
    width = min(_WIDTH, len(values))
    pieces = []
    for at in range(width):
        first, last = at * len(values) // width, (at + 1) * len(values) // width
        pieces.append(max(values[first:last]))
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] for value in pieces)
