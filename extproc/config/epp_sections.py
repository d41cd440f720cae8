"""Converts sections of an EndpointPickerConfig: flow control, and custom metrics.

`flowControl` becomes our section `flow_control`. Upstream queues requests while its saturation detector reports saturation, in bands of priority, and
within a band by flow; here requests wait per pool, strictly by priority, and within a priority by
tenant. Common settings are converted; a warning names every other one.

`customMetrics` become our `scrape.extra_metrics`. Upstream, a metrics extractor stores them as attributes
of endpoints, by engine type. Here each is looked for on every page, and plugins read it as `extra.NAME`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from extproc.config import validation
from extproc.config.pool_sections import EppPlugins, NamedPlugin
from extproc.config.validation import Place
from extproc.errors import ConfigError
from extproc.flow_control.priority_band import Priority
from extproc.scheduling.framework import UpstreamParameters
from extproc.scrape import engines

#: The feature gate without which upstream ignores the section.
GATE: Final = "flowControl"

#: The feature gate by which replicas that do not lead know the endpoints too.
_ALL_REPLICAS: Final = "haPopulateNonLeaderDatastore"

#: Feature gates of upstream, and those of its earlier releases.
_GATES: Final = (GATE, _ALL_REPLICAS)
_EARLIER_GATES: Final = ("dataLayer", "enableLegacyMetrics", "prepareDataPlugins")

#: Words that Go reads as a boolean, in lower case: upstream lowers them first.
_BOOLEANS: Final = {
    **dict.fromkeys(("1", "t", "true"), True),
    **dict.fromkeys(("0", "f", "false"), False),
}

#: Seconds that a request waits without `defaultRequestTTL`, as upstream.
_DEFAULT_TTL_S: Final = 60.0

#: Seconds that a request waits with a time to live of 0. Upstream then waits as long as the client
#: does; Envoy's message_timeout takes no more than an hour.
_LONGEST_S: Final = 3600.0

#: Upstream policies by type, and the value of ours that does the same.
_FAIRNESS: Final = {
    "global-strict-fairness-policy": "none",
    "round-robin-fairness-policy": "round-robin",
}
#: Upstream policies that are not built, and the value of ours that comes nearest. A policy that shares
#: engines between tenants must not become `none`, which serves them by arrival.
_NEAREST_FAIRNESS: Final = {"program-aware-fairness": "round-robin"}
_ORDER: Final = {
    "fcfs-ordering-policy": "fcfs",
    "edf-ordering-policy": "edf",
    "slo-deadline-ordering-policy": "slo",
}

_POLICIES: Final[Mapping[str, Mapping[str, str]]] = {
    "fairnessPolicyRef": _FAIRNESS,
    "orderingPolicyRef": _ORDER,
}

_QUANTITY: Final = re.compile(
    r"\+?(\d{1,18}(?:\.\d{0,9})?|\.\d{1,9})(?:(m|k|M|G|T|P|E|[KMGTPE]i)|[eE]([+-]?\d{1,2}))?"
)
_POWERS: Final = "kMGTPE"


class _Band(UpstreamParameters, frozen=True):
    priority: Priority | None = None
    max_bytes: object = None
    max_requests: object = None
    fairness_policy_ref: str | None = None
    ordering_policy_ref: str | None = None


class UpstreamDetector(UpstreamParameters, frozen=True):
    """Section `saturationDetector`, with the thresholds of earlier releases."""

    plugin_ref: str = ""
    queue_depth_threshold: int | None = None
    kv_cache_util_threshold: float | None = None
    metrics_staleness_threshold: str | None = None

    @property
    def thresholds(self) -> dict[str, object]:
        """Thresholds that it has, as parameters of a utilization detector."""
        return {
            key: value
            for key, value in (
                ("queueDepthThreshold", self.queue_depth_threshold),
                ("kvCacheUtilThreshold", self.kv_cache_util_threshold),
            )
            if value is not None
        }


class _FeatureGates(UpstreamParameters, frozen=True):
    feature_gates: tuple[str, ...] = ()


class UpstreamFlowControl(UpstreamParameters, frozen=True):
    """Section `flowControl`; `convert_flow_control` reads quantities and durations."""

    max_bytes: object = None
    max_requests: object = None
    default_request_ttl: object = msgspec.field(default=None, name="defaultRequestTTL")
    no_endpoint_request_ttl: object = msgspec.field(default=None, name="noEndpointRequestTTL")
    default_priority_band: _Band | None = None
    default_negative_priority_band: _Band | None = None
    priority_bands: tuple[_Band, ...] | None = None
    usage_limit_policy_plugin_ref: str | None = None
    saturation_detector: UpstreamDetector | None = None
    enable_eviction: bool = False


def _quantity(written: object, place: Place) -> int:
    """Return a Kubernetes quantity as a number, rounded up; 0 if it is absent."""
    if written is None:
        return 0
    split = _QUANTITY.fullmatch(str(written).strip())
    if split is None or isinstance(written, bool):
        raise ConfigError(
            place,
            wanted="a quantity of 0 or more",
            got=validation.show(written),
            fix="write 100, 1k, 500M or 1Gi",
        )
    number, suffix, exponent = split.groups()
    if suffix is None:
        factor = 10.0 ** int(exponent or 0)
    elif suffix == "m":
        factor = 1e-3
    else:
        base = 1024.0 if suffix.endswith("i") else 1000.0
        factor = base ** (1 + _POWERS.index(suffix[0].replace("K", "k")))
    return min(math.ceil(float(number) * factor), 2**63 - 1)


def _wait_s(written: object, default_s: float, place: Place, warnings: list[str]) -> float:
    """Return a time to live, a Go duration, as the wait in seconds; `default_s` if it is absent."""
    if written is None:
        return default_s
    ttl_s = validation.parse_duration(written) if isinstance(written, str) else None
    if written in (0, "0"):
        ttl_s = 0.0
    if ttl_s is None:
        raise ConfigError(
            place,
            wanted="a duration of 0 or more",
            got=validation.show(written),
            fix="write 30s, 1m30s or 500ms",
        )
    if ttl_s > _LONGEST_S:
        warnings.append(
            f"{validation.format_path(place.path)}: {ttl_s:g} s are longer than Envoy lets a request "
            f"wait: it waits {_LONGEST_S:g} s at most"
        )
    return min(ttl_s or _LONGEST_S, _LONGEST_S)


def _read_gates(written: object, file: Place) -> dict[str, bool]:
    """Return feature gates by name; of several entries, the last one counts.

    Raises:
        ConfigError: They are no list of known names, or of `name=bool`.
    """
    tree = {} if written is None else {"featureGates": written}
    gates: dict[str, bool] = {}
    for at, gate in enumerate(validation.to_struct(tree, _FeatureGates, where=file).feature_gates):
        place = file / "featureGates" / at
        name, *values = gate.split("=")
        if name not in (*_GATES, *_EARLIER_GATES):
            raise ConfigError(
                place,
                wanted=f"one of {', '.join(_GATES)}",
                got=validation.show(name),
                fix=validation.suggest(name, _GATES, "remove it"),
            )
        value = _BOOLEANS.get(values[0].strip().lower()) if values else True
        if value is None:
            raise ConfigError(
                place,
                wanted=f"the name of a gate, or such as {GATE}=true",
                got=validation.show(gate),
                fix="write true or false behind the =, or the name alone",
            )
        gates[name] = value
    return gates


def _warn_gates(gates: Mapping[str, bool]) -> Iterator[str]:
    """Warn of gates without effect."""
    for name in gates:
        if name in _EARLIER_GATES:
            yield f"the feature gate {name} of an earlier release has no effect: remove it"
    if not gates.get(_ALL_REPLICAS, True):
        yield (
            f"the feature gate {_ALL_REPLICAS}=false has no effect: all replicas follow their pools, "
            "because all pick"
        )


def convert_flow_control(
    tree: Mapping[str, object], file: Place
) -> tuple[dict[str, object] | None, list[str]]:
    """Convert `flowControl` of an upstream file, and warn of settings without a counterpart.

    Returns:
        The section `flow_control`, None without the feature gate (requests go to engines at once);
        and warnings.

    Raises:
        ConfigError: A value is no quantity, duration or feature gate, a key or a policy is unknown.
    """
    written = tree.get("flowControl")
    gates = _read_gates(tree.get("featureGates"), file)
    warnings = list(_warn_gates(gates))
    if not gates.get(GATE):
        if written and (not isinstance(written, Mapping) or set(written) - {"saturationDetector"}):
            warnings.append(
                "flowControl has no effect without the feature gate, as upstream: requests go to "
                "engines at once; write featureGates: [flowControl]"
            )
        return None, warnings
    place = file / "flowControl"
    section: Mapping[str, Any] = msgspec.to_builtins(
        validation.to_struct(written or {}, UpstreamFlowControl, where=place)
    )
    policy_type = _policy_types(tree)
    waits: list[float] = []
    for key in ("defaultRequestTTL", "noEndpointRequestTTL"):
        usual_s = waits[0] if waits else _DEFAULT_TTL_S
        waits.append(_wait_s(section[key], usual_s, place / key, warnings))
    ours: dict[str, object] = {
        "enabled": True,
        "timeout_s": waits[0],
        "empty_timeout_s": waits[1],
        **_bounds(section, place),
        **_bands(section, place, policy_type, warnings),
    }
    if section["enableEviction"]:
        ours["eviction"] = True
    return ours, warnings


def _bounds(section: Mapping[str, Any], place: Place) -> dict[str, object]:
    """Convert the bounds of a band or of all; 0 is none."""
    bounds = {
        name: _quantity(section[key], place / key)
        for key, name in (("maxRequests", "max_requests"), ("maxBytes", "max_bytes"))
    }
    return {name: bound for name, bound in bounds.items() if bound}


def _bands(
    section: Mapping[str, Any],
    place: Place,
    policy_type: Callable[[str], str],
    warnings: list[str],
) -> dict[str, object]:
    """Convert the bands; the policies of `defaultPriorityBand` become those of all priorities.

    Other bands do not inherit them: upstream, a band without a policy has the usual one.
    """

    def convert(band: Mapping[str, Any], spot: Place) -> dict[str, object]:
        return {
            **_bounds(band, spot),
            "fairness": _policy("fairnessPolicyRef", band, spot, policy_type, warnings),
            "order": _policy("orderingPolicyRef", band, spot, policy_type, warnings),
        }

    usual: Mapping[str, Any] = msgspec.to_builtins(_Band())
    default = convert(section["defaultPriorityBand"] or usual, place / "defaultPriorityBand")
    ours = {key: default.pop(key) for key in ("fairness", "order")}
    written, spot = section["priorityBands"] or (), place / "priorityBands"
    # Go reads a priority that is absent as 0, and that of the defaults not at all.
    priorities = [band["priority"] or 0 for band in written]
    validation.check_distinct(priorities, "priority", spot)
    bands = [
        {"priority": priority, **convert(band, spot / at)}
        for at, (priority, band) in enumerate(zip(priorities, written, strict=True))
    ]
    if bands:
        ours["bands"] = bands
    if default:
        ours["default_band"] = default
    if section["defaultNegativePriorityBand"]:
        spot = place / "defaultNegativePriorityBand"
        ours["default_negative_band"] = convert(section["defaultNegativePriorityBand"], spot)
    return ours


def _policy_types(tree: Mapping[str, object]) -> Callable[[str], str]:
    """Return a function from plugin name to type; a name without a plugin is itself a type."""
    plugins = tree.get("plugins")
    types = {
        str(plugin.get("name") or plugin.get("type")): str(plugin.get("type"))
        for plugin in (plugins if isinstance(plugins, list) else ())
        if isinstance(plugin, Mapping)
    }
    return lambda name: types.get(name, name)


def _policy(
    key: str,
    band: Mapping[str, Any],
    place: Place,
    policy_type: Callable[[str], str],
    warnings: list[str],
) -> str:
    """Convert a policy of a band, the usual one where it names none; warn of one that is not built."""
    known = _POLICIES[key]
    kind = policy_type(band[key] or next(iter(known)))
    nearest = _NEAREST_FAIRNESS if known is _FAIRNESS else {}
    if kind in nearest:
        warnings.append(
            f"{validation.format_path((place / key).path)}: {kind} is not built: {nearest[kind]} is used in its "
            "place"
        )
    elif kind not in known:
        raise ConfigError(
            place / key,
            wanted=f"a policy such as {', '.join(known)}",
            got=validation.show(band[key]),
            fix="name a plugin of this file, or its type",
        )
    return known.get(kind) or nearest[kind]


#: Upstream plugin types whose parameters name metrics.
_EXTRACTORS: Final = frozenset({"core-metrics-extractor", "model-server-protocol-metrics"})

#: Plugin types that read an attribute, and the parameter that names it.
_READERS: Final = {
    "endpoint-attribute-filter": "attribute",
    "endpoint-attribute-scorer": "attributeKey",
}

_Selector = engines.MetricSelector

#: Metrics of engines that are read, by the keys that name them upstream. Its running requests of plain
#: Triton are a counter since the start, and are not read.
_READ_SPECS: Final[Mapping[str, frozenset[_Selector]]] = {
    "queuedRequestsSpec": frozenset(s for e in engines.TABLE for s in e.waiting),
    "runningRequestsSpec": frozenset(s for e in engines.TABLE for s in e.running)
    | {_Selector(b"nv_inference_exec_count")},
    "kvUsageSpec": frozenset(s for e in engines.TABLE for s in e.kv_usage),
    "loraSpec": frozenset(_Selector(e.adapters) for e in engines.TABLE),
    "cacheInfoSpec": frozenset(_Selector(s.name) for e in engines.TABLE for s in e.kv_blocks),
    "cacheBlockSizeSpec": frozenset(s for e in engines.TABLE for s in e.block_tokens),
    "cacheNumBlocksSpec": frozenset(s for e in engines.TABLE for s in e.kv_blocks),
    # Names of labels have the form of names of metrics.
    "cacheBlockSizeLabelName": frozenset(
        _Selector(s.label) for e in engines.TABLE for s in e.block_tokens
    ),
    "cacheNumBlocksLabelName": frozenset(
        _Selector(s.label) for e in engines.TABLE for s in e.kv_blocks
    ),
}


class CustomMetric(UpstreamParameters, frozen=True, kw_only=True):
    """Metric that upstream stores as an attribute.

    Attributes:
        metric_spec: Selector of its samples.
    """

    attribute_key: validation.MetricName
    metric_spec: validation.Name


class EngineMetrics(UpstreamParameters, frozen=True, kw_only=True):
    """Metrics of one engine type; only the custom ones are acted on.

    Attributes:
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

    def find_unread_specs(self, place: Place) -> list[str]:
        """Keys of metrics that are not read, because no known engine has them.

        Raises:
            ConfigError: A selector is not valid.
        """
        written: Mapping[str, Any] = msgspec.to_builtins(self)
        return [
            key
            for key, read in _READ_SPECS.items()
            if written[key] and engines.series(written[key], where=str(place / key))[0] not in read
        ]


