"""Admission: dispatch to an endpoint with capacity, or queue for a better endpoint.

An endpoint is saturated when the estimated wait before prefill exceeds a limit (`excess_wait_s`).

Engines serve first come first served, so a request that was sent to one is ahead of every later
request, whatever its priority. Flow control can help a priority only by sending other requests late:
a prompt when the one before it is estimated to be computed, and none into the last of the KV cache.
Both cost little: an engine that gets its next prompt one iteration late still decodes the full batch,
and a batch that is a tenth smaller has almost the same tokens per second, with shorter iterations, of
which every prompt waits for one or two (`python -m bench.capacity`).

While every endpoint is saturated (`is_saturated`), requests of negative priority are dropped. Those of
a priority whose ceiling the saturation reaches are held (`is_held`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from extproc.decision import Decision, Deferral, Outcome, Rejection, all_busy
from extproc.endpoint import ADAPTER_LOAD_SHARES, AdapterResidency, Candidate
from extproc.pool.inflight import Reservation
from extproc.pool.snapshot import Pool
from extproc.scheduling.load_bounds import SaturationRules, UtilizationDetector
from extproc.scheduling.profile import SchedulerProfile

_RESIDENT: Final = AdapterResidency.RESIDENT
_FULL: Final = AdapterResidency.FULL

#: Share of the KV cache that running answers may fill before a request of a priority above 0 has to
#: wait for memory: what engines fill in steady state before they preempt.
_MAX_KV_USAGE: Final = 0.97

#: The same for all others. What is left is room for the prompt of a request that must not wait
#: until an answer ends. At 0.97 a saturated engine is always short of it.
_KV_TARGET: Final = 0.9

#: The same while requests of priorities above 0 come. What runs beside them sets how long their
#: iterations are. Simulated at three times the capacity (`bench.capacity`), 0.75 in place of 0.9 takes
#: 3 to 6 % off the p99 of their first tokens, and up to 4 % off what is served.
_KV_TARGET_BESIDE_PRIORITY: Final = 0.85

#: Seconds for which it is remembered that one came.
PRIORITY_MEMORY_S: Final = 60.0

#: How much longer a request of a priority above 0 finds an endpoint free (a factor). What others
#: leave is its headroom: it never waits for those that were sent just before.
HEADROOM: Final = 5.0

#: Requests that a page may show as waiting in an engine that has a place for all (count): they came in
#: the iteration before, and count as queued tokens. As a queue for places they would close the engine
#: until the next page. Not while requests of priorities above 0 come, which would wait behind them
#: where the batch is full.
_ARRIVING: Final = 1

#: Shortest time of an answer (s), as in the cost of `adaptive`.
_SHORTEST_ANSWER_S: Final = 1e-3

#: How much longer a queue may be where a prompt is cached or an adapter loaded, in seconds of prefill
#: or loading that are saved (a factor): as long as that saves. What is cached adds little to a queue,
#: and is soon out of it; while an engine loads an adapter it computes nothing. For prompts it matters
#: little, from 0 to 10, as requests wait for the endpoint of their choice anyway: l4-1600 serves 109
#: to 111 requests per second.
_SAVED_WAIT_FACTOR: Final = 1.0

#: Seconds in which an engine notices that a client left, and frees what its request held: an iteration or
#: two.
_ABORT_S: Final = 0.25


def wait_s(
    candidate: Candidate,
    *,
    ceiling: float = _MAX_KV_USAGE,
    is_passing: bool = False,
    num_arriving: int = 0,
) -> float:
    """Estimated seconds between a request's arrival on an endpoint and the start of its prefill.

    wait = q p + i(n) + s w b, with q the uncached prompt tokens sent there and estimated as not yet
    computed, p the seconds of each, i(n) the iteration with n requests that they are computed
    beside, 0 where q is; w the requests in front that wait for a place or memory, and b = o i(r) / r
    the seconds between two answers that end (o tokens of an answer, i(r) seconds of an iteration
    with r running). s = max(0, 1 - age / (o i(r))): of what a scrape showed, nothing is left after the
    time of an answer. All of it is our own account, corrected by scrapes; an endpoint whose
    scrape is late counts as the mean of the others, and while none has a scrape w is 0.

    Args:
        ceiling: Share of the KV cache that may be filled, 0..1.
        is_passing: Whether those that wait there do so for an adapter slot, and the engine passes over
            them for this request.
        num_arriving: Requests that wait there and are no queue for places (count); more are all one.
    """
    # Without calls where nothing waits: it runs for every endpoint of every request that waits.
    queued, load = candidate.queued_tokens, candidate.load
    waiting = load.waiting or 0.0
    if waiting <= num_arriving:
        waiting = 0.0
    if is_passing:
        queued -= waiting * candidate.prompt_tokens / max(1, candidate.in_flight)
        waiting = 0.0
    total_s = 0.0
    if queued > 0.0:
        rates, requests = candidate.rates, candidate.estimated_requests
        # However short a prompt is, nothing overtakes the iteration that computes it.
        alongside = requests if requests > 1.0 else 1.0  # noqa: FURB136
        total_s = queued * rates.prefill_s + rates.iteration_s(alongside)
    usage, blocks, size = load.kv_usage, load.kv_blocks, load.block_tokens
    excess_s = 0.0
    if usage is not None and blocks and size:
        excess_s = (usage - ceiling) * blocks * size + candidate.unscraped_tokens
    if excess_s > 0.0 or waiting:
        rates = candidate.rates
        running = max(1.0, load.running or 1.0)
        answer_s = max(_SHORTEST_ANSWER_S, rates.output_tokens * rates.iteration_s(running))
        shown = 1.0 if candidate.is_imputed else max(0.0, 1.0 - candidate.age_s / answer_s)
        ahead = _count_requests_ahead(candidate, excess_s, waiting=waiting)
        total_s += shown * ahead * answer_s / running
    return total_s


def excess_wait_s(
    candidates: Sequence[Candidate],
    limit_s: float,
    *,
    priority: int,
    leaves_headroom: bool = False,
    num_adapters: int = 0,
) -> list[float]:
    """Seconds of wait above the limit, 0 or less with capacity: wait - m p - (l* - l) - limit.

    m are the prompt tokens predicted as cached there, p the seconds each takes to compute, l those of
    loading the adapter there, and l* the longest of them.

    Args:
        candidates: Eligible endpoints, at least one.
        limit_s: Wait above which an endpoint has no capacity (seconds).
        leaves_headroom: Whether requests of priorities above 0 come.
        num_adapters: Adapters that requests may ask for (count).
    """
    ceiling = _KV_TARGET_BESIDE_PRIORITY if leaves_headroom else _KV_TARGET
    if priority > 0:
        limit_s *= HEADROOM
        ceiling = _MAX_KV_USAGE
    num_arriving = 0 if leaves_headroom or priority > 0 else _ARRIVING
    longest_s = 0.0
    if any(candidate.residency is not _RESIDENT for candidate in candidates):
        longest_s = max(_adapter_load_s(candidate) for candidate in candidates)
    excess_s: list[float] = []
    for candidate in candidates:
        is_passing = num_adapters > 0 and _is_passing(candidate, num_adapters)
        seconds = wait_s(
            candidate, ceiling=ceiling, is_passing=is_passing, num_arriving=num_arriving
        )
        seconds -= limit_s
        if longest_s:
            seconds -= _SAVED_WAIT_FACTOR * (longest_s - _adapter_load_s(candidate))
        if candidate.matched_tokens:
            seconds -= _SAVED_WAIT_FACTOR * candidate.matched_tokens * candidate.rates.prefill_s
        excess_s.append(seconds)
    return excess_s


def _is_passing(candidate: Candidate, num_adapters: int) -> bool:
    """True if requests seem to wait for slots of other adapters there, and memory is free."""
    load = candidate.load
    slots, usage = load.adapter_slots, load.kv_usage
    if candidate.residency is _FULL or not slots or usage is None:
        return False
    return num_adapters > slots <= len(load.adapters or ()) and usage < _KV_TARGET_BESIDE_PRIORITY


def _adapter_load_s(candidate: Candidate) -> float:
    """Estimated seconds in which the adapter of the request is loaded there."""
    return ADAPTER_LOAD_SHARES[candidate.residency] * candidate.rates.adapter_load_s


def _count_requests_ahead(candidate: Candidate, excess_s: float, *, waiting: float) -> float:
    """Requests ahead that wait for a batch slot or for memory, `excess_s` tokens of it."""
    in_front = excess_s / max(1.0, candidate.rates.context_tokens)
    if waiting:
        in_front = max(in_front, candidate.estimated_requests - (candidate.load.running or 0.0))
    return max(0.0, in_front)


def shortens_wait(pool: Pool, reservation: Reservation, *, priority: int, now: float) -> bool:
    """True if the end of an open request shortens the wait on its endpoint, by the terms of `wait_s`.

    Its prompt is still to be computed, requests wait in the engine for a place or memory, or memory is
    short. Elsewhere the wait is that for other prompts, which go on.

    Args:
        priority: Priority of the request that waits.
    """
    member = pool.find(reservation.endpoint.address)
    if member is None:
        return False
    account, load = member.account, member.load
    if load.waiting or not account.is_computed(reservation, now):
        return True
    usage, blocks, size = load.kv_usage, load.kv_blocks, load.block_tokens
    if usage is None or not blocks or not size:
        return False
    ceiling = _MAX_KV_USAGE if priority > 0 else _KV_TARGET_BESIDE_PRIORITY
    unscraped_tokens = account.kv_tokens_sent - account.kv_tokens_scraped
    return (usage - ceiling) * blocks * size + unscraped_tokens > 0.0


def has_shown(pool: Pool, address: str, ended_at: float) -> bool:
    """True if the last page of an endpoint shows what a request freed that ended at this time.

    True as well where the endpoint left the pool.
    """
    member = pool.find(address)
    return member is None or member.load.at >= ended_at + _ABORT_S


def admit(
    run_profile: Callable[[Sequence[Candidate]], Decision | Rejection],
    candidates: Sequence[Candidate],
    limit_s: float,
    *,
    priority: int,
    may_defer: bool,
    leaves_headroom: bool = False,
    num_adapters: int = 0,
) -> Outcome:
    """Score all candidates and dispatch to the best if it has capacity.

    Where adapters with open requests have all slots, a request of another adapter waits here for one:
    in the engine it would only wait, and each adapter that comes in between costs another load.

    Where the endpoint of choice has none and others have, the request waits for it if that costs
    less: c(wanted) + w + limit < min c(free), with c what the profile's cost model says and w the
    wait that it does not know of. So a conversation is not computed anew, and evicts no prefix,
    because somewhere else was a place for a moment. Costs are in seconds, and so is a limit; without
    a cost model the free ones are all there is to choose among.

    Args:
        candidates: Eligible endpoints, at least one.
        limit_s: Wait above which an endpoint has no capacity (seconds).
        may_defer: Whether it may wait for an endpoint while another one has a place, or for a slot.
        leaves_headroom: Whether requests of priorities above 0 come.
        num_adapters: Adapters that requests may ask for (count).

    Returns:
        A decision, the rejection of the profile, or a deferral that names the preferred endpoint.
    """
    excess_s = excess_wait_s(
        candidates,
        limit_s,
        priority=priority,
        leaves_headroom=leaves_headroom,
        num_adapters=num_adapters,
    )
    busy = candidates
    num_full = sum(candidate.residency is _FULL for candidate in candidates) if may_defer else 0
    if num_full:
        # An engine passes over a request that waits for a slot, so it holds up no other one here.
        busy = [c for c, seconds in zip(candidates, excess_s, strict=True) if seconds > 0.0]
        excess_s = [s + _slot_wait_s(c) for s, c in zip(excess_s, candidates, strict=True)]
    if max(excess_s) <= 0.0:
        return run_profile(candidates)
    free = [
        candidate for candidate, seconds in zip(candidates, excess_s, strict=True) if seconds <= 0.0
    ]
    if not free and not may_defer:
        return all_busy(min(excess_s), busy_endpoints=_addresses(candidates))
    outcome = run_profile(candidates)
    if isinstance(outcome, Rejection):
        return outcome
    address = outcome.endpoints[0].address
    index = next(
        i for i, candidate in enumerate(candidates) if candidate.endpoint.address == address
    )
    if excess_s[index] <= 0.0:
        return outcome
    if not free:
        preferred = address if _in_seconds(outcome) else ""
        return all_busy(
            min(excess_s),
            preferred_endpoint=preferred,
            busy_endpoints=_addresses(busy),
            waits_for_slot=num_full == len(candidates),
        )
    if may_defer and _costs_less(outcome, candidates[index], free, limit_s):
        return all_busy(excess_s[index], preferred_endpoint=address)
    chosen = run_profile(free)
    if isinstance(chosen, Rejection):
        # Such as where the profile takes decode engines alone, and prefill engines are free.
        return all_busy(excess_s[index], busy_endpoints=_addresses(outcome.scored_candidates))
    return chosen


def _slot_wait_s(candidate: Candidate) -> float:
    """Estimated seconds until an adapter slot is free: half an answer, as in the cost of `adaptive`."""
    if candidate.residency is not _FULL:
        return 0.0
    rates = candidate.rates
    running = max(1.0, candidate.load.running or 1.0)
    return 0.5 * max(_SHORTEST_ANSWER_S, rates.output_tokens * rates.iteration_s(running))


def _addresses(candidates: Sequence[Candidate]) -> Sequence[str]:
    return [candidate.endpoint.address for candidate in candidates]


def _in_seconds(decision: Decision) -> bool:
    return decision.cost is not None and decision.cost.unit == "s"


def _costs_less(
    decision: Decision, preferred: Candidate, free: Sequence[Candidate], limit_s: float
) -> bool:
    """True if queueing for `preferred` costs less than every free endpoint; see `admit`."""
    cost = decision.cost
    if cost is None or not _in_seconds(decision):
        return False
    addresses = (candidate.endpoint.address for candidate in decision.scored_candidates)
    costs = dict(zip(addresses, cost.costs, strict=True))
    others = [
        costs[candidate.endpoint.address]
        for candidate in free
        if candidate.endpoint.address in costs
    ]
    known_s = preferred.queued_tokens * preferred.rates.prefill_s
    unknown_s = max(0.0, wait_s(preferred) - known_s)
    waiting_cost = costs[preferred.endpoint.address] + unknown_s + limit_s
    return waiting_cost < min(others, default=waiting_cost)


#: What counts as full where the profile has no detector of its own: upstream's defaults, 5 waiting
#: requests or 0.8 of the KV blocks.
_DEFAULT_DETECTOR = UtilizationDetector()

#: The same, for the mean.
_DEFAULT_RULES = SaturationRules(utilization=_DEFAULT_DETECTOR)

#: Seconds after which a held request is looked at without an event. Scrapes and responses that end are
#: events; uncomputed tokens, and priorities that count no longer, go without one.
_HELD_RETRY_S: Final = 0.1

#: A request is held at the ceiling of its priority.
HELD: Final = Deferral(
    _HELD_RETRY_S,
    Rejection(
        429,
        "the endpoints are too saturated for requests of this priority",
        reason="rejected-saturated",
        retry_after_s=1,
        cause="held",
    ),
    is_held=True,
)


def is_saturated(
    profile: SchedulerProfile,
    candidates: Sequence[Candidate],
    rules: SaturationRules | None = None,
) -> bool:
    """True if the eligible endpoints are saturated as rules say; without rules, if each of them is.

    Full is what a saturation detector among the profile's filters says, one of them where there are
    several; else `UtilizationDetector` with its defaults. An endpoint of unknown load is as
    full as the others; while no load is known none is full, so that a scraper in trouble drops
    nothing.

    Args:
        candidates: Eligible endpoints, at least one.
    """
    if rules is not None:
        return rules.is_saturated(candidates)
    return any(
        all(detector.is_saturated(candidate) for candidate in candidates)
        for detector in profile.detectors or (_DEFAULT_DETECTOR,)
    )


def is_held(
    candidates: Sequence[Candidate], ceiling: float, rules: SaturationRules | None = None
) -> bool:
    """True if the mean saturation of the eligible endpoints is at a ceiling, or above.

    Rules say what it is, else `UtilizationDetector` with its defaults. An endpoint of unknown load is as
    full as the others.

    Args:
        candidates: Eligible endpoints, at least one.
    """
    if rules is None or not rules.detectors:
        rules = _DEFAULT_RULES
    return rules.saturation(candidates) >= ceiling
