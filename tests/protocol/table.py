"""The table of protocol points; `python -m tests.protocol.table` prints it with their tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.protocol.points import POINTS, SECTIONS, Status

TESTS = Path(__file__).parent.parent

_NAME = re.compile(r"test_(\d{3})_")


@cache
def tests_by_point() -> Mapping[int, list[str]]:
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
    tests = tests_by_point()
    claimed = (Status.TESTED, Status.E2E)
    return [
        point.number for point in POINTS if point.status in claimed and point.number not in tests
    ]


def lines() -> Iterator[str]:
    """The table, in Markdown."""
    tests = tests_by_point()
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


def reference_block() -> str:
    """Rows of points with their anchors: held by tests, or the reason why not."""
    tests = tests_by_point()
    rows = []
    for letter, title in SECTIONS.items():
        rows += [f"\n### {letter}. {title}\n", "| # | mark | point | |", "|---|---|---|---|"]
        for point in POINTS:
            if point.section == letter:
                queued = "tested" if point.number in tests else point.status.value
                number = f'<a id="point-{point.number}"></a>{point.number}'
                rows.append(f"| {number} | {point.mark} | {point.text} | {queued} |")
    return "\n".join(rows).strip()


def _functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


if __name__ == "__main__":
    print("\n".join(lines()))
