"""Merging of endpoint list entries and DNS answers into endpoints, without I/O.

A name that does not resolve now keeps its last answer: a resolver that is down for a minute must
not take the engines with it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

import msgspec

from extproc.discovery import endpoint_list
from extproc.endpoint import Endpoint

#: Host name to its IP addresses; an empty tuple means that it did not resolve.
Answers = Mapping[str, tuple[str, ...]]


class Resolution(msgspec.Struct, frozen=True):
    """Endpoints of a list, and the resolution status of its names.

    Attributes:
        endpoints: In the order of the list, and by address within one name; none twice.
        answers: The answer in use of every name that ever had one and is still listed.
        stale: Names that did not resolve and stand on an earlier answer.
        missing: Names that did not resolve and never have; they have no endpoint.
        left_out: Addresses beyond `endpoint_list.MAX_ENDPOINTS`, which are no endpoints (count).
    """

    endpoints: tuple[Endpoint, ...]
    answers: Answers
    stale: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    left_out: int = 0


def names(listed: Sequence[endpoint_list.EndpointListEntry]) -> tuple[str, ...]:
    """Returns the host names to resolve, without duplicates, in list order."""
    return tuple(dict.fromkeys(entry.host for entry in listed if not entry.literal))


def merge(
    listed: Sequence[endpoint_list.EndpointListEntry], fresh: Answers, *, last: Answers
) -> Resolution:
    """Merges entries and answers into endpoints with unique addresses, up to `MAX_ENDPOINTS`.

    Args:
        listed: The entries.
        fresh: Answers of this round; a name that is not in it did not resolve.
        last: `Resolution.answers` of the round before.
    """
    answers = {}
    stale, missing = [], []
    for name in names(listed):
        if fresh.get(name):
            answers[name] = tuple(sorted(set(fresh[name]), key=_order))
        elif last.get(name):
            answers[name] = last[name]
            stale.append(name)
        else:
            missing.append(name)
    endpoints: dict[str, Endpoint] = {}
    left_out = 0
    for entry in listed:
        ips = (entry.host,) if entry.literal else answers.get(entry.host, ())
        if len(endpoints) == endpoint_list.MAX_ENDPOINTS:
            left_out += len(ips)
            continue
        for ip in ips:
            address = f"[{ip}]:{entry.port}" if ":" in ip else f"{ip}:{entry.port}"
            if address in endpoints:
                continue
            if len(endpoints) == endpoint_list.MAX_ENDPOINTS:
                left_out += 1
                continue
            name = entry.name if entry.literal else f"{entry.name or entry.host}@{ip}"
            endpoints[address] = Endpoint(address, name=name, labels=entry.labels)
    return Resolution(tuple(endpoints.values()), answers, tuple(stale), tuple(missing), left_out)


def _order(ip: str) -> tuple[int, int, str]:
    """Sorts IPv4 before IPv6, then by value; a zone (`fe80::1%eth0`) is part of the address."""
    address = ipaddress.ip_address(ip)
    return address.version, int(address), ip
