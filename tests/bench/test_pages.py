"""Committed scenarios can be read, and pages and plots are what came of them."""

import sys
from pathlib import Path

import pytest

from bench import bars, pages, plots, proof
from extproc.simulator import simulation_runs

SCENARIOS = Path(proof.SCENARIOS)


@pytest.mark.parametrize("name", proof.names())
def test_every_scenario_is_one(name):
    """All committed scenarios can be read, and name strategies there are."""
    definition = simulation_runs.read(SCENARIOS / f"{name}.yaml")
    for variant in definition.variants:
        simulation_runs.column(variant, folder=SCENARIOS, where=name)


def test_every_bar_has_its_scenario_and_columns():
    """Bars name scenarios that are committed and columns that these have."""
    for bar in bars.BARS:
        definition = simulation_runs.read(SCENARIOS / f"{bar.scenario}.yaml")
        columns = {variant.name for variant in definition.variants}
        assert {"adaptive", "clairvoyant"} <= columns
        assert bar.against in columns | {""}


@pytest.mark.parametrize("path", pages.paths(), ids=lambda path: path.name)
def test_pages_are_the_results(path):
    """Tables of every page are what `bench/results/proof` holds."""
    text = path.read_text(encoding="utf-8")
    assert text == pages.filled(text), "run python -m bench.pages"


@pytest.mark.parametrize("page", plots.SCENARIOS)
def test_plots_are_of_the_results(page):
    """Every plot was drawn from what `bench/results` holds, by the code that is there."""
    for suffix, results in (("", plots.results_of(page)), ("-frontier", plots.frontiers_of(page))):
        path = pages.PAGES / f"{page}{suffix}.svg"
        assert path.exists() == bool(results), "run python -m bench.plots"
        assert not results or plots.digest(results) in path.read_text(), "run python -m bench.plots"


def test_a_plot_is_what_is_drawn():
    """The same bytes for the same results."""
    path = pages.PAGES / "k6.svg"
    assert path.read_bytes() == plots.draw_page("k6"), "run python -m bench.plots"


def test_columns_of_a_scenario_without_a_record_are_left_out(monkeypatch, capsys):
    """There is nothing to merge them with, and the scenarios after it are run."""
    words = ["proof", "--only", "host-cache", "wallaroo-a", "--columns", "random", "--write"]
    monkeypatch.setattr(sys, "argv", words)
    proof.main()
    host_cache, wallaroo = capsys.readouterr().out.splitlines()
    assert host_cache.startswith("host-cache: left out, it has no record to merge with; ")
    assert wallaroo.startswith("wallaroo-a: left out, ")
