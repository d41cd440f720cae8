"""Builds scheduling profiles from a strategy or a list of plugins, and checks their signals.

A profile lists its plugins by roles in our own file, and by reference in an EndpointPickerConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from extproc.config import (
    epp_config,
    epp_handlers,
    filter_tree_syntax,
    plugin_loader,
    pool_sections,
    validation,
)
from extproc.config.pool_sections import PluginSpec, ProfileSpec
from extproc.config.settings import Settings
from extproc.config.validation import Place
from extproc.errors import ConfigError
from extproc.scheduling import filter_tree, plugin_guard, registry
from extproc.scheduling.disaggregation import (
    AlwaysPrefill,
    Decider,
    DisaggregatedStages,
    EstimatedTimeDecider,
    Stage,
)
from extproc.scheduling.estimated_time import EstimatedTime
from extproc.scheduling.framework import ExtraMetricReader, Filter, Plugin, Signal
from extproc.scheduling.pickers import WeightedRandomPicker
from extproc.scheduling.profile import HeaderProfiles, SchedulerProfile

PluginT = TypeVar("PluginT", bound=Plugin)

#: Settings that provide a signal that is not always available.
_SCRAPED = "set scrape.enabled to true"
_PROVIDED_BY: Mapping[Signal, str] = {
    Signal.WAITING: _SCRAPED,
    Signal.RUNNING: _SCRAPED,
    Signal.KV_USAGE: _SCRAPED,
    Signal.ADAPTERS: _SCRAPED,
    Signal.PREFIX: "set prefix.capacity_blocks above 0",
    Signal.EXTRA: "name metrics in scrape.extra_metrics",
}


class ResolvedProfiles(msgspec.Struct, frozen=True):
    """The profiles of a configuration.

    Attributes:
        profile: Profile of models without rules of their own.
        origins: Inputs of the profiles by model name; None is the key of `profile`.
        shadow: Profile of the shadow; None without one.
        by_header: Profiles that a header of the request names; None where none does.
        stages: Stages that other endpoints may do; None where the serving endpoint does all.
    """

    profile: SchedulerProfile
    by_model: Mapping[str, SchedulerProfile]
    origins: Mapping[str | None, ProfileOrigin]
    shadow: SchedulerProfile | None = None
    shadow_origin: ProfileOrigin | None = None
    by_header: HeaderProfiles | None = None
    stages: DisaggregatedStages | None = None
    stages_origin: ProfileOrigin | None = None


class ProfileOrigin(msgspec.Struct, frozen=True):
    """Inputs of a profile; two equal origins build the same profile.

    Attributes:
        rules: Rules of the configuration; for stages, those of all of them.
        epp: Plugins of an EndpointPickerConfig; None without any.
        external: External classes that the rules may name; an edited file creates new classes.
        budget_ms: Time budget of a call to an external plugin (milliseconds); 0 without any.
        goal: Goal of the stages of an EndpointPickerConfig; empty elsewhere, as it is a rule.
    """

    rules: pool_sections.SchedulingRules | pool_sections.DisaggregationRules | None
    epp: pool_sections.EppPlugins | None
    external: frozenset[type]
    budget_ms: float
    goal: str = ""


def build_profile(settings: Settings, *, where: str) -> SchedulerProfile:
    """Build the profile of models without rules of their own, for checks: nothing is guarded.

    Args:
        settings: All sections: several of them decide which signals exist.

    Raises:
        ConfigError: An unknown strategy, kind or parameter, a plugin that needs a signal that is
            not provided, or a plugin file that cannot be used.
    """
    return resolve_all(settings, where=where).profile


def check_pools(settings: Settings, *, where: str) -> None:
    """Build the profiles of pools with scheduling rules of their own, for checks.

    Raises:
        ConfigError: See `build_profile`.
    """
    for at, pool in enumerate(settings.pools):
        if pool.scheduling is not None:
            alone = msgspec.structs.replace(settings, scheduling=pool.scheduling)
            build_profile(alone, where=str(Place(where) / "pools" / at))


def resolve_all(
    settings: Settings,
    *,
    where: str,
    guards: plugin_guard.GuardFactory | None = None,
    before: ResolvedProfiles | None = None,
) -> ResolvedProfiles:
    """Build the default profile, and those of models with rules of their own.

    Args:
        guards: Clock and counters for external plugins; None leaves them unguarded, for checks of
            a profile without routing.
        before: Profiles in force. A profile with an equal origin is reused: its plugins hold
            sessions, turns and means that exist nowhere else.

    Raises:
        ConfigError: See `build_profile`.
    """
    scheduling = settings.scheduling
    tables = plugin_loader.tables(scheduling, where=where, guards=guards)
    signals = provided(settings)

    place = Place(where) / "scheduling"
    origins: dict[str | None, ProfileOrigin] = {}

    def check(name: str, plugins: Sequence[Plugin], spot: Place) -> None:
        _require(name, plugins, signals, spot)
        _require_metrics(plugins, settings.scrape.extra_metrics, spot)

    def checked(
        rules: pool_sections.SchedulingRules, spot: Place, name: str = ""
    ) -> SchedulerProfile:
        profile = _ruled(rules, spot, tables, name)
        check(profile.name, profile.plugins, spot)
        return profile

    def ruled(
        rules: pool_sections.SchedulingRules, model: str | None, spot: Place
    ) -> SchedulerProfile:
        profile = checked(rules, spot)
        origin = origins[model] = _origin(rules, tables, scheduling.plugin_budget_ms)
        if before is not None and before.origins.get(model) == origin:
            return before.profile if model is None else before.by_model[model]
        if model is not None:
            profile = msgspec.structs.replace(profile, name=f"{profile.name}/{model}")
        return profile

    by_model = {
        name: ruled(rules, name, place / "models" / name)
        for name, rules in scheduling.models.items()
    }
    shadow = shadow_origin = None
    if scheduling.shadow is not None:
        shadow = checked(scheduling.shadow, place / "shadow")
        shadow_origin = _origin(scheduling.shadow, tables, scheduling.plugin_budget_ms)
        if before is not None and before.shadow_origin == shadow_origin:
            shadow = before.shadow
    profile = ruled(scheduling, None, place)
    resolved = ResolvedProfiles(profile, by_model, origins, shadow, shadow_origin)
    stages, origin = _resolve_stages(scheduling, tables, place, check, before)
    _require_distinct(profile, stages, place)
    _require_predictions(profile, stages, scheduling, place)
    resolved = msgspec.structs.replace(resolved, stages=stages, stages_origin=origin)
    epp = scheduling.epp if scheduling.profile is None else None
    if before is not None and before.profile is profile:
        return msgspec.structs.replace(resolved, by_header=before.by_header)
    header = "" if epp is None else epp_handlers.find_profile_header(epp, Place(place.file))
    if epp is None or not header:
        return resolved
    names = [written.name for written in epp.scheduling_profiles]
    profiles = {n: profile if n == profile.name else checked(scheduling, place, n) for n in names}
    return msgspec.structs.replace(resolved, by_header=HeaderProfiles(header, profiles))


#: Deciders of stages whose rules name none.
_USUAL_DECIDERS: Mapping[str, str] = {
    "prefill": "estimated-time-pd-decider",
    "encode": "always-disagg-multimodal-decider",
}


def _resolve_stages(
    scheduling: pool_sections.SchedulingSection,
    tables: registry.PluginRegistry,
    place: Place,
    check: Callable[[str, Sequence[Plugin], Place], None],
    before: ResolvedProfiles | None,
) -> tuple[DisaggregatedStages | None, ProfileOrigin]:
    """Build the stages, or reuse them where their origin is the same; None without any."""
    epp = scheduling.epp if scheduling.profile is None else None
    origin = _origin_of(scheduling.disaggregation, epp, tables, scheduling.plugin_budget_ms)
    if epp is not None:
        origin = msgspec.structs.replace(origin, goal=scheduling.goal)
    if before is not None and before.stages_origin == origin:
        return before.stages, origin
    stages: dict[str, Stage] = {}
    for name, stage, spot in _build_stages(scheduling, epp, place, tables):
        check(name, (*stage.profile.plugins, stage.decider), spot)
        stages[name] = stage
    return DisaggregatedStages(**stages) if stages else None, origin


def _require_distinct(
    profile: SchedulerProfile, stages: DisaggregatedStages | None, place: Place
) -> None:
    """Reject profiles of one name: plugins learn of decisions by it."""
    staged = () if stages is None else stages.profiles
    names = [profile.name, *(stage.name for stage in staged)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            place,
            wanted="a profile with a name of its own for each stage",
            got=f"{twice!r} twice",
            fix="change the name of a profile",
        )


def _require_predictions(
    profile: SchedulerProfile,
    stages: DisaggregatedStages | None,
    scheduling: pool_sections.SchedulingSection,
    place: Place,
) -> None:
    """Reject a decider that compares predicted times where none are predicted."""
    for name, stage in ({} if stages is None else stages.by_name).items():
        if not isinstance(stage.decider, EstimatedTimeDecider):
            continue
        spot, how = (
            place / "disaggregation" / name / "decider",
            "add `cost: {kind: estimated-time}`",
        )
        if scheduling.disaggregation is None and scheduling.epp is not None:
            spot = epp_handlers.find_stages(scheduling.epp, Place(place.file))[name].place
            how = "add a plugin of the type estimated-time"
        if name == "encode":
            raise ConfigError(
                spot,
                wanted="a decider for encode, which has no prompt whose time could be compared",
                got=stage.decider.kind,
                fix="name always-disagg-multimodal-decider",
            )
        both = (profile, stage.profile)
        lacking = [used.name for used in both if not isinstance(used.cost, EstimatedTime)]
        if lacking:
            raise ConfigError(
                spot,
                wanted=f"the cost estimated-time in both profiles, as {stage.decider.kind} compares "
                "their predictions",
                got=f"none in {' and '.join(lacking)}",
                fix=f"{how}, or name another decider such as prefix-based-pd-decider",
            )


def _build_stages(
    scheduling: pool_sections.SchedulingSection,
    epp: pool_sections.EppPlugins | None,
    place: Place,
    tables: registry.PluginRegistry,
) -> Iterator[tuple[str, Stage, Place]]:
    """Build the stages that other endpoints may do: name, stage, and place of its rules."""
    file = Place(place.file)
    sources = {} if epp is None else epp_handlers.find_stages(epp, file)
    rules = scheduling.disaggregation
    if sources and rules is not None:
        raise ConfigError(
            place / "disaggregation",
            wanted="stages in one place",
            got=f"{', '.join(sources)} in the handler of the EndpointPickerConfig too",
            fix="remove disaggregation, or the handler",
        )
    for name, source in sources.items():
        profile = _ruled(scheduling, place, tables, source.profile)
        decider: Decider = AlwaysPrefill()
        if source.decider is not None:
            entry = epp_config.decider_entry(source.decider)
            decider = _plugin(registry.DECIDERS, entry, source.place, tables, "parameters", "type")
        yield name, Stage(profile, decider), source.place
    for name, rule in ({} if rules is None else rules.by_name).items():
        spot = place / "disaggregation" / name
        profile = _build(by_roles(rule.profile, spot / "profile"), tables)
        if profile.name == pool_sections.ProfileEntry().name:
            profile = msgspec.structs.replace(profile, name=name)
        entry = rule.decider or pool_sections.PluginEntry(kind=_USUAL_DECIDERS[name])
        decider = _plugin(registry.DECIDERS, entry, spot / "decider", tables)
        yield name, Stage(profile, decider), spot


def _origin(
    rules: pool_sections.SchedulingRules, tables: registry.PluginRegistry, budget_ms: float
) -> ProfileOrigin:
    plain = msgspec.convert(rules, pool_sections.SchedulingRules, from_attributes=True)
    epp = rules.epp if isinstance(rules, pool_sections.SchedulingSection) else None
    return _origin_of(plain, epp, tables, budget_ms)


def _origin_of(
    rules: pool_sections.SchedulingRules | pool_sections.DisaggregationRules | None,
    epp: pool_sections.EppPlugins | None,
    tables: registry.PluginRegistry,
    budget_ms: float,
) -> ProfileOrigin:
    words = set(_words(msgspec.to_builtins([rules, epp]))) if tables.external else set()
    used = frozenset(cls for cls in tables.external if getattr(cls, "kind", "") in words)
    return ProfileOrigin(rules, epp, used, budget_ms if used else 0.0)


def _words(tree: object) -> Iterator[str]:
    """Yield every string in a tree, kinds of plugins among them."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _words(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _words(value)


