"""Plot of the arena: every scenario of a recorded set, by what is in it.

    python -m bench.arena.plots        # rewrites docs/benchmarks/arena.svg

The file names the record and the drawing code it was made of, and a test compares that with what is
there now.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import rig
from bench.arena import report, score
from extproc.simulator import plot_style

PATH = rig.ROOT / "docs" / "benchmarks" / "arena.svg"

#: Sets in the order in which one is drawn: the first that is recorded.
_SETS = ("test", "validation", "training")

_WIDTH_IN, _ROW_IN, _LOW, _HIGH = 8.0, 0.24, 0.25, 4.0


def recorded() -> Mapping[str, Any] | None:
    """The set that is drawn; None while none is recorded."""
    path = rig.RESULTS / "arena.json"
    sets = json.loads(path.read_text())["sets"] if path.exists() else {}
    return next((sets[name] for name in _SETS if name in sets), None)


def digest(entry: Mapping[str, Any]) -> str:
    """Digest of a set, of this module and of the one that it draws with."""
    total = hashlib.sha256(json.dumps(entry, sort_keys=True).encode())
    for path in (__file__, plot_style.__file__):
        total.update(Path(path).read_bytes())
    return f"sha256 {total.hexdigest()}"


def draw(entry: Mapping[str, Any]) -> bytes:
    """A panel for each figure, a row for each group of scenarios, and a dot for each scenario."""
    groups = [name for name in [*entry["kinds"], *entry["traits"]] if _rows_of(entry, name)]
    panel_in, foot_in = _ROW_IN * (len(groups) + 1), 0.75
    height_in = panel_in + foot_in
    left, gap = 0.22, 0.025
    width = (0.985 - left - gap * (len(report.BAD_FIGURES) - 1)) / len(report.BAD_FIGURES)
    with plot_style.new_figure(_WIDTH_IN, height_in, salt="arena") as figure:
        for at, name in enumerate(report.BAD_FIGURES):
            box = (left + at * (width + gap), foot_in / height_in, width, panel_in / height_in)
            axes = figure.add_axes(box)
            for place, group in enumerate(["all", *groups]):
                _draw_row(axes, place, _rows_of(entry, group), at)
            axes.axvline(1.0, color=plot_style.INK, linewidth=0.8)
            axes.set_ylim(len(groups) + 0.5, -0.5)
            axes.set_yticks(range(len(groups) + 1), labels=[] if at else ["all", *groups])
            plot_style.set_log_axis(axes.xaxis, _LOW, _HIGH, most=5)
            axes.set_xlabel(report.NAMES[name])
            axes.grid(visible=True, axis="x")
        note = (
            "adaptive over the best published strategy of each scenario, left of 1 is better; "
            "dots: scenarios, squares: geometric means, bars: clairvoyant"
        )
        figure.text(0.01, 0.12 / height_in, note, fontsize=7)
        return plot_style.encode(figure, "svg", source=digest(entry))


def _rows_of(entry: Mapping[str, Any], group: str) -> Sequence[Mapping[str, Any]]:
    return [row for row in entry["rows"] if group == "all" or group in row["groups"]]


def _draw_row(axes: Any, place: int, rows: Sequence[Mapping[str, Any]], at: int) -> None:
    ratios = [row[score.ADAPTIVE][at] for row in rows if row[score.ADAPTIVE][at]]
    shown = [min(_HIGH, max(_LOW, ratio)) for ratio in ratios]
    axes.plot(shown, [place] * len(shown), "o", color=plot_style.GREY, ms=3, alpha=0.5)
    means = {
        name: [row[name][at] for row in rows if row[name][at]]
        for name in (score.ADAPTIVE, score.CLAIRVOYANT)
    }
    styles = {score.ADAPTIVE: ("s", plot_style.COLOR), score.CLAIRVOYANT: ("|", plot_style.INK)}
    for name, values in means.items():
        if values:
            mean = math.exp(sum(map(math.log, values)) / len(values))
            marker, color = styles[name]
            axes.plot([mean], [place], marker, color=color, ms=6, zorder=3)


def main() -> None:
    entry = recorded()
    assert entry is not None, "run python -m bench.arena --set validation --write"
    PATH.write_bytes(draw(entry))
    print(f"drew {PATH.relative_to(rig.ROOT)}")


if __name__ == "__main__":
    main()
