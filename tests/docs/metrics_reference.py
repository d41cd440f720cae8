"""The reference of metrics: name, type, labels, buckets and meaning, from the exposition."""

from __future__ import annotations

from typing import get_args

from extproc.decision import MatchSource
from extproc.scheduling import shadow
from extproc.scrape.kv_event_subscription import BatchResult, SubscriptionState
from extproc.scrape.prompt_renderer import PromptResult
from extproc.supervision import LOOPS
from extproc.telemetry import exposition, pool_state
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.metric_family import MetricFamily
from extproc.telemetry.request_series import TOKEN_KINDS, UNPARSED, Timing
from tests.docs import reference
from tests.support.pool_fixture import PoolFixture

#: Values of labels, where there are few: `family/label`.
VALUES = {
    "extproc_disaggregation_decisions/type": (
        *("decode-only", "prefill-decode", "encode-decode", "encode-prefill-decode"),
    ),
    "extproc_disaggregation_kept_stages/stage": ("prefill", "encode"),
    "extproc_disaggregation_routed_stages/stage": ("prefill", "encode"),
    "extproc_disaggregation_kept_stages/reason": (
        *("disabled", "short", "cached", "no-media"),
        *("no-endpoint", "same-endpoint", "other-api", "slower"),
    ),
    "extproc_ejections/cause": ("errors", "hung", "passed-over", "unreachable"),
    "extproc_kv_event_batches/result": get_args(BatchResult),
    "extproc_kv_event_subscription_state/state": get_args(SubscriptionState),
    "extproc_loop_degraded/loop": LOOPS,
    "extproc_loop_failures/loop": LOOPS,
    "extproc_mapped_prompts/result": get_args(PromptResult),
    "extproc_match_source_tokens/kind": ("predicted", "observed"),
    "extproc_match_source_tokens/source": get_args(MatchSource),
    "extproc_pool_match_state/state": get_args(pool_state.MatchState),
    "extproc_probes/result": ("ok", "failed", "unclear"),
    "extproc_scaling_replicas/state": ("spec", "available", "starting"),
    "extproc_recorded_rows/result": ("recorded", "dropped", "failed"),
    "extproc_shadow_decisions/result": get_args(shadow.ShadowResult),
    "extproc_shadow_expected_seconds/choice": get_args(shadow.ShadowChoice),
    "extproc_shadow_expected_seconds/judge": get_args(shadow.Judge),
    "extproc_streams/result": ("ok", "cancelled", "protocol", "error"),
    "extproc_trace_spans/result": ("exported", "failed", "dropped"),
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


def families(*, has_llmd_names: bool = False) -> list[MetricFamily]:
    """All families there can be, with one endpoint in one pool."""
    pool_fixture = PoolFixture({"10.0.0.1:8000": None})
    counters = ProcessCounters(has_llmd_names=has_llmd_names)
    pool = counters.for_pool("")
    pool.record_queued(0.0, priority=0)
    pool.record_headers("10.0.0.1:8000", [0.1])
    series = pool.series.find(UNPARSED, is_served=True)
    series.record("200", [0.1])
    for name in (*get_args(Timing), *TOKEN_KINDS):
        series.record(name, [0.1])
    page = exposition.Exposition(
        counters,
        lambda: {
            "": pool_state.PoolView(
                pool_fixture.store.pool, lambda _: pool_state.PrefixCacheStats(5.0, 4.0, 100)
            )
        },
        clock=lambda: 1.0,
        gauges={name: lambda: 0.0 for name in exposition.PROCESS_GAUGES},
        about=lambda: {"pool": "", "profile": ""},
    )
    return sorted(page.collect(), key=lambda family: family.name)


def series_names() -> set[str]:
    """The names that a query may use."""
    return {name for family in families() for name in family.sample_names}


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


def _labels(family: MetricFamily) -> str:
    return ", ".join(_label(family, name) for name in family.labels)


def _label(family: MetricFamily, name: str) -> str:
    values = VALUES.get(f"{family.name}/{name}", ())
    return f"`{name}`" + (f" ({', '.join(f'`{value}`' for value in values)})" if values else "")


def _buckets(family: MetricFamily) -> str:
    if family.type != "histogram":
        return ""
    _, histogram = family.histograms[0]
    return f" Buckets: {', '.join(f'{bound:g}' for bound in histogram.bounds)}."
