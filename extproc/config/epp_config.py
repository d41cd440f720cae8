"""Reads an EndpointPickerConfig: plugins by name, and profiles that refer to them.

Upstream wires producers, handlers and scorers together; here a prefix index and the pool store do
their work, so such plugin types are accepted and left out. The rows of `epp_plugin_types` say of
each type whether a plugin of ours has that kind, our picker does the work anyway, or the work is not
done; names and parameters are those of llm-d-router v0.10.0 and earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from extproc.config import (
    epp_data_layer,
    epp_handlers,
    epp_kv_events,
    epp_request_cost,
    epp_sections,
    epp_sessions,
    epp_sources,
    filter_tree_syntax,
    settings,
    validation,
)
from extproc.config.epp_plugin_types import UpstreamType, plugin_types
from extproc.config.pool_sections import (
    ROLES,
    EppPlugins,
    EppProfile,
    NamedPlugin,
    PluginEntry,
    PluginRef,
    PluginSpec,
    ProfileSpec,
)
from extproc.config.validation import Place
from extproc.errors import ConfigError
from extproc.scheduling import registry

#: Type of the filter whose parameters `filter_tree_syntax` converts.
DECISION_TREE = "decision-tree-filter"

#: API groups the file was published under, newest first.
VERSIONS = ("llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")
KIND = "EndpointPickerConfig"

#: Roles of types that sections may refer to without an entry among the plugins.
_REFERRED_ROLES = frozenset({"parser", "detector", "policy"})

#: Top-level keys, and what becomes of those that are taken without effect.
_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("apiVersion", "kind", "metadata", "plugins", "schedulingProfiles"), ""),
    **dict.fromkeys(("featureGates", "dataLayer", "requestHandler", "flowControl"), ""),
    "data": "data is deprecated: write dataLayer",
    "parser": "parser is deprecated: write requestHandler.parsers",
    "saturationDetector": "saturationDetector is deprecated: write flowControl.saturationDetector",
}


class EppDocument(msgspec.Struct, frozen=True):
    """An EndpointPickerConfig in terms of our own settings.

    Attributes:
        tree: Settings as a file of ours would have them, without the plugins.
        plugins: Plugins and profiles; None without any, which is upstream's default profile.
        warnings: Warnings about keys without effect.
    """

    tree: dict[str, object]
    plugins: EppPlugins | None
    warnings: tuple[str, ...]


def from_endpoint_picker_config(tree: Mapping[str, object], file: Place) -> EppDocument:
    """Convert an EndpointPickerConfig to our own settings.

    Raises:
        ConfigError: The version or a key is unknown, or a plugin cannot be read.
    """
    version = tree.get("apiVersion")
    if version not in VERSIONS:
        raise ConfigError(
            file / "apiVersion",
            wanted=f"one of {', '.join(VERSIONS)}",
            got=validation.show(version),
            fix=f"write {VERSIONS[0]}",
        )
    warnings = []
    if version != VERSIONS[0]:
        warnings.append(f"apiVersion {version} is deprecated: write {VERSIONS[0]}")
    for key, value in tree.items():
        if key not in _KEYS:
            raise validation.unknown_key(key, _KEYS, file)
        if _KEYS[key] and value:
            warnings.append(_KEYS[key])
    section, unmapped = epp_sections.convert_flow_control(tree, file)
    warnings += unmapped
    sections = {} if section is None else {"flow_control": section}
    written = {
        key: tree[key]
        for key in ("plugins", "schedulingProfiles")
        if tree.get(key) not in (None, [])
    }
    plugins = None
    if written:
        plugins = validation.to_struct(written, EppPlugins, where=file)
        epp_handlers.check_handlers(plugins, file)
    named = {plugin.reference: plugin.type for plugin in plugins.plugins} if plugins else {}
    types = [row.name for row in plugin_types().values() if row.role in _REFERRED_ROLES]
    upstream = epp_data_layer.read_sections(tree, file)
    warnings += epp_data_layer.check_sections(upstream, file, plugins=named, types=types)
    listed = plugins.plugins if plugins else ()
    if plugins is not None:
        plugins, unread = _convert_plugins(plugins, upstream, sections, file)
        warnings += unread
    else:
        # Upstream's own default when nothing is configured (docs/spec/protocol.md#default-profile).
        sections["scheduling"] = {"strategy": "weighted"}
    warnings += _convert_gates(listed, upstream, sections, file)
    ours: dict[str, object] = {"apiVersion": settings.API_VERSION, "kind": settings.KIND}
    if not epp_data_layer.parses_bodies(upstream, plugins=named):
        ours["parse_bodies"] = False
    return EppDocument({**ours, **sections}, plugins, tuple(warnings))


def _convert_gates(
    plugins: Sequence[NamedPlugin],
    upstream: epp_data_layer.EppSections,
    sections: dict[str, dict[str, object]],
    file: Place,
) -> list[str]:
    """Add the saturation detector and the usage limit to the sections; returns warnings."""
    rules = epp_data_layer.convert_saturation(upstream, plugins, file)
    if rules:
        sections["scheduling"] = {**sections.get("scheduling", {}), "saturation": rules}
    if "flow_control" not in sections:
        return []
    limit, warnings = epp_data_layer.convert_usage_limit(upstream, plugins, file)
    if limit:
        sections["flow_control"]["usage_limit"] = limit
    elif rules:
        warnings.append(epp_data_layer.NOT_GATED)
    return warnings


def split_documents(
    trees: Sequence[dict[str, object]], file: Place
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the document of ours, and the EndpointPickerConfig that it adds settings to.

    Raises:
        ConfigError: A document is of another kind, or a kind stands twice.
    """
    by_kind: dict[object, dict[str, object]] = {}
    for number, tree in enumerate(trees, 1):
        kind = tree.get("kind")
        name = kind if isinstance(kind, str) else validation.show(kind)
        if name not in (settings.KIND, KIND) or name in by_kind:
            raise ConfigError(
                f"{file}, document {number}: kind",
                wanted=f"one {KIND} and one {settings.KIND}, separated by ---",
                got=f"a second {name}" if name in by_kind else name,
                fix="put everything of a kind into one document",
            )
        by_kind[name] = tree
    return by_kind[settings.KIND], by_kind[KIND]


