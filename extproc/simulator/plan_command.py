"""`extproc plan`: the smallest fleet that meets objectives on recorded requests.

    extproc plan decisions.jsonl --slo ttft_p95=1s --slo tpot_mean=50ms

Fleets of 1, 2, 4 and so on engines are simulated until one is enough, and then sizes between; where none
is, sizes around the best of them. Each engine is like the usual one of the recording. A fleet is enough if
it meets every objective and answers every request; one that is far from that is simulated once only. The
figures are estimates.

Exit status: 0 a fleet is enough, 1 none is, 2 wrong flags or files.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from extproc.errors import ConfigError
from extproc.simulator import fleet_plan, replay, replay_command
from extproc.simulator.fleet_plan import FleetPlanner, FleetSize, Objective
from extproc.simulator.simulate_command import (
    count,
    require_outputs,
    text_output,
    write_json,
)
from extproc.simulator.ttft_comparison import count_of

#: Simulated time over that of the recording, and seconds besides, in which all answers have to end.
_UNTIL_RATIO, _UNTIL_S = 1.5, 600.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    replay_command.add_source(parser)
    add = parser.add_argument
    add(
        "--slo",
        action="append",
        default=[],
        metavar="OBJECTIVE",
        help="such as ttft_p95=1s: ttft, tpot, itl or e2e, and mean, p50, p90, p95 or p99; repeatable",
    )
    add("--strategy", metavar="NAME", help="strategy; default: that of the recording")
    add(
        "--max-engines",
        type=functools.partial(count, most=replay_command.MAX_ENGINES),
        default=256,
        metavar="N",
        help="largest fleet (%(default)s)",
    )
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="write every fleet as JSON; - is standard output, with the text on standard error",
    )
    add("--plots", type=Path, metavar="FOLDER", help="write a plot of every fleet as PNG and SVG")


def run(args: argparse.Namespace) -> int:
    """Plan; returns the exit status, see the head of this module.

    Raises:
        ConfigError: The file or a flag is wrong.
    """
    objectives = [fleet_plan.parse_objective(text) for text in args.slo]
    if not objectives:
        raise ConfigError(
            "--slo",
            wanted="at least one objective",
            got="none",
            fix="write --slo ttft_p95=1s",
        )
    if args.engines is not None:
        raise ConfigError(
            "--engines",
            wanted="no number of engines, as fleets of several sizes are simulated",
            got=str(args.engines),
            fix="remove it; --max-engines N is the largest fleet",
        )
    require_outputs(args.json, folder=args.plots)
    if args.plots:
        from extproc.simulator import report_plots

        report_plots.require()
    strategies = [args.strategy] if args.strategy else []
    # The fleets are of any size: one engine says what each of them is like.
    loaded = replay_command.load(args, strategies=strategies, configs=(), num_engines=1)
    definition = replay.scenario_of(loaded, range(1, args.seeds + 1))
    replay_command.require_fitting(loaded)
    column = loaded.columns[-1]
    planner = FleetPlanner(
        definition,
        column,
        objectives,
        until_s=_UNTIL_RATIO * loaded.traffic.duration_s + _UNTIL_S,
        jobs=args.jobs,
        on_run=lambda engines: print(f"simulated {count_of(engines, 'engine')}", file=sys.stderr),
    )
    best = planner.plan(args.max_engines)
    source = replay_command.source_line(loaded, has_fleet=len(loaded.agreements) > 0)
    estimates = f"Estimates: {column.name}, mean of {count_of(args.seeds, 'simulation')}\n"
    lines = [source, estimates, *describe(objectives, planner.sizes, best)]
    print("\n".join(lines), file=text_output(args.json))
    if args.plots:  # first, as it makes the folder, where the JSON file may be
        for path in report_plots.draw_sizes(args.plots, objectives, planner.sizes):
            print(f"wrote {path}", file=sys.stderr)
    if args.json:
        write_json(args.json, msgspec.json.encode(planner.sizes) + b"\n")
    return 0 if best else 1


def describe(
    objectives: Sequence[Objective], sizes: Sequence[FleetSize], best: FleetSize | None
) -> Iterator[str]:
    """A line for each fleet, and the verdict."""
    width = max(12, *(len(objective.text) for objective in objectives))
    yield "engines  " + "  ".join(o.text.rjust(width) for o in objectives) + "  unanswered  enough"
    for size in sizes:
        cells = "  ".join(
            _milliseconds(size.figures[objective.figure]).rjust(width) for objective in objectives
        )
        answer = "yes" if size.is_enough else "no"
        yield f"{size.engines:7}  {cells}  {size.unanswered:10.1%}  {answer:>6}"
    yield ""
    if best is None:
        most = sizes[-1].engines
        yield f"Verdict: none of these fleets, of up to {count_of(most, 'engine')}, would be enough"
    else:
        yield f"Verdict: the smallest fleet that is enough has {count_of(best.engines, 'engine')}"


def _milliseconds(seconds: float) -> str:
    return "no answer" if math.isnan(seconds) else f"{1e3 * seconds:.0f} ms"
