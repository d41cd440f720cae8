"""The four charts of autoscaling: as a plot with matplotlib, or as lines of text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from extproc import distribution
from extproc.autoscaling.scaling_history import CHARTS, HistoryRow
from extproc.simulator import plot_style

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
    if not plot_style.is_available():
        return f"For a plot: {distribution.install_command('plots')}"
    times = [row.at_s for row in chart.rows]
    with plot_style.new_figure(8, 7) as figure:
        figure.subplots_adjust(left=0.08, right=0.98, top=0.95, bottom=0.07, hspace=0.5)
        for place, (field, title) in enumerate(CHARTS.items(), 1):
            axes = figure.add_subplot(len(CHARTS), 1, place)
            style = {"color": plot_style.COLOR, "linewidth": 1.8, "label": "available"}
            if field == "available":
                requested = [row.spec for row in chart.rows]
                axes.step(times, requested, where="post", color=plot_style.GREY, label="requested")
            axes.step(times, [getattr(row, field) for row in chart.rows], where="post", **style)
            axes.set_ylim(bottom=0)
            axes.set_title(title, fontsize=8, loc="left")
            axes.grid(visible=True)
        axes.legend(loc="upper right")
        axes.set_xlabel("time (s)")
        content = plot_style.encode(figure, path.suffix.lower().removeprefix("."))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
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
