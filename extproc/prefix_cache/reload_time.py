"""Reload time: what an engine saves by loading blocks from the memory of its host."""

from __future__ import annotations

from typing import Final

from extproc.endpoint import EngineCounters, StepTimeModel

#: Reloaded tokens from which the time of one is known, and beyond which earlier ones fade (count).
_ENOUGH_TOKENS: Final = 2_000
_MEMORY_TOKENS: Final = 1_000_000


class ReloadTimeEstimator:
    """Compares the seconds that an engine takes to load a token with those to compute it.

    The first are the quotient of two counters of its page, and the second are learned from its steps.
    """

    __slots__ = ("_last", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._seconds = 0.0
        self._tokens = 0.0

    def update(self, counters: EngineCounters, rates: StepTimeModel) -> float | None:
        """Record a page.

        Returns:
            Share of computing a token that is saved by loading it, 0..1; None while that is unknown.
        """
        seconds, tokens = counters.reload_s, counters.reloaded_tokens
        if seconds is None or tokens is None:
            return None
        last, self._last = self._last or (seconds, tokens), (seconds, tokens)
        # After a restart both begin at 0.
        if seconds >= last[0] and tokens >= last[1]:
            self._seconds += seconds - last[0]
            self._tokens += tokens - last[1]
            if self._tokens > _MEMORY_TOKENS:
                self._seconds *= 0.5
                self._tokens *= 0.5
        if self._tokens < _ENOUGH_TOKENS or not rates.evidence or rates.prefill_s <= 0.0:
            return None
        return min(1.0, max(0.0, 1.0 - self._seconds / self._tokens / rates.prefill_s))
