"""Offline decisions: restores a pool from the JSON of `/debug/pool`."""

from __future__ import annotations

from bisect import bisect_right

from extproc.config import factory
from extproc.config.settings import Settings
from extproc.decision import Decision, Outcome
from extproc.endpoint import NO_EXTRA, Endpoint, Load, ServedModels
from extproc.errors import ConfigError
from extproc.pool.endpoint_health import RequestOutcome
from extproc.pool.store import PoolStore, ScrapeToken
from extproc.prefix_cache import cache_model
from extproc.request import HttpRequest
from extproc.telemetry.pool_state import EndpointState, PoolState

#: The moment of the decision; only differences to it mean anything.
_NOW = 1_000_000.0


def decide(settings: Settings, pool: PoolState, raw: HttpRequest, *, where: str) -> Outcome:
    """Decide a request offline, as a server with these settings and this pool would.

    Args:
        settings: Of the server.
        pool: What it would know.
        where: The state's file, for errors.

    Raises:
        ConfigError: An address stands twice in the state, or the settings have no profile.
    """
    first = _restore_pool(settings, pool, where=where)
    outcome = first.director.route(raw, _NOW)
    if not isinstance(outcome, Decision) or not outcome.block_hashes:
        return outcome
    # Beliefs about this prompt are blocks, and what its blocks are the first run tells. The
    # second one starts anew, since round robin and the like have moved on.
    parts = _restore_pool(settings, pool, where=where)
    tokens = settings.prefix.schedule.tokens
    for known, member in zip(pool.endpoints, parts.store.pool.members, strict=True):
        depth = bisect_right(tokens, known.matched_tokens) - 1
        parts.index.record(cache_model.index_key(member.endpoint), outcome.block_hashes[:depth])
    return parts.director.route(raw, _NOW)


def _restore_pool(settings: Settings, pool: PoolState, *, where: str) -> factory.PoolParts:
    parts = factory.build(settings)
    endpoints = [
        Endpoint(known.address, name=known.name, labels=known.labels) for known in pool.endpoints
    ]
    parts.store.set_endpoints(endpoints, _NOW)
    if len(parts.store.pool.members) < len(endpoints):
        raise ConfigError(
            where, wanted="every address once", got="one of them twice", fix="remove one"
        )
    for known in pool.endpoints:
        _charge(parts.store, known)
    return parts


def _charge(fleet: PoolStore, known: EndpointState) -> None:
    """Restore load, in-flight requests and failures of an endpoint from its state."""
    member = fleet.pool.find(known.address)
    if member is None:
        return
    load = _load(known)
    if load is not None:
        # Before any request is charged: then the mark alone says what of the load was ours.
        fleet.observe(ScrapeToken(member.endpoint, _own_at_scrape(known)), load, _NOW)
    if known.models is not None:
        models = ServedModels(frozenset(known.models), frozenset(known.model_adapters or ()))
        fleet.observe_models(member.endpoint, models)
    member.account.restore(
        known.in_flight,
        prompt_tokens=known.prompt_tokens,
        queued_tokens=known.queued_tokens,
        now=_NOW,
    )
    for _ in range(known.failures):
        fleet.scrape_failed(ScrapeToken(member.endpoint, 0), "refused", _NOW)
    if known.health in {"ejected", "probing"}:
        for _ in range(fleet.outlier_detector.settings.failures):
            fleet.record_outcome(member.endpoint, RequestOutcome.FAILED, sent_at=_NOW, now=_NOW)


def _load(known: EndpointState) -> Load | None:
    """Scraped load of an endpoint state; None where it has none."""
    load = Load(
        at=_NOW - (known.age_s or 0.0),
        engine=known.engine,
        waiting=known.waiting,
        running=known.running,
        kv_usage=known.kv_usage,
        extra=known.extra or NO_EXTRA,
        adapters=_set(known.adapters),
        waiting_adapters=_set(known.waiting_adapters),
        adapter_slots=known.adapter_slots,
    )
    empty = known.age_s is None and load == Load(at=load.at)
    return None if empty else load


def _own_at_scrape(known: EndpointState) -> int:
    """Our own requests at the scrape, so that `foreign` comes out as written."""
    if known.foreign is None:
        return known.in_flight
    return round((known.running or 0.0) + (known.waiting or 0.0) - known.foreign)


def _set(names: tuple[str, ...] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names)
