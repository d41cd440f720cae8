"""Lints an Envoy configuration for what ends, misleads or loses requests.

Input is the static part of an Envoy file, or a config dump: every HTTP connection manager with an
ext_proc filter, that filter (`envoy_filter_lint`), its routes, and the clusters they name
(`envoy_cluster_lint`). Defaults are Envoy's (docs/spec/envoy.md#time-limits,
docs/spec/envoy.md#large-bodies).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from extproc.config import envoy_cluster_lint, envoy_filter_lint, finding
from extproc.config.envoy_tree import (
    MANAGER,
    YamlTree,
    apply_runtime_limits,
    cluster_name,
    divided_clusters,
    effective_processors,
    find_managers,
    has_cluster_discovery,
    is_a,
    is_idle,
    mode,
    name_as_proto,
    picker_clusters,
    removed_headers,
    route_clusters,
    routes,
    seconds,
    unseen_clusters,
    walk,
)
from extproc.config.finding import Finding, Severity
from extproc.config.settings import Settings
from extproc.errors import ConfigError
from extproc.protocol import headers
from extproc.request import FlowHeaders
from extproc.routing.request_preparer import OBJECTIVE_HEADERS

#: Envoy's defaults.
_MESSAGE_S = 0.2
_STREAM_IDLE_S = 300.0
_ROUTE_S = 15.0

#: Longest `message_timeout` that Envoy takes (seconds).
_MAX_MESSAGE_S = 3600.0

#: Below this many seconds, clients with slow links cannot send a large body.
_UPLOAD_S = 60.0

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

#: What a format of local replies has for the body of the mapper, or for Envoy's own text without one.
_LOCAL_REPLY_BODY = "%LOCAL_REPLY_BODY%"

#: Body modes in which Envoy waits for each answer no longer than `message_timeout`.
_TIMED = frozenset({"NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL"})


def read(tree: object, settings: Settings, *, where: str) -> Iterator[Finding]:
    """Lint an Envoy configuration.

    Raises:
        ConfigError: It has no connection manager with an ext_proc filter, or an invalid duration.
    """
    tree = name_as_proto(tree)
    clusters = {
        name: apply_runtime_limits(tree, message)
        for message in walk(tree)
        if (name := cluster_name(message))
    }
    managers = find_managers(tree)
    if not managers:
        others = sum(is_a(message, MANAGER) for message in walk(tree))
        raise ConfigError(
            where,
            wanted="an HTTP connection manager with an ext_proc filter",
            got=f"{others} without" if others else "no connection manager",
            fix="name the file of an Envoy that calls extproc",
        )
    hold_s = longest_wait_s(settings)
    idle = [manager for manager in managers if is_idle(manager)]
    for at, manager in enumerate(managers):
        place = f"connection manager {manager.get('stat_prefix', at)}"
        if manager in idle:
            is_elsewhere = len(idle) < len(managers)
            yield _idle_filter("note" if is_elsewhere else "error", place=place)
            continue
        routed = [clusters[name] for name in set(route_clusters(manager)) & set(clusters)]
        by_header = bool(routed) and all(map(envoy_cluster_lint.follows_header, routed))
        for processor in effective_processors(manager):
            yield from _waits(manager, processor, hold_s, place=place, where=where)
            yield from envoy_filter_lint.options(
                processor, settings, by_header=by_header, place=place, where=where
            )
            yield from envoy_filter_lint.modes(processor, place=place)
            yield from envoy_filter_lint.retries(manager, processor, place=place)
            yield from _picker_down(manager, processor, clusters, place=place)
            yield from envoy_filter_lint.mutations(processor, place=place)
        yield from _uploads(manager, place=place, where=where)
        yield from _clients(manager, place=place)
        yield from _routes(manager, hold_s, place=place, where=where)
        yield from _unused_choices(manager, clusters, place=place)
        yield from _local_replies(manager, place=place)
        yield from _request_ids(manager, settings, place=place)
    yield from envoy_cluster_lint.buffers(tree, settings, where=where)
    named = {name for manager in managers for name in route_clusters(manager)}
    called = set(picker_clusters(managers))
    if not has_cluster_discovery(tree):
        yield from envoy_cluster_lint.missing(sorted({*named, *called} - set(clusters)))
    for name in sorted(called & set(clusters)):
        yield from envoy_cluster_lint.picker(clusters[name], settings, where=where)
    engines = [
        result
        for manager in managers
        for result in envoy_cluster_lint.engines(
            [clusters[name] for name in sorted(set(route_clusters(manager)) & set(clusters))],
            settings,
            where=where,
        )
    ]
    yield from dict.fromkeys(engines)  # managers share clusters


def _idle_filter(severity: Severity, *, place: str) -> Finding:
    return Finding(
        severity,
        "ext_proc_disabled",
        place,
        "no route passes requests to the ext_proc filter: Envoy never calls extproc",
        wanted="a route with the filter enabled",
        fix="remove disabled of the filter and of typed_per_filter_config, and write "
        "request_header_mode: SEND",
    )


def longest_wait_s(settings: Settings) -> float:
    """The longest time a request may wait before it is routed (seconds); 0 if none waits."""
    section = settings.flow_control
    if not section.enabled:
        return 0.0
    named = max((section.timeout_s, section.empty_timeout_s, *section.by_objective.values()))
    return min(named, section.max_timeout_s)


def _waits(
    manager: YamlTree, processor: YamlTree, hold_s: float, *, place: str, where: str
) -> Iterator[Finding]:
    """Check the limits of a request that waits, and of an answer that is silent."""
    idle_s = seconds(manager, "stream_idle_timeout", _STREAM_IDLE_S, where=where)
    limits = [route.get("idle_timeout") for route in routes(manager)]
    if limits and None not in limits:
        text = "each route has an idle_timeout of its own, which replaces stream_idle_timeout"
        yield finding.fine("stream_idle_timeout", place, text)
    elif idle_s and idle_s <= max(hold_s, _STREAM_IDLE_S):
        yield _short_idle_limit(
            "stream_idle_timeout",
            place,
            f"stream_idle_timeout is {idle_s:g} s",
            idle_s=idle_s,
            hold_s=hold_s,
            fix="write stream_idle_timeout: 3600s",
        )
    else:
        limit = f"{idle_s:g} s" if idle_s else "off"
        yield finding.fine("stream_idle_timeout", place, f"stream_idle_timeout is {limit}")
    common = manager.get("common_http_protocol_options") or {}
    duration_s = seconds(common, "max_stream_duration", 0.0, where=where)
    if duration_s:
        yield finding.warning(
            "max_stream_duration",
            place,
            f"max_stream_duration is {duration_s:g} s: every response that takes longer is cut",
            wanted="none",
            fix="remove max_stream_duration from common_http_protocol_options",
        )
    body = mode(processor, "request_body_mode")
    message_s = seconds(processor, "message_timeout", _MESSAGE_S, where=where)
    if not message_s:
        yield finding.error(
            "message_timeout",
            place,
            "message_timeout is 0 s, which is not off: it ends at once, and every request fails",
            wanted="more than 0 s",
            fix=f"write message_timeout: {_MAX_MESSAGE_S:g}s",
        )
    elif body in _TIMED and message_s <= hold_s:
        yield finding.cut(
            "message_timeout",
            place,
            f"message_timeout is {message_s:g} s: with request_body_mode {body} a request that "
            f"waits longer gets 504, and requests may wait {hold_s:g} s",
            wanted=f"more than {hold_s:g} s",
            fix=f"write message_timeout: {min(hold_s + 60, _MAX_MESSAGE_S):g}s",
        )
    elif body in _TIMED and message_s <= 1.0:
        yield finding.warning(
            "message_timeout",
            place,
            f"message_timeout is {message_s:g} s: extproc being busy for that long costs a 504",
            wanted="more than 1 s",
            fix="write message_timeout: 3600s",
        )
    else:
        limit = f"message_timeout is {message_s:g} s, body mode {body}"
        yield finding.fine("message_timeout", place, limit)


def _uploads(manager: YamlTree, *, place: str, where: str) -> Iterator[Finding]:
    """Check the time limits of uploads; the time in our queue does not count towards them."""
    head_s = seconds(manager, "request_headers_timeout", 0.0, where=where)
    if not head_s:
        yield finding.warning(
            "request_headers_timeout",
            place,
            "request_headers_timeout is off: a client that never ends its headers keeps its "
            "connection",
            wanted="a limit",
            fix="write request_headers_timeout: 10s",
        )
    upload_s = seconds(manager, "request_timeout", 0.0, where=where)
    if upload_s >= _UPLOAD_S:
        yield finding.fine("request_timeout", place, f"request_timeout is {upload_s:g} s")
        return
    effect = "slow uploads are cut"
    if not upload_s:
        effect = "nothing but stream_idle_timeout ends a body that comes in drops"
    yield finding.warning(
        "request_timeout",
        place,
        f"request_timeout is {f'{upload_s:g} s' if upload_s else 'off'}: {effect}",
        wanted=f"{_UPLOAD_S:g} s or more",
        fix="write request_timeout: 600s",
    )


def _clients(manager: YamlTree, *, place: str) -> Iterator[Finding]:
    """Check that headers of clients cannot choose the endpoint or the priority."""
    removed = removed_headers(manager, _STEERING | _TURNS)
    steering = sorted(_STEERING - removed)
    if steering:
        yield finding.warning(
            "steering_headers",
            place,
            f"nothing removes {', '.join(steering)} of clients before ext_proc: they decide where "
            "requests go",
            wanted="a header_mutation filter in front of ext_proc that removes them",
            fix="add "
            + ", ".join(f"- remove: {name}" for name in steering)
            + " to request_mutations of a header_mutation filter in front of it",
        )
    turns = ", ".join(sorted(_TURNS - removed))
    if turns:
        yield finding.fine(
            "trusted_headers",
            place,
            f"clients are trusted to choose tenant and objective: {turns} pass",
        )
    else:
        yield finding.fine("trusted_headers", place, "clients cannot choose tenant and objective")


def _routes(manager: YamlTree, hold_s: float, *, place: str, where: str) -> Iterator[Finding]:
    for number, route in enumerate(routes(manager)):
        spot = f"{place}, route {number}"
        answer_s = seconds(route, "timeout", _ROUTE_S, where=where)
        if answer_s:
            yield finding.cut(
                "route_timeout",
                spot,
                f"timeout is {answer_s:g} s from the end of the request to the end of the response, "
                "waiting included: long responses are cut",
                wanted="none",
                fix="write timeout: 0s",
            )
        else:
            yield finding.fine("route_timeout", spot, "timeout is off")
        idle_s = seconds(route, "idle_timeout", 0.0, where=where)
        if idle_s and idle_s <= max(hold_s, _STREAM_IDLE_S):
            yield _short_idle_limit(
                "route_idle_timeout",
                spot,
                f"idle_timeout is {idle_s:g} s, before stream_idle_timeout",
                idle_s=idle_s,
                hold_s=hold_s,
                fix="remove idle_timeout of the route",
            )
        longest = route.get("max_stream_duration") or {}
        duration_s = seconds(longest, "max_stream_duration", 0.0, where=where)
        if duration_s:
            yield finding.warning(
                "route_stream_duration",
                spot,
                f"max_stream_duration is {duration_s:g} s: longer responses are cut",
                wanted="none",
                fix="remove max_stream_duration of the route",
            )
        yield from _tries(route, spot=spot, where=where)


def _short_idle_limit(
    check: str, place: str, limit: str, *, idle_s: float, hold_s: float, fix: str
) -> Finding:
    """Finding about a limit that ends silent answers, and requests where they wait longer."""
    waiting = f"requests that wait, which may take {hold_s:g} s, and " if idle_s <= hold_s else ""
    return Finding(
        "cut" if waiting else "warning",
        check,
        place,
        f"{limit}: it ends {waiting}answers that say nothing for {idle_s:g} s",
        wanted=f"more than {max(hold_s, _STREAM_IDLE_S):g} s",
        fix=fix,
    )


def _unused_choices(
    manager: YamlTree, clusters: Mapping[str, YamlTree], *, place: str
) -> Iterator[Finding]:
    """Check that every request to a cluster of engines goes to the endpoint of its picker."""
    choosing = {
        name for name, cluster in clusters.items() if envoy_cluster_lint.is_override_host(cluster)
    }
    for name in sorted({*unseen_clusters(manager)} & choosing):
        yield finding.warning(
            "ext_proc_bypassed",
            f"{place}, cluster {name}",
            "a route sends requests there that do not pass the ext_proc filter: Envoy chooses the "
            "endpoint",
            wanted="the filter enabled on every route to this cluster",
            fix="remove disabled of the filter from typed_per_filter_config of the route; with Istio, "
            "remove the filter CORS of the rule",
        )
    for divided in divided_clusters(manager):
        named = sorted(divided & choosing)
        if len(named) > 1:
            yield finding.warning(
                "weighted_clusters",
                f"{place}, cluster {', '.join(named)}",
                "a route divides requests over these clusters by weight, whichever endpoint extproc "
                "chose: Envoy skips one that is in another cluster, and chooses itself",
                wanted="one cluster of engines for each route",
                fix="divide requests within one pool, by a rewrite of models",
            )


def _tries(route: YamlTree, *, spot: str, where: str) -> Iterator[Finding]:
    """Check the limits that a retry policy has for each try."""
    policy = route["retry_policy"] or {}
    try_s = seconds(policy, "per_try_timeout", 0.0, where=where)
    if try_s:
        yield finding.cut(
            "per_try_timeout",
            spot,
            f"per_try_timeout of retry_policy is {try_s:g} s: responses whose headers come later, as "
            "those of long answers without streaming, are cut",
            wanted="none",
            fix="remove per_try_timeout",
        )
    silent_s = seconds(policy, "per_try_idle_timeout", 0.0, where=where)
    if silent_s and silent_s <= _STREAM_IDLE_S:
        yield finding.cut(
            "per_try_idle_timeout",
            spot,
            f"per_try_idle_timeout of retry_policy is {silent_s:g} s: it ends requests that wait that "
            "long in an engine, and answers that say nothing for that long",
            wanted=f"more than {_STREAM_IDLE_S:g} s",
            fix="remove per_try_idle_timeout",
        )


def _local_replies(manager: YamlTree, *, place: str) -> Iterator[Finding]:
    """Check what clients read when extproc or every engine is down, and what is logged of it."""
    config = manager.get("local_reply_config") or {}
    usual = config.get("body_format") or {}
    # Without a mapper, the reply is in the usual format too; null in a list is no mapper.
    mappers = [{}, *filter(None, config.get("mappers") or ())]
    if any(_may_be_error_object(mapper, usual) for mapper in mappers):
        yield finding.fine("local_replies", place, "local_reply_config answers for what is down")
    else:
        missing = (
            "nothing in local_reply_config has an error object"
            if config
            else "there is no local_reply_config"
        )
        yield finding.note(
            "local_replies",
            place,
            f"{missing}: when extproc or every engine is down, clients get what "
            "OpenAI clients cannot read",
            wanted="an error object as JSON",
            fix="copy local_reply_config of `extproc envoy-config original-dst`",
        )
    if not manager.get("access_log"):
        yield finding.note(
            "access_log",
            place,
            "there is no access_log: nothing shows id, endpoint and decision of a request",
            wanted="a line per request",
            fix="copy access_log of `extproc envoy-config original-dst`",
        )
    if not (manager.get("tracing") or {}).get("provider"):
        yield finding.fine("tracing", place, "requests have no traces")


def _request_ids(manager: YamlTree, settings: Settings, *, place: str) -> Iterator[Finding]:
    """Check that a client, Envoy, extproc and the engine know a request by one id."""
    is_kept = bool(manager.get("preserve_external_request_id"))
    if not (manager.get("always_set_request_id_in_response") or settings.responses.request_id):
        yield finding.note(
            "request_ids",
            place,
            "responses lack x-request-id: a client"
            f"{'' if is_kept else ', whose own id Envoy replaces,'} knows no id to ask for",
            wanted="the id on every response",
            fix="write always_set_request_id_in_response: true, and preserve_external_request_id: "
            "true to keep ids of clients; or responses.request_id: true for extproc",
        )
    else:
        origin = "kept" if is_kept else "made anew"
        yield finding.fine("request_ids", place, f"x-request-id is {origin} and returned")


def _may_be_error_object(mapper: YamlTree, usual: YamlTree) -> bool:
    """Return False if what a mapper makes of a local reply is no error of OpenAI's API for certain.

    Args:
        usual: Format of mappers without one of their own.
    """
    body_format = mapper.get("body_format_override") or usual
    written = body_format.get("json_format")
    if written is not None:
        error = written.get("error") if isinstance(written, Mapping) else None
        return isinstance(error, Mapping) and "message" in error
    text = body_format.get("text_format") or _LOCAL_REPLY_BODY
    text = _inline_text(body_format.get("text_format_source"), text)
    if text is not None and _LOCAL_REPLY_BODY in text:
        body = _inline_text(mapper.get("body"), "")
        text = None if body is None else text.replace(_LOCAL_REPLY_BODY, body)
    return text is None or ('"error"' in text and '"message"' in text)


def _inline_text(source: YamlTree | None, default: str) -> str | None:
    """Return the text of a data source: None if it is elsewhere, the default without a source."""
    return source.get("inline_string") if source else default


def _picker_down(
    manager: YamlTree, processor: YamlTree, clusters: Mapping[str, YamlTree], *, place: str
) -> Iterator[Finding]:
    """Check that Envoy goes on without extproc where it can."""
    named = [clusters[name] for name in route_clusters(manager) if name in clusters]
    can_choose = any(envoy_cluster_lint.is_override_host(cluster) for cluster in named)
    is_sent_at_once = mode(processor, "request_body_mode") == "BUFFERED"
    if can_choose and is_sent_at_once and not processor.get("failure_mode_allow"):
        yield finding.note(
            "picker_down",
            place,
            "failure_mode_allow is off: while extproc is down every request fails, although the "
            "fallback policy of override_host could choose an endpoint",
            wanted="on",
            fix="write failure_mode_allow: true",
        )
