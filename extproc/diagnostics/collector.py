"""Reads the pages of Envoy, extproc and engines, within limits of time and size, and judges them.

A shell. Connections go where the operator points: to the addresses on the command line, in the
configuration, and those that the extproc named there lists. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import quote, urlsplit

import msgspec

from extproc.config import factory, pools
from extproc.config.finding import FAILURES, Finding, Severity, clean, merge_places
from extproc.config.settings import Settings
from extproc.diagnostics import engine_diagnosis, envoy_diagnosis, picker_diagnosis
from extproc.diagnostics.pages import (
    NO_PAGE,
    EnginePages,
    EnvoyPages,
    PickerPages,
)
from extproc.discovery.static_discovery import look_up_in_thread
from extproc.endpoint import Endpoint, find_metrics_ports, join_host_port
from extproc.errors import TOO_MANY_FILES, ConfigError, describe_connection_error
from extproc.pool.store import PoolStore
from extproc.scrape import client, model_list
from extproc.scrape.client import FetchedPage, ScrapeClient, ScrapeTarget
from extproc.supervision import Supervisor

#: Time limit of everything (seconds), and engines read at once (count).
TOTAL_S: Final = 60.0
_AT_ONCE: Final = 32

#: Time limit of files and names (seconds). The resolver leaves a name that hangs, and the other
#: endpoints of its pool stay, if it may take its own limit of 5 s.
_DISCOVERY_S: Final = 10.0

#: Engines that are read (count); pools that large have the same mistake everywhere.
MAX_ENGINES: Final = 1000

#: Longest pages (bytes): a config dump of thousands of clusters, lists of hosts, pools.
_ENVOY_BYTES: Final = 64 * 1024 * 1024
_PICKER_BYTES: Final = 32 * 1024 * 1024

#: Failures after which no other page of a server is read.
_GONE: Final = frozenset(
    {"timeout", "refused", "unreachable", TOO_MANY_FILES, "tls", "closed", "not HTTP"}
)

_JSON: Final = "application/json"

#: Severities in the order of the summary, with the words for one and several.
_COUNTED: Final[Sequence[tuple[Severity, str, str]]] = (
    ("error", "error", "errors"),
    ("warning", "warning", "warnings"),
    ("note", "note", "notes"),
    ("fine", "check passed", "checks passed"),
)


class AdminUrl(msgspec.Struct, frozen=True):
    """Address of an admin port.

    Attributes:
        host: Host name or IP address, without brackets.
    """

    host: str
    port: int
    is_tls: bool = False

    @property
    def text(self) -> str:
        """The address for people."""
        return f"{'https' if self.is_tls else 'http'}://{join_host_port(self.host, self.port)}"


def parse_url(text: str, *, where: str, port: int) -> AdminUrl:
    """Parse `host`, `host:port` or a URL of these.

    Args:
        port: Port where none is written.

    Raises:
        ConfigError: It is no such address, or holds a user or a path.
    """
    url = text if "//" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        number = port if parts.port is None else parts.port
        (parts.hostname or "").encode("idna")  # as a connection does
    except ValueError:
        parts, number = urlsplit(""), port
    has_more = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
    if parts.scheme not in ("http", "https") or not parts.hostname or not number or has_more:
        raise ConfigError(
            where,
            wanted="host:port, or a URL without user and path",
            got="something else" if text else "nothing",  # no password in the error
            fix=f"write 127.0.0.1:{port}",
        )
    return AdminUrl(parts.hostname, number, is_tls=parts.scheme == "https")


class InstallationPages(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was looked at.

    Attributes:
        envoy: Pages of Envoy; None if none was named.
        picker: Pages of extproc; None if none was named.
        endpoints: Endpoints by the name of their pool, whether looked at or not.
    """

    envoy: EnvoyPages | None = None
    picker: PickerPages | None = None
    engines: Sequence[engine_diagnosis.EngineExamination] = ()
    endpoints: Mapping[str, Sequence[Endpoint]] = {}


class InstallationReport(msgspec.Struct, frozen=True):
    """Findings about an installation.

    Attributes:
        findings: Findings, the worst first; those that differ in the place only are merged.
    """

    findings: Sequence[Finding]

    @property
    def status(self) -> int:
        """Exit status: 1 if there is an error."""
        return int(any(finding.severity in FAILURES for finding in self.findings))

    def to_lines(self) -> Iterator[str]:
        """The report for people: a table of what is not as expected, and a summary."""
        for finding in self.findings:
            if finding.severity == "fine":
                continue
            yield f"{finding.severity:<9}{finding.check:<26}{clean(finding.place)}"
            yield f"{'':<9}{'found':<9}{clean(finding.got)}"
            yield f"{'':<9}{'expected':<9}{clean(finding.wanted)}"
            if finding.fix:
                yield f"{'':<9}{'fix':<9}{clean(finding.fix)}"
        counts = Counter(finding.severity for finding in self.findings)
        yield ", ".join(
            f"{counts[severity]} {singular if counts[severity] == 1 else plural}"
            for severity, singular, plural in _COUNTED
        )

    def to_json(self) -> Mapping[str, object]:
        """The report for programs."""
        return {
            "ok": not self.status,
            "findings": [finding.to_json() for finding in self.findings],
        }


