"""Counters of one pool, cheap enough for every request.

Label values are bounded by design: endpoints, statuses, reasons; never client text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from extproc.decision import MODEL_NOT_FOUND, Decision, Rejection

#: Stands for endpoints that left while they answered: there is no end to their addresses.
LEFT: Final = "left"


class PoolCounters:
    """Counters of one pool.

    Attributes:
        requests_routed: Routed requests by endpoint address.
        rejections: Refused requests by (status, reason).
        degraded: Decisions taken another way, by what happened.
        responses: Answers by (endpoint address, HTTP status text).
        unanswered: Routed requests whose stream ended before response headers, by address.
        prompt_tokens: Estimated prompt tokens routed.
        matched_tokens: Of these, believed cached on the chosen endpoint.
        usage: Tokens the engines reported, by kind: `prompt`, `completion`, `cached`.
        scrapes: Scrapes by (endpoint address, result).
        listings: Requests for model lists, by (endpoint address, result).
        rewrites: Requests with a rewritten model name, by whether the body was `edited` or
            could not be (`unedited`).
        unlisted: Requests for a model that no endpoint in play lists, routed or refused.
        routed_total: Routed requests, also those of endpoints that left.
        answered_total: Of these, answered.
        reported_total: Of these, responses that reported token usage.
    """

    def __init__(self) -> None:
        self.requests_routed: Counter[str] = Counter()
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
        self.routed_total = 0
        self.answered_total = 0
        self.reported_total = 0

    def routed(self, decision: Decision) -> None:
        """Counts a routed request."""
        self.requests_routed[decision.endpoints[0].address] += 1
        self.routed_total += 1
        self.prompt_tokens += decision.request.prompt_tokens
        self.matched_tokens += decision.matched_tokens
        if decision.degraded:
            self.degraded[decision.degraded] += 1
        if decision.model_unlisted:
            self.unlisted += 1

    def rewritten(self, *, edited: bool) -> None:
        """Counts a routed request whose model name was rewritten."""
        self.rewrites["edited" if edited else "unedited"] += 1

    def rejected(self, rejection: Rejection) -> None:
        """Counts a rejected request."""
        self.rejections[rejection.status, rejection.reason] += 1
        if rejection.code == MODEL_NOT_FOUND:
            self.unlisted += 1

    def finished(self, address: str, status: str) -> None:
        """Counts the end of the stream of a routed request.

        Args:
            address: The endpoint it was routed to; `LEFT` where it is no longer in the pool.
            status: HTTP status of the answer, empty if none was seen.
        """
        if status:
            self.responses[address, status] += 1
            self.answered_total += 1
        else:
            self.unanswered[address] += 1

    def used(self, usage: Mapping[str, int]) -> None:
        """Counts the token usage that a response reported, by kind."""
        for kind, tokens in usage.items():
            self.usage[kind] += tokens
        self.reported_total += "completion" in usage

    def forget(self, address: str) -> None:
        """Drops the series of a removed endpoint, so that label sets stay bounded."""
        self.requests_routed.pop(address, None)
        self.unanswered.pop(address, None)
        for counter in (self.responses, self.scrapes, self.listings):
            for key in [key for key in counter if key[0] == address]:
                del counter[key]
