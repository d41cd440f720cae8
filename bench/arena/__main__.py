"""Plays the default strategy and published ones on random scenarios, and scores them.

    python -m bench.arena [--set training|validation] [--count N] [--repeats N] [--jobs N] [--write]
    python -m bench.arena --config FILE [--set training|validation] [--count N] [--repeats N] [--jobs N]
    python -m bench.arena --ablate [--set training|validation] [--count N] [--jobs N] [--write]
    python -m bench.arena --knowledge [--set training|validation] [--count N] [--jobs N] [--write]
    python -m bench.arena --peers [--set training|validation] [--count N] [--repeats N] [--jobs N] [--write]
    python -m bench.arena --exchange [--set training|validation] [--count N] [--jobs N]
    python -m bench.arena --test [--repeats N] [--jobs N]

Nothing is measured in real time: the same tree and seed give the same numbers anywhere. With
`--config` the strategy of a configuration file is played and scored as well; that is not written. With
`--ablate` the default is played beside itself without each constant of its cost, with `--knowledge`
beside itself with inputs of its cost exact, with `--peers` beside rules of other systems and papers.
With `--exchange` the scenarios with several pickers are
played, all of which exchange their requests; that is not written. Without arguments the first forty scenarios of the
training set are played. The test set is for releases: it is played as a whole, from a committed tree,
and always written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import rig
from bench.arena import (
    ablation,
    knowledge,
    peers,
    report,
    saturation,
    scenarios,
    score,
    tournament,
)
from extproc.errors import ExtprocError
from extproc.simulator.fleet import scenario

NAME = "arena"

#: Scenarios of the quick run, and of the test set: several runs of each take as long as more scenarios,
#: and say more of which strategy is the best in it.
COUNT = 40

#: Parts of the record by the flag that makes them.
_PARTS = {"ablate": "ablations", "knowledge": "knowledge", "peers": "peers"}

#: Of a record that is printed and not written.
_UNKNOWN = {"command": "", "date": "", "commit": ""}


def main() -> None:
    args, own = parse()
    name, count = ("test", COUNT) if args.test else (args.set, args.count)
    writes = args.write or args.test
    if writes and is_dirty():
        sys.exit("expected a committed tree, found changes; commit them, or leave out --write")
    first = scenarios.SETS[name]
    seeds: Sequence[int] = range(first, first + count)
    if args.exchange:
        seeds = [seed for seed in seeds if scenarios.draw(seed).picking.replicas > 1]
    began = time.monotonic()

    def progress(line: str) -> None:
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    part = "sets"
    for flag, name_of_part in _PARTS.items():
        part = name_of_part if getattr(args, flag) else part
    if args.knowledge:
        rows = knowledge.rows(seeds, jobs=args.jobs, progress=progress)
        entry = knowledge.record(rows)
    else:
        common = {
            "jobs": args.jobs,
            "may_test": args.test,
            "repeats": args.repeats,
            "progress": progress,
        }
        extra = peers.variants() if args.peers else own
        variants = ablation.variants() if args.ablate else [*tournament.default_variants(), *extra]
        rows = tournament.tournament(seeds, variants, exchanges=args.exchange, **common)
        if part == "sets":
            rows = tournament.add_exchanging(rows, **common)
        recorder = {"ablations": ablation, "peers": peers, "sets": report}[part]
        entry = recorder.record(rows, repeats=args.repeats)
    if args.ablate:
        entry["elsewhere"] = ablation.elsewhere(jobs=args.jobs, progress=progress)
    print(f"\r\x1b[K{len(seeds)} scenarios in {time.monotonic() - began:.0f} s", file=sys.stderr)
    if args.knowledge or args.peers:
        print({"knowledge": knowledge, "peers": peers}[part].block({**_UNKNOWN, **entry}))
    elif args.ablate:
        for constant, values in [*entry["constants"].items(), *entry["elsewhere"].items()]:
            print(constant, values)
    else:
        for figure, values in entry["figures"].items():
            print(figure, values["published"], "exchanging", values["exchanging"]["mean"], end="")
            print(" clairvoyant", values["clairvoyant"]["mean"])
        print("worse than 1.05 in any figure", entry["worse_5_percent_in_any"])
        for row in entry["worst"]:
            print(row)
        print_scores(rows, own)
    if writes:
        flags = "".join(f"--{flag} " for flag in _PARTS if getattr(args, flag))
        about = "--test" if args.test else f"{flags}--set {name} --count {count} --write"
        again = "" if args.repeats == 1 else f" --repeats {args.repeats}"
        command = f"python -m bench.arena {about}{again}"
        _write(part, name, command, entry, rows)


def parse() -> tuple[argparse.Namespace, list[scenario.Variant]]:
    """Read the flags, and the strategies of `--config`."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--set", choices=("training", "validation"), default="training")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--jobs", "-j", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=1, help="runs of a strategy on a scenario")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--test", action="store_true", help="the test set, once for a release")
    parser.add_argument("--ablate", action="store_true", help="the default without each constant")
    parser.add_argument("--knowledge", action="store_true", help="the default with inputs exact")
    parser.add_argument("--peers", action="store_true", help="rules of other systems and papers")
    parser.add_argument("--exchange", action="store_true", help="several pickers that exchange")
    parser.add_argument(
        "--config", type=Path, action="append", default=[], help="a strategy of yours; repeatable"
    )
    args = parser.parse_args()
    modes = args.test + args.ablate + args.knowledge + args.peers + args.exchange
    if modes > 1:
        parser.error("--test, --ablate, --knowledge, --peers and --exchange exclude each other")
    if args.config and (args.write or modes):
        parser.error("--config goes with --set, --count, --repeats and --jobs only")
    try:
        own = tournament.configured_variants(args.config, warn=warn)
    except (ValueError, ExtprocError) as error:
        parser.error(str(error))
    if args.exchange and args.write:
        parser.error("results of --exchange are not written")
    if args.knowledge and args.repeats > 1:
        parser.error("--knowledge plays each scenario a single time")
    return args, own


