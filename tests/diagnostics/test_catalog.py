from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

from extproc.config.finding import Severity

ROOT = Path(__file__).parents[2]
MODULES = [
    *(ROOT / "extproc" / "diagnostics").glob("*.py"),
    *(ROOT / "extproc" / "config").glob("envoy_*.py"),
]


def checks():
    """Names of all checks, as calls that build findings write them."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            makes = {"Finding": 1} | dict.fromkeys(
                (f"finding.{severity}" for severity in get_args(Severity)), 0
            )
            at = makes.get(ast.unparse(node.func))
            if at is not None and len(node.args) > at:
                name = node.args[at]
                if isinstance(name, ast.Constant):
                    yield name.value


def test_the_page_names_every_check():
    """A reader who has the name of a check gets to what it examines."""
    text = (ROOT / "docs" / "operations" / "doctor.md").read_text()
    names = set(checks())
    assert len(names) > 50
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
