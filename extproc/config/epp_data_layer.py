"""Checks sections of an EndpointPickerConfig that refer to its plugins.

Upstream, `dataLayer` connects data sources with plugins that extract from them, and `requestHandler`
names the parsers; here the scraper, discovery and the parsers need no connections, and a parser counts
only where it is the one that reads no body. A warning names each setting that changes what upstream
does. `saturationDetector` becomes our `scheduling.saturation`, and the policy that
`flowControl.usageLimitPolicyPluginRef` names our `flow_control.usage_limit`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec

from extproc.config import epp_sections, validation
from extproc.config.epp_plugin_types import plugin_types
from extproc.config.pool_sections import NamedPlugin
from extproc.config.validation import Place
from extproc.errors import ConfigError
from extproc.scheduling.framework import UpstreamParameters
from extproc.scheduling.load_bounds import ConcurrencyDetector, UtilizationDetector

#: The source of metrics and its extractor, which upstream adds.
_METRICS: Final = "metrics-data-source"
_EXTRACTOR: Final = "core-metrics-extractor"

#: Type of the parser that reads no body.
_PASSTHROUGH: Final = "passthrough-parser"


class _Reference(UpstreamParameters, frozen=True, kw_only=True):
    plugin_ref: validation.Name


class _Source(_Reference, frozen=True, kw_only=True):
    extractors: tuple[_Reference, ...] | None = None


class _DataLayer(UpstreamParameters, frozen=True):
    inject_defaults: bool | None = None
    sources: tuple[_Source, ...] | None = None
    discovery: _Reference | None = None
    peer_discovery: _Reference | None = None
    cross_replica_syncer_plugin_ref: str = ""
    cross_replica_sync_interval: str | None = None

    def has_added_extractor(self) -> bool:
        """True if upstream adds its source of metrics and the extractor: no source has its name."""
        named = {source.plugin_ref for source in self.sources or ()}
        return self.inject_defaults is not False and _METRICS not in named


class _RequestHandler(UpstreamParameters, frozen=True):
    parsers: tuple[_Reference, ...] | None = None


class EppSections(UpstreamParameters, frozen=True):
    """Sections of the file that refer to its plugins."""

    data_layer: _DataLayer | None = None
    # The name of that section in the gateway's releases 1.3 and 1.4.
    data: _DataLayer | None = None
    request_handler: _RequestHandler | None = None
    parser: _Reference | None = None
    saturation_detector: epp_sections.UpstreamDetector | None = None
    flow_control: epp_sections.UpstreamFlowControl | None = None

    @property
    def data_layers(self) -> Mapping[str, _DataLayer]:
        """The data layer under each key that the file has for it, that of today first."""
        layers = {"dataLayer": self.data_layer, "data": self.data}
        return {key: layer for key, layer in layers.items() if layer is not None}


def read_sections(tree: Mapping[str, object], file: Place) -> EppSections:
    """Read the sections of a file.

    Raises:
        ConfigError: A key is unknown, or a value has another type.
    """
    written = {key: tree[key] for key in _KEYS if tree.get(key) is not None}
    return validation.to_struct(written, EppSections, where=file)


def check_sections(
    sections: EppSections, file: Place, *, plugins: Mapping[str, str], types: Collection[str]
) -> list[str]:
    """Check the sections that refer to plugins, and warn of settings without effect.

    Args:
        plugins: Types of the plugins of the file, by name.
        types: Types of parsers, detectors and policies, which need no entry among the plugins.

    Raises:
        ConfigError: A reference has no plugin.
    """
    for name, place in _references(sections, file):
        if place.path[0] in ("dataLayer", "data"):
            layer, *_ = sections.data_layers.values()
            is_known = name == _EXTRACTOR and layer.has_added_extractor()
        else:
            is_known = name in types
        if name not in plugins and not is_known:
            raise ConfigError(
                place,
                wanted="the name of a plugin of this file",
                got=name,
                fix=validation.suggest(name, plugins, "add it to plugins"),
            )
    return [
        warning
        for key, layer in sections.data_layers.items()
        for warning in _warn_without_effect(key, layer)
    ]


def parses_bodies(sections: EppSections, *, plugins: Mapping[str, str]) -> bool:
    """True unless the first parser is the one that reads no body, as it takes all requests.

    Args:
        plugins: Types of the plugins of the file, by name.
    """
    handler = sections.request_handler or _RequestHandler()
    parser = next(iter(handler.parsers or ()), sections.parser)
    return parser is None or plugins.get(parser.plugin_ref, parser.plugin_ref) != _PASSTHROUGH


#: Saturation detectors by type, with their fields of `SaturationRules`. Upstream uses the first one
#: where the section names none.
_DETECTORS: Final[Mapping[str, tuple[str, type[UpstreamParameters]]]] = {
    UtilizationDetector.kind: ("utilization", UtilizationDetector),
    ConcurrencyDetector.kind: ("concurrency", ConcurrencyDetector),
}


def convert_saturation(
    sections: EppSections, plugins: Sequence[NamedPlugin], file: Place
) -> dict[str, object]:
    """Convert `saturationDetector` to our section `scheduling.saturation`; empty without one.

    Args:
        sections: Those of the file, after `check_sections`.

    Raises:
        ConfigError: It refers to a plugin of another type, or a parameter of the plugin is wrong.
    """
    detector = sections.saturation_detector
    flow, place = sections.flow_control, file / "saturationDetector"
    if flow is not None and flow.saturation_detector is not None:
        detector, place = flow.saturation_detector, file / "flowControl" / "saturationDetector"
    if detector is None:
        return {}
    name = detector.plugin_ref or next(iter(_DETECTORS))
    usual = NamedPlugin(type=name, parameters=detector.thresholds)
    plugin, spot = _find_plugin(name, plugins, file) or (usual, place)
    type_name = plugin.type
    if type_name not in _DETECTORS:
        raise ConfigError(
            place / "pluginRef",
            wanted=f"the name of a plugin of type {' or '.join(_DETECTORS)}",
            got=f"{name}, a {type_name}",
            fix="name a detector, or leave it out for the usual one",
        )
    key, kind = _DETECTORS[type_name]
    params = plugin_types()[type_name].convert_parameters(plugin.parameters)
    validation.to_struct(params, kind, where=spot)
    return {key: params}


def _find_plugin(
    name: str, plugins: Sequence[NamedPlugin], file: Place
) -> tuple[NamedPlugin, Place] | None:
    """A plugin by name, and the place of its parameters; None where it stands for its type."""
    for at, plugin in enumerate(plugins):
        if plugin.reference == name:
            return plugin, file / "plugins" / at / "parameters"
    return None


class _StaticLimit(UpstreamParameters, frozen=True):
    threshold: Annotated[float, msgspec.Meta(gt=0)] | None = None


class _Holdback(UpstreamParameters, frozen=True, kw_only=True):
    min_ceiling: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    max_ceiling: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    shape: Literal["linear"] = "linear"
    domain: Literal["rank", "value"] = "rank"

    def __post_init__(self) -> None:
        if self.min_ceiling >= self.max_ceiling:
            raise ValueError(f"expected a minCeiling below maxCeiling ({self.max_ceiling:g})")


def convert_usage_limit(
    sections: EppSections, plugins: Sequence[NamedPlugin], file: Place
) -> tuple[dict[str, object], list[str]]:
    """Convert the usage limit policy of `flowControl` to our section `flow_control.usage_limit`.

    Args:
        sections: Those of the file, after `check_sections`.

    Returns:
        The section, empty where no priority is held; and warnings.

    Raises:
        ConfigError: It refers to a plugin of another type, or a parameter of the plugin is wrong.
    """
    flow = sections.flow_control
    name = flow.usage_limit_policy_plugin_ref if flow is not None else None
    if not name:
        return {}, []
    place = file / "flowControl" / "usageLimitPolicyPluginRef"
    plugin, spot = _find_plugin(name, plugins, file) or (NamedPlugin(type=name), place)
    match plugin.type:
        case "static-usage-limit-policy":
            static = validation.to_struct(plugin.parameters, _StaticLimit, where=spot)
            ceiling = 1.0 if static.threshold is None else static.threshold
            # Upstream's default, with which requests wait for an endpoint here.
            if ceiling >= 1.0:
                return {}, []
            return {"min_ceiling": ceiling, "max_ceiling": ceiling}, []
        case "priority-holdback-policy":
            limit = validation.to_struct(plugin.parameters, _Holdback, where=spot)
            return {
                "min_ceiling": limit.min_ceiling,
                "max_ceiling": limit.max_ceiling,
                "domain": limit.domain,
            }, []
        case "soft-reflective-ceiling-policy":
            return {}, [_SOFT_CEILING]
    raise ConfigError(
        place,
        wanted="the name of a plugin of type static-usage-limit-policy or priority-holdback-policy",
        got=f"{name}, a {plugin.type}",
        fix="name such a policy, or leave it out",
    )


#: Warning about a usage limit policy that is not built.
_SOFT_CEILING: Final = (
    "flowControl.usageLimitPolicyPluginRef: soft-reflective-ceiling-policy is not acted on: it opens "
    "priorities for a share of the cycles of a dispatch loop, and the queue has none; "
    "flow_control.usage_limit, or a priority-holdback-policy, holds priorities at fixed ceilings"
)

#: Warning about a saturation detector where requests wait, and none is held at a ceiling.
NOT_GATED: Final = (
    "saturationDetector does not say when requests wait: with the feature gate flowControl a request "
    "waits while it would wait longer than flow_control.busy_s on every endpoint; the detector says when "
    "priorities below 0 are refused"
)

#: Keys of the sections in the file.
_KEYS = tuple(field.encode_name for field in msgspec.structs.fields(EppSections))


def _references(sections: EppSections, file: Place) -> Iterator[tuple[str, Place]]:
    """Names by which the sections refer to plugins, and the places of these names.

    Fairness and order of `flowControl` are left to the conversion of that section.
    """
    for key, layer in sections.data_layers.items():
        yield from _data_layer_references(layer, file / key)
    handler = sections.request_handler or _RequestHandler()
    for at, parser in enumerate(handler.parsers or ()):
        yield parser.plugin_ref, file / "requestHandler" / "parsers" / at / "pluginRef"
    if sections.parser is not None:
        yield sections.parser.plugin_ref, file / "parser" / "pluginRef"
    flow = sections.flow_control or epp_sections.UpstreamFlowControl()
    for section, detector in (
        (file, sections.saturation_detector),
        (file / "flowControl", flow.saturation_detector),
    ):
        if detector is not None and detector.plugin_ref:
            yield detector.plugin_ref, section / "saturationDetector" / "pluginRef"
    if flow.usage_limit_policy_plugin_ref:
        yield flow.usage_limit_policy_plugin_ref, file / "flowControl" / "usageLimitPolicyPluginRef"


def _data_layer_references(section: _DataLayer, place: Place) -> Iterator[tuple[str, Place]]:
    for at, source in enumerate(section.sources or ()):
        yield source.plugin_ref, place / "sources" / at / "pluginRef"
        for n, extractor in enumerate(source.extractors or ()):
            yield extractor.plugin_ref, place / "sources" / at / "extractors" / n / "pluginRef"
    if section.discovery is not None:
        yield section.discovery.plugin_ref, place / "discovery" / "pluginRef"
    if section.peer_discovery is not None:
        yield section.peer_discovery.plugin_ref, place / "peerDiscovery" / "pluginRef"
    if section.cross_replica_syncer_plugin_ref:
        yield section.cross_replica_syncer_plugin_ref, place / "crossReplicaSyncerPluginRef"


def _warn_without_effect(name: str, section: _DataLayer) -> Iterator[str]:
    if section.inject_defaults is False:
        yield f"{name}.injectDefaults: false is not acted on: engines are scraped all the same"
    if section.peer_discovery is not None:
        yield (
            f"{name}.peerDiscovery is not acted on: replicas find each other as peer_sync.peers of an "
            "ExtProcConfig behind --- says"
        )
    if section.cross_replica_syncer_plugin_ref:
        yield (
            f"{name}.crossReplicaSyncerPluginRef is not acted on: replicas exchange their loads as the "
            "section peer_sync of an ExtProcConfig behind --- says"
        )
