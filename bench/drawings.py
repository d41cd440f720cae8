"""Plots of the pages, made from `bench/results/proof`: one SVG for each page.

    python -m bench.drawings        # rewrites bench/pages/*.svg

A test holds every file against the results; matplotlib is pinned in constraints.txt.
"""

from __future__ import annotations

import io

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bench import bars
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


def drawn(page: str) -> bytes:
    """The plot of a page; the same bytes for the same results."""
    told = {name: bars.result(name) for name in DRAWN[page]}
    told = {name: one for name, one in told.items() if one is not None}
    rules = {"svg.hashsalt": page, "svg.fonttype": "none", "font.size": 8}
    with mpl.rc_context(rules):
        height = 2.4 * max(1, len(told)) + 0.3
        figure = Figure(figsize=(11, height))
        FigureCanvasSVG(figure)
        margins = {"left": 0.05, "right": 0.99, "top": 1 - 0.3 / height, "bottom": 0.75 / height}
        figure.subplots_adjust(**margins, hspace=0.8)
        axes = figure.subplots(len(told), len(PANELS), squeeze=False)
        for row, (name, one) in zip(axes, told.items(), strict=True):
            for panel, (label, bar, mark, factor) in zip(row, PANELS, strict=True):
                paint(panel, one["columns"], bar, mark, factor)
                panel.set_title(f"{name}: {label}")
        written = io.BytesIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return written.getvalue()


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


if __name__ == "__main__":
    main()
