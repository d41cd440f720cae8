"""Alerts of Prometheus, with their sections of the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

#: The page whose sections are named like the alerts.
RUNBOOKS = "docs/operations/alerts.md"


class Alert(msgspec.Struct, frozen=True):
    """An alert and its runbook.

    Attributes:
        name: Its name; also the heading of its section.
        severity: `critical` needs a person at once, `warning` can wait for working hours, `info` explains
            other alerts.
        for_: How long `expr` holds before it fires.
        expr: PromQL; thresholds are starting points.
        summary: One line with labels in double braces.
        meaning: What it means for requests.
        look: Where the cause shows; Markdown.
        action: What to do; Markdown.
    """

    name: str
    severity: Literal["critical", "warning", "info"]
    for_: str
    expr: str
    summary: str
    meaning: str
    look: str
    action: str


def _new_or_more(metric: str, window: str) -> str:
    """An expression for a counter that rose; the first count of a series is a rise as well.

    Neither a failed scrape nor an hour without Prometheus hides a new series or makes an old count new.
    """
    now, before = f"last_over_time({metric}[2m])", f"last_over_time({metric}[1h] offset {window})"
    return f"increase({metric}[{window}]) > 0\n  or {now} > 0 unless {now} == {before}"


#: Responses per second that count as failures of their endpoint, which is still in its pool.
_FAILED_RESPONSES = (
    "sum by (namespace, pool, endpoint) (rate(extproc_responses_total"
    '{endpoint!="left",status=~"5..",status!~"501|505"}[5m]))'
)


def _gauge(metric: str) -> str:
    """An expression for a gauge, which has its last value for a while where a scrape fails.

    Without it, `for` would begin anew with each failed scrape, and a busy replica would never
    raise an alert.
    """
    last = f"last_over_time({metric}[2m])"
    return f"({metric} or {last} and on (namespace, job, instance) up == 0)"


ALERTS: Sequence[Alert] = (
    Alert(
        name="ExtprocDown",
        severity="critical",
        for_="2m",
        expr=(
            "count by (namespace, job) (max_over_time(extproc_info[1h]))\n"
            "  unless on (namespace, job) count by (namespace, job) (extproc_info)\n"
            "  or on () absent(extproc_info)"
        ),
        summary="No replica of extproc can be scraped",
        meaning="Prometheus sees no replica of an installation. If none runs, Envoy answers requests with 500 (`original-dst.yaml`) or 503 (`original-dst-buffered.yaml`); with the override-host files it sends them to the engine with the fewest requests, without prefix affinity and queue. Gateways with an InferencePool answer 5xx where its `failureMode` is `FailClose`, as in the manifests.",
        look="`kubectl get pods`, the targets page of Prometheus, the NetworkPolicy (`networkPolicy.monitoring` of the chart).",
        action="Bring a replica back; the log of the last one says why it ended. If replicas run and serve, only the scrape is broken: let Prometheus reach port 9090.",
    ),
    Alert(
        name="ExtprocScrapeFails",
        severity="warning",
        for_="5m",
        expr="up == 0 and on (namespace, job, instance) max_over_time(extproc_info[1h])",
        summary="Prometheus cannot scrape {{ $labels.instance }}",
        meaning="One replica of extproc does not answer Prometheus. Requests may be served all the same by this replica, and are by others.",
        look="The error on the targets page of Prometheus; `/healthz` and the log of this replica; board [Overview](dashboards.md#overview), panel Replicas.",
        action="A replica that hangs is restarted by its liveness probe. One that is gone for good leaves the targets, and the alert ends within the hour.",
    ),
    Alert(
        name="ExtprocPoolWithoutEndpoints",
        severity="critical",
        for_="1m",
        expr=(
            f"max by (namespace, pool) {_gauge('extproc_pool_match_state')}\n"
            "  unless on (namespace, pool) max by (namespace, pool) (\n"
            f"    {_gauge('extproc_endpoint_up')}\n"
            f"      * (1 - {_gauge('extproc_endpoint_ejected')})\n"
            "  ) > 0\n"
            "  unless on (namespace, pool) max by (namespace, pool)"
            f" {_gauge('extproc_scaling_desired_replicas')} == 0"
        ),
        summary="Pool {{ $labels.pool }} has no endpoint that serves",
        meaning="The pool is empty, or every endpoint is ejected or refuses connections. Requests get 503, or wait if [flow control](../guides/queueing.md) is on. A pool that was scaled to zero does not count.",
        look="Board [Overview](dashboards.md#overview), panel Endpoints; board [One pool](dashboards.md#one-pool), panel Ejected; `GET /debug/pool` has the cause for each endpoint; the state of discovery in `/readyz`.",
        action="If engines run, compare their labels with the selector of the InferencePool, and their port with `targetPorts`. If not, their own logs and events say why.",
    ),
    Alert(
        name="ExtprocManyEndpointsEjected",
        severity="critical",
        for_="1m",
        expr=(
            "avg by (namespace, pool) (\n"
            f"  max by (namespace, pool, endpoint) {_gauge('extproc_endpoint_ejected')}\n"
            ") > 0.25"
        ),
        summary="{{ $value | humanizePercentage }} of the endpoints of pool {{ $labels.pool }} are ejected",
        meaning="More than a quarter of the engines fail at once, and the others take their load. At most half of a pool is ejected for errors, see [outlier detection](../concepts/failing-endpoints.md#limits).",
        look="Board [One pool](dashboards.md#one-pool), panel Ejections by cause: `unreachable` is the network or dead processes, `errors` the model server, `hung` the device.",
        action="Look for what these engines have in common: node, image, configuration, a model that was loaded lately.",
    ),
    Alert(
        name="ExtprocRequestsFail",
        severity="critical",
        for_="5m",
        expr=(
            "pool:extproc_failed_requests:ratio_rate5m > 0.05\n"
            "  and pool:extproc_failed_requests:ratio_rate5m * pool:extproc_requests:rate5m > 1 / 60"
        ),
        summary="{{ $value | humanizePercentage }} of the requests of pool {{ $labels.pool }} fail",
        meaning="Clients get 5xx of engines, or extproc rejects their requests with 429 or 503: for more than 5 % of the requests and more than one a minute.",
        look="Board [Overview](dashboards.md#overview), panels Requests by status, Rejections by cause and Server errors; `extproc explain --failed`; [troubleshooting](troubleshooting.md#by-status-code).",
        action="By cause: `busy`, `queue-full` and `evicted` need engines, `no-endpoints` a look at discovery, errors of one endpoint its log.",
    ),
    Alert(
        name="ExtprocEndpointErrors",
        severity="warning",
        for_="5m",
        expr=(
            f"{_FAILED_RESPONSES}\n"
            "  / sum by (namespace, pool, endpoint) (rate(extproc_responses_total[5m])) > 0.05\n"
            f"  and {_FAILED_RESPONSES} > 1 / 60"
        ),
        summary="{{ $labels.endpoint }} of pool {{ $labels.pool }} fails {{ $value | humanizePercentage }} of its requests",
        meaning="An engine answers some of its requests with 5xx, or resets them: more than 5 % and more than one a minute. If they are too few to [eject it](../concepts/failing-endpoints.md), it goes on getting requests. In a pool of many engines, [ExtprocRequestsFail](#extprocrequestsfail) does not fire for one.",
        look="Board [One pool](dashboards.md#one-pool), panel Server errors by endpoint; lines `requests fail` of the log, which have the status; `extproc explain --failed`.",
        action="The log of the engine says why. Restart or replace it; to send it nothing until then, take its pod out of the pool by deleting it or the label that the pool selects. Where clients provoke the errors with their requests, all engines have them.",
    ),
    Alert(
        name="ExtprocEndpointEjected",
        severity="warning",
        for_="5m",
        expr=f"max by (namespace, pool, endpoint) {_gauge('extproc_endpoint_ejected')} > 0",
        summary="{{ $labels.endpoint }} of pool {{ $labels.pool }} is ejected",
        meaning="An engine died, hangs or answers errors, and gets no requests but probes. The others serve.",
        look="`health` and `cause` in `GET /debug/pool`; board [One pool](dashboards.md#one-pool), panels Ejected and Ejections by cause; lines `endpoint ejected` of the log.",
        action="Restart the engine if it hangs; it is probed and comes back by itself. See [outlier detection](../concepts/failing-endpoints.md).",
    ),
    Alert(
        name="ExtprocEndpointScrapesFail",
        severity="warning",
        for_="5m",
        expr=(
            'sum by (namespace, pool, endpoint) (rate(extproc_scrapes_total{result!="ok"}[5m]))\n'
            "  / sum by (namespace, pool, endpoint) (rate(extproc_scrapes_total[5m])) > 0.5"
        ),
        summary="extproc cannot read the metrics of {{ $labels.endpoint }}",
        meaning="The load of this engine is estimated from extproc's own requests only, so that it gets more or less than its share.",
        look="Board [One pool](dashboards.md#one-pool), panels Failed scrapes (by result) and Age of metrics.",
        action="Compare `scrape.path` and `scrape.scheme` with the engine: `curl http://ENDPOINT/metrics` from the pod of extproc.",
    ),
    Alert(
        name="ExtprocEndpointSlow",
        severity="warning",
        for_="10m",
        expr=(
            f"max by (namespace, pool, endpoint) {_gauge('extproc_endpoint_slowness_ratio')} > 3\n"
            "  or endpoint:extproc_endpoint_response_headers_seconds:ratio_rate5m > 3"
        ),
        summary="{{ $labels.endpoint }} is {{ $value | humanize }} times slower than its pool",
        meaning="An engine computes three times slower than the quicker quarter of those with the same engine type and cache size; or its responses begin three times as late as in the quicker quarter of its pool: it is slow, has more to do, or gets longer requests than the others. Strategies that look at load send it less.",
        look="Board [Why is it slow](dashboards.md#why-is-it-slow), panels Slow engines, Speed of engines, First byte by endpoint and Requests in flight. The [console](console.md) lists under its problems which of the two it is (`computes` or `answers`). Clocks and temperature of its device.",
        action="An engine that computes slowly: restart or replace it. Until then extproc sends it less; to send it nothing, take its pod out of the pool by deleting it or the label that the pool selects. One that only answers late: take a strategy that looks at load, such as `adaptive`; where a pool mixes devices on purpose, raise the threshold of the second condition.",
    ),
    Alert(
        name="ExtprocFirstTokenSlow",
        severity="warning",
        for_="10m",
        expr=(
            "pool:extproc_request_ttft_seconds:p95_rate5m\n"
            "  > 3 * avg_over_time(pool:extproc_request_ttft_seconds:p95_rate5m[6h] offset 30m)\n"
            "  and pool:extproc_request_ttft_seconds:p95_rate5m > 1"
        ),
        summary="The first token of pool {{ $labels.pool }} takes {{ $value | humanizeDuration }} (p95)",
        meaning="The first token of streamed answers takes three times as long as in the last six hours, and more than a second. It does not fire for a pool whose answers are not streamed.",
        look="Board [Why is it slow](dashboards.md#why-is-it-slow), from top to bottom. Without Grafana: the problems on the [console](console.md), and `extproc explain --slowest`, which shows what each endpoint had to do when the slowest recent request came.",
        action="By the row in which the time is spent. The queue: [ExtprocQueueWaitLong](#extprocqueuewaitlong). Decision time, or stalls of extproc: [ExtprocEventLoopStalls](#extproceventloopstalls). One engine: [ExtprocEndpointSlow](#extprocendpointslow). All engines, with many prompts ahead: add engines. Prefix caches: [ExtprocPrefixHitsDropped](#extprocprefixhitsdropped).",
    ),
    Alert(
        name="ExtprocCachePredictionsWrong",
        severity="warning",
        for_="2m",
        expr="endpoint:extproc_prefix_observed_tokens:ratio_rate5m < 0.5",
        summary="{{ $labels.endpoint }} finds {{ $value | humanizePercentage }} of the predicted prefixes in its cache",
        meaning="The cache of an engine is colder than extproc predicts: it was reset, is filled by other clients, or prefix caching is off. Requests are sent there for a prefix that must be computed anew. extproc learns from this within some requests.",
        look="Board [Why is it slow](dashboards.md#why-is-it-slow), panels Observed over predicted and Cached tokens per response.",
        action="If it persists: turn on prefix caching in the engine, or stop others from sending to it. A reset cache fills again by itself.",
    ),
    Alert(
        name="ExtprocPrefixHitsDropped",
        severity="info",
        for_="10m",
        expr=(
            "pool:extproc_matched_tokens:ratio_rate5m\n"
            "  < 0.5 * avg_over_time(pool:extproc_matched_tokens:ratio_rate5m[6h] offset 30m)"
        ),
        summary="Prefix hits of pool {{ $labels.pool }} fell to {{ $value | humanizePercentage }}",
        meaning="Half as many prompt tokens as in the last six hours are cached where their request goes: engines restarted, or prompts begin with something else. Responses begin later, and engines do more work.",
        look="Board [Why is it slow](dashboards.md#why-is-it-slow), row Prefix caches.",
        action="Look at what changed at that time: a rollout of the engines, a prompt template that begins with a date or an id, a fleet that grew.",
    ),
    Alert(
        name="ExtprocQueueFull",
        severity="critical",
        for_="2m",
        expr=(
            'sum by (namespace, pool) (rate(extproc_rejection_causes_total{cause=~"queue-full|displaced|queue-timeout"}[5m]))\n'
            "  > clamp_min(0.01 * pool:extproc_requests:rate5m, 1 / 60)"
        ),
        summary="Requests of pool {{ $labels.pool }} find no room in the queue, or wait in vain",
        meaning="The fleet cannot serve what arrives: the queue is full, or waits expire. Clients get 429 with `Retry-After`, or 503 while there is no endpoint: for more than 1 % of the requests and more than one a minute, since single clients may shorten their wait.",
        look="Board [Scaling and queue](dashboards.md#scaling-and-queue), panels Requests in the queue, Departures from the queue and Missing replicas.",
        action="Add engines; let the [autoscaler](../guides/autoscaling/index.md) have a higher maximum; give batch traffic a priority below 0.",
    ),
    Alert(
        name="ExtprocQueueWaitLong",
        severity="warning",
        for_="10m",
        expr="pool:extproc_flow_control_request_queue_duration_seconds:p95_rate5m > 10",
        summary="Requests of pool {{ $labels.pool }} wait {{ $value | humanizeDuration }} (p95)",
        meaning="One request of twenty waits more than ten seconds for an engine.",
        look="Board [Scaling and queue](dashboards.md#scaling-and-queue), panels Time in the queue and Requests in the queue.",
        action="As for `ExtprocQueueFull`, before the queue is full.",
    ),
    Alert(
        name="ExtprocConfigRejected",
        severity="warning",
        for_="1m",
        expr=f"max by (namespace, instance) {_gauge('extproc_config_reload_failed')} > 0",
        summary="{{ $labels.instance }} rejected its configuration",
        meaning="A changed file is wrong, and the last good configuration stays in force. A replica that restarts now does not start.",
        look="The log names file, field and expected value; board [Overview](dashboards.md#overview), panel Configuration.",
        action="Correct the file: `extproc check FILE` reads it without a running extproc.",
    ),
    Alert(
        name="ExtprocConfigNeedsRestart",
        severity="info",
        for_="1h",
        expr=f"max by (namespace, instance) {_gauge('extproc_config_restart_needed')} > 0",
        summary="{{ $labels.instance }} must restart to take its whole configuration",
        meaning="The file differs from what runs in fields that only a restart changes.",
        look="The log names the fields; [reload](../reference/configuration.md#reload) lists all.",
        action="`kubectl rollout restart`.",
    ),
    Alert(
        name="ExtprocDiscoveryOutOfStep",
        severity="warning",
        for_="1m",
        expr=(
            "max by (namespace, instance, collection)"
            f" {_gauge('extproc_discovery_watch_unsynced_seconds')} > 60"
        ),
        summary="{{ $labels.instance }} does not follow {{ $labels.collection }}",
        meaning="A watch of the API server has been broken for a minute. Routing continues with the last known endpoints; new pods get no requests, and gone ones are ejected when they fail.",
        look="`/readyz` names the watch and the reason.",
        action="Missing rights, missing definitions, a NetworkPolicy, or an API server that is away.",
    ),
    Alert(
        name="ExtprocEndpointsDropped",
        severity="warning",
        for_="5m",
        expr=f"max by (namespace, pool) {_gauge('extproc_discovery_dropped_addresses')} > 0",
        summary="{{ $value }} addresses of pool {{ $labels.pool }} exceed the limit of a pool",
        meaning="Addresses from flags, files or DNS beyond the limit get no requests.",
        look="[Input limits](../reference/input-limits.md).",
        action="Split the pool, or take addresses out of the source.",
    ),
    Alert(
        name="ExtprocLoopFails",
        severity="warning",
        for_="5m",
        expr=f"max by (namespace, instance, loop) {_gauge('extproc_loop_degraded')} > 0",
        summary="The loop {{ $labels.loop }} of {{ $labels.instance }} fails",
        meaning="A background task fails and is retried; requests are served from the last known state.",
        look="The log names type, file and line; `/readyz` has a line `degraded`; [background loops](observability.md#failures-of-background-loops).",
        action="`redis`, `kubernetes` and the like in the log point at a dependency. Otherwise report it with the log line.",
    ),
    Alert(
        name="ExtprocException",
        severity="warning",
        for_="0m",
        expr=_new_or_more("extproc_exceptions_total", "15m"),
        summary="{{ $labels.type }} in {{ $labels.place }} of {{ $labels.instance }}",
        meaning="A bug: a request met an unexpected exception and got 500, or was routed by a fallback.",
        look="The log line with type, file and line.",
        action="Report it with the log line.",
    ),
    Alert(
        name="ExtprocFallbackDecisions",
        severity="warning",
        for_="5m",
        expr=(
            "sum by (namespace, pool) (rate(extproc_degraded_decisions_total[5m]))\n"
            "  / sum by (namespace, pool) (rate(extproc_routed_requests_total[5m])) > 0.05"
        ),
        summary="{{ $value | humanizePercentage }} of the requests of pool {{ $labels.pool }} are routed by a fallback",
        meaning="The profile could not decide, and an endpoint was taken without its scorers.",
        look="`reason` of `extproc_degraded_decisions_total`; `extproc explain --last`.",
        action="A plugin that fails is named by the log; with a bug of extproc, report the log line.",
    ),
    Alert(
        name="ExtprocPluginBypassed",
        severity="warning",
        for_="0m",
        expr=_new_or_more("extproc_plugin_bypasses_total", "15m"),
        summary="The {{ $labels.role }} {{ $labels.kind }} of {{ $labels.instance }} is bypassed",
        meaning="A plugin of your own exceeded its time or raised too often, and decisions are made without it for a while.",
        look="`extproc_plugin_overruns_total`, `extproc_plugin_exceptions_total`; the log.",
        action="Make it faster or correct it; see [write a scorer](../guides/write-a-scorer.md).",
    ),
    Alert(
        name="ExtprocEventLoopStalls",
        severity="warning",
        for_="10m",
        expr=(
            "histogram_quantile(0.99, sum by (le, namespace, instance)"
            " (rate(extproc_event_loop_lag_seconds_bucket[5m]))) > 0.1"
        ),
        summary="The event loop of {{ $labels.instance }} stalls for {{ $value | humanizeDuration }} (p99)",
        meaning="During a stall no request of this replica is served: too little CPU, or too much work for one core.",
        look="Board [Why is it slow](dashboards.md#why-is-it-slow), panels Stalls of the picker and Decision time: lag without CPU seconds is a machine that is busy with something else.",
        action="Remove a CPU limit, add replicas, move large bodies elsewhere; [sizing](sizing.md).",
    ),
    Alert(
        name="ExtprocStreamsFail",
        severity="warning",
        for_="5m",
        expr=(
            'sum by (namespace, instance) (rate(extproc_streams_total{result=~"error|protocol"}[5m]))\n'
            "  / sum by (namespace, instance) (rate(extproc_streams_total[5m])) > 0.01"
        ),
        summary="{{ $value | humanizePercentage }} of the ext_proc streams of {{ $labels.instance }} fail",
        meaning="Envoy and extproc do not understand each other, or extproc raised; such requests get 500.",
        look="The log; `ext_proc_error` in the response code details of Envoy's access log (`details`).",
        action="[`extproc doctor`](doctor.md) compares the settings of the filter with what extproc needs; `extproc check --envoy FILE` does it for a file.",
    ),
    Alert(
        name="ExtprocXdsRejected",
        severity="warning",
        for_="0m",
        expr=_new_or_more("extproc_xds_nacks_total", "15m"),
        summary="Envoy rejects {{ $labels.type }} of {{ $labels.instance }}",
        meaning="An Envoy keeps its last clusters or endpoints, and does not see changes of the pool.",
        look="The log line has Envoy's message.",
        action="Mostly an Envoy that is too old for a field; see [choose a profile](../guides/choose-an-envoy-profile.md).",
    ),
    Alert(
        name="ExtprocRecordingLost",
        severity="warning",
        for_="10m",
        expr=(
            "sum by (namespace, instance, result)"
            ' (rate(extproc_recorded_rows_total{result=~"failed|dropped"}[5m])) > 0'
        ),
        summary="Recorded decisions of {{ $labels.instance }} are {{ $labels.result }}",
        meaning="Rows of a [recording](../guides/replay.md) are lost: the file cannot be written (`failed`), or more come than can be written (`dropped`). Requests are not affected.",
        look="Lines `decisions are not recorded` of the log; the problems on the [console](console.md); board [Overview](dashboards.md#overview), panel Recordings.",
        action="Mount a volume where `decisions.record.file` is, which the user of extproc can write; free space on it.",
    ),
    Alert(
        name="ExtprocTracesLost",
        severity="info",
        for_="10m",
        expr=(
            "sum by (namespace, instance, result)"
            ' (rate(extproc_trace_spans_total{result=~"failed|dropped"}[5m])) > 0'
        ),
        summary="Spans of {{ $labels.instance }} are {{ $labels.result }}",
        meaning="The collector does not take spans, or not as fast as they come. Requests are not affected.",
        look="The log; the collector; [traces](traces.md).",
        action="Let extproc reach the collector, or sample less.",
    ),
    Alert(
        name="ExtprocMatchNotInForce",
        severity="warning",
        for_="5m",
        expr=(
            "max by (namespace, pool, state)"
            f""" {_gauge('extproc_pool_match_state{state=~"overlapped|rejected"}')} > 0"""
        ),
        summary="The match of pool {{ $labels.pool }} is {{ $labels.state }}",
        meaning="Annotations of an InferencePool claim requests that another pool takes, or that no rule of `cluster.match_rules` allows.",
        look="Events and annotations of the InferencePool; the log; [several pools](../guides/several-pools.md).",
        action="Change the annotation, or allow it by a rule.",
    ),
    Alert(
        name="ExtprocReplicasMissing",
        severity="warning",
        for_="15m",
        expr=(
            f"max by (namespace, pool) {_gauge('extproc_scaling_desired_replicas')}\n"
            "  - max by (namespace, pool)"
            f""" {_gauge('extproc_scaling_replicas{state="available"}')} > 0"""
        ),
        summary="Pool {{ $labels.pool }} lacks {{ $value }} engines",
        meaning="The autoscaler wants more engines than become available: no free devices, images that do not load, or engines that do not get ready.",
        look="Board [Scaling and queue](dashboards.md#scaling-and-queue), panels Replicas and Cold start; events of the pending pods.",
        action="Add nodes, raise quotas, or correct the engine's start.",
    ),
    Alert(
        name="ExtprocScalingFails",
        severity="warning",
        for_="5m",
        expr="sum by (namespace, pool) (rate(extproc_scaling_failures_total[5m])) > 0",
        summary="extproc cannot scale pool {{ $labels.pool }}",
        meaning="Replicas of the target can be neither read nor changed; the engines stay as they are.",
        look="The log; events of the target; [autoscaling](../guides/autoscaling/kubernetes.md).",
        action="Give the rights of the component `engine-autoscaling`; remove an HPA or ScaledObject on the same object.",
    ),
    Alert(
        name="ExtprocScalingCountersIncomplete",
        severity="warning",
        for_="5m",
        expr=f"min by (namespace, pool) {_gauge('extproc_scaling_counters_complete')} == 0",
        summary="The autoscaler of pool {{ $labels.pool }} does not know all counters",
        meaning="A replica of extproc cannot read the counters of another one. Until it can, no engine is taken away.",
        look="The log names the peer; [several replicas](../guides/autoscaling/index.md#several-replicas-of-extproc).",
        action="Let replicas reach each other on port 9090: the headless Service and the NetworkPolicy of the manifests. Where the log says that a peer has no counters of a pool, that replica does not scale it: give all replicas the same configuration, and end a rollout that stands still.",
    ),
    Alert(
        name="ExtprocPeersMissing",
        severity="warning",
        for_="10m",
        expr=(
            f"min by (namespace, job) {_gauge('extproc_peer_sync_peers')}"
            f"\n  < count by (namespace, job) {_gauge('extproc_peer_sync_peers')} - 1"
        ),
        summary="A replica of {{ $labels.job }} does not hear all others",
        meaning="A replica of extproc does not know which requests the others sent where: fewer prefix hits, and engines that are busier than it believes.",
        look="`extproc_peer_sync_failures_total` by reason, and the log, which names peer and reason.",
        action="Let replicas reach each other on port 9090, with the same `server.admin_token_file`, or all of them the same Redis; see [several replicas](../guides/several-replicas.md#direct-exchange).",
    ),
    Alert(
        name="ExtprocNoLeader",
        severity="critical",
        for_="1m",
        expr=f"sum by (namespace, job) {_gauge('extproc_leader')} == 0",
        summary="No replica of {{ $labels.job }} holds the Lease",
        meaning="With [leader election](../guides/leader-election.md) only the leader is ready: no replica takes requests.",
        look="`kubectl get lease`; the log of the replicas; the state of the API server.",
        action="Give rights for Leases; or turn leader election off, which extproc does not need.",
    ),
)


def runbooks_block() -> str:
    """The table and the sections of alerts of the documentation."""
    return "\n".join(_runbooks())


def _runbooks() -> Iterator[str]:
    yield "| alert | severity | for | meaning |"
    yield "|---|---|---|---|"
    for alert in ALERTS:
        first = alert.meaning.partition(". ")[0].rstrip(".")
        name = f"[{alert.name}](#{alert.name.lower()})"
        yield f"| {name} | {alert.severity} | {alert.for_} | {first}. |"
    for alert in ALERTS:
        yield f"\n## {alert.name}\n"
        yield f"{alert.meaning}\n"
        yield f"```promql\n{alert.expr}\n```\n"
        yield f"**Look at:** {alert.look}\n"
        yield f"**Do:** {alert.action}"
