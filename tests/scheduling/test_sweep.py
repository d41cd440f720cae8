"""Every named strategy over pools of every size, with any metric missing."""

from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.decision import Decision, Rejection
from extproc.endpoint import NO_LOAD, AdapterResidency, Candidate, Endpoint, Load, StepTimeModel
from extproc.scheduling import registry
from extproc.testing import builders
from tests.support.seeded import examples

NAMES = list(registry.profiles())
PROFILES = registry.profiles()
#: More endpoints are no other case for any strategy, and cost more.
SIZES = (0, 1, 2, 3, 10, 100, 1000)

maybe = st.none() | st.integers(0, 200)
adapters = st.none() | st.frozensets(st.sampled_from(("lora", "x", "y", "")), max_size=3)
loads = st.just(NO_LOAD) | st.builds(
    Load,
    at=st.just(99.0),
    waiting=st.none() | st.floats(0, 1e6),
    running=st.none() | st.floats(0, 1e6),
    kv_usage=st.none() | st.floats(0, 1),
    adapters=adapters,
    waiting_adapters=adapters,
    adapter_slots=maybe,
    kv_blocks=maybe,
    block_tokens=st.sampled_from((None, 1, 16)),
    prefix_hits=st.none() | st.floats(0, 1e6),
)
labels = st.dictionaries(
    st.sampled_from(("zone", "adapter.kubeai.org/lora", "adapter.kubeai.org/x", "llm-d.ai/role")),
    st.sampled_from(("", "a", "decode")),
    max_size=2,
)
kinds_of_candidate = st.builds(
    dict,
    load=loads,
    labels=labels,
    age_s=st.sampled_from((0.0, 1.0, float("inf"))),
    in_flight=st.integers(0, 1000),
    estimated_requests=st.floats(0, 1e6),
    prompt_tokens=st.integers(0, 10**6),
    matched_tokens=st.integers(0, 10**6),
    queued_tokens=st.floats(0, 1e9),
    unscraped_tokens=st.floats(0, 1e9),
    active_context_tokens=st.floats(0, 1e4),
    residency=st.sampled_from(list(AdapterResidency)),
    rates=st.builds(
        StepTimeModel,
        step_s=st.floats(0, 1),
        prefill_s=st.floats(0, 1),
        decode_s=st.floats(0, 1),
        output_tokens=st.floats(0, 1e5),
        max_num_seqs=st.sampled_from((None, 1.0, 64.0)),
    ),
)
turns = st.builds(
    dict,
    seed=st.integers(0, 2**32),
    model=st.sampled_from(("", "base", "lora")),
    adapter=st.sampled_from(("", "", "x")),
    prompt_tokens=st.integers(0, 10**6),
    session=st.sampled_from(("", "s-1")),
    headers=st.sampled_from(
        ({}, {"x-llm-d-inference-objective": "sheddable"}, {"x-session": "s-1"})
    ),
    blocks=st.lists(st.integers(0, 2**64 - 1), max_size=20).map(tuple),
    first_user_message=st.text(max_size=120),
    continuation_ratio=st.floats(0, 1),
    expected_growth_tokens=st.floats(0, 1e4),
    idle_conversations_per_open=st.floats(0, 0.5),
)


def crowd(kinds, size):
    """A pool of a size whose endpoints are of a few kinds."""
    return [
        Candidate(
            endpoint=Endpoint(f"10.0.{i // 250}.{i % 250}:8000", labels=kind["labels"]),
            **{key: value for key, value in kind.items() if key != "labels"},
        )
        for i, kind in zip(range(size), kinds * (size // len(kinds) + 1), strict=False)
    ]


def check(profile, outcome, candidates, count):
    """Invariants of every outcome."""
    if isinstance(outcome, Rejection):
        assert outcome.status == (429 if candidates else 503)
        return
    assert isinstance(outcome, Decision)
    assert outcome.degraded == ""
    known = {c.endpoint.address for c in candidates}
    chosen = [endpoint.address for endpoint in outcome.endpoints]
    assert known.issuperset(chosen)
    assert 1 <= len(set(chosen)) == len(chosen) <= max(count, profile.max_endpoints)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(25), deadline=None)
@given(
    kinds=st.lists(kinds_of_candidate, min_size=1, max_size=6),
    size=st.sampled_from(SIZES[:-1]),
    facts=turns,
    count=st.sampled_from((1, 3)),
)
def test_any_pool_gets_a_decision_or_a_rejection(name, kinds, size, facts, count):
    """Every decision names a candidate, raises nothing and is not degraded."""
    candidates, context = crowd(kinds, size), builders.context(**facts)
    profile = PROFILES[name]
    outcome = profile.run(context, candidates, count=count)
    check(profile, outcome, candidates, count)
    if isinstance(outcome, Decision):
        for observer in profile.observers:
            observer.on_committed(outcome, context.now)


METRICS = [
    "waiting",
    "running",
    "kv_usage",
    "adapters",
    "waiting_adapters",
    "adapter_slots",
    "kv_blocks",
    "block_tokens",
]


@cache
def without(missing, size):
    """A pool whose pages lack one metric, or all of them."""
    gone = dict.fromkeys(METRICS if missing == "everything" else [missing])
    return [
        c
        if c.load is NO_LOAD
        else msgspec.structs.replace(c, load=msgspec.structs.replace(c.load, **gone))
        for c in builders.loaded_candidates(size)
    ]


@pytest.mark.parametrize("missing", [*METRICS, "everything"])
@pytest.mark.parametrize("name", NAMES)
def test_a_missing_metric_rejects_no_request(name, missing):
    """Whatever all pages lack, a pool of any size serves."""
    profile = PROFILES[name]
    for size in SIZES:
        candidates = without(missing, size)
        outcome = profile.run(
            builders.context(model="lora", first_user_message="Which way?"), candidates
        )
        check(profile, outcome, candidates, 1)
        assert isinstance(outcome, Decision if candidates else Rejection)
