"""Fleet plan: the smallest fleet that meets objectives on recorded requests, by simulation."""

from __future__ import annotations

import functools
import itertools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from extproc.errors import ConfigError
from extproc.simulator import replay, simulation_runs
from extproc.simulator.fleet import report, scenario
from extproc.simulator.replay import ReplayRun
from extproc.simulator.simulation_runs import SimulationColumn

#: Times and moments that an objective may name, as figures of a report do.
_OBJECTIVE: Final = re.compile(
    r"(?P<time>ttft|tpot|itl|e2e)_(?P<moment>mean|p50|p90|p95|p99)=(?P<limit>[0-9.]+)(?P<unit>ms|s)"
)


#: Part by which a simulation has to miss a limit for others with other seeds to be left out.
_HOPELESS_RATIO: Final = 2.0


class Objective(msgspec.Struct, frozen=True):
    """A limit of a time.

    Attributes:
        text: As it was written.
        figure: Name of the figure in reports.
        limit_s: Seconds that it may take at most.
    """

    text: str
    figure: str
    limit_s: float


class FleetSize(msgspec.Struct, frozen=True):
    """A fleet that was simulated.

    Attributes:
        engines: Engines (count).
        figures: Mean over the seeds by name of the figure.
        unanswered: Share of the requests without an answer, 0..1.
        is_enough: Whether it meets the objectives and answers every request.
    """

    engines: int
    figures: dict[str, float]
    unanswered: float
    is_enough: bool


def parse_objective(text: str) -> Objective:
    """Read an objective such as `ttft_p95=1s`.

    Raises:
        ConfigError: It is none.
    """
    match = _OBJECTIVE.fullmatch(text)
    try:
        limit = float(match["limit"]) if match else 0.0
    except ValueError:
        limit = 0.0
    if match is None or not limit:
        raise ConfigError(
            "--slo",
            wanted="TIME_MOMENT=LIMIT: ttft, tpot, itl or e2e; mean, p50, p90, p95 or p99; and a "
            "time above 0 in s or ms",
            got=repr(text),
            fix="write --slo ttft_p95=1s",
        )
    factor = 1e-3 if match["unit"] == "ms" else 1.0
    return Objective(text, f"{match['time']}_{match['moment']}_s", limit * factor)