#: Keys of our section `scheduling` whose work the plugins of an EndpointPickerConfig do.
_CHOICES = ("strategy", "goal", "profile")


def merge_settings(
    document: EppDocument, ours: Mapping[str, object], file: Place
) -> dict[str, object]:
    """Return the settings of an EndpointPickerConfig with those of a document of ours.

    Raises:
        ConfigError: Both set the same.
    """
    scheduling = ours.get("scheduling")
    written = scheduling if isinstance(scheduling, dict) else {}
    chosen = [key for key in _CHOICES if written.get(key) is not None]
    theirs = dict(document.tree)
    if chosen and document.plugins is not None:
        raise _set_twice(file / "scheduling" / chosen[0], "its plugins")
    section = theirs.get("scheduling")
    if chosen and isinstance(section, dict):
        # Upstream's default, which nothing in the EndpointPickerConfig asks for.
        theirs["scheduling"] = {key: section[key] for key in section if key != "strategy"}
    for key in ours.keys() & {"apiVersion", "kind"}:
        theirs.pop(key)
    return _merge(theirs, ours, file)


def _merge(
    theirs: Mapping[str, object], ours: Mapping[str, object], place: Place
) -> dict[str, object]:
    merged = dict(theirs)
    for key, value in ours.items():
        present = theirs.get(key)
        # Weights of two files together are no cost that either describes.
        is_section = key != "request_cost"
        if is_section and isinstance(present, dict) and isinstance(value, dict):
            merged[key] = _merge(present, value, place / key)
        elif present is not None and present != value:
            raise _set_twice(place / key, validation.show(present))
        else:
            merged[key] = value
    return merged


def _set_twice(place: Place, theirs: str) -> ConfigError:
    return ConfigError(
        place,
        wanted="no setting that the EndpointPickerConfig beside it has or implies",
        got=f"both; there it is {theirs}",
        fix=f"remove it from the {settings.KIND}, or what sets it from the {KIND}",
    )


