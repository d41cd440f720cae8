import dataclasses

import pytest

from bench import rig
from bench.arena import (
    ablation,
    knowledge,
    peer_rules,
    peers,
    score,
)
from extproc.scheduling.estimated_time import EstimatedTime
from extproc.simulator import simulation_runs
from extproc.testing import contract
from tests.bench.test_arena import row


def test_an_ablation_is_compared_with_the_default():
    """A constant without which first tokens come twice as late pays, with a ratio of 2."""
    slower = {f"no {constant}": 1.0 for constant in ablation.WITHOUT} | {"no waste_share": 2.0}
    rows = [row(1, adaptive=1.0, **slower)]
    about = {"command": "c", "commit": "abc", "date": "2026-01-01"}
    fits = {"mean": 1.0, "low": 0.9, "high": 1.1}
    elsewhere = {
        "encoder_share": {"on": "media", "seeds": 3, "ttft_mean_s": fits, "ttft_p99_s": fits}
    }
    text = ablation.block(about | ablation.record(rows) | {"elsewhere": elsewhere})
    same = "1.000 (1.000 to 1.000)"
    twice = "2.000 (2.000 to 2.000)"
    assert f"| `waste_share` | 1 | {twice} | {twice} | {twice} | {same} |" in text
    assert f"| `crowding` | 2.5 | {same} | {same} | {same} | {same} |" in text
    beside = "1.000 (0.900 to 1.100)"
    assert f"| `encoder_share` | 0.25 | {beside} | {beside} | media, 3 seeds |" in text


def test_ablations_are_profiles_that_can_be_run():
    """The default is the first, and each other leaves out a constant that the cost has."""
    default, *others = ablation.variants()
    assert default.strategy == "adaptive"
    for variant, constant in zip(others, ablation.WITHOUT, strict=True):
        column = simulation_runs.column(variant, folder=rig.ROOT, where="here")
        assert column.settings is not None
        assert hasattr(EstimatedTime(), constant)


def rules_of(method):
    """Classes of rules of other systems that have a method."""
    classes = [value for value in vars(peer_rules).values() if hasattr(value, "kind")]
    return [pytest.param(rule, id=rule.kind) for rule in classes if hasattr(rule, method)]


@pytest.mark.parametrize("rule", rules_of("cost"))
def test_costs_of_other_systems_keep_the_contract(rule):
    contract.check_cost(rule)


@pytest.mark.parametrize("rule", rules_of("pick"))
def test_pickers_of_other_systems_keep_the_contract(rule):
    contract.check_picker(rule)


def test_rules_of_other_systems_can_be_run():
    """Each is a profile, and each class of the file has a rule."""
    columns = [
        simulation_runs.column(variant, folder=rig.ROOT, where="here")
        for variant in peers.variants()
    ]
    profiles = [column.settings.scheduling.profile for column in columns]
    kinds = {profile.cost.kind for profile in profiles if profile.cost}
    kinds |= {profile.picker.kind for profile in profiles if profile.picker}
    assert kinds >= {rule.values[0].kind for rule in rules_of("cost") + rules_of("pick")}


def test_rules_of_other_systems_are_compared_with_the_default():
    """A rule with half of the time to the first token has a ratio of a half, and comes first."""
    names = [*score.PUBLISHED, *peers.RULES]
    columns = dict.fromkeys(names, 2.0) | {"adaptive": 1.0, "mooncake": 0.5}
    figures = {name: row(1, x=value).columns["x"] for name, value in columns.items()}
    entry = dataclasses.replace(row(1), columns=figures)
    about = {"command": "c", "commit": "abc", "date": "2026-01-01"}
    text = peers.block(about | peers.record([entry]))
    half, same = "0.500 (0.500 to 0.500)", "1.000 (1.000 to 1.000)"
    source = peers.RULES["mooncake"][0]
    assert (
        text.splitlines()[2] == f"| `mooncake` | {source} | {half} | {half} | {half} | {same} | 1 |"
    )
    assert f"`adaptive` over the best of all {len(names)} in each scenario" in text
    assert "2.00, 2.00, 2.00, 1.00" in text


def test_every_constant_of_the_default_cost_has_a_row():
    """In the ablation on random traffic, or where the constant is made for."""
    constants = set(EstimatedTime.__struct_fields__) - {"goal"}
    assert constants == set(ablation.WITHOUT) | set(ablation.MEDIA_WITHOUT)


def test_a_picker_that_knows_the_caches_predicts_what_engines_find():
    """With exact prefixes few tokens are found that were not predicted, or the other way round."""
    figures = {known: knowledge.play(4, known, rate_per_s=4.0) for known in ("prefix", "answer")}
    missed = {
        known: abs(values["predicted_ratio"] - values["hit_ratio"])
        for known, values in figures.items()
    }
    assert missed["prefix"] < 0.005 < missed["answer"]


def test_knowledge_is_compared_with_the_default():
    """An input that halves the time to the first token has a ratio of a half, also in groups of scenarios."""
    columns = dict.fromkeys((*knowledge.KNOWN, "clairvoyant"), 1.0) | {"queue": 0.5}
    entry = row(1, adaptive=1.0)
    figures = {name: row(1, x=value).columns["x"] for name, value in columns.items()}
    entry = dataclasses.replace(
        entry, columns={**entry.columns, **figures}, traits=("several pickers",)
    )
    about = {"command": "c", "commit": "abc", "date": "2026-01-01"}
    text = knowledge.block(about | knowledge.record([entry]))
    half, same = "0.500 (0.500 to 0.500)", "1.000 (1.000 to 1.000)"
    assert f"| queue | {half} | {half} | {half} | {same} | 0% |" in text
    assert "| exact; TTFT, mean and p99 | a single picker (0) | several pickers (1) |" in text
    assert "| queue |  | 0.50, 0.50 |" in text
