"""Queries of the documentation and of manifests parse, and name metrics that exist."""

import json
import re

import pytest

from tests.docs import console, llmd_metrics, metrics_reference
from tests.manifests import tools

#: Names of metrics; in those of recorded series they stand behind a colon.
_NAME = re.compile(r"(?<![:\w])extproc_\w+")


def expressions(value):
    """The values under `expr` in a document."""
    if isinstance(value, dict):
        for key, below in value.items():
            if key == "expr" and isinstance(below, str):
                yield below
            else:
                yield from expressions(below)
    elif isinstance(value, list):
        for below in value:
            yield from expressions(below)


def queries():
    """Queries of all pages, and those of rules and dashboards among the manifests."""
    for path in console.pages():
        for block in console.blocks(path.read_text(encoding="utf-8")):
            if block.language == "promql":
                yield pytest.param(block.text, id=f"{path.name}: {block.text.splitlines()[0]}")
    for path in sorted((console.ROOT / "manifests").rglob("*")):
        if path.suffix in {".yaml", ".json"} and "templates" not in path.parts:
            text = path.read_text(encoding="utf-8")
            documents = [json.loads(text)] if path.suffix == ".json" else tools.documents(text)
            for document in documents:
                for query in expressions(document):
                    yield pytest.param(query, id=f"{path.name}: {query}")


QUERIES = list(queries())


@pytest.mark.parametrize("query", QUERIES)
def test_queries_name_metrics_that_exist(query):
    """Queries of metrics that are not exported would return nothing."""
    assert set(_NAME.findall(query)) <= metrics_reference.series_names()


@pytest.mark.parametrize("query", QUERIES)
def test_queries_parse(query):
    """A query is PromQL."""
    parser = pytest.importorskip("promql_parser")
    parser.parse(query.replace("$__rate_interval", "5m"))


def test_pages_name_metrics_that_exist():
    """Every metric that a page mentions is exported."""
    families = {family.name for family in metrics_reference.families()}
    known = metrics_reference.series_names() | families
    for path in console.pages():
        if path.name not in {"CHANGELOG.md", "metrics.md"}:
            mentioned = set(re.findall(r"`(extproc_\w+)", path.read_text(encoding="utf-8")))
            assert mentioned <= known, f"{path}: {mentioned - known}"


def test_the_map_of_llmd_metrics_names_metrics_that_exist():
    """Every metric of extproc in the map is exported, and each family of llm-d has one row, with a text."""
    assert not llmd_metrics.unknown_names()
    names = llmd_metrics.upstream_names()
    assert len(names) == len(set(names))
    assert all(text for _, text in llmd_metrics.ROWS), "say where it comes from, or why it is not"
