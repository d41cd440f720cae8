"""Generated blocks of the documentation: `make reference` writes them, a test compares them.

    python -m tests.docs.generate

A block is what stands between `<!-- NAME -->` and `<!-- /NAME -->` on a page. It may stand on any
page of `docs/`; the function of its name makes its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.protocol import table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

#: Name of a block to the function that makes its text.
BLOCKS: Mapping[str, Callable[[], str]] = {
    "points": table.reference_block,
}


def pages() -> Iterator[Path]:
    """All pages of the documentation."""
    yield from sorted(DOCS.rglob("*.md"))


def markers(name: str) -> tuple[str, str]:
    """What opens and what closes a block."""
    return f"<!-- {name} -->\n", f"\n<!-- /{name} -->"


def filled(text: str) -> str:
    """A page with all its blocks made anew."""
    for name, make in BLOCKS.items():
        begin, end = markers(name)
        before, opened, rest = text.partition(begin)
        if opened:
            _, closed, after = rest.partition(end)
            assert closed, f"wanted{end} after {begin.strip()}; found none; close the block"
            text = f"{before}{begin}{make()}{end}{after}"
    return text


def main() -> None:
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"rewrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
