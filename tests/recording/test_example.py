import json

import pytest

from tests.docs import recording_example


def test_the_example_of_the_documentation_is_current():
    """A change of the rows changes the file that the guide shows."""
    shown = recording_example.PATH.read_text().splitlines()
    rendered = recording_example.render().decode().splitlines()
    assert len(shown) == len(rendered), "run python -m tests.docs.recording_example"
    for before, after in zip(shown, rendered, strict=True):
        assert_same(json.loads(before), json.loads(after))


def assert_same(shown, rendered):
    """Sums of floats differ between versions of Python, in the last digits."""
    if isinstance(shown, dict):
        assert list(shown) == list(rendered)
        shown, rendered = list(shown.values()), list(rendered.values())
    if isinstance(shown, list):
        assert len(shown) == len(rendered)
        for before, after in zip(shown, rendered, strict=True):
            assert_same(before, after)
    elif isinstance(shown, float):
        assert rendered == pytest.approx(shown, rel=1e-12)
    else:
        assert rendered == shown, "run python -m tests.docs.recording_example"
