"""A sequence that is computed at its first use."""

import sys

from extproc.scheduling.estimated_time import EstimatedTime
from extproc.scheduling.lazy_sequence import LazySequence
from extproc.testing import builders


def test_lazy_sequence_is_built_once_on_access():
    """Items are computed at the first use, and only once."""
    calls = []

    def make():
        calls.append(1)
        return ["a", "b", "c"]

    late = LazySequence(make)
    assert not calls
    assert (len(late), late[0], late[1:], list(late)) == (3, "a", ["b", "c"], ["a", "b", "c"])
    assert len(calls) == 1


def test_lazy_sequence_equals_its_items():
    """Two decisions with the same terms are the same, however the terms are kept."""
    late = LazySequence(lambda: ["a", "b"])
    assert late == ["a", "b"] == late
    assert late == LazySequence(lambda: ("a", "b"))
    assert late != ["a"]
    assert late != ["a", "c"]
    assert late != 2
    assert repr(late) == "['a', 'b']"


def test_terms_do_not_keep_the_prompt():
    """Values for a later explanation are numbers, so that decision records drop prompts."""
    prompt = bytes(1000)
    without = sys.getrefcount(prompt)
    context = builders.context(prompt=prompt, prompt_tokens=250)
    priced = EstimatedTime().cost(context, builders.candidates({"one": {}, "two": {}}))
    del context
    assert sys.getrefcount(prompt) == without
    assert len(priced.terms[0][1]) == 2
