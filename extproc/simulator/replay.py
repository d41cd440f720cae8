"""Replay of recorded requests, simulated with learned step times, strategy beside strategy.

What comes out are estimates. How far they can be trusted shows the recording itself: it is simulated
with the decisions that it has, and compared with what was measured.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import msgspec

from extproc.config import profile_builder
from extproc.config.settings import Settings
from extproc.errors import ConfigError
from extproc.recording import reader, rows
from extproc.simulator import replay_traces, replay_traffic, simulation_runs
from extproc.simulator.fleet import report, run_metrics, scenario, simulation, workloads
from extproc.simulator.fleet.client import Client
from extproc.simulator.fleet.sim_request import SimSession
from extproc.simulator.replay_agreement import AgreementMeter, AgreementSummary, merge_summaries
from extproc.simulator.simulation_runs import SimulationColumn
from extproc.simulator.traffic import MAX_REQUESTS, Traffic, TrafficPart, require_short_gaps
from extproc.simulator.ttft_comparison import TtftComparison

#: What the strategy of the recording is called.
RECORDED: Final = "recorded"

#: Share of a recording that warms caches up, where the picker knew of some when it began.
_WARM_UP_RATIO: Final = 0.1

#: Resamples of a bootstrap, and blocks of consecutive requests among which it draws (count).
_RESAMPLES: Final = 1000
_BLOCKS: Final = 50

#: Seconds from an answer to the next turn, besides the recorded ones.
_TURNAROUND_S: Final = 1e-6


class Replay(msgspec.Struct, frozen=True):
    """A recording, ready to simulate.

    Attributes:
        where: The file.
        settings: Configuration of the picker that recorded.
        agreements: Recorded decisions made again, by each strategy; empty for a trace, which has none.
        columns: Strategies to simulate, the recorded one first.
        lost: Rows that the recorder dropped (count).
        since_s: Seconds from the first request; earlier ones warm up.
        is_reconfigured: Whether the configuration changed while it was recorded; `settings` and
            `columns` are of the last one.
        rate_scale: Rate of the requests over that of the recording.
    """

    where: str
    traffic: Traffic
    fleet: Sequence[scenario.EngineGroup]
    settings: Settings
    agreements: Sequence[AgreementSummary]
    columns: Sequence[SimulationColumn]
    lost: int = 0
    since_s: float = 0.0
    is_reconfigured: bool = False
    rate_scale: float = 1.0

    @property
    def title(self) -> str:
        """The file and the rate."""
        if self.rate_scale == 1.0:
            return self.where
        return f"{self.where} at {self.rate_scale:g} times its rate"

    def scaled(self, rate_scale: float) -> Replay:
        """The same requests in less time, see `Traffic.scaled`.

        Raises:
            ConfigError: They are too far apart then.
        """
        traffic = self.traffic.scaled(rate_scale)
        scaled = msgspec.structs.replace(
            self,
            traffic=traffic,
            since_s=self.since_s / rate_scale,
            rate_scale=self.rate_scale * rate_scale,
        )
        require_short_gaps([request.at for request in traffic.requests], scaled.title)
        return scaled


class ReplayRun(msgspec.Struct, frozen=True):
    """One strategy with one seed.

    Attributes:
        ttft_s: Seconds to the first token by request, by time of arrival; NaN where it failed or
            warmed up.
        unanswered: Share of all requests that failed or were not answered in the simulated time,
            0..1; those that warm up count as well.
    """

    summary: run_metrics.RunSummary
    ttft_s: Sequence[float]
    unanswered: float = 0.0


class Fidelity(msgspec.Struct, frozen=True):
    """Mean time to first token of the requests for which one was recorded; NaN without any.

    Estimates are NaN where none of these requests was answered in both simulations.

    Attributes:
        measured_s: As recorded.
        estimated_s: Simulated with the recorded decisions.
        new_s: Simulated with new decisions of the recorded strategy, mean over seeds.
    """

    measured_s: float
    estimated_s: float
    new_s: float


def load(
    path: Path,
    *,
    strategies: Sequence[str],
    configs: Sequence[Path],
    pool: str | None = None,
    max_requests: int = MAX_REQUESTS,
    limits: Mapping[str, float] | None = None,
) -> Replay:
    """Read a recording, and make its decisions again.

    Args:
        strategies: Strategies to compare with the recorded one, by name.
        configs: Configuration files to compare.
        pool: Name of the pool; None takes the only one.
        limits: Numbers of the engines, by field of their profile.

    Raises:
        ConfigError: The file is no recording, or a strategy or a configuration is wrong.
    """
    where = str(path)
    source = reader.RecordingReader(where)
    requests = replay_traffic.TrafficReader(pool=pool, where=where, max_requests=max_requests)
    header: rows.HeaderRow | None = None
    settings: Settings | None = None
    columns: list[SimulationColumn] = []
    meters: list[AgreementMeter] = []
    ended: list[AgreementMeter] = []
    for event in requests.read(source.read(reader.read_lines(path))):
        if not isinstance(event, reader.RecordedDecision):
            continue
        if source.header is not header:
            header = source.header
            current = recorded_settings(header, where, pool=event.row.pool)
            if current != settings:
                ended += meters
                settings = current
                columns = columns_of(settings, strategies, configs, has_labels=True)
                meters = [AgreementMeter(c.name, c.settings) for c in columns if c.settings]
        for meter in meters:
            meter.add(event)
    if settings is None:
        settings = recorded_settings(source.require_header(), where, pool=pool or "")
    states = [known for known in source.endpoints.values() if pool in {None, known.pool}]
    traffic = requests.traffic(settings.prefix.schedule, states)
    fleet = requests.fleet(states, limits or {})
    return Replay(
        where,
        traffic,
        fleet,
        settings,
        merge_summaries(meter.summary() for meter in (*ended, *meters)),
        columns,
        lost=source.lost,
        is_reconfigured=len(ended) > 0,
        since_s=0.0 if requests.is_cold else _WARM_UP_RATIO * traffic.duration_s,
    )


def load_trace(
    path: Path,
    format_: replay_traces.Format,
    *,
    strategies: Sequence[str],
    configs: Sequence[Path],
    fleet: scenario.EngineGroup,
    rate_per_s: float | None = None,
    max_requests: int = MAX_REQUESTS,
) -> Replay:
    """Read a published trace or a dataset, which knows neither a picker nor engines.

    Args:
        strategies: Strategies to compare, by name; none means the default one.
        configs: Configuration files to compare.
        fleet: The engines.
        rate_per_s: See `replay_traces.read`.

    Raises:
        ConfigError: The file is not what its format says, or a strategy or configuration is wrong.
    """
    settings = Settings()
    columns = columns_of(settings, strategies, configs, has_labels=False)[1:] or [
        SimulationColumn(settings.scheduling.strategy, settings)
    ]
    traffic = replay_traces.read(path, format_, rate_per_s=rate_per_s, max_requests=max_requests)
    return Replay(str(path), traffic, [fleet], settings, (), columns)


def recorded_settings(header: rows.HeaderRow | None, where: str, *, pool: str = "") -> Settings:
    """Configuration of the picker that recorded, as far as decisions depend on it.

    Args:
        pool: Name of the pool, which may have sections of its own.
    """
    if header is None:
        raise ConfigError(where, wanted="a recording", got="no header", fix="check the file")
    base = Settings()
    trees = {**header.settings, **header.pools.get(pool, {})}
    try:
        sections = {
            name: msgspec.convert(tree, type(getattr(base, name)))
            for name, tree in trees.items()
            if name in base.__struct_fields__
        }
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{where}: line 1",
            wanted="settings of this version of extproc",
            got=f"{error}, recorded by version {header.software or 'unknown'}",
            fix="record again, or replay with the version that recorded",
        ) from None
    return msgspec.structs.replace(base, **sections)


def columns_of(
    settings: Settings, strategies: Sequence[str], configs: Sequence[Path], *, has_labels: bool
) -> list[SimulationColumn]:
    """The recorded strategy, and those to compare it with.

    Args:
        has_labels: Whether engines have labels, as those of recordings do.

    Raises:
        ConfigError: A strategy or configuration is wrong.
    """
    recorded = profile_builder.build_profile(settings, where="the recording").name
    columns = [SimulationColumn(f"{RECORDED} ({recorded})", settings)]
    for name in strategies:
        if name == RECORDED:
            continue
        # Only adaptive has a goal, and the recorded one cannot be left out of a recording.
        goal = settings.scheduling.goal if name == "adaptive" else "balanced"
        other = msgspec.structs.replace(
            settings.scheduling, strategy=name, goal=goal, profile=None, epp=None, models={}
        )
        changed = msgspec.structs.replace(settings, scheduling=other)
        profile_builder.resolve_all(changed, where="--strategy")
        columns.append(SimulationColumn(name, changed))
    column_of = functools.partial(simulation_runs.column, where="--config", has_labels=has_labels)
    for path in configs:
        variant = scenario.Variant(name=path.stem, config=str(path.absolute()))
        columns.append(column_of(variant, folder=path.parent))
    names = [column.name for column in columns]
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice:
        raise ConfigError(
            "--strategy", wanted="names that differ", got=f"{twice!r} twice", fix="remove one"
        )
    return columns


def scenario_of(replay: Replay, seeds: Sequence[int]) -> scenario.Scenario:
    """The recording as a scenario of the simulator.

    Raises:
        ConfigError: The recording knows no engine, its numbers do not go together, or a column has
            stages on other endpoints.
    """
    simulation_runs.check_stages(replay.columns, replay.where)
    if not replay.fleet:
        raise ConfigError(
            replay.where,
            wanted="endpoints with scraped loads",
            got="none",
            fix="record with candidates, that is with endpoints that are scraped",
        )
    workload = workloads.FixedWorkload(replay.traffic.sessions, replay.traffic.adapter_names)
    for engines in replay.fleet:
        engines.resolved()
    return scenario.Scenario(
        title=f"{replay.title}, estimates",
        fleet=replay.fleet,
        # Not one of scenario files, whose schema this field has.
        workload=cast("workloads.Workload", workload),
        client=Client(turnaround_s=_TURNAROUND_S),
        picking=scenario.Picking(with_max_tokens=replay.traffic.knows_max_tokens),
        strategies=[scenario.Variant(name=column.name) for column in replay.columns],
        seeds=[*seeds],
        measure_from_s=replay.since_s,
        until_s=10.0 * replay.traffic.duration_s + 3600.0,
    )


def with_sessions(definition: scenario.Scenario, part: TrafficPart) -> scenario.Scenario:
    """The same scenario with a part of the requests, none of which warm up."""
    workload = workloads.FixedWorkload(part.sessions, part.adapter_names)
    return msgspec.structs.replace(
        definition, workload=cast("workloads.Workload", workload), measure_from_s=0.0
    )


def simulate(definition: scenario.Scenario, column: SimulationColumn, *, seed: int) -> ReplayRun:
    """Simulate one strategy with one seed; requests are in the order of the sessions."""
    sessions = cast("workloads.FixedWorkload", definition.workload).sessions
    numbers: dict[int, int] = {}
    for session in sessions:
        for spec in session.specs:
            numbers[id(spec)] = len(numbers)
    settings = column.settings
    if settings is not None:
        # Recorded requests have no other subset than the engine that they went to.
        scheduling = msgspec.structs.replace(settings.scheduling, respect_subset=True)
        settings = msgspec.structs.replace(settings, scheduling=scheduling)
    run = simulation.Simulation(definition, settings, seed=seed)
    metrics = run.run()
    ttft_s = [math.nan] * len(numbers)
    for sim_request in metrics.requests:
        if not sim_request.failure:
            ttft_s[numbers[id(sim_request.work)]] = sim_request.first_s
    unanswered = 1.0 - metrics.num_answered / max(1, len(numbers))
    return ReplayRun(metrics.summary(), ttft_s, unanswered)


def simulate_as_recorded(replay: Replay, definition: scenario.Scenario) -> ReplayRun:
    """Simulate the recording with the arrivals and decisions that it has.

    What it differs by from what was measured is due to the model of the engines alone. It leaves
    nothing to chance, so that one run is enough.

    Args:
        definition: See `scenario_of`.
    """
    pinned = _with_sessions(replay, definition, replay.traffic.sessions_as_recorded())
    column = SimulationColumn(RECORDED, replay.settings)
    return simulate(pinned, column, seed=definition.seeds[0])


def with_recorded_start(replay: Replay, definition: scenario.Scenario) -> scenario.Scenario:
    """The same scenario, the first request of each model goes to the engine that it went to.

    So a rotation starts where it did, which is left to chance otherwise.

    Args:
        definition: See `scenario_of`.
    """
    return _with_sessions(replay, definition, replay.traffic.sessions_with_recorded_start())


def _with_sessions(
    replay: Replay, definition: scenario.Scenario, sessions: Sequence[SimSession]
) -> scenario.Scenario:
    workload = workloads.FixedWorkload(sessions, replay.traffic.adapter_names)
    return msgspec.structs.replace(definition, workload=cast("workloads.Workload", workload))


def simulate_all(
    definition: scenario.Scenario,
    columns: Sequence[SimulationColumn],
    *,
    places: Sequence[int],
    jobs: int,
    on_run: Callable[[str], None],
    recorded: scenario.Scenario | None = None,
) -> dict[str, dict[int, ReplayRun]]:
    """Simulate every strategy with every seed of the scenario.

    Args:
        recorded: Scenario of the first strategy, see `with_recorded_start`; None for the same.
        places: See `Traffic`.
        jobs: Processes; 1 runs in this one.
        on_run: Called with a description of each run that is over.

    Returns:
        Runs by strategy and seed.
    """
    tasks = [(column, seed) for seed in definition.seeds for column in columns]
    calls = [
        functools.partial(
            simulate,
            recorded if recorded is not None and column is columns[0] else definition,
            column,
            seed=seed,
        )
        for column, seed in tasks
    ]
    results: dict[str, dict[int, ReplayRun]] = {column.name: {} for column in columns}
    for n, run in simulation_runs.run_calls(calls, jobs=jobs):
        column, seed = tasks[n]
        ttft_s = [run.ttft_s[place] for place in places]
        results[column.name][seed] = msgspec.structs.replace(run, ttft_s=ttft_s)
        on_run(f"{column.name}, seed {seed}")
    return results


def to_report(
    definition: scenario.Scenario, results: Mapping[str, Mapping[int, ReplayRun]], baseline: str
) -> report.Report:
    """The runs as `extproc simulate` reports them."""
    runs = [
        report.Run(name, seed, run.summary)
        for name, by_seed in results.items()
        for seed, run in by_seed.items()
    ]
    # The workload is as large as the recording.
    slim = msgspec.structs.replace(
        definition, workload=cast("workloads.Workload", workloads.FixedWorkload(()))
    )
    return report.report(slim, runs, baseline=baseline)


def compare(
    results: Mapping[str, Mapping[int, ReplayRun]], strategy: str, baseline: str
) -> TtftComparison:
    """Compare the mean time to first token of two strategies, by a bootstrap over the requests.

    Requests that follow each other share queues, so blocks of them are drawn, not single ones
    (Kuensch 1989); each request counts with its mean over the seeds.
    """
    pairs = [
        (ours, theirs)
        for ours, theirs in zip(
            _means(results[strategy].values()), _means(results[baseline].values()), strict=True
        )
        if not math.isnan(ours + theirs)
    ]
    sums = [
        (sum(ours for ours, _ in block), sum(theirs for _, theirs in block))
        for block in _blocks(pairs)
    ]
    unanswered = [
        statistics.fmean(run.unanswered for run in results[name].values())
        for name in (strategy, baseline)
    ]
    if not sums or not sum(theirs for _, theirs in sums):
        return TtftComparison(strategy, baseline, math.nan, math.nan, math.nan, 0, *unanswered)
    rng = random.Random(1)
    ratios = []
    for _ in range(_RESAMPLES):
        drawn = rng.choices(sums, k=len(sums))
        ratios.append(sum(ours for ours, _ in drawn) / max(1e-9, sum(t for _, t in drawn)))
    ratios.sort()
    return TtftComparison(
        strategy,
        baseline,
        sum(ours for ours, _ in sums) / sum(theirs for _, theirs in sums),
        ratios[round(0.025 * (_RESAMPLES - 1))],
        ratios[round(0.975 * (_RESAMPLES - 1))],
        len(pairs),
        *unanswered,
    )


def measure_fidelity(replay: Replay, as_recorded: ReplayRun, new: Iterable[ReplayRun]) -> Fidelity:
    """Compare estimates with what was measured, over the requests that have all of them.

    Args:
        as_recorded: See `simulate_as_recorded`.
        new: Runs of the recorded strategy.
    """
    measured = [
        (request.ttft_s, estimated_s, new_s)
        for request, estimated_s, new_s in zip(
            replay.traffic.requests, as_recorded.ttft_s, _means(new), strict=True
        )
        if request.ttft_s is not None and request.at >= replay.since_s
    ]
    answered = [row for row in measured if not math.isnan(sum(row))]
    if not answered:
        measured_s = statistics.fmean([row[0] for row in measured] or [math.nan])
        return Fidelity(measured_s, math.nan, math.nan)
    return Fidelity(*(statistics.fmean(column) for column in zip(*answered, strict=True)))


def _means(runs: Iterable[ReplayRun]) -> list[float]:
    """Time to first token of each request, mean over seeds; NaN where one failed."""
    return [statistics.fmean(values) for values in zip(*(run.ttft_s for run in runs), strict=True)]


def _blocks(pairs: Sequence[tuple[float, float]]) -> Iterator[Sequence[tuple[float, float]]]:
    size = max(1, len(pairs) // _BLOCKS)
    for begin in range(0, len(pairs), size):
        yield pairs[begin : begin + size]
