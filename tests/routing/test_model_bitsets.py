"""Which endpoints may serve a request, as bits: the same that `eligible.find` names."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from extproc.decision import Rejection
from extproc.endpoint import Endpoint, Models
from extproc.pool.store import Fleet
from extproc.request import Request
from extproc.routing import eligibility
from extproc.routing.model_bitsets import ServingBits
from tests.support.pool_fixture import House

ADDRESSES = ("10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000", "[fd00::1]:8000")
TOKENS = (*ADDRESSES, "10.0.0.1", "10.0.0.2", "[fd00:0::1]:8000", "fd00::1", "10.9.9.9", "")
LISTS = st.none() | st.builds(
    Models,
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
    lists, model, adapter, subset, honour_subset, reject_unlisted
):
    """For any lists of models, subset hint and settings."""
    fleet = Fleet(on_gone=lambda _: None)
    fleet.replace([Endpoint(address) for address in ADDRESSES[: len(lists)]], 0.0)
    for member, listed in zip(fleet.pool.members, lists, strict=True):
        if listed is not None:
            fleet.observe_models(member.endpoint, listed)
    found = eligibility.find(
        fleet.pool,
        Request(api="x", model=model, adapter=adapter, subset=subset),
        honour_subset=honour_subset,
        reject_unlisted=reject_unlisted,
        health=fleet.health.settings,
        now=1e9,
        rng=random.Random(1),
    )
    bits = ServingBits(fleet.pool, honour_subset=honour_subset, reject_unlisted=reject_unlisted)
    members = () if isinstance(found, Rejection) else found.members
    addresses = [member.endpoint.address for member in members]
    assert bits.of(model, adapter, subset) == bits.named(addresses)
    assert bits.named(addresses).bit_count() == len(addresses)


def test_bits_stand_until_endpoints_or_their_models_change():
    """Loads and time change nothing; settings do."""
    house = House({ADDRESSES[0]: None})
    first = house.dispatcher.serving_bits
    assert house.dispatcher.serving_bits is first
    house.fleet.observe_models(
        house.fleet.pool.members[0].endpoint, Models(frozenset({"m"}), frozenset())
    )
    second = house.dispatcher.serving_bits
    assert second is not first
    house.fleet.replace([Endpoint(address) for address in ADDRESSES], 1.0)
    third = house.dispatcher.serving_bits
    assert third is not second
    house.dispatcher.adopt(house.dispatcher.routing)
    assert house.dispatcher.serving_bits is not third