def _convert_plugins(
    plugins: EppPlugins,
    upstream: epp_data_layer.EppSections,
    sections: dict[str, dict[str, object]],
    file: Place,
) -> tuple[EppPlugins, list[str]]:
    """Convert plugins whose parameters are sections of ours, or parameters of other plugins.

    Args:
        sections: Sections of ours, to which those that the plugins stand for are added.

    Returns:
        The plugins as profiles are built from them, and warnings.
    """
    sources, warnings = epp_sources.convert_sources(upstream, plugins, file)
    sections |= sources
    plugins = epp_sources.convert_topology(plugins, file)
    plugins, agent_headers, session_warnings = epp_sessions.convert_sessions(plugins, file)
    warnings += session_warnings
    if agent_headers and "flow_control" in sections:
        sections["flow_control"] |= {"fallback_tenant_headers": agent_headers}
    plugins, unread = epp_kv_events.replace_tracking_scorers(plugins, file)
    warnings += unread
    plugins, metrics, unread = epp_sections.convert_metrics(plugins, file)
    warnings += unread
    if metrics:
        sections["scrape"] = {**sections.get("scrape", {}), "extra_metrics": metrics}
    events, unread = epp_kv_events.convert_kv_events(plugins, file)
    warnings += unread
    if events is not None:
        sections["kv_events"] = events
    source = epp_kv_events.convert_kv_cache_source(plugins, file)
    if source:
        sections["scheduling"] = {"kv_cache_source": source}
    responses = epp_request_cost.convert_request_cost(plugins, file)
    if responses:
        sections["responses"] = responses
    return plugins, warnings


def by_reference(
    scheduling: EppPlugins, tables: registry.PluginRegistry, file: Place, *, name: str = ""
) -> ProfileSpec:
    """Return the specification of a profile that plugins and scheduling profiles describe.

    Args:
        name: Name of the profile; empty for the one that routes where no header names another.

    Raises:
        ConfigError: A type or reference is unknown, a name stands twice, or it is not clear which
            profile routes.
    """
    named = _named(scheduling.plugins, tables, file)
    chosen, at = epp_handlers.find_profile(scheduling, file, name=name)
    profile = file / "schedulingProfiles" / at
    parts: list[PluginSpec] = []
    for number, reference in enumerate(_with_picker(chosen, named, tables.pickers)):
        if reference.plugin_ref not in named:
            spot = profile / "plugins" / number / "pluginRef"
            raise _unknown(reference.plugin_ref, named, spot)
        index, written, kind = named[reference.plugin_ref]
        if not kind:
            continue
        place = file / "plugins" / index
        plugin = _translate_plugin(written, kind, named, place / "parameters")
        weight = 1.0 if reference.weight is None else reference.weight
        parts += [
            PluginSpec(role, plugin, place, "parameters", weight)
            for role in ROLES
            if kind in getattr(tables, role)
        ]
    return ProfileSpec(chosen.name, tuple(parts), profile)


def _with_picker(
    profile: EppProfile,
    named: Mapping[str, tuple[int, NamedPlugin, str]],
    pickers: Mapping[str, object],
) -> Sequence[PluginRef]:
    """References of a profile, with the first picker of the file where it names none."""
    declared = [name for name, (_, _, kind) in named.items() if kind in pickers]
    if not declared or any(reference.plugin_ref in declared for reference in profile.plugins):
        return profile.plugins
    return (*profile.plugins, PluginRef(plugin_ref=declared[0]))


def warnings(scheduling: EppPlugins | None) -> Iterator[str]:
    """Warn of plugin types and parameters without effect, and of profiles without a clear picker."""
    if scheduling is not None:
        yield from _ambiguous_pickers(scheduling)
        yield from epp_handlers.warn_of_missing_profiles(scheduling)
    for plugin in () if scheduling is None else scheduling.plugins:
        known = plugin_types().get(plugin.type)
        if known is None:
            continue
        name = plugin.reference
        if known.status in ("deprecated", "unsupported"):
            yield f"plugin {name}: {known.note}"
        ignored = [
            key
            for key, defaults in known.ignored.defaults.items()
            if plugin.parameters.get(key) not in (None, *defaults)
        ]
        if ignored:
            be = "is" if len(ignored) == 1 else "are"
            yield f"plugin {name}: {', '.join(ignored)} {be} not acted on: {known.ignored.note}"
        if known.is_unread and plugin.parameters:
            unread = ", ".join(plugin.parameters)
            yield f"plugin {name}: parameters {unread} have no effect, as upstream: remove them"
        if plugin.parameters.get("ttftSource") == "latencyPredictor":
            yield (
                f"plugin {name}: ttftSource: latencyPredictor is not acted on: no latency predictor is "
                "asked, and times are estimated by peakPrefillThroughput: measure that for your engines, "
                "or write maxTTFTPenaltyMs: 0 for no bound"
            )


