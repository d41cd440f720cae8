"""`make bench-peers`: extproc beside llm-d's endpoint picker, behind one Envoy.

    python -m bench.peers [--only cost|routing] [--rounds 8] [--seconds 1.0] [--write]
    python -m bench.peers --quick       # cost only, two short rounds, nothing is written

All pickers are up the entire time and are loaded in turns, in an order that rotates with every
round; those whose turn it is not are paused, so that their scraping costs nothing. Ratios are taken
within rounds. Engines, load and Envoy share the machine with the pickers, so CPU time (user and
system, of the process and its children) is the measure; latency is that of a busy machine.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench import rig
from bench.peers import report, routing
from bench.peers.cells import CELLS, IDLE, Cell, CellMeasurement, measure_idle, measure_picker
from bench.peers.pickers import Setting, peer_rig
from extproc.errors import ConfigError


def find_peer(name: str) -> str:
    """The path of llm-d's picker.

    Raises:
        ConfigError: There is none.
    """
    path = shutil.which(name)
    if path is None:
        raise ConfigError(
            "--epp",
            wanted="llm-d's endpoint picker, built from cmd/epp of github.com/llm-d/llm-d-router",
            got=f"no program {name}",
            fix="build it, then make bench-peers EPP=PATH; or compare others: --pickers native grpcio",
        )
    return path


def describe_peer(epp: str, version: str) -> str:
    """Module and version of llm-d's picker, and the Go release that built it."""
    lines = subprocess.run(
        ["go", "version", "-m", epp], capture_output=True, check=True, text=True
    ).stdout.splitlines()
    facts = {fields[0]: fields[1:] for line in lines if (fields := line.split())}
    return f"{facts['mod'][0]} {version or facts['mod'][1]}, {lines[0].rpartition(' ')[2]}"


def compare(
    cells: Sequence[Cell], *, idle: Sequence[Cell], rounds: int, seconds: float, epp: str
) -> list[CellMeasurement]:
    """Measure all cells in every round, and idle pickers before the first one."""
    rows: list[tuple[str, Setting]] = list(
        dict.fromkeys((picker, cell.setting) for cell in (*cells, *idle) for picker in cell.pickers)
    )
    rows = [row for row in rows if row[0] != "direct" or row[1] == "plain"]
    measurements: list[CellMeasurement] = []
    with peer_rig(rows, epp=epp) as running:
        for cell in idle:
            for picker in cell.pickers:
                figures = measure_idle(running, picker, cell)
                measurements += _printed(figures)
        for number in range(rounds):
            start = time.monotonic()
            turn = number % len(rows)
            for picker, setting in rows[turn:] + rows[:turn]:
                mine = [it for it in cells if it.setting == setting and picker in it.pickers]
                figures = measure_picker(
                    running, picker, setting, mine, number=number, seconds=seconds
                )
                measurements += _printed(figures)
            print(f"round {number + 1} took {time.monotonic() - start:.0f} s", flush=True)
    return measurements


def _printed(rows: list[CellMeasurement]) -> list[CellMeasurement]:
    for row in rows:
        print(_line(row), flush=True)
    return rows


def _line(row: CellMeasurement) -> str:
    return (
        f"{row.round} {row.picker:12} {row.cell:36} {row.requests:6} requests, CPU {row.cpu_us:7.0f} us, "
        f"{row.cores:.2f} cores, p50 {row.p50_ms:7.2f} and p99 {row.p99_ms:7.1f} ms, {row.rps:6.0f}/s, "
        f"{row.scrapes_per_s:4.0f} scrapes/s, load {row.load:.1f}"
    )


def run_cost(args: argparse.Namespace) -> None:
    """Compare what requests cost."""
    cells, idle = (
        [
            msgspec.structs.replace(
                cell, pickers=[it for it in cell.pickers if not args.pickers or it in args.pickers]
            )
            for cell in table
            if not args.cells or any(text in cell.name for text in args.cells)
        ]
        for table in (CELLS, () if args.quick else IDLE)
    )
    rounds, seconds = (2, 0.5) if args.quick else (args.rounds, args.seconds)
    result = report.summarize(
        compare(cells, idle=idle, rounds=rounds, seconds=seconds, epp=args.epp)
    )
    for bar in report.bars(result):
        print(
            f"{'met   ' if bar.is_met else 'MISSED'} {bar.load}: {bar.compared} {bar.measured:.2f} "
            f"({'at least' if bar.at_least else 'at most'} {bar.wanted:g})"
        )
    if args.write and not args.quick:
        words = f"--only cost --rounds {rounds} --seconds {seconds:g}"
        write("peers", words, {"peer": describe_peer(args.epp, args.epp_version), **result})


def run_routing(args: argparse.Namespace) -> None:
    """Compare where requests go."""
    pickers, rounds = args.pickers or routing.PICKERS, args.routing_rounds
    runs = routing.compare(pickers, rounds=rounds, epp=args.epp)
    if args.write:
        figures = {
            "peer": describe_peer(args.epp, args.epp_version),
            "rows": routing.summarize(runs),
        }
        write("peers_routing", f"--only routing --routing-rounds {rounds}", figures)


def write(name: str, words: str, figures: Mapping[str, Any]) -> None:
    """Write a result with the command that repeats it."""
    rig.write(name, f"make bench-peers EPP=epp ARGS='{words}'", dict(figures))


def main() -> None:
    """Run one of the two comparisons, or both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--epp", default="epp", metavar="PATH", help="llm-d's endpoint picker (%(default)s)")
    add("--epp-version", default="", metavar="TEXT", help="if its binary does not know it")
    add("--only", choices=["cost", "routing"], help="one of the two comparisons")
    add("--rounds", type=int, default=8, help="of the cost (%(default)s)")
    add("--seconds", type=float, default=1.0, help="of a slice of time (%(default)s)")
    add("--routing-rounds", type=int, default=3, help="of the routing (%(default)s)")
    add("--cells", nargs="+", default=[], metavar="TEXT", help="loads with it in their names")
    add("--pickers", nargs="+", default=[], metavar="NAME", help="only these")
    add("--quick", action="store_true", help="two rounds of half a second of cost")
    add("--write", action="store_true", help="write bench/results/peers*.json")
    args = parser.parse_args()
    if not args.pickers or any(name.startswith("go") for name in args.pickers):
        args.epp = find_peer(args.epp)
    if args.only != "routing":
        run_cost(args)
    if args.only == "routing" or not (args.only or args.quick):
        run_routing(args)


if __name__ == "__main__":
    main()
