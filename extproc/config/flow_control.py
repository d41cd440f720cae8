"""The `flow_control` section: queueing of requests, fairness and rate limits of tenants."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from extproc.config import validation
from extproc.flow_control.flow_queue import Order
from extproc.flow_control.priority_band import Fairness
from extproc.flow_control.queue import FlowControlSettings
from extproc.flow_control.rate_limit import RateLimit
from extproc.flow_control.request_headers import FlowHeaders

_MIB = 1024 * 1024


class FlowControlSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Queueing of requests while no endpoint is ready or free, and rate limits of tenants.

    Attributes:
        enabled: Queue requests. False: requests are sent to busy engines, which queue them, and
            without endpoints they get 503 at once, as the protocol requires. Queueing needs time
            limits of the data plane that allow it; `extproc check --envoy FILE` checks them.
        timeout_s: Longest wait (seconds). 60 is the limit of upstream, and usual for clients.
        empty_timeout_s: Longest wait while the pool has no endpoint (seconds). 300 lets an engine
            start; 0 answers 503 at once.
        max_timeout_s: Longest wait that a request may ask for (seconds). 3600 is the maximum of
            Envoy's message_timeout.
        by_objective: Longest wait by objective (seconds). None: the same for all.
        timeout_header: Request header with the longest wait in milliseconds; empty reads none.
        busy_s: Estimated wait on an endpoint above which it counts as saturated (seconds); five
            times that for priorities above 0. 0.1 sends a prompt when the one before it is
            computed: engines always have work, and the order of the remaining requests is decided
            later, by priority. With 0.5, requests with priority wait a third longer at the same
            throughput.
        max_requests: Requests that may wait (count). 10000 take about 150 MB with short prompts.
        max_bytes: Bytes of the bodies of waiting requests. 256 MiB is half of what may be received
            at a time.
        order: Order of the requests of a tenant: `fcfs` by arrival, `edf` by deadline, or `slo` by
            arrival plus `x-llm-d-slo-ttft-ms`. `fcfs`: first come, first served.
        fairness: Order of the tenants of a priority: `least-served` by tokens attained,
            `round-robin` by requests, or `none`. `least-served`: the cost of requests differs a
            hundredfold.
        half_life_s: Half-life of the service that a tenant attained (seconds). With 60, a burst is
            forgotten within minutes.
        tenant_header: Request header that names the tenant, read before
            `x-llm-d-inference-fairness-id` and its older name. Empty: only those are read.
        by_adapter: Take the model or adapter as the tenant where no header names one. False: such
            requests are one tenant.
        limit: Rate limit of every tenant. Null: no limit.
        limits: Rate limits by tenant, in place of `limit`. None: all tenants have `limit`.
    """

    enabled: bool = False
    timeout_s: validation.Seconds = 60.0
    empty_timeout_s: validation.Seconds = 300.0
    max_timeout_s: validation.PositiveSeconds = 3600.0
    by_objective: Mapping[validation.Name, validation.Seconds] = {}
    timeout_header: str = "x-extproc-queue-timeout-ms"
    busy_s: validation.PositiveSeconds = 0.1
    max_requests: validation.Positive = 10_000
    max_bytes: validation.Positive = 256 * _MIB
    order: Order = "fcfs"
    fairness: Fairness = "least-served"
    half_life_s: validation.PositiveSeconds = 60.0
    tenant_header: str = ""
    by_adapter: bool = False
    limit: RateLimit | None = None
    limits: Mapping[validation.Name, RateLimit] = {}

    @property
    def queue(self) -> FlowControlSettings:
        """The settings of the queue."""
        return FlowControlSettings(
            timeout_s=self.timeout_s,
            empty_timeout_s=self.empty_timeout_s,
            max_timeout_s=self.max_timeout_s,
            by_objective=self.by_objective,
            max_requests=self.max_requests,
            max_bytes=self.max_bytes,
            order=self.order,
            fairness=self.fairness,
            half_life_s=self.half_life_s,
        )

    @property
    def headers(self) -> FlowHeaders:
        """The request headers that flow control reads, in lower case."""
        usual = FlowHeaders()
        tenant = (self.tenant_header.lower(),) if self.tenant_header else ()
        return FlowHeaders(
            tenant_headers=(*tenant, *usual.tenant_headers),
            by_adapter=self.by_adapter,
            timeout_headers=(self.timeout_header.lower(),) if self.timeout_header else (),
        )
