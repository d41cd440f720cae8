"""Admission to an endpoint with capacity, or a wait for a cheaper one."""

import math

import pytest

from extproc.decision import SATURATED, CostResult, Decision, Deferral, Rejection
from extproc.endpoint import AdapterResidency, Candidate, Endpoint, Load, StepTimeModel
from extproc.request import InferenceRequest
from extproc.routing import admission
from tests.support.pool_fixture import PoolFixture

RATES = StepTimeModel(step_s=0.03, prefill_s=1e-4, decode_s=0.0, context_s=0.0)


def candidate(name, *, queued=0.0):
    return Candidate(Endpoint(name), queued_tokens=queued, rates=RATES)


def choose(candidates, costs=None, *, may_defer=True, unit="s", wanted=""):
    """Result of a request with these costs, or with a preferred endpoint at any cost."""

    def run(some):
        candidate_costs = (
            [] if costs is None else [costs[candidate.endpoint.address] for candidate in some]
        )
        priced = None if costs is None else CostResult("cost", unit, candidate_costs)
        chosen = min(
            some,
            key=lambda candidate: (
                candidate.endpoint.address != wanted,
                0.0 if costs is None else costs[candidate.endpoint.address],
            ),
        )
        return Decision(
            request=InferenceRequest(api="completions"),
            endpoints=(chosen.endpoint,),
            scored_candidates=some,
            cost=priced,
        )

    return admission.admit(run, candidates, 0.1, priority=0, may_defer=may_defer)


#: 1000 tokens at 0.1 ms and the iteration they are computed in: 0.13 s, of which 0.1 is priced.
BUSY, FREE = candidate("a", queued=1000.0), candidate("b")


def test_the_best_endpoint_with_capacity_is_chosen():
    """Whatever others do."""
    assert choose([FREE, BUSY], {"a": 2.0, "b": 1.0}).endpoints[0].address == "b"


def test_a_request_waits_for_a_cheaper_endpoint():
    """The unpriced part of the wait (0.03 s) and the limit of 0.1 s are added to its cost."""
    waits = choose([BUSY, FREE], {"a": 1.0, "b": 1.14})
    assert isinstance(waits, Deferral)
    assert (waits.preferred_endpoint, waits.busy_endpoints) == ("a", ())
    assert waits.retry_in_s == pytest.approx(0.03)
    assert choose([BUSY, FREE], {"a": 1.0, "b": 1.12}).endpoints[0].address == "b"


def test_a_request_that_may_not_defer_takes_a_free_endpoint():
    """Then it takes what there is."""
    costs = {"a": 0.0, "b": 100.0}
    assert choose([BUSY, FREE], costs, may_defer=False).endpoints[0].address == "b"


@pytest.mark.parametrize(("costs", "unit"), [(None, ""), ({"a": 0.0, "b": 100.0}, "")])
def test_only_costs_in_seconds_are_compared_with_waiting(costs, unit):
    """Scores, and costs in other units, choose among the free."""
    assert choose([BUSY, FREE], costs, unit=unit, wanted="a").endpoints[0].address == "b"


def test_without_capacity_the_preferred_endpoint_is_named():
    """With the time until the first of all is free; who has lost patience waits for anyone."""
    both = [BUSY, candidate("b", queued=2000.0)]
    waits = choose(both, {"a": 2.0, "b": 1.0})
    assert (waits.preferred_endpoint, waits.busy_endpoints) == ("b", ["a", "b"])
    assert waits.retry_in_s == pytest.approx(0.03)
    assert choose(both, {"a": 2.0, "b": 1.0}, may_defer=False).preferred_endpoint == ""


def holding(name, residency, *, queued=0.0):
    """An endpoint whose adapter slots are in that state for the request."""
    return Candidate(Endpoint(name), queued_tokens=queued, rates=RATES, residency=residency)


def test_a_request_waits_while_other_adapters_have_all_slots():
    """In the engine it would only wait; requests of other adapters are not behind it."""
    waits = choose([holding("a", AdapterResidency.FULL)], {"a": 1.0})
    assert isinstance(waits, Deferral)
    assert (waits.waits_for_slot, waits.busy_endpoints) == (True, [])
    # Half an answer of 200 tokens, less what it may wait.
    assert waits.retry_in_s == pytest.approx(0.5 * 200 * 0.03 - 0.1)
    busy = choose([holding("a", AdapterResidency.FULL, queued=1000.0)], {"a": 1.0})
    assert (busy.waits_for_slot, busy.busy_endpoints) == (True, ["a"])


def test_a_request_that_waited_for_long_waits_for_no_slot():
    """It goes to the engine, which loads its adapter when a slot is free."""
    chosen = choose([holding("a", AdapterResidency.FULL)], {"a": 1.0}, may_defer=False)
    assert isinstance(chosen, Decision)


def test_a_request_goes_where_a_slot_is_free():
    """Slots that are taken elsewhere hold up nothing."""
    full, free = holding("a", AdapterResidency.FULL), holding("b", AdapterResidency.EVICTABLE)
    assert choose([full, free], {"a": 1.0, "b": 1.05}).endpoints[0].address == "b"
    busy = holding("b", AdapterResidency.EVICTABLE, queued=1000.0)
    waits = choose([full, busy], {"a": 2.0, "b": 1.0})
    assert (waits.waits_for_slot, waits.busy_endpoints) == (False, ["b"])


