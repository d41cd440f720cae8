"""Schema of the pool state that /debug/pool shows and `extproc explain` reads back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from extproc.endpoint import NO_LABELS
from extproc.pool import plausibility
from extproc.pool.endpoint_health import HealthState
from extproc.pool.snapshot import EndpointSnapshot, Pool

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
Amount = Annotated[float, msgspec.Meta(ge=0)]
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
        in_flight: Open requests of this replica on it (count).
        prompt_tokens: Estimated prompt tokens of these.
        queued_tokens: Uncached prompt tokens that are probably not computed yet.
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
