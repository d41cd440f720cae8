"""Plots of the documentation, drawn from `bench/results`.

    python -m bench.plots       # rewrites docs/assets/mooncake-70.svg and docs/benchmarks/*.svg

Each file names the results and the drawing code it was made of, and tests compare that with what is
there now; matplotlib is pinned in constraints.txt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from bench import bars, frontier, rig
from bench.pages import PAGES
from extproc.simulator import plot_style

#: Page to its scenarios.
SCENARIOS = {
    "l4": ("l4-800", "l4-1600", "l4-3200", "l4-8000"),
    "lora": ("lora-base", "lora-10", "lora-4"),
    "k6": ("k6-s1", "k6-s2"),
    "mooncake": ("mooncake-70", "mooncake-95"),
    "trouble": ("heterogeneous", "failures", "cold-start", "hot-prefix", "unique"),
}

#: Panels of a scenario: label, figure, percentile, factor. Without a percentile, bars.
PANELS = (
    ("requests per second", "requests_per_s", None, 1.0),
    ("time to first token (ms)\nmean, and p99 (hollow)", "ttft_mean_s", "ttft_p99_s", 1e3),
    ("whole response (s)\nmean, and p95 (hollow)", "e2e_mean_s", "e2e_p95_s", 1.0),
)

#: Panels of a frontier: label and figure.
FRONTIER_PANELS = (
    ("mean time to first token (ms)", "ttft_mean_s"),
    ("p99 time to first token (ms)", "ttft_p99_s"),
)

#: Width of a picture in inches: 96 pixels each, as wide as the text of a page.
WIDTH_IN = 8.0

#: The plot of the README: its scenario, its file, and the column behind each label.
TRACE = "mooncake-70"
TRACE_PATH = rig.ROOT / "docs" / "assets" / f"{TRACE}.svg"
TRACE_LABELS: Mapping[str, str] = {
    "adaptive": "extproc, adaptive (default)",
    "lmetric": "LMetric",
    "sticky": "llm-d, prefix affinity filter",
    "prefix-hash": "prefix hash",
    "weighted 2/2/3": "llm-d, default scorers",
    "clairvoyant": "clairvoyant (reference)",
}

#: Label, figure, factor, logarithmic axis.
TRACE_PANELS = (
    ("time to first token,\nmean (ms)", "ttft_mean_s", 1e3, True),
    ("time to first token,\np99 (ms)", "ttft_p99_s", 1e3, True),
    ("time per output token,\nmean (ms)", "tpot_mean_s", 1e3, True),
    ("prefix cache hits\n(% of prompt tokens)", "hit_ratio", 1e2, False),
)


def results_of(page: str) -> dict[str, dict]:
    """Results in the plot of a page, by scenario."""
    return _recorded(bars.result, page)


def frontiers_of(page: str) -> dict[str, dict]:
    """Results in the plot of its frontiers, by scenario; empty where there are none."""
    return _recorded(frontier.result, page)


def _recorded(read, page: str) -> dict[str, dict]:
    results = {name: read(name) for name in SCENARIOS[page]}
    return {name: result for name, result in results.items() if result}


def digest(results) -> str:
    """Digest of results, of this module and of the modules that it draws with."""
    total = hashlib.sha256(json.dumps(results, sort_keys=True).encode())
    for path in (__file__, frontier.__file__, bars.__file__, plot_style.__file__):
        total.update(Path(path).read_bytes())
    return f"sha256 {total.hexdigest()}"


def draw_page(page: str) -> bytes:
    """The plot of a page as SVG: a row of panels for each scenario."""
    results = results_of(page)
    rows = max(len(result["columns"]) for result in results.values())
    panel_in, gap_in, head_in = rows * plot_style.ROW_IN, 0.85, 0.5
    height_in = head_in + len(results) * (panel_in + gap_in)
    with plot_style.new_figure(WIDTH_IN, height_in, salt=page) as figure:
        for place, (name, result) in enumerate(results.items()):
            top_in = height_in - head_in - place * (panel_in + gap_in)
            title = f"{name}: {result['title']}"
            figure.text(0.01, (top_in + 0.1) / height_in, title, fontweight="bold")
            _draw_scenario(figure, result["columns"], (top_in - panel_in, panel_in, height_in))
        note = "dashed: clairvoyant, the same scheduler with exact knowledge of every engine; lines in marks: 95 % interval"
        figure.text(0.01, 1 - 0.2 / height_in, note, fontsize=7)
        return plot_style.encode(figure, "svg", source=digest(results))


def _draw_scenario(figure, columns, place_in: tuple[float, float, float]) -> None:
    bottom_in, panel_in, height_in = place_in
    left, gap = 0.135, 0.04
    width = (0.99 - left - gap * (len(PANELS) - 1)) / len(PANELS)
    for at, (label, mean, percentile, factor) in enumerate(PANELS):
        box = (left + at * (width + gap), bottom_in / height_in, width, panel_in / height_in)
        axes = figure.add_axes(box)
        rows = [
            plot_style.ValueRow(
                strategy=name,
                mean=columns[name][mean][0] * factor,
                half=(columns[name][mean][1] or 0.0) * factor,
                percentile=columns[name][percentile][0] * factor if percentile else None,
            )
            for name in plot_style.ordered(list(columns))
        ]
        is_bar = percentile is None
        plot_style.draw_values(axes, rows, label=label, is_log=not is_bar, is_bar=is_bar)
        if at:
            axes.set_yticklabels([])


def draw_frontiers(page: str) -> bytes | None:
    """The plot of the frontiers of a page as SVG; None where there are none."""
    results = frontiers_of(page)
    if not results:
        return None
    height_in = 0.4 + 3.3 * len(results)
    with plot_style.new_figure(WIDTH_IN, height_in, salt=f"{page}-frontier") as figure:
        lines: dict = {}
        for place, (name, result) in enumerate(results.items()):
            top_in = height_in - 0.1 - place * 3.3
            title = f"{name}: {result['title']}"
            figure.text(0.01, (top_in - 0.15) / height_in, title, fontweight="bold")
            for at, (label, key) in enumerate(FRONTIER_PANELS):
                box = (0.09 + at * 0.5, (top_in - 2.85) / height_in, 0.4, 2.55 / height_in)
                axes = figure.add_axes(box)
                _draw_frontier(axes, name, result, key)
                axes.set_xlabel("requests per second")
                axes.set_ylabel(label)
                lines |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        figure.legend(lines.values(), lines, loc="lower center", ncols=len(lines), fontsize=7)
        return plot_style.encode(figure, "svg", source=digest(results))


def _draw_frontier(axes, name: str, result, key: str) -> None:
    """Every point, the best of them joined, the other strategies, the bars and the limit."""
    points = [point["figures"] for point in result["points"]]
    best = [point["figures"] for point in frontier.best(result["points"], key)]
    style = {"color": plot_style.COLOR}
    _mark(
        axes,
        points,
        key,
        marker="o",
        linestyle="",
        ms=3,
        alpha=0.35,
        **style,
        label="other weights",
    )
    _mark(axes, best, key, linewidth=1.0, **style, label="best weights")
    _mark(axes, points[:1], key, marker="D", linestyle="", ms=6, **style, label="adaptive")
    for column, figures in result["columns"].items():
        is_reference = column == plot_style.REFERENCE
        color = plot_style.INK if is_reference else plot_style.GREY
        face = "white" if is_reference else color
        _mark(axes, [figures], key, marker="s", linestyle="", ms=6, color=color, mfc=face)
        at = (figures["requests_per_s"], figures[key] * 1e3)
        if not is_reference:
            below = {"xytext": (0, -6), "textcoords": "offset points", "ha": "center", "va": "top"}
            axes.annotate(column, at, fontsize=7, **below)
        else:
            dashes = {"color": plot_style.INK, "linewidth": 0.8, "linestyle": "--", "zorder": 1}
            axes.axvline(at[0], **dashes)
            axes.axhline(at[1], **dashes, label="clairvoyant (reference)")
    dots = {"color": plot_style.INK, "linewidth": 0.9, "linestyle": ":"}
    for bar, value in frontier.bar_values(name, result):
        if bar.figure == key:
            axes.axhline(value * 1e3, **dots, label="our bar")
        elif bar.figure == "requests_per_s":
            axes.axvline(value, **dots)
    limit = result["limits"][key] * 1e3
    axes.axhline(limit, color=plot_style.GREY, linewidth=1.0, label="lower bound")
    values = [row[key] * 1e3 for row in [*points, *result["columns"].values()]]
    plot_style.set_log_axis(axes.yaxis, min(limit, *values) / 1.25, max(values) * 1.25, most=6)
    axes.margins(x=0.12)
    axes.locator_params(axis="x", nbins=5)
    axes.grid(visible=True)


def _mark(axes, rows, key: str, **style) -> None:
    axes.plot([row["requests_per_s"] for row in rows], [row[key] * 1e3 for row in rows], **style)


def draw_trace(columns) -> bytes:
    """The plot of the README as SVG: five strategies on one public trace."""
    panel_in = plot_style.ROW_IN * len(TRACE_LABELS)
    height_in = panel_in + 0.75
    left, gap = 0.215, 0.03
    width = (0.99 - left - gap * (len(TRACE_PANELS) - 1)) / len(TRACE_PANELS)
    with plot_style.new_figure(WIDTH_IN + 0.6, height_in, salt=TRACE) as figure:
        for at, (label, key, factor, is_log) in enumerate(TRACE_PANELS):
            box = (left + at * (width + gap), 0.65 / height_in, width, panel_in / height_in)
            axes = figure.add_axes(box)
            rows = [
                plot_style.ValueRow(strategy=name, mean=columns[name][key][0] * factor)
                for name in TRACE_LABELS
            ]
            plot_style.draw_values(axes, rows, label=label, is_log=is_log)
            axes.set_yticklabels([] if at else TRACE_LABELS.values())
        return plot_style.encode(figure, "svg", source=digest(bars.result(TRACE)))


def main() -> None:
    trace = bars.result(TRACE)
    assert trace is not None, f"run python -m bench.proof --only {TRACE} --write"
    pictures = {TRACE_PATH: draw_trace(trace["columns"])}
    for page in SCENARIOS:
        pictures[PAGES / f"{page}.svg"] = draw_page(page)
        frontiers = draw_frontiers(page)
        if frontiers is not None:
            pictures[PAGES / f"{page}-frontier.svg"] = frontiers
    for path, content in pictures.items():
        path.write_bytes(content)
        print(f"drew {path.relative_to(rig.ROOT)}")


if __name__ == "__main__":
    main()
