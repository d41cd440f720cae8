"""Findings about engines: reachability, metrics, caches, clocks, versions and models.

Engines are not trusted: every reader is total, and only known fields of a page are read. The page
`/server_info` of SGLang holds its API key, among others.
"""

from __future__ import annotations

import email.utils
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from extproc.config import finding
from extproc.config.finding import Finding
from extproc.config.settings import Settings
from extproc.diagnostics.pages import EnginePages, decode, read_json
from extproc.endpoint import Load
from extproc.errors import TOO_MANY_FILES
from extproc.request import is_long_name
from extproc.scrape import engines, metrics_page, model_list
from extproc.scrape.client import FetchedPage

#: Share of `scrape.timeout_s` above which a metrics page is slow.
_SLOW_SHARE = 0.5

#: Difference of clocks that logs and traces bear (seconds); the header has whole seconds.
_MAX_SKEW_S = 2.5

#: Longest text of a page that is kept (characters).
_MAX_TEXT = 200

#: Models whose longest prompt is compared (count).
_MAX_LENGTHS = 64

#: Values of a pool that are named when they differ (count).
_MAX_VALUES = 4

#: Fields of `Load` that plugins read; their series have the same names in `engines.EngineSpec`.
_LOAD_FIELDS: Final = (
    *("running", "waiting", "kv_usage", "kv_blocks", "block_tokens"),
    *("prefix_queries", "prefix_hits"),
)

#: Values of `--kv-events-config` by engine.
_KV_EVENTS: Final = {
    "vllm": '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}',
    "sglang": '{"publisher": "zmq", "endpoint": "tcp://*:5557"}',
}

