"""Addresses of the other replicas of extproc, by which they connect and are admitted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Final

from extproc.config.settings import Settings
from extproc.discovery.static_discovery import DnsResolver
from extproc.endpoint import join_host_port, parse_port
from extproc.errors import ConfigError
from extproc.scrape import client
from extproc.scrape.client import ScrapeTarget
from extproc.server.admin_access import normalize_address

#: Seconds between two looks for an address that is not known yet.
_RESOLVE_PAUSE_S = 1.0

#: Addresses of a list at most (count), far more than an endpoint picker has replicas.
MAX_ADDRESSES: Final = 256


class PeerAddresses:
    """Resolves the names of replicas. Mutable; on the event loop only.

    Args:
        configured: `host:port` of their admin ports; a name stands for every address it resolves to.
        where: Name of the setting, for errors.
        token: Returns the bearer token for peers; empty sends none.
        resolver: Resolves the names; None for one of its own.

    Attributes:
        unresolved: Names without an address at the last look.

    Raises:
        ConfigError: An address cannot be read.
    """

    def __init__(
        self,
        configured: Sequence[str],
        *,
        where: str,
        token: Callable[[], str] = str,
        resolver: DnsResolver | None = None,
    ) -> None:
        self._configured = [_parse_address(address, where=where) for address in configured]
        self._token = token
        self._resolver = resolver or DnsResolver()
        self.unresolved: frozenset[str] = frozenset()
        self._own: set[str] = set()
        #: IP addresses of each written name, and when they were looked up for a client.
        self._hosts = [frozenset[str]() for _ in configured]
        self._hosts_at = -math.inf

    def __bool__(self) -> bool:
        """True if peers are configured."""
        return bool(self._configured)

    def record_own(self, address: str) -> None:
        """Record that an address, as `resolve` returns it, is that of this process."""
        self._own.add(address)

    def target(
        self, address: str, *, path: str, accept: str, method: str = "GET", more: str = ""
    ) -> ScrapeTarget:
        """Request to an address of `resolve`, with the token; arguments as of `client.target`."""
        host, _, port = address.rpartition(":")
        token = self._token()
        if token:
            more += f"authorization: Bearer {token}\r\n"
        return client.target(
            host.strip("[]"), int(port), path=path, method=method, accept=accept, more=more
        )

    async def resolve(self) -> list[str]:
        """Look up all names; returns `ip:port` of the peers without that of this process."""
        resolved = await self._look_up()
        self.unresolved = frozenset(
            f"{host}:{port}"
            for (host, port), addresses in zip(self._configured, resolved, strict=True)
            if not addresses
        )
        unique = dict.fromkeys(address for addresses in resolved for address in addresses)
        return [address for address in unique if address not in self._own][:MAX_ADDRESSES]

    async def is_peer(self, host: str) -> bool:
        """Check if a peer has this address; names are resolved again for a new address.

        Args:
            host: IP address, as `admin_access.normalize_address` writes it.
        """
        now = asyncio.get_running_loop().time()
        if not self._is_known_host(host) and now - self._hosts_at >= _RESOLVE_PAUSE_S:
            # Before the first await, so that a burst of strangers costs one look.
            self._hosts_at = now
            await self._look_up()
        return self._is_known_host(host)

    def _is_known_host(self, host: str) -> bool:
        return any(host in hosts for hosts in self._hosts)

    async def _look_up(self) -> list[list[str]]:
        """Addresses of each name; for admission, a name that resolves to none keeps its last."""
        resolved = [await self._addresses(*host_port) for host_port in self._configured]
        hosts = [
            frozenset(
                normalize_address(address.rpartition(":")[0].strip("[]")) for address in addresses
            )
            for addresses in resolved
        ]
        self._hosts = [new or old for new, old in zip(hosts, self._hosts, strict=True)]
        return resolved

    async def _addresses(self, host: str, port: int) -> list[str]:
        """Every `ip:port` of a host; none where it cannot be resolved in time."""
        ips = await self._resolver.resolve_name(host)
        return [join_host_port(ip, port) for ip in sorted(ips)[:MAX_ADDRESSES]]


class PeerDirectory:
    """Addresses of the peers by what is exchanged with them; both are the same where one is set.

    Args:
        token: Returns the bearer token for peers; empty sends none.

    Attributes:
        requests: `peer_sync.peers`.
        counters: `autoscaling.peers`, and without it `peer_sync.peers`.

    Raises:
        ConfigError: An address cannot be read.
    """

    def __init__(self, settings: Settings, token: Callable[[], str]) -> None:
        requests, counters = settings.peer_sync.peers, settings.autoscaling.peers
        self.requests = PeerAddresses(requests, where="peer_sync.peers", token=token)
        self.counters = self.requests
        if counters and counters != requests:
            self.counters = PeerAddresses(counters, where="autoscaling.peers", token=token)

    async def is_peer(self, host: str) -> bool:
        """Check if a peer of either kind has this address, see `PeerAddresses.is_peer`."""
        return await self.requests.is_peer(host) or await self.counters.is_peer(host)


def _parse_address(address: str, *, where: str) -> tuple[str, int]:
    """Split `host:port`; brackets around an IPv6 address are removed.

    Raises:
        ConfigError: There is no host, or no port, or something else, as in a URL.
    """
    host, _, text = address.rpartition(":")
    port = parse_port(text)
    if not port or not host or {"/", "@"} & {*host}:
        raise ConfigError(
            where,
            wanted="host:port, the port being that of the other pickers' pages",
            got="an address with a user" if "@" in address else repr(address),
            fix="write it like extproc-peers:9090",
        )
    return host.strip("[]"), port
