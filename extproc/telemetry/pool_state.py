"""State of a pool: as /debug/pool shows it and `extproc explain` reads it back, and for metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Literal

import msgspec

from extproc.endpoint import NO_LABELS, Endpoint
from extproc.pool import plausibility
from extproc.pool.endpoint_health import HealthState
from extproc.pool.snapshot import EndpointSnapshot, Pool
from extproc.request import MediaKind
from extproc.scheduling.load_bounds import SaturationRules
from extproc.scheduling.shadow import ShadowScheduler
from extproc.telemetry.kv_event_metrics import KvEventStats

EndpointHealth = Literal["healthy", "suspect", "ejected", "probing", "down"]

_STATES: Mapping[HealthState, EndpointHealth] = {
    HealthState.HEALTHY: "healthy",
    HealthState.SUSPECT: "suspect",
    HealthState.EJECTED: "ejected",
    HealthState.PROBING: "probing",
    HealthState.DOWN: "down",
}

Count = Annotated[int, msgspec.Meta(ge=0)]
Requests = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]  # not infinite
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class EndpointState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """State of one endpoint; None marks an unknown value.

    Attributes:
        address: `ip:port`.
        name: Display name.
        labels: Labels from discovery.
        incarnation: Number of the incarnation of the address.
        failures: Consecutive connection failures of the scraper (count).
        failure: Reason why its last scrape failed; empty when it did not.
        health: `healthy`, `suspect`, `ejected`, `probing` or `down`.
        cause: Reason of its ejection; empty when it is not ejected.
        out_s: Seconds since it was left out; None when it is not.
        again_s: Seconds until a request may try it; None where only a scrape brings it back.
        ejections: Times in a row (count).
        distrusted: Reason to ignore its page: `frozen` or `understated`; empty for
            none.
        in_flight: Open requests on it of this replica, and of others that share theirs (count).
        prompt_tokens: Estimated prompt tokens of these.
        queued_tokens: Of these, uncached ones that are probably not computed yet.
        foreign: Requests of others at the last scrape (count); None when it is to be worked out of
            the others.
        age_s: Seconds since the last scrape; None when there was none. A state written by hand
            needs none: values without an age are fresh.
        engine: Type of the engine.
        waiting: Requests queued in the engine (count).
        running: Requests in its batch (count).
        kv_usage: Share of KV blocks held by live requests, 0..1.
        extra: Values of `scrape.extra_metrics` by name; None when the page had none.
        adapters: LoRA adapters in its batch.
        waiting_adapters: LoRA adapters that wait.
        adapter_slots: Adapters that fit.
        models: Base models it serves, as it listed them; None when unknown.
        model_adapters: Adapters it listed.
        matched_tokens: Leading prompt tokens of the request in question predicted as cached there;
            only read, because a pool knows nothing of a request.
    """

    address: Annotated[str, msgspec.Meta(min_length=1)]
    name: str = ""
    labels: Mapping[str, str] = {}
    incarnation: Count = 0
    failures: Count = 0
    failure: str = ""
    health: EndpointHealth = "healthy"
    cause: str = ""
    out_s: Amount | None = None
    again_s: Amount | None = None
    ejections: Count = 0
    distrusted: str = ""
    in_flight: Requests = 0
    prompt_tokens: Count = 0
    queued_tokens: Count = 0
    foreign: Amount | None = None
    age_s: Amount | None = None
    engine: str = ""
    waiting: Amount | None = None
    running: Amount | None = None
    kv_usage: Share | None = None
    extra: Mapping[str, float] | None = None
    adapters: tuple[str, ...] | None = None
    waiting_adapters: tuple[str, ...] | None = None
    adapter_slots: Count | None = None
    models: tuple[str, ...] | None = None
    model_adapters: tuple[str, ...] | None = None
    matched_tokens: Count = 0


class PoolState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All endpoints of a pool at one moment.

    Attributes:
        endpoints: Endpoints in the order of the pool.
    """

    endpoints: tuple[EndpointState, ...] = ()


def describe_pool_state(pool: Pool, now: float) -> PoolState:
    """Converts a pool snapshot."""
    return PoolState(endpoints=tuple(describe_endpoint(member, now) for member in pool.members))


def render_pools(pools: Mapping[str, Pool], now: float) -> Iterator[bytes]:
    """Renders pools by name as a JSON object for /debug/pools, in pieces of one endpoint each."""
    separator = b"{"
    for name, pool in pools.items():
        yield separator + msgspec.json.encode(name) + b": "
        yield from render_pool(pool, now)
        separator = b", "
    yield b"}" if pools else b"{}"


def render_pool(pool: Pool, now: float) -> Iterator[bytes]:
    """Renders a pool for /debug/pool and `extproc explain --state`, in pieces of one endpoint each.

    Unknown values are omitted, and so is `matched_tokens`, which belongs to a request.
    """
    separator = b""
    yield b'{"endpoints": ['
    for member in pool.members:
        fields = msgspec.structs.asdict(describe_endpoint(member, now))
        del fields["matched_tokens"]
        known = {name: value for name, value in fields.items() if value is not None}
        yield separator + msgspec.json.encode(known)
        separator = b", "
    yield b"]}"


