"""Simulation runs of a scenario file: settings of the strategies, trace rows, processes.

Runs are spread over processes; what is sent to them are values, so that it works with `spawn`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from multiprocessing import connection
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from extproc.config import loader, profile_builder, validation, yaml_documents
from extproc.config.settings import Settings
from extproc.errors import ConfigError
from extproc.scheduling import registry
from extproc.scheduling.framework import Signal
from extproc.simulator.fleet import report, run_metrics, scenario, simulation, workloads
from extproc.simulator.fleet.client import Client

_ResultT = TypeVar("_ResultT")


class SimulationColumn(msgspec.Struct, frozen=True):
    """One strategy, ready to run.

    Attributes:
        name: What the results call it.
        settings: Configuration of its pickers; None for the clairvoyant one.
        client: How its requests are offered; None for the scenario's client.
        autoscaling: How many engines are up; None for what the scenario says.
        warnings: Parts of its configuration that have no effect.
    """

    name: str
    settings: Settings | None
    client: Client | None = None
    autoscaling: scenario.ScenarioAutoscaling | None = None
    warnings: Sequence[str] = ()


#: Signals that neither simulated requests nor simulated engines have.
_NOT_SIMULATED: Final = frozenset({Signal.HEADERS, Signal.EXTRA})


class SimulationPlan(msgspec.Struct, frozen=True):
    """Everything that will be run.

    Attributes:
        scenario: What is simulated; its seeds are those that are run.
        columns: Strategies, in the order of the results.
        trace: File with the rows of the workload; empty for none.
    """

    scenario: scenario.Scenario
    columns: Sequence[SimulationColumn]
    trace: str = ""

    @property
    def tasks(self) -> list[tuple[SimulationColumn, int]]:
        """Every run: strategy and seed. Seeds change last, so that columns fill together."""
        return [(column, seed) for seed in self.scenario.seeds for column in self.columns]


def plan(
    path: Path, *, strategies: Sequence[str], configs: Sequence[Path], seeds: Sequence[int]
) -> SimulationPlan:
    """Read a scenario.

    Args:
        strategies: Strategies or variants of the scenario to run, by name.
        configs: Configuration files to run besides. With neither, all strategies of the scenario.
        seeds: In place of the scenario's; empty for those.

    Raises:
        ConfigError: The scenario, a configuration, a strategy or the trace is wrong or missing.
    """
    where = str(path)
    loaded = read(path)
    own = {variant.name for variant in loaded.variants}
    wanted = _wanted(loaded, strategies, configs)
    loaded = msgspec.structs.replace(loaded, strategies=wanted, seeds=seeds or loaded.seeds)
    scenario.check(loaded, where=where)
    columns = [
        column(
            variant,
            folder=path.parent,
            where=where if variant.name in own else "the command line",
            has_labels=any(engines.labels for engines in loaded.fleet),
        )
        for variant in loaded.variants
    ]
    trace = _trace(loaded.workload, folder=path.parent, where=where)
    return SimulationPlan(loaded, columns, trace)


def read(path: Path) -> scenario.Scenario:
    """A scenario as its file says it.

    Raises:
        ConfigError: It cannot be read, or something in it is unknown, missing or out of range.
    """
    where = str(path)
    tree = yaml_documents.parse_tree(loader.read_text(path), where=where)
    yaml_documents.check_tree(tree, validation.Place(where))
    return validation.to_struct(tree, scenario.Scenario, where=where)


def column(
    variant: scenario.Variant, *, folder: Path, where: str, has_labels: bool = True
) -> SimulationColumn:
    """The settings of a variant.

    Args:
        variant: As the scenario says it.
        folder: What its configuration file is relative to.
        has_labels: False where no engine has labels, so that plugins that read them have no effect.

    Raises:
        ConfigError: The configuration is wrong, or there is no such strategy.
    """
    spot = f"{where}: strategy {variant.name}"
    if variant.strategy == scenario.CLAIRVOYANT:
        if variant.config or variant.settings:
            raise ConfigError(
                spot,
                wanted="no configuration beside the strategy clairvoyant",
                got="config" if variant.config else "settings",
                fix="remove it; nothing would read it",
            )
        return SimulationColumn(variant.name, None, variant.client, variant.autoscaling)
    _check_strategy(variant.strategy, where=spot)
    if variant.config:
        document = loader.read(folder / variant.config)
    else:
        document = msgspec.structs.replace(loader.EMPTY, where=spot, folder=str(folder))
    tree = _merged(document.tree, variant.settings)
    document = msgspec.structs.replace(document, tree=tree)
    overrides = []
    if variant.strategy:
        overrides.append(loader.FlagOverride(("scheduling", "strategy"), variant.strategy, spot))
    settings = loader.settings(document, overrides)
    needs = profile_builder.resolve_all(settings, where=spot).profile.needs
    warnings = [*document.warnings]
    absent = _NOT_SIMULATED if has_labels else _NOT_SIMULATED | {Signal.LABELS}
    if unknown := sorted(read.value for read in needs & absent):
        warnings.append(
            f"plugins that read {', '.join(unknown)} have no effect: simulations have none of that"
        )
    simulated = SimulationColumn(
        variant.name, settings, variant.client, variant.autoscaling, tuple(warnings)
    )
    check_stages([simulated], spot, with_prefill=True)
    return simulated


def check_stages(
    columns: Sequence[SimulationColumn], where: str, *, with_prefill: bool = False
) -> None:
    """Reject stages on other endpoints that are not simulated.

    Args:
        with_prefill: Whether prefill on other endpoints is simulated; encode never is.

    Raises:
        ConfigError: A column chooses endpoints for such a stage.
    """
    for settings in [column.settings for column in columns if column.settings is not None]:
        stages = profile_builder.resolve_all(settings, where=where).stages
        if stages is None or (with_prefill and stages.encode is None):
            continue
        names = ", ".join(profile.name for profile in stages.profiles)
        raise ConfigError(
            where,
            wanted="prefill at most on other endpoints than decode"
            if with_prefill
            else "endpoints that compute whole requests, as simulated ones do",
            got=f"{names} on other endpoints than decode",
            fix="remove scheduling.disaggregation, or the profile handler of the EndpointPickerConfig",
        )


def _check_strategy(name: str, *, where: str) -> None:
    # The check of configuration files does not know the clairvoyant one.
    known = [*registry.profiles(), scenario.CLAIRVOYANT]
    if name and name not in known:
        raise ConfigError(
            where,
            wanted=f"one of {', '.join(known)}",
            got=name,
            fix=validation.suggest(name, known, "name one, or a variant of the scenario"),
        )


def runs(todo: SimulationPlan, *, jobs: int) -> Iterator[report.Run]:
    """Run everything; yields each run when it is over.

    Args:
        jobs: Processes; 1 runs in this one.
    """
    calls = [
        functools.partial(run, todo.scenario, column, seed=seed, trace=todo.trace)
        for column, seed in todo.tasks
    ]
    for n, summary in run_calls(calls, jobs=jobs):
        column, seed = todo.tasks[n]
        yield report.Run(column.name, seed, summary)


def run_calls(
    calls: Sequence[Callable[[], _ResultT]], *, jobs: int
) -> Iterator[tuple[int, _ResultT]]:
    """Call functions in processes; yields the position and the result of each when it is over.

    Args:
        calls: Functions that can be pickled.
        jobs: Processes; 1 calls in this one.
    """
    if min(jobs, len(calls)) == 1:
        _collect_rarely()
        for n, call in enumerate(calls):
            yield n, call()
        return
    context = multiprocessing.get_context("spawn")
    with (
        _exit_on_sigterm(),
        futures.ProcessPoolExecutor(
            min(jobs, len(calls)), mp_context=context, initializer=_worker
        ) as pool,
    ):
        try:
            with _unheard_by_children():
                waiting = {pool.submit(call): n for n, call in enumerate(calls)}
            for future in futures.as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException:
            # Without this, leaving would wait for the runs in progress. It waits for the thread of
            # the pool, whose pipe the end of the interpreter would otherwise find half closed.
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def run(
    definition: scenario.Scenario, column: SimulationColumn, *, seed: int, trace: str
) -> run_metrics.RunSummary:
    """One strategy with one seed."""
    rows = trace_rows(trace)
    return simulation.run(
        definition,
        column.settings,
        seed=seed,
        rows=rows,
        client=column.client,
        autoscaling=column.autoscaling,
    )


@functools.cache
def trace_rows(trace: str) -> tuple[str, ...]:
    """Lines of a trace, none without its path; every run of a process reads the same ones."""
    return tuple(loader.read_text(Path(trace)).splitlines()) if trace else ()


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Exit on SIGTERM by an exception, so that the pool ends its workers and frees its semaphores."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _unheard_by_children() -> Iterator[None]:
    """Start processes that ignore SIGINT: the parent handles it and ends them.

    A blocked signal stays blocked across fork and exec (POSIX), so that it holds while a worker
    is still starting. What comes meanwhile is delivered to the parent at the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _worker() -> None:
    _collect_rarely()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End a worker when its parent was killed in the middle of a run."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _collect_rarely() -> None:
    # A turn over a thousand endpoints makes a thousand candidates, and Python would look for
    # cycles among everything alive after each: a fifth of the time.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def _wanted(
    loaded: scenario.Scenario, strategies: Sequence[str], configs: Sequence[Path]
) -> Sequence[str | scenario.Variant]:
    if not strategies and not configs:
        return loaded.strategies
    known = {variant.name: variant for variant in loaded.variants}
    named: list[str | scenario.Variant] = [known.get(name, name) for name in strategies]
    return named + [
        scenario.Variant(name=path.stem, config=str(path.absolute())) for path in configs
    ]


def _trace(workload: workloads.Workload, *, folder: Path, where: str) -> str:
    """The file of a trace, with the environment's names filled in."""
    if not isinstance(workload, workloads.TraceWorkload):
        return ""
    name = os.path.expandvars(workload.file)
    path = folder / name
    if "$" in name or not path.is_file():
        raise ConfigError(
            f"{where}: workload.file",
            wanted="a trace",
            got=f"an environment without the name in {workload.file}"
            if "$" in name
            else f"no file {path}",
            fix="set the variable to the folder that holds the trace"
            if "$" in name
            else "check the path; it is relative to the scenario",
        )
    return str(path)


def _merged(tree: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """A tree with the keys of another put over it, at every depth."""
    merged = dict(tree)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _merged(below, value) if both else value  # type: ignore[arg-type]  # both are
    return merged
