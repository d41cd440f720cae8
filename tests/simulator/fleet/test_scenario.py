import pytest
import yaml

from extproc.config import validation
from extproc.errors import ConfigError
from extproc.simulator import profiles
from extproc.simulator.fleet import client, scenario, workloads
from tests.simulator.fleet.builders import a_scenario

WORK = "workload: {kind: independent, requests: 3, prompt: {mean: 3}, output: {mean: 1}}"
LENGTHS = "prompt: {mean: 3}, output: {mean: 1}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "s: expected the key workload"),
        ("workload: {}", "s: workload: expected the key kind: one of independent,"),
        ("workload: {kind: conversation}", "s: workload.kind: .* did you mean conversations?"),
        ("workload: {kind: [1]}", "s: workload.kind: expected one of independent"),
        (
            "workload: {kind: independent, request: 3}",
            "s: workload.request: .* unknown key request; did you mean requests?",
        ),
        (
            f"workload: {{kind: independent, requests: 0, {LENGTHS}}}",
            "s: workload.requests: expected a whole number >= 1, got 0",
        ),
        (
            "workload: {kind: independent, requests: 3, prompt: {mean: 3, shape: norml}}",
            "s: workload.prompt.shape: .* did you mean normal?",
        ),
        ("workload: {kind: trace, format: asure, file: x}", "s: workload.format: .* azure?"),
        (f"{WORK}\nfleet: [{{cuont: 3}}]", r"s: fleet\[0\].cuont: .* did you mean count?"),
        (f"{WORK}\nstrategies: [{{nam: a}}]", r"s: strategies\[0\].nam: .* did you mean name?"),
        (f"{WORK}\nclient: {{users: 0}}", "s: client.users: "),
        (f"{WORK}\nseeds: []", "s: seeds: expected a list that is not empty"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(text, message):
    """Every error has the YAML path, and the nearest name where there is one."""
    with pytest.raises(ConfigError, match=message):
        validation.to_struct(yaml.safe_load(text), scenario.Scenario, where="s")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"client": client.Client()}, "client: expected one of users"),
        ({"client": client.Client(users=1, rate_per_s=1.0)}, "client: .* got 2 of them"),
        (
            {
                "workload": workloads.TraceWorkload(format="azure", file="t"),
                "client": client.Client(users=1),
            },
            "client: expected no users",
        ),
        ({"outages": [scenario.Outage(engine=2, at_s=1)]}, "outages: .* from 0 to 1, got 2"),
        ({"strategies": ["random", "random"]}, "strategies: .* 'random' more than once"),
        ({"fleet": [scenario.EngineGroup(profile="h200")]}, r"s: fleet\[0\]: .* got 'h200'"),
        (
            {"fleet": [scenario.EngineGroup(set={"kv": 3})]},
            r"s: fleet\[0\]: expected one of base_s, .* got kv;",
        ),
        (
            {"fleet": [scenario.EngineGroup(set={"kv_tokens": 16})]},
            r"s: fleet\[0\]: expected at least two KV blocks",
        ),
        (
            {"fleet": [scenario.EngineGroup(set={"base_s": 1e-17})]},
            r"s: fleet\[0\]: expected base_s of at least 1e-09, got 1e-17",
        ),
        (
            {"fleet": [scenario.EngineGroup(set={"block_tokens": 32})]},
            r"s: fleet\[0\]: expected block_tokens of 16",
        ),
    ],
)
def test_contradictory_fields_are_refused(facts, message):
    """Numbers that are right one by one and cannot be meant together."""
    with pytest.raises(ConfigError, match=message):
        scenario.check(a_scenario(**facts), where="s")


def test_a_good_scenario_is_accepted():
    """Defaults go together."""
    scenario.check(a_scenario(), where="s")


def test_a_word_is_a_variant_of_that_name():
    """Strategies are written short or long."""
    definition = a_scenario(strategies=["random", scenario.Variant(name="mine", config="c.yaml")])
    assert [variant.name for variant in definition.variants] == ["random", "mine"]
    assert [variant.strategy for variant in definition.variants] == ["random", ""]


def test_fields_of_a_profile_can_be_set():
    """Whole numbers stay whole, and speed divides times."""
    profile = scenario.EngineGroup(profile="demo", speed=2.0, set={"kv_tokens": 4200.0}).resolved()
    assert profile.kv_tokens == 4200
    assert isinstance(profile.kv_tokens, int)
    assert profile.base_s == pytest.approx(0.004)


def test_the_description_names_every_machine_and_number():
    """The docstring lists every profile and number that can be set."""
    text = scenario.EngineGroup.__doc__
    assert all(name in text for name in profiles.PROFILES)
    numbers = set(profiles.EngineProfile.__struct_fields__) - {"name", "block_tokens"}
    assert all(f"{name}," in text or f"{name}." in text for name in numbers)
