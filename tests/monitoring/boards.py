"""The dashboards: questions of operators, and the queries that answer them.

Queries use the metrics themselves and no recorded series, so that a board works without the rules.
`<model>`, `<pool>` and `<process>` are the matchers of the board's variables, `<rate>` is Grafana's interval.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tests.monitoring.grafana import Board, DashboardRow, Panel, Query

#: Colors by bound: fine, look, act.
_RATIO_BAD = ((0.0, "green"), (0.01, "yellow"), (0.05, "red"))
_COUNT_BAD = ((0.0, "green"), (1.0, "red"))
_COUNT_LOOK = ((0.0, "green"), (1.0, "yellow"))
_RATIO_GOOD = ((0.0, "red"), (0.2, "yellow"), (0.5, "green"))

_FAILED = 'sum(rate(extproc_requests_total{<model>,status=~"429|5.."}[<rate>]))'
_ARRIVED = "sum(rate(extproc_requests_total{<model>}[<rate>]))"
_HITS = (
    "sum by (pool) (rate(extproc_matched_tokens_total{<pool>}[<rate>]))"
    " / (sum by (pool) (rate(extproc_prompt_tokens_total{<pool>}[<rate>])) > 0)"
)
_SPEED = (
    "(1000 * max by (namespace, pool, endpoint)"
    " (extproc_endpoint_prefill_seconds_per_token{<pool>})"
    " + 100 * max by (namespace, pool, endpoint) (extproc_endpoint_step_seconds{<pool>}"
    " + extproc_endpoint_decode_seconds_per_sequence{<pool>}))"
)

#: Only streams have a first token that can be seen: other answers come when all tokens are there.
_OF_STREAMS = '<model>,streaming="true"'
_STREAMED = "Of streamed answers only; empty where none is streamed: see Duration."


#: 0 for a pool, also for one without endpoints.
_NONE = "0 * max by (namespace, pool) (extproc_pool_match_state{<pool>})"
#: Endpoints of a pool that requests are sent to.
_SERVING = (
    "sum by (namespace, pool) (max by (namespace, pool, endpoint)"
    " (extproc_endpoint_up{<pool>} * (1 - extproc_endpoint_ejected{<pool>})))"
)
_FIRST_BYTE = (
    "(sum by (namespace, pool, endpoint)"
    " (rate(extproc_endpoint_response_headers_seconds_sum{<pool>}[<rate>]))"
    " / (sum by (namespace, pool, endpoint)"
    " (rate(extproc_endpoint_response_headers_seconds_count{<pool>}[<rate>])) > 0))"
)


def _quantiles(
    metric: str, *shares: float, by: str = "", matcher: str = "<pool>", staged: str = ""
) -> list[Query]:
    """Quantiles of a histogram over time."""
    labels = f"le, {by}" if by else "le"
    suffix = f" {{{{{by}}}}}" if by else ""
    return [
        Query(
            f"histogram_quantile({share:g}, sum by ({labels})"
            f" (rate({metric}_bucket{{{matcher}}}[<rate>])))",
            f"p{100 * share:g}{suffix}",
            staged,
        )
        for share in shares
    ]


def _rates(metric: str, *labels: str, staged: str = "", matcher: str = "<pool>") -> list[Query]:
    """Increase per second of a counter, by labels."""
    by = ", ".join(labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    return [Query(f"sum by ({by}) (rate({metric}{{{matcher}}}[<rate>]))", legend, staged)]


def _gauge(metric: str, *labels: str, fold: str = "sum", staged: str = "") -> list[Query]:
    """A gauge over the replicas of extproc, by labels."""
    by = ", ".join(labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    return [Query(f"{fold} by ({by}) ({metric}{{<pool>}})", legend, staged)]


_EJECTED = Panel(
    "Ejected",
    "1 while an endpoint gets no requests because it fails, hangs or cannot be reached.",
    "short",
    _gauge("extproc_endpoint_ejected", "pool", "endpoint", fold="max"),
    kind="state-timeline",
    width=12,
    steps=_COUNT_BAD,
)
_EJECTIONS = Panel(
    "Ejections by cause",
    "errors: 5xx in a row; hung: no progress for 15 s; unreachable: connections refused;"
    " passed-over: Envoy served by another endpoint.",
    "cps",
    _rates("extproc_ejections_total", "pool", "cause", staged="engine killed"),
)
_REJECTIONS = Panel(
    "Rejections by cause",
    "Requests that extproc refuses, by HTTP status and cause. None is normal without overload.",
    "reqps",
    _rates("extproc_rejection_causes_total", "pool", "status", "cause", staged="no endpoint"),
    stacked=True,
)
_SERVER_ERRORS = Panel(
    "Server errors by endpoint",
    "Share of an engine's responses that are 5xx.",
    "percentunit",
    [
        Query(
            'sum by (pool, endpoint) (rate(extproc_responses_total{<pool>,status=~"5.."}[<rate>]))'
            " / sum by (pool, endpoint) (rate(extproc_responses_total{<pool>}[<rate>]))",
            "{{endpoint}}",
            "engine errors",
        )
    ],
    steps=_RATIO_BAD,
)
_QUEUE_SIZE = Panel(
    "Requests in the queue",
    "Requests that wait in extproc for an engine. Above 0 for minutes: engines are missing.",
    "short",
    _gauge("extproc_flow_control_queue_size", "pool", staged="flow control"),
)
_QUEUE_WAIT = Panel(
    "Time in the queue",
    "Seconds that dispatched requests waited in extproc, by priority.",
    "s",
    _quantiles(
        "extproc_flow_control_request_queue_duration_seconds",
        0.5,
        0.95,
        by="priority",
        staged="requests wait",
    ),
)
_HIT_RATIO = Panel(
    "Prompt tokens in the cache",
    "Share of prompt tokens that are predicted to be cached on the chosen endpoint."
    " A fall means engines that restarted, or other prompts.",
    "percentunit",
    [Query(_HITS, "{{pool}}")],
)
_TOKENS = Panel(
    "Tokens by kind",
    "Tokens per second that engines reported: prompt, of these cached, and completion."
    " Only where the data plane shows responses.",
    "short",
    _rates(
        "extproc_usage_tokens_total",
        "pool",
        "kind",
        staged="bodies of responses",
        matcher="<model>",
    ),
)
_FIRST_BYTE_BY_ENDPOINT = Panel(
    "First byte by endpoint",
    "Mean time from the choice of the endpoint to response headers."
    " Streams of most engines begin with the first token, other responses when they are complete.",
    "s",
    [Query(_FIRST_BYTE, "{{endpoint}}")],
)

OVERVIEW = Board(
    uid="extproc-overview",
    title="extproc / Overview",
    answers="Is anything wrong, and in which pool? Traffic, failures, latency and health of all pools.",
    has_models=True,
    rows=[
        DashboardRow(
            "Now",
            [
                Panel(
                    "Requests",
                    "Requests per second, routed and rejected.",
                    "reqps",
                    [Query(_ARRIVED, "requests")],
                    kind="stat",
                    width=4,
                ),
                Panel(
                    "Failed",
                    "Share of requests that ended with 429 or 5xx, of an engine or of extproc.",
                    "percentunit",
                    [Query(f"({_FAILED} or vector(0)) / ({_ARRIVED} > 0)", "failed")],
                    kind="stat",
                    width=4,
                    steps=_RATIO_BAD,
                ),
                Panel(
                    "First token, p95",
                    "95th percentile of the time from the start of a request to its first token,"
                    f" or to response headers where chunks are not shown. {_STREAMED}",
                    "s",
                    _quantiles("extproc_request_ttft_seconds", 0.95, matcher=_OF_STREAMS),
                    kind="stat",
                    width=4,
                ),
                Panel(
                    "Cached prompt tokens",
                    "Share of prompt tokens predicted to be cached on the chosen endpoint.",
                    "percentunit",
                    [
                        Query(
                            "sum(rate(extproc_matched_tokens_total{<pool>}[<rate>]))"
                            " / (sum(rate(extproc_prompt_tokens_total{<pool>}[<rate>])) > 0)",
                            "cached",
                        )
                    ],
                    kind="stat",
                    width=4,
                    steps=_RATIO_GOOD,
                ),
                Panel(
                    "Ejected endpoints",
                    "Endpoints that get no requests because they fail.",
                    "short",
                    [
                        Query(
                            "sum(max by (namespace, pool, endpoint)"
                            " (extproc_endpoint_ejected{<pool>}))",
                            "ejected",
                        )
                    ],
                    kind="stat",
                    width=4,
                    steps=_COUNT_BAD,
                ),
                Panel(
                    "Queue",
                    "Requests that wait for an engine, with flow control.",
                    "short",
                    [
                        Query(
                            "sum(extproc_flow_control_queue_size{<pool>})",
                            "waiting",
                            "flow control",
                        )
                    ],
                    kind="stat",
                    width=4,
                    steps=_COUNT_LOOK,
                ),
                Panel(
                    "Firing alerts",
                    "Alerts of the rules of extproc that fire now; the documentation has a section for each.",
                    "short",
                    [
                        Query(
                            "count by (alertname, severity, pool, endpoint)"
                            ' (ALERTS{alertname=~"Extproc.*",alertstate="firing",<process>})',
                            "{{alertname}}",
                            "engine killed",
                        )
                    ],
                    kind="table",
                    width=24,
                ),
            ],
        ),
        DashboardRow(
            "Pools",
            [
                Panel(
                    "Requests by model",
                    "Requests per second that ended, routed and rejected.",
                    "reqps",
                    _rates("extproc_requests_total", "pool", "model", matcher="<model>"),
                ),
                Panel(
                    "Requests by status",
                    "HTTP status of the response or of the rejection; 499: the client left before an endpoint was chosen; none: later, or the engine died.",
                    "reqps",
                    _rates("extproc_requests_total", "status", matcher="<model>"),
                    stacked=True,
                ),
                _REJECTIONS,
                Panel(
                    "Server errors",
                    "Responses per second by status class 5xx and endpoint; 502 to 504 may be Envoy's own.",
                    "reqps",
                    [
                        Query(
                            "sum by (pool, endpoint, status)"
                            ' (rate(extproc_responses_total{<pool>,status=~"5.."}[<rate>]))',
                            "{{pool}} {{endpoint}} {{status}}",
                            "engine errors",
                        )
                    ],
                ),
                Panel(
                    "First token by model",
                    "Time from the start of a request to its first token, or to response headers where chunks"
                    f" are not shown. {_STREAMED}",
                    "s",
                    _quantiles(
                        "extproc_request_ttft_seconds", 0.5, 0.95, by="model", matcher=_OF_STREAMS
                    ),
                ),
                Panel(
                    "Duration by model",
                    "Time from the start of a request to the end of its response.",
                    "s",
                    _quantiles(
                        "extproc_request_duration_seconds", 0.5, 0.95, by="model", matcher="<model>"
                    ),
                ),
                _TOKENS,
                _HIT_RATIO,
                Panel(
                    "Running requests",
                    "Requests that were routed and whose response has not ended.",
                    "short",
                    [
                        Query(
                            "sum by (pool, model) (extproc_requests_running{<model>})",
                            "{{pool}} {{model}}",
                        )
                    ],
                ),
                Panel(
                    "Endpoints",
                    "Endpoints of the pool, and those that serve: reachable and not ejected.",
                    "short",
                    [
                        Query(
                            "count by (namespace, pool)"
                            " (max by (namespace, pool, endpoint) (extproc_endpoint_up{<pool>}))"
                            f" or {_NONE}",
                            "{{namespace}} {{pool}} all",
                        ),
                        Query(
                            f"{_SERVING} or {_NONE}",
                            "{{namespace}} {{pool}} serving",
                        ),
                    ],
                ),
                _QUEUE_SIZE,
            ],
        ),
        DashboardRow(
            "Picker",
            [
                Panel(
                    "Replicas",
                    "Replicas of extproc that Prometheus can scrape; 0 for an hour after the last one.",
                    "short",
                    [
                        Query(
                            "count by (namespace, job) (extproc_info{<process>})"
                            " or 0 * count by (namespace, job)"
                            " (max_over_time(extproc_info{<process>}[1h]))",
                            "{{namespace}} {{job}}",
                        )
                    ],
                    width=6,
                ),
                Panel(
                    "Decision time",
                    "Time to choose an endpoint, without the queue.",
                    "s",
                    _quantiles("extproc_routing_duration_seconds", 0.5, 0.99, matcher="<process>"),
                    width=6,
                ),
                Panel(
                    "Configuration",
                    "1 while a replica has rejected its file (an older one is in force), or needs a"
                    " restart to take all of it.",
                    "short",
                    [
                        Query(
                            "max by (instance) (extproc_config_reload_failed{<process>})",
                            "{{instance}} rejected",
                        ),
                        Query(
                            "max by (instance) (extproc_config_restart_needed{<process>})",
                            "{{instance}} needs restart",
                        ),
                    ],
                    width=6,
                    steps=_COUNT_BAD,
                ),
                Panel(
                    "Failing loops",
                    "Background loops that fail and are retried: discovery, scraping, reloading and others.",
                    "short",
                    [Query("sum by (loop) (extproc_loop_degraded{<process>})", "{{loop}}")],
                    width=6,
                    steps=_COUNT_BAD,
                ),
                Panel(
                    "Recordings",
                    "Decisions and ends of requests for recordings per second, by result. dropped: too many"
                    " waited; failed: the file cannot be written.",
                    "cps",
                    [
                        Query(
                            "sum by (result) (rate(extproc_recorded_rows_total{<process>}[<rate>]))",
                            "{{result}}",
                            "recording",
                        )
                    ],
                ),
            ],
        ),
    ],
)

ONE_POOL = Board(
    uid="extproc-pool",
    title="extproc / One pool",
    answers="Which engines of this pool serve, how is the load spread, and which one is different?",
    one_pool=True,
    has_models=True,
    rows=[
        DashboardRow(
            "Traffic",
            [
                Panel(
                    "Requests by endpoint",
                    "Requests routed per second.",
                    "reqps",
                    _rates("extproc_routed_requests_total", "endpoint"),
                    stacked=True,
                ),
                Panel(
                    "Responses by status",
                    "Responses per second, by HTTP status.",
                    "reqps",
                    _rates("extproc_responses_total", "status"),
                    stacked=True,
                ),
                _SERVER_ERRORS,
                _REJECTIONS,
                Panel(
                    "No response",
                    "Requests per second whose client left, or whose connection broke, before response headers.",
                    "reqps",
                    _rates(
                        "extproc_requests_without_response_total",
                        "endpoint",
                        staged="client leaves",
                    ),
                ),
                _TOKENS,
            ],
        ),
        DashboardRow(
            "Health",
            [
                _EJECTED,
                Panel(
                    "Reachable",
                    "1 unless scrapes cannot connect to the endpoint.",
                    "short",
                    _gauge("extproc_endpoint_up", "endpoint", fold="min"),
                    kind="state-timeline",
                    width=12,
                    steps=((0.0, "red"), (1.0, "green")),
                ),
                _EJECTIONS,
                Panel(
                    "Ejections by endpoint",
                    "How often an endpoint is ejected; repeated ejections mean an unstable engine.",
                    "cps",
                    _rates("extproc_endpoint_ejections_total", "endpoint"),
                ),
                Panel(
                    "Probes",
                    "Requests that try an ejected endpoint, by result.",
                    "cps",
                    _rates("extproc_probes_total", "result", staged="engine errors"),
                ),
                Panel(
                    "Failed scrapes",
                    "Scrapes of the metrics of an engine that failed, by result.",
                    "cps",
                    [
                        Query(
                            "sum by (endpoint, result)"
                            ' (rate(extproc_scrapes_total{<pool>,result!="ok"}[<rate>]))',
                            "{{endpoint}} {{result}}",
                            "scrapes fail",
                        )
                    ],
                ),
                Panel(
                    "Age of metrics",
                    "Seconds since the last successful scrape. Idle engines are scraped seldom; those that never"
                    " were are left out.",
                    "s",
                    [
                        Query(
                            "max by (endpoint) (extproc_endpoint_metrics_age_seconds{<pool>} < Inf)",
                            "{{endpoint}}",
                        )
                    ],
                ),
            ],
        ),
        DashboardRow(
            "Load",
            [
                Panel(
                    "Requests in flight",
                    "Requests that extproc routed to the endpoint and that have not ended.",
                    "short",
                    _gauge("extproc_endpoint_inflight_requests", "endpoint"),
                ),
                Panel(
                    "Requests of others",
                    "Requests of other clients, and of other replicas that do not exchange theirs, on the endpoint.",
                    "short",
                    _gauge("extproc_endpoint_foreign_requests", "endpoint", fold="min"),
                ),
                Panel(
                    "Running in the engine",
                    "Requests in the running batch of the engine at the last scrape.",
                    "short",
                    _gauge("extproc_endpoint_running_requests", "endpoint", fold="max"),
                ),
                Panel(
                    "Waiting in the engine",
                    "Requests that the engine queues. Above 0 for long: it is saturated.",
                    "short",
                    _gauge("extproc_endpoint_waiting_requests", "endpoint", fold="max"),
                ),
                Panel(
                    "KV cache",
                    "Share of KV cache blocks that running requests hold. Near 1 the engine preempts requests.",
                    "percentunit",
                    _gauge("extproc_endpoint_kv_cache_usage_ratio", "endpoint", fold="max"),
                    steps=((0.0, "green"), (0.85, "yellow"), (0.95, "red")),
                ),
                _FIRST_BYTE_BY_ENDPOINT,
                Panel(
                    "Prompt tokens to compute",
                    "Uncached prompt tokens on the endpoint that are not computed yet, of all clients.",
                    "short",
                    _gauge("extproc_endpoint_queued_tokens", "endpoint", fold="max"),
                ),
            ],
        ),
        DashboardRow(
            "Models and caches",
            [
                Panel(
                    "Models",
                    "Models and adapters that the endpoint lists.",
                    "short",
                    _gauge("extproc_endpoint_models", "endpoint", fold="max"),
                ),
                Panel(
                    "Bytes per token",
                    "Bytes of a prompt per token, learned by model; what prompts are measured with.",
                    "short",
                    [
                        Query("avg by (model) (extproc_bytes_per_token{<model>})", "{{model}}"),
                    ],
                ),
                Panel(
                    "Tokens of a request, p95",
                    "Tokens of requests as their responses reported them, by kind.",
                    "short",
                    [
                        Query(
                            "histogram_quantile(0.95, sum by (le, kind)"
                            " (rate(extproc_request_tokens_bucket{<model>}[<rate>])))",
                            "{{kind}}",
                            "bodies of responses",
                        )
                    ],
                ),
                Panel(
                    "Tenants, requests",
                    "Requests per second of the ten tenants with most.",
                    "reqps",
                    [
                        Query(
                            "topk(10, sum by (tenant)"
                            " (rate(extproc_tenant_requests_total{<model>}[<rate>])))",
                            "{{tenant}}",
                        )
                    ],
                ),
                Panel(
                    "Tenants, tokens",
                    "Tokens per second of the ten tenants with most, as responses reported them.",
                    "short",
                    [
                        Query(
                            "topk(10, sum by (tenant)"
                            " (rate(extproc_tenant_tokens_total{<model>}[<rate>])))",
                            "{{tenant}}",
                            "bodies of responses",
                        )
                    ],
                ),
                Panel(
                    "Capacity of caches",
                    "Tokens that the prefix cache of the endpoint holds, estimated.",
                    "short",
                    _gauge("extproc_prefix_capacity_tokens", "endpoint", fold="max"),
                ),
            ],
        ),
        DashboardRow(
            "Shadow",
            [
                Panel(
                    "Agreement with the shadow",
                    "Share of compared requests for which the shadow prefers the same endpoint.",
                    "percentunit",
                    [
                        Query(
                            "sum by (pool, shadow) (rate(extproc_shadow_decisions_total"
                            '{<pool>,result="agreed"}[<rate>]))'
                            " / (sum by (pool, shadow) (rate(extproc_shadow_decisions_total"
                            '{<pool>,result=~"agreed|differed|rejected"}[<rate>])) > 0)',
                            "{{shadow}}",
                            "shadow",
                        )
                    ],
                ),
                Panel(
                    "Shadow by result",
                    "Requests per second by what the shadow preferred; dropped: it was behind.",
                    "reqps",
                    _rates(
                        "extproc_shadow_decisions_total",
                        "shadow",
                        "result",
                        staged="shadow",
                    ),
                    stacked=True,
                ),
                Panel(
                    "Expected saving of the shadow",
                    "Share of the expected seconds that the choices of the shadow would save, by the profile"
                    " that expects them; below 0 they would cost more. Each profile likes its own choices.",
                    "percentunit",
                    is_signed=True,
                    queries=[
                        Query(
                            "1 - sum by (pool, shadow, judge) (rate(extproc_shadow_expected_seconds_total"
                            '{<pool>,choice="preferred"}[<rate>]))'
                            " / (sum by (pool, shadow, judge) (rate(extproc_shadow_expected_seconds_total"
                            '{<pool>,choice="routed"}[<rate>])) > 0)',
                            "{{shadow}}, judged by {{judge}}",
                            "shadow",
                        )
                    ],
                ),
                Panel(
                    "Cost of the shadow",
                    "Share of a core that the shadow takes to decide, over all replicas.",
                    "percentunit",
                    _rates("extproc_shadow_seconds_total", "shadow", staged="shadow"),
                ),
            ],
        ),
    ],
)

SLOW = Board(
    uid="extproc-slow",
    title="extproc / Why is it slow",
    answers="Where does the time of a request go: queue, picker, engines or caches? Read it from top to bottom.",
    has_models=True,
    rows=[
        DashboardRow(
            "What clients see",
            [
                Panel(
                    "First token",
                    "Time from the start of a request to its first token, or to response headers where chunks"
                    f" are not shown. {_STREAMED}",
                    "s",
                    _quantiles(
                        "extproc_request_ttft_seconds", 0.5, 0.95, 0.99, matcher=_OF_STREAMS
                    ),
                ),
                Panel(
                    "Duration",
                    "Time from the start of a request to the end of its response.",
                    "s",
                    _quantiles(
                        "extproc_request_duration_seconds", 0.5, 0.95, 0.99, matcher="<model>"
                    ),
                ),
                Panel(
                    "First token, distribution",
                    "How many requests had their first token within which time. Two bands are two kinds of"
                    f" requests, or of engines. {_STREAMED}",
                    "s",
                    [
                        Query(
                            "sum by (le)"
                            f" (increase(extproc_request_ttft_seconds_bucket{{{_OF_STREAMS}}}[<rate>]))",
                            "{{le}}",
                        )
                    ],
                    kind="heatmap",
                ),
                Panel(
                    "Time per output token",
                    "Seconds per output token after the first, of streams whose chunks are shown.",
                    "s",
                    _quantiles(
                        "extproc_request_tpot_seconds",
                        0.5,
                        0.95,
                        matcher="<model>",
                        staged="chunks of streams",
                    ),
                ),
                Panel(
                    "Gaps between chunks",
                    "Seconds between two chunks of a stream; long gaps are iterations with large prompts.",
                    "s",
                    _quantiles(
                        "extproc_request_itl_seconds",
                        0.5,
                        0.99,
                        matcher="<model>",
                        staged="chunks of streams",
                    ),
                ),
                Panel(
                    "First token over prediction",
                    "Actual over predicted time to the first token of streams, with strategies that predict"
                    " seconds. Far above 1: something slows engines that extproc does not know of.",
                    "short",
                    _quantiles(
                        "extproc_request_ttft_ratio",
                        0.5,
                        0.95,
                        matcher="<model>",
                        staged="chunks of streams",
                    ),
                ),
            ],
        ),
        DashboardRow(
            "1. The queue and the picker",
            [
                _QUEUE_WAIT,
                Panel(
                    "Decision time",
                    "Time to choose an endpoint, without the queue. Usually below a millisecond.",
                    "s",
                    _quantiles("extproc_routing_duration_seconds", 0.5, 0.99, matcher="<process>"),
                ),
                Panel(
                    "Stalls of the picker",
                    "Share of time in which the event loop was held up and no request was served; cpu is the part"
                    " in which it computed, the rest is a busy machine.",
                    "percentunit",
                    [
                        Query(
                            "sum by (instance) (rate(extproc_event_loop_lag_seconds_sum{<process>}[<rate>]))",
                            "{{instance}}",
                        ),
                        Query(
                            "sum by (instance)"
                            " (rate(extproc_event_loop_lag_cpu_seconds_sum{<process>}[<rate>]))",
                            "{{instance}} cpu",
                        ),
                    ],
                    steps=_RATIO_BAD,
                ),
                Panel(
                    "Large bodies",
                    "Time that large request bodies waited and were parsed.",
                    "s",
                    [
                        Query(
                            "histogram_quantile(0.95, sum by (le)"
                            " (rate(extproc_large_body_parse_duration_seconds_bucket{<process>}[<rate>])))",
                            "p95",
                            "large body",
                        )
                    ],
                ),
            ],
        ),
        DashboardRow(
            "2. Engines",
            [
                Panel(
                    "Slow engines",
                    "Time to compute a request alone, learned, over that of the quicker quarter of engines like it;"
                    " and time to the first byte over that of the quicker quarter of its pool, which strategies"
                    " that look at load even out. 1 is usual; above 3 an alert fires, of first bytes with more than one a minute.",
                    "short",
                    [
                        Query(
                            "max by (namespace, pool, endpoint)"
                            " (extproc_endpoint_slowness_ratio{<pool>})",
                            "{{endpoint}} computes",
                        ),
                        Query(
                            f"{_FIRST_BYTE} / on (namespace, pool) group_left ()"
                            f" quantile by (namespace, pool) (0.25, {_FIRST_BYTE})",
                            "{{endpoint}} answers",
                        ),
                    ],
                    steps=((0.0, "green"), (3.0, "red")),
                ),
                _FIRST_BYTE_BY_ENDPOINT,
                Panel(
                    "Speed of engines",
                    "Seconds that an engine alone takes for 1,000 uncached prompt tokens and 100 output tokens, learned.",
                    "s",
                    [Query(_SPEED, "{{endpoint}}")],
                ),
                Panel(
                    "Seconds of prompts ahead",
                    "Uncached prompt tokens on the endpoint, times its seconds per token: what a new request waits for.",
                    "s",
                    [
                        Query(
                            "max by (endpoint) (extproc_endpoint_queued_tokens{<pool>}"
                            " * extproc_endpoint_prefill_seconds_per_token{<pool>})",
                            "{{endpoint}}",
                        )
                    ],
                ),
                Panel(
                    "Requests in flight",
                    "Requests on each endpoint: a long iteration slows all of them.",
                    "short",
                    _gauge("extproc_endpoint_inflight_requests", "endpoint"),
                ),
                Panel(
                    "Uneven load",
                    "Requests of the busiest endpoint over the mean; 1 is even. Prefix affinity makes it uneven on purpose.",
                    "short",
                    [
                        Query(
                            "max by (pool, instance) (extproc_endpoint_inflight_requests{<pool>})"
                            " / (avg by (pool, instance) (extproc_endpoint_inflight_requests{<pool>}) > 0)",
                            "{{pool}} {{instance}}",
                        )
                    ],
                ),
                _EJECTED,
            ],
        ),
        DashboardRow(
            "3. Prefix caches",
            [
                _HIT_RATIO,
                Panel(
                    "Observed over predicted",
                    "Tokens that engines found in their prefix caches, by counters of their metrics pages, over those"
                    " predicted. 1 is exact; far below, the cache of this engine is colder than extproc thinks.",
                    "percentunit",
                    [
                        Query(
                            "sum by (endpoint) (rate(extproc_prefix_observed_tokens_total{<pool>}[<rate>]))"
                            " / (sum by (endpoint)"
                            " (rate(extproc_prefix_predicted_tokens_total{<pool>}[<rate>])) > 0)",
                            "{{endpoint}}",
                        )
                    ],
                ),
                Panel(
                    "Cached tokens per response",
                    "Tokens found in the prefix cache, by the same counters, per response: an engine with a cold"
                    " cache is at the bottom.",
                    "short",
                    [
                        Query(
                            "sum by (endpoint) (rate(extproc_prefix_observed_tokens_total{<pool>}[<rate>]))"
                            " / (sum by (endpoint) (rate(extproc_responses_total{<pool>}[<rate>])) > 0)",
                            "{{endpoint}}",
                        )
                    ],
                ),
                Panel(
                    "Cached share, distribution",
                    "Share of the prompt that is predicted to be cached: conversations are near 1, new prompts at 0.",
                    "percentunit",
                    [
                        Query(
                            "sum by (le) (increase(extproc_prefix_hit_ratio_bucket{<pool>}[<rate>]))",
                            "{{le}}",
                        )
                    ],
                    kind="heatmap",
                ),
                Panel(
                    "Size of the prefix index",
                    "Prefix blocks in the prefix index of each replica.",
                    "short",
                    [
                        Query(
                            "sum by (instance) (extproc_prefix_index_blocks{<process>})",
                            "{{instance}}",
                        )
                    ],
                ),
            ],
        ),
    ],
)


#: Legend of a pool: another namespace may have one of the same name.
_POOL = "{{namespace}} {{pool}}"


def _scaling(name: str, *labels: str, fold: str = "max", matcher: str = "") -> str:
    """A gauge of the autoscaler, of which each replica of extproc has the same value."""
    by = ", ".join(("namespace", "pool", *labels))
    return f"{fold} by ({by}) (extproc_scaling_{name}{{<pool>{matcher}}})"


_AVAILABLE = _scaling("replicas", matcher=',state="available"')


SCALING = Board(
    uid="extproc-scaling",
    title="extproc / Scaling and queue",
    answers="Are there enough engines? What waits, what is refused, what the autoscaler wants and what it gets.",
    rows=[
        DashboardRow(
            "Queue",
            [
                _QUEUE_SIZE,
                _QUEUE_WAIT,
                Panel(
                    "Departures from the queue",
                    "Queued requests that were dispatched, expired, displaced by others, or left.",
                    "reqps",
                    _rates(
                        "extproc_flow_control_requests_total",
                        "pool",
                        "outcome",
                        staged="flow control",
                    ),
                    stacked=True,
                ),
                Panel(
                    "Bytes in the queue",
                    "Bytes of the bodies of queued requests.",
                    "bytes",
                    _gauge("extproc_flow_control_queue_bytes", "pool", staged="flow control"),
                ),
                _REJECTIONS,
                Panel(
                    "Requests in flight per endpoint",
                    "Requests that run, over endpoints that serve: reachable and not ejected.",
                    "short",
                    [
                        Query(
                            "sum by (namespace, pool) (extproc_endpoint_inflight_requests{<pool>})"
                            f" / ({_SERVING} > 0)",
                            _POOL,
                        )
                    ],
                ),
            ],
        ),
        DashboardRow(
            "Autoscaling",
            [
                Panel(
                    "Replicas",
                    "Engines that the policy wants, that the target asks for, that start and that are available.",
                    "short",
                    [
                        Query(_scaling("desired_replicas"), f"{_POOL} desired", "autoscaling"),
                        Query(
                            _scaling("replicas", "state"), f"{_POOL} {{{{state}}}}", "autoscaling"
                        ),
                    ],
                ),
                Panel(
                    "Missing replicas",
                    "Engines that the policy wants and that are not available.",
                    "short",
                    [Query(f"{_scaling('desired_replicas')} - {_AVAILABLE}", _POOL, "autoscaling")],
                    steps=_COUNT_LOOK,
                ),
                Panel(
                    "Queue depth",
                    "Requests that wait or run per available engine, now and as the mean over the window of the policy.",
                    "short",
                    [
                        Query(_scaling("queue_depth"), f"{_POOL} now", "autoscaling"),
                        Query(_scaling("queue_depth_mean"), f"{_POOL} mean", "autoscaling"),
                    ],
                ),
                Panel(
                    "Arrivals",
                    "Requests per second at all replicas of extproc, mean over three minutes.",
                    "reqps",
                    [Query(_scaling("requests_per_second"), _POOL, "autoscaling")],
                ),
                Panel(
                    "Work over capacity",
                    "Work that arrives over what the available engines do, by learned rates; above 1 the queue grows."
                    " Empty while none is available.",
                    "percentunit",
                    [
                        Query(
                            f"{_scaling('work_per_second')}"
                            f" / ({_scaling('replica_work_per_second')} * {_AVAILABLE} > 0)",
                            _POOL,
                            "autoscaling",
                        )
                    ],
                    steps=((0.0, "green"), (1.0, "red")),
                ),
                Panel(
                    "Cold start",
                    "Seconds from the request for an engine to its first response, learned.",
                    "s",
                    [Query(_scaling("cold_start_seconds"), _POOL, "autoscaling")],
                ),
                Panel(
                    "Changes by reason",
                    "Changes of the desired replicas per second, by reason.",
                    "cps",
                    _rates("extproc_scaling_changes_total", "pool", "reason", staged="autoscaling"),
                ),
                Panel(
                    "Failures to scale",
                    "Failures to read or change the target per second, and rejected annotations.",
                    "cps",
                    [
                        *_rates("extproc_scaling_failures_total", "pool", staged="autoscaling"),
                        Query(
                            "sum by (pool)"
                            " (rate(extproc_scaling_invalid_annotations_total{<pool>}[<rate>]))",
                            "{{pool}} annotations",
                            "autoscaling",
                        ),
                    ],
                    steps=_COUNT_BAD,
                ),
                Panel(
                    "Counters complete",
                    "1 if the counters of all replicas of extproc are known, else 0, which keeps engines.",
                    "short",
                    [Query(_scaling("counters_complete", fold="min"), _POOL, "autoscaling")],
                    steps=((0.0, "red"), (1.0, "green")),
                ),
            ],
        ),
    ],
)

BOARDS: Sequence[Board] = (OVERVIEW, ONE_POOL, SLOW, SCALING)


def block() -> str:
    """The table of panels of the documentation, board by board."""
    parts = []
    for board in BOARDS:
        heading = board.title.partition(" / ")[2]
        parts.append(f"## {heading}\n\n{board.answers}\n")
        parts.append("| panel | shows |\n|---|---|")
        parts += [f"| {panel.title} | {panel.description} |" for panel in board.panels()]
        parts.append("")
    return "\n".join(parts).rstrip()


class BoardFinding(msgspec.Struct, frozen=True):
    """Trouble, and where it shows in one look.

    Attributes:
        trouble: What happened.
        board: The board that shows it.
        panel: Title of the panel.
        alert: The alert that fires.
    """

    trouble: str
    board: Board
    panel: str
    alert: str

    def queries(self) -> Sequence[Query]:
        """The queries of the panel."""
        (panel,) = [panel for panel in self.board.panels() if panel.title == self.panel]
        return panel.queries


SLOW_ENGINE = BoardFinding(
    "An engine is 5 times slower", SLOW, "Slow engines", "ExtprocEndpointSlow"
)
HUNG_ENGINE = BoardFinding("An engine hangs", ONE_POOL, "Ejected", "ExtprocEndpointEjected")
DEAD_ENGINE = BoardFinding("An engine dies", ONE_POOL, "Reachable", "ExtprocEndpointEjected")
FAILING_ENGINE = BoardFinding(
    "An engine fails some requests", ONE_POOL, "Server errors by endpoint", "ExtprocEndpointErrors"
)
COLD_CACHE = BoardFinding(
    "A cache is cold", SLOW, "Observed over predicted", "ExtprocCachePredictionsWrong"
)
FULL_QUEUE = BoardFinding("The queue is full", SCALING, "Rejections by cause", "ExtprocQueueFull")
NO_ENDPOINT = BoardFinding(
    "Every endpoint is gone", OVERVIEW, "Endpoints", "ExtprocPoolWithoutEndpoints"
)
FAILED_SCRAPES = BoardFinding(
    "Metrics of an engine cannot be read", ONE_POOL, "Failed scrapes", "ExtprocEndpointScrapesFail"
)
WRONG_CONFIG = BoardFinding(
    "An edit broke the configuration", OVERVIEW, "Configuration", "ExtprocConfigRejected"
)
STOPPED_PICKER = BoardFinding(
    "A replica of extproc hangs", OVERVIEW, "Replicas", "ExtprocScrapeFails"
)

FINDINGS: Sequence[BoardFinding] = (
    SLOW_ENGINE,
    HUNG_ENGINE,
    DEAD_ENGINE,
    FAILING_ENGINE,
    COLD_CACHE,
    FULL_QUEUE,
    NO_ENDPOINT,
    FAILED_SCRAPES,
    WRONG_CONFIG,
    STOPPED_PICKER,
)


def findings_block() -> str:
    """The table of trouble of the documentation."""
    rows = ["| trouble | board and panel | alert |", "|---|---|---|"]
    for finding in FINDINGS:
        title = finding.board.title.partition(" / ")[2]
        board = f"[{title}](#{title.lower().replace(' ', '-')})"
        alert = f"[{finding.alert}](alerts.md#{finding.alert.lower()})"
        rows.append(f"| {finding.trouble} | {board}, {finding.panel} | {alert} |")
    return "\n".join(rows)