def _ruled(
    rules: pool_sections.SchedulingRules,
    place: Place,
    tables: registry.PluginRegistry,
    name: str,
) -> SchedulerProfile:
    """Build the profile of rules: written out, of an EndpointPickerConfig, or a strategy.

    Args:
        name: Name among the profiles of an EndpointPickerConfig; see `epp_config.by_reference`.
    """
    if rules.profile is not None:
        profile = _build(by_roles(rules.profile, place / "profile"), tables)
    elif isinstance(rules, pool_sections.SchedulingSection) and rules.epp is not None:
        file = Place(place.file)
        profile = _build(epp_config.by_reference(rules.epp, tables, file, name=name), tables)
    else:
        profile = _named(rules.strategy, place)
    if rules.goal == "balanced":
        return profile
    if not isinstance(profile.cost, EstimatedTime):
        raise ConfigError(
            place / "goal",
            wanted="a profile with the cost estimated-time, as adaptive is",
            got=f"{rules.goal} beside {profile.name}",
            fix="leave out goal, or choose the strategy adaptive",
        )
    cost = msgspec.structs.replace(profile.cost, goal=rules.goal)
    return msgspec.structs.replace(profile, cost=cost)


def by_roles(entry: pool_sections.ProfileEntry, place: Place) -> ProfileSpec:
    """Return the specification of a profile that lists its plugins by roles."""
    return ProfileSpec(entry.name, tuple(_parts(entry, place)), place)


