from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = [
    *(ROOT / "extproc" / "diagnostics").glob("*.py"),
    *(ROOT / "extproc" / "config").glob("envoy_*.py"),
]


def checks():
    """Names of all checks, as calls that build findings write them."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            makes = {"Finding": 1, "_error": 0, "_cut": 0, "_warning": 0, "_note": 0, "_fine": 0}
            at = makes.get(node.func.id)
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
