"""Discovery loop that merges endpoints of flags, file and DNS into the endpoint list.

The file is loaded when its stat stamp changes. The stamp follows symbolic links, so the swap by which
Kubernetes updates a mounted ConfigMap is a change like any other.

A host name that does not resolve now keeps its last answer: a resolver that is down for a minute must
not take the engines with it.

Of a name with IPv4 and IPv6 addresses only the IPv4 ones are endpoints, as with `V4_PREFERRED` of Envoy's
`dns_lookup_family`: both are those of the same engines, which would be counted and scraped twice.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import ipaddress
import os
import pathlib
import random
import socket
import stat
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import yaml

from extproc.discovery import endpoint_list, yaml_loader
from extproc.endpoint import Endpoint, join_host_port
from extproc.errors import ConfigError
from extproc.pool.store import PoolStore
from extproc.supervision import Supervisor, sleep_to_tick

#: Addresses of one name that are taken (count); an answer of DNS has room for some 4000.
MAX_ADDRESSES: Final = 4096

#: Lookups of a resolver that run at once at most (count), and those of names whose last lookup did not
#: end in time, or that had none: they leave a part to the others.
_MAX_LOOKUPS, _MAX_DOUBTFUL_LOOKUPS = 64, 48

#: Kinds of events of the files and names below, then of Kubernetes, that are as they should be.
_EXPECTED_EVENTS = frozenset(
    {"list-replaced", "complete", "synced", "connected", "relisted", "not-installed"}
)

#: Host name to its IP addresses; an empty tuple means that it did not resolve.
DnsAnswers = Mapping[str, tuple[str, ...]]


class DnsResolution(msgspec.Struct, frozen=True):
    """Endpoints of a list, and the resolution status of its names.

    Attributes:
        endpoints: Endpoints in the order of the list, and by address within a name, without
            duplicates.
        answers: The answer in use of every name that ever had one and is still listed, of one family.
        stale: Names that did not resolve and stand on an earlier answer.
        missing: Names that did not resolve and never have; they have no endpoint.
        num_dropped: Addresses beyond `endpoint_list.MAX_ENDPOINTS`, which are no endpoints (count).
    """

    endpoints: tuple[Endpoint, ...]
    answers: DnsAnswers
    stale: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    num_dropped: int = 0


async def look_up_in_thread(name: str) -> Iterable[str]:
    """Looks up the addresses of a name in a thread of its own; raises as `socket.getaddrinfo`.

    No lookup can be ended. The threads of the event loop are few and have other work, and the end of
    the process waits for them, but not for a daemon.
    """
    pending: concurrent.futures.Future[Iterable[str]] = concurrent.futures.Future()
    threading.Thread(target=_look_up, args=(name, pending), name="lookup", daemon=True).start()
    return await asyncio.wrap_future(pending)


def _look_up(name: str, pending: concurrent.futures.Future[Iterable[str]]) -> None:
    if not pending.set_running_or_notify_cancel():
        return
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        pending.set_result([str(answer[4][0]) for answer in answers])
    except Exception as error:  # noqa: BLE001 - raised where the result is awaited
        pending.set_exception(error)


class DnsResolver:
    """Resolves A and AAAA records of all names concurrently.

    A lookup that hangs goes on beyond the time limit, and its name gets no second one meanwhile. Names
    whose lookups hang, however many, never have all places: the others are looked up as usual.

    Args:
        timeout_s: Time limit for a name (seconds). The system's own is 5 s and more per name
            server.
        look_up: Returns the addresses of a name; raises OSError or UnicodeError if it has none.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        look_up: Callable[[str], Awaitable[Iterable[str]]] = look_up_in_thread,
    ) -> None:
        self._timeout_s = timeout_s
        self._look_up = look_up
        #: Lookups that run or wait for a place; the places are given in the order of arrival.
        self._lookups: dict[str, asyncio.Task[tuple[str, ...]]] = {}
        self._places = asyncio.Semaphore(_MAX_LOOKUPS)
        self._doubtful_places = asyncio.Semaphore(_MAX_DOUBTFUL_LOOKUPS)
        #: Names whose last lookup ended in time.
        self._timely: set[str] = set()

    async def resolve(self, names: Sequence[str]) -> DnsAnswers:
        """Resolves names; an empty answer for a name that failed or timed out."""
        self._timely.intersection_update(names)
        return dict(
            zip(
                names,
                await asyncio.gather(*(self.resolve_name(name) for name in names)),
                strict=True,
            )
        )

    async def resolve_name(self, name: str) -> tuple[str, ...]:
        """Resolves a name to at most `MAX_ADDRESSES`; none if it failed or timed out."""
        lookup = self._lookups.get(name)
        if lookup is None:
            lookup = asyncio.ensure_future(self._run_lookup(name))
            self._lookups[name] = lookup
        done, _ = await asyncio.wait({lookup}, timeout=self._timeout_s)
        return lookup.result() if done else ()

    async def _run_lookup(self, name: str) -> tuple[str, ...]:
        try:
            if name in self._timely:
                return await self._look_up_in_place(name)
            async with self._doubtful_places:
                return await self._look_up_in_place(name)
        except (OSError, UnicodeError):
            return ()
        finally:
            del self._lookups[name]

    async def _look_up_in_place(self, name: str) -> tuple[str, ...]:
        async with self._places:
            loop = asyncio.get_running_loop()
            late_at = loop.time() + self._timeout_s
            try:
                addresses = set(await self._look_up(name))
            finally:
                if loop.time() < late_at:
                    self._timely.add(name)
                else:
                    self._timely.discard(name)
        # Name servers rotate what they answer: the same ones stay, in whatever order.
        return tuple(sorted(addresses)[:MAX_ADDRESSES])


