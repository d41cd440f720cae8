"""The reference of the HTTP endpoints on the metrics port, from their handlers."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from extproc.server import admin, console

ROOT = Path(__file__).parents[2]

#: Folders whose code runs beside the picker and not in it.
_ASIDE = ("sim", "simulator", "cli", "demo", "testing")
_ROUTE = re.compile(r'web\.(get|post)\("([^"]+)", self\.(\w+)\)')
_HEADER = re.compile(r"""["'](x-[a-z][a-z0-9-]*[a-z0-9])["']""")


def block() -> str:
    """One row for each route of the picker's own pages."""
    rows = ["| method | path | what it answers |", "|---|---|---|"]
    for pages, routes in (
        (admin.AdminPages, admin.AdminPages.application),
        (console.ConsolePages, console.ConsolePages.routes),
    ):
        source = inspect.getsource(routes)
        for method, path, handler in re.findall(_ROUTE, source):
            text = inspect.getdoc(getattr(pages, handler)) or ""
            shown = path.replace(":[^/]+", "")  # the pattern of a name
            rows.append(f"| {method.upper()} | `{shown}` | {' '.join(text.split())} |")
    return "\n".join(rows)


def header_names() -> set[str]:
    """Names of the headers that the picker's code mentions, as literals."""
    return {
        name
        for path in (ROOT / "extproc").rglob("*.py")
        if path.relative_to(ROOT / "extproc").parts[0] not in _ASIDE
        for name in _HEADER.findall(path.read_text(encoding="utf-8"))
    }