class Collector:
    """Reads pages, for `TOTAL_S` from its construction on.

    Args:
        timeout_s: Time limit of one page (seconds).
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,  # noqa: TID251 - compared with clocks of engines
    ) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._deadline = clock() + TOTAL_S
        #: Pages of Envoy and extproc leave time to list the engines.
        self._page_deadline = self._deadline - _DISCOVERY_S

    def reconfigure(self, settings: Settings) -> None:
        """Replace the settings by which engines are listed and read."""
        self._settings = settings

    async def collect(
        self, *, envoy: AdminUrl | None, picker: AdminUrl | None, token: str = ""
    ) -> InstallationPages:
        """Read all pages; what is not there in time is left out.

        Args:
            token: Bearer token for the pages of extproc; empty for none.

        Raises:
            ConfigError: An endpoints file cannot be read.
        """
        envoy_pages = await self._read_envoy(envoy) if envoy else None
        picker_pages = await self._read_picker(picker, token) if picker else None
        endpoints = await self._find_endpoints(picker_pages)
        listed = [
            (pool, member, ports[member.host_port])
            for pool, members in endpoints.items()
            for ports in (find_metrics_ports(members, self._settings.scrape.port),)
            for member in members
        ]
        return InstallationPages(
            envoy=envoy_pages,
            picker=picker_pages,
            engines=await self._read_engines(listed[:MAX_ENGINES]),
            endpoints=endpoints,
        )

    async def _read_envoy(self, url: AdminUrl) -> EnvoyPages:
        get = self._open(url, cap_bytes=_ENVOY_BYTES)
        pages = EnvoyPages(url=url.text, server_info=await get("/server_info", accept=_JSON))
        if pages.server_info.failure:
            return pages
        stats = f"/stats?filter={quote(envoy_diagnosis.STATS_FILTER)}"
        return msgspec.structs.replace(
            pages,
            config_dump=await get("/config_dump", accept=_JSON),
            clusters=await get("/clusters?format=json", accept=_JSON),
            stats=await get(stats),
        )

    async def read_configuration(self, url: AdminUrl, token: str = "") -> Mapping[str, object]:
        """Read the settings of a running extproc; see `picker_diagnosis.read_configuration`."""
        get = self._open_picker(url, token)
        page = await get("/debug/configuration", accept=_JSON)
        return picker_diagnosis.read_configuration(page)

    def _open_picker(self, url: AdminUrl, token: str) -> Callable[..., Awaitable[FetchedPage]]:
        more = f"authorization: Bearer {token}\r\n" if token else ""
        return self._open(url, cap_bytes=_PICKER_BYTES, more=more)

    async def _read_picker(self, url: AdminUrl, token: str) -> PickerPages:
        get = self._open_picker(url, token)
        pages = PickerPages(url=url.text, ready=await get("/readyz"))
        if pages.ready.failure in _GONE:
            return pages
        return msgspec.structs.replace(pages, pools=await get("/debug/pools", accept=_JSON))

    def _open(
        self, url: AdminUrl, *, cap_bytes: int, more: str = ""
    ) -> Callable[..., Awaitable[FetchedPage]]:
        tls = client.build_tls() if url.is_tls else None

        async def get(path: str, *, accept: str = client.PROMETHEUS) -> FetchedPage:
            timeout_s = min(self._timeout_s, self._page_deadline - self._clock())
            if timeout_s <= 0.0:
                return FetchedPage(failure="timeout")
            http = ScrapeClient(timeout_s=timeout_s, cap_bytes=cap_bytes, tls=tls)
            where = client.target(url.host, url.port, path=path, accept=accept, more=more)
            try:
                async with asyncio.timeout(timeout_s):
                    return await _get_from_any(http, where)
            except TimeoutError:
                return FetchedPage(failure="timeout")
            finally:
                http.close()

        return get

    async def _find_endpoints(self, pages: PickerPages | None) -> Mapping[str, Sequence[Endpoint]]:
        """Endpoints by pool: those of a running extproc, else those of the configuration."""
        rows = {} if pages is None else picker_diagnosis.read_pools(pages.pools)
        if rows:
            return {
                name: [
                    endpoint
                    for row in members
                    if (endpoint := picker_diagnosis.to_endpoint(row)) is not None
                ]
                for name, members in rows.items()
            }
        stores: dict[str, PoolStore] = {}
        starts: list[Awaitable[None]] = []
        for plan in pools.pool_plans(self._settings):
            parts = factory.build(plan.settings)
            discovery = factory.build_discovery(
                parts,
                clock=self._clock,
                on_event=lambda _: None,
                supervisor=Supervisor(clock=self._clock),
            )
            if discovery is not None:
                stores[plan.name] = parts.store
                starts.append(discovery.start())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCOVERY_S):
                await asyncio.gather(*starts)
        return {
            name: [member.endpoint for member in store.pool.members]
            for name, store in stores.items()
        }

    async def _read_engines(
        self, listed: Sequence[tuple[str, Endpoint, int]]
    ) -> Sequence[engine_diagnosis.EngineExamination]:
        """Examine engines, `_AT_ONCE` at a time; what is not done by the deadline is left out."""
        scrape = self._settings.scrape
        tls = factory.build_scrape_tls(scrape)
        metrics = ScrapeClient(timeout_s=self._timeout_s, cap_bytes=scrape.max_page_bytes, tls=tls)
        others = ScrapeClient(timeout_s=self._timeout_s, cap_bytes=model_list.MAX_BYTES, tls=tls)
        results: dict[int, engine_diagnosis.EngineExamination] = {}
        queue = iter(enumerate(listed))

        async def work() -> None:
            for index, (pool, endpoint, port) in queue:
                pages = await self._read_engine(metrics, others, pool, endpoint, port)
                results[index] = engine_diagnosis.examine(pages, self._settings)

        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(max(0.0, self._deadline - self._clock())),
                asyncio.TaskGroup() as group,
            ):
                for _ in range(min(_AT_ONCE, len(listed))):
                    group.create_task(work())
        metrics.close()
        others.close()
        return [results[index] for index in sorted(results)]

    async def _read_engine(
        self,
        metrics: ScrapeClient,
        others: ScrapeClient,
        pool: str,
        endpoint: Endpoint,
        metrics_port: int,
    ) -> EnginePages:
        port = endpoint.port

        async def get(path: str) -> FetchedPage:
            where = client.target(endpoint.ip, port, path=path, accept=_JSON)
            return await others.get_page(where)

        began = self._clock()
        page = await metrics.get_page(
            client.target(endpoint.ip, metrics_port, path=self._settings.scrape.path)
        )
        pages = EnginePages(
            pool=pool,
            endpoint=endpoint,
            metrics=page,
            metrics_s=self._clock() - began,
            received_at=self._wall_clock(),
        )
        if page.failure in _GONE:
            return pages
        is_vllm = b"\nvllm:" in page.body
        server_info = NO_PAGE if is_vllm else await get("/server_info")
        if server_info.failure.startswith("status "):
            server_info = await get("/get_server_info")
        return msgspec.structs.replace(
            pages,
            health=await get("/health"),
            models=await get(model_list.PATH),
            version=await get("/version"),
            server_info=server_info,
            kv_events=await get("/kv_event_sources") if is_vllm else NO_PAGE,
        )


async def _get_from_any(http: ScrapeClient, where: ScrapeTarget) -> FetchedPage:
    """Fetch a page from the first address of a host that takes a connection.

    The lookup has a thread of its own: the event loop would wait at its end for one that hangs.
    """
    if ":" in where.host:  # a literal, whose zone a lookup would drop
        return await http.get_page(where)
    try:
        addresses = await look_up_in_thread(where.host)
    except OSError as error:
        return FetchedPage(failure=describe_connection_error(error))
    page = FetchedPage(failure="unreachable")
    for address in addresses:
        page = await http.get_page(
            msgspec.structs.replace(where, host=address, server_name=where.host)
        )
        if page.failure not in ("refused", "unreachable"):
            break
    return page


def diagnose(pages: InstallationPages, settings: Settings) -> InstallationReport:
    """Judge the pages of an installation."""
    findings = [
        msgspec.structs.replace(finding, severity="error") if finding.severity == "cut" else finding
        for finding in _diagnose_all(pages, settings)
    ]
    return InstallationReport(tuple(merge_places(findings)))


def _diagnose_all(pages: InstallationPages, settings: Settings) -> Iterator[Finding]:
    listed = [endpoint for members in pages.endpoints.values() for endpoint in members]
    if pages.envoy is not None:
        addresses = frozenset(endpoint.address for endpoint in listed)
        yield from envoy_diagnosis.diagnose(pages.envoy, settings, endpoints=addresses)
    if pages.picker is not None:
        yield from picker_diagnosis.diagnose(pages.picker)
    yield from engine_diagnosis.compare(pages.engines, settings)
    num_left = len(listed) - len(pages.engines)
    if num_left or not listed:
        yield Finding(
            "note",
            "engines_read",
            "engines",
            f"{num_left} of {len(listed)} engines were not read"
            if listed
            else "no engine was read: neither flags nor files list any",
            wanted="all engines of the pool",
            fix="raise --timeout, or look at a part of the pool with --endpoints"
            if listed
            else "write --server with the metrics port of a running extproc, or --endpoints",
        )
