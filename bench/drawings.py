"""Plots of the pages, made from `bench/results`: columns, and how far weights reach.

    python -m bench.drawings        # rewrites docs/benchmarks/*.svg

Each says of which results and by which drawing code it was made, and a test holds that against what
is there now; matplotlib is pinned in constraints.txt.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

from bench import bars, frontier
from bench.pages import PAGES

#: Page to its scenarios.
DRAWN = {
    "l4": ("l4-800", "l4-1600", "l4-3200", "l4-8000"),
    "lora": ("lora-base", "lora-10", "lora-4"),
    "k6": ("k6-s1", "k6-s2"),
    "mooncake": ("mooncake-70", "mooncake-95"),
    "trouble": ("heterogeneous", "failures", "cold-start", "hot-prefix", "unique"),
}

#: Label, figure for the bar, figure for the mark above it, factor.
PANELS = (
    ("requests per second", "requests_per_s", None, 1.0),
    ("TTFT mean (bar) and p99 (mark), ms", "ttft_mean_s", "ttft_p99_s", 1e3),
    ("answer mean (bar) and p95 (mark), s", "e2e_mean_s", "e2e_p95_s", 1.0),
)


#: Label and figure of the panels of a frontier.
REACHES = (("TTFT mean, ms", "ttft_mean_s"), ("TTFT p99, ms", "ttft_p99_s"))


def drawn(page: str) -> bytes:
    """The plot of a page; the same bytes for the same results."""
    told = columns_of(page)

    def row(axes, name, one) -> None:
        for panel, (label, bar, mark, factor) in zip(axes, PANELS, strict=True):
            paint(panel, one["columns"], bar, mark, factor)
            panel.set_title(f"{name}: {label}")

    return rows(page, told, len(PANELS), row)


def reached(page: str) -> bytes | None:
    """The plot of the frontiers of a page; None where there are none."""
    told = frontiers_of(page)

    def row(axes, name, one) -> None:
        for panel, (label, figure) in zip(axes, REACHES, strict=True):
            reach(panel, name, one, figure)
            panel.set_title(f"{name}: {label}, by requests per second")

    return rows(page, told, len(REACHES), row) if told else None


def columns_of(page: str) -> dict[str, dict]:
    """What the plot of a page shows, by scenario."""
    told = {name: bars.result(name) for name in DRAWN[page]}
    return {name: one for name, one in told.items() if one}


def frontiers_of(page: str) -> dict[str, dict]:
    """What the plot of its frontiers shows, by scenario; empty where there are none."""
    told = {name: frontier.result(name) for name in DRAWN[page]}
    return {name: one for name, one in told.items() if one}


def source(told) -> str:
    """Of what a plot is made: these results, drawn by this module and what it asks."""
    made = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for path in (__file__, frontier.__file__, bars.__file__):
        made.update(Path(path).read_bytes())
    return f"sha256 {made.hexdigest()}"


def rows(page: str, told, panels: int, paint_row) -> bytes:
    """A row of panels for each scenario, as SVG."""
    # Heavy, and every test worker imports this module to learn which pages there are.
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    rules = {"svg.hashsalt": page, "svg.fonttype": "none", "font.size": 8}
    with mpl.rc_context(rules):
        height = 2.4 * max(1, len(told)) + 0.3
        figure = Figure(figsize=(11, height))
        FigureCanvasSVG(figure)
        margins = {"left": 0.05, "right": 0.99, "top": 1 - 0.3 / height, "bottom": 0.75 / height}
        figure.subplots_adjust(**margins, hspace=0.8)
        axes = figure.subplots(len(told), panels, squeeze=False)
        for row, (name, one) in zip(axes, told.items(), strict=True):
            paint_row(row, name, one)
        written = io.BytesIO()
        facts = {"Date": None, "Creator": None, "Source": source(told)}
        figure.savefig(written, format="svg", metadata=facts)
    return written.getvalue()


def reach(panel, name, told, figure) -> None:
    """Every point, the best of them joined, the columns, and the bars as lines."""

    def spots(all_):
        return zip(*[(one["requests_per_s"], one[figure] * 1e3) for one in all_], strict=True)

    panel.plot(*spots([one["figures"] for one in told["points"]]), "o", color="C0", alpha=0.4, ms=3)
    line = [one["figures"] for one in frontier.best(told["points"], figure)]
    panel.plot(*spots(line), color="C0", linewidth=0.8, label="found")
    panel.plot(*spots([told["points"][0]["figures"]]), "D", color="C1", ms=5, label="adaptive")
    for at, (column, figures) in enumerate(told["columns"].items()):
        colour = "C7" if column == "clairvoyant" else f"C{at + 2}"
        panel.plot(*spots([figures]), "s", color=colour, ms=5, label=column)
    for bar, value in frontier.wanted(name, told):
        if bar.figure == figure:
            panel.axhline(value * 1e3, color="black", linewidth=0.6, linestyle="--", label="bar")
        elif bar.figure == "requests_per_s":
            panel.axvline(value, color="black", linewidth=0.6, linestyle="--")
    panel.axhline(told["limits"][figure] * 1e3, color="C3", linewidth=0.6, label="limit")
    panel.grid(visible=True, alpha=0.3)
    panel.legend(fontsize=6)


def paint(panel, columns, bar, mark, factor) -> None:
    """Bars with 95 % intervals; adaptive and clairvoyant stand out."""
    colours = {"adaptive": "C1", "clairvoyant": "C7"}
    for at, (name, row) in enumerate(columns.items()):
        mean, half = row[bar]
        panel.bar(
            at, mean * factor, yerr=(half or 0.0) * factor, capsize=2, color=colours.get(name, "C0")
        )
        if mark is not None:
            panel.plot([at], [row[mark][0] * factor], marker="_", color="black", markersize=10)
    panel.set_xticks(range(len(columns)), list(columns), rotation=30, ha="right")
    panel.set_ylim(bottom=0)
    panel.grid(visible=True, axis="y", alpha=0.3)
    panel.set_axisbelow(True)


def main() -> None:
    for page in DRAWN:
        (PAGES / f"{page}.svg").write_bytes(drawn(page))
        print(f"drew {page}.svg")
        found = reached(page)
        if found is not None:
            (PAGES / f"{page}-frontier.svg").write_bytes(found)
            print(f"drew {page}-frontier.svg")


if __name__ == "__main__":
    main()
