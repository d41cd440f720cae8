import json
import random

import pytest

from extproc.cli import main
from extproc.errors import ConfigError
from extproc.scheduling import registry
from extproc.simulator import (
    fleet_plan,
    plan_command,
    replay,
    replay_tuning,
    simulation_runs,
    tune_command,
)
from extproc.simulator.fleet import client, scenario, sim_request
from extproc.simulator.traffic import Traffic, TrafficRequest
from tests.simulator.fleet import builders
from tests.simulator.test_replay import talks, write


@pytest.fixture
def recording(tmp_path):
    """A recording of round robin over conversations."""
    return write(tmp_path, "round-robin", talks(), client=client.Client(users=12))[0]


def test_a_plan_names_the_smallest_fleet(recording, tmp_path, capsys):
    """One engine fewer misses the objective."""
    result = tmp_path / "plan.json"
    argv = ["plan", str(recording), "--slo", "ttft_p95=400ms", "--seeds", "1", "--jobs", "1"]
    assert main.main([*argv, "--json", str(result)]) == 0
    out = capsys.readouterr().out
    sizes = {size["engines"]: size["is_enough"] for size in json.loads(result.read_text())}
    best = min(engines for engines, is_enough in sizes.items() if is_enough)
    assert f"Verdict: the smallest fleet that is enough has {best} engine" in out
    assert best == 1 or not sizes[best - 1]


def test_a_fleet_that_cannot_be_is_status_1(recording, capsys):
    """No number of engines makes a token faster than a step."""
    argv = ["plan", str(recording), "--slo", "ttft_mean=1ms", "--max-engines", "2"]
    assert main.main([*argv, "--seeds", "1", "--jobs", "1"]) == 1
    words = "Verdict: none of these fleets, of up to 2 engines, would be enough"
    assert words in capsys.readouterr().out


class MadePlanner(fleet_plan.FleetPlanner):
    """Has figures by number of engines in place of simulations, in milliseconds."""

    def __init__(self, figure_ms):
        super().__init__(
            builders.a_scenario(talks(1)),
            simulation_runs.SimulationColumn("made", None),
            [fleet_plan.parse_objective("ttft_p95=202ms")],
            until_s=1.0,
            jobs=1,
            on_run=lambda _: None,
        )
        self._figure_ms = figure_ms

    def _measure(self, engines):
        figure_ms = self._figure_ms(engines)
        figures = {"ttft_p95_s": 1e-3 * figure_ms}
        return fleet_plan.FleetSize(engines, figures, 0.0, figure_ms <= 202)


@pytest.mark.parametrize(
    ("figure_ms", "best", "tried"),
    [
        (lambda n: 201 + abs(n - 3), 2, [1, 2, 3, 4]),
        (lambda n: 202 + abs(n - 3), 3, [1, 2, 3, 4, 5, 8, 16, 32]),
        (lambda n: 202 + abs(n - 27), 27, [1, 2, 4, 8, 16, 20, *range(24, 31), 32]),
        (lambda n: 203 + abs(n - 3), None, [1, 2, 3, 4, 8, 16, 32]),
        (lambda n: 405, None, [1, 2, 4, 8, 16, 32]),
    ],
)
def test_fleets_between_those_that_miss_are_tried(figure_ms, best, tried):
    """More engines may be slower, and a fleet between is enough; one that is far from it is not."""
    planner = MadePlanner(figure_ms)
    planned = planner.plan(32)
    assert (None if planned is None else planned.engines) == best
    assert [size.engines for size in planner.sizes] == tried


@pytest.mark.parametrize("text", ["", "ttft=1s", "ttft_p95", "ttft_p95=0s", "ttft_p95=1.2.3s"])
def test_objectives_are_checked(text):
    """A time, a moment and a limit."""
    with pytest.raises(ConfigError, match="TIME_MOMENT=LIMIT"):
        fleet_plan.parse_objective(text)


def test_objectives_have_units():
    """Milliseconds are seconds in a report."""
    objective = fleet_plan.parse_objective("tpot_p99=50ms")
    assert (objective.figure, objective.limit_s) == ("tpot_p99_s", 0.05)


