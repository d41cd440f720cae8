"""Findings about a running extproc: its readiness, and the health of its endpoints."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from extproc.config import finding
from extproc.config.finding import Finding
from extproc.diagnostics.pages import PickerPages, decode
from extproc.endpoint import Endpoint, parse_port
from extproc.scrape.client import FetchedPage

#: Advice for the reasons for which an endpoint is left out; others come from its answers.
_HEALTH_FIX = "see the log of the engine, and failure and cause of the endpoint in /debug/pools or the console"

#: Advice for pools that may not be read: with a token of the server, and without one.
_POOLS_FIX: Final = {
    "status 401": "name a file with the token of its server.admin_token_file with --token-file; another "
    "token is refused",
    "status 403": "run this on its machine, or set server.admin_token_file",
}


class EndpointRow(msgspec.Struct, frozen=True):
    """Fields of an endpoint on `/debug/pools` that are judged; see `pool_state.EndpointState`."""

    address: str
    name: str = ""
    labels: Mapping[str, str] = {}
    health: str = "healthy"
    cause: str = ""
    failure: str = ""
    distrusted: str = ""


class _PoolRow(msgspec.Struct, frozen=True):
    endpoints: tuple[EndpointRow, ...] = ()


class _PoolsPage(msgspec.Struct, frozen=True):
    pools: Mapping[str, _PoolRow]


class _SettingRow(msgspec.Struct, frozen=True):
    path: str
    after: str


class _ConfigurationPage(msgspec.Struct, frozen=True):
    settings: tuple[_SettingRow, ...]


#: Sections and fields of a running extproc by which Envoy and engines are judged.
_COMPARED: Final = frozenset(
    {
        "server.secure_serving",
        "limits",
        "flow_control",
        "responses",
        "scheduling.fallbacks",
        "scrape",
    }
)

#: Field that is left out: engines are read in any case, and without scraping only a strategy that needs no
#: metrics is valid, which is not compared.
_LEFT_OUT: Final = "scrape.enabled"


def read_pools(page: FetchedPage) -> Mapping[str, Sequence[EndpointRow]]:
    """Return the endpoints on `/debug/pools` by the name of their pool; none if unreadable."""
    decoded = decode(page, _PoolsPage)
    return {} if decoded is None else {name: p.endpoints for name, p in decoded.pools.items()}


def read_configuration(page: FetchedPage) -> Mapping[str, object]:
    """Return the settings on `/debug/configuration` that Envoy and engines are compared with.

    The tree is as in a file. What is as by default is missing, and so is what the page shortens.
    """
    decoded = decode(page, _ConfigurationPage)
    tree: dict[str, object] = {}
    for row in () if decoded is None else decoded.settings:
        *sections, name = row.path.split(".")
        if not sections or not (sections[0] in _COMPARED or row.path in _COMPARED):
            continue
        if row.path == _LEFT_OUT:
            continue
        if not all(map(str.isidentifier, (*sections, name))):
            continue
        with contextlib.suppress(msgspec.DecodeError):
            value = msgspec.json.decode(row.after)
            parent = _find_section(tree, sections)
            if parent is not None:
                parent[name] = value
    return tree


def _find_section(tree: dict[str, object], path: Sequence[str]) -> dict[str, object] | None:
    """Return the section at a path, which is made if missing; None where a value is on its way."""
    for name in path:
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):
            return None
        tree = below
    return tree


def to_endpoint(row: EndpointRow) -> Endpoint | None:
    """Return the engine of a row; None where the address is no `ip:port`, or one of a further rank."""
    host_port, _, rank = row.address.partition("@")
    if rank not in ("", "0"):
        return None
    host, _, port = host_port.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    if not parse_port(port):
        return None
    name = row.name.removesuffix("-rank-0") if rank else row.name
    return Endpoint(host_port, name=name or host_port, labels=row.labels)


def diagnose(pages: PickerPages) -> Iterator[Finding]:
    """Judge an extproc by the pages of its metrics port."""
    place = f"extproc {pages.url}"
    failure = pages.ready.failure
    if failure and failure != "status 503":  # the only other status of /readyz
        yield finding.error(
            "picker_reachable",
            place,
            f"its metrics port does not answer as that of extproc: {failure}",
            wanted="the metrics port of a running extproc",
            fix="give host and --metrics-port of `extproc serve`",
        )
        return
    if failure:
        yield finding.error(
            "picker_ready",
            place,
            f"/readyz answers with {failure}: gateways leave it out",
            wanted="status 200",
            fix="read /readyz: it names the pool without endpoints, or that it drains",
        )
    else:
        yield finding.fine("picker_ready", place, "it is ready")
    pools = read_pools(pages.pools)
    if not pools:
        yield finding.warning(
            "picker_pools",
            place,
            f"/debug/pools cannot be read: {pages.pools.failure or 'no pools'}",
            wanted="its pools",
            fix=_POOLS_FIX.get(pages.pools.failure, "give it a source of endpoints"),
        )
    for name, endpoints in pools.items():
        yield from _pool(f"pool {name}" if name else "pool", endpoints)


def _pool(place: str, endpoints: Sequence[EndpointRow]) -> Iterator[Finding]:
    if not endpoints:
        yield finding.error(
            "pool_empty",
            place,
            "it has no endpoints: requests get 503, or wait",
            wanted="an endpoint",
            fix="correct pool.endpoints, the selector of the InferencePool, or start engines",
        )
    for row in endpoints:
        if row.health != "healthy":
            reason = row.cause or row.failure or "no reason"
            yield finding.warning(
                "endpoint_health",
                f"engine {row.address}",
                f"extproc regards it as {row.health}: {reason}",
                wanted="healthy",
                fix=_HEALTH_FIX,
            )
        if row.distrusted:
            yield finding.warning(
                "endpoint_distrusted",
                f"engine {row.address}",
                f"extproc ignores its metrics page: {row.distrusted}",
                wanted="a page that follows the load",
                fix="restart the engine; remove caches between it and extproc",
            )