def sized(definition: scenario.Scenario, engines: int) -> scenario.Scenario:
    """The same requests on so many engines, each like the usual one of the recorded fleet."""
    by_speed = sorted(definition.fleet, key=lambda group: group.resolved().prefill_s_per_token)
    usual = by_speed[len(by_speed) // 2]
    return msgspec.structs.replace(
        definition, fleet=[msgspec.structs.replace(usual, count=engines)]
    )


class FleetPlanner:
    """Simulates fleets of several sizes. Mutable; one owner.

    Args:
        definition: Requests, engines and seeds.
        objectives: Limits to meet.
        until_s: Seconds from the first request after which what is open counts as unanswered.
        jobs: Processes.
        on_run: Called with the engines of each size that is over.
    """

    def __init__(
        self,
        definition: scenario.Scenario,
        column: SimulationColumn,
        objectives: Sequence[Objective],
        *,
        until_s: float,
        jobs: int,
        on_run: Callable[[int], None],
    ) -> None:
        self._definition = msgspec.structs.replace(definition, until_s=until_s)
        self._column = column
        self._objectives = objectives
        self._jobs = jobs
        self._on_run = on_run
        self._sizes: dict[int, FleetSize] = {}

    def plan(self, most: int) -> FleetSize | None:
        """The smallest fleet that is enough; None if none of at most `most` engines is.

        Sizes are doubled until one is enough, and halved between. Figures may rise again
        where more engines share fewer prefixes, so if no doubled size is enough, sizes around the best
        one follow.
        """
        low, high = 0, 1
        while not self._simulate(high).is_enough:
            if high == most:
                between = self._search_around_best()
                if between is None:
                    return None
                low, high = between
                break
            low, high = high, min(2 * high, most)
        while high - low > 1:
            middle = (low + high) // 2
            if self._simulate(middle).is_enough:
                high = middle
            else:
                low = middle
        for size in (high - 2, high + 1, high + 2):
            if 0 < size <= most:
                self._simulate(size)  # neighbors, for the table and the plot
        return self._simulate(high)

    @property
    def sizes(self) -> list[FleetSize]:
        """Fleets that were simulated, the smallest first."""
        return [self._sizes[engines] for engines in sorted(self._sizes)]

    def _search_around_best(self) -> tuple[int, int] | None:
        """A size that is not enough, and a larger one that is, near the best; None without one."""
        while True:
            sizes = self.sizes
            best = min(sizes, key=self._rank)
            if self._rank(best) > (0.0, _HOPELESS_RATIO):
                return None
            place = sizes.index(best)
            around = [size.engines for size in sizes[max(0, place - 1) : place + 2]]
            gaps = [(low, high) for low, high in itertools.pairwise(around) if high - low > 1]
            if not gaps:
                return None
            for low, high in gaps:
                middle = (low + high) // 2
                if self._simulate(middle).is_enough:
                    return low, middle

    def _rank(self, size: FleetSize) -> tuple[float, float]:
        """Unanswered requests, and the largest ratio of a figure to its limit; less is better."""
        ratios = [size.figures[o.figure] / o.limit_s for o in self._objectives]
        return size.unanswered, math.inf if any(map(math.isnan, ratios)) else max(ratios)

    def _simulate(self, engines: int) -> FleetSize:
        known = self._sizes.get(engines)
        if known is None:
            known = self._sizes[engines] = self._measure(engines)
            self._on_run(engines)
        return known

    def _measure(self, engines: int) -> FleetSize:
        definition = sized(self._definition, engines)
        calls = [
            functools.partial(replay.simulate, definition, self._column, seed=seed)
            for seed in definition.seeds
        ]
        # An overloaded fleet takes longest to simulate, and needs no second opinion.
        runs = self._run(calls[:1])
        self._require_figures(runs[0])
        if len(calls) > 1 and not self._is_hopeless(runs[0]):
            runs += self._run(calls[1:])
        figures = self._figures(runs)
        unanswered = statistics.fmean(run.unanswered for run in runs)
        is_enough = not unanswered and all(
            figures[objective.figure] <= objective.limit_s for objective in self._objectives
        )
        return FleetSize(engines, figures, unanswered, is_enough)

    def _run(self, calls: Sequence[Callable[[], ReplayRun]]) -> list[ReplayRun]:
        return [run for _, run in simulation_runs.run_calls(calls, jobs=self._jobs)]

    def _figures(self, runs: Sequence[ReplayRun]) -> dict[str, float]:
        return {
            objective.figure: report.interval(
                report.FIGURES[objective.figure](run.summary) for run in runs
            ).mean
            for objective in self._objectives
        }

    def _require_figures(self, run: ReplayRun) -> None:
        """Check that answers have the times of the objectives, where every request was answered.

        Raises:
            ConfigError: They have only one token each, and none between two tokens.
        """
        figures = self._figures([run])
        for objective in self._objectives:
            if not run.unanswered and math.isnan(figures[objective.figure]):
                raise ConfigError(
                    "--slo",
                    wanted="objectives whose times the answers have",
                    got=f"{objective.text}, and no answer has a second token",
                    fix="write an objective for ttft or e2e",
                )

    def _is_hopeless(self, run: ReplayRun) -> bool:
        """True if a run leaves requests unanswered, or misses an objective by far."""
        figures = self._figures([run])
        return run.unanswered > 0.0 or any(
            figures[objective.figure] > _HOPELESS_RATIO * objective.limit_s
            for objective in self._objectives
        )
