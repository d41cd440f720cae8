"""Plain counts, cheap enough for every request.

Rendering happens when somebody asks (`exposition`), so that adding a fact is an integer addition.
Label values are bounded by design: endpoints, statuses, reasons, kinds of plugins; never client text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from extproc import decision as outcomes
from extproc.decision import Decision, Rejection
from extproc.scheduling import guard


class Distribution:
    """A histogram with fixed upper bounds.

    Args:
        bounds: Ascending upper bounds, in the unit of what is added.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


_ROUTE_BOUNDS_S = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1)
_ANSWER_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Tallies:
    """Everything that is counted.

    Attributes:
        streams: ext_proc streams by gRPC end: `ok`, `cancelled`, `protocol`, `error`.
        streams_open: Open streams now.
        picks: Routed requests by endpoint address.
        rejections: Refused requests by (status, reason).
        degraded: Decisions taken another way, by what happened.
        responses: Answers by (endpoint address, HTTP status text).
        unanswered: Routed requests whose stream ended before response headers, by address.
        prompt_tokens: Estimated prompt tokens routed.
        matched_tokens: Of these, believed cached on the chosen endpoint.
        usage: Tokens the engines reported, by kind: `prompt`, `completion`, `cached`.
        scrapes: Scrapes by (endpoint address, result).
        listings: Lists of models asked for, by (endpoint address, result).
        rewrites: Requests whose model was given another name, by whether the body was `edited` or
            could not be (`unedited`).
        unlisted: Requests for a model that no endpoint in play lists, routed or refused.
        reloads: Attempts to read the configuration again, by result: `ok`, `error`.
        reload_failed: Whether the last of them failed, and an older configuration is in force.
        restart_needed: Whether the configuration differs in what only a restart changes.
        plugins: Overruns, bypasses and exceptions of plugins of others, by (role, kind).
    """

    def __init__(self) -> None:
        self.streams: Counter[str] = Counter()
        self.streams_open = 0
        self.picks: Counter[str] = Counter()
        self.rejections: Counter[tuple[int, str]] = Counter()
        self.degraded: Counter[str] = Counter()
        self.responses: Counter[tuple[str, str]] = Counter()
        self.unanswered: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.matched_tokens = 0
        self.usage: Counter[str] = Counter()
        self.scrapes: Counter[tuple[str, str]] = Counter()
        self.listings: Counter[tuple[str, str]] = Counter()
        self.rewrites: Counter[str] = Counter()
        self.unlisted = 0
        self.plugins = guard.Counts()
        self.reloads: Counter[str] = Counter()
        self.reload_failed = False
        self.restart_needed = False
        self.route_s = Distribution(_ROUTE_BOUNDS_S)
        self.headers_s = Distribution(_ANSWER_BOUNDS_S)
        self.exchange_s = Distribution(_ANSWER_BOUNDS_S)
        self.scrape_s = Distribution(_ANSWER_BOUNDS_S)

    def routed(self, decision: Decision, seconds: float) -> None:
        """A request was routed; `seconds` is the time the decision took."""
        self.route_s.add(seconds)
        self.picks[decision.endpoints[0].address] += 1
        self.prompt_tokens += decision.request.prompt_tokens
        self.matched_tokens += decision.matched_tokens
        if decision.degraded:
            self.degraded[decision.degraded] += 1
        if decision.unlisted:
            self.unlisted += 1

    def rewritten(self, *, edited: bool) -> None:
        """A routed request's model was given another name."""
        self.rewrites["edited" if edited else "unedited"] += 1

    def reloaded(self, *, ok: bool, restart: bool) -> None:
        """The configuration was read again, or could not be."""
        self.reloads["ok" if ok else "error"] += 1
        self.reload_failed = not ok
        if ok:
            self.restart_needed = restart

    def rejected(self, rejection: Rejection) -> None:
        """A request was refused."""
        self.rejections[rejection.status, rejection.reason] += 1
        if rejection.code == outcomes.MODEL_NOT_FOUND:
            self.unlisted += 1

    def finished(self, address: str, status: str, seconds: float) -> None:
        """The stream of a routed request ended after `seconds`.

        Args:
            address: The endpoint it was routed to.
            status: HTTP status of the answer, empty if none was seen.
            seconds: From the first event to the end.
        """
        self.exchange_s.add(seconds)
        if status:
            self.responses[address, status] += 1
        else:
            self.unanswered[address] += 1

    def forget(self, address: str) -> None:
        """Drop the series of an endpoint that left, so that labels stay bounded."""
        self.picks.pop(address, None)
        self.unanswered.pop(address, None)
        for counter in (self.responses, self.scrapes, self.listings):
            for key in [key for key in counter if key[0] == address]:
                del counter[key]
