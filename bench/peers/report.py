"""Medians, ratios within rounds and bars of the comparison, and its tables in the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from bench.peers.cells import CELLS, IDLE, Cell, CellMeasurement
from bench.peers.pickers import NAMES
from bench.robustness import describe_run

#: Figures of a measurement that are summed up.
_FIGURES = ("cpu_us", "cores", "p50_ms", "p99_ms", "rps", "scrapes_per_s", "envoy_us", "rss_mib")

#: Figures that are compared within rounds.
_COMPARED = ("cpu_us", "p99_ms", "rps", "added_p50_ms")

#: Pickers whose figures are divided by each other.
_PAIRS = (
    ("native", "go-equal"),
    ("adaptive", "go-equal"),
    ("grpcio", "go-equal"),
    ("native", "go"),
    ("adaptive", "go"),
    ("native", "floor-go"),
)

#: Times the bar of a cell that the default strategy may take.
_DEFAULT_FACTOR = 1.2

#: Bars that compare with a constant server, and with llm-d on one core each.
_MAX_OVER_FLOOR = 3.0
_MAX_ADDED_OVER_FLOOR = 1.3 / 0.6
_MIN_THROUGHPUT_RATIO = 1.5

_Row = Mapping[str, float]


def summarize(measurements: Sequence[CellMeasurement]) -> dict[str, Any]:
    """Sum up a run: for each cell figures by picker, and ratios by pair of pickers.

    A slice in which nothing was answered does not count.

    Returns:
        Values are `[median, least, greatest]` over the rounds.
    """
    idle = {cell.name for cell in IDLE}
    measurements = [row for row in measurements if row.requests or row.cell in idle]
    cells = []
    for name in dict.fromkeys(row.cell for row in measurements):
        rounds = _by_round([row for row in measurements if row.cell == name])
        pickers = dict.fromkeys(picker for rows in rounds for picker in rows)
        cells.append(
            {
                "name": name,
                "rounds": len(rounds),
                "pickers": {
                    picker: {
                        figure: _spread([rows[picker][figure] for rows in rounds if picker in rows])
                        for figure in (*_FIGURES, "added_p50_ms")
                        if figure in rounds[0].get(picker, {})
                    }
                    for picker in pickers
                },
                "ratios": {
                    f"{ours}/{theirs}": {
                        figure: _spread(_ratios(rounds, ours, theirs, figure))
                        for figure in _COMPARED
                        if _ratios(rounds, ours, theirs, figure)
                    }
                    for ours, theirs in _PAIRS
                    if ours in pickers and theirs in pickers
                },
            }
        )
    return {"load": _spread([row.load for row in measurements]), "cells": cells}


def _by_round(measurements: Sequence[CellMeasurement]) -> list[dict[str, _Row]]:
    """Figures by picker, a mapping for each round."""
    rounds: dict[int, dict[str, dict[str, float]]] = {}
    for row in measurements:
        rounds.setdefault(row.round, {})[row.picker] = msgspec.structs.asdict(row)
    for rows in rounds.values():
        for row in rows.values():
            if "direct" in rows:
                row["added_p50_ms"] = row["p50_ms"] - rows["direct"]["p50_ms"]
    return [rounds[number] for number in sorted(rounds)]


def _ratios(
    rounds: Sequence[Mapping[str, _Row]], ours: str, theirs: str, figure: str
) -> list[float]:
    """Ratios within rounds; none where the figure is 0 or missing."""
    return [
        rows[ours][figure] / rows[theirs][figure]
        for rows in rounds
        if ours in rows and theirs in rows and rows[theirs].get(figure, 0.0) > 0.0
    ]


def _spread(values: Sequence[float]) -> list[float]:
    return [_rounded(value) for value in (statistics.median(values), min(values), max(values))]


def _rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


class PeerBar(msgspec.Struct, frozen=True):
    """A bar and what was measured.

    Attributes:
        load: The load.
        compared: Pickers and figure.
        wanted: Greatest ratio, or least where `at_least`.
        measured: Median of the ratios within rounds.
    """

    load: str
    compared: str
    wanted: float
    measured: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        """True if the median is on the right side."""
        if self.at_least:
            return self.measured >= self.wanted
        return self.measured <= self.wanted


def bars(result: Mapping[str, Any]) -> Iterator[PeerBar]:
    """Bars that the result has figures for."""
    by_name = {cell["name"]: cell["ratios"] for cell in result["cells"]}

    def ratio(cell: Cell, pair: str, figure: str) -> float | None:
        spread = by_name.get(cell.name, {}).get(pair, {}).get(figure)
        return None if spread is None else spread[0]

    def bar(
        cell: Cell, pair: str, figure: str, wanted: float, *, words: str, at_least: bool = False
    ) -> Iterator[PeerBar]:
        measured = ratio(cell, pair, figure)
        if measured is not None:
            yield PeerBar(cell.name, words, wanted, measured, at_least)

    for cell in CELLS:
        if cell.max_ratio is not None:
            words = "CPU, same scorers / llm-d"
            yield from bar(cell, "native/go-equal", "cpu_us", cell.max_ratio, words=words)
            most = round(_DEFAULT_FACTOR * cell.max_ratio, 3)
            words = "CPU, default strategy / llm-d"
            yield from bar(cell, "adaptive/go-equal", "cpu_us", most, words=words)
        if cell.without_envoy:
            yield from bar(
                cell,
                "native/go-equal",
                "rps",
                _MIN_THROUGHPUT_RATIO,
                words="requests/s, same scorers / llm-d",
                at_least=True,
            )
        yield from bar(cell, "native/go-equal", "p99_ms", 1.0, words="p99, same scorers / llm-d")
        if cell.connections == 32:
            words = "CPU, same scorers / constant answers of grpc-go"
            yield from bar(cell, "native/floor-go", "cpu_us", _MAX_OVER_FLOOR, words=words)
        if cell.connections == 1:
            words = "added p50, same scorers / constant answers of grpc-go"
            most = round(_MAX_ADDED_OVER_FLOOR, 2)
            yield from bar(cell, "native/floor-go", "added_p50_ms", most, words=words)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(spread: Sequence[float] | None, digits: int = 2) -> str:
    """Median with the least and the greatest in brackets."""
    if spread is None:
        return "-"
    median, least, most = (f"{value:,.{digits}f}" for value in spread)
    return f"{median} [{least} to {most}]"


def block(result: Mapping[str, Any]) -> str:
    """Tables of a run: bars, ratios, figures, idle, and where extproc loses."""
    loads = [cell for cell in result["cells"] if cell["name"] not in {it.name for it in IDLE}]
    missed = [bar for bar in bars(result) if not bar.is_met]
    total = sum(1 for _ in bars(result))
    return "\n".join(
        [
            f"{total - len(missed)} of {total} bars are met. {_losses(loads)}",
            "",
            "CPU of a request, ratios within rounds:",
            "",
            _ratio_table(loads, "cpu_us"),
            "",
            "p99, ratios within rounds:",
            "",
            _ratio_table(loads, "p99_ms"),
            "",
            "CPU of a request (µs):",
            "",
            _figure_table(loads, lambda row: _shown(row["cpu_us"], 0)),
            "",
            "Added p50 (p50 itself where the last column is empty) / p99 in ms, and requests/s:",
            "",
            _figure_table(loads, _latency),
            "",
            "Idle:",
            "",
            _idle_table(result),
            "",
            "Missed bars:",
            "",
            _bar_table(missed) if missed else "None.",
            "",
            f"{describe_run(result)} Load average {_shown(result['load'], 1)}. {result['peer']}.",
        ]
    )


def _ratio_table(cells: Sequence[Mapping[str, Any]], figure: str) -> str:
    pairs = [pair for pair in _PAIRS if pair[1] != "floor-go"]
    head = ["load", *(f"{NAMES[ours]} / {NAMES[theirs]}" for ours, theirs in pairs)]
    rows = [
        [
            cell["name"],
            *(
                _shown(cell["ratios"].get(f"{ours}/{theirs}", {}).get(figure))
                for ours, theirs in pairs
            ),
        ]
        for cell in cells
    ]
    return _table(head, rows)


def _figure_table(
    cells: Sequence[Mapping[str, Any]], show: Callable[[Mapping[str, Any]], str]
) -> str:
    names = [name for name in NAMES if any(name in cell["pickers"] for cell in cells)]
    rows = [
        [
            cell["name"],
            *(show(cell["pickers"][name]) if name in cell["pickers"] else "-" for name in names),
        ]
        for cell in cells
    ]
    return _table(["load", *(NAMES[name] for name in names)], rows)


def _latency(row: Mapping[str, Any]) -> str:
    p50 = row.get("added_p50_ms", row["p50_ms"])[0]
    return f"{p50:.2f} / {row['p99_ms'][0]:.1f}, {row['rps'][0]:,.0f}/s"


def _idle_table(result: Mapping[str, Any]) -> str:
    rows = [
        [
            cell["name"],
            NAMES[picker],
            _shown(row["cores"], 3),
            f"{row['scrapes_per_s'][0]:.0f}",
            f"{row['rss_mib'][0]:.0f}",
        ]
        for cell in result["cells"]
        if cell["name"] in {it.name for it in IDLE}
        for picker, row in cell["pickers"].items()
    ]
    return _table(["", "picker", "cores", "scrapes/s", "MiB resident"], rows)


def _bar_table(missed: Sequence[PeerBar]) -> str:
    rows = [
        [
            bar.load,
            bar.compared,
            f"{'>=' if bar.at_least else '<='} {bar.wanted:g}",
            f"{bar.measured:.3f}",
        ]
        for bar in missed
    ]
    return _table(["load", "ratio", "bar", "measured"], rows)


def _losses(cells: Sequence[Mapping[str, Any]]) -> str:
    """Loads in which extproc with the same scorers is behind llm-d at equal scrapes."""
    words = {"cpu_us": "CPU", "p99_ms": "p99"}
    losses = [
        f"{word} at {cell['name']} ({cell['ratios']['native/go-equal'][figure][0]:.2f} times)"
        for cell in cells
        for figure, word in words.items()
        if cell["ratios"].get("native/go-equal", {}).get(figure, [0.0])[0] > 1.0
    ]
    if not losses:
        return "With the same scorers extproc is ahead of llm-d in CPU and p99 at every load."
    return f"With the same scorers extproc is behind llm-d in {'; '.join(losses)}."