@pytest.mark.parametrize("name", ["adaptive", "balanced"])
def test_a_strategy_is_written_out_as_a_profile(name):
    """The profile with every parameter decides as the strategy does."""
    entry = replay_tuning.entry_of(registry.profiles()[name], "test")
    numbers = replay_tuning.find_numbers(entry)
    assert len(numbers) >= 5
    changed = replay_tuning.with_number(entry, numbers[0], 0.123)
    assert replay_tuning.find_numbers(changed)[0].value == 0.123
    assert replay_tuning.find_numbers(changed)[1:] == numbers[1:]


@pytest.mark.slow
def test_a_bad_setting_is_found_and_mended(tmp_path):
    """A weight that sends everything to one endpoint loses to others, beyond noise."""
    path, _ = write(tmp_path, "adaptive", talks(120), client=client.Client(users=24))
    loaded = replay.load(path, strategies=(), configs=())
    bad = replay_tuning.entry_of(registry.profiles()["adaptive"], "test")
    for number in replay_tuning.find_numbers(bad):
        if number.parameter in {"tie_share", "waste_share"}:
            bad = replay_tuning.with_number(bad, number, 50.0)
    settings = builders.settings()
    settings = replay_tuning.with_profile(settings, bad)
    definition = replay.scenario_of(loaded, [1])
    tuner = replay_tuning.Tuner(
        definition, settings, *loaded.traffic.split(0.5), jobs=1, on_run=lambda _: None
    )
    result = tuner.tune(12)
    assert result.trials == 12
    assert result.training_ratio <= 1.0
    lines = list(tune_command.describe(result, "bad"))
    assert any(line.startswith("Verdict:") for line in lines)


def test_the_result_does_not_depend_on_the_number_of_processes(tmp_path):
    """As many trials are drawn at a time, however many of them are simulated at once."""
    rng, at_s, lines = random.Random(1), 0.0, []
    for n in range(110):
        at_s += rng.expovariate(6)
        lengths = {"input_length": rng.randint(50, 1500), "output_length": rng.randint(1, 200)}
        lines.append(json.dumps({"timestamp": round(1000 * at_s), "hash_ids": [n]} | lengths))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    two = scenario.EngineGroup(count=2)
    loaded = replay.load_trace(path, "mooncake", strategies=(), configs=(), fleet=two)
    results = []
    for jobs in (1, 2):
        tuner = replay_tuning.Tuner(
            replay.scenario_of(loaded, [1]),
            builders.settings(),
            *loaded.traffic.split(0.5),
            jobs=jobs,
            on_run=lambda _: None,
        )
        results.append(tuner.tune(8))
    assert results[0].changed
    assert results[0] == results[1]


def test_a_strategy_with_failing_requests_is_not_tuned(recording, capsys):
    """Means of the times of those that were answered would favor what fails more."""
    argv = ["tune", str(recording), "--strategy", "adaptive", "--trials", "1", "--seeds", "1"]
    limits = ["--engine", "max_num_seqs=1", "--engine", "max_queued=1"]
    assert main.main([*argv, *limits, "--jobs", "1"]) == 2
    words = "expected a strategy with which these engines answer every request"
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_tune_says_when_a_gain_is_noise(recording, capsys):
    """Few trials of a good strategy find nothing to believe in, or nothing at all."""
    argv = ["tune", str(recording), "--strategy", "adaptive", "--trials", "3"]
    assert main.main([*argv, "--seeds", "1", "--jobs", "1"]) == 0
    assert "Verdict:" in capsys.readouterr().out


