"""Pages of Envoy, extproc and engines as diagnostics read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from extproc.endpoint import Endpoint
from extproc.scrape.client import FetchedPage

PageT = TypeVar("PageT")

#: A page that was not requested.
NO_PAGE = FetchedPage(failure="not requested")


class EnvoyPages(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of the admin port of an Envoy.

    Attributes:
        clusters: Page `/clusters?format=json`.
        stats: Counters and gauges of ext_proc filters and circuit breakers, as text.
    """

    url: str
    server_info: FetchedPage
    config_dump: FetchedPage = NO_PAGE
    clusters: FetchedPage = NO_PAGE
    stats: FetchedPage = NO_PAGE


class PickerPages(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of the metrics port of an extproc.

    Attributes:
        pools: Page `/debug/pools`.
    """

    url: str
    ready: FetchedPage
    pools: FetchedPage = NO_PAGE


class EnginePages(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of an engine.

    Attributes:
        pool: Name of its pool; empty for a pool without a name.
        metrics_s: Duration of the request for that page (seconds).
        received_at: Unix seconds at which that page was complete, by our clock.
        models: Page `/v1/models`.
        server_info: Page `/server_info` of SGLang, under its present or its former path.
        kv_events: Page `/kv_event_sources` of vLLM.
    """

    pool: str
    endpoint: Endpoint
    metrics: FetchedPage
    metrics_s: float = 0.0
    received_at: float = 0.0
    health: FetchedPage = NO_PAGE
    models: FetchedPage = NO_PAGE
    version: FetchedPage = NO_PAGE
    server_info: FetchedPage = NO_PAGE
    kv_events: FetchedPage = NO_PAGE


def decode(page: FetchedPage, into: type[PageT]) -> PageT | None:
    """Decode the JSON of a page; None where it failed, or has another form."""
    if page.failure:
        return None
    try:
        return msgspec.json.decode(page.body, type=into)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_json(page: FetchedPage) -> Mapping[str, Any]:
    """Return the JSON object of a page; empty for anything else."""
    return decode(page, dict[str, Any]) or {}
