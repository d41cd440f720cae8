"""Warns of settings that are valid and probably a mistake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from extproc.config import epp_config, epp_handlers, pool_sections, pools, validation
from extproc.config.epp_plugin_types import plugin_types
from extproc.config.pool_sections import RewriteEntry, SchedulingSection
from extproc.config.settings import FlowControlSection, ScrapeSection, Settings
from extproc.flow_control.priority_band import BandSettings
from extproc.scheduling import registry


def find_warnings(settings: Settings) -> Iterator[str]:
    """Yield a sentence for every setting that is probably a mistake."""
    yield from epp_config.warnings(settings.scheduling.epp)
    yield from _rewrites(settings)
    yield from _xds(settings)
    yield from _scaling(settings)
    yield from _flow_control(settings.flow_control)
    yield from _unparsed_models(settings)
    yield from _unknown_loads(settings)
    yield from _shadows(settings)
    yield from _stages(settings.scheduling, "")
    for at, pool in enumerate(settings.pools):
        if pool.scheduling is not None:
            yield from _stages(pool.scheduling, f"pools[{at}].")
    yield from _bound_events(settings)
    yield from _peers(settings)
    scrape, limits = settings.scrape, settings.limits
    if not (pools.has_source(settings.pool) or settings.pools or pools.from_kubernetes(settings)):
        yield (
            "there are no endpoints: serve refuses to start; add --endpoints ip:port,..., "
            "--endpoints-file, --pool-name or a pool section"
        )
    yield from _scrapes(scrape)
    if limits.max_message_bytes < limits.max_body_bytes:
        yield (
            "limits.max_message_bytes is below max_body_bytes: a larger body is refused where the "
            "data plane sends it in one message (BUFFERED)"
        )
    if settings.responses.stream_sample_ratio and not settings.responses.feedback:
        yield "responses.stream_sample_ratio has no effect while responses.feedback is false"
    if settings.scheduling.unknown_model == "reject" and not (scrape.enabled and scrape.models):
        yield "scheduling.unknown_model is reject, and model lists are not read: all requests pass"
    if settings.conformance:
        yield "conformance is on: clients choose their endpoint with a header"
    if settings.seed is not None:
        yield "seed is set: replicas with the same seed draw the same endpoints"
    if not settings.scheduling.respect_subset:
        yield "scheduling.respect_subset is false: endpoints a gateway excludes are used all the same"


def _scrapes(scrape: ScrapeSection) -> Iterator[str]:
    if scrape.enabled and scrape.stale_after_s < scrape.idle_interval_s + scrape.timeout_s:
        yield (
            "scrape.stale_after_s is below idle_interval_s plus timeout_s: loads of idle endpoints "
            "count as unknown between two scrapes"
        )
    if scrape.tls.ca_file and not scrape.verify_tls:
        yield "scrape.tls.ca_file has no effect without scrape.verify_tls: certificates are not checked"
    if scrape.busy_interval_s > scrape.idle_interval_s:
        yield "scrape.busy_interval_s is above idle_interval_s: busy endpoints are looked at less"


def _bound_events(settings: Settings) -> Iterator[str]:
    events = settings.kv_events
    if not (events.enabled and events.bind) or settings.cluster.leader_election:
        return
    others = {
        "peer_sync.peers": settings.peer_sync.peers,
        "peer_sync.url": settings.peer_sync.url,
        "autoscaling.peers": settings.autoscaling.peers,
    }
    for name, is_set in others.items():
        if is_set:
            yield (
                f"kv_events.bind and {name} are set: an engine connects to one replica, and the others "
                "estimate its cache; remove bind, or let cluster.leader_election choose the replica"
            )


def _peers(settings: Settings) -> Iterator[str]:
    counters, requests = settings.autoscaling.peers, settings.peer_sync.peers
    if counters and requests and set(counters) != set(requests):
        yield (
            "autoscaling.peers and peer_sync.peers differ: the first count for autoscaling, the second "
            "exchange requests; without autoscaling.peers both are peer_sync.peers"
        )


def _shadows(settings: Settings) -> Iterator[str]:
    yield from _shadow(settings.scheduling, "scheduling.shadow")
    for at, pool in enumerate(settings.pools):
        if pool.scheduling is not None:
            yield from _shadow(pool.scheduling, f"pools[{at}].scheduling.shadow")


def _shadow(scheduling: SchedulingSection, where: str) -> Iterator[str]:
    shadow = scheduling.shadow
    if shadow is None:
        return
    if not shadow.sample_ratio:
        yield f"{where}.sample_ratio is 0: the shadow looks at no request"
    rules = (scheduling.strategy, scheduling.goal, scheduling.profile)
    is_same = (shadow.strategy, shadow.goal, shadow.profile) == rules
    if is_same and scheduling.epp is None:
        yield f"{where} is the strategy in force: it has nothing to compare"


def _stages(scheduling: SchedulingSection, where: str) -> Iterator[str]:
    """Warn of endpoints of other stages that also get requests to decode."""
    epp = scheduling.epp if scheduling.profile is None else None
    stages = [] if epp is None else [*epp_handlers.find_stages(epp, validation.Place(""))]
    if (rules := scheduling.disaggregation) is not None:
        stages = [*rules.by_name]
    if stages and not _has_filter(scheduling):
        yield (
            f"{where}scheduling.disaggregation: the profile that routes has no filter, so it also sends "
            f"requests to endpoints of {' and '.join(stages)}: add decode-filter"
        )


def _has_filter(scheduling: SchedulingSection) -> bool:
    """True where the profile that routes has a filter, or a plugin of a file that may be one."""
    if scheduling.profile is not None:
        return bool(scheduling.profile.filters)
    if scheduling.epp is None:
        return bool(registry.profiles()[scheduling.strategy].filters)
    profile, _ = epp_handlers.find_profile(scheduling.epp, validation.Place(""))
    types = {plugin.reference: plugin.type for plugin in scheduling.epp.plugins}
    rows = plugin_types()
    kinds = {
        rows[name].kind if name in rows else name
        for name in (types[reference.plugin_ref] for reference in profile.plugins)
    }
    others = {"", *registry.SCORERS, *registry.COSTS, *registry.PICKERS, *registry.DECIDERS}
    return bool(kinds & registry.FILTERS.keys() or kinds - others)


def _rewrites(settings: Settings) -> Iterator[str]:
    yield from pool_sections.warnings(settings.pool.rewrites, "pool.rewrites")
    if not settings.pools:
        yield from _renamed_models(settings.pool.rewrites, settings.scheduling, "")
    for at, pool in enumerate(settings.pools):
        yield from pool_sections.warnings(pool.rewrites, f"pools[{at}].rewrites")
        if pool.scheduling is not None:
            yield from _renamed_models(pool.rewrites, pool.scheduling, f"pools[{at}].")


def _renamed_models(
    rewrites: Sequence[RewriteEntry], scheduling: SchedulingSection, where: str
) -> Iterator[str]:
    """Warn of rules for a name that no request has after rewrites."""
    targets = {target.model for rewrite in rewrites for target in rewrite.targets}
    renamed = {model for rewrite in rewrites for model in rewrite.models}
    for model in scheduling.models:
        if model in renamed and model not in targets:
            yield (
                f"{where}scheduling.models.{model} is never used: rewrites give its requests another "
                "name first; write the rules for that"
            )


def _scaling(settings: Settings) -> Iterator[str]:
    pools = settings.pools or (settings.pool,)
    least = [pool.autoscaling.min for pool in pools if pool.autoscaling]
    least += [rule.min for rule in settings.autoscaling.discovered_pools]
    if 0 in least and not settings.flow_control.enabled:
        yield (
            "autoscaling.min is 0 and flow_control.enabled is false: requests are refused with 503 while "
            "the first engine starts, and nothing wakes one before the next look"
        )


def _flow_control(section: FlowControlSection) -> Iterator[str]:
    bands: dict[str, BandSettings] = {f"bands[{at}]": band for at, band in enumerate(section.bands)}
    bands |= {
        name: band
        for name, band in (
            ("default_band", section.default_band),
            ("default_negative_band", section.default_negative_band),
        )
        if band is not None
    }
    if not section.enabled:
        if section.limit or section.limits:
            yield "flow_control.limit and limits have no effect while flow_control.enabled is false"
        if bands:
            yield (
                f"flow_control.{next(iter(bands))} has no effect while flow_control.enabled is false"
            )
        if section.usage_limit is not None:
            yield "flow_control.usage_limit has no effect while flow_control.enabled is false"
    for name, band in bands.items():
        for key, bound, overall in (
            ("max_requests", band.max_requests, section.max_requests),
            ("max_bytes", band.max_bytes, section.max_bytes),
        ):
            if bound is not None and bound > overall:
                yield (
                    f"flow_control.{name}.{key} is above flow_control.{key} ({overall}), the bound of "
                    "all priorities, which holds as well: raise that one, or lower this"
                )


def _unparsed_models(settings: Settings) -> Iterator[str]:
    """Warn of what goes by the model of a request where bodies are not parsed."""
    if settings.parse_bodies:
        return
    names = ["pool.rewrites"] if settings.pool.rewrites else []
    for at, pool in enumerate(settings.pools):
        names += [f"pools[{at}].match"] if pool.match.models else []
        names += [f"pools[{at}].rewrites"] if pool.rewrites else []
    names += [
        f"{name}.models" for name, rules in pools.scheduling_sections(settings) if rules.models
    ]
    if names:
        yield (
            f"parse_bodies is false, and {' and '.join(names)} go by the model: what the body names does "
            "not count"
        )


def _unknown_loads(settings: Settings) -> Iterator[str]:
    if settings.scrape.enabled:
        return
    for name, rules in pools.scheduling_sections(settings):
        if rules.saturation is not None and rules.saturation.utilization is not None:
            yield f"{name}.saturation.utilization has no effect while scrape.enabled is false"
        if settings.flow_control.usage_limit is not None and (
            rules.saturation is None or rules.saturation.concurrency is None
        ):
            yield (
                "flow_control.usage_limit has no effect while scrape.enabled is false: write "
                f"{name}.saturation.concurrency"
            )


def _xds(settings: Settings) -> Iterator[str]:
    if settings.xds.enabled and not settings.scheduling.fallbacks:
        yield (
            "xds is served and scheduling.fallbacks is 0: when an endpoint fails, Envoy chooses "
            "the next one itself"
        )
