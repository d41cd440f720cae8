"""Queries and panels that several dashboards share."""

from __future__ import annotations

from tests.monitoring.grafana import Panel, Query

#: Colors by bound: fine, look, act.
RATIO_BAD = ((0.0, "green"), (0.01, "yellow"), (0.05, "red"))
COUNT_BAD = ((0.0, "green"), (1.0, "red"))
COUNT_LOOK = ((0.0, "green"), (1.0, "yellow"))
HITS = (
    "sum by (pool) (rate(extproc_matched_tokens_total{<pool>}[<rate>]))"
    " / (sum by (pool) (rate(extproc_prompt_tokens_total{<pool>}[<rate>])) > 0)"
)

#: Only streams have a first token that can be seen: other answers come when all tokens are there.
OF_STREAMS = '<model>,streaming="true"'
STREAMED = "Of streamed answers only; empty where none is streamed: see Duration."
#: Endpoints of a pool that requests are sent to.
SERVING = (
    "sum by (namespace, pool) (max by (namespace, pool, endpoint)"
    " (extproc_endpoint_up{<pool>} * (1 - extproc_endpoint_ejected{<pool>})))"
)
FIRST_BYTE = (
    "(sum by (namespace, pool, endpoint)"
    " (rate(extproc_endpoint_response_headers_seconds_sum{<pool>}[<rate>]))"
    " / (sum by (namespace, pool, endpoint)"
    " (rate(extproc_endpoint_response_headers_seconds_count{<pool>}[<rate>])) > 0))"
)


def quantiles(
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


def rates(metric: str, *labels: str, staged: str = "", matcher: str = "<pool>") -> list[Query]:
    """Increase per second of a counter, by labels."""
    by = ", ".join(labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    return [Query(f"sum by ({by}) (rate({metric}{{{matcher}}}[<rate>]))", legend, staged)]


def gauge(metric: str, *labels: str, fold: str = "sum", staged: str = "") -> list[Query]:
    """A gauge over the replicas of extproc, by labels."""
    by = ", ".join(labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    return [Query(f"{fold} by ({by}) ({metric}{{<pool>}})", legend, staged)]


EJECTED = Panel(
    "Ejected",
    "1 while an endpoint gets no requests because it fails, hangs or cannot be reached.",
    "short",
    gauge("extproc_endpoint_ejected", "pool", "endpoint", fold="max"),
    kind="state-timeline",
    width=12,
    steps=COUNT_BAD,
)
REJECTIONS = Panel(
    "Rejections by cause",
    "Requests that extproc refuses, by HTTP status and cause. None is normal without overload.",
    "reqps",
    rates("extproc_rejection_causes_total", "pool", "status", "cause", staged="no endpoint"),
    stacked=True,
)
QUEUE_SIZE = Panel(
    "Requests in the queue",
    "Requests that wait in extproc for an engine. Above 0 for minutes: engines are missing.",
    "short",
    gauge("extproc_flow_control_queue_size", "pool", staged="flow control"),
)
QUEUE_WAIT = Panel(
    "Time in the queue",
    "Seconds that dispatched requests waited in extproc, by priority.",
    "s",
    quantiles(
        "extproc_flow_control_request_queue_duration_seconds",
        0.5,
        0.95,
        by="priority",
        staged="requests wait",
    ),
)
HIT_RATIO = Panel(
    "Prompt tokens in the cache",
    "Share of prompt tokens that are predicted to be cached on the chosen endpoint."
    " A fall means engines that restarted, or other prompts.",
    "percentunit",
    [Query(HITS, "{{pool}}")],
)
TOKENS = Panel(
    "Tokens by kind",
    "Tokens per second that engines reported: prompt, of these cached, and completion."
    " Only where the data plane shows responses.",
    "short",
    rates(
        "extproc_usage_tokens_total",
        "pool",
        "kind",
        staged="bodies of responses",
        matcher="<model>",
    ),
)
FIRST_BYTE_BY_ENDPOINT = Panel(
    "First byte by endpoint",
    "Mean time from the choice of the endpoint to response headers."
    " Streams of most engines begin with the first token, other responses when they are complete.",
    "s",
    [Query(FIRST_BYTE, "{{endpoint}}")],
)
