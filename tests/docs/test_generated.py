"""Generated parts of the documentation are what the code says."""

import argparse
import itertools
import re

import pytest

from extproc.scheduling import registry
from extproc.simulator import engine_command
from tests.docs import cli_reference, generate, helm_reference, http_reference, metrics_reference

PAGES = list(generate.pages())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(generate.DOCS)))
def test_generated_blocks_are_current(path):
    """Every generated block stands on its page as its function makes it."""
    text = path.read_text(encoding="utf-8")
    assert text == generate.filled(text), "run make reference"


@pytest.mark.parametrize("name", generate.BLOCKS)
def test_every_generated_block_is_on_a_page(name):
    """No generated block is left out of the documentation."""
    begin, end = generate.markers(name)
    holders = [path for path in PAGES if begin in path.read_text(encoding="utf-8")]
    assert len(holders) == 1, holders
    assert end in holders[0].read_text(encoding="utf-8")


@pytest.mark.parametrize("flag", ["seed", "cold-start-s", "kv-events-port", "coalesce-ms"])
def test_defaults_of_numbers_are_in_the_reference_and_in_the_help(flag):
    """A default of 0 as well."""
    rows = cli_reference.block().partition("## engine\n")[2].splitlines()
    (row,) = [
        row
        for row in itertools.takewhile(lambda row: row[:3] != "## ", rows)
        if f"`--{flag}`" in row
    ]
    default = row.split("|")[3].strip(" `")
    assert re.fullmatch(r"[0-9.]+", default)
    parser = argparse.ArgumentParser()
    engine_command.add_flags(parser)
    text = parser.format_help().partition(f"\n  --{flag} ")[2].partition("\n  --")[0]
    assert f"({default})" in text


@pytest.mark.parametrize("name", registry.profiles())
def test_every_strategy_is_explained(name):
    """The written table of strategies has a row for each."""
    assert f"| `{name}` |" in (generate.DOCS / "reference/strategies.md").read_text()


def test_the_page_of_headers_lists_every_header():
    """Every header that the picker knows stands on the page, and no other."""
    page = (generate.DOCS / "reference/headers.md").read_text()
    written = set(re.findall(r"`(x-[a-z][a-z0-9-]*[a-z0-9])`", page))
    assert written == http_reference.header_names()


def test_values_of_labels_belong_to_metrics():
    """The listed values of labels are those of families and labels that exist."""
    labels = {
        f"{family.name}/{name}" for family in metrics_reference.families() for name in family.labels
    }
    assert set(metrics_reference.VALUES) <= labels


@pytest.mark.parametrize(
    ("path", "part"), [(path, part) for path, part, _ in helm_reference.properties()]
)
def test_every_value_of_the_chart_is_described(path, part):
    """A value of the chart has a description in its schema."""
    assert part.get("description"), path
