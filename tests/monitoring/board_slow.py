"""The dashboard "Why is it slow": the time of a request, part by part."""

from __future__ import annotations

from tests.monitoring.board_panels import (
    EJECTED,
    FIRST_BYTE,
    FIRST_BYTE_BY_ENDPOINT,
    HIT_RATIO,
    OF_STREAMS,
    QUEUE_WAIT,
    RATIO_BAD,
    STREAMED,
    gauge,
    quantiles,
)
from tests.monitoring.grafana import Board, DashboardRow, Panel, Query

_SPEED = (
    "(1000 * max by (namespace, pool, endpoint)"
    " (extproc_endpoint_prefill_seconds_per_token{<pool>})"
    " + 100 * max by (namespace, pool, endpoint) (extproc_endpoint_step_seconds{<pool>}"
    " + extproc_endpoint_decode_seconds_per_sequence{<pool>}))"
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
                    f" are not shown. {STREAMED}",
                    "s",
                    quantiles("extproc_request_ttft_seconds", 0.5, 0.95, 0.99, matcher=OF_STREAMS),
                ),
                Panel(
                    "Duration",
                    "Time from the start of a request to the end of its response.",
                    "s",
                    quantiles(
                        "extproc_request_duration_seconds", 0.5, 0.95, 0.99, matcher="<model>"
                    ),
                ),
                Panel(
                    "First token, distribution",
                    "How many requests had their first token within which time. Two bands are two kinds of"
                    f" requests, or of engines. {STREAMED}",
                    "s",
                    [
                        Query(
                            "sum by (le)"
                            f" (increase(extproc_request_ttft_seconds_bucket{{{OF_STREAMS}}}[<rate>]))",
                            "{{le}}",
                        )
                    ],
                    kind="heatmap",
                ),
                Panel(
                    "Time per output token",
                    "Seconds per output token after the first, of streams whose chunks are shown.",
                    "s",
                    quantiles(
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
                    quantiles(
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
                    quantiles(
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
                QUEUE_WAIT,
                Panel(
                    "Decision time",
                    "Time to choose an endpoint, without the queue. Usually below a millisecond.",
                    "s",
                    quantiles("extproc_routing_duration_seconds", 0.5, 0.99, matcher="<process>"),
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
                    steps=RATIO_BAD,
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
                            f"{FIRST_BYTE} / on (namespace, pool) group_left ()"
                            f" quantile by (namespace, pool) (0.25, {FIRST_BYTE})",
                            "{{endpoint}} answers",
                        ),
                    ],
                    steps=((0.0, "green"), (3.0, "red")),
                ),
                FIRST_BYTE_BY_ENDPOINT,
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
                    gauge("extproc_endpoint_inflight_requests", "endpoint"),
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
                EJECTED,
            ],
        ),
        DashboardRow(
            "3. Prefix caches",
            [
                HIT_RATIO,
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
