"""What the README says is what the code does."""

from pathlib import Path

import pytest

from bench import readme as results
from extproc.autoscaling import catalogue as policies
from extproc.scheduling import catalogue, defaults
from extproc.telemetry.exposition import Exposition
from extproc.telemetry.pool_series import Cache, Watched
from extproc.telemetry.tallies import Tallies
from tests.docs import bad_input, reference
from tests.protocol import table as points
from tests.support.house import House

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_configuration_reference_is_the_settings():
    """Every section, field, default and reason stands in the README as in the docstrings."""
    assert reference.block() in README


def test_the_table_of_live_fields_is_the_one_in_force():
    """What a reload changes at once stands in the README as the code has it."""
    assert reference.reload_block() in README


def test_the_scenario_reference_is_the_scenario():
    """Every field a scenario may have stands in the README as in the docstrings."""
    assert reference.scenario_block() in README


def test_the_example_scenario_is_the_file():
    """What the README shows is what it says it runs."""
    path = Path(__file__).parents[2] / "bench/scenarios/example.yaml"
    assert f"```yaml\n{path.read_text()}```" in README


def test_the_bad_input_table_is_what_comes_back():
    """Every row of bad input is sent, and the README says what came back."""
    assert bad_input.block() in README


def test_the_numbers_are_the_results():
    """The table of bars is made from the committed results."""
    assert results.block() in README


def test_the_table_of_real_engines_is_the_result():
    """Real and simulated hit ratios are made from the committed result."""
    assert results.real_block() in README


def test_the_table_of_agreement_is_the_result():
    """Real runs beside offline ones are shown as they were measured."""
    assert results.agreement_block() in README


def test_the_table_of_replicas_is_the_result():
    """Several pickers beside one are shown as they were run."""
    assert results.replicas_block() in README


def test_the_table_of_pickers_behind_a_real_envoy_is_the_result():
    """By themselves and talking, they are shown as they were measured."""
    assert results.sharing_block() in README


def test_the_tables_of_capacity_are_the_result():
    """Tenants, priorities, and what holding costs where nobody asks for turns."""
    assert results.capacity_block() in README


def test_the_tables_of_autoscaling_are_the_result():
    """Policies beside each other are shown as they were simulated."""
    assert results.scaling_block() in README


@pytest.mark.parametrize("kind", policies.POLICIES)
def test_every_policy_has_a_row(kind):
    """Each autoscaling policy is explained."""
    assert f"| `{kind}` |" in README


KINDS = [
    (kind, word)
    for table, word in (
        (catalogue.FILTERS, "filter"),
        (catalogue.SCORERS, "scorer"),
        (catalogue.COSTS, "cost"),
        (catalogue.PICKERS, "picker"),
    )
    for kind in table
]


@pytest.mark.parametrize(("kind", "word"), KINDS)
def test_every_plugin_has_a_row(kind, word):
    """A plugin without a row in the README does not land."""
    assert f"| `{kind}` | {word} |" in README


@pytest.mark.parametrize("name", defaults.profiles())
def test_every_strategy_has_a_row(name):
    """Each one-word strategy is explained."""
    assert f"| `{name}` |" in README


def test_the_table_of_points_is_current():
    """Every point of the contract stands in the README, held by tests or with the reason why not."""
    assert points.written(README) == README


def test_every_metric_has_a_row():
    """Each exported family stands in the metrics table."""
    house = House({"10.0.0.1:8000": None})
    page = Exposition(
        Tallies(),
        lambda: {"": Watched(house.fleet.pool, lambda _: Cache(5.0, 4.0, 100))},
        clock=lambda: 1.0,
        gauges={},
        about={},
    )
    for family in page.collect():
        assert f"| `{family.name}" in README, family.name
