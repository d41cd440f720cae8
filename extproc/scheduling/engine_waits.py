"""Waits on an endpoint: for memory, for a place in the batch, and for requests not scraped yet.

And the mean of uncached tokens, by which queued tokens show how many requests wait. Parts of the
terms of `EstimatedTime`, whose docstring has the formulas.
"""

from __future__ import annotations

import math
from typing import Final

from extproc.endpoint import Candidate

#: Share of the time of an answer up to which a scrape counts as of now. Busy endpoints are scraped
#: every 0.2 s, and most answers take longer than ten times that, so most costs have no such part.
FRESH_RATIO: Final = 0.1

#: Shortest time of an answer (s). With one of 0, a scrape of age 0 would count as of now, and one a
#: nanosecond older as never taken.
SHORTEST_ANSWER_S: Final = 1e-3

#: Weight of a request in the mean of uncached tokens. At 0.01 it follows a change of traffic within a
#: few hundred requests.
_ALPHA: Final = 0.01


class MeanUncachedTokens:
    """Uncached tokens of a request, by which queued tokens show how many requests wait.

    Attributes:
        per_request: One over their mean; 0 until there was one.
        began: Monotonic seconds of the first one; infinity before.
    """

    __slots__ = ("_mean", "began", "per_request")

    def __init__(self) -> None:
        self.began = math.inf
        self._mean = 0.0
        self.per_request = 0.0

    def update(self, tokens: int, now: float) -> None:
        """Record a request."""
        if self.began > now:  # noqa: PLR1730 - a call
            self.began = now
        before = self._mean
        self._mean = before + _ALPHA * (tokens - before) if before else float(tokens)
        self.per_request = 1.0 / self._mean


def memory_waits_s(
    c: Candidate, wanted: float, usual: float, waiting_share: float
) -> tuple[float, float]:
    """Seconds until `wanted` more KV tokens are free, and seconds that others wait for them.

    Terms `memory` and `waiting` of `EstimatedTime`. Both are 0 where the usage or the size of the KV
    cache is unknown.

    Args:
        usual: Tokens of the usual answer.
        waiting_share: As the parameter of `EstimatedTime`.
    """
    load, batch = c.load, c.estimated_requests
    usage, capacity = load.kv_usage, load.kv_capacity
    if usage is None or capacity is None:
        return 0.0, 0.0
    # Comparisons in place of calls of `max` and `min`: while pages are late, all candidates come here.
    held = load.kv_held + c.unscraped_tokens
    if held < c.active_context_tokens:  # noqa: PLR1730
        held = c.active_context_tokens
    if held + wanted <= capacity:
        return 0.0, 0.0
    rates, running = c.rates, load.running
    if running is not None or c.in_flight:
        known = c.prompt_tokens + 0.5 * usual * batch
        if running and (shown := batch * usage * capacity / running) > known:
            answer_s = usual * rates.iteration_s(batch)
            known += answer_s / max(answer_s + c.age_s, SHORTEST_ANSWER_S) * (shown - known)
        if known < held:  # noqa: PLR1730
            held = known
    excess = (held + wanted) / capacity - 1.0
    if excess <= 0.0:
        return 0.0, 0.0
    answer_s = usual * rates.iteration_s(batch)
    own = wanted - 0.5 * usual * batch
    copied = rates.copied_ratio
    others = copied * (1.0 + (load.waiting or 0.0)) * own
    others += (1.0 - copied) * (own - c.matched_tokens if c.conversation_local else own)
    return answer_s * excess, answer_s * waiting_share * others / capacity


def batch_wait_s(c: Candidate, usual: float) -> float:
    """Seconds until an answer of the batch ends that a request waits for: the term `batch`.

    Args:
        usual: Tokens of the usual answer.
    """
    places = c.rates.max_num_seqs
    if not places or c.estimated_requests < places:
        return 0.0
    between_s = usual * c.rates.iteration_s(places) / places
    return (c.estimated_requests + 1.0 - places) * between_s


def unseen_share(age_s: float, sending_s: float, alone_s: float) -> float:
    """Share of the requests on an endpoint that may wait without a scrape that shows it.

    Those that came since the scrape, and of them as many again: an answer shows, too, that what was
    sent before it was computed. 0 for a scrape that is fresh, 1 where there is none.

    Args:
        age_s: Age of the scrape.
        sending_s: Seconds since anything was sent.
        alone_s: What a request takes that is alone on the endpoint.
    """
    age_s = min(age_s, sending_s)
    alone_s = max(alone_s, SHORTEST_ANSWER_S)
    share = max(0.0, age_s - FRESH_RATIO * alone_s) / (alone_s + age_s)
    return share * share
