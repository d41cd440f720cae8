"""Admission: dispatch to an endpoint with capacity, or queue for a better endpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from extproc.decision import Decision, Outcome, Rejection, all_busy
from extproc.endpoint import Candidate
from extproc.routing import saturation


def admit(
    run: Callable[[Sequence[Candidate]], Outcome],
    candidates: Sequence[Candidate],
    limit_s: float,
    *,
    priority: int,
    patient: bool,
    shared: bool = False,
) -> Outcome:
    """Score all candidates and dispatch to the best if it has capacity.

    Where the endpoint of choice has none and others have, the request waits for it if that costs
    less: c(wanted) + w + limit < min c(free), with c what the profile's cost model says and w the
    wait that it does not know of. So a conversation is not computed anew, and evicts no prefix,
    because somewhere else was a place for a moment. Costs are in seconds, and so is a limit; without
    a cost model the free ones are all there is to choose among.

    Args:
        run: Runs the profile over candidates.
        candidates: Eligible endpoints, at least one.
        limit_s: Seconds of waiting from which an endpoint has no place.
        priority: Of the request.
        patient: Whether it may wait for an endpoint while another one has a place.
        shared: Whether requests of priorities above 0 come.

    Returns:
        A decision, or a rejection that names the preferred endpoint if the request may queue.
    """
    over = saturation.excess_wait_s(candidates, limit_s, priority=priority, shared=shared)
    free = [
        candidate for candidate, seconds in zip(candidates, over, strict=True) if seconds <= 0.0
    ]
    if not free and not patient:
        return all_busy(min(over), busy=_addresses(candidates))
    outcome = run(candidates)
    if isinstance(outcome, Rejection) or len(free) == len(candidates):
        return outcome
    address = outcome.endpoints[0].address
    at = next(i for i, candidate in enumerate(candidates) if candidate.endpoint.address == address)
    if over[at] <= 0.0:
        return outcome
    if not free:
        rather = address if _in_seconds(outcome) else ""
        return all_busy(min(over), waits_for=rather, closed=True, busy=_addresses(candidates))
    if patient and _costs_less(outcome, candidates[at], free, limit_s):
        return all_busy(over[at], waits_for=address)
    return run(free)


def _addresses(candidates: Sequence[Candidate]) -> Sequence[str]:
    return [candidate.endpoint.address for candidate in candidates]


def _in_seconds(decision: Decision) -> bool:
    return decision.cost is not None and decision.cost.unit == "s"


def _costs_less(
    decision: Decision, wanted: Candidate, free: Sequence[Candidate], limit_s: float
) -> bool:
    """True if queueing for `wanted` costs less than every free endpoint; see `admit`."""
    priced = decision.cost
    if priced is None or not _in_seconds(decision):
        return False
    finalists = (candidate.endpoint.address for candidate in decision.scored_candidates)
    costs = dict(zip(finalists, priced.costs, strict=True))
    others = [
        costs[candidate.endpoint.address]
        for candidate in free
        if candidate.endpoint.address in costs
    ]
    known_s = wanted.queued_tokens * wanted.rates.prefill_s
    unknown_s = max(0.0, saturation.wait_s(wanted) - known_s)
    waiting = costs[wanted.endpoint.address] + unknown_s + limit_s
    return waiting < min(others, default=waiting)
