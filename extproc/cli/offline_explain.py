"""Offline decisions: restores a pool from the JSON of `/debug/pool`."""

from __future__ import annotations

from bisect import bisect_right

from extproc.config import factory
from extproc.config.settings import Settings
from extproc.decision import Decision, Outcome
from extproc.endpoint import NO_EXTRA, Endpoint, Load, ServedModels
from extproc.errors import ConfigError
from extproc.parsing import surfaces
from extproc.pool.endpoint_health import UNREACHABLE_AFTER, RequestOutcome
from extproc.pool.observed_page import ScrapeToken
from extproc.pool.store import PoolStore
from extproc.prefix_cache import cache_model
from extproc.request import HttpRequest
from extproc.telemetry.pool_state import EndpointState, PoolState

#: The moment of the decision; only differences to it mean anything.
_NOW = 1_000_000.0

#: Failed scrapes of an endpoint that are counted; long before, it is down, and more change nothing.
_MAX_FAILURES = 1000


def route_offline(settings: Settings, pool: PoolState, raw: HttpRequest, *, where: str) -> Outcome:
    """Decide a request offline, as a server with these settings and this pool would.

    Raises:
        ConfigError: An address stands twice in the state, or the settings have no profile.
    """
    if not settings.parse_bodies:
        raw = surfaces.parse_headers(raw)
    outcome_without_prefix = _restore_pool(settings, pool, where=where)
    outcome = outcome_without_prefix.director.route(raw, _NOW)
    if not isinstance(outcome, Decision) or not outcome.block_hashes:
        return outcome
    # Predictions about this prompt are by block, and the first run computes its blocks. The second
    # run starts from a new pool, since plugins with state, such as round robin, have advanced.
    parts = _restore_pool(settings, pool, where=where)
    tokens = settings.prefix.schedule.tokens
    for state, member in zip(pool.endpoints, parts.store.pool.members, strict=True):
        depth = bisect_right(tokens, state.matched_tokens) - 1
        parts.index.record(cache_model.index_key(member.endpoint), outcome.block_hashes[:depth])
    return parts.director.route(raw, _NOW)


def _restore_pool(settings: Settings, pool: PoolState, *, where: str) -> factory.PoolParts:
    parts = factory.build(settings)
    endpoints = [
        Endpoint(state.address, name=state.name, labels=state.labels) for state in pool.endpoints
    ]
    parts.store.set_endpoints(endpoints, _NOW)
    if len(parts.store.pool.members) < len(endpoints):
        raise ConfigError(
            where, wanted="every address once", got="one of them twice", fix="remove one"
        )
    for state in pool.endpoints:
        _restore_endpoint(parts.store, state)
    return parts


def _restore_endpoint(store: PoolStore, state: EndpointState) -> None:
    """Restore load, in-flight requests and failures of an endpoint from its state."""
    member = store.pool.find(state.address)
    if member is None:
        return
    load = _load(state)
    if load is not None:
        # Before any request is charged: then the mark alone says what of the load was ours.
        store.observe(ScrapeToken(member.endpoint, _own_requests_at_scrape(state)), load, _NOW)
    if state.models is not None:
        models = ServedModels(frozenset(state.models), frozenset(state.model_adapters or ()))
        store.observe_models(member.endpoint, models)
    member.account.restore(
        state.in_flight,
        prompt_tokens=state.prompt_tokens,
        queued_tokens=state.queued_tokens,
        now=_NOW,
    )
    failures = max(state.failures, UNREACHABLE_AFTER if state.health == "down" else 0)
    for _ in range(min(failures, _MAX_FAILURES)):
        store.scrape_failed(ScrapeToken(member.endpoint, 0), "refused", _NOW)
    if state.health in {"ejected", "probing"}:
        for _ in range(store.outlier_detector.settings.failures):
            store.record_outcome(member.endpoint, RequestOutcome.FAILED, sent_at=_NOW, now=_NOW)


def _load(state: EndpointState) -> Load | None:
    """Scraped load of an endpoint state; None where it has none, or its page stands still."""
    if state.distrusted == "frozen":
        return None  # a server counts nothing of such a page either
    load = Load(
        at=_NOW - (state.age_s or 0.0),
        engine=state.engine,
        waiting=state.waiting,
        running=state.running,
        kv_usage=state.kv_usage,
        extra=state.extra or NO_EXTRA,
        adapters=_to_set(state.adapters),
        waiting_adapters=_to_set(state.waiting_adapters),
        adapter_slots=state.adapter_slots,
    )
    empty = state.age_s is None and load == Load(at=load.at)
    return None if empty else load


def _own_requests_at_scrape(state: EndpointState) -> int:
    """Our own requests at the scrape, so that `foreign` comes out as written."""
    if state.foreign is None:
        return state.in_flight
    return round((state.running or 0.0) + (state.waiting or 0.0) - state.foreign)


def _to_set(names: tuple[str, ...] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names)
