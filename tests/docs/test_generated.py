"""Generated parts of the documentation are what the code says."""

import re

import pytest

from extproc.scheduling import registry
from tests.docs import generate, helm_reference, http_reference, metrics_reference

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
