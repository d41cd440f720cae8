"""Tests of the arena: what a seed draws, how ratios are taken, and that the test set stays shut."""

import dataclasses
import json
import math
import subprocess
import sys

import msgspec
import pytest

from bench import rig
from bench.arena import (
    __main__,
    plots,
    report,
    saturation,
    scenarios,
    score,
    tournament,
    traffic,
)
from extproc.simulator.fleet import scenario


def row(seed=1, load=0.5, **columns):
    """A scenario in which every strategy has these mean first tokens; a pair is TTFT and goodput."""
    figures = {}
    for name, values in columns.items():
        ttft, goodput = values if isinstance(values, tuple) else (values, 1.0)
        key = name if name.startswith(("no ", score.EXCHANGING)) else name.replace("_", "-")
        figures[key] = {
            "ttft_mean_s": ttft,
            "ttft_p99_s": ttft,
            "e2e_mean_s": ttft,
            "goodput": goodput,
            "requests_per_s": 10.0,
        }
    return score.ScenarioRow(seed, "title", ["chat"], load, figures)


@pytest.mark.slow
def test_a_seed_draws_the_same_scenario_every_time():
    """All that is drawn comes from the seed, and other seeds draw other scenarios."""
    first = [scenarios.draw(seed) for seed in range(1, 13)]
    assert first == [scenarios.draw(seed) for seed in range(1, 13)]
    assert [drawn.key for drawn in first] == [scenarios.draw(n).key for n in range(1, 13)]
    assert len({drawn.key for drawn in first}) == len(first)


@pytest.mark.parametrize("seed", range(1, 41))
def test_the_simulator_takes_every_scenario(seed):
    """Fleets are valid, and the longest request fits each engine."""
    drawn = scenarios.draw(seed)
    scenario.check(drawn.at_rate(2.0), where="arena")
    for group in drawn.fleet:
        assert group.resolved().longest >= traffic.LONGEST_TOKENS


def test_forty_scenarios_have_every_kind_of_traffic_and_drift():
    """The quick run leaves out no kind of traffic."""
    drawn = [scenarios.draw(seed) for seed in range(1, 41)]
    assert {*traffic.KINDS, "LoRA"} == {kind for entry in drawn for kind in entry.kinds}
    drifts = {entry.drift for entry in drawn}
    assert drifts == {"", "new system prompt", "new tenant", "engine lost", "burst"}
    assert {len(entry.fleet) for entry in drawn} == {1, 2, 3}
    assert min(entry.load for entry in drawn) == 0.1
    assert max(entry.load for entry in drawn) == 1.2


