"""Runs of scenarios and strategies in processes, with results kept under `build/arena`.

A result belongs to a scenario, a strategy and the sources of `extproc`: with other sources it is run
again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import rig
from bench.arena import saturation, scenarios, score
from extproc.simulator import simulation_runs
from extproc.simulator.fleet import scenario, simulation
from extproc.simulator.fleet.run_metrics import RunMetrics

FOLDER = rig.ROOT / "build" / "arena"

#: Goodput counts answers whose first token came within so many times an idle engine's, and whose
#: tokens came within so many times its iteration.
GOOD_TTFT, GOOD_TPOT = 5.0, 2.5

#: Between the random seeds of two runs of a scenario: more than there are scenarios.
_REPEAT = 100_000


def sources() -> str:
    """Short name of the sources of `extproc`."""
    total = hashlib.sha256()
    for path in sorted((rig.ROOT / "extproc").rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()[:12]


def tournament(
    seeds: Sequence[int],
    variants: Sequence[scenario.Variant],
    *,
    jobs: int,
    may_test: bool = False,
    exchanges: bool = False,
    repeats: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> list[score.ScenarioRow]:
    """Run every variant on every scenario; what was run before is read.

    Args:
        seeds: Scenarios.
        variants: Strategies, each known by its name.
        jobs: Processes.
        may_test: Whether seeds may be of the test set.
        exchanges: Whether all pickers exchange their requests; the rates are those without.
        repeats: Runs of each variant on each scenario, with other arrivals; their mean counts.
        progress: Called with a line after each run.
    """
    rates = find_rates(seeds, jobs=jobs, may_test=may_test, progress=progress)
    drawn = {seed: scenarios.draw(seed, may_test=may_test) for seed in seeds}
    if exchanges:
        drawn = {seed: entry.exchanging for seed, entry in drawn.items()}
    # The first runs of all scenarios come before the second ones.
    calls = {
        _name(drawn[seed], variant, rates[seed], repeat): functools.partial(
            play,
            seed,
            variant,
            rate_per_s=rates[seed],
            may_test=may_test,
            exchanges=exchanges,
            repeat=repeat,
        )
        for repeat in range(repeats)
        for seed in seeds
        for variant in variants
    }
    results = cached(
        FOLDER / sources(), list(calls), list(calls.values()), jobs=jobs, progress=progress
    )

    def figures_of(entry: scenarios.ArenaScenario, variant: scenario.Variant) -> score.Figures:
        names = [_name(entry, variant, rates[entry.seed], repeat) for repeat in range(repeats)]
        return score.average([results[name] for name in names])

    return [
        score.ScenarioRow(
            seed,
            entry.title,
            entry.kinds,
            entry.load,
            {variant.name: figures_of(entry, variant) for variant in variants},
            entry.traits,
        )
        for seed, entry in drawn.items()
    ]


def add_exchanging(
    rows: Sequence[score.ScenarioRow],
    *,
    jobs: int,
    may_test: bool = False,
    repeats: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> list[score.ScenarioRow]:
    """Rows with a column of `adaptive` whose pickers exchange their requests, as manifests have it."""
    drawn = [scenarios.draw(row.seed, may_test=may_test) for row in rows]
    silent = [
        entry.seed
        for entry in drawn
        if entry.picking.replicas > 1 and entry.picking.share_delay_s is None
    ]
    adaptive = scenario.Variant(name=score.ADAPTIVE, strategy=score.ADAPTIVE)
    played = tournament(
        silent,
        [adaptive],
        jobs=jobs,
        may_test=may_test,
        exchanges=True,
        repeats=repeats,
        progress=progress,
    )
    exchanging = {row.seed: row for row in played}
    return [
        dataclasses.replace(
            row,
            columns={
                **row.columns,
                score.EXCHANGING: exchanging.get(row.seed, row).columns[score.ADAPTIVE],
            },
        )
        for row in rows
    ]


def play(
    seed: int,
    variant: scenario.Variant,
    *,
    rate_per_s: float,
    may_test: bool,
    exchanges: bool = False,
    repeat: int = 0,
) -> dict[str, float | None]:
    """Figures of one strategy on one scenario, by name; those of `score.FIGURES` and a few more.

    Args:
        repeat: Which of several runs with other arrivals (from 0).
    """
    drawn = scenarios.draw(seed, may_test=may_test)
    if exchanges:
        drawn = drawn.exchanging
    definition = drawn.at_rate(rate_per_s * drawn.load)
    column = simulation_runs.column(variant, folder=rig.ROOT, where="arena")
    run = simulation.Simulation(definition, column.settings, seed=seed + _REPEAT * repeat)
    return figures(drawn, run.run())


def figures(drawn: scenarios.ArenaScenario, metrics: RunMetrics) -> dict[str, float | None]:
    """Figures of a run by name, as `play` returns them."""
    summary = metrics.summary()
    times = saturation.idle_times(drawn)
    good = sum(
        not sent.failure
        and sent.first_s <= GOOD_TTFT * times.ttft_s
        and _tpot_s(sent.took_s - sent.first_s, sent.work.output_tokens) <= GOOD_TPOT * times.tpot_s
        for sent in metrics.requests
    )
    values = {
        "ttft_mean_s": summary.ttft_s.mean,
        "ttft_p99_s": summary.ttft_s.p99,
        "e2e_mean_s": summary.e2e_s.mean,
        "e2e_p99_s": summary.e2e_s.p99,
        "goodput": good / max(1, len(metrics.requests)),
        "requests_per_s": summary.requests_per_s,
        "requests": float(summary.requests),
        "failed": float(sum(summary.failed.values())),
        "hit_ratio": summary.hit_ratio,
        "predicted_ratio": summary.predicted_ratio,
        "requests_max_over_mean": summary.requests_max_over_mean,
    }
    return {
        name: None if math.isnan(value) else float(f"{value:.6g}") for name, value in values.items()
    }


def _tpot_s(seconds: float, tokens: int) -> float:
    return seconds / (tokens - 1) if tokens > 1 else 0.0


def _rate(seed: int, *, may_test: bool) -> float:
    return saturation.find_rate(scenarios.draw(seed, may_test=may_test))


def find_rates(
    seeds: Sequence[int],
    *,
    jobs: int,
    may_test: bool,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[int, float]:
    """Saturation of each scenario, recorded or found."""
    drawn = [scenarios.draw(seed, may_test=may_test) for seed in seeds]
    known = {entry.seed: saturation.recorded(entry) for entry in drawn}
    missing = [entry for entry in drawn if known[entry.seed] is None]
    calls = [functools.partial(_rate, entry.seed, may_test=may_test) for entry in missing]
    names = [f"{entry.seed}-{entry.key}" for entry in missing]
    results = cached(FOLDER / "rates", names, calls, jobs=jobs, progress=progress)
    rates = {entry.seed: results[name] for entry, name in zip(missing, names, strict=True)}
    return {seed: rates[seed] if rate is None else rate for seed, rate in known.items()}


def cached(
    folder: Path,
    names: Sequence[str],
    calls: Sequence[Callable[[], object]],
    *,
    jobs: int,
    progress: Callable[[str], None],
) -> dict:
    """Results of calls by name, each read from the folder or run and written to it."""
    folder.mkdir(parents=True, exist_ok=True)
    todo = [n for n, name in enumerate(names) if not (folder / f"{name}.json").exists()]
    done = simulation_runs.run_calls([calls[n] for n in todo], jobs=jobs) if todo else iter(())
    for count, (place, result) in enumerate(done, 1):
        name = names[todo[place]]
        # Renamed into place: a run that is ended leaves no half of a file.
        part = folder / f"{name}.{os.getpid()}"
        part.write_text(json.dumps(result))
        part.rename(folder / f"{name}.json")
        progress(f"{count} of {len(todo)}: {name}")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


def _name(
    drawn: scenarios.ArenaScenario, variant: scenario.Variant, rate_per_s: float, repeat: int
) -> str:
    """Name of the result of a run."""
    name = f"{drawn.seed}-{drawn.key}-{rate_per_s:g}-{_slug(variant)}"
    return f"{name}-repeat{repeat}" if repeat else name


def _slug(variant: scenario.Variant) -> str:
    """Name of a variant's results; settings and files of its own make another name."""
    if not variant.settings and not variant.config:
        return variant.name
    total = hashlib.sha256(json.dumps(variant.settings, sort_keys=True, default=str).encode())
    folder = rig.ROOT
    if variant.config:
        path = rig.ROOT / variant.config
        folder = path.parent
        total.update(path.read_bytes())
    settings = simulation_runs.column(variant, folder=rig.ROOT, where="arena").settings
    for name in settings.scheduling.plugin_files if settings else ():
        total.update((folder / name).read_bytes())
    return f"{variant.name}-{total.hexdigest()[:8]}"


def default_variants() -> list[scenario.Variant]:
    """Adaptive, the other strategies and the clairvoyant."""
    names = (score.ADAPTIVE, *score.OTHERS, score.CLAIRVOYANT)
    return [scenario.Variant(name=name, strategy=name) for name in names]


def configured_variants(
    paths: Sequence[Path], *, warn: Callable[[str], None] = lambda _: None
) -> list[scenario.Variant]:
    """Strategies of configuration files, named by their files.

    Args:
        warn: Called with each warning about a file, such as that its plugins have no effect.

    Raises:
        ConfigError: A file is missing or wrong.
        ValueError: Another column has the name.
    """
    taken = {variant.name for variant in default_variants()} | {score.EXCHANGING}
    variants = []
    for path in paths:
        if path.stem in taken:
            raise ValueError(
                f"--config: expected a file with a name of its own, got {path.name}; rename it"
            )
        taken.add(path.stem)
        variant = scenario.Variant(name=path.stem, config=str(path.resolve()))
        for warning in simulation_runs.column(variant, folder=rig.ROOT, where="--config").warnings:
            warn(f"{path}: {warning}")
        variants.append(variant)
    return variants
