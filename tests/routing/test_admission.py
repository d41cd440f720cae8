"""Admission to an endpoint with capacity, or a wait for a cheaper one."""

import math

import pytest

from extproc.decision import SATURATED, CostResult, Decision, Deferral, Rejection
from extproc.endpoint import Candidate, Endpoint, StepTimeModel
from extproc.request import InferenceRequest
from extproc.routing import admission

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


def test_a_rejection_of_the_profile_is_returned():
    """A request that the profile rejects does not wait."""
    refused = admission.admit(lambda _: SATURATED, [BUSY, FREE], 0.1, priority=0, may_defer=True)
    assert isinstance(refused, Rejection)
    assert not math.isnan(refused.retry_after_s)
