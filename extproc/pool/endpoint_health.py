"""Health evidence of one endpoint; `outlier_detection` writes and weighs it."""

from __future__ import annotations

import math

from extproc.pool.condition import UNREACHABLE_AFTER, HealthStatus


class HealthRecord:
    """Health evidence of one endpoint incarnation.

    Attributes:
        condition: As of the last change.
        consecutive_failures: Failed requests since the last that was served.
        good: Served requests since the first failure, fading.
        bad: Failed ones, fading.
        at: When they faded last.
        ejection_cause: Why it should be left out for its requests; empty when it should not.
        last_failed: Whether the last request with a clear outcome failed.
        misses: Scrapes in a row that did not connect.
        missed_at: When the first of them was seen.
        scrape_unreliable: Requests are served though scrapes fail: then those say nothing until one succeeds.
        ever_scraped: Whether a scrape ever connected.
        refused: Whether its port refused the last scrape.
        sign_at: Last sign of life, or of having nothing to do.
        probe_at: When the last probe was sent.
        back_at: When it came back from the last ejection.
    """

    __slots__ = (
        "at",
        "back_at",
        "bad",
        "condition",
        "consecutive_failures",
        "ejection_cause",
        "ever_scraped",
        "good",
        "last_failed",
        "missed_at",
        "misses",
        "probe_at",
        "refused",
        "scrape_unreliable",
        "sign_at",
    )

    def __init__(self, condition: HealthStatus, now: float) -> None:
        self.condition = condition
        self.back_at = -math.inf
        self.sign_at = now
        self.probe_at = math.inf
        self.last_failed = self.scrape_unreliable = self.ever_scraped = self.refused = False
        self.misses = 0
        self.missed_at = math.inf
        self.reset(now)

    @property
    def unreachable(self) -> bool:
        """True when scrapes cannot connect, and no served request contradicts them."""
        return self.misses >= UNREACHABLE_AFTER and not self.scrape_unreliable

    @property
    def certain(self) -> bool:
        """True when scrapes cannot connect, and the port refuses or requests fail as well."""
        return (self.last_failed or self.refused) and self.unreachable

    def reset(self, now: float) -> None:
        """Drop what requests held against it."""
        self.consecutive_failures = 0
        self.good = self.bad = 0.0
        self.at = now
        self.ejection_cause = ""

    def fade(self, now: float, window_s: float) -> None:
        """Let evidence age."""
        keep = math.exp((self.at - now) / window_s)
        self.good *= keep
        self.bad *= keep
        self.at = now
