"""Prediction against observation: how much of an engine's cache is believed in.

The index believes that an engine keeps what was sent to it, up to the engine's own capacity. Engines
keep less (answers take room, others use them, tiers differ) or more (offloading), and their counters
say how much was found. So each endpoint's believed capacity is its nominal one times a factor that
follows the difference of the two hit ratios.
"""

from __future__ import annotations

import contextlib
from collections import deque

#: Requests of ours in a comparison. Fewer are noise, more correct later.
_REQUESTS = 8

#: Hit ratios closer than this are equal: counters move by whole blocks and requests.
_NOISE = 0.01

#: Share of a scrape window's looked-up tokens that must be ours to compare at all.
_OWN_SHARE = 0.5

#: How much of a difference of hit ratios is corrected at once, as a share of the capacity.
_GAIN = 1.5

#: Bounds of one correction and of the factor.
_STEP = (0.7, 1.05)
_FACTOR = (0.02, 2.0)

#: Requests remembered while their look-up was not seen yet.
_MOST_PENDING = 4096


class Calibration:
    """One endpoint's predictions held against its counters.

    Attributes:
        factor: Believed capacity as a share of the nominal one.
        predicted: Prompt tokens ever predicted to be found, of requests that were looked up.
        observed: Prompt tokens the engine found, as far as they were ours.
        error: Last difference of predicted and observed hit ratio, -1..1.
    """

    __slots__ = (
        "_count",
        "_hit",
        "_looked_up",
        "_pending",
        "_predicted",
        "_unmatched_tokens",
        "error",
        "factor",
        "observed",
        "predicted",
    )

    def __init__(self) -> None:
        self.factor = 1.0
        self.predicted = 0.0
        self.observed = 0.0
        self.error = 0.0
        self._pending: deque[tuple[int, int]] = deque()
        self._unmatched_tokens = 0.0
        self._clear()

    def record_sent(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request was sent with so many of its prompt tokens believed cached."""
        self._pending.append((prompt_tokens, cached_tokens))
        if len(self._pending) > _MOST_PENDING:
            self._pending.popleft()

    def record_cancelled(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request that was sent was never looked up: its engine refused it, or is gone."""
        with contextlib.suppress(ValueError):
            self._pending.remove((prompt_tokens, cached_tokens))

    def observe_counters(self, queries: float, hits: float) -> bool:
        """The engine's counters moved.

        Args:
            queries: Prompt tokens looked up since the last scrape.
            hits: Of these, found.

        Returns:
            Whether `factor` changed.
        """
        if queries <= 0:
            return False
        self._unmatched_tokens += queries
        looked_up = predicted = 0
        pending = self._pending
        # A request belongs to the window in which most of it was looked up.
        while pending and pending[0][0] <= 2 * self._unmatched_tokens:
            prompt, cached = pending.popleft()
            self._unmatched_tokens -= prompt
            looked_up += prompt
            predicted += cached
            self._count += 1
        if not pending:
            self._unmatched_tokens = 0.0
        ours = min(1.0, looked_up / queries)
        if ours < _OWN_SHARE:
            return False
        self._looked_up += looked_up
        self._predicted += predicted
        self._hit += hits * looked_up / queries if looked_up else 0.0
        self.predicted += predicted
        self.observed += min(hits, queries) * ours
        return self._correct()

    def observe_usage(self, prompt_tokens: int, predicted: int, cached: int) -> bool:
        """Take in the cached tokens that an answer reports (`usage.prompt_tokens_details`).

        Args:
            prompt_tokens: Prompt length by the engine.
            predicted: Tokens believed cached when it was sent.
            cached: Tokens found.

        Returns:
            Whether `factor` changed.
        """
        self._looked_up += prompt_tokens
        self._predicted += predicted
        self._hit += cached
        self._count += 1
        return self._correct()

    def _correct(self) -> bool:
        """Move the factor once enough was compared."""
        if self._count < _REQUESTS or not self._looked_up:
            return False
        self.error = (self._predicted - self._hit) / self._looked_up
        self._clear()
        if abs(self.error) <= _NOISE:
            return False
        step = min(_STEP[1], max(_STEP[0], 1.0 - _GAIN * self.error))
        before = self.factor
        self.factor = min(_FACTOR[1], max(_FACTOR[0], before * step))
        return self.factor != before

    def _clear(self) -> None:
        self._count = 0
        self._looked_up = 0.0
        self._predicted = 0.0
        self._hit = 0.0
