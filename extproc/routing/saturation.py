"""Saturation: estimated wait on an endpoint before prefill starts.

Engines serve first come first served, so what was sent to one is ahead of every later request,
whatever its priority. All that holding can do for a priority is to send the others late: one prompt
after another, as each is believed computed, and not into the last of the memory. Both cost little:
an engine that gets its next prompt one iteration late still decodes the full batch, and a batch that
is a tenth smaller is hardly slower in tokens per second, while each of its iterations, of which a
prompt always has to wait for one or two, is shorter (`bench.capacity` has the numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from extproc.endpoint import Candidate

#: Share of the KV cache that running answers may fill before a request of a priority above 0 has to
#: wait for memory: what engines fill in steady state before they preempt.
_FULL: Final = 0.97

#: The same for all others. What is left is room for the prompt of a request that must not wait
#: until an answer ends. At 0.97 a saturated engine is always short of it.
_KV_TARGET: Final = 0.9

#: The same while requests of priorities above 0 come. What runs beside them sets how long their
#: iterations are. Simulated at three times the capacity (`bench.capacity`), 0.75 in place of 0.9 takes
#: 3 to 6 % off the p99 of their first tokens, and up to 4 % off what is served.
_SHARED: Final = 0.85

#: Seconds for which it is remembered that one came.
REMEMBERED_S: Final = 60.0

#: How much longer a request of a priority above 0 finds an endpoint free (a factor). What others
#: leave is its headroom: it never waits for those that were sent just before.
HEADROOM: Final = 5.0

#: How much longer a queue may be where a prompt is cached, in seconds of prefill that are saved (a
#: factor): as long as that saves. What is cached adds little to a queue, and is soon out of it. From
#: 0 to 10 it matters little, as requests wait for the endpoint of their choice anyway: l4-1600
#: serves 109 to 111 requests per second.
_CACHED_WAIT_FACTOR: Final = 1.0


def wait_s(candidate: Candidate, *, ceiling: float = _FULL) -> float:
    """Estimated seconds between a request's arrival on an endpoint and the start of its prefill.

    wait = q p + i(n) + w b, with q the uncached prompt tokens sent there and believed not yet
    computed, p the seconds of each, i(n) the iteration with n requests that they are computed
    beside, 0 where q is; w the requests in front that wait for a place or memory, and b = o i(r) / r
    the seconds between two answers that end (o tokens of an answer, i(r) seconds of an iteration
    with r running). All of it is our own account, corrected by scrapes; an endpoint whose
    scrape is late counts as the mean of the others, and while none has a scrape w is 0.

    Args:
        candidate: The endpoint.
        ceiling: Share of the KV cache that may be filled, 0..1.
    """
    # Without calls where nothing waits: it runs for every endpoint of every request that waits.
    queued = candidate.queued_tokens
    waits = 0.0
    if queued > 0.0:
        rates, requests = candidate.rates, candidate.estimated_requests
        # However short a prompt is, nothing overtakes the iteration that computes it.
        waits = queued * rates.prefill_s + rates.iteration_s(max(1.0, requests))
    load = candidate.load
    usage, blocks, size = load.kv_usage, load.kv_blocks, load.block_tokens
    over = 0.0
    if usage is not None and blocks and size:
        over = (usage - ceiling) * blocks * size + candidate.unscraped_tokens
    if over > 0.0 or load.waiting:
        rates = candidate.rates
        running = max(1.0, load.running or 1.0)
        in_front = _in_front(candidate, over)
        waits += in_front * rates.output_tokens * rates.iteration_s(running) / running
    return waits


def excess_wait_s(
    candidates: Sequence[Candidate], limit_s: float, *, priority: int, shared: bool = False
) -> list[float]:
    """Seconds of wait above the limit, 0 or less with capacity: wait - m p - limit.

    m are the prompt tokens believed cached there, p the seconds each takes to compute.

    Args:
        candidates: Eligible endpoints, at least one.
        limit_s: How long is too long (seconds).
        priority: Of the request.
        shared: Whether requests of priorities above 0 come.
    """
    ceiling = _SHARED if shared else _KV_TARGET
    if priority > 0:
        limit_s *= HEADROOM
        ceiling = _FULL
    over: list[float] = []
    for candidate in candidates:
        seconds = wait_s(candidate, ceiling=ceiling) - limit_s
        if candidate.matched_tokens:
            seconds -= _CACHED_WAIT_FACTOR * candidate.matched_tokens * candidate.rates.prefill_s
        over.append(seconds)
    return over


def _in_front(candidate: Candidate, over: float) -> float:
    """Requests ahead that wait for a batch slot or for memory, `over` tokens of it."""
    in_front = over / max(1.0, candidate.rates.context_tokens)
    if candidate.load.waiting:
        in_front = max(in_front, candidate.estimated_requests - (candidate.load.running or 0.0))
    return max(0.0, in_front)
