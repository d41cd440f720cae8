"""Tuning: a search over the numbers of a strategy, judged on held-out requests."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from extproc.config import profile_builder
from extproc.config.pool_sections import PluginEntry, ProfileEntry, WeightedScorer
from extproc.config.settings import Settings
from extproc.errors import ConfigError
from extproc.scheduling.framework import Plugin
from extproc.scheduling.profile import SchedulerProfile
from extproc.simulator import replay, simulation_runs
from extproc.simulator.fleet import scenario
from extproc.simulator.simulation_runs import SimulationColumn
from extproc.simulator.traffic import TrafficPart
from extproc.simulator.ttft_comparison import TtftComparison

#: What the result of the search is called.
TUNED: Final = "tuned"

#: Spread of the factors by which numbers are changed, in the logarithm.
_SPREAD: Final = 0.5

#: Numbers that a trial changes at most (count): with few, one sees what helped.
_MAX_CHANGED: Final = 3

#: Trials that are drawn around the best one at a time (count), whatever the number of processes: the
#: result does not depend on it. 4: the default of 40 trials can improve ten times.
_BATCH: Final = 4

#: Parameters that no recorded request depends on: recordings have no images.
_WITHOUT_EFFECT: Final = frozenset({"encoder_share"})

#: Draws of numbers until plugins accept them (count).
_MAX_DRAWS: Final = 100


class TunableNumber(msgspec.Struct, frozen=True):
    """A number of a profile.

    Attributes:
        name: Shown to people: kind of the plugin and its parameter.
        role: Field of the profile entry: `filters`, `scorers`, `cost`, `picker`.
        place: Position among the plugins of that role.
        parameter: Name of the parameter; empty for the weight of a scorer.
        value: Its value.
    """

    name: str
    role: str
    place: int
    parameter: str
    value: float


class TuningResult(msgspec.Struct, frozen=True):
    """Result of a search.

    Attributes:
        entry: The best profile; the given one where nothing was better.
        changed: Numbers that differ: name, and value before and after.
        trials: Profiles that were simulated (count).
        training_ratio: Mean time to the first token of the best profile over that of the given one, on the requests of
            the search.
        comparison: The same on the others, with its interval; None where nothing was better.
    """

    entry: ProfileEntry
    changed: Sequence[tuple[str, float, float]]
    trials: int
    training_ratio: float
    comparison: TtftComparison | None


def entry_of(profile: SchedulerProfile, where: str) -> ProfileEntry:
    """A profile as a configuration writes it out.

    Raises:
        ConfigError: It has a plugin that no configuration can write.
    """
    return ProfileEntry(
        name=TUNED,
        filters=tuple(_entry(plugin, where) for plugin in profile.filters),
        scorers=tuple(
            WeightedScorer(kind=scorer.kind, params=_params(scorer, where), weight=weight)
            for scorer, weight in profile.scorers
        ),
        picker=_entry(profile.picker, where),
        cost=None if profile.cost is None else _entry(profile.cost, where),
    )


def _entry(plugin: Plugin, where: str) -> PluginEntry:
    return PluginEntry(kind=plugin.kind, params=_params(plugin, where))


def _params(plugin: Plugin, where: str) -> Mapping[str, object]:
    try:
        params = msgspec.to_builtins(plugin)
    except TypeError:
        params = None
    if not isinstance(params, dict):
        raise ConfigError(
            where,
            wanted="plugins whose parameters can be written in a configuration",
            got=plugin.kind,
            fix="tune a strategy of built-in plugins",
        )
    return params


def find_numbers(entry: ProfileEntry) -> list[TunableNumber]:
    """Numbers above 0 of a profile; a 0 turns something off, and stays."""
    numbers: list[TunableNumber] = []
    roles: Sequence[tuple[str, Sequence[PluginEntry]]] = (
        ("filters", entry.filters),
        ("scorers", entry.scorers),
        ("cost", () if entry.cost is None else (entry.cost,)),
        ("picker", (entry.picker,)),
    )
    for role, plugins in roles:
        for place, plugin in enumerate(plugins):
            if isinstance(plugin, WeightedScorer) and plugin.weight:
                name = f"{plugin.kind} weight"
                numbers.append(TunableNumber(name, role, place, "", plugin.weight))
            for parameter, value in plugin.params.items():
                if parameter in _WITHOUT_EFFECT:
                    continue
                if isinstance(value, float) and 0.0 < value < math.inf:
                    name = f"{plugin.kind} {parameter}"
                    numbers.append(TunableNumber(name, role, place, parameter, value))
    return numbers


def with_number(entry: ProfileEntry, number: TunableNumber, value: float) -> ProfileEntry:
    """A profile with another value of one of its numbers."""
    plugins: Any = getattr(entry, number.role)
    is_single = isinstance(plugins, PluginEntry)
    plugin = plugins if is_single else plugins[number.place]
    if number.parameter:
        params = {**plugin.params, number.parameter: value}
        plugin = msgspec.structs.replace(plugin, params=params)
    else:
        plugin = msgspec.structs.replace(plugin, weight=value)
    if not is_single:
        plugin = (*plugins[: number.place], plugin, *plugins[number.place + 1 :])
    return msgspec.structs.replace(entry, **{number.role: plugin})


def with_profile(settings: Settings, entry: ProfileEntry) -> Settings:
    """A configuration with this profile for all models."""
    scheduling = msgspec.structs.replace(settings.scheduling, profile=entry, epp=None, models={})
    return msgspec.structs.replace(settings, scheduling=scheduling)


class Tuner:
    """Searches for better numbers of a strategy. Mutable; one owner.

    Random factors change a few numbers at a time; what is better on the first part of the requests is
    where the next trials start. The result is compared with the given strategy on the other part.

    Args:
        definition: Engines and seeds; its requests are not used.
        settings: Configuration of the strategy.
        training: Requests that the search uses.
        held_out: Requests that judge its result.
        jobs: Processes.
        on_run: Called with a description of each trial that is over.
    """

    def __init__(
        self,
        definition: scenario.Scenario,
        settings: Settings,
        training: TrafficPart,
        held_out: TrafficPart,
        *,
        jobs: int,
        on_run: Callable[[str], None],
    ) -> None:
        profile = profile_builder.build_profile(settings, where="tune")
        self._settings = settings
        self._base = entry_of(profile, "tune")
        self._numbers = find_numbers(self._base)
        self._training = replay.with_sessions(definition, training)
        self._held_out = replay.with_sessions(definition, held_out)
        self._places = held_out.places
        self._jobs = jobs
        self._on_run = on_run
        self._rng = random.Random(1)
        if not self._numbers:
            raise ConfigError(
                "--strategy",
                wanted="a strategy with numbers to tune",
                got=profile.name,
                fix="tune adaptive, balanced or a profile with scorers",
            )

    def tune(self, trials: int) -> TuningResult:
        """Search with so many trials.

        Raises:
            ConfigError: Requests fail with the given strategy.
        """
        (base_value,) = self._measure([self._base])
        if math.isinf(base_value):
            raise ConfigError(
                "tune",
                wanted="a strategy with which these engines answer every request",
                got="requests without an answer, so that it cannot be judged by its times",
                fix="tune on requests that the fleet can serve; extproc plan finds how many engines "
                "that takes",
            )
        best, best_value, num_trials = self._base, base_value, 0
        while num_trials < trials:
            drawn = [self._vary(best) for _ in range(min(_BATCH, trials - num_trials))]
            num_trials += len(drawn)
            for entry, value in zip(drawn, self._measure(drawn), strict=True):
                if value < best_value:
                    best, best_value = entry, value
        changed = [
            (before.name, before.value, after.value)
            for before, after in zip(self._numbers, find_numbers(best), strict=True)
            if before.value != after.value
        ]
        comparison = None if best is self._base else self._compare(best)
        return TuningResult(best, changed, num_trials, best_value / base_value, comparison)

    def _vary(self, entry: ProfileEntry) -> ProfileEntry:
        """Another profile near one, with numbers that its plugins accept; the same if none is found."""
        rng = self._rng
        for _ in range(_MAX_DRAWS):
            changed = entry
            numbers = find_numbers(entry)
            for number in rng.sample(numbers, min(len(numbers), rng.randint(1, _MAX_CHANGED))):
                factor = math.exp(rng.gauss(0.0, _SPREAD))
                value = float(f"{number.value * factor:.3g}")
                changed = with_number(changed, number, value)
            if self._is_valid(changed):
                return changed
        return entry

    def _is_valid(self, entry: ProfileEntry) -> bool:
        try:
            profile_builder.resolve_all(with_profile(self._settings, entry), where="tune")
        except ConfigError:
            return False
        return True

    def _measure(self, entries: Sequence[ProfileEntry]) -> list[float]:
        """Mean time to the first token of profiles in the search; infinite where requests fail."""
        seed = self._training.seeds[0]
        calls = [
            functools.partial(
                replay.simulate,
                self._training,
                SimulationColumn(TUNED, with_profile(self._settings, e)),
                seed=seed,
            )
            for e in entries
        ]
        values = [math.inf] * len(entries)
        for n, run in simulation_runs.run_calls(calls, jobs=self._jobs):
            value = run.summary.ttft_s.mean
            values[n] = math.inf if run.summary.failed or math.isnan(value) else value
            self._on_run(f"mean TTFT {1e3 * value:.1f} ms")
        return values

    def _compare(self, entry: ProfileEntry) -> TtftComparison:
        """A profile and the given one, on the requests that the search has not used."""
        columns = [
            SimulationColumn("before", self._settings),
            SimulationColumn(TUNED, with_profile(self._settings, entry)),
        ]
        results = replay.simulate_all(
            self._held_out, columns, places=self._places, jobs=self._jobs, on_run=self._on_run
        )
        return replay.compare(results, TUNED, "before")
