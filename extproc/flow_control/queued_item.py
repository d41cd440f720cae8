"""Queued item and settings of flow control: values."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Literal

import msgspec

from extproc.flow_control.endpoint_sets import EndpointSet

#: In which order requests of one tenant go on.
Order = Literal["fcfs", "edf", "slo"]

#: Whose turn it is among tenants of one priority.
Fairness = Literal["round-robin", "least-served", "none"]


#: Of a request that does not wait yet.
_NO_ENDPOINTS = EndpointSet()


class FlowControlSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of flow control for a pool.

    Attributes:
        timeout_s: Longest wait of a request that says nothing itself.
        empty_timeout_s: The same where there is no endpoint; None for no other.
        max_timeout_s: Longest wait a request may ask for.
        by_objective: Longest waits by objective.
        max_requests: Requests that may wait at once (count).
        max_bytes: Bytes of their bodies together.
        order: Within one tenant: `fcfs` by arrival, `edf` by deadline, `slo` by arrival plus the
            time to first token they ask for.
        fairness: Among tenants: `least-served` by tokens attained, `round-robin`, or `none`.
        half_life_s: Time after which what a tenant attained counts half.
        output_weight: A generated token in prompt tokens.
    """

    timeout_s: float = 60.0
    empty_timeout_s: float | None = None
    max_timeout_s: float = 3600.0
    by_objective: Mapping[str, float] = {}
    max_requests: int = 10_000
    max_bytes: int = 256 * 1024 * 1024
    order: Order = "fcfs"
    fairness: Fairness = "least-served"
    half_life_s: float = 60.0
    output_weight: float = 2.0


class QueuedItem:
    """A queued request.

    Args:
        arrived: When it began to wait.
        deadline: When it ends.

    Attributes:
        tenant: Tenant that sent it.
        priority: Of its objective.
        target: What it can be served by: requests of equal targets can be served by the same
            endpoints.
        bytes: Of its body.
        tokens: Its prompt's estimated tokens.
        slo_s: Seconds to the first token it asks for; infinity for none.
        endpoints: The endpoints that can serve its target; the queue's business.
        toward: The endpoint it would rather have; empty for any.
        waits: Whether it still does.
        number: Of those that ever waited, in the order in which they came.
        place: Changes whenever it is put into another lane.
    """

    __slots__ = (
        "arrived",
        "bytes",
        "deadline",
        "endpoints",
        "number",
        "place",
        "priority",
        "slo_s",
        "target",
        "tenant",
        "tokens",
        "toward",
        "waits",
    )

    def __init__(
        self,
        *,
        arrived: float,
        deadline: float,
        tenant: str = "",
        priority: int = 0,
        target: Hashable = "",
        size: int = 0,
        tokens: int = 0,
        slo_s: float = math.inf,
    ) -> None:
        self.arrived = arrived
        self.deadline = deadline
        self.tenant = tenant
        self.priority = priority
        self.target = target
        self.bytes = size
        self.tokens = tokens
        self.slo_s = slo_s
        self.endpoints = _NO_ENDPOINTS
        self.toward = ""
        self.waits = False
        self.number = 0
        self.place = 0

    def rank(self, order: Order) -> float:
        """The rank within the tenant: lower goes first."""
        if order == "edf":
            return self.deadline
        if order == "slo":
            return self.arrived + self.slo_s
        return self.arrived