def _parts(entry: pool_sections.ProfileEntry, place: Place) -> Iterator[PluginSpec]:
    for at, plugin in enumerate(entry.filters):
        yield PluginSpec("filters", plugin, place / "filters" / at, "params")
    for at, scorer in enumerate(entry.scorers):
        yield PluginSpec("scorers", scorer, place / "scorers" / at, "params", scorer.weight)
    if entry.cost is not None:
        yield PluginSpec("costs", entry.cost, place / "cost", "params")
    yield PluginSpec("pickers", entry.picker, place / "picker", "params")


def provided(settings: Settings) -> frozenset[Signal]:
    """Return the signals that settings provide."""
    signals = set(Signal) - set(_PROVIDED_BY)
    if settings.prefix.capacity_blocks:
        signals.add(Signal.PREFIX)
    if settings.scrape.enabled:
        signals |= {Signal.WAITING, Signal.RUNNING, Signal.KV_USAGE, Signal.ADAPTERS}
        if settings.scrape.extra_metrics:
            signals.add(Signal.EXTRA)
    return frozenset(signals)


def _named(strategy: str, place: Place) -> SchedulerProfile:
    named = registry.profiles()
    profile = named.get(strategy)
    if profile is None:
        raise ConfigError(
            place / "strategy",
            wanted=f"one of {', '.join(named)}",
            got=strategy,
            fix=validation.suggest(strategy, named, "name one, or write out a profile"),
        )
    return profile