def test_the_test_set_is_shut():
    """Seeds of the test set are drawn only where that is asked for."""
    with pytest.raises(ValueError, match="--test"):
        scenarios.draw(scenarios.SETS["test"])
    assert scenarios.draw(scenarios.SETS["test"], may_test=True).seed == 2001
    command = [sys.executable, "-m", "bench.arena", "--set", "test"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 2
    assert "invalid choice" in run.stderr


def small(seed=7):
    """A drawn scenario of forty requests."""
    return dataclasses.replace(scenarios.draw(seed), requests=40)


@pytest.mark.slow
def test_recorded_rates_are_of_the_scenarios_that_are_drawn():
    """A field that is new in `Scenario` changes their keys; record the rates under the new ones."""
    rates = json.loads((rig.RESULTS / f"{saturation.RECORD}.json").read_text())["rates"]
    assert rates
    for seed, known in rates.items():
        drawn = scenarios.draw(int(seed), may_test=True)
        assert list(known) == [drawn.key], f"seed {seed}"


def test_the_rate_of_saturation_is_found_again():
    """The search has no chance of its own, and ends above nothing."""
    rate = saturation.find_rate(small())
    assert rate > 0
    assert rate == saturation.find_rate(small())


def test_a_ratio_is_to_the_best_published_strategy():
    """The clairvoyant does not compete, and of rates the other one's over ours is taken."""
    entry = row(adaptive=(0.3, 0.8), lmetric=(0.25, 0.6), prefix_hash=(0.4, 1.0), clairvoyant=0.1)
    assert score.ratio(entry, "ttft_mean_s", "adaptive", score.PUBLISHED) == pytest.approx(1.2)
    assert score.ratio(entry, "goodput", "adaptive", score.PUBLISHED) == pytest.approx(1.25)
    clairvoyant = [score.CLAIRVOYANT]
    assert score.ratio(entry, "ttft_mean_s", "adaptive", clairvoyant) == pytest.approx(3.0)


def test_throughput_counts_at_saturation_only():
    """Below it every strategy answers what it is sent."""
    below, above = row(adaptive=1.0, lmetric=1.0), row(load=1.05, adaptive=1.0, lmetric=1.0)
    assert math.isnan(score.ratio(below, "requests_per_s", "adaptive", score.PUBLISHED))
    assert score.ratio(above, "requests_per_s", "adaptive", score.PUBLISHED) == 1.0


def test_a_score_is_a_geometric_mean_with_its_worst_scenario():
    """Half the time in one scenario makes up for twice the time in another."""
    rows = [
        row(1, adaptive=0.5, lmetric=1.0),
        row(2, adaptive=2.0, lmetric=1.0),
        row(3, adaptive=1.03, lmetric=1.0),
        row(4, adaptive=1 / 1.03, lmetric=1.0),
    ]
    scored = score.score(rows, "ttft_mean_s", others=score.PUBLISHED)
    assert scored.scenarios == 4
    assert scored.mean == pytest.approx(1.0)
    assert (scored.worst, scored.worst_seed) == (2.0, 2)
    assert (scored.over_2, scored.over_5) == (0.5, 0.25)
    assert 0.5 <= scored.low < 1.0 < scored.high <= 2.0
    assert scored == score.score(rows, "ttft_mean_s", others=score.PUBLISHED)
    assert score.share_worse(rows, ["ttft_mean_s", "goodput"]) == 0.25


def test_a_figure_without_scenarios_has_no_score():
    """Nothing is averaged over nothing."""
    scored = score.score([], "goodput", others=score.PUBLISHED)
    assert scored.scenarios == 0
    assert math.isnan(scored.mean)


def test_an_interval_of_equal_values_is_that_value():
    """Drawing with replacement changes nothing where all are the same."""
    assert score.interval([0.25] * 8) == (0.25, 0.25)


def test_results_are_read_where_they_were_written(tmp_path):
    """A result that was written is not run again."""
    calls = []

    def call():
        calls.append(1)
        return {"ttft_mean_s": 1.0}

    def cached():
        return tournament.cached(tmp_path, ["a"], [call], jobs=1, progress=lambda _: None)

    assert cached() == cached() == {"a": {"ttft_mean_s": 1.0}}
    assert len(calls) == 1


def test_runs_of_a_scenario_count_with_their_mean():
    """A figure that one of the runs does not have is none of the scenario's."""
    runs = [{"ttft_mean_s": 1.0, "ttft_p99_s": 4.0}, {"ttft_mean_s": 2.0, "ttft_p99_s": None}]
    assert score.average(runs) == {"ttft_mean_s": 1.5, "ttft_p99_s": None}
    assert score.average(runs[1:]) == runs[1]


def test_another_run_of_a_scenario_has_other_arrivals(monkeypatch):
    """All strategies get the same arrivals in the same run of a scenario, and others in the next."""
    drawn = small(seed=7)
    monkeypatch.setattr(scenarios, "draw", lambda *_, **__: drawn)
    variants = [scenario.Variant(name=name, strategy=name) for name in ("lmetric", "clairvoyant")]

    def requests(variant, repeat):
        return tournament.play(7, variant, rate_per_s=2.0, may_test=False, repeat=repeat)

    first, other = ([requests(variant, n)["requests"] for variant in variants] for n in (0, 1))
    assert first[0] == first[1]
    assert other[0] == other[1]
    assert requests(variants[0], 0) != requests(variants[0], 1)


PLUGIN = """
import msgspec


class Even(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind = "even"
    needs = frozenset()

    def score(self, context, candidates):
        return [1.0 for _ in candidates]
"""
OWN = """
apiVersion: extproc/v1alpha1
kind: ExtProcConfig
scheduling:
  plugin_files: [even.py]
  profile: {scorers: [{kind: even}]}
"""


@pytest.fixture
def own_file(tmp_path):
    """A configuration with a scorer of its own."""
    (tmp_path / "even.py").write_text(PLUGIN)
    path = tmp_path / "own.yaml"
    path.write_text(OWN)
    return path


def test_a_configured_strategy_is_played_again_when_its_plugins_change(own_file, monkeypatch):
    """Its results are stored under the content of all its files."""
    played = []

    def cached(folder, names, calls, **options):
        played.extend(names)
        return {name: call() for name, call in zip(names, calls, strict=True)}

    monkeypatch.setattr(tournament, "cached", cached)
    monkeypatch.setattr(tournament, "find_rates", lambda *_, **__: {7: 2.0})
    drawn = small(seed=7)
    monkeypatch.setattr(scenarios, "draw", lambda *_, **__: drawn)
    (variant,) = tournament.configured_variants([own_file])
    for text in (PLUGIN, PLUGIN + "# changed\n"):
        (own_file.parent / "even.py").write_text(text)
        (row,) = tournament.tournament([7], [variant], jobs=1)
        assert row.columns["own"]["requests"]
    assert len(set(played)) == 2


def test_a_configured_strategy_needs_a_name_of_its_own(own_file):
    """Results are known by the name of the strategy."""
    for paths in ([own_file.with_name("lmetric.yaml")], [own_file, own_file]):
        with pytest.raises(ValueError, match="a name of its own"):
            tournament.configured_variants(paths)


def test_a_wrong_configuration_is_an_error_of_its_flag(own_file, monkeypatch, capsys):
    """A missing file and an unknown strategy end the command before anything is played."""
    wrong = own_file.with_name("wrong.yaml")
    wrong.write_text(OWN.replace("kind: even}", "kind: nonsense}"))
    for path in (own_file.with_name("missing.yaml"), wrong):
        monkeypatch.setattr(sys, "argv", ["arena", "--config", str(path)])
        with pytest.raises(SystemExit, match="2"):
            __main__.parse()
        message = capsys.readouterr().err.splitlines()[-1]
        assert message.startswith("arena: error: ")
        assert path.stem in message
        assert "expected" in message


def test_a_configured_strategy_without_its_inputs_is_a_warning(own_file, monkeypatch, capsys):
    """Its plugins read headers, which simulated requests do not have."""
    needs = "from extproc.scheduling.framework import Signal\n" + PLUGIN.replace(
        "frozenset()", "frozenset({Signal.HEADERS})"
    )
    (own_file.parent / "even.py").write_text(needs)
    monkeypatch.setattr(sys, "argv", ["arena", "--config", str(own_file)])
    _, (variant,) = __main__.parse()
    assert variant.name == "own"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {own_file}: plugins that read headers have no effect")


def test_a_configured_strategy_is_scored_against_the_published_ones(own_file, capsys):
    """One line for each figure that has a score, and the share of bad scenarios."""
    rows = [row(seed=3, own=2.0, lmetric=1.0, adaptive=0.5)]
    __main__.print_scores(rows, tournament.configured_variants([own_file]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "own ttft_mean_s 2.000 (2.000 to 2.000), worst 2.000 in seed 3"
    assert lines[-1] == "own worse than 1.05 in any figure 1.000"


def test_replicas_of_adaptive_exchange_in_a_column_of_their_own(monkeypatch):
    """It is played anew where pickers of the scenario are silent, and copied elsewhere."""
    played = []

    def tournament_of(seeds, variants, **options):
        played.append((list(seeds), [variant.name for variant in variants], options["exchanges"]))
        return [row(seed, adaptive=0.25) for seed in seeds]

    monkeypatch.setattr(tournament, "tournament", tournament_of)
    silent, exchanging, single = (
        next(
            entry.seed
            for entry in map(scenarios.draw, range(1, 200))
            if wanted(entry.picking.replicas, entry.picking.share_delay_s)
        )
        for wanted in (
            lambda replicas, delay_s: replicas > 1 and delay_s is None,
            lambda replicas, delay_s: replicas > 1 and delay_s is not None,
            lambda replicas, _: replicas == 1,
        )
    )
    seeds = [silent, exchanging, single]
    rows = tournament.add_exchanging([row(seed, adaptive=1.0) for seed in seeds], jobs=1)
    assert played == [([silent], ["adaptive"], True)]
    means = [entry.columns[score.EXCHANGING]["ttft_mean_s"] for entry in rows]
    assert means == [0.25, 1.0, 1.0]
    assert [entry.columns["adaptive"]["ttft_mean_s"] for entry in rows] == [1.0, 1.0, 1.0]


def test_a_record_becomes_a_table():
    """Every figure with a ratio has a row, and the worst scenario is named."""
    first, second = {score.EXCHANGING: 0.75}, {score.EXCHANGING: 1.5}
    rows = [
        row(1, load=1.2, adaptive=0.9, clairvoyant=0.8, **first, **dict.fromkeys(FLAT, 1.0)),
        row(2, adaptive=1.5, clairvoyant=1.0, **second, **dict.fromkeys(FLAT, 1.0)),
    ]
    entry = {"command": "c", "commit": "abc", "date": "2026-01-01"} | report.record(rows)
    text = report.block({"sets": {"training": entry}, "ablations": {}})
    assert "| TTFT, mean | 2 | 1.162 (0.900 to 1.500) | 1.50 (seed 2) | 50% | 50% |" in text
    assert "| 1.162 (0.900 to 1.500) | 1.061 (0.750 to 1.500) |" in text
    assert "| throughput | 1 | 1.000" in text
    assert "| 2 | title | 1.50 | 1.50 | 1.50 |" in text


def test_a_ratio_has_the_same_digits_in_all_tables():
    """The list of the worst scenarios is not rounded twice."""
    others = {"clairvoyant": 1.0, score.EXCHANGING: 1.0, **dict.fromkeys(FLAT, 1.0)}
    entry = {"command": "c", "commit": "abc", "date": "2026-01-01"}
    entry |= report.record([row(1, adaptive=1.3551, **others)])
    text = report.block({"sets": {"training": entry}, "ablations": {}})
    assert "| 1.36 (seed 1) |" in text
    assert "| 1 | title | 1.36 | 1.36 | 1.36 |" in text


def test_groups_of_scenarios_have_their_own_scores():
    """A trait has a row with the scenarios that have it, and a kind that none has is left out."""
    others = {"clairvoyant": 1.0, score.EXCHANGING: 1.0, **dict.fromkeys(FLAT, 1.0)}
    rows = [
        dataclasses.replace(row(1, adaptive=0.5, **others), traits=("alike engines",)),
        dataclasses.replace(row(2, adaptive=2.0, **others), traits=("unlike engines",)),
    ]
    entry = {"command": "c", "commit": "abc", "date": "2026-01-01"} | report.record(rows)
    text = report.block({"sets": {"training": entry}, "ablations": {}})
    assert "| unlike engines | 1 | 2.000 (2.000 to 2.000) |" in text
    assert "| chat | 2 | 1.000 " in text
    assert "| batch |" not in text
    assert [(shown["seed"], shown["groups"]) for shown in entry["rows"]] == [
        (1, ["chat", "alike engines"]),
        (2, ["chat", "unlike engines"]),
    ]
    assert plots.digest(entry) in plots.draw(entry).decode()


def test_the_plot_is_of_the_record():
    """It was drawn from what `bench/results` holds, by the code that is there."""
    entry = plots.recorded()
    assert plots.PATH.exists() == (entry is not None), "run python -m bench.arena.plots"
    assert entry is None or plots.digest(entry) in plots.PATH.read_text()


@pytest.mark.slow
def test_every_scenario_has_traits():
    """Engines, pickers, metrics and load of each are of a kind."""
    for seed in range(1, 41):
        drawn = scenarios.draw(seed)
        assert ("unlike engines" in drawn.traits) == (len(drawn.fleet) > 1)
        assert len(drawn.traits) == 4


def test_pickers_that_exchange_their_requests_get_the_same_traffic():
    """Nothing else of a scenario changes, and its rate stays the one that was found."""
    drawn = next(d for d in map(scenarios.draw, range(1, 41)) if d.picking.replicas > 1)
    exchanging = drawn.exchanging
    assert exchanging.picking.share_delay_s == scenarios.EXCHANGE_S
    before, after = drawn.at_rate(1.0), exchanging.at_rate(1.0)
    assert msgspec.structs.replace(after, picking=before.picking) == before


FLAT = [name.replace("-", "_") for name in score.OTHERS]


def test_records_and_pages_leave_the_tree_committed(tmp_path, monkeypatch):
    """Files that one run has written do not keep the next one from writing; a changed source does."""

    def git(*args):
        author = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", *author, *args], cwd=tmp_path, check=True, capture_output=True)

    paths = [
        tmp_path / name for name in ("bench/results/arena.json", "docs/index.md", "extproc/a.py")
    ]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(rig, "ROOT", tmp_path)
    dirty = []
    for path in paths:
        path.write_text("2")
        dirty.append(__main__.is_dirty())
    assert dirty == [False, False, True]
