"""The dashboard "One pool": its engines beside each other."""

from __future__ import annotations

from tests.monitoring.board_panels import (
    EJECTED,
    FIRST_BYTE_BY_ENDPOINT,
    RATIO_BAD,
    REJECTIONS,
    TOKENS,
    gauge,
    rates,
)
from tests.monitoring.grafana import Board, DashboardRow, Panel, Query

_EJECTIONS = Panel(
    "Ejections by cause",
    "errors: 5xx in a row; hung: no progress for 15 s; unreachable: connections refused;"
    " passed-over: Envoy served by another endpoint.",
    "cps",
    rates("extproc_ejections_total", "pool", "cause", staged="engine killed"),
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
    steps=RATIO_BAD,
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
                    rates("extproc_routed_requests_total", "endpoint"),
                    stacked=True,
                ),
                Panel(
                    "Responses by status",
                    "Responses per second, by HTTP status.",
                    "reqps",
                    rates("extproc_responses_total", "status"),
                    stacked=True,
                ),
                _SERVER_ERRORS,
                REJECTIONS,
                Panel(
                    "No response",
                    "Requests per second whose client left, or whose connection broke, before response headers.",
                    "reqps",
                    rates(
                        "extproc_requests_without_response_total",
                        "endpoint",
                        staged="client leaves",
                    ),
                ),
                TOKENS,
            ],
        ),
        DashboardRow(
            "Health",
            [
                EJECTED,
                Panel(
                    "Reachable",
                    "1 unless scrapes cannot connect to the endpoint.",
                    "short",
                    gauge("extproc_endpoint_up", "endpoint", fold="min"),
                    kind="state-timeline",
                    width=12,
                    steps=((0.0, "red"), (1.0, "green")),
                ),
                _EJECTIONS,
                Panel(
                    "Ejections by endpoint",
                    "How often an endpoint is ejected; repeated ejections mean an unstable engine.",
                    "cps",
                    rates("extproc_endpoint_ejections_total", "endpoint"),
                ),
                Panel(
                    "Probes",
                    "Requests that try an ejected endpoint, by result.",
                    "cps",
                    rates("extproc_probes_total", "result", staged="engine errors"),
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
                    gauge("extproc_endpoint_inflight_requests", "endpoint"),
                ),
                Panel(
                    "Requests of others",
                    "Requests of other clients, and of other replicas that do not exchange theirs, on the endpoint.",
                    "short",
                    gauge("extproc_endpoint_foreign_requests", "endpoint", fold="min"),
                ),
                Panel(
                    "Running in the engine",
                    "Requests in the running batch of the engine at the last scrape.",
                    "short",
                    gauge("extproc_endpoint_running_requests", "endpoint", fold="max"),
                ),
                Panel(
                    "Waiting in the engine",
                    "Requests that the engine queues. Above 0 for long: it is saturated.",
                    "short",
                    gauge("extproc_endpoint_waiting_requests", "endpoint", fold="max"),
                ),
                Panel(
                    "KV cache",
                    "Share of KV cache blocks that running requests hold. Near 1 the engine preempts requests.",
                    "percentunit",
                    gauge("extproc_endpoint_kv_cache_usage_ratio", "endpoint", fold="max"),
                    steps=((0.0, "green"), (0.85, "yellow"), (0.95, "red")),
                ),
                FIRST_BYTE_BY_ENDPOINT,
                Panel(
                    "Prompt tokens to compute",
                    "Uncached prompt tokens on the endpoint that are not computed yet, of all clients.",
                    "short",
                    gauge("extproc_endpoint_queued_tokens", "endpoint", fold="max"),
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
                    gauge("extproc_endpoint_models", "endpoint", fold="max"),
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
                    gauge("extproc_prefix_capacity_tokens", "endpoint", fold="max"),
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
                    rates(
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
                    rates("extproc_shadow_seconds_total", "shadow", staged="shadow"),
                ),
            ],
        ),
    ],
)