def describe_endpoint(member: EndpointSnapshot, now: float) -> EndpointState:
    """Converts one endpoint of a pool snapshot."""
    endpoint, load, account, models = member.endpoint, member.load, member.account, member.models
    scraped = math.isfinite(load.at)
    known = member.condition
    return EndpointState(
        address=endpoint.address,
        name=endpoint.name,
        labels=dict(endpoint.labels) if endpoint.labels is not NO_LABELS else {},
        incarnation=endpoint.incarnation,
        failures=member.failures,
        failure=member.failure,
        health=_STATES[known.state],
        cause=known.cause,
        out_s=max(0.0, now - known.since) if member.is_ejected else None,
        again_s=max(0.0, known.until - now) if math.isfinite(known.until) else None,
        ejections=known.times,
        in_flight=account.in_flight,
        prompt_tokens=account.prompt_tokens,
        queued_tokens=round(account.queued(now)),
        distrusted=plausibility.distrust_reason(member.flaws),
        foreign=member.foreign if scraped else None,
        age_s=max(0.0, now - load.at) if scraped else None,
        engine=load.engine,
        waiting=load.waiting,
        running=load.running,
        kv_usage=load.kv_usage,
        extra=dict(load.extra) or None,
        adapters=_sorted(load.adapters),
        waiting_adapters=_sorted(load.waiting_adapters),
        adapter_slots=load.adapter_slots,
        models=None if models is None else _sorted(models.bases),
        model_adapters=None if models is None else _sorted(models.adapters),
    )


def _sorted(names: frozenset[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(sorted(names))


class PrefixCacheStats(msgspec.Struct, frozen=True):
    """Prefix cache estimates of one endpoint.

    Attributes:
        predicted_tokens: Prompt tokens predicted to be cached, of requests that scraped counters of
            the engine's prefix cache show as looked up.
        observed_tokens: Prompt tokens of these that the counters show as found.
        capacity_tokens: Estimated capacity of the cache in tokens; None while unknown.
    """

    predicted_tokens: float
    observed_tokens: float
    capacity_tokens: int | None


#: State of the match in the annotations of an InferencePool: there is none, it is in force, an
#: earlier pool matches some of the same requests, or no rule of `cluster.match_rules` allows it.
MatchState = Literal["none", "in_force", "overlapped", "rejected"]


class PoolView(msgspec.Struct, frozen=True):
    """Values of one pool that the metrics page shows.

    Attributes:
        bytes_per_token: Learned prompt bytes per token, by model.
        ejections: Ejections of endpoints, by cause.
        probes: Probe requests to ejected endpoints, by result.
        queue: Queued requests, and bytes of their bodies; None without flow control.
        queue_outcomes: Requests that left the queue, by outcome.
        evictions: Requests evicted by priority of the one that waited, and by outcome; see `Evictor`.
        conversations: Ratio of requests that continue a conversation, and idle conversations
            expected to continue per in-flight request; None where they are not estimated.
        dropped_addresses: Addresses from flags, files and DNS beyond the limit of a pool (count).
        count_ejections: Returns the ejections of an engine by `Endpoint.engine` (count).
        queue_capacity: Requests that may be queued (count); 0 without flow control.
        queue_capacity_bytes: Bytes of their bodies; 0 without flow control.
        find_queue_bounds: Returns the bounds that a priority has of its own: requests (count), and
            bytes of their bodies; None for none.
        stale_after_s: Age at which the load of an endpoint counts as unknown (seconds).
        saturation: Detectors of the configuration; None where it names none.
        shadow: Second profile that looks at routed requests; None without one.
        kv_events: Counts of KV events; None without subscriptions.
        media_factors: Learned ratio of observed to estimated tokens of media, by model and kind.
    """

    pool: Pool
    cache: Callable[[Endpoint], PrefixCacheStats]
    bytes_per_token: Mapping[str, float] = {}
    ejections: Mapping[str, int] = {}
    probes: Mapping[str, int] = {}
    queue: tuple[int, int] | None = None
    queue_outcomes: Mapping[str, int] = {}
    evictions: tuple[Mapping[int, int], Mapping[str, int]] = ({}, {})
    conversations: tuple[float, float] | None = None
    match_state: MatchState = "none"
    dropped_addresses: int = 0
    count_ejections: Callable[[int], int] = lambda _: 0
    queue_capacity: int = 0
    queue_capacity_bytes: int = 0
    find_queue_bounds: Callable[[int], tuple[int | None, int | None]] = lambda _: (None, None)
    stale_after_s: float = 1e9
    saturation: SaturationRules | None = None
    shadow: ShadowScheduler | None = None
    kv_events: KvEventStats | None = None
    media_factors: Mapping[tuple[str, MediaKind], float] = {}

    def is_stale(self, member: EndpointSnapshot, now: float) -> bool:
        """True if the load of an endpoint was never scraped, or is too old."""
        return now - member.load.at > self.stale_after_s
