"""Pages under `docs/`: their generated parts are current, and their words those of the field."""

import re
from pathlib import Path

import pytest

from bench import docs_tables
from extproc.autoscaling import policies

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

#: Words that hide which component or person acts.
_VAGUE = re.compile(r"\b(nobody|somebody|whoever|whom|anybody)\b", re.IGNORECASE)


@pytest.mark.parametrize("name", docs_tables.BLOCKS)
def test_a_table_of_results_is_current(name):
    """The table in the page is what the committed results give."""
    page = DOCS / docs_tables.BLOCKS[name].page
    assert docs_tables.render(name) in page.read_text(), "run python -m bench.docs_tables"


def test_the_example_scenario_is_the_file():
    """The scenario that the guide shows is the file that its command runs."""
    path = ROOT / "bench/scenarios/example.yaml"
    guide = (DOCS / "guides/simulate-your-traffic.md").read_text()
    assert f"```yaml\n{path.read_text()}```" in guide


@pytest.mark.parametrize("kind", policies.POLICIES)
def test_every_autoscaling_policy_has_a_row(kind):
    """The page of policies explains each kind."""
    assert f"| `{kind}` |" in (DOCS / "concepts/autoscaling-policies.md").read_text()


def test_pages_name_who_acts():
    """No page has a pronoun where a component or a person can be named."""
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "manifests").rglob("*.md")]
    vague = {
        f"{page.relative_to(ROOT)}: {match[0]}"
        for page in pages
        if page.name.lower() != "changelog.md"
        for match in _VAGUE.finditer(page.read_text(encoding="utf-8"))
    }
    assert vague == set()
