"""The table of layers, from the import contract of the project and the packages' docstrings."""

from __future__ import annotations

import importlib
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def layers() -> list[list[str]]:
    """The layers, highest first, each with its packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (contract,) = [
        row for row in contracts if row["type"] == "layers" and row["containers"] == ["extproc"]
    ]
    return [[part.strip() for part in layer.split("|")] for layer in contract["layers"]]


def block() -> str:
    """One row for each package."""
    return "\n".join(["| layer | package | what it holds |", "|---|---|---|", *_rows()])


def _rows() -> Iterator[str]:
    every = layers()
    for number, packages in zip(range(len(every), 0, -1), every, strict=True):
        for name in packages:
            module = importlib.import_module(f"extproc.{name}")
            path = Path(inspect.getsourcefile(module) or "").relative_to(ROOT)
            first = " ".join((inspect.getdoc(module) or "").partition("\n\n")[0].split())
            yield f"| {number} | [`{name}`](../../{path}) | {first} |"
