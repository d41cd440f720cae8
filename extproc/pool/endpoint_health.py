"""What is held against one endpoint; `health` writes and weighs it."""

from __future__ import annotations

import math

from extproc.pool.condition import UNREACHABLE_AFTER, Condition


class Record:
    """What is held against one endpoint in one life.

    Attributes:
        condition: As of the last change.
        row: Failed requests since the last that was served.
        good: Served requests since the first failure, fading.
        bad: Failed ones, fading.
        at: When they faded last.
        wants: Why it should be left out for its requests; empty when it should not.
        hurt: Whether the last request that said anything failed.
        misses: Scrapes in a row that did not connect.
        missed_at: When the first of them was seen.
        blind: Requests are served though scrapes fail: then those say nothing until one succeeds.
        met: Whether a scrape ever connected.
        refused: Whether nobody listened at its own port when it was last looked for.
        sign_at: Last sign of life, or of having nothing to do.
        probe_at: When the last probe was sent.
        back_at: When it came back from the last ejection.
    """

    __slots__ = (
        "at",
        "back_at",
        "bad",
        "blind",
        "condition",
        "good",
        "hurt",
        "met",
        "missed_at",
        "misses",
        "probe_at",
        "refused",
        "row",
        "sign_at",
        "wants",
    )

    def __init__(self, condition: Condition, now: float) -> None:
        self.condition = condition
        self.back_at = -math.inf
        self.sign_at = now
        self.probe_at = math.inf
        self.hurt = self.blind = self.met = self.refused = False
        self.misses = 0
        self.missed_at = math.inf
        self.acquit(now)

    @property
    def unreachable(self) -> bool:
        """Whether scrapes say that it is gone, and no request says otherwise."""
        return self.misses >= UNREACHABLE_AFTER and not self.blind

    @property
    def certain(self) -> bool:
        """Whether it is surely gone: nobody listens, or scrapes and requests agree."""
        return (self.hurt or self.refused) and self.unreachable

    def acquit(self, now: float) -> None:
        """Drop what requests held against it."""
        self.row = 0
        self.good = self.bad = 0.0
        self.at = now
        self.wants = ""

    def fade(self, now: float, window_s: float) -> None:
        """Let evidence age."""
        keep = math.exp((self.at - now) / window_s)
        self.good *= keep
        self.bad *= keep
        self.at = now
