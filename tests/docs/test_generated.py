"""Generated parts of the documentation are what the code says."""

import pytest

from tests.docs import generate

PAGES = list(generate.pages())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(generate.DOCS)))
def test_blocks_are_what_the_code_says(path):
    """Every generated block stands on its page as its function makes it."""
    text = path.read_text(encoding="utf-8")
    assert text == generate.filled(text), "run make reference"


@pytest.mark.parametrize("name", generate.BLOCKS)
def test_every_block_stands_on_a_page(name):
    """No generated block is left out of the documentation."""
    begin, end = generate.markers(name)
    holders = [path for path in PAGES if begin in path.read_text(encoding="utf-8")]
    assert len(holders) == 1, holders
    assert end in holders[0].read_text(encoding="utf-8")
