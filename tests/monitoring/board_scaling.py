"""The dashboard "Scaling and queue": what waits, and what the autoscaler does."""

from __future__ import annotations

from tests.monitoring.board_panels import (
    COUNT_BAD,
    COUNT_LOOK,
    QUEUE_SIZE,
    QUEUE_WAIT,
    REJECTIONS,
    SERVING,
    gauge,
    rates,
)
from tests.monitoring.grafana import Board, DashboardRow, Panel, Query

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
                QUEUE_SIZE,
                QUEUE_WAIT,
                Panel(
                    "Departures from the queue",
                    "Queued requests that were dispatched, expired, displaced by others, or left.",
                    "reqps",
                    rates(
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
                    gauge("extproc_flow_control_queue_bytes", "pool", staged="flow control"),
                ),
                REJECTIONS,
                Panel(
                    "Requests in flight per endpoint",
                    "Requests that run, over endpoints that serve: reachable and not ejected.",
                    "short",
                    [
                        Query(
                            "sum by (namespace, pool) (extproc_endpoint_inflight_requests{<pool>})"
                            f" / ({SERVING} > 0)",
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
                    steps=COUNT_LOOK,
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
                    rates("extproc_scaling_changes_total", "pool", "reason", staged="autoscaling"),
                ),
                Panel(
                    "Failures to scale",
                    "Failures to read or change the target per second, and rejected annotations.",
                    "cps",
                    [
                        *rates("extproc_scaling_failures_total", "pool", staged="autoscaling"),
                        Query(
                            "sum by (pool)"
                            " (rate(extproc_scaling_invalid_annotations_total{<pool>}[<rate>]))",
                            "{{pool}} annotations",
                            "autoscaling",
                        ),
                    ],
                    steps=COUNT_BAD,
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