def _ambiguous_pickers(scheduling: EppPlugins) -> Iterator[str]:
    """Warn of profiles without a picker in a file that declares several."""
    pickers = [plugin.reference for plugin in scheduling.plugins if plugin.type in registry.PICKERS]
    for profile in scheduling.scheduling_profiles if len(pickers) > 1 else ():
        if not any(reference.plugin_ref in pickers for reference in profile.plugins):
            yield (
                f"profile {profile.name} names none of the pickers {', '.join(pickers)}: "
                f"{pickers[0]} is taken, where upstream takes any of them"
            )


#: Names an error lists (count): those of one file, not every type there is.
_MOST_SHOWN = 20


def _named(
    plugins: Sequence[NamedPlugin], tables: registry.PluginRegistry, file: Place
) -> dict[str, tuple[int, NamedPlugin, str]]:
    """Return plugins by name, with their index and kind here; an empty kind has no effect."""
    kinds = {*tables.filters, *tables.scorers, *tables.costs, *tables.pickers, *registry.DECIDERS}
    named: dict[str, tuple[int, NamedPlugin, str]] = {}
    for index, plugin in enumerate(plugins):
        name, place = plugin.reference, file / "plugins" / index
        if name in named:
            raise ConfigError(
                place / "name",
                wanted="every name once",
                got=f"{name} twice",
                fix="give one of them another name",
            )
        row = plugin_types().get(plugin.type)
        if row is not None:
            kind = row.kind
            if not kind:
                _check_ignored_parameters(row, plugin, place / "parameters")
        elif plugin.type in kinds:
            kind = plugin.type
        else:
            raise _unknown(plugin.type, {*plugin_types(), *kinds}, place / "type")
        named[name] = (index, plugin, kind)
    return named


def _translate_plugin(
    written: NamedPlugin,
    kind: str,
    named: Mapping[str, tuple[int, NamedPlugin, str]],
    place: Place,
) -> PluginEntry:
    """Convert a plugin to our form; a decision tree gets the filters it refers to as nodes."""
    plugin = PluginEntry(kind=kind, params=_effective(written))
    if written.type != DECISION_TREE:
        return plugin

    def find(name: str, spot: Place) -> tuple[PluginEntry, bool]:
        if name not in named:
            raise _unknown(name, named, spot)
        _, written, kind = named[name]
        if not kind:
            raise ConfigError(
                spot,
                wanted="a filter that does something here",
                got=written.type,
                fix=plugin_types()[written.type].note,
            )
        entry = PluginEntry(kind=kind, params=_effective(written))
        return entry, written.type == DECISION_TREE

    params = filter_tree_syntax.from_decision_tree(plugin.params, find, place)
    return msgspec.structs.replace(plugin, params=params)


def decider_entry(plugin: NamedPlugin) -> PluginEntry:
    """Convert a decider to our form; upstream reads no parameters of those that have none."""
    cls = registry.DECIDERS.get(plugin.type)
    fields = () if cls is None else getattr(cls, "__struct_fields__", ())
    return PluginEntry(kind=plugin.type, params=_effective(plugin) if fields else {})


def _check_ignored_parameters(known: UpstreamType, plugin: NamedPlugin, place: Place) -> None:
    """Reject unknown parameters of a plugin type without effect, where upstream reads them."""
    if known.is_unread:
        return
    names = {*known.parameters, *known.ignored.defaults}
    for name in plugin.parameters:
        if name not in names:
            raise validation.unknown_key(name, names, place)


def _effective(plugin: NamedPlugin) -> Mapping[str, object]:
    """Return the parameters as the kind has them, without those that have no effect."""
    known = plugin_types().get(plugin.type)
    if known is None:
        return plugin.parameters
    return known.convert_parameters(plugin.parameters)


def _unknown(name: str, known: Mapping[str, object] | set[str], spot: Place) -> ConfigError:
    few = len(known) <= _MOST_SHOWN
    return ConfigError(
        spot,
        wanted=f"one of {', '.join(sorted(known))}" if few else "a plugin type that exists",
        got=name,
        fix=validation.suggest(name, known, "extproc check --plugins lists what there is"),
    )