_CACHE_CONFIG = b"\nvllm:cache_config_info{"
_CACHING_OFF = re.compile(rb'[{,]enable_prefix_caching="False"')


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one engine; None for what it does not say.

    Attributes:
        models: Names that it serves, the first of them and how many others.
        models_hash: Hash of all these names; 0 where they are unknown.
        max_model_len: Longest prompt and answer of its first models (tokens).
        prefix_caching: Whether it keeps KV blocks of past prompts.
        kv_events: Whether it publishes what it caches.
    """

    pool: str
    address: str
    load: Load | None = None
    models: str = ""
    models_hash: int = 0
    max_model_len: Mapping[str, int] = {}
    version: str | None = None
    prefix_caching: bool | None = None
    kv_events: bool | None = None


class EngineExamination(msgspec.Struct, frozen=True):
    """Result of an engine, without its pages: thousands of engines may send as much as they may."""

    findings: tuple[Finding, ...]
    facts: EngineFacts


def examine(pages: EnginePages, settings: Settings) -> EngineExamination:
    """Judge an engine by itself."""
    facts = read_facts(pages)
    findings = (
        *_answers(pages, settings),
        *_metrics(pages, facts, settings),
        *_flags(facts),
        *_clock(pages),
    )
    return EngineExamination(findings, facts)


def compare(engines: Sequence[EngineExamination], settings: Settings) -> Iterator[Finding]:
    """Yield the findings of engines, and those of the engines of a pool against each other."""
    by_pool: dict[str, list[EngineFacts]] = defaultdict(list)
    for engine in engines:
        yield from engine.findings
        by_pool[engine.facts.pool].append(engine.facts)
    for pool, members in by_pool.items():
        yield from _differences(f"pool {pool}" if pool else "pool", members, settings)


def read_facts(pages: EnginePages) -> EngineFacts:
    """Read what an engine says of itself."""
    page = pages.metrics
    load = None if page.failure else metrics_page.read(page.body, 0.0)
    sglang = read_json(pages.server_info)
    # SGLang has its flags at the top of the page, or below `server_args`.
    flags = sglang.get("server_args") if isinstance(sglang.get("server_args"), dict) else sglang
    models = None if pages.models.failure else model_list.read(pages.models.body)
    return EngineFacts(
        pool=pages.pool,
        address=pages.endpoint.address,
        load=load if isinstance(load, Load) else None,
        models="" if models is None else _names(models.bases),
        models_hash=0 if models is None else hash(models.bases),
        max_model_len=_read_lengths(pages.models),
        version=_text(read_json(pages.version).get("version")) or _text(sglang.get("version")),
        prefix_caching=_read_caching(page, flags or {}),
        kv_events=_read_kv_events(pages, flags or {}),
    )


def _read_lengths(page: FetchedPage) -> Mapping[str, int]:
    """Longest prompt and answer by model; empty where the page does not say."""
    cards = read_json(page).get("data")
    return {
        card["id"]: card["max_model_len"]
        for card in (cards[:_MAX_LENGTHS] if isinstance(cards, list) else ())
        if isinstance(card, dict)
        and isinstance(card.get("max_model_len"), int)
        and isinstance(card.get("id"), str)
        and not is_long_name(card["id"])
    }


def _text(value: object) -> str | None:
    return value[:_MAX_TEXT] if isinstance(value, str) and value else None


def _read_caching(metrics: FetchedPage, flags: Mapping[str, Any]) -> bool | None:
    page = b"\n" + metrics.body
    start = page.find(_CACHE_CONFIG)
    if start >= 0:
        end = page.find(b"\n", start + 1)
        return _CACHING_OFF.search(page, start, end if end >= 0 else len(page)) is None
    disabled = flags.get("disable_radix_cache")
    return not disabled if isinstance(disabled, bool) else None


def _read_kv_events(pages: EnginePages, flags: Mapping[str, Any]) -> bool | None:
    """True if KV events are published; None where no page says so."""
    if "kv_events_config" in flags:
        return bool(flags["kv_events_config"])
    sources = decode(pages.kv_events, list[Any])
    return None if sources is None else bool(sources)


def _answers(pages: EnginePages, settings: Settings) -> Iterator[Finding]:
    """Check that the engine answers, and how."""
    place, failure = _place(pages), pages.metrics.failure
    if failure in _UNREACHABLE:
        yield finding.error(
            "engine_reachable",
            place,
            f"{settings.scrape.scheme}://{pages.endpoint.address} does not answer: {failure}",
            wanted="a server that answers",
            fix=_UNREACHABLE[failure],
        )
        return
    yield finding.fine("engine_reachable", place, "the engine answers")
    health = pages.health.failure
    if health and health != "status 404":
        yield finding.error(
            "engine_health",
            place,
            f"/health answers with {health}",
            wanted="status 200",
            fix="see the log of the engine; it is starting, or its core has ended",
        )
    models = pages.models.failure
    if not settings.scrape.models:
        return
    if models or model_list.read(pages.models.body) is None:
        is_locked = models in ("status 401", "status 403")
        yield finding.warning(
            "models_page",
            place,
            f"{model_list.PATH} gives no list of models: {models or 'unreadable'}",
            wanted="the models that the engine serves",
            fix="start the engine without --api-key and check keys at the gateway, or write "
            "scrape: {models: false}"
            if is_locked
            else "write scrape: {models: false} if the engine has no such page",
        )


#: Reasons for which nothing of an engine can be read, with what to do.
_UNREACHABLE: Final = {
    "timeout": "start the engine, or allow this address in firewalls and NetworkPolicies",
    "refused": "start the engine, or correct the port of the endpoint",
    "unreachable": "correct the address of the endpoint, or its network",
    TOO_MANY_FILES: "raise the limit of open files of this machine (ulimit -n)",
    "closed": "see the log of the engine; it accepts connections and closes them",
    "tls": "write scrape: {scheme: http}, scrape: {verify_tls: false} for a certificate that does not "
    "name the address, or name certificates in scrape.tls",
    "not HTTP": "correct the port of the endpoint, or write scrape: {scheme: https}",
}


def _metrics(pages: EnginePages, facts: EngineFacts, settings: Settings) -> Iterator[Finding]:
    """Check the metrics page: present, complete, in time."""
    place, scrape, failure = _place(pages), settings.scrape, pages.metrics.failure
    if not scrape.enabled or failure in _UNREACHABLE:
        return
    if failure == "too large":
        yield finding.error(
            "metrics_bytes",
            place,
            f"the metrics page is larger than {scrape.max_page_bytes} bytes",
            wanted="a page that extproc reads",
            fix=f"write scrape: {{max_page_bytes: {4 * scrape.max_page_bytes}}}",
        )
    elif failure or facts.load is None:
        is_sglang = not pages.server_info.failure
        yield finding.error(
            "metrics_page",
            place,
            f"{scrape.path} is no metrics page: {failure or 'unreadable'}; the load of the engine "
            "is unknown",
            wanted="metrics as Prometheus text",
            fix="start SGLang with --enable-metrics"
            if is_sglang
            else "write scrape: {path: PATH} with the path of the engine's metrics",
        )
    elif not facts.load.engine:
        yield finding.error(
            "engine_known",
            place,
            f"{scrape.path} has no metrics of a known engine; its load is unknown",
            wanted=f"metrics of {', '.join(dict.fromkeys(spec.kind for spec in engines.TABLE))}",
            fix="correct scrape.port, or the port or label metrics-port of the endpoint",
        )
    else:
        yield from _missing_metrics(place, facts.load)
    slow_s = _SLOW_SHARE * scrape.timeout_s
    if not failure and pages.metrics_s > slow_s:
        yield Finding(
            "error" if pages.metrics_s > scrape.timeout_s else "warning",
            "metrics_time",
            place,
            f"the metrics page took {pages.metrics_s:.2f} s; extproc waits {scrape.timeout_s:g} s",
            wanted=f"less than {slow_s:g} s",
            fix="give the API server of the engine more CPU, or write "
            f"scrape: {{timeout_s: {4 * scrape.timeout_s:g}}}",
        )


def _missing_metrics(place: str, load: Load) -> Iterator[Finding]:
    # Triton has two sets of metrics, of which an engine has the one or the other.
    missing = min(
        (
            [
                getattr(spec, field)[0].name.decode()
                for field in _LOAD_FIELDS
                if getattr(spec, field) and getattr(load, field) is None
            ]
            for spec in engines.TABLE
            if spec.kind == load.engine
        ),
        key=len,
    )
    if missing:
        yield finding.warning(
            "metrics_missing",
            place,
            f"the metrics page lacks {', '.join(missing)}",
            wanted="all metrics that strategies read",
            fix="update the engine, and start it without flags that turn statistics off "
            "(--disable-log-stats of vLLM)",
        )
    else:
        yield finding.fine(
            "metrics_missing", place, "the metrics page has all that strategies read"
        )


def _flags(facts: EngineFacts) -> Iterator[Finding]:
    """Check flags of the engine that routing depends on."""
    place = f"engine {facts.address}"
    kind = facts.load.engine if facts.load else ""
    if facts.prefix_caching is False:
        yield finding.warning(
            "prefix_caching",
            place,
            "prefix caching is off: no prompt is ever found cached, and placing requests by "
            "prefix gains nothing",
            wanted="on",
            fix="start SGLang without --disable-radix-cache"
            if kind == "sglang"
            else "start vLLM with --enable-prefix-caching",
        )
    elif facts.prefix_caching:
        yield finding.fine("prefix_caching", place, "prefix caching is on")
    if facts.kv_events is False:
        yield finding.note(
            "kv_events",
            place,
            "KV events are off: cached prefixes are estimated from what was sent",
            wanted="on, where a subscriber reads them",
            fix=f"start it with --kv-events-config '{_KV_EVENTS.get(kind, _KV_EVENTS['vllm'])}'",
        )


def _clock(pages: EnginePages) -> Iterator[Finding]:
    """Compare the clock of the engine with ours."""
    try:
        date = email.utils.parsedate_to_datetime(pages.metrics.date[:64])
        skew_s = date.timestamp() - pages.received_at
    except (ValueError, OverflowError, OSError):
        return
    if abs(skew_s) > _MAX_SKEW_S + pages.metrics_s:
        way = "ahead of" if skew_s > 0 else "behind"
        yield finding.warning(
            "clock",
            _place(pages),
            f"its clock is {abs(skew_s):.0f} s {way} the clock here: logs and traces do not line up",
            wanted=f"less than {_MAX_SKEW_S:g} s",
            fix="start chrony or another NTP client on both machines",
        )


def _differences(
    place: str, members: Sequence[EngineFacts], settings: Settings
) -> Iterator[Finding]:
    """Compare the engines of a pool."""
    versions = _values(members, lambda facts: facts.version)
    if len(versions) > 1:
        yield finding.note(
            "versions_differ",
            place,
            f"engines have different versions: {_counts(versions)}",
            wanted="a single version, except while it is rolled out",
            fix="finish the rollout",
        )
    blocks = _values(members, lambda facts: facts.load and facts.load.block_tokens)
    if len(blocks) > 1:
        yield finding.warning(
            "block_sizes_differ",
            place,
            f"engines have KV blocks of different sizes (tokens): {_counts(blocks)}",
            wanted="a single size",
            fix="start all of them with the same --block-size (--page-size of SGLang)",
        )
    caching = _values(members, lambda facts: facts.prefix_caching)
    if len(caching) > 1:
        yield finding.warning(
            "prefix_caching_differs",
            place,
            f"prefix caching is on and off: {_counts(caching)}",
            wanted="the same in all engines",
            fix="start all of them with prefix caching",
        )
    yield from _model_differences(place, members, settings)


def _model_differences(
    place: str, members: Sequence[EngineFacts], settings: Settings
) -> Iterator[Finding]:
    hashes = _values(members, lambda facts: facts.models_hash or None)
    if len(hashes) > 1:
        models = _values(members, lambda facts: facts.models or None)
        yield Finding(
            "note" if settings.scrape.models else "error",
            "models_differ",
            place,
            f"engines serve different models: {_counts(models)}",
            wanted="the same models, or requests routed by model",
            fix="make a pool per model, or write scrape: {models: true}",
        )
    lengths: dict[str, dict[object, int]] = defaultdict(dict)
    for facts in members:
        for model, tokens in facts.max_model_len.items():
            lengths[model][tokens] = lengths[model].get(tokens, 0) + 1
    for model in sorted(lengths):
        if len(lengths[model]) > 1:
            yield finding.warning(
                "model_lengths_differ",
                place,
                f"engines take different lengths of {model} (max_model_len): "
                f"{_counts(lengths[model])}; longer requests fail on some of them",
                wanted="a single length",
                fix="start all of them with the same --max-model-len (--context-length of SGLang)",
            )


def _values(
    members: Sequence[EngineFacts], read: Callable[[EngineFacts], object]
) -> Mapping[object, int]:
    """Number of engines by a value; unknown ones are left out."""
    counts: dict[object, int] = {}
    for facts in members:
        value = read(facts)
        if value is not None:
            counts[value] = counts.get(value, 0) + 1
    return counts


def _names(names: frozenset[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _MAX_VALUES
    return ", ".join(ordered[:_MAX_VALUES]) + (f" and {more} more" if more > 0 else "")


def _counts(values: Mapping[object, int]) -> str:
    """Values with the number of engines that have them, the most frequent first."""
    ordered = sorted(values.items(), key=lambda pair: (-pair[1], str(pair[0])))
    shown = [f"{value} ({count})" for value, count in ordered[:_MAX_VALUES]]
    return "; ".join(shown) + ("; and more" if len(ordered) > _MAX_VALUES else "")


def _place(pages: EnginePages) -> str:
    return f"engine {pages.endpoint.address}"
