"""The plot of the README: strategies on one public trace, drawn from `bench/results/proof`.

    python -m bench.trace_plot      # rewrites docs/assets/mooncake-70.svg

The file carries a digest of the results and of this module; a test compares it.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path

from bench import bars, rig

SCENARIO = "mooncake-70"
PATH = rig.ROOT / "docs" / "assets" / f"{SCENARIO}.svg"

#: Column of the results to its label, from top to bottom.
LABELS: Mapping[str, str] = {
    "adaptive": "extproc, adaptive (default)",
    "lmetric": "LMetric",
    "sticky": "llm-d, prefix affinity filter",
    "prefix-hash": "prefix hash",
    "weighted 2/2/3": "llm-d, default scorers",
}
OURS, REFERENCE = "adaptive", "clairvoyant"

#: Title, figure, factor, format, log axis.
PANELS = (
    ("time to first token, mean (ms)", "ttft_mean_s", 1e3, "{:.0f}", True),
    ("time to first token, p99 (ms)", "ttft_p99_s", 1e3, "{:.0f}", True),
    ("time per output token (ms)", "tpot_mean_s", 1e3, "{:.1f}", True),
    ("prefix cache hits (%)", "hit_ratio", 1e2, "{:.1f}", False),
)

COLOR, GREY, INK = "#0b6e99", "#9aa5ad", "#333333"


def draw(columns: Mapping[str, Mapping[str, list[float]]], *, source: str) -> bytes:
    """The plot as SVG; equal input gives equal bytes."""
    import matplotlib as mpl  # noqa: PLC0415 - heavy, and test workers import this module
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    rules = {"svg.hashsalt": SCENARIO, "svg.fonttype": "path", "font.size": 9, "text.color": INK}
    with mpl.rc_context(rules):
        figure = Figure(figsize=(11.5, 2.7), facecolor="white")
        FigureCanvasSVG(figure)
        figure.subplots_adjust(left=0.185, right=0.99, top=0.86, bottom=0.17, wspace=0.12)
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for panel, traits in zip(panels, PANELS, strict=True):
            _draw_panel(panel, columns, *traits)
        panels[0].set_yticks(range(len(LABELS)), list(LABELS.values()))
        panels[0].get_yticklabels()[list(LABELS).index(OURS)].set(color=COLOR, fontweight="bold")
        figure.text(
            0.185,
            0.02,
            "dashed: the same scheduler with exact knowledge of every engine (reference); lower is better, for hits higher",
            fontsize=8,
            color=INK,
        )
        file = io.BytesIO()
        figure.savefig(
            file, format="svg", metadata={"Date": None, "Creator": None, "Source": source}
        )
    return file.getvalue()


def _draw_panel(panel, columns, title, figure, factor, form, is_log) -> None:
    values = {name: columns[name][figure][0] * factor for name in LABELS}
    reference = columns[REFERENCE][figure][0] * factor
    low, high = min(reference, *values.values()), max(reference, *values.values())
    if is_log:
        panel.set_xscale("log")
        panel.set_xlim(low / (high / low) ** 0.12, high * (high / low) ** 0.42)
    else:
        panel.set_xlim(low - 0.2 * (high - low), high + 0.4 * (high - low))
    panel.axvline(reference, color=INK, linewidth=0.8, linestyle="--")
    for row, (name, value) in enumerate(values.items()):
        color = COLOR if name == OURS else GREY
        panel.plot([value], [row], "o", color=color, markersize=7)
        panel.annotate(
            form.format(value),
            (value, row),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            color=COLOR if name == OURS else INK,
            fontweight="bold" if name == OURS else "normal",
        )
    panel.set_ylim(len(values) - 0.4, -0.6)
    panel.set_title(title, fontsize=9, color=INK)
    panel.set_xticks([])
    panel.minorticks_off()
    panel.tick_params(length=0)
    panel.grid(visible=True, axis="y", alpha=0.25)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)


def digest() -> str:
    """Digest of the results and of this module, written into the file."""
    text = json.dumps(bars.result(SCENARIO), sort_keys=True).encode()
    return f"sha256 {hashlib.sha256(text + Path(__file__).read_bytes()).hexdigest()}"


def main() -> None:
    result = bars.result(SCENARIO)
    assert result is not None, f"run python -m bench.proof --only {SCENARIO} --write"
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_bytes(draw(result["columns"], source=digest()))


if __name__ == "__main__":
    main()
