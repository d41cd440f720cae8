import pytest

from tests.style import names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("told = 1", ["extproc/m.py:1: `told` does not say what it names"]),
        ("def run(_of): ...", ["extproc/m.py:1: `_of` does not say what it names"]),
        ("run(found=1)", ["extproc/m.py:1: `found` does not say what it names"]),
        (
            '"""What it does."""',
            ["extproc/m.py:1: docstring begins with `What`; begin with the subject or the verb"],
        ),
        (
            "from extproc.pool import store as fleet",
            ["extproc/m.py:1: `store` is imported as `fleet`; rename it where it is defined"],
        ),
        (
            "from tests.support import peer as far_end",
            ["extproc/m.py:1: `peer` is imported as `far_end`; rename it where it is defined"],
        ),
        ("import datetime as dt", []),
        ("from hypothesis import given\n@given()\ndef run(): ...", []),
        ("import hypothesis\n@hypothesis.given()\ndef run(): ...", []),
        ('"""Reads one page."""\noneself = 1', []),
    ],
)
def test_check_names_each_problem(text, expected):
    """A line for each problem, with its place."""
    assert names.check([("extproc/m.py", text)]) == expected


def test_check_finds_classes_of_one_name():
    """Both places are printed."""
    assert names.check([("a.py", "class Pool: ..."), ("b.py", "class Pool: ...")]) == [
        "a.py:1: there are 2 classes `Pool`; add what tells them apart",
        "b.py:1: there are 2 classes `Pool`; add what tells them apart",
    ]