def host_names(entries: Sequence[endpoint_list.EndpointListEntry]) -> tuple[str, ...]:
    """Returns the host names to resolve, without duplicates, in list order."""
    return tuple(dict.fromkeys(entry.host for entry in entries if not entry.literal))


def merge_answers(
    entries: Sequence[endpoint_list.EndpointListEntry], fresh: DnsAnswers, *, last: DnsAnswers
) -> DnsResolution:
    """Merges entries and answers into endpoints with unique addresses, up to `MAX_ENDPOINTS`.

    Args:
        fresh: Answers of this round; a name that is not in it did not resolve.
        last: `DnsResolution.answers` of the round before.
    """
    answers = {}
    stale, missing = [], []
    for name in host_names(entries):
        if fresh.get(name):
            answers[name] = _one_family(fresh[name])
        elif last.get(name):
            answers[name] = last[name]
            stale.append(name)
        else:
            missing.append(name)
    endpoints: dict[str, Endpoint] = {}
    num_dropped = 0
    for entry in entries:
        ips = (entry.host,) if entry.literal else answers.get(entry.host, ())
        if len(endpoints) == endpoint_list.MAX_ENDPOINTS:
            num_dropped += len(ips)
            continue
        for ip in ips:
            address = join_host_port(ip, entry.port)
            if address in endpoints:
                continue
            if len(endpoints) == endpoint_list.MAX_ENDPOINTS:
                num_dropped += 1
                continue
            name = entry.name if entry.literal else f"{entry.name or entry.host}@{ip}"
            endpoints[address] = Endpoint(address, name=name, labels=entry.labels)
    return DnsResolution(
        tuple(endpoints.values()), answers, tuple(stale), tuple(missing), num_dropped
    )


def _one_family(ips: Iterable[str]) -> tuple[str, ...]:
    """Returns the IPv4 addresses, or the IPv6 ones where there are no others, sorted and each once."""
    by_version = sorted(set(ips), key=_sort_key)
    version = ipaddress.ip_address(by_version[0]).version
    return tuple(ip for ip in by_version if ipaddress.ip_address(ip).version == version)


def _sort_key(ip: str) -> tuple[int, int, str]:
    """Sorts IPv4 before IPv6, then by value; a zone (`fe80::1%eth0`) is part of the address."""
    address = ipaddress.ip_address(ip)
    return address.version, int(address), ip


class FileStamp(msgspec.Struct, frozen=True):
    """Stat fields that change with the file or its permissions; all zero for a missing file."""

    modified_ns: int = 0
    changed_ns: int = 0
    size: int = 0
    inode: int = 0


