"""What the README says is what the code does."""

from pathlib import Path

import pytest

from extproc.scheduling import catalogue, defaults
from extproc.telemetry.exposition import Exposition
from extproc.telemetry.pool_series import Cache, Watched
from extproc.telemetry.tallies import Tallies
from tests.docs import bad_input, reference
from tests.support.house import House

README = (Path(__file__).parents[2] / "docs/reference/index.md").read_text()


def test_the_configuration_reference_is_the_settings():
    """Every section, field, default and reason stands in the README as in the docstrings."""
    assert reference.block() in README


def test_the_table_of_live_fields_is_the_one_in_force():
    """What a reload changes at once stands in the README as the code has it."""
    assert reference.reload_block() in README


def test_the_scenario_reference_is_the_scenario():
    """Every field a scenario may have stands in the README as in the docstrings."""
    assert reference.scenario_block() in README


def test_the_bad_input_table_is_what_comes_back():
    """Every row of bad input is sent, and the README says what came back."""
    assert bad_input.block() in README


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
