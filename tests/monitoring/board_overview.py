"""The dashboard "Overview": is anything wrong, and in which pool."""

from __future__ import annotations

from tests.monitoring.board_panels import (
    COUNT_BAD,
    COUNT_LOOK,
    HIT_RATIO,
    OF_STREAMS,
    QUEUE_SIZE,
    RATIO_BAD,
    REJECTIONS,
    SERVING,
    STREAMED,
    TOKENS,
    quantiles,
    rates,
)
from tests.monitoring.grafana import Board, DashboardRow, Panel, Query

_RATIO_GOOD = ((0.0, "red"), (0.2, "yellow"), (0.5, "green"))
_FAILED = 'sum(rate(extproc_requests_total{<model>,status=~"429|5.."}[<rate>]))'
_ARRIVED = "sum(rate(extproc_requests_total{<model>}[<rate>]))"
#: 0 for a pool, also for one without endpoints.
_ZERO = "0 * max by (namespace, pool) (extproc_pool_match_state{<pool>})"


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
                    steps=RATIO_BAD,
                ),
                Panel(
                    "First token, p95",
                    "95th percentile of the time from the start of a request to its first token,"
                    f" or to response headers where chunks are not shown. {STREAMED}",
                    "s",
                    quantiles("extproc_request_ttft_seconds", 0.95, matcher=OF_STREAMS),
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
                    steps=COUNT_BAD,
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
                    steps=COUNT_LOOK,
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
                    rates("extproc_requests_total", "pool", "model", matcher="<model>"),
                ),
                Panel(
                    "Requests by status",
                    "HTTP status of the response or of the rejection; 499: the client left before an endpoint was chosen; none: later, or the engine died.",
                    "reqps",
                    rates("extproc_requests_total", "status", matcher="<model>"),
                    stacked=True,
                ),
                REJECTIONS,
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
                    f" are not shown. {STREAMED}",
                    "s",
                    quantiles(
                        "extproc_request_ttft_seconds", 0.5, 0.95, by="model", matcher=OF_STREAMS
                    ),
                ),
                Panel(
                    "Duration by model",
                    "Time from the start of a request to the end of its response.",
                    "s",
                    quantiles(
                        "extproc_request_duration_seconds", 0.5, 0.95, by="model", matcher="<model>"
                    ),
                ),
                TOKENS,
                HIT_RATIO,
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
                            f" or {_ZERO}",
                            "{{namespace}} {{pool}} all",
                        ),
                        Query(
                            f"{SERVING} or {_ZERO}",
                            "{{namespace}} {{pool}} serving",
                        ),
                    ],
                ),
                QUEUE_SIZE,
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
                    quantiles("extproc_routing_duration_seconds", 0.5, 0.99, matcher="<process>"),
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
                    steps=COUNT_BAD,
                ),
                Panel(
                    "Failing loops",
                    "Background loops that fail and are retried: discovery, scraping, reloading and others.",
                    "short",
                    [Query("sum by (loop) (extproc_loop_degraded{<process>})", "{{loop}}")],
                    width=6,
                    steps=COUNT_BAD,
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
