"""Recording rules of Prometheus, with their table of the documentation."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class RecordingRule(msgspec.Struct, frozen=True):
    """A series that Prometheus computes.

    Attributes:
        record: Its name: level, metric and operations, separated by colons.
        meaning: One sentence for the documentation.
        expr: PromQL.
    """

    record: str
    meaning: str
    expr: str


#: `> 0` leaves out the NaN quantile of an idle pool, which would make each mean over it NaN.
RECORDING_RULES: Sequence[RecordingRule] = (
    RecordingRule(
        "pool:extproc_requests:rate5m",
        "Requests per second that ended, routed and rejected.",
        "sum by (namespace, pool) (rate(extproc_requests_total[5m]))",
    ),
    RecordingRule(
        "pool:extproc_failed_requests:ratio_rate5m",
        "Share of requests that ended with 429 or 5xx, of an engine or of extproc.",
        'sum by (namespace, pool) (rate(extproc_requests_total{status=~"429|5.."}[5m]))\n'
        "  / (pool:extproc_requests:rate5m > 0)",
    ),
    RecordingRule(
        "pool:extproc_request_ttft_seconds:p95_rate5m",
        "95th percentile of the time from the start of a request to its first token, of streamed answers.",
        'histogram_quantile(0.95, sum by (le, namespace, pool) (rate(extproc_request_ttft_seconds_bucket{streaming="true"}[5m]))) > 0',
    ),
    RecordingRule(
        "pool:extproc_flow_control_request_queue_duration_seconds:p95_rate5m",
        "95th percentile of the time in the queue.",
        "histogram_quantile(0.95, sum by (le, namespace, pool) (rate(extproc_flow_control_request_queue_duration_seconds_bucket[5m]))) > 0",
    ),
    RecordingRule(
        "pool:extproc_matched_tokens:ratio_rate5m",
        "Share of prompt tokens predicted to be cached on the chosen endpoint.",
        "sum by (namespace, pool) (rate(extproc_matched_tokens_total[5m]))\n"
        "  / (sum by (namespace, pool) (rate(extproc_prompt_tokens_total[5m])) > 0)",
    ),
    RecordingRule(
        "endpoint:extproc_prefix_observed_tokens:ratio_rate5m",
        "Tokens that an engine found in its prefix cache, by its own counters, over those predicted; where 20 per second are.",
        "sum by (namespace, pool, endpoint) (rate(extproc_prefix_observed_tokens_total[5m]))\n"
        "  / (sum by (namespace, pool, endpoint)"
        " (rate(extproc_prefix_predicted_tokens_total[5m])) > 20)",
    ),
    RecordingRule(
        "endpoint:extproc_endpoint_response_headers_seconds:mean_rate5m",
        "Mean time from the choice of the endpoint to response headers; where more than one a minute came.",
        "sum by (namespace, pool, endpoint) (rate(extproc_endpoint_response_headers_seconds_sum[5m]))\n"
        "  / (sum by (namespace, pool, endpoint) (rate(extproc_endpoint_response_headers_seconds_count[5m])) > 1 / 60)",
    ),
    RecordingRule(
        "endpoint:extproc_endpoint_response_headers_seconds:ratio_rate5m",
        "The same over the quicker quarter of its pool; 1 is usual.",
        "endpoint:extproc_endpoint_response_headers_seconds:mean_rate5m\n"
        "  / on (namespace, pool) group_left () quantile by (namespace, pool)"
        " (0.25, endpoint:extproc_endpoint_response_headers_seconds:mean_rate5m)",
    ),
)


def records_block() -> str:
    """The table of recording rules of the documentation."""
    rows = ["| series | meaning |", "|---|---|"]
    rows += [f"| `{rule.record}` | {rule.meaning} |" for rule in RECORDING_RULES]
    return "\n".join(rows)
