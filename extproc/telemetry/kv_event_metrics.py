"""Prometheus families of KV events: subscriptions, blocks, prompts, predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from extproc.endpoint import Endpoint
from extproc.telemetry.metric_family import MetricFamily


class KvEventStats(msgspec.Struct, frozen=True):
    """Counts of KV events of a pool.

    Attributes:
        batches: Batches by result.
        prompts: Prompts that were to be mapped, by result.
        waits: Requests that waited for the tokens of their prompts, by result.
        usage_tokens: Cached prompt tokens by source of the prediction, predicted and observed.
        states: Address, rank and state of each subscription.
        blocks: Address, rank and blocks on the device of each.
        lower_blocks: Address, rank, blocks in lower tiers, and the weight of those in the memory of the
            host, of each.
        dropped_blocks: Stored blocks that were not taken in (count).
        received: Messages that were received by each subscription to an endpoint.
        refused_connections: Connections to the bound port that were not taken for those of an engine
            (count).
    """

    batches: Mapping[Any, int]
    prompts: Mapping[Any, int]
    waits: Mapping[Any, int]
    usage_tokens: Mapping[Any, int]
    states: Sequence[tuple[str, int, str]]
    blocks: Sequence[tuple[str, int, int]]
    lower_blocks: Sequence[tuple[str, int, int, float]]
    dropped_blocks: int
    refused_connections: int = 0
    received: Sequence[tuple[Endpoint, int]] = ()


def kv_event_families(stats: Mapping[str, KvEventStats]) -> Iterator[MetricFamily]:
    """Yield the families of pools that subscribe to KV events, by name of the pool."""
    rank_labels = ("pool", "endpoint", "rank")
    yield MetricFamily(
        "gauge",
        "extproc_kv_event_subscription_state",
        "State of the subscription to an engine, as a label; always 1. Only with `kv_events`.",
        (*rank_labels, "state"),
        [
            ((pool, address, str(rank), state), 1)
            for pool, counts in stats.items()
            for address, rank, state in counts.states
        ],
    )
    yield MetricFamily(
        "gauge",
        "extproc_kv_event_blocks",
        "Blocks on the device of an engine, by its events. Only with `kv_events`.",
        rank_labels,
        [
            ((pool, address, str(rank)), held)
            for pool, counts in stats.items()
            for address, rank, held in counts.blocks
        ],
    )
    yield from _lower_families(stats)
    yield MetricFamily(
        "counter",
        "extproc_kv_event_batches",
        "Batches of KV events, by result. Only with `kv_events`.",
        ("pool", "result"),
        [
            ((pool, result), count)
            for pool, counts in stats.items()
            for result, count in counts.batches.items()
        ],
    )
    yield MetricFamily(
        "gauge",
        "extproc_kv_event_dropped_blocks",
        "Stored blocks of the engines in the pool that were not taken in: their parents are "
        "unknown, or there are too many. Only with `kv_events`.",
        ("pool",),
        [((pool,), counts.dropped_blocks) for pool, counts in stats.items()],
    )
    yield MetricFamily(
        "counter",
        "extproc_kv_event_refused_connections",
        "Connections that were closed at `kv_events.bind`: no endpoint has their address, there were "
        "too many from it, or they did not keep to the protocol. Only with `kv_events`.",
        ("pool",),
        [((pool,), counts.refused_connections) for pool, counts in stats.items()],
    )
    yield from _prompt_families(stats)


def _lower_families(stats: Mapping[str, KvEventStats]) -> Iterator[MetricFamily]:
    labels = ("pool", "endpoint", "rank")
    known = [
        ((pool, address, str(rank)), held, weight)
        for pool, counts in stats.items()
        for address, rank, held, weight in counts.lower_blocks
    ]
    yield MetricFamily(
        "gauge",
        "extproc_kv_event_lower_blocks",
        "Blocks of an engine in the memory of its host or in storage, by its events. Only with "
        "`kv_events`.",
        labels,
        [(values, held) for values, held, _ in known],
    )
    yield MetricFamily(
        "gauge",
        "extproc_kv_event_cpu_weight",
        "Share of computing a token that an engine saves by loading it from the memory of its host: "
        "learned, or `kv_events.cpu_weight`. Only with `kv_events`.",
        labels,
        [(values, weight) for values, _, weight in known],
    )


def _prompt_families(stats: Mapping[str, KvEventStats]) -> Iterator[MetricFamily]:
    yield MetricFamily(
        "counter",
        "extproc_render_waits",
        "Requests that waited for the tokens of their prompts before the choice, by what ended the "
        "wait. Only with `kv_events.render_budget_ms`.",
        ("pool", "result"),
        [
            ((pool, result), count)
            for pool, counts in stats.items()
            for result, count in counts.waits.items()
        ],
    )
    yield MetricFamily(
        "counter",
        "extproc_mapped_prompts",
        "Prompts that engines were asked to render after the choice of the endpoint, by result. "
        "Only with `kv_events`.",
        ("pool", "result"),
        [
            ((pool, result), count)
            for pool, counts in stats.items()
            for result, count in counts.prompts.items()
        ],
    )
    yield MetricFamily(
        "counter",
        "extproc_match_source_tokens",
        "Cached prompt tokens as predicted and as engines reported, by source of the prediction. "
        "Only with `kv_events`.",
        ("pool", "source", "kind"),
        [
            ((pool, source, kind), count)
            for pool, counts in stats.items()
            for (source, kind), count in counts.usage_tokens.items()
        ],
    )