def file_stamp(path: pathlib.Path | str) -> FileStamp:
    """Returns the current stamp of a file behind links: a ConfigMap is swapped through a link."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a Path would be made for every look
    except (OSError, ValueError):  # a name with a NUL is none
        return FileStamp()
    return FileStamp(status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)


def open_regular(name: str, flags: int) -> int:
    """Opens a regular file, also behind links: the `opener` of what is read again while serving.

    A pipe in the place of the file would hold its reader until a writer opens it.

    Raises:
        OSError: There is no regular file, or it cannot be opened.
    """
    # Opened before it is looked at, as another file may take its place in between.
    descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    kind = "a pipe" if stat.S_ISFIFO(mode) else "a device"
    raise OSError(errno.EINVAL, f"{kind}, which is no regular file", name)


def load_file(
    path: pathlib.Path, *, limit_bytes: int, again: bool = False
) -> tuple[endpoint_list.EndpointListEntry, ...]:
    """Loads a YAML or JSON file; raises `ConfigError` for any other, or a longer one.

    Args:
        again: Whether it was read before: only a regular file can be, and a pipe once.
    """
    where = str(path)
    try:
        with open(path, "rb", opener=open_regular if again else None) as file:
            text = file.read(limit_bytes + 1)
    except OSError as error:
        raise ConfigError(
            where,
            wanted="an endpoints file",
            got=error.strerror or type(error).__name__,
            fix="check the path and its permissions",
        ) from error
    if len(text) > limit_bytes:
        raise ConfigError(
            where,
            wanted=f"at most {limit_bytes} bytes",
            got="more",
            fix="split the pool or raise the limit",
        )
    try:
        # Safe loaders only, so the rule against yaml.load does not apply.
        document = yaml.load(text, Loader=yaml_loader.YAML_LOADER)  # noqa: S506
    except yaml_loader.YAML_FAILURES as error:
        raise ConfigError(
            where,
            wanted="YAML or JSON",
            got=" ".join(str(error).split())[:200] or type(error).__name__,
            fix="correct the syntax",
        ) from error
    return endpoint_list.from_document(document, where=where)


class StaticDiscoverySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of static discovery.

    Attributes:
        file: Path of the endpoints file; empty for flags only.
        poll_s: How often the file's stamp is looked at. One stat call a second costs nothing, and
            works on every file system, ConfigMap mounts included.
        limit_bytes: Longest file taken: upstream's 1 MiB is some 8,000 endpoints with labels.
        refresh_s: How often names are resolved again: the usual DNS time to live inside a cluster.
        retry_s: How often names are resolved again while some name does not resolve.
        jitter: Each refresh is spread by this share to either side, lest replicas resolve at once.
        pool: Name of the pool, for the supervisor.
    """

    file: str = ""
    poll_s: float = 1.0
    limit_bytes: int = 8 * 1024 * 1024
    refresh_s: float = 30.0
    retry_s: float = 3.0
    jitter: float = 0.1
    pool: str = ""


class DiscoveryEvent(msgspec.Struct, frozen=True):
    """Event worth a log line and a counter.

    Attributes:
        kind: `list-replaced` (the store has a new list), `file-broken` (the old list stays),
            `name-kept` (a name stands on its last answer), `name-missing` (it has no endpoint),
            `truncated` (there are more addresses than a pool may have) or `complete` (no longer).
    """

    kind: str
    detail: str
    endpoints: int

    @property
    def is_expected(self) -> bool:
        """False for an event that an operator should look at."""
        return self.kind in _EXPECTED_EVENTS


