"""Plots of a report, with matplotlib: the extra `plots`.

The files are the same for the same report: no date, no random ids.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from extproc import distribution
from extproc.autoscaling.scaling_history import CHARTS
from extproc.errors import ConfigError
from extproc.simulator.fleet.report import Column, Report, Run

_FORMATS = ("png", "svg")

#: File, figure, factor, label of the axis.
_BARS = (
    ("throughput", "requests_per_s", 1.0, "requests per second"),
    ("ttft_mean", "ttft_mean_s", 1e3, "mean TTFT (ms)"),
    ("ttft_p99", "ttft_p99_s", 1e3, "p99 TTFT (ms)"),
)


def require() -> None:
    """Say at once when there is nothing to draw with.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plots",
            wanted="matplotlib",
            got="it is not installed",
            fix=f"install the extra: {distribution.install_command('plots')}",
        )


def draw(report: Report, folder: Path) -> Iterator[Path]:
    """Draw everything; yields every file that was written.

    Args:
        report: What to draw.
        folder: Where to; made when it is not there.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "--plots", wanted="a folder that can be written", got=str(error), fix="check the path"
        ) from None
    for name, figure, factor, label in _BARS:

        def bars(
            axes: Any, figure: str = figure, factor: float = factor, label: str = label
        ) -> None:
            _bars(axes, report.columns, figure=figure, factor=factor, label=label)

        yield from _drawn(report, folder / name, bars)
    yield from _drawn(report, folder / "ttft_cdf", lambda axes: _cdf(axes, report.columns))
    yield from _drawn(report, folder / "endpoint_load", lambda axes: _load(axes, report.columns))
    scaled = [run for run in report.runs if run.summary.scaling and run.seed == report.runs[0].seed]
    if scaled:
        yield from _charted(report, folder / "replicas", scaled)


def _drawn(report: Report, base: Path, paint: Callable[[Any], None]) -> Iterator[Path]:
    def fill(figure: Any) -> None:
        # Room for slanted names; a layout engine would draw everything twice.
        figure.subplots_adjust(left=0.1, right=0.98, bottom=0.2, top=0.92)
        axes = figure.add_subplot()
        paint(axes)
        axes.set_title(report.scenario.title)
        axes.grid(visible=True, axis="y", alpha=0.3)
        axes.set_axisbelow(True)

    yield from _saved(base, (8, 4.5), fill)


def _charted(report: Report, base: Path, runs: Sequence[Run]) -> Iterator[Path]:
    """Queue depth, its average, queries per second and replicas over time, of one seed."""

    def fill(figure: Any) -> None:
        figure.subplots_adjust(left=0.08, right=0.98, bottom=0.09, top=0.89, hspace=0.3)
        figure.suptitle(f"{report.scenario.title} (seed {runs[0].seed})")
        for n, (field, label) in enumerate(CHARTS.items()):
            axes = figure.add_subplot(2, 2, n + 1)
            for run in runs:
                rows = run.summary.scaling
                minutes = [at / 60 for at in rows.at_s] if rows else []
                axes.step(minutes, getattr(rows, field), where="post", label=run.strategy)
            axes.set_title(label, fontsize="medium")
            axes.set_ylim(bottom=0)
            axes.grid(visible=True, axis="y", alpha=0.3)
            if n >= len(CHARTS) // 2:
                axes.set_xlabel("minutes")
            if not n:
                axes.legend()

    yield from _saved(base, (11, 7), fill)


def _saved(base: Path, inches: tuple[float, float], fill: Callable[[Any], None]) -> Iterator[Path]:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "extproc", "svg.fonttype": "path"}):
        figure = Figure(figsize=inches)
        FigureCanvasAgg(figure)
        fill(figure)
        for form in _FORMATS:
            path = base.with_suffix(f".{form}")
            # A date or a version would make equal plots differ.
            metadata = {"Date": None} if form == "svg" else {"Software": None}
            figure.savefig(path, format=form, dpi=120, metadata=metadata)
            yield path


def _bars(axes: Any, columns: Sequence[Column], *, figure: str, factor: float, label: str) -> None:
    """One bar for each strategy, with its interval."""
    values = [column.figures[figure] for column in columns]
    heights = [_number(value.mean) * factor for value in values]
    halves = [_number(value.half) * factor for value in values]
    colours = [f"C{n % 10}" for n in range(len(columns))]
    names = [column.strategy for column in columns]
    axes.bar(range(len(columns)), heights, yerr=halves, capsize=4, color=colours)
    axes.set_xticks(range(len(columns)), names, rotation=20, ha="right")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(label)


def _cdf(axes: Any, columns: Sequence[Column]) -> None:
    """Share of requests whose first token came within a time."""
    from matplotlib.ticker import LogLocator

    for column in columns:
        quantiles = column.ttft_quantiles_s
        shares = [n / 100 for n in range(len(quantiles))]
        axes.plot([value * 1e3 for value in quantiles], shares, label=column.strategy)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("TTFT (ms)")
    axes.set_ylabel("share of requests")
    axes.legend()


def _load(axes: Any, columns: Sequence[Column]) -> None:
    """Prompt tokens of every engine, over the mean, the busiest first."""
    for column in columns:
        tokens = sorted((endpoint.prompt_tokens for endpoint in column.endpoints), reverse=True)
        mean = sum(tokens) / max(1, len(tokens)) or 1.0
        axes.plot([count / mean for count in tokens], marker=".", label=column.strategy)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("engines, the busiest first")
    axes.set_ylabel("prompt tokens, over the mean")
    axes.set_ylim(bottom=0)
    axes.legend()


def _number(value: float) -> float:
    return 0.0 if math.isnan(value) else value
