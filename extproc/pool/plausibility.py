"""Flaws of a metrics page: missing values, and values our own requests prove wrong.

A picker cannot see through a page that hides the work of others. What it can prove is little:

- Requests that were sent after a page was read and answered before the next one was requested have
  moved every engine's counters. A page whose counters did not move stands still.
- Requests of ours that have been open for seconds are in the engine, running or waiting. A page that
  shows less than half of them claims too little.

Both leave room for what is true of sound engines: counters that lag, requests that generate nothing,
clients that read slower than the engine writes.
"""

from __future__ import annotations

from typing import Final

import msgspec

from extproc.endpoint import NO_COUNTERS, NO_LOAD, Load
from extproc.pool.inflight import InflightLoad

# Bits of what is wrong with a page.

#: It does not say how many requests wait.
NO_WAITING: Final = 1
#: It does not say how many run.
NO_RUNNING: Final = 2
#: It does not say how much of the KV cache is in use.
NO_KV_USAGE: Final = 4
#: It does not say how large the KV cache is.
NO_KV_SIZE: Final = 8
#: It claims too little: what it says is a lower bound.
TOO_LITTLE: Final = 16
#: It stands still, is too old, or never came: nothing of what it says about load counts.
VOID: Final = 32

#: Requests answered in between that a page without movement cannot explain (count). Above one,
#: since some kinds of requests generate nothing.
_UNEXPLAINED: Final = 3

#: Seconds that counters may lag behind the answers they count. Engines publish them once in some
#: dozens of iterations.
_LAG_S: Final = 2.0

#: Seconds after which a request that was sent is in the engine: longer than it usually takes to
#: tokenize a prompt or to fetch its images. Until then a page that hides work draws too much.
_SETTLED_S: Final = 2.0

#: Requests open for that long from which a page can be held against them (count).
_FEWEST_SETTLED: Final = 4


def distrust_reason(flaws: int) -> str:
    """Name of the reason to distrust a page: `frozen`, `understated`, or empty."""
    if flaws & VOID:
        return "frozen"
    return "understated" if flaws & TOO_LITTLE else ""


class ServiceProgress(msgspec.Struct, frozen=True, gc=False):
    """The first of the pages on which an engine's counters stand as they do.

    Attributes:
        at: Monotonic seconds at which it was read; infinity where there are no counters.
        served: Answers that may be counted on it: our answers until then, and our open requests.
    """

    at: float = float("inf")
    served: int = 0


#: No page with counters was read.
NO_PROGRESS = ServiceProgress()


def next_progress(
    progress: ServiceProgress, account: InflightLoad, *, before: Load, after: Load
) -> ServiceProgress:
    """The progress after another page.

    Args:
        progress: Progress before this scrape.
    """
    counters = after.counters, after.prefix_queries
    if counters == (NO_COUNTERS, None):
        return NO_PROGRESS
    if before is not NO_LOAD and counters == (before.counters, before.prefix_queries):
        return progress
    return ServiceProgress(after.at, account.served + account.in_flight)


def find_flaws(load: Load, account: InflightLoad, *, progress: ServiceProgress, served: int) -> int:
    """Flaws of a page, as a bit mask.

    Args:
        served: `InflightLoad.served` when the page was requested.
    """
    bits = 0
    waiting, running = load.waiting, load.running
    if waiting is None:
        bits |= NO_WAITING
    if running is None:
        bits |= NO_RUNNING
    if load.kv_usage is None:
        bits |= NO_KV_USAGE
    if not load.kv_tokens:
        bits |= NO_KV_SIZE
    if load.at - progress.at >= _LAG_S and served - progress.served >= _UNEXPLAINED:
        bits |= VOID
    claimed = (waiting or 0.0) + (running or 0.0)
    # The count of all that are open spares the walk: sound pages end here.
    if not bits & (NO_WAITING | NO_RUNNING) and account.in_flight > 2.0 * claimed:
        settled = account.count_settled(load.at - _SETTLED_S)
        if settled >= _FEWEST_SETTLED and settled > 2.0 * claimed:
            bits |= TOO_LITTLE
    return bits
