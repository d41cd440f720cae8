"""Lints an Envoy configuration for limits that end queued requests or long responses.

Input is the static part of an Envoy file, or a config dump: every HTTP connection manager with an
ext_proc filter, its routes, and the clusters they name. Defaults are Envoy's
(docs/spec/envoy.md#time-limits, docs/spec/envoy.md#large-bodies).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from extproc.config.settings import Settings
from extproc.errors import ConfigError
from extproc.flow_control.request_headers import FlowHeaders
from extproc.protocol import headers
from extproc.routing.request_preparer import OBJECTIVE_HEADERS

#: Any part of it.
YamlTree = Mapping[str, Any]

#: Requests a cluster lets be open at once where its file says nothing (Envoy's default).
REQUESTS = 1024

_SECONDS = re.compile(r"-?[0-9]+(\.[0-9]+)?s")

#: Keys only clusters have.
_CLUSTERS = frozenset(
    {
        "load_assignment",
        "lb_policy",
        "original_dst_lb_config",
        "eds_cluster_config",
        "load_balancing_policy",
    }
)


def open_requests(cluster: YamlTree) -> int:
    """Requests that a cluster's circuit breakers allow at once (count)."""
    thresholds = (cluster.get("circuit_breakers") or {}).get("thresholds") or []
    usual = (limit for limit in thresholds if limit.get("priority", "DEFAULT") == "DEFAULT")
    first: YamlTree = next(usual, {})
    return min(int(first.get(key, REQUESTS)) for key in ("max_requests", "max_pending_requests"))


def routes(manager: YamlTree) -> Iterator[YamlTree]:
    """Yield the route actions of a connection manager."""
    for message in walk(manager):
        route = message.get("route")
        if isinstance(route, Mapping) and "match" in message:
            yield route


def route_clusters(manager: YamlTree) -> Iterator[str]:
    """Yield the names of the clusters that routes of a connection manager name."""
    for route in routes(manager):
        if isinstance(route.get("cluster"), str):
            yield route["cluster"]
        for weighted in (route.get("weighted_clusters") or {}).get("clusters") or []:
            yield weighted.get("name", "")


def mode(processor: YamlTree, name: str) -> str:
    """Return a processing mode of an ext_proc filter; Envoy's default if it is not written."""
    usual = "SKIP" if "trailer" in name else "SEND" if "header" in name else "NONE"
    return str((processor.get("processing_mode") or {}).get(name, usual))


def removed_headers(manager: YamlTree) -> frozenset[str]:
    """Lowercase request headers that a connection manager removes before its ext_proc filter."""
    early = manager.get("early_header_mutation_extensions") or []
    ahead = itertools.takewhile(
        lambda extension: not is_a(extension.get("typed_config") or {}, _PROCESSOR),
        manager.get("http_filters") or [],
    )
    removed: set[str] = set()
    for extension in (*early, *ahead):
        config = extension.get("typed_config") or {}
        if not is_a(config, "header_mutation.v3.HeaderMutation"):
            continue
        # The early extension has its list in `mutations`, the filter one level below.
        mutations = config.get("mutations") or []
        if isinstance(mutations, Mapping):
            mutations = mutations.get("request_mutations") or []
        removed |= {str(change["remove"]).lower() for change in mutations if "remove" in change}
    return frozenset(removed)


def is_a(message: YamlTree, kind: str) -> bool:
    """Return True if the `@type` of a mapping ends with `kind`."""
    return str(message.get("@type", "")).endswith(kind)


def find_processors(tree: object) -> Iterator[YamlTree]:
    """Yield the ext_proc filters in a tree."""
    return (message for message in walk(tree) if is_a(message, _PROCESSOR))


def cluster_name(message: YamlTree) -> str:
    """Return the name of a cluster; empty if the mapping is no cluster."""
    return str(message["name"]) if "name" in message and _CLUSTERS & set(message) else ""


def has_cluster_discovery(tree: object) -> bool:
    """Return True if clusters may come over xDS."""
    return any("cds_config" in part or "dynamic_active_clusters" in part for part in walk(tree))


