"""The table of points met: `python -m tests.protocol.table`; `--write` puts a short one into README."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.protocol.points import POINTS, SECTIONS, Status

TESTS = Path(__file__).parent.parent
README = TESTS.parent / "README.md"
BEGIN, END = "<!-- points -->\n", "\n<!-- /points -->"

_NAME = re.compile(r"test_(\d{3})_")


@cache
def found() -> Mapping[int, list[str]]:
    """Tests named by a point's number, anywhere under tests/: number to `file::name`."""
    tests: dict[int, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name in _functions(path):
            match = _NAME.match(name)
            if match:
                where = f"{path.relative_to(TESTS.parent)}::{name}"
                tests.setdefault(int(match[1]), []).append(where)
    return tests


def missing() -> list[int]:
    """Points that claim a test and have none."""
    tests = found()
    claimed = (Status.TESTED, Status.E2E)
    return [
        point.number for point in POINTS if point.status in claimed and point.number not in tests
    ]


def lines() -> Iterator[str]:
    """The table, in Markdown."""
    tests = found()
    met = sum(1 for point in POINTS if point.number in tests)
    yield f"{met} of {len(POINTS)} points have a test."
    for letter, title in SECTIONS.items():
        yield f"\n### {letter}. {title}\n"
        yield "| # | mark | point | tests |"
        yield "|---|---|---|---|"
        for point in POINTS:
            if point.section == letter:
                where = "<br>".join(tests.get(point.number, ())) or point.status.value
                yield f"| {point.number} | {point.mark} | {point.text} | {where} |"


def short() -> str:
    """One row for each point: whether tests hold it, or why there is none."""
    tests = found()
    rows = ["| # | mark | point | |", "|---|---|---|---|"]
    for point in POINTS:
        held = "tested" if point.number in tests else point.status.value
        rows.append(f"| {point.number} | {point.mark} | {point.text} | {held} |")
    return "\n".join(rows)


def written(text: str) -> str:
    """A README with the short table in its place."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}{short()}{end}{after}"


def _functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


if __name__ == "__main__":
    if "--write" in sys.argv:
        README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n".join(lines()))