def test_a_result_of_tune_is_json(recording, capsys):
    """Alone on standard output, with the profile that can be configured."""
    argv = ["tune", str(recording), "--strategy", "adaptive", "--trials", "1"]
    assert main.main([*argv, "--seeds", "1", "--jobs", "1", "--json", "-"]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert result["trials"] == 1
    assert result["entry"]["name"] == "tuned"
    assert (result["comparison"] is None) == (result["changed"] == [])
    assert "Verdict:" in output.err


def test_short_recordings_are_not_tuned(tmp_path, capsys):
    """A few requests say nothing."""
    path, _ = write(tmp_path, "adaptive", talks(4), client=client.Client(users=4))
    assert main.main(["tune", str(path), "--jobs", "1"]) == 2
    assert "record for longer" in capsys.readouterr().err


def test_strategies_without_numbers_are_not_tuned(recording, capsys):
    """Round robin has nothing to turn."""
    assert main.main(["tune", str(recording), "--jobs", "1"]) == 2
    assert "a strategy with numbers to tune" in capsys.readouterr().err


@pytest.mark.slow
def test_plots_and_pages_are_drawn(recording, tmp_path):
    """A page has everything in itself."""
    pytest.importorskip("matplotlib")
    page, folder = tmp_path / "page.html", tmp_path / "plots"
    words = ["--seeds", "1", "--jobs", "1"]
    assert main.main(["replay", str(recording), *words, "--html", str(page)]) == 0
    assert page.read_text().count("<svg") >= 4
    assert "src=" not in page.read_text()
    argv = ["plan", str(recording), "--slo", "ttft_p95=400ms", *words, "--plots", str(folder)]
    assert main.main([*argv, "--json", str(folder / "plan.json")]) == 0
    assert (folder / "fleet_sizes.svg").read_text().lstrip().startswith("<?xml")
    assert (folder / "fleet_sizes.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "plan.json").read_text())
    assert scenario.CLAIRVOYANT not in page.read_text()


def test_a_fleet_far_from_enough_is_simulated_once(recording):
    """One that nearly is enough has the mean over all seeds."""
    loaded = replay.load(recording, strategies=(), configs=())
    definition = replay.scenario_of(loaded, [1, 2, 3])
    runs = []
    for limit_s, expected in ((0.001, 1), (100.0, 3)):
        planner = fleet_plan.FleetPlanner(
            definition,
            loaded.columns[0],
            [fleet_plan.Objective("ttft_mean", "ttft_mean_s", limit_s)],
            until_s=1e6,
            jobs=1,
            on_run=lambda _: None,
        )
        run_some = planner._run
        planner._run = lambda calls, run_some=run_some: runs.append(len(calls)) or run_some(calls)
        planner._simulate(2)
        assert sum(runs) == expected
        runs.clear()


def a_burst(num_first, *, until_s, **limits):
    """Plan for a burst while caches warm up, and 80 requests after it: the plan and its sizes."""
    arrivals = [0.0] * num_first + [20.0 + n for n in range(80)]
    requests = [
        TrafficRequest(at, sim_request.RequestSpec(500, 5 if at else 200, [], opening=f"r{n}"))
        for n, at in enumerate(arrivals)
    ]
    sessions = [sim_request.SimSession([r.spec], at=r.at) for r in requests]
    traffic = Traffic(requests, sessions, range(len(requests)))
    fleet = scenario.EngineGroup(
        count=1, profile="h100-8b-bf16", set={"max_num_seqs": 64, **limits}
    )
    column = simulation_runs.SimulationColumn("adaptive", builders.settings())
    loaded = replay.Replay("burst", traffic, [fleet], column.settings, (), [column], since_s=9.9)
    planner = fleet_plan.FleetPlanner(
        replay.scenario_of(loaded, [1]),
        column,
        [fleet_plan.parse_objective("ttft_p95=1s")],
        until_s=until_s,
        jobs=1,
        on_run=lambda _: None,
    )
    return planner.plan(4), planner.sizes


def test_requests_that_fail_while_caches_warm_up_are_unanswered():
    """A fleet that refuses requests at the beginning of a recording is too small."""
    best, sizes = a_burst(100, until_s=750.0, max_queued=50)
    assert sizes[0].unanswered == pytest.approx(50 / 180)
    assert not sizes[0].is_enough
    assert best.engines > 1


def test_requests_that_were_answered_while_caches_warm_up_are_answered():
    """Of a simulation that is cut off, only what is open or did not begin is unanswered."""
    _, sizes = a_burst(100, until_s=90.0)
    assert sizes[0].unanswered == pytest.approx(9 / 180, abs=0.01)


def test_what_is_open_at_the_end_is_unanswered(recording):
    """An overloaded fleet is not simulated for ever, and has no time to show."""
    loaded = replay.load(recording, strategies=(), configs=())
    objectives = [fleet_plan.Objective("ttft_mean", "ttft_mean_s", 1.0)]
    planner = fleet_plan.FleetPlanner(
        replay.scenario_of(loaded, [1]),
        loaded.columns[0],
        objectives,
        until_s=0.001,
        jobs=1,
        on_run=lambda _: None,
    )
    assert planner.plan(1) is None
    (size,) = planner.sizes
    assert size.unanswered == 1.0
    assert "no answer" in "\n".join(plan_command.describe(objectives, [size], None))
