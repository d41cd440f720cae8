"""Converts `customMetrics` of an upstream file to our `scrape.extra_metrics`.

Upstream, a metrics extractor stores them as attributes of endpoints, by engine type. Here each is
looked for on every page, and plugins read it as `extra.NAME`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from extproc.config import validation
from extproc.config.scheduling_schema import EppPlugins, NamedPlugin
from extproc.scrape import engines

#: Upstream plugin types whose parameters name metrics.
_EXTRACTORS: Final = frozenset({"core-metrics-extractor", "model-server-protocol-metrics"})

#: Plugin types that read an attribute, and the parameter that names it.
_READERS: Final = {
    "endpoint-attribute-filter": "attribute",
    "endpoint-attribute-scorer": "attributeKey",
}

#: Engine types that upstream knows without configuration.
_BUILT_IN: Final = frozenset({"vllm", "sglang", "trtllm-serve", "triton-tensorrt-llm", "triton"})


class CustomMetric(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Metric that upstream stores as an attribute.

    Attributes:
        attribute_key: Name of the attribute.
        metric_spec: Selector of its samples.
    """

    attribute_key: validation.MetricName
    metric_spec: validation.Name


class EngineMetrics(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Metrics of one engine type; only the custom ones are acted on.

    Attributes:
        name: The engine type.
        custom_metrics: Metrics to read as attributes.
    """

    name: str
    custom_metrics: tuple[CustomMetric, ...] = ()
    queued_requests_spec: str = ""
    running_requests_spec: str = ""
    kv_usage_spec: str = ""
    lora_spec: str = ""
    cache_info_spec: str = ""
    cache_block_size_label_name: str = ""
    cache_num_blocks_label_name: str = ""
    cache_block_size_spec: str = ""
    cache_num_blocks_spec: str = ""

    @property
    def has_own_load(self) -> bool:
        """True if it names the load metrics of an engine that is not built in."""
        return self.name not in _BUILT_IN and any(
            (self.queued_requests_spec, self.running_requests_spec, self.kv_usage_spec)
        )


class _ExtractorParameters(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    engine_configs: tuple[EngineMetrics, ...] = ()


def convert(plugins: EppPlugins, *, where: str) -> tuple[EppPlugins, Mapping[str, str], list[str]]:
    """Convert custom metrics, and the names by which plugins read them.

    Args:
        plugins: Plugins and profiles of the file.
        where: The file, for errors.

    Returns:
        The plugins as they name our extra metrics, the extra metrics by name, and warnings.

    Raises:
        ConfigError: A metric has no valid name or selector.
    """
    selectors: dict[str, str] = {}
    warnings: list[str] = []
    for index, plugin in enumerate(plugins.plugins):
        if plugin.type in _EXTRACTORS:
            path = ("plugins", index, "parameters")
            _read(plugin, selectors, warnings, where=where, path=path)
    if selectors:
        renamed = tuple(_rename(plugin, selectors) for plugin in plugins.plugins)
        plugins = msgspec.structs.replace(plugins, plugins=renamed)
    return plugins, selectors, warnings


def _read(
    plugin: NamedPlugin,
    selectors: dict[str, str],
    warnings: list[str],
    *,
    where: str,
    path: validation.Path,
) -> None:
    """Add the custom metrics of an extractor."""
    written = plugin.parameters.get("engineConfigs")
    if not written:
        return
    parameters = validation.to_struct(
        {"engineConfigs": written}, _ExtractorParameters, where=where, path=path
    )
    for at, engine in enumerate(parameters.engine_configs):
        if engine.has_own_load:
            warnings.append(
                f"engine {engine.name}: its load is not read from the metrics that the file names: "
                "engines are recognized by their own metrics"
            )
        for n, metric in enumerate(engine.custom_metrics):
            spot = (*path, "engineConfigs", at, "customMetrics", n, "metricSpec")
            name, selector = metric.attribute_key, metric.metric_spec
            engines.series(selector, where=validation.location(where, spot))
            if selectors.setdefault(name, selector) != selector:
                warnings.append(
                    f"engine {engine.name}: {selector} is not read: {name} is "
                    f"{selectors[name]} for engines of all types"
                )


def _rename(plugin: NamedPlugin, selectors: Mapping[str, str]) -> NamedPlugin:
    """The plugin as it names the extra metric that it reads."""
    key = _READERS.get(plugin.type, "")
    attribute = plugin.parameters.get(key)
    if not isinstance(attribute, str) or attribute not in selectors:
        return plugin
    parameters = {**plugin.parameters, key: f"extra.{attribute}"}
    return msgspec.structs.replace(plugin, parameters=parameters)