@pytest.mark.parametrize(
    ("residency", "usage", "num_adapters", "is_free"),
    [
        (AdapterResidency.RESIDENT, 0.3, 2, True),
        (AdapterResidency.FULL, 0.3, 2, False),
        (AdapterResidency.RESIDENT, 0.9, 2, False),
        (AdapterResidency.RESIDENT, 0.3, 1, False),
    ],
)
def test_requests_that_wait_for_a_slot_are_no_queue_for_others(
    residency, usage, num_adapters, is_free
):
    """An engine passes over them for a loaded adapter; without free memory they may wait for that.

    Where all adapters have a slot, none waits for one.
    """
    load = Load(running=2.0, waiting=6.0, kv_usage=usage, adapters=frozenset("x"), adapter_slots=1)
    place = Candidate(
        Endpoint("a"),
        load,
        age_s=0.0,
        in_flight=8,
        estimated_requests=8.0,
        prompt_tokens=8000,
        queued_tokens=6000.0,
        rates=RATES,
        residency=residency,
    )
    (excess_s,) = admission.excess_wait_s([place], 0.1, priority=0, num_adapters=num_adapters)
    assert (excess_s <= 0.0) is is_free


@pytest.mark.parametrize(
    ("waiting", "facts", "is_free"),
    [
        (1.0, {"priority": 0}, True),
        (2.0, {"priority": 0}, False),
        (1.0, {"priority": 1}, False),
        (1.0, {"priority": 0, "leaves_headroom": True}, False),
    ],
)
def test_a_request_that_a_page_shows_as_waiting_closes_no_engine(waiting, facts, is_free):
    """It waits for its prefill, and counts as queued tokens; priorities shall not wait behind it."""
    load = Load(running=2.0, waiting=waiting, kv_usage=0.3)
    place = Candidate(Endpoint("a"), load, age_s=0.0, estimated_requests=6.0, rates=RATES)
    (excess_s,) = admission.excess_wait_s([place], 0.1, **facts)
    assert (excess_s <= 0.0) is is_free


@pytest.mark.parametrize("may_defer", [True, False])
def test_a_request_waits_where_the_profile_takes_none_of_the_free_endpoints(may_defer):
    """Its filters leave the busy one alone, such as the only engine that decodes."""

    def run(some):
        left = [place for place in some if place is BUSY]
        if not left:
            return SATURATED
        request = InferenceRequest(api="completions")
        return Decision(request=request, endpoints=(BUSY.endpoint,), scored_candidates=left)

    waits = admission.admit(run, [BUSY, FREE], 0.1, priority=0, may_defer=may_defer)
    assert isinstance(waits, Deferral)
    assert (waits.rejection.cause, list(waits.busy_endpoints)) == ("busy", ["a"])


def test_a_rejection_of_the_profile_is_returned():
    """A request that the profile rejects does not wait."""
    refused = admission.admit(lambda _: SATURATED, [BUSY, FREE], 0.1, priority=0, may_defer=True)
    assert isinstance(refused, Rejection)
    assert not math.isnan(refused.retry_after_s)


A = "10.0.0.1:8000"


def open_request(load=None, *, prompt_tokens=1000):
    """A pool of one endpoint with this page, and a request that was just sent to it."""
    fixture = PoolFixture({A: load})
    account = fixture.store.pool.find(A).account
    reservation = account.open("m", prompt_tokens, cached_tokens=0, now=fixture.now)
    return fixture, reservation


def page(**values):
    """A page with free memory and no queue, but for these values."""
    usual = {"waiting": 0.0, "running": 1.0, "kv_usage": 0.2, "kv_blocks": 1000, "block_tokens": 16}
    return Load(at=100.0, engine="vllm", **{**usual, **values})


@pytest.mark.parametrize(
    ("values", "priority", "is_shorter"),
    [
        ({}, 0, False),
        ({"waiting": 1.0}, 0, True),
        ({"kv_usage": 0.86}, 0, True),
        ({"kv_usage": 0.86}, 1, False),
        ({"kv_usage": 0.98}, 1, True),
        ({"kv_usage": None}, 0, False),
    ],
)
def test_the_end_of_a_computed_prompt_helps_where_places_or_memory_lack(
    values, priority, is_shorter
):
    """Those in front of a request are other prompts otherwise, which go on."""
    fixture, reservation = open_request(page(**values), prompt_tokens=10)
    later = fixture.now + 60.0
    pool = fixture.store.pool
    shortens = admission.shortens_wait(pool, reservation, priority=priority, now=later)
    assert shortens is is_shorter


def test_the_end_of_a_prompt_that_is_not_computed_helps():
    """Until it is computed by estimate, or the endpoint left the pool."""
    fixture, reservation = open_request()
    now = fixture.now

    def shortens(at):
        pool = fixture.store.pool
        return admission.shortens_wait(pool, reservation, priority=0, now=at)

    assert shortens(now)
    assert not shortens(now + 60.0)
    fixture.store.set_endpoints([], now)
    assert not shortens(now)


def test_a_page_shows_what_ended_a_moment_before_it():
    """An engine frees what a client held after its iteration."""
    fixture, _ = open_request(page())
    pool = fixture.store.pool
    assert admission.has_shown(pool, A, 99.7)
    assert not admission.has_shown(pool, A, 99.8)
    assert not admission.has_shown(pool, A, 100.0)
    assert admission.has_shown(pool, "10.0.0.9:8000", 100.0)
