"""Converts exact prefix cache plugins of an EndpointPickerConfig to the section `kv_events`.

Upstream, `token-producer` asks a renderer for the tokens of a prompt before the choice, and
`precise-prefix-cache-producer` looks their blocks up in an index that it keeps by KV events; scorers
name it as the producer of their matches. Here `kv_events` does both, and a prompt is rendered after the
choice, so settings about waiting, hashing and the size of the index have no effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec

from extproc.config import validation
from extproc.config.pool_sections import EppPlugins, NamedPlugin
from extproc.config.validation import Place
from extproc.errors import ConfigError
from extproc.scheduling.framework import UpstreamParameters
from extproc.scrape import local_tokenizer
from extproc.scrape.kv_event_subscriber import BIND_PATTERN

#: The producer, and the older scorer with a producer inside, which gives way to a producer of the file.
PRODUCER: Final = "precise-prefix-cache-producer"
SCORER: Final = "precise-prefix-cache-scorer"

#: The scorer that had the producer inside with `mode: cache_tracking`, before it was a type of its own.
#: Engines then connected to the picker, whose address was this by default.
_ESTIMATING_SCORER: Final = "prefix-cache-scorer"
_TRACKING: Final = "cache_tracking"
_ESTIMATING: Final = "estimate"
_TRACKING_ENDPOINT: Final = "tcp://*:5557"

#: Types of the plugin that tokenizes.
TOKENIZERS: Final = frozenset({"token-producer", "tokenizer"})

#: Seconds for which a prompt counts as on its way, here and upstream.
_SPECULATIVE_S: Final = 2.0

_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_AnyMap = Mapping[str, object]


class _PodDiscovery(UpstreamParameters, frozen=True):
    socket_port: _Port = 5557
    replay_socket_port: Annotated[int, msgspec.Meta(le=65535)] = 0
    pod_label_selector: str = ""
    pod_namespace: str = ""


class _KvEvents(UpstreamParameters, frozen=True):
    zmq_endpoint: str = ""
    topic_filter: str = ""
    concurrency: int = 4
    engine_type: Literal["vllm", "sglang", ""] = ""
    discover_pods: bool = True
    pod_discovery_config: _PodDiscovery | None = None


class _TokenProcessor(UpstreamParameters, frozen=True):
    block_size: int = 0
    block_size_tokens: int = 0
    hash_seed: str = ""
    hash_algorithm: str = ""


class _CacheBackend(UpstreamParameters, frozen=True, kw_only=True):
    name: str
    weight: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 1.0


class _Indexer(UpstreamParameters, frozen=True):
    kv_block_index_config: _AnyMap | None = None
    kv_cache_backend_configs: tuple[_CacheBackend, ...] | None = None
    # Of earlier releases.
    token_processor_config: _AnyMap | None = None
    prefix_store_config: _AnyMap | None = None
    tokenizers_pool_config: _AnyMap | None = None


class _Producer(UpstreamParameters, frozen=True):
    token_processor_config: _TokenProcessor | None = None
    indexer_config: _Indexer | None = None
    kv_events_config: _KvEvents | None = None
    speculative_indexing: bool = False
    speculative_ttl: str = msgspec.field(default="", name="speculativeTTL")


class _Renderer(UpstreamParameters, frozen=True):
    url: str = ""
    timeout: str = ""
    mm_timeout: str = ""


class _Tokenizer(UpstreamParameters, frozen=True):
    model_name: str = ""
    vllm: _Renderer | None = None
    estimate: _AnyMap | None = None
    uds_tokenizer_config: _AnyMap | None = None
    backend: str = ""


def replace_tracking_scorers(plugins: EppPlugins, file: Place) -> tuple[EppPlugins, list[str]]:
    """Replace scorers of earlier releases with a mode by the types that do the same, with warnings.

    Raises:
        ConfigError: A mode is unknown.
    """
    warnings: list[str] = []
    converted = tuple(
        _replace_tracking_scorer(plugin, warnings, file / "plugins" / index / "parameters")
        if plugin.type == _ESTIMATING_SCORER and plugin.parameters.get("mode") is not None
        else plugin
        for index, plugin in enumerate(plugins.plugins)
    )
    return msgspec.structs.replace(plugins, plugins=converted), warnings


def _replace_tracking_scorer(plugin: NamedPlugin, warnings: list[str], place: Place) -> NamedPlugin:
    parameters = dict(plugin.parameters)
    mode = parameters.pop("mode")
    if mode == _ESTIMATING:
        return msgspec.structs.replace(plugin, parameters=parameters)
    if mode != _TRACKING:
        raise ConfigError(
            place / "mode",
            wanted=f"one of {_TRACKING}, {_ESTIMATING}",
            got=validation.show(mode),
            fix=f"remove it, or write {SCORER} as the type to read KV events",
        )
    name = plugin.reference
    warnings.append(
        f"plugin {name}: mode {_TRACKING} is of earlier releases: it is read as {SCORER}, to which "
        "engines connect unless discoverPods is true"
    )
    if parameters.pop("kvCacheRedisAddr", None):
        warnings.append(f"plugin {name}: kvCacheRedisAddr is not read: no index is kept in Redis")
    events = parameters.get("kvEventsConfig") or {}
    if isinstance(events, Mapping):
        usual = {"discoverPods": False, "zmqEndpoint": _TRACKING_ENDPOINT}
        parameters["kvEventsConfig"] = {**usual, **events}
    return msgspec.structs.replace(plugin, type=SCORER, name=name, parameters=parameters)


def convert_kv_events(
    plugins: EppPlugins, file: Place
) -> tuple[dict[str, object] | None, list[str]]:
    """Convert the exact prefix cache plugins, and warn of settings without a counterpart.

    Returns:
        The section `kv_events`, None where no plugin reads events; and warnings.

    Raises:
        ConfigError: A parameter is unknown, of another type or out of range; or there are several
            producers with different ports.
    """
    warnings: list[str] = []
    producers = [*plugins.find_plugins({PRODUCER}, file)] or plugins.find_plugins({SCORER}, file)
    section: dict[str, object] | None = None
    for plugin, place in producers:
        converted = _convert_producer(plugin, warnings, place)
        if section and converted and section != converted:
            raise ConfigError(
                place,
                wanted="the ports of the other producer, because endpoints are subscribed to once",
                got=validation.show(converted),
                fix="keep one of the producers",
            )
        section = section or converted
    for plugin, place in plugins.find_plugins(TOKENIZERS, file):
        renderer = _convert_tokenizer(plugin, warnings, place, is_read=section is not None)
        if section is not None:
            section |= renderer
    return section, warnings


def _convert_producer(
    plugin: NamedPlugin, warnings: list[str], place: Place
) -> dict[str, object] | None:
    """The section of a producer; None where it reads no events."""
    producer = validation.to_struct(plugin.parameters, _Producer, where=place)
    name = plugin.reference
    indexer = producer.indexer_config or _Indexer()
    if indexer.tokenizers_pool_config is not None and plugin.type == PRODUCER:
        raise ConfigError(
            place / "indexerConfig" / "tokenizersPoolConfig",
            wanted="no tokenizers in this plugin, as upstream",
            got="a mapping",
            fix="remove it: engines are asked for the tokens of prompts",
        )
    if producer.speculative_ttl:
        seconds = validation.parse_duration(producer.speculative_ttl)
        if seconds is None:
            raise ConfigError(
                place / "speculativeTTL",
                wanted="a duration of 0 or more",
                got=validation.show(producer.speculative_ttl),
                fix="write 2s",
            )
        if seconds != _SPECULATIVE_S:
            warnings.append(
                f"plugin {name}: speculativeTTL is not acted on: a prompt counts as on its way for "
                f"{_SPECULATIVE_S:g} s"
            )
    if (indexer.kv_block_index_config or {}).get("enableMetrics"):
        warnings.append(
            f"plugin {name}: enableMetrics is not acted on: of llm_d_epp_kv_cache_* only "
            "events_active_subscribers and events_messages_received_total are served; query "
            "extproc_kv_event_* and llm_d_epp_prefix_indexer_hit_ratio"
        )
    section = _convert_events(
        producer.kv_events_config or _KvEvents(), name, warnings, place / "kvEventsConfig"
    )
    if section is not None:
        section |= _convert_backends(indexer.kv_cache_backend_configs or (), name, warnings)
        pool = indexer.tokenizers_pool_config or {}
        section |= _convert_folders(pool.get("local"), pool.get("modelName"))
    return section


def _convert_events(
    events: _KvEvents, name: str, warnings: list[str], place: Place
) -> dict[str, object] | None:
    """Keys of the section that say where events are published; None where none are read."""
    ports = events.pod_discovery_config or _PodDiscovery()
    section: dict[str, object] = {
        "enabled": True,
        "port": ports.socket_port,
        "replay_port": max(0, ports.replay_socket_port),
    }
    if events.discover_pods:
        if events.zmq_endpoint:
            warnings.append(
                f"plugin {name}: zmqEndpoint is not bound, because discoverPods is not false: engines "
                "have to listen for subscribers, as they do at an endpoint with a * such as "
                "tcp://*:5557"
            )
        return section
    if not events.zmq_endpoint:
        warnings.append(
            f"plugin {name}: no KV events are read with discoverPods: false and no zmqEndpoint; what "
            "engines hold is estimated, and corrected by what they report"
        )
        return None
    if re.match(BIND_PATTERN, events.zmq_endpoint) is None:
        raise ConfigError(
            place / "zmqEndpoint",
            wanted="an IP address or * to listen on, and a port",
            got=validation.show(events.zmq_endpoint),
            fix="write tcp://*:5557",
        )
    return section | {"bind": events.zmq_endpoint}


def _convert_backends(
    backends: Sequence[_CacheBackend], name: str, warnings: list[str]
) -> dict[str, object]:
    """Weights of tiers."""
    section: dict[str, object] = {}
    for backend in backends:
        tier = backend.name.lower()
        if tier == "cpu":
            section["cpu_weight"] = backend.weight
        elif tier != "gpu" or backend.weight != 1.0:
            warnings.append(
                f"plugin {name}: kvCacheBackendConfigs of {backend.name} is not acted on: blocks on the "
                "device count in full, those in storage by kv_events.storage_weight"
            )
    return section


def _convert_tokenizer(
    plugin: NamedPlugin, warnings: list[str], place: Place, *, is_read: bool
) -> dict[str, object]:
    """Keys of the section that name a renderer; none where engines render.

    Args:
        is_read: Whether KV events are read, and so prompts are rendered at all.
    """
    tokenizer = validation.to_struct(plugin.parameters, _Tokenizer, where=place)
    name = plugin.reference
    renderer = tokenizer.vllm or _Renderer()
    is_real = tokenizer.vllm is not None or tokenizer.model_name or tokenizer.uds_tokenizer_config
    if tokenizer.estimate is not None and is_real:
        raise ConfigError(
            place / "estimate",
            wanted="one of estimate, vllm and udsTokenizerConfig, as upstream",
            got="several",
            fix="remove estimate",
        )
    if tokenizer.estimate:
        warnings.append(
            f"plugin {name}: estimate is not acted on: prompt lengths follow the ratio of bytes to "
            "tokens that is learned for a model"
        )
    if tokenizer.vllm is not None and not tokenizer.model_name:
        raise ConfigError(
            place / "modelName",
            wanted="the model of the renderer, as upstream",
            got="nothing",
            fix="write its name, or remove vllm",
        )
    if not is_real:
        return {}
    if not is_read:
        warnings.append(
            f"plugin {name}: no tokenizer is asked without {PRODUCER}: prompt lengths follow the "
            "ratio of bytes to tokens that is learned for a model"
        )
        return {}
    folders = _convert_folders(tokenizer.uds_tokenizer_config, tokenizer.model_name)
    if folders:
        return folders
    if tokenizer.uds_tokenizer_config is not None:
        warnings.append(
            f"plugin {name}: udsTokenizerConfig is not acted on: engines are asked for the tokens "
            "of prompts, unless modelTokenizerMap has a folder that is here, and the extra tokenizer "
            "is installed"
        )
    if not renderer.url:
        return {}
    return {"render_url": renderer.url.rstrip("/"), "render_model": tokenizer.model_name}


def _convert_folders(tokenizers: object, model: object) -> dict[str, object]:
    """The folder of a tokenizer that is on this machine; none for those of sidecars alone."""
    folders = tokenizers.get("modelTokenizerMap") if isinstance(tokenizers, Mapping) else None
    path = folders.get(model) if isinstance(folders, Mapping) else None
    if not isinstance(path, str):
        return {}
    folder = path.removesuffix("/tokenizer.json")
    return {"tokenizer_path": folder} if local_tokenizer.is_available(folder) else {}


class _SourceProducer(UpstreamParameters, frozen=True, kw_only=True):
    """Parameters of `p2p-source-producer`."""

    prefix_match_info_producer_name: str = ""
    min_cached_token_delta: Annotated[int, msgspec.Meta(ge=1)] = 1
    prefill_profile_name: str = ""


def convert_kv_cache_source(plugins: EppPlugins, file: Place) -> dict[str, object]:
    """Convert `p2p-source-producer` to our section `scheduling.kv_cache_source`; empty without one.

    Raises:
        ConfigError: Upstream refuses its parameters.
    """
    for plugin, place in plugins.find_plugins({"p2p-source-producer"}, file):
        written = validation.to_struct(plugin.parameters, _SourceProducer, where=place)
        return {"min_cached_token_delta": written.min_cached_token_delta}
    return {}
