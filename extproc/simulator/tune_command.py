"""`extproc tune`: search for better numbers of a strategy on recorded requests.

    extproc tune decisions.jsonl --trials 40

The search simulates the earlier part of the requests, and makes their mean time to the first token
small. Its result is compared with the strategy as it
is on the later part, which the search has not used: a gain that chance explains is called noise. The
profile is printed as a configuration has it. The figures are estimates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import yaml

from extproc.errors import ConfigError
from extproc.simulator import replay, replay_command
from extproc.simulator.replay_tuning import Tuner, TuningResult
from extproc.simulator.simulate_command import (
    Progress,
    count,
    require_outputs,
    text_output,
    write_json,
)
from extproc.simulator.ttft_comparison import verdict_line

#: Requests below which a part says nothing (count).
_MIN_REQUESTS = 50


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    replay_command.add_source(parser)
    add = parser.add_argument
    add("--strategy", metavar="NAME", help="strategy to tune; default: that of the recording")
    add(
        "--trials",
        type=count,
        default=40,
        metavar="N",
        help="values that are simulated (%(default)s)",
    )
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the result as JSON; - is standard output, with the text on standard error",
    )


def run(args: argparse.Namespace) -> int:
    """Tune; returns the exit status.

    Raises:
        ConfigError: The file or a flag is wrong.
    """
    require_outputs(args.json)
    strategies = [args.strategy] if args.strategy else []
    loaded = replay_command.load(args, strategies=strategies, configs=())
    definition = replay.scenario_of(loaded, range(1, args.seeds + 1))
    replay_command.require_fitting(loaded)
    settings = loaded.columns[-1].settings
    training, held_out = loaded.traffic.split(0.5)
    sizes = [len(training.places), len(held_out.places)]
    if settings is None or min(sizes) < _MIN_REQUESTS:
        raise ConfigError(
            str(args.file),
            wanted=f"at least {_MIN_REQUESTS} requests to search with and as many to judge by",
            got=" and ".join(map(str, sizes)),
            fix="record for longer",
        )
    progress = Progress(1 + args.trials + 2 * args.seeds, sys.stderr)
    tuner = Tuner(
        definition,
        settings,
        training,
        held_out,
        jobs=args.jobs,
        on_run=progress.step,
    )
    try:
        result = tuner.tune(args.trials)
    finally:
        progress.close()
    lines = [replay_command.source_line(loaded), *describe(result, loaded.columns[-1].name)]
    print("\n".join(lines), file=text_output(args.json))
    if args.json:
        write_json(args.json, msgspec.json.encode(result) + b"\n")
    return 0


def describe(result: TuningResult, name: str) -> Iterator[str]:
    """Lines of the result, for a terminal."""
    yield f"Estimates: {result.trials} variants of {name}"
    comparison = result.comparison
    if comparison is None:
        yield "Verdict: nothing was better than the strategy as it is"
        return
    for number, before, after in result.changed:
        yield f"  {number}: {before:g} -> {after:g}"
    yield f"mean TTFT where it was searched: {100 * result.training_ratio - 100:+.1f} %"
    yield f"{verdict_line(comparison)} (requests that the search did not use)"
    if not comparison.is_better:
        yield "Keep the strategy as it is."
        return
    tree = {"scheduling": {"profile": msgspec.to_builtins(result.entry)}}
    yield ""
    yield yaml.safe_dump(tree, sort_keys=False).rstrip()
