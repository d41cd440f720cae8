"""Eligible endpoints of a request as bits: those that `find_eligible` names."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from extproc.decision import Rejection
from extproc.endpoint import Endpoint, ServedModels
from extproc.pool.store import PoolStore
from extproc.request import InferenceRequest
from extproc.routing import eligibility
from extproc.routing.eligibility import ModelBitsets
from tests.support.pool_fixture import PoolFixture

ADDRESSES = ("10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000", "[fd00::1]:8000")
TOKENS = (*ADDRESSES, "10.0.0.1", "10.0.0.2", "[fd00:0::1]:8000", "fd00::1", "10.9.9.9", "")
LISTS = st.none() | st.builds(
    ServedModels,
    st.frozensets(st.sampled_from(["m", "n"])),
    st.frozensets(st.sampled_from(["x", "y"])),
)


@given(
    st.lists(LISTS, max_size=len(ADDRESSES)),
    st.sampled_from(["", "m", "n", "x", "other"]),
    st.sampled_from(["", "x", "y", "other"]),
    st.none() | st.lists(st.sampled_from(TOKENS), max_size=3).map(tuple),
    st.booleans(),
    st.booleans(),
)
def test_bits_are_those_of_the_eligible_endpoints(
    lists, model, adapter, subset, respect_subset, reject_unlisted
):
    """For any lists of models, subset hint and settings."""
    store = PoolStore(on_gone=lambda _: None)
    store.set_endpoints([Endpoint(address) for address in ADDRESSES[: len(lists)]], 0.0)
    for member, listed in zip(store.pool.members, lists, strict=True):
        if listed is not None:
            store.observe_models(member.endpoint, listed)
    eligible = eligibility.find_eligible(
        store.pool,
        InferenceRequest(api="x", model=model, adapter=adapter, subset=subset),
        respect_subset=respect_subset,
        reject_unlisted=reject_unlisted,
        may_defer=False,
        health=store.outlier_detector.settings,
        now=1e9,
        rng=random.Random(1),
    )
    bits = ModelBitsets(store.pool, respect_subset=respect_subset, reject_unlisted=reject_unlisted)
    members = () if isinstance(eligible, Rejection) else eligible.members
    addresses = [member.endpoint.address for member in members]
    assert bits.bits_for(model, adapter, subset) == bits.bits_of_addresses(addresses)
    assert bits.bits_of_addresses(addresses).bit_count() == len(addresses)


def test_bits_are_kept_until_endpoints_or_models_change():
    """Loads and time change nothing; settings do."""
    pool_fixture = PoolFixture({ADDRESSES[0]: None})
    first = pool_fixture.director.serving_bits
    assert pool_fixture.director.serving_bits is first
    pool_fixture.store.observe_models(
        pool_fixture.store.pool.members[0].endpoint, ServedModels(frozenset({"m"}), frozenset())
    )
    second = pool_fixture.director.serving_bits
    assert second is not first
    pool_fixture.store.set_endpoints([Endpoint(address) for address in ADDRESSES], 1.0)
    third = pool_fixture.director.serving_bits
    assert third is not second
    pool_fixture.director.reconfigure(pool_fixture.director.routing)
    assert pool_fixture.director.serving_bits is not third
