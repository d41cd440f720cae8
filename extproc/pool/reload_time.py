"""Reload time: what an engine takes to load blocks from the memory of its host."""

from __future__ import annotations

from typing import Final

import msgspec

from extproc.endpoint import Load, StepTimeModel

#: Reloaded tokens from which the time of one is known, and beyond which earlier ones fade (count).
_ENOUGH_TOKENS: Final = 2_000
_MEMORY_TOKENS: Final = 1_000_000

#: Missing tokens per reloaded one up to which every evicted one is taken to have a copy: what is new of
#: a prompt is missing on the device as well (ratio).
_NEW_RATIO: Final = 2.0


class ReloadTimeEstimator:
    """Learns the time of a token that is loaded, and how many of those missing on the device are.

    From counters of the engine's page: seconds of loading, tokens loaded, looked up, and found on the
    device.
    """

    __slots__ = ("_last", "_missed", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._last: tuple[float, float, float] | None = None
        self._seconds = 0.0
        self._tokens = 0.0
        self._missed = 0.0

    def update(self, load: Load, rates: StepTimeModel) -> StepTimeModel:
        """Record a page; returns the rates with what is known of reloads."""
        seconds, tokens = load.counters.reload_s, load.counters.reloaded_tokens
        if seconds is None or tokens is None:
            return rates
        missed = (load.prefix_queries or 0.0) - (load.prefix_hits or 0.0)
        here = seconds, tokens, missed
        last, self._last = self._last or here, here
        # After a restart all begin at 0.
        if seconds >= last[0] and tokens >= last[1]:
            self._seconds += seconds - last[0]
            self._tokens += tokens - last[1]
            self._missed += max(0.0, missed - last[2])
            if self._tokens > _MEMORY_TOKENS:
                self._seconds *= 0.5
                self._tokens *= 0.5
                self._missed *= 0.5
        if self._tokens < _ENOUGH_TOKENS:
            return rates
        # The first pages may show more tokens that were loaded than looked up.
        copied = _NEW_RATIO * self._tokens / max(self._tokens, self._missed)
        return msgspec.structs.replace(
            rates, reload_s=self._seconds / self._tokens, copied_ratio=min(1.0, copied)
        )
