"""Counters of the process and of its pools, cheap enough for every request.

Rendering happens on demand (`exposition`), so that counting is an integer addition. Label values
are bounded by design: endpoints, statuses, reasons; never client text.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from extproc.decision import MODEL_NOT_FOUND, Decision, Disaggregation, Rejection
from extproc.pool.endpoint_health import RequestOutcome, classify_status
from extproc.request import RequestLabels
from extproc.scheduling import plugin_guard
from extproc.supervision import Supervisor
from extproc.telemetry.control_plane_metrics import XdsCounters
from extproc.telemetry.queue_counters import QueueCounters
from extproc.telemetry.request_series import (
    OTHER,
    MetricHistogram,
    RequestSeriesTable,
)

#: Label value of endpoints that left the pool before the response ended, whose addresses are
#: without bound.
REMOVED_ENDPOINT: Final = "left"


_ROUTE_BOUNDS_S = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
_STALL_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_ANSWER_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_HIT_RATIO_BOUNDS = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
_QUEUE_BOUNDS_S = (1e-4, 5e-4, 1e-3, *_ANSWER_BOUNDS_S)

#: Bounds of values that are counted for the names of llm-d alone, as its EPP has them.
_PROCESSING_BOUNDS_S = (
    *(5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 0.015, 0.025, 0.04, 0.06, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
_STREAM_BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600)
_HIT_BOUNDS_BYTES = (0, *(2**power for power in range(4, 17)))

#: Endpoints by model whose attempts are counted for llm-d's names, the first ones (count); of further
#: ones the model is `other`. Each takes two lines of the page.
_MAX_ATTEMPTS: Final = 2000

#: Priorities with a histogram of their own (count); further ones share the last.
_MAX_PRIORITIES = 32


class EndpointResponses(msgspec.Struct):
    """Responses of one endpoint (count).

    Attributes:
        total: All of them.
        served: Those below 400.
        failed: Those that count as failures of the endpoint, by HTTP status.
    """

    total: int = 0
    served: int = 0
    failed: Counter[str] = msgspec.field(default_factory=Counter)

    def add(self, status: str, count: int) -> None:
        """Add so many responses of a status."""
        self.total += count
        outcome = classify_status(status)
        if outcome is RequestOutcome.SERVED:
            self.served += count
        elif outcome is RequestOutcome.FAILED:
            self.failed[status] += count


class PoolCounters:
    """Counters of one pool.

    Args:
        settle: Counts what waits to be counted; before these are read.

    Attributes:
        name: Name of the pool; empty for the default pool where there are several.
        requests_routed: Routed requests by endpoint address.
        attempts: Routed requests by (endpoint address, model), and refused ones by (empty, model); only
            with the names of llm-d.
        rejections: Rejected requests by (status, reason).
        rejection_causes: Rejected requests by (status, cause), for the log.
        degraded: Decisions by fallback, by reason.
        disaggregation: Decisions in which other endpoints may do stages, by (model, decision type).
        routed_stages: Stages of these that other endpoints do, by (endpoint address, stage).
        kept_stages: Stages of these that the serving endpoint does itself, by (stage, reason).
        responses: Responses by (endpoint address, HTTP status text).
        without_response: Routed requests whose stream ended before response headers, by address.
        prompt_tokens: Estimated prompt tokens of routed requests.
        matched_tokens: Of these, tokens predicted to be cached on the chosen endpoint.
        prefix_hit_ratio: Ratio of matched to prompt tokens, by request.
        scrapes: Scrapes by (endpoint address, result).
        model_list_polls: Requests for model lists, by (endpoint address, result).
        poll_errors: Scrapes and such requests that failed, also of endpoints that left, by the data
            source of llm-d: `metrics-data-source` or `models-data-source`.
        series: Requests by model, tenant and priority.
        response_headers_s: Time from the choice of the endpoint to response headers.
        endpoint_headers_s: The same time of responses below 400, without buckets, by address.
        queue_duration_s: Time in the queue of requests that were admitted, by priority.
        queue: Requests in the queue and their departures, by the labels of `series`.
        rewrites: Requests with a rewritten model name, by whether the body was `edited` or
            could not be (`unedited`).
        unknown_models: Requests for a model that no eligible endpoint lists, routed or rejected; none
            of them waits to be counted.
        routed_total: Routed requests, also those of endpoints that left (count).
        answered_total: Of these, requests that were answered (count).
        reported_total: Of these, responses that reported token usage (count).
    """

    def __init__(self, name: str = "", settle: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.settle = settle
        self.requests_routed: Counter[str] = Counter()
        self.attempts: Counter[tuple[str, str]] = Counter()
        self.rejections: Counter[tuple[int, str]] = Counter()
        self.rejection_causes: Counter[tuple[int, str]] = Counter()
        self.degraded: Counter[str] = Counter()
        self.disaggregation: Counter[tuple[str, str]] = Counter()
        self.routed_stages: Counter[tuple[str, str]] = Counter()
        self.kept_stages: Counter[tuple[str, str]] = Counter()
        self.responses: Counter[tuple[str, str]] = Counter()
        self.without_response: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.matched_tokens = 0
        self.prefix_hit_ratio = MetricHistogram(_HIT_RATIO_BOUNDS)
        self.scrapes: Counter[tuple[str, str]] = Counter()
        self.model_list_polls: Counter[tuple[str, str]] = Counter()
        self.poll_errors: Counter[str] = Counter()
        self.rewrites: Counter[str] = Counter()
        self.series = RequestSeriesTable()
        self.response_headers_s = MetricHistogram(_ANSWER_BOUNDS_S)
        self.endpoint_headers_s: dict[str, MetricHistogram] = {}
        self.queue_duration_s: dict[str, MetricHistogram] = {}
        self.queue = QueueCounters(self._bound_labels)
        self.unknown_models = 0
        self.routed_total = 0
        self.answered_total = 0
        self.reported_total = 0

    def record_routed(self, decisions: Sequence[Decision]) -> None:
        """Counts routed requests, all but that their models are unknown."""
        requests = [decision.request for decision in decisions]
        prompts = [request.prompt_tokens for request in requests]
        matched = [decision.matched_tokens for decision in decisions]
        self.requests_routed.update([decision.endpoints[0].address for decision in decisions])
        self.routed_total += len(decisions)
        self.prompt_tokens += sum(prompts)
        self.matched_tokens += sum(matched)
        self.prefix_hit_ratio.add_all(
            [hits / tokens for hits, tokens in zip(matched, prompts, strict=True) if tokens]
        )
        self.degraded.update([decision.degraded for decision in decisions if decision.degraded])

    def record_attempts(self, attempts: Iterable[tuple[str, str]]) -> None:
        """Counts routed and refused requests as `attempts`; models are those of their series."""
        counts = self.attempts
        for (address, model), count in Counter(attempts).items():
            fits = len(counts) < _MAX_ATTEMPTS or (address, model) in counts
            counts[address, model if fits else OTHER] += count

    def record_stages(self, stages: Disaggregation, *, model: str) -> None:
        """Counts a decision in which other endpoints may do stages; `model` is that of its series."""
        self.disaggregation[model, stages.decision_type] += 1
        for stage, part, reason in stages.choices:
            if part is not None:
                self.routed_stages.update(
                    [(endpoint.address, stage) for endpoint in part.endpoints]
                )
            elif reason:
                self.kept_stages[stage, reason] += 1

    def record_unlisted(self) -> None:
        """Counts a routed request for a model that no eligible endpoint lists."""
        self.unknown_models += 1

    def record_rewrite(self, *, edited: bool) -> None:
        """Counts a routed request whose model name was rewritten."""
        self.rewrites["edited" if edited else "unedited"] += 1

    def record_rejection(self, rejection: Rejection) -> None:
        """Counts a rejected request."""
        self.rejections[rejection.status, rejection.reason] += 1
        self.rejection_causes[rejection.status, rejection.cause] += 1
        if rejection.code == MODEL_NOT_FOUND:
            self.unknown_models += 1

    def record_finished(self, ends: Sequence[tuple[str, str]], *, num_reported: int = 0) -> None:
        """Counts ends of streams of routed requests.

        Args:
            ends: The endpoint each was routed to, `REMOVED_ENDPOINT` where it is no longer in the
                pool, and the HTTP status of its response, empty without response headers.
            num_reported: Responses among them that reported token usage.
        """
        self.reported_total += num_reported
        for (address, status), count in Counter(ends).items():
            if status:
                self.responses[address, status] += count
                self.answered_total += count
            else:
                self.without_response[address] += count

    def sum_responses(self) -> Mapping[str, EndpointResponses]:
        """Responses by the address of their endpoint, `REMOVED_ENDPOINT` for those that left."""
        sums: defaultdict[str, EndpointResponses] = defaultdict(EndpointResponses)
        for (address, status), count in self.responses.items():
            sums[address].add(status, count)
        return sums

    def record_queued(self, wait_s: float, *, priority: int) -> None:
        """Counts the time in the queue of an admitted request."""
        label, by_priority = str(priority), self.queue_duration_s
        histogram = by_priority.get(label)
        if histogram is None:
            label = label if len(by_priority) < _MAX_PRIORITIES else OTHER
            histogram = by_priority.setdefault(label, MetricHistogram(_QUEUE_BOUNDS_S))
        histogram.add(wait_s)

    def _bound_labels(self, labels: RequestLabels) -> RequestLabels:
        """Labels of the series of a request that may wait, also where no engine lists its model."""
        return self.series.find(labels, may_be_served=True).labels

    def record_headers(self, address: str, durations_s: Sequence[float]) -> None:
        """Counts times from the choice of an endpoint to the headers of responses below 400."""
        histogram = self.endpoint_headers_s.get(address)
        if histogram is None:
            histogram = self.endpoint_headers_s[address] = MetricHistogram(())
        histogram.add_all(durations_s)

    @property
    def usage(self) -> Counter[str]:
        """Tokens the engines reported, by kind: `prompt`, `completion`, `cached`."""
        totals: Counter[str] = Counter()
        for series in self.series:
            for kind, tokens in series.tokens.items():
                totals[kind] += int(tokens)
        return +totals

    def forget(self, *addresses: str) -> None:
        """Drops the series of removed endpoints, so that label sets stay bounded."""
        self.settle()
        for address in addresses:
            self.requests_routed.pop(address, None)
            self.without_response.pop(address, None)
            self.endpoint_headers_s.pop(address, None)
        gone = frozenset(addresses)
        for counter in (
            *(self.responses, self.scrapes, self.model_list_polls, self.routed_stages),
            self.attempts,
        ):
            # Once for all of them: where thousands leave together, they have most of the keys.
            for key in [key for key in counter if key[0] in gone]:
                del counter[key]


class _PoolTable(dict[str, PoolCounters]):
    """Counters by name of the pool; each request reads it.

    Attributes:
        num_created: Pools that were in it (count); requests of those that left may end later.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__()
        self.num_created = 0
        self._settle = settle

    def __missing__(self, pool: str) -> PoolCounters:
        self.num_created += 1
        counters = self[pool] = PoolCounters(pool, self._settle)
        return counters