def walk(tree: object) -> Iterator[YamlTree]:
    """Yield every mapping in a tree, parents before children."""
    if isinstance(tree, Mapping):
        yield tree
        for value in tree.values():
            yield from walk(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from walk(value)


def seconds(tree: YamlTree, name: str, usual: float, *, where: str) -> float:
    """Read a duration as Envoy's JSON writes it, in seconds; 0 is off, `usual` the default.

    Raises:
        ConfigError: The value is no duration.
    """
    text = tree.get(name)
    if text is None:
        return usual
    if not isinstance(text, str) or not _SECONDS.fullmatch(text):
        raise ConfigError(
            where, wanted=f"{name} in seconds, such as 60s", got=str(text), fix="correct it"
        )
    return float(text[:-1])


_MANAGER = "http_connection_manager.v3.HttpConnectionManager"
_PROCESSOR = "ext_proc.v3.ExternalProcessor"
_MIB = 1024 * 1024

#: Envoy's defaults.
_MESSAGE_S = 0.2
_STREAM_IDLE_S = 300.0
_ROUTE_S = 15.0
_BUFFER_BYTES = _MIB

#: Below this many seconds, clients with slow links cannot send a large body.
_UPLOAD_S = 60.0

#: vLLM (uvicorn) closes idle connections after this many seconds.
_ENGINE_KEEPS_S = 5.0

#: Headers by which a client could say where its request goes.
_STEERING = frozenset(
    {
        headers.DESTINATION,
        headers.SELECTION,
        "x-gateway-destination-endpoint-subset",
        "x-gateway-destination-endpoint-served",
    }
)

#: Headers that say whose a request is, how much it counts and how soon it wants its first token.
_TURNS = frozenset({*FlowHeaders().tenant_headers, *OBJECTIVE_HEADERS, *FlowHeaders().slo_headers})

#: Body modes in which Envoy waits for each answer no longer than `message_timeout`.
_TIMED = frozenset({"NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL"})

#: Body modes that buffer the request.
_BUFFERED = frozenset({"BUFFERED", "BUFFERED_PARTIAL"})


class Finding(msgspec.Struct, frozen=True):
    """A result of the lint.

    Attributes:
        severity: `cut` for a limit that ends valid requests or responses, `warning` for a likely
            mistake, `fine` for a check that passed.
        place: Connection manager, route or cluster in the file.
        text: The effect, and the value to write instead.
    """

    severity: Literal["cut", "warning", "fine"]
    place: str
    text: str


_cut = functools.partial(Finding, "cut")
_warning = functools.partial(Finding, "warning")
_fine = functools.partial(Finding, "fine")


def read(tree: object, settings: Settings, *, where: str) -> Iterator[Finding]:
    """Lint an Envoy configuration.

    Args:
        tree: The file, as mappings and lists.
        settings: Settings of the extproc that Envoy calls.
        where: The file, for errors.

    Raises:
        ConfigError: It has no connection manager with an ext_proc filter, or an invalid duration.
    """
    clusters = {name: message for message in walk(tree) if (name := cluster_name(message))}
    managers = [message for message in walk(tree) if is_a(message, _MANAGER)]
    if next(find_processors(managers), None) is None:
        raise ConfigError(
            where,
            wanted="an HTTP connection manager with an ext_proc filter",
            got=f"{len(managers)} without" if managers else "no connection manager",
            fix="name the file of an Envoy that calls extproc",
        )
    for at, manager in enumerate(managers):
        for processor in find_processors(manager):
            place = f"connection manager {manager.get('stat_prefix', at)}"
            yield from _manager(manager, processor, settings, place=place, where=where)
            yield from _uploads(manager, place=place, where=where)
            yield from _clients(manager, place=place)
            yield from _routes(manager, settings, place=place, where=where)
            yield from _processor(processor, clusters, settings, place=place, where=where)
    limits = [message for message in walk(tree) if "per_connection_buffer_limit_bytes" in message]
    yield from _buffers(limits, managers, settings)
    named = {name for manager in managers for name in route_clusters(manager)}
    if not has_cluster_discovery(tree):
        yield from _missing_clusters(sorted({*named, *_picker_clusters(managers)} - set(clusters)))
    for name in sorted(named & set(clusters)):
        yield from _engines(name, clusters[name], where=where)


def _picker_clusters(managers: list[YamlTree]) -> Iterator[str]:
    """Names of the clusters to which the ext_proc filters connect."""
    for processor in find_processors(managers):
        service = processor.get("grpc_service") or {}
        name = (service.get("envoy_grpc") or {}).get("cluster_name")
        if name:
            yield str(name)


def _missing_clusters(names: list[str]) -> Iterator[Finding]:
    for name in names:
        yield _cut(
            f"cluster {name}",
            "no cluster has this name, and there is no cds_config that could bring it: what goes "
            "there is answered with 503; add it",
        )


def longest_wait_s(settings: Settings) -> float:
    """The longest time a request may wait before it is routed (seconds); 0 if none waits."""
    holding = settings.flow_control
    if not holding.enabled:
        return 0.0
    named = max((holding.timeout_s, holding.empty_timeout_s, *holding.by_objective.values()))
    return min(named, holding.max_timeout_s)


def _manager(
    manager: YamlTree, processor: YamlTree, settings: Settings, *, place: str, where: str
) -> Iterator[Finding]:
    hold_s = longest_wait_s(settings)
    idle_s = seconds(manager, "stream_idle_timeout", _STREAM_IDLE_S, where=where)
    if idle_s and idle_s <= max(hold_s, _STREAM_IDLE_S):
        yield Finding(
            "cut" if idle_s <= hold_s else "warning",
            place,
            f"stream_idle_timeout is {idle_s:g} s: it ends requests that wait up to {hold_s:g} s, "
            "and answers that say nothing for that long; write 3600s",
        )
    else:
        yield _fine(place, f"stream_idle_timeout is {_format_seconds(idle_s)}")
    common = manager.get("common_http_protocol_options") or {}
    duration_s = seconds(common, "max_stream_duration", 0.0, where=where)
    if duration_s:
        yield _warning(
            place,
            f"max_stream_duration is {duration_s:g} s: every response that takes longer is cut",
        )
    body = mode(processor, "request_body_mode")
    message_s = seconds(processor, "message_timeout", _MESSAGE_S, where=where)
    if body in _TIMED and message_s <= hold_s:
        yield _cut(
            place,
            f"message_timeout is {message_s:g} s: with request_body_mode {body} a request that "
            f"waits longer gets 504, and requests may wait {hold_s:g} s; write "
            f"{hold_s + 60:g}s, at most 3600s",
        )
    elif body in _TIMED and message_s <= 1.0:
        yield _warning(
            place,
            f"message_timeout is {message_s:g} s: extproc being busy for that long costs a 504",
        )
    else:
        yield _fine(place, f"message_timeout is {message_s:g} s, body mode {body}")


def _uploads(manager: YamlTree, *, place: str, where: str) -> Iterator[Finding]:
    """Check the time limits of uploads; the time in our queue does not count towards them."""
    head_s = seconds(manager, "request_headers_timeout", 0.0, where=where)
    if not head_s:
        yield _warning(
            place,
            "request_headers_timeout is off: a client that never ends its headers keeps its "
            "connection; write 10s",
        )
    upload_s = seconds(manager, "request_timeout", 0.0, where=where)
    if not upload_s:
        yield _warning(
            place,
            "request_timeout is off: nothing but stream_idle_timeout ends a body that comes in "
            "drops; write 600s",
        )
    elif upload_s < _UPLOAD_S:
        yield _warning(
            place, f"request_timeout is {upload_s:g} s: slow uploads are cut; write 600s"
        )
    else:
        yield _fine(place, f"request_timeout is {upload_s:g} s")


def _clients(manager: YamlTree, *, place: str) -> Iterator[Finding]:
    """Check that headers of clients cannot choose the endpoint or the priority."""
    removed = removed_headers(manager)
    steering = sorted(_STEERING - removed)
    if steering:
        yield _warning(
            place,
            f"nothing removes {', '.join(steering)} of clients before ext_proc: they decide where "
            "requests go; remove them in a header_mutation filter in front of it",
        )
    turns = ", ".join(sorted(_TURNS - removed))
    if turns:
        yield _fine(place, f"clients are trusted to choose tenant and objective: {turns} pass")
    else:
        yield _fine(place, "clients cannot choose tenant and objective")


def _routes(manager: YamlTree, settings: Settings, *, place: str, where: str) -> Iterator[Finding]:
    hold_s = longest_wait_s(settings)
    for number, route in enumerate(routes(manager)):
        spot = f"{place}, route {number}"
        answer_s = seconds(route, "timeout", _ROUTE_S, where=where)
        if answer_s:
            yield _cut(
                spot,
                f"timeout is {answer_s:g} s from the end of the request to the end of the response, "
                f"waiting included: long responses are cut; write 0s",
            )
        else:
            yield _fine(spot, "timeout is off")
        if "idle_timeout" in route:
            idle_s = seconds(route, "idle_timeout", 0.0, where=where)
            if idle_s and idle_s <= hold_s:
                yield _cut(
                    spot,
                    f"idle_timeout is {idle_s:g} s, before stream_idle_timeout: it ends requests "
                    f"that wait up to {hold_s:g} s",
                )
        longest = route.get("max_stream_duration") or {}
        duration_s = seconds(longest, "max_stream_duration", 0.0, where=where)
        if duration_s:
            yield _warning(
                spot, f"max_stream_duration is {duration_s:g} s: longer responses are cut"
            )


def _processor(
    processor: YamlTree,
    clusters: Mapping[str, YamlTree],
    settings: Settings,
    *,
    place: str,
    where: str,
) -> Iterator[Finding]:
    service = processor.get("grpc_service") or {}
    timeout_s = seconds(service, "timeout", 0.0, where=where)
    if timeout_s:
        yield _cut(
            place,
            f"grpc_service.timeout is {timeout_s:g} s: the stream to extproc ends then, and with "
            "it the account of the request; remove it",
        )
    if mode(processor, "request_body_mode") == "NONE":
        yield _warning(
            place,
            "request_body_mode is NONE: extproc sees neither model nor prompt; write BUFFERED "
            "or FULL_DUPLEX_STREAMED",
        )
    if mode(processor, "response_header_mode") == "SKIP":
        yield _warning(
            place,
            "response_header_mode is SKIP: extproc sees no status, so failing endpoints stay in "
            "use; write SEND",
        )
    yield from _bodies(processor, place=place)
    options = processor.get("metadata_options") or {}
    received = ((options.get("receiving_namespaces") or {}).get("untyped")) or []
    if "envoy.lb" not in received:
        yield _warning(
            place,
            "metadata_options.receiving_namespaces lacks envoy.lb: the destination crosses as a "
            "header only",
        )
    cluster = clusters.get(((service.get("envoy_grpc") or {}).get("cluster_name")) or "")
    if cluster is not None:
        yield from _breakers(cluster, settings, place=f"cluster {cluster['name']}")


def _bodies(processor: YamlTree, *, place: str) -> Iterator[Finding]:
    """Check that body and trailer modes fit each other."""
    duplex = "FULL_DUPLEX_STREAMED"
    for way in ("request", "response"):
        trailers = mode(processor, f"{way}_trailer_mode")
        if mode(processor, f"{way}_body_mode") == duplex and trailers != "SEND":
            yield _cut(place, f"{way}_body_mode {duplex} needs {way}_trailer_mode SEND")
    if mode(processor, "response_trailer_mode") != "SEND":
        yield _warning(
            place,
            "response_trailer_mode is not SEND: extproc cannot tell when a response ends, so its "
            "account of open requests is too low",
        )
    if processor.get("failure_mode_allow") and mode(processor, "request_body_mode") == duplex:
        yield _warning(
            place,
            f"failure_mode_allow has no effect on requests with a body in {duplex}: once a piece "
            "was sent, a lost replica of extproc is a 500",
        )


def _breakers(cluster: YamlTree, settings: Settings, *, place: str) -> Iterator[Finding]:
    """Check circuit breakers: every open request has a stream to extproc, queued ones too."""
    held = settings.flow_control.max_requests if settings.flow_control.enabled else 0
    required = max(held, REQUESTS + 1)
    num_allowed = open_requests(cluster)
    if num_allowed < required:
        yield Finding(
            "cut" if num_allowed <= held else "warning",
            place,
            f"circuit_breakers let {num_allowed} requests be open at once, one for every request under "
            f"way; {held} may wait alone: write max_requests and max_pending_requests 40000",
        )


def _engines(name: str, cluster: YamlTree, *, where: str) -> Iterator[Finding]:
    place = f"cluster {name}"
    if open_requests(cluster) <= REQUESTS:
        yield _warning(
            place, f"circuit_breakers let {open_requests(cluster)} requests be open at once"
        )
    options: YamlTree = next(
        (
            message["common_http_protocol_options"]
            for message in walk(cluster)
            if isinstance(message.get("common_http_protocol_options"), Mapping)
        ),
        {},
    )
    idle_s = seconds(options, "idle_timeout", 3600.0, where=where)
    if idle_s >= _ENGINE_KEEPS_S or not idle_s:
        yield _warning(
            place,
            f"idle_timeout of upstream connections is {_format_seconds(idle_s)}: vLLM closes them after "
            f"{_ENGINE_KEEPS_S:g} s, and a request on its way then is a 503; write 2s",
        )


def _buffers(
    limits: list[YamlTree], managers: list[YamlTree], settings: Settings
) -> Iterator[Finding]:
    modes = {mode(processor, "request_body_mode") for processor in find_processors(managers)}
    if not modes & _BUFFERED:
        return
    listeners = [listener for listener in limits if "filter_chains" in listener]
    size = min(
        (int(listener["per_connection_buffer_limit_bytes"]) for listener in listeners),
        default=_BUFFER_BYTES,
    )
    wanted = settings.limits.max_body_bytes
    if size < wanted:
        yield _warning(
            "listener",
            f"per_connection_buffer_limit_bytes is {size}: larger bodies are 413, and extproc "
            f"would take {wanted}",
        )
    if size > settings.limits.max_message_bytes:
        yield _cut(
            "listener",
            f"per_connection_buffer_limit_bytes is {size}, above limits.max_message_bytes "
            f"({settings.limits.max_message_bytes}): a larger body breaks the stream",
        )


def _format_seconds(seconds: float) -> str:
    return f"{seconds:g} s" if seconds else "off"
