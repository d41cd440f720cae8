"""Prometheus families of pools and their endpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from extproc.endpoint import Endpoint
from extproc.pool.snapshot import EndpointSnapshot, Pool
from extproc.telemetry.counters import PoolCounters


class PrefixCacheStats(msgspec.Struct, frozen=True):
    """Prefix cache estimates of one endpoint.

    Attributes:
        predicted_tokens: Prompt tokens predicted to be found there, ever.
        observed_tokens: Prompt tokens its engine found, as far as they were ours.
        capacity_tokens: Prompt tokens in its estimated cache capacity; None while unknown.
    """

    predicted_tokens: float
    observed_tokens: float
    capacity_tokens: int | None


#: What became of the claim of a pool: there is none, it counts, an earlier pool claims some of the
#: same requests, or annotations state one that no rule of `cluster.claims` allows.
ClaimState = Literal["none", "in_force", "overlapped", "refused"]


class PoolView(msgspec.Struct, frozen=True):
    """Values of one pool that the metrics page shows.

    Attributes:
        pool: The snapshot.
        cache: What is believed of an endpoint's prefix cache.
        bytes_per_token: What was learned of tokenizers, by model.
        ejections: Endpoints left out, by cause.
        probes: Requests that tried one again, by what they came to.
        held: Requests that wait, and bytes of their bodies; None where none ever does.
        waits: Requests that waited, by what came of it.
        continuation_ratio: Share of requests that continue an earlier one, and conversations
            expected to continue for each open request; None where it is not estimated.
        claim: What became of its claim.
        addresses_left_out: Addresses from flags, files and DNS beyond the bound of a pool (count).
    """

    pool: Pool
    cache: Callable[[Endpoint], PrefixCacheStats]
    bytes_per_token: Mapping[str, float] = {}
    ejections: Mapping[str, int] = {}
    probes: Mapping[str, int] = {}
    held: tuple[int, int] | None = None
    waits: Mapping[str, int] = {}
    continuation_ratio: tuple[float, float] | None = None
    claim: ClaimState = "none"
    addresses_left_out: int = 0


#: A family of counters: name, help text, labels behind `pool`, and what a pool's counts give it.
_Row = tuple[str, str, tuple[str, ...], Callable[[PoolCounters], Iterable[tuple[list[str], float]]]]

_COUNTERS: tuple[_Row, ...] = (
    (
        "extproc_picks",
        "Requests routed, by endpoint.",
        ("endpoint",),
        lambda tally: [([address], count) for address, count in tally.requests_routed.items()],
    ),
    (
        "extproc_rejections",
        "Requests refused.",
        ("status", "reason"),
        lambda tally: [
            ([str(code), why], count) for (code, why), count in tally.rejections.items()
        ],
    ),
    (
        "extproc_degraded_decisions",
        "Decisions not taken the ordinary way.",
        ("why",),
        lambda tally: [([why], count) for why, count in tally.degraded.items()],
    ),
    (
        "extproc_responses",
        "Answers seen, by status.",
        ("endpoint", "status"),
        lambda tally: [(list(key), count) for key, count in tally.responses.items()],
    ),
    (
        "extproc_unanswered",
        "Routed requests that ended without an answer.",
        ("endpoint",),
        lambda tally: [([address], count) for address, count in tally.without_response.items()],
    ),
    (
        "extproc_prompt_tokens",
        "Estimated prompt tokens routed.",
        (),
        lambda tally: [([], tally.prompt_tokens)],
    ),
    (
        "extproc_matched_tokens",
        "Prompt tokens believed cached on the chosen endpoint.",
        (),
        lambda tally: [([], tally.matched_tokens)],
    ),
    (
        "extproc_usage_tokens",
        "Tokens the engines reported.",
        ("kind",),
        lambda tally: [([kind], count) for kind, count in tally.usage.items()],
    ),
    (
        "extproc_scrapes",
        "Scrapes of engines.",
        ("endpoint", "result"),
        lambda tally: [(list(key), count) for key, count in tally.scrapes.items()],
    ),
    (
        "extproc_models_scrapes",
        "Times endpoints were asked which models they serve.",
        ("endpoint", "result"),
        lambda tally: [(list(key), count) for key, count in tally.model_list_polls.items()],
    ),
    (
        "extproc_model_rewrites",
        "Requests whose model got another name, by whether the body could be edited.",
        ("result",),
        lambda tally: [([result], count) for result, count in tally.rewrites.items()],
    ),
    (
        "extproc_unlisted_models",
        "Requests for models that no endpoint lists, routed or refused.",
        (),
        lambda tally: [([], tally.unknown_models)],
    ),
)

#: A gauge of an endpoint: name, help text, and its value at a time; None is not shown.
_Gauge = tuple[str, str, Callable[[EndpointSnapshot, float], float | None]]

_GAUGES: tuple[_Gauge, ...] = (
    (
        "extproc_endpoint_in_flight",
        "Requests this picker has open.",
        lambda member, _: member.account.own,
    ),
    (
        "extproc_endpoint_foreign",
        "Requests of others at the last scrape.",
        lambda member, _: member.foreign,
    ),
    (
        "extproc_endpoint_up",
        "1 unless its scrapes cannot connect.",
        lambda member, _: float(member.reachable),
    ),
    (
        "extproc_endpoint_ejected",
        "1 while it is left out because it fails or cannot be reached.",
        lambda member, _: float(member.ejected),
    ),
    (
        "extproc_endpoint_load_age_seconds",
        "Age of the last scrape.",
        lambda member, now: now - member.load.at,
    ),
    (
        "extproc_endpoint_models",
        "Models and adapters an endpoint listed; absent while nobody knows.",
        lambda member, _: (
            None
            if member.models is None
            else len(member.models.bases) + len(member.models.adapters)
        ),
    ),
    (
        "extproc_endpoint_queued_tokens",
        "Uncached prompt tokens sent and believed not yet computed.",
        lambda member, now: member.account.queued(now) + member.foreign_tokens,
    ),
    (
        "extproc_endpoint_prefill_seconds_per_token",
        "Learned seconds for each uncached prompt token.",
        lambda member, _: member.rates.prefill_s,
    ),
    (
        "extproc_endpoint_step_seconds",
        "Learned time of an iteration.",
        lambda member, _: member.rates.step_s,
    ),
    (
        "extproc_endpoint_decode_seconds_per_sequence",
        "Learned time that a decoding sequence adds to an iteration.",
        lambda member, _: member.rates.decode_s,
    ),
    (
        "extproc_endpoint_context_seconds_per_token",
        "Learned time that a token of context adds to an iteration.",
        lambda member, _: member.rates.context_s,
    ),
    (
        "extproc_endpoint_adapter_load_seconds",
        "Learned time of an adapter load.",
        lambda member, _: member.rates.adapter_load_s,
    ),
    (
        "extproc_endpoint_output_tokens",
        "Learned tokens of an answer.",
        lambda member, _: member.rates.output_tokens,
    ),
)


def counters(counters: Mapping[str, PoolCounters]) -> Iterator[Metric]:
    """Yields all counter families, with the pool as first label."""
    for name, text, labels, read in _COUNTERS:
        family = CounterMetricFamily(name, text, labels=["pool", *labels])
        for pool, tally in counters.items():
            for values, count in read(tally):
                family.add_metric([pool, *values], count)
        yield family


def endpoints(watched: Mapping[str, PoolView], now: float) -> Iterator[Metric]:
    """Yields the families of endpoint and pool state.

    Args:
        watched: By name of the pool.
        now: Monotonic seconds, for ages.
    """
    for name, text, read in _GAUGES:
        family = GaugeMetricFamily(name, text, labels=["pool", "endpoint"])
        for pool, view in watched.items():
            for member in view.pool.members:
                value = read(member, now)
                if value is not None:
                    family.add_metric([pool, member.endpoint.address], value)
        yield family
    yield from _caches(watched)
    yield from _health(watched)
    yield from _waits(watched)
    yield from _claims(watched)
    yield from _addresses_left_out(watched)
    yield from _conversations(watched)
    ratio = GaugeMetricFamily(
        "extproc_bytes_per_token",
        "Learned bytes of a prompt token, of the models that engines answered for.",
        labels=["pool", "model"],
    )
    for pool, view in watched.items():
        for model, value in view.bytes_per_token.items():
            ratio.add_metric([pool, model], value)
    yield ratio


def _conversations(watched: Mapping[str, PoolView]) -> Iterator[Metric]:
    share = GaugeMetricFamily(
        "extproc_returning_share",
        "Learned share of requests that go on from an earlier one.",
        labels=["pool"],
    )
    away = GaugeMetricFamily(
        "extproc_conversations_away",
        "Learned conversations that will go on and have no request open, for each open request.",
        labels=["pool"],
    )
    for pool, view in watched.items():
        if view.continuation_ratio is not None:
            share.add_metric([pool], view.continuation_ratio[0])
            away.add_metric([pool], view.continuation_ratio[1])
    yield from (share, away)


def _health(watched: Mapping[str, PoolView]) -> Iterator[Metric]:
    ejections = CounterMetricFamily(
        "extproc_ejections",
        "Times an endpoint was left out, by cause.",
        labels=["pool", "cause"],
    )
    probes = CounterMetricFamily(
        "extproc_probes",
        "Requests that tried an endpoint again, by what they came to.",
        labels=["pool", "result"],
    )
    for pool, view in watched.items():
        for cause, count in view.ejections.items():
            ejections.add_metric([pool, cause], count)
        for result, count in view.probes.items():
            probes.add_metric([pool, result], count)
    yield from (ejections, probes)


def _claims(watched: Mapping[str, PoolView]) -> Iterator[Metric]:
    claims = GaugeMetricFamily(
        "extproc_pool_claim",
        "1 for what became of the claim of a pool: none, in_force, overlapped or refused.",
        labels=["pool", "state"],
    )
    for pool, view in watched.items():
        claims.add_metric([pool, view.claim], 1)
    yield claims


def _addresses_left_out(watched: Mapping[str, PoolView]) -> Iterator[Metric]:
    left_out = GaugeMetricFamily(
        "extproc_discovery_addresses_left_out",
        "Addresses from flags, files and DNS beyond those that a pool may have.",
        labels=["pool"],
    )
    for pool, view in watched.items():
        left_out.add_metric([pool], view.addresses_left_out)
    yield left_out


def _waits(watched: Mapping[str, PoolView]) -> Iterator[Metric]:
    requests = GaugeMetricFamily(
        "extproc_held_requests", "Requests that wait for capacity.", labels=["pool"]
    )
    size = GaugeMetricFamily("extproc_held_bytes", "Bytes of their bodies.", labels=["pool"])
    waits = CounterMetricFamily(
        "extproc_waits", "Requests that waited, by what came of it.", labels=["pool", "end"]
    )
    for pool, view in watched.items():
        if view.held is not None:
            requests.add_metric([pool], view.held[0])
            size.add_metric([pool], view.held[1])
        for end, count in view.waits.items():
            waits.add_metric([pool, end], count)
    yield from (requests, size, waits)


def _caches(watched: Mapping[str, PoolView]) -> Iterator[Metric]:
    labels = ["pool", "endpoint"]
    predicted = CounterMetricFamily(
        "extproc_prefix_predicted_tokens",
        "Prompt tokens predicted to be cached, of requests that were looked up.",
        labels=labels,
    )
    observed = CounterMetricFamily(
        "extproc_prefix_observed_tokens", "Of these, found by the engine.", labels=labels
    )
    capacity = GaugeMetricFamily(
        "extproc_prefix_capacity_tokens",
        "Prompt tokens an endpoint is believed to keep.",
        labels=labels,
    )
    for pool, view in watched.items():
        for member in view.pool.members:
            key = [pool, member.endpoint.address]
            cache = view.cache(member.endpoint)
            predicted.add_metric(key, cache.predicted_tokens)
            observed.add_metric(key, cache.observed_tokens)
            if cache.capacity_tokens is not None:
                capacity.add_metric(key, cache.capacity_tokens)
    yield from (predicted, observed, capacity)