class ProcessCounters:
    """Counters of the process.

    Attributes:
        has_llmd_names: Whether metrics are also served under the names of llm-d's endpoint picker, some
            of which have values that are counted for them alone: the next three.
        request_processing_s: Time from the first message of requests to the choice of their endpoints, or
            to their refusal.
        stream_duration_s: Time for which streams of routed or refused requests were open.
        prefix_hit_bytes: Bytes of prompts that are predicted to be cached on the chosen endpoint, at
            four to a token.
        streams: ext_proc streams by gRPC end: `ok`, `cancelled`, `protocol`, `error`.
        trace_spans: Spans of traced requests, by result: `exported`, `failed`, `dropped`.
        peer_sync_failures: Connections to peers that failed or ended, and messages dropped for slow
            ones, by reason.
        recorded_rows: Decisions and ends of requests for recordings, by result: `recorded`,
            `dropped`, `failed`.
        http2_limits: Calls and connections that the native transport ended, by limit or violation.
        direct_responses: Requests answered without an endpoint, such as GET /v1/models.
        reloads: Reloads of the configuration by result: `ok`, `error`.
        reload_failed: True if the last reload failed, and an older configuration is in force.
        restart_needed: True if the configuration differs in fields that only a restart changes.
        exceptions: Unexpected exceptions in streams, by (type, place).
        plugins: Overruns, bypasses and exceptions of external plugins, by (role, kind).
        large_bodies: Bodies for the parser worker, by result: `read`, `failed`, `refused`.
        large_body_duration_s: Time that these waited and were parsed.
        event_loop_lag_cpu_s: Part of the delays of the event loop in which the thread of the loop computed.
        open_pools: Counters by name of the pool, without what waits to be counted; created on first
            use.

    A rejection before a pool was found counts under the default pool, which has the empty name if there
    are several.
    """

    def __init__(self, *, has_llmd_names: bool = False) -> None:
        self.has_llmd_names = has_llmd_names
        self.request_processing_s = MetricHistogram(_PROCESSING_BOUNDS_S)
        self.stream_duration_s = MetricHistogram(_STREAM_BOUNDS_S)
        self.prefix_hit_bytes = MetricHistogram(_HIT_BOUNDS_BYTES)
        self.streams: Counter[str] = Counter()
        self.streams_open = 0
        self.trace_spans: Counter[str] = Counter()
        self.peer_sync_failures: Counter[str] = Counter()
        self.recorded_rows: Counter[str] = Counter()
        self.http2_limits: Counter[str] = Counter()
        self.direct_responses = 0
        self.exceptions: Counter[tuple[str, str]] = Counter()
        self.plugins = plugin_guard.PluginCounters()
        self.reloads: Counter[str] = Counter()
        self.reload_failed = False
        self.restart_needed = False
        self.routing_duration_s = MetricHistogram(_ROUTE_BOUNDS_S)
        self.scrape_duration_s = MetricHistogram(_ANSWER_BOUNDS_S)
        self.large_bodies: Counter[str] = Counter()
        self.large_body_duration_s = MetricHistogram(_ANSWER_BOUNDS_S)
        self.event_loop_lag_s = MetricHistogram(_STALL_BOUNDS_S)
        self.event_loop_lag_cpu_s = MetricHistogram(_STALL_BOUNDS_S)
        self.xds = XdsCounters()
        self.supervisor = Supervisor()
        self.open_pools = _PoolTable(self.settle)
        self._settle: Callable[[], None] = lambda: None

    @property
    def pools(self) -> dict[str, PoolCounters]:
        """Counters by name of the pool, with everything that waited."""
        self.settle()
        return self.open_pools

    def for_pool(self, pool: str) -> PoolCounters:
        """Returns the counters of one pool with everything that waited, created on first use."""
        self.settle()
        return self.open_pools[pool]

    def before_reading(self, settle: Callable[[], None]) -> None:
        """Let `settle` count what waits, whenever counters are read."""
        self._settle = settle

    def settle(self) -> None:
        """Count what waits to be counted."""
        self._settle()

    def record_reload(self, *, ok: bool, restart: bool) -> None:
        """Counts a reload of the configuration, failed or not."""
        self.reloads["ok" if ok else "error"] += 1
        self.reload_failed = not ok
        if ok:
            self.restart_needed = restart
