"""Converts plugins of an EndpointPickerConfig that find endpoints and read them.

A `metrics-data-source` becomes keys of our section `scrape`, a `file-discovery` that
`dataLayer.discovery` names our `pool.endpoints_file`, and labels of a `topology-extractor` parameters of
the topology plugins that read what it extracts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec

from extproc.config import epp_data_layer, settings, validation
from extproc.config.pool_sections import EnginePort, EppPlugins, NamedPlugin
from extproc.config.validation import Place
from extproc.errors import ConfigError
from extproc.scheduling.framework import UpstreamParameters

#: Upstream's types of sources.
_METRICS: Final = "metrics-data-source"
_MODELS: Final = "models-data-source"
_FILE: Final = "file-discovery"

#: Type of the plugin that names labels, the key by which its readers name it, and their types.
_TOPOLOGY: Final = "topology-extractor"
_EXTRACTOR_KEY: Final = "topologyProducerName"
_TOPOLOGY_READERS: Final = frozenset({"topology-affinity-filter", "topology-affinity-scorer"})


#: Upstream's tick, of which intervals are multiples (seconds).
_SHORTEST_S: Final = 0.05


class _SourcePage(UpstreamParameters, frozen=True):
    scheme: Literal["http", "https"] = "http"
    path: str = ""
    port: EnginePort | None = None
    interval: str = ""
    insecure_skip_verify: bool = True
    ca_cert_path: str = ""
    client_cert_path: str = ""
    client_key_path: str = ""


class _File(UpstreamParameters, frozen=True, kw_only=True):
    path: validation.Name
    watch_file: bool = False


class _TopologyReader(UpstreamParameters, frozen=True):
    topology_producer_name: str = ""


class _Topology(UpstreamParameters, frozen=True):
    hostname: str = ""
    rack: str = ""
    zone: str = ""
    region: str = ""

    def to_labels(self) -> Mapping[str, str]:
        """Labels by level, of the levels that have one of their own."""
        levels = {
            "host": self.hostname,
            "rack": self.rack,
            "zone": self.zone,
            "region": self.region,
        }
        return {level: label for level, label in levels.items() if label}


def convert_sources(
    sections: epp_data_layer.EppSections, plugins: EppPlugins, file: Place
) -> tuple[dict[str, dict[str, object]], list[str]]:
    """Convert sources of metrics and of endpoints.

    Returns:
        Keys of our sections `scrape` and `pool`, and warnings.

    Raises:
        ConfigError: A scheme is not known, or a file has no path.
    """
    layers = sections.data_layers.values()
    sources = {source.plugin_ref for layer in layers for source in layer.sources or ()}
    discovery = next((layer.discovery.plugin_ref for layer in layers if layer.discovery), "")
    warnings: list[str] = []
    scrape: dict[str, object] | None = None
    pool: dict[str, object] = {}
    for plugin, place in plugins.find_plugins({_METRICS, _FILE}, file):
        name = plugin.reference
        # Upstream has a source of the type's name of its own accord.
        if plugin.type == _METRICS and name in {*sources, _METRICS}:
            page = _read_page(plugin, place)
            if scrape is None:
                scrape = page
            elif scrape != page:
                warnings.append(
                    f"plugin {name}: its parameters are not acted on: an endpoint is scraped at one page, "
                    "that of the first source"
                )
        elif plugin.type == _FILE and name == discovery:
            pool["endpoints_file"] = validation.to_struct(
                plugin.parameters, _File, where=place
            ).path
    ours = {"scrape": scrape or {}, "pool": pool}
    warnings += _warn_of_model_sources(plugins, ours["scrape"], file)
    return {key: section for key, section in ours.items() if section}, warnings


def _read_page(plugin: NamedPlugin, place: Place) -> dict[str, object]:
    """Keys of our section `scrape` that the parameters of a source name."""
    keys = [
        field.encode_name
        for field in msgspec.structs.fields(_SourcePage)
        if plugin.parameters.get(field.encode_name) is not None
    ]
    page = validation.to_struct(
        {key: plugin.parameters[key] for key in keys}, _SourcePage, where=place
    )
    values = {
        "scheme": page.scheme,
        "path": "/" + page.path.removeprefix("/"),
        "port": page.port,
        "insecureSkipVerify": not page.insecure_skip_verify,
    }
    names = {"insecureSkipVerify": "verify_tls"}
    section: dict[str, object] = {
        names.get(key, key): value for key, value in values.items() if key in keys
    }
    files = {
        "ca_file": page.ca_cert_path,
        "cert_file": page.client_cert_path,
        "key_file": page.client_key_path,
    }
    if any(files.values()):
        section["tls"] = {key: name for key, name in files.items() if name}
    return section | _to_intervals(page.interval, place / "interval")


def _to_intervals(interval: str, place: Place) -> dict[str, object]:
    """Keys of our section `scrape` for an interval, as far as it is not that of upstream's ticks.

    Idle endpoints keep their own interval, as long as it is the longer one; loads stay known for three
    scrapes, as by default.
    """
    interval_s = validation.parse_duration(interval) if interval not in ("", "0") else 0.0
    if interval_s is None:
        raise ConfigError(
            place,
            wanted="a duration of 0 or more",
            got=validation.show(interval),
            fix="write 500ms or 2s",
        )
    if not interval_s:
        return {}
    usual = settings.ScrapeSection()
    intervals: dict[str, object] = {"busy_interval_s": max(_SHORTEST_S, interval_s)}
    if interval_s > usual.idle_interval_s:
        intervals |= {"idle_interval_s": interval_s, "stale_after_s": 3.0 * interval_s}
    return intervals


def _warn_of_model_sources(
    plugins: EppPlugins, scrape: Mapping[str, object], file: Place
) -> Iterator[str]:
    """Warn of sources of model lists with another scheme or other certificates than metrics have."""
    usual = {"scheme": "http", "verify_tls": False, "tls": {}}
    for plugin, place in plugins.find_plugins({_MODELS}, file):
        page = _read_page(plugin, place)
        for key, default in usual.items():
            if page.get(key, default) != scrape.get(key, default) and key in page:
                what = f"scheme {page[key]}" if key == "scheme" else "its check of certificates"
                yield (
                    f"plugin {plugin.reference}: {what} is not acted on: model lists are read as "
                    "metrics are"
                )


def convert_topology(plugins: EppPlugins, file: Place) -> EppPlugins:
    """Pass labels of topology extractors to the plugins that read what these extract.

    Raises:
        ConfigError: A label or the name of an extractor is no text, or a level is not known.
    """
    labels: dict[str, Mapping[str, str]] = {}
    for plugin, place in plugins.find_plugins({_TOPOLOGY}, file):
        topology = validation.to_struct(plugin.parameters, _Topology, where=place)
        labels[plugin.reference] = topology.to_labels()

    def with_labels(plugin: NamedPlugin, place: Place) -> NamedPlugin:
        if plugin.type not in _TOPOLOGY_READERS:
            return plugin
        written = {_EXTRACTOR_KEY: plugin.parameters.get(_EXTRACTOR_KEY)}
        reader = validation.to_struct(written, _TopologyReader, where=place)
        extractor = reader.topology_producer_name or _TOPOLOGY
        if not labels.get(extractor):
            return plugin
        parameters = {"labels": labels[extractor], **plugin.parameters}
        return msgspec.structs.replace(plugin, parameters=parameters)

    return msgspec.structs.replace(
        plugins,
        plugins=tuple(
            with_labels(plugin, file / "plugins" / index / "parameters")
            for index, plugin in enumerate(plugins.plugins)
        ),
    )
