"""Citations in code and comments can be opened."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Pages of this repository: those in the address of another one are none.
_CITATION = re.compile(r"(?<![\w/])docs/[\w/.-]+\.md(?:#[\w-]+)?")
_HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
_ANCHOR = re.compile(r'<a id="([\w-]+)">')


def sources():
    """Source files whose comments may cite a page."""
    for folder in ("extproc", "tests", "bench", "manifests", "envoy"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".yaml", ".yml", ".tpl"}:
                yield path


CITING = [
    pytest.param(citations, id=str(path.relative_to(ROOT)))
    for path in sources()
    if (citations := _CITATION.findall(path.read_text(encoding="utf-8")))
]


@cache
def anchors(path):
    """The anchors of a page: its headings, as Markdown renderers name them, and explicit ones."""
    text = path.read_text(encoding="utf-8")
    headings = {
        re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        for heading in _HEADING.findall(text)
    }
    return headings | set(_ANCHOR.findall(text))


@pytest.mark.parametrize("citations", CITING)
def test_cited_pages_and_anchors_exist(citations):
    """A page that a comment names is there, with the anchor it names."""
    for citation in citations:
        page, _, anchor = citation.partition("#")
        path = ROOT / page
        assert path.is_file(), citation
        assert not anchor or anchor in anchors(path), citation


def test_no_report_outside_of_the_tree_is_cited():
    """Comments cite public sources or `docs/`."""
    report = re.compile(
        r"\b((protocol|seeds|engines|envoy|llm-d)\s+(#:? )?)?report,? \d|EPP checklist"
    )
    for path in sources():
        if path != Path(__file__):
            assert not report.search(path.read_text(encoding="utf-8")), path