class _ExtractorParameters(UpstreamParameters, frozen=True):
    engine_configs: tuple[EngineMetrics, ...] = ()


def convert_metrics(
    plugins: EppPlugins, file: Place
) -> tuple[EppPlugins, Mapping[str, str], list[str]]:
    """Convert custom metrics, and the names by which plugins read them.

    Returns:
        The plugins as they name our extra metrics, the extra metrics by name, and warnings.

    Raises:
        ConfigError: A metric has no valid name or selector.
    """
    selectors: dict[str, str] = {}
    warnings: list[str] = []
    for plugin, place in plugins.find_plugins(_EXTRACTORS, file):
        _read(plugin, selectors, warnings, place)
    if selectors:
        renamed = tuple(_rename(plugin, selectors) for plugin in plugins.plugins)
        plugins = msgspec.structs.replace(plugins, plugins=renamed)
    return plugins, selectors, warnings


def _read(
    plugin: NamedPlugin,
    selectors: dict[str, str],
    warnings: list[str],
    place: Place,
) -> None:
    """Add the custom metrics of an extractor."""
    written = plugin.parameters.get("engineConfigs")
    if not written:
        return
    parameters = validation.to_struct({"engineConfigs": written}, _ExtractorParameters, where=place)
    for at, engine in enumerate(parameters.engine_configs):
        unread = engine.find_unread_specs(place / "engineConfigs" / at)
        if unread:
            be = "is" if len(unread) == 1 else "are"
            warnings.append(
                f"engine {engine.name}: {', '.join(unread)} {be} not acted on: engines are recognized by "
                "metrics of their own, and other names are not looked for"
            )
        for n, metric in enumerate(engine.custom_metrics):
            spot = place / "engineConfigs" / at / "customMetrics" / n / "metricSpec"
            name, selector = metric.attribute_key, metric.metric_spec
            engines.series(selector, where=str(spot))
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
