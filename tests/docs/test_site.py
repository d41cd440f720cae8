"""The documentation builds without a warning, and its configuration names every page."""

import re

import pytest
import yaml

from tests.docs import site

DOCS = site.ROOT / "docs"
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def configured():
    """The configuration of the site."""

    class Loader(yaml.SafeLoader):
        """Reads the tags for Python names as text."""

    Loader.add_multi_constructor(
        "tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix
    )
    return yaml.load((site.ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


def listed(entry):
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for below in entry.values():
            yield from listed(below)
    else:
        for below in entry:
            yield from listed(below)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """Links between pages and to anchors resolve."""
    status, printed = site.build(tmp_path)
    assert status == 0, printed
    assert "No issues found" in printed, printed
    assert (tmp_path / "html" / "index.html").is_file()


def test_the_navigation_names_every_page():
    """A page that the navigation leaves out cannot be reached."""
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert sorted(listed(configured()["nav"])) == sorted(pages)


def test_links_into_the_tree_resolve():
    """Files that Markdown outside and inside of docs/ links to are there."""
    pages = [*site.ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(site.ROOT / "manifests").rglob("*.md")]
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for match in _LINK.finditer(text):
            target = (match[1] or match[2]).partition("#")[0]
            if target and "://" not in target and not target.startswith("mailto:"):
                assert (page.parent / target).exists(), f"{page}: {target}"


def test_links_out_of_the_pages_lead_to_the_repository():
    """The site has no files of the tree: links to them get the repository's address, or go."""
    folder = DOCS / "reference"
    text = "[`a`](../../extproc/errors.py) [b](../index.md#c) [d](https://e.test/../f)"
    assert site.replace_tree_links(text, folder, "https://g.test/h") == (
        "[`a`](https://g.test/h/blob/main/extproc/errors.py) [b](../index.md#c) "
        "[d](https://e.test/../f)"
    )
    assert site.replace_tree_links(text, folder, "").startswith("`a` [b](")
