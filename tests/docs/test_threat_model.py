"""Every row of the threat model names a test that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operations/threat-model.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "| party |" not in line]


def test_every_row_names_a_test_that_exists():
    """A row without a test is a hope."""
    assert len(ROWS) >= 40
    for row in ROWS:
        named = re.search(r"`(tests/[\w/]+\.py)::(test_\w+)` \|$", row)
        assert named, row
        text = (ROOT / named[1]).read_text()
        assert re.search(rf"^(async )?def {named[2]}\(", text, re.MULTILINE), named[0]


def test_security_page_and_readme_lead_to_the_model():
    """Readers of SECURITY.md and of the README find the model."""
    assert "docs/operations/threat-model.md" in (ROOT / "SECURITY.md").read_text()
    assert "docs/operations/threat-model.md" in (ROOT / "README.md").read_text()


def test_every_party_has_a_row():
    """Every party that sends something has a row."""
    parties = "\n".join(row.split("|")[1] for row in ROWS)
    for party in (
        *("client", "tenant", "engine", "another replica", "Redis", "DNS", "config author"),
        *("gateway operator", "metrics port", "ext_proc port", "xDS port", "KEDA port"),
        *("API server", "annotate a pod", "Envoy"),
    ):
        assert party in parties, party