def warn(line: str) -> None:
    """Print a warning."""
    print(f"warning: {line}", file=sys.stderr)


def print_scores(rows: Sequence[score.ScenarioRow], variants: Sequence[scenario.Variant]) -> None:
    """Print the scores of configured strategies against the best published ones."""
    for name in [variant.name for variant in variants]:
        for figure in score.FIGURES:
            scored = score.score(rows, figure, ours=name, others=score.PUBLISHED)
            if scored.scenarios:
                print(
                    f"{name} {figure} {scored.mean:.3f} ({scored.low:.3f} to {scored.high:.3f}), "
                    f"worst {scored.worst:.3f} in seed {scored.worst_seed}"
                )
        share = score.share_worse(rows, report.BAD_FIGURES, ours=name)
        print(f"{name} worse than 1.05 in any figure {share:.3f}")


def _write(part: str, name: str, command: str, entry: dict, rows: list[score.ScenarioRow]) -> None:
    """Put the entry of a set into its part of the record, and keep the rates of its scenarios."""
    path = rig.RESULTS / f"{NAME}.json"
    parts: dict[str, dict] = {"sets": {}, **{key: {} for key in _PARTS.values()}}
    if path.exists():
        before = json.loads(path.read_text())
        parts = {key: before.get(key, {}) for key in parts}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    about = {"command": command, "commit": commit, "date": time.strftime("%Y-%m-%d")}
    sets = parts[part] | {name: about | entry}
    parts[part] = {key: sets[key] for key in scenarios.SETS if key in sets}
    rig.write(NAME, command, parts)
    path = rig.RESULTS / f"{saturation.RECORD}.json"
    rates = json.loads(path.read_text())["rates"] if path.exists() else {}
    is_test = name == "test"
    session_rates = tournament.find_rates([row.seed for row in rows], jobs=1, may_test=is_test)
    for seed, rate in session_rates.items():
        rates[str(seed)] = {scenarios.draw(seed, may_test=is_test).key: rate}
    ordered = dict(sorted(rates.items(), key=lambda item: int(item[0])))
    rig.write(saturation.RECORD, command, {"rates": ordered})


def is_dirty() -> bool:
    """True if anything differs from the commit but records and pages, which change no result."""
    paths = ("--", ".", ":!bench/results", ":!docs")
    status = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", *paths],
        capture_output=True,
        text=True,
        check=True,
        cwd=rig.ROOT,
    )
    return bool(status.stdout.strip())


if __name__ == "__main__":
    main()