class StaticDiscovery:
    """Updates the sink at start, on file changes and on changed DNS answers.

    Args:
        flag_entries: Entries from flags; they come before those of the file.
        supervisor: Hears of steps that went well; None for one of its own.

    Attributes:
        dropped_addresses: Listed addresses beyond the limit of a pool, which are no endpoints (count).
    """

    def __init__(
        self,
        settings: StaticDiscoverySettings,
        store: PoolStore,
        *,
        flag_entries: Sequence[endpoint_list.EndpointListEntry],
        resolver: DnsResolver,
        clock: Callable[[], float],
        rng: random.Random,
        on_event: Callable[[DiscoveryEvent], None] = lambda _: None,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._path = pathlib.Path(settings.file) if settings.file else None
        self._flag_entries = tuple(flag_entries)
        self._resolver = resolver
        self._clock = clock
        self._rng = rng
        self._on_event = on_event
        self._supervisor = supervisor or Supervisor(clock=clock)
        self._pool_name = settings.pool
        self._file_entries: tuple[endpoint_list.EndpointListEntry, ...] = ()
        self._stamp: FileStamp | None = None
        #: Error of the file that could not be opened at the last look; empty for none.
        self._unreadable = ""
        self._refresh_at = float("-inf")
        #: Whether the file has another list that the store does not have yet.
        self._unresolved = False
        self._published: tuple[Endpoint, ...] | None = None
        self._answers: DnsAnswers = {}
        self._failing_names: frozenset[str] = frozenset()
        self.dropped_addresses = 0

    async def start(self) -> None:
        """Loads all sources and sets the endpoints.

        Raises:
            ConfigError: If the file is broken. Later a broken file leaves the old endpoints, but a
                start without any is better refused.
        """
        if self._path is not None:
            self._stamp = file_stamp(self._path)
            self._file_entries = await self._load(self._path, again=False)
        # Without endpoints the replica is not ready; the loop resolves them as soon as it can.
        self._unresolved = not await self._supervisor.attempt(
            "discovery", self._resolve(), instance=self._pool_name
        )

    async def run(self) -> None:
        """Follows the sources until cancelled; requires `start`."""
        while True:
            await sleep_to_tick(self._settings.poll_s)
            await self.step()
            self._supervisor.record_success("discovery", self._pool_name)

    async def step(self) -> None:
        """Polls once: reloads a changed file, resolves names when due."""
        if await self._reload_file():
            self._unresolved = True
        if self._unresolved or self._is_refresh_due():
            await self._resolve()

    def _is_refresh_due(self) -> bool:
        return self._clock() >= self._refresh_at and bool(host_names(self._all_entries()))

    def _all_entries(self) -> tuple[endpoint_list.EndpointListEntry, ...]:
        return self._flag_entries + self._file_entries

    async def _reload_file(self) -> bool:
        if self._path is None:
            return False
        stamp, unreadable = file_stamp(self._path), self._unreadable
        if stamp == self._stamp and not unreadable:
            return False
        # Taken before reading: what is written during the read makes another change.
        self._stamp, self._unreadable = stamp, ""
        try:
            self._file_entries = await self._load(self._path, again=True)
        except ConfigError as error:
            if isinstance(error.__cause__, OSError):  # it may be readable soon, without a change
                self._unreadable = str(error)
            if str(error) != unreadable:
                self._report("file-broken", str(error))
            return False
        return True

    async def _load(
        self, path: pathlib.Path, *, again: bool
    ) -> tuple[endpoint_list.EndpointListEntry, ...]:
        # In a thread: a long file takes longer than a routing decision may wait.
        limit_bytes = self._settings.limit_bytes
        return await asyncio.to_thread(load_file, path, limit_bytes=limit_bytes, again=again)

    async def _resolve(self) -> None:
        entries = self._all_entries()
        names = host_names(entries)
        fresh = await self._resolver.resolve(names) if names else {}
        result = merge_answers(entries, fresh, last=self._answers)
        settings = self._settings
        is_incomplete = result.stale or result.missing
        jitter = self._rng.uniform(1.0 - settings.jitter, 1.0 + settings.jitter)
        wait_s = settings.retry_s if is_incomplete else settings.refresh_s
        self._refresh_at = self._clock() + wait_s * jitter
        self._answers = result.answers
        self._report_names(result)
        if result.endpoints != self._published:
            self._store.set_endpoints(result.endpoints, self._clock())
            self._published = result.endpoints
            self._report("list-replaced", f"{len(entries)} entries")
        self._report_dropped(result.num_dropped)
        self._unresolved = False

    def _report_names(self, result: DnsResolution) -> None:
        """Reports a name once when it stops resolving, not at every refresh."""
        for kind, names in (("name-kept", result.stale), ("name-missing", result.missing)):
            for name in names:
                if name not in self._failing_names:
                    self._report(kind, name)
        self._failing_names = frozenset(result.stale + result.missing)

    def _report_dropped(self, num_dropped: int) -> None:
        """Reports once when addresses begin to exceed the limit, and once when they stop."""
        before, self.dropped_addresses = self.dropped_addresses, num_dropped
        if num_dropped and not before:
            limit_text = f"expected at most {endpoint_list.MAX_ENDPOINTS} addresses; split the pool"
            self._report("truncated", f"{num_dropped} addresses are left out; {limit_text}")
        elif before and not num_dropped:
            self._report("complete", "no address is left out any more")

    def _report(self, kind: str, detail: str) -> None:
        self._on_event(DiscoveryEvent(kind, detail, len(self._published or ())))
