"""The guide `docs/guides/write-a-scorer.md`, followed step by step."""

import re
import sys
from pathlib import Path

import msgspec
import pytest

from extproc.cli.main import main
from extproc.config import factory, loader
from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.request import HttpRequest

PAGE = (Path(__file__).parents[2] / "docs/guides/write-a-scorer.md").read_text()
SCORER, CONFIG, TEST, *_ = re.findall(
    r"^```(?:python|yaml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The three blocks in a folder, which is where people work."""
    (tmp_path / "same_zone.py").write_text(SCORER)
    (tmp_path / "extproc.yaml").write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("same_zone", None)


def test_the_scorer_has_fifteen_lines():
    """The example is as short as its page says."""
    assert sum(bool(line.strip()) for line in SCORER.splitlines()) <= 15


def test_the_scorer_passes_the_contract(folder, capsys):
    """The kit passes the file from the command line."""
    assert main(["plugin", "test", "same_zone.py"]) == 0
    assert "same_zone.py: scorer same-zone is in order" in capsys.readouterr().out


def test_the_tests_pass(folder):
    """Every test of the block runs and holds."""
    names: dict = {}
    exec(compile(TEST, "test_same_zone.py", "exec"), names)
    tests = [names[name] for name in names if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_the_configuration_is_in_order(folder, capsys):
    """`extproc check` knows the kind, its parameters and its signals."""
    assert main(["check", "extproc.yaml"]) == 0
    result = capsys.readouterr().out
    assert "same-zone (header='x-client-zone'), reads headers, labels, weight 3" in result


@pytest.mark.parametrize("zone", ["a", "b"])
def test_the_configuration_routes(folder, zone):
    """A request goes to the zone its header names, and nothing is degraded."""
    parts = factory.build(loader.settings(loader.read(folder / "extproc.yaml")))
    listed = [
        Endpoint(f"{flag_entry.host}:{flag_entry.port}", labels=flag_entry.labels)
        for flag_entry in parts.flag_entries
    ]
    parts.store.set_endpoints(listed, 1.0)
    body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    raw = HttpRequest(
        {":method": "POST", ":path": "/v1/chat/completions", "x-client-zone": zone}, body
    )
    outcome = parts.director.route(raw, 2.0)
    assert isinstance(outcome, Decision)
    assert outcome.degraded == ""
    assert outcome.endpoints[0].labels == {"zone": zone}
