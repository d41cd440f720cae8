import json
from pathlib import Path

from extproc.cli import main
from extproc.config import schema

PUBLISHED = Path(__file__).parents[2] / "manifests" / "extproc-config.schema.json"


def test_the_published_schema_is_current():
    """`extproc check --schema > manifests/extproc-config.schema.json` was run after a change."""
    assert PUBLISHED.read_text() == schema.text()


def test_fields_carry_their_reasons():
    """Descriptions are the Attributes of the settings; unknown keys are refused."""
    definitions = schema.schema()["$defs"]
    assert definitions["ScrapeSection"]["properties"]["busy_interval_s"]["description"].startswith(
        "Seconds"
    )
    assert definitions["SchedulingSection"]["additionalProperties"] is False
    assert "adaptive" in definitions["SchedulingSection"]["properties"]["strategy"]["examples"]


def test_every_field_of_every_section_is_described():
    """Also of sections that share a name; and no description is a docstring as it is written."""
    for name, part in schema.schema()["$defs"].items():
        assert "Attributes:" not in part.get("description", ""), name
        for field, facts in part.get("properties", {}).items():
            assert facts["description"], (name, field)


def test_check_prints_the_schema(capsys):
    """The command prints what is published."""
    assert main.main(["check", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "ExtProcConfig"


def test_strict_makes_warnings_count(capsys):
    """Without endpoints there is a warning: status 0, and 1 with --strict."""
    assert main.main(["check"]) == 0
    assert main.main(["check", "--strict"]) == 1
    assert "warning: there are no endpoints" in capsys.readouterr().out
