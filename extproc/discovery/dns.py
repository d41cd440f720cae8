"""Resolves host names of endpoint list entries, and merges the answers into endpoints.

`DnsResolver` asks the system resolver; the rest is pure. A name that does not resolve now keeps its
last answer: a resolver that is down for a minute must not take the engines with it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from extproc.discovery import endpoint_list
from extproc.endpoint import Endpoint

#: Addresses of one name that are taken (count); an answer of DNS has room for some 4000.
MAX_ADDRESSES: Final = 4096

#: Host name to its IP addresses; an empty tuple means that it did not resolve.
DnsAnswers = Mapping[str, tuple[str, ...]]


class DnsResolution(msgspec.Struct, frozen=True):
    """Endpoints of a list, and the resolution status of its names.

    Attributes:
        endpoints: Endpoints in the order of the list, and by address within a name, without
            duplicates.
        answers: The answer in use of every name that ever had one and is still listed.
        stale: Names that did not resolve and stand on an earlier answer.
        missing: Names that did not resolve and never have; they have no endpoint.
        num_dropped: Addresses beyond `endpoint_list.MAX_ENDPOINTS`, which are no endpoints (count).
    """

    endpoints: tuple[Endpoint, ...]
    answers: DnsAnswers
    stale: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    num_dropped: int = 0


class DnsResolver:
    """Resolves A and AAAA records of all names concurrently.

    Args:
        timeout_s: Time limit for a name (seconds). The system's own is 5 s and more per name
            server.
    """

    def __init__(self, *, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s

    async def resolve(self, names: Sequence[str]) -> DnsAnswers:
        """Resolves names; an empty answer for a name that failed or timed out."""
        return dict(
            zip(
                names,
                await asyncio.gather(*(self._resolve_name(name) for name in names)),
                strict=True,
            )
        )

    async def _resolve_name(self, name: str) -> tuple[str, ...]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError, UnicodeError):
            return ()
        addresses = {str(answer[4][0]) for answer in answers}
        if len(addresses) > MAX_ADDRESSES:
            # Name servers rotate what they answer: the same ones stay, in whatever order.
            return tuple(sorted(addresses)[:MAX_ADDRESSES])
        return tuple(addresses)


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
            answers[name] = tuple(sorted(set(fresh[name]), key=_sort_key))
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
            address = f"[{ip}]:{entry.port}" if ":" in ip else f"{ip}:{entry.port}"
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


def _sort_key(ip: str) -> tuple[int, int, str]:
    """Sorts IPv4 before IPv6, then by value; a zone (`fe80::1%eth0`) is part of the address."""
    address = ipaddress.ip_address(ip)
    return address.version, int(address), ip
