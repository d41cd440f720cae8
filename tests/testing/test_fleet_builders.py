import math

import pytest

from extproc.endpoint import NO_LOAD, AdapterResidency, StepTimeModel
from extproc.testing import builders


def test_a_candidate_without_fields_is_unknown():
    """Without facts it was never scraped and has nothing to do."""
    candidate = builders.candidate("a")
    assert (candidate.endpoint.address, candidate.endpoint.name) == ("a:8000", "a")
    assert candidate.load is NO_LOAD
    assert (candidate.age_s, candidate.estimated_requests) == (math.inf, 0.0)


def test_fields_of_load_and_candidate_are_separated():
    """Facts of the load make a scrape of a second ago; those of the candidate do not."""
    candidate = builders.candidate("a", waiting=3, running=4, adapters=["x"], in_flight=2)
    assert (candidate.load.waiting, candidate.load.adapters) == (3, frozenset({"x"}))
    assert (candidate.load.at, candidate.age_s) == (99.0, 1.0)
    assert (candidate.in_flight, candidate.estimated_requests) == (2, 7.0)
    own = builders.candidate("a", matched_tokens=5, labels={"zone": "z"}, estimated_requests=1)
    assert own.load is NO_LOAD
    assert (own.matched_tokens, own.endpoint.labels, own.estimated_requests) == (
        5,
        {"zone": "z"},
        1.0,
    )
    assert builders.candidate("a", waiting=1, age_s=4.0).load.at == 96.0


def test_fields_can_be_plain_data():
    """Every fact can be written in a YAML file."""
    candidate = builders.candidate("a", residency="idle", rates={"prefill_s": 0.5})
    assert (candidate.residency, candidate.rates) == (
        AdapterResidency.IDLE,
        StepTimeModel(prefill_s=0.5),
    )


def test_a_misspelled_field_is_refused():
    """An unknown fact is an error that lists the known ones."""
    with pytest.raises(TypeError, match=r"expected some of .*waiting.*, got waitng"):
        builders.candidate("a", waitng=3)


def test_a_context_is_built():
    """Facts of the turn and of the request; chance by seed."""
    context = builders.context(5, model="m", headers={"x": "y"}, first_user_message="o", now=7.0)
    assert (context.request.model, context.request.api, context.headers) == (
        "m",
        "chat",
        {"x": "y"},
    )
    assert (context.first_user_message, context.now) == ("o", 7.0)
    assert context.rng.random() == builders.context(5).rng.random()


def test_loaded_candidates_vary_and_repeat():
    """A crowd has something of everything, is the same each time, and can be unknown."""
    many = builders.loaded_candidates(1000)
    assert many == builders.loaded_candidates(1000)
    assert len({c.endpoint.address for c in many}) == 1000
    assert {c.residency for c in many} == set(AdapterResidency)
    assert sum(c.load is NO_LOAD for c in many) == 200
    assert all(c.load is NO_LOAD for c in builders.loaded_candidates(20, scraped=False))


def test_identical_candidates_differ_in_scrapes_only():
    """Own accounts and dead reckoning say the same of everybody."""
    alike = builders.identical_candidates(50)
    assert {(c.in_flight, c.estimated_requests, c.matched_tokens) for c in alike} == {(0, 4.0, 0)}
    assert len({c.load for c in alike}) > 20
    assert {c.load for c in builders.identical_candidates(5, scraped=False)} == {NO_LOAD}
