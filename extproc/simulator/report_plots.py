"""Plots of a report, as PNG and SVG, and a page with all of them.

The files are the same for the same report.
"""

from __future__ import annotations

import functools
import html
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from extproc import distribution
from extproc.autoscaling.scaling_history import CHARTS
from extproc.errors import ConfigError
from extproc.simulator import plot_style
from extproc.simulator.fleet.report import Column, Report, Run
from extproc.simulator.fleet_plan import FleetSize, Objective
from extproc.simulator.simulate_command import write

_FORMATS = ("png", "svg")

#: File, figure, factor, label of the axis, logarithmic axis.
_VALUES = (
    ("throughput", "requests_per_s", 1.0, "requests per second, mean and 95 % interval", False),
    ("ttft_mean", "ttft_mean_s", 1e3, "mean time to first token (ms), 95 % interval", True),
    ("ttft_p99", "ttft_p99_s", 1e3, "p99 time to first token (ms), 95 % interval", True),
)

#: Labels of the charts of `scaling_history`.
_UNITS = {
    "depth": "requests per replica",
    "depth_mean": "requests per replica",
    "queries_per_s": "requests per second",
    "available": "replicas",
}

#: Characters of a title line.
_TITLE_WIDTH = 90


def require(flag: str = "--plots") -> None:
    """Say at once when there is nothing to draw with.

    Args:
        flag: The flag that asks for it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if not plot_style.is_available():
        raise ConfigError(
            flag,
            wanted="matplotlib",
            got="none",
            fix=f"install the extra: {distribution.install_command('plots')}",
        )


def require_format(flag: str, path: Path) -> None:
    """Refuse a file whose suffix names no format of plots.

    Raises:
        ConfigError: It names none.
    """
    if path.suffix.lower().removeprefix(".") not in _FORMATS:
        raise ConfigError(
            flag,
            wanted="a name that ends in .svg or .png",
            got=repr(str(path)),
            fix="write another name",
        )


def draw(report: Report, folder: Path) -> Iterator[Path]:
    """Draw everything; yields every file that was written.

    Args:
        folder: Where to; made when it is not there.

    Raises:
        ConfigError: The folder or a file in it cannot be written.
    """
    _make_folder(folder)
    plots = _plots(report)
    for name in plots:
        for form, content in _draw_plot(report, plots[name], _FORMATS).items():
            path = folder / f"{name}.{form}"
            write(path, content)
            yield path
    index = folder / "index.html"
    write(index, _page(report.scenario.title, list(plots)).encode())
    yield index


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "--plots", wanted="a folder that can be written", got=str(error), fix="check the path"
        ) from None


def page(report: Report, text: str) -> str:
    """A page with a text and every plot in it, which needs no other file."""
    plots = [_draw_plot(report, plot, ("svg",))["svg"].decode() for plot in _plots(report).values()]
    pictures = "\n".join(f"<figure>{svg[svg.index('<svg') :]}</figure>" for svg in plots)
    title = html.escape(report.scenario.title)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{_PAGE_STYLE}</style>\n<h1>{title}</h1>\n"
        f"<pre>{html.escape(text)}</pre>\n{pictures}\n</html>\n"
    )


#: Of a page that is read on paper as well.
_PAGE_STYLE = (
    "body{font-family:sans-serif;margin:2em;color:#24313a;background:#fff}"
    "pre{overflow-x:auto;font-size:13px}figure{margin:2em 0}svg{max-width:100%;height:auto}"
)


def draw_sizes(
    folder: Path, objectives: Sequence[Objective], sizes: Sequence[FleetSize]
) -> Iterator[Path]:
    """Draw figures of fleets by their number of engines; yields every file that was written.

    Args:
        folder: Where to; made when it is not there.
        objectives: Limits, each with a panel.
        sizes: The fleets, the smallest first.

    Raises:
        ConfigError: The folder or a file in it cannot be written.
    """
    _make_folder(folder)
    engines = [size.engines for size in sizes]
    with plot_style.new_figure(5.5, 2.4 * len(objectives)) as figure:
        for place, objective in enumerate(objectives):
            axes = figure.add_subplot(len(objectives), 1, place + 1)
            values_ms = [1e3 * size.figures[objective.figure] for size in sizes]
            axes.plot(engines, values_ms, marker="o", color=plot_style.COLOR)
            axes.axhline(1e3 * objective.limit_s, color=plot_style.INK, linestyle="--", linewidth=1)
            axes.set_ylabel(f"{objective.figure[:-2]} (ms)")
            axes.set_xlabel("engines")
            axes.set_ylim(bottom=0)
            axes.grid(visible=True)
        for form in _FORMATS:
            path = folder / f"fleet_sizes.{form}"
            write(path, plot_style.encode(figure, form, is_tight=True))
            yield path


def _draw_plot(report: Report, plot: _Plot, forms: Sequence[str]) -> dict[str, bytes]:
    """One plot in some formats."""
    (width_in, height_in), paint = plot
    title = textwrap.fill(report.scenario.title, _TITLE_WIDTH)
    with plot_style.new_figure(width_in, height_in) as figure:
        paint(figure)
        figure.text(0.0, 1.03, title, fontweight="bold", fontsize=9, va="bottom")
        return {form: plot_style.encode(figure, form, is_tight=True) for form in forms}


#: Width and height in inches, and the function that fills the figure.
_Plot = tuple[tuple[float, float], Callable[[Any], None]]


def _plots(report: Report) -> Mapping[str, _Plot]:
    """Every plot by the name of its file, in the order of the page."""
    columns = {column.strategy: column for column in report.columns}
    rows = [columns[name] for name in plot_style.ordered(list(columns))]
    plots: dict[str, _Plot] = {"ttft_cdf": ((7.5, 3.6), lambda figure: _draw_cdf(figure, rows))}
    height_in = plot_style.ROW_IN * len(rows) + 0.7
    for name, key, factor, label, is_log in _VALUES:
        paint = functools.partial(_draw_values, rows, height_in, key, factor, label, is_log)
        plots[name] = ((5.5, height_in), paint)
    plots["endpoint_load"] = ((7.5, 3.6), lambda figure: _draw_load(figure, rows))
    scaled = [run for run in report.runs if run.summary.scaling and run.seed == report.runs[0].seed]
    if scaled:
        plots["replicas"] = ((8.0, 5.2), lambda figure: _draw_scaling(figure, scaled))
    return plots


def _draw_values(
    columns: Sequence[Column],
    height_in: float,
    name: str,
    factor: float,
    label: str,
    is_log: bool,  # noqa: FBT001 - a row of `_VALUES`
    figure: Any,
) -> None:
    """One figure of every strategy, with its interval."""
    axes = figure.add_axes((0.0, 0.5 / height_in, 1.0, 1 - 0.6 / height_in))
    rows = []
    for column in columns:
        interval = column.figures[name]
        rows.append(
            plot_style.ValueRow(
                strategy=column.strategy, mean=interval.mean * factor, half=interval.half * factor
            )
        )
    plot_style.draw_values(axes, rows, label=label, is_log=is_log, is_bar=not is_log)


def _draw_cdf(figure: Any, columns: Sequence[Column]) -> None:
    """Share of requests whose first token came within a time."""
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    names = [column.strategy for column in columns]
    times_ms = [[value * 1e3 for value in column.ttft_quantiles_s] for column in columns]
    for name, values in zip(names, times_ms, strict=True):
        shares = [place / (len(values) - 1) for place in range(len(values))]
        axes.plot(values, shares, **plot_style.line_style(name, names))
    drawn = [value for values in times_ms for value in values if value > 0]
    if drawn:
        plot_style.set_log_axis(axes.xaxis, min(drawn), max(drawn) * 1.02, most=9)
    axes.set_xlabel("time to first token (ms)")
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1.02)
    _finish_lines(axes)


def _draw_load(figure: Any, columns: Sequence[Column]) -> None:
    """Prompt tokens of every engine, over the mean, the busiest first."""
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    names = [column.strategy for column in columns]
    for column in columns:
        tokens = sorted((endpoint.prompt_tokens for endpoint in column.endpoints), reverse=True)
        mean = sum(tokens) / max(1, len(tokens)) or 1.0
        ranks = range(1, len(tokens) + 1)
        style = plot_style.line_style(column.strategy, names)
        axes.plot(ranks, [count / mean for count in tokens], **style)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("engine, by its load (1 is the busiest)")
    axes.set_ylabel("prompt tokens, over the mean of all engines")
    axes.set_ylim(bottom=0)
    _finish_lines(axes)


def _draw_scaling(figure: Any, runs: Sequence[Run]) -> None:
    """Queue depth, its average, requests per second and replicas over time, of one seed."""
    figure.subplots_adjust(left=0.0, right=1.0, bottom=0.0, top=0.93, hspace=0.4, wspace=0.2)
    names = [run.strategy for run in runs]
    for place, (field, title) in enumerate(CHARTS.items()):
        axes = figure.add_subplot(2, 2, place + 1)
        for run in runs:
            rows = run.summary.scaling
            minutes = [at / 60 for at in rows.at_s] if rows else []
            style = {**plot_style.line_style(run.strategy, names), "marker": None}
            axes.step(minutes, getattr(rows, field), where="post", **style)
        axes.set_title(title, fontsize=8, loc="left")
        axes.set_ylim(bottom=0)
        axes.set_ylabel(_UNITS[field])
        axes.set_xlabel("time (minutes)")
        axes.grid(visible=True)
    figure.legend(**_legend_entries(axes), loc="upper left", bbox_to_anchor=(1.0, 0.95))
    seed = f"seed {runs[0].seed}"
    figure.text(1.0, 1.03, seed, ha="right", fontsize=8)


def _finish_lines(axes: Any) -> None:
    axes.grid(visible=True)
    axes.legend(**_legend_entries(axes), loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _legend_entries(axes: Any) -> dict[str, list[Any]]:
    """Every line and its label: by itself, matplotlib leaves out those that begin with `_`."""
    lines = axes.get_lines()
    return {"handles": [*lines], "labels": [line.get_label() for line in lines]}


def _page(title: str, names: Sequence[str]) -> str:
    """The page that shows every plot."""
    pictures = "\n".join(f'<p><img src="{name}.svg" alt="{name}"></p>' for name in names)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n{pictures}\n</html>\n"
    )
