"""The reference of metrics: name, type, labels, buckets and meaning, from the exposition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import HistogramMetricFamily, Metric

from extproc.supervision import LOOPS
from extproc.telemetry import exposition, pool_metrics
from extproc.telemetry.counters import ProcessCounters
from tests.docs import reference
from tests.support.pool_fixture import PoolFixture

#: Values of labels, where there are few: `family/label`.
VALUES = {
    "extproc_ejections/cause": ("errors", "hung", "passed-over", "unreachable"),
    "extproc_loop_degraded/loop": LOOPS,
    "extproc_loop_failures/loop": LOOPS,
    "extproc_pool_match_state/state": get_args(pool_metrics.MatchState),
    "extproc_probes/result": ("ok", "failed", "unclear"),
    "extproc_scaling_replicas/state": ("spec", "available", "starting"),
    "extproc_streams/result": ("ok", "cancelled", "protocol", "error"),
    "extproc_flow_control_requests/outcome": (
        "dispatched",
        "expired",
        "displaced",
        "cancelled",
        "rejected",
        "failed",
        "shutdown",
    ),
}


def families() -> list[Metric]:
    """All families there can be, with one endpoint in one pool."""
    pool_fixture = PoolFixture({"10.0.0.1:8000": None})
    counters = ProcessCounters()
    counters.for_pool("")
    page = exposition.Exposition(
        counters,
        lambda: {
            "": pool_metrics.PoolView(
                pool_fixture.store.pool, lambda _: pool_metrics.PrefixCacheStats(5.0, 4.0, 100)
            )
        },
        clock=lambda: 1.0,
        gauges={name: lambda: 0.0 for name in exposition.PROCESS_GAUGES},
        about={"pool": "", "profile": ""},
    )
    return sorted(page.collect(), key=lambda family: family.name)


def series_names() -> set[str]:
    """The names that a query may use."""
    names = set()
    for family in families():
        names |= {
            "counter": {f"{family.name}_total"},
            "histogram": {f"{family.name}_{part}" for part in ("bucket", "sum", "count")},
            "info": {f"{family.name}_info"},
        }.get(family.type, {family.name})
    return names


def block() -> str:
    """One row for each family."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in families():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        rows.append(
            f"| `{family.name}{suffix}` | {family.type} | {_labels(family)} "
            f"| {reference.cell(family.documentation)}{_buckets(family)} |"
        )
    return "\n".join(rows)


def label_names(family: Metric) -> list[str]:
    """The labels of a family; of one without a sample, as it declares them."""
    names = [name for sample in family.samples for name in sample.labels if name != "le"]
    return list(dict.fromkeys(names)) or [*getattr(family, "_labelnames", ())]


def _labels(family: Metric) -> str:
    return ", ".join(_label(family, name) for name in label_names(family))


def _label(family: Metric, name: str) -> str:
    values = VALUES.get(f"{family.name}/{name}", ())
    return f"`{name}`" + (f" ({', '.join(f'`{value}`' for value in values)})" if values else "")


def _buckets(family: Metric) -> str:
    if not isinstance(family, HistogramMetricFamily):
        return ""
    return f" Buckets: {', '.join(_bounds(family))}."


def _bounds(family: Metric) -> Iterator[str]:
    for sample in family.samples:
        if sample.name.endswith("_bucket") and sample.labels["le"] != "+Inf":
            yield f"{float(sample.labels['le']):g}"