def _build(written: ProfileSpec, tables: registry.PluginRegistry) -> SchedulerProfile:
    """Build a profile from its specification."""

    def make(table: Mapping[str, type[PluginT]], part: PluginSpec) -> PluginT:
        return _plugin(table, part.plugin, part.place, tables, params_key=part.params)

    filters = tuple(make(tables.filters, part) for part in written.parts_of("filters"))
    scorers = tuple(
        (make(tables.scorers, part), part.weight) for part in written.parts_of("scorers")
    )
    costs = [make(tables.costs, part) for part in written.parts_of("costs")]
    pickers = [make(tables.pickers, part) for part in written.parts_of("pickers")]
    for role, plugins_of_role in (("picker", pickers), ("cost model", costs)):
        if len(plugins_of_role) > 1:
            raise ConfigError(
                written.place,
                wanted=f"one {role}",
                got=", ".join(plugin.kind for plugin in plugins_of_role),
                fix="keep one",
            )
    if not pickers:
        usual = PluginSpec("pickers", pool_sections.MAX_SCORE, written.place, "params")
        pickers = [make(tables.pickers, usual)]
    if costs and isinstance(pickers[0], WeightedRandomPicker):
        raise ConfigError(
            written.place,
            wanted="a picker that takes the lowest cost",
            got=f"{pickers[0].kind}, which draws by totals of scorers, beside {costs[0].kind}",
            fix=f"name {pool_sections.MAX_SCORE.kind}, or replace the cost by scorers",
        )
    return SchedulerProfile(written.name, filters, scorers, pickers[0], costs[0] if costs else None)


def _plugin(
    table: Mapping[str, type[PluginT]],
    entry: pool_sections.PluginEntry,
    place: Place,
    tables: registry.PluginRegistry,
    params_key: str = "params",
    kind_key: str = "kind",
) -> PluginT:
    kind = registry.find(table, entry.kind, where=str(place / kind_key))
    spot = place / params_key
    params = dict(entry.params)
    if issubclass(kind, filter_tree.FilterTree):

        def below(node: pool_sections.PluginEntry, at: Place) -> Filter:
            return _plugin(tables.filters, node, at, tables)

        params = filter_tree_syntax.build_tree_params(params, below, spot)
    try:
        plugin = validation.to_struct(params, kind, where=spot)
        if not isinstance(plugin.needs, frozenset):
            raise TypeError("its needs are no frozenset")  # noqa: TRY301 - reported as its own errors are
        if not isinstance(getattr(plugin, "extra_metrics", frozenset()), frozenset):
            raise TypeError("its extra_metrics are no frozenset")  # noqa: TRY301
    except ConfigError:
        raise
    except Exception as error:  # a check of its own, in a plugin of others
        raise ConfigError(
            spot,
            wanted=f"parameters that {entry.kind} takes",
            got=f"{type(error).__name__}: {error}",
            fix="change the parameters, or correct the plugin",
        ) from error
    return tables.with_guard(plugin)


def _require(
    name: str, plugins: Sequence[Plugin], signals: frozenset[Signal], place: Place
) -> None:
    for plugin in plugins:
        missing = sorted(plugin.needs - signals, key=lambda signal: signal.value)
        if missing:
            names = ", ".join(signal.value for signal in missing)
            raise ConfigError(
                place,
                wanted=f"every signal that profile {name} reads",
                got=f"no source of {names}, which {plugin.kind} needs",
                fix=f"{_PROVIDED_BY[missing[0]]}, or take {plugin.kind} out",
            )


def _require_metrics(plugins: Sequence[Plugin], metrics: Mapping[str, str], place: Place) -> None:
    """Reject a plugin that reads an extra metric that is not configured."""
    for plugin in plugins:
        if not isinstance(plugin, ExtraMetricReader):
            continue
        for name in sorted(plugin.extra_metrics - metrics.keys()):
            raise ConfigError(
                place,
                wanted=f"every metric that {plugin.kind} reads in scrape.extra_metrics",
                got=f"no {name} there",
                fix=validation.suggest(name, metrics, f"add a selector as {name}"),
            )
