"""Endpoint sets: which waiting requests can be served by the same endpoints, as bits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec


class EndpointBits(msgspec.Struct, frozen=True):
    """Translates targets and addresses into bits, one bit for each endpoint of the pool.

    Drivers replace it by another object when endpoints, or what they serve, change.

    Attributes:
        for_target: Bits of the endpoints that can serve a target; 0 where none can.
        named: Bits of the endpoints at these addresses.
        version: Source of the bits; the driver compares it to detect changes.
    """

    for_target: Callable[[Any], int]
    named: Callable[[Sequence[str]], int]
    version: object = None


class EndpointSet:
    """Endpoints that can serve some of the queued requests. Compared by identity.

    Attributes:
        bits: Of these endpoints; 0 if unknown, or if none can serve them.
        targets: Targets that are waited for and can be served by them (count).
    """

    __slots__ = ("bits", "targets")

    def __init__(self, bits: int = 0) -> None:
        self.bits = bits
        self.targets = 0


class _TargetEntry:
    """A target with its endpoint set, and the number of requests queued for it."""

    __slots__ = ("count", "endpoints")

    def __init__(self, endpoints: EndpointSet) -> None:
        self.endpoints = endpoints
        self.count = 0


class EndpointSets:
    """The endpoint set of every target that has queued requests.

    Without bits every target has a set of its own.
    """

    def __init__(self) -> None:
        self._bits: EndpointBits | None = None
        self._targets: dict[Hashable, _TargetEntry] = {}
        self._by_bits: dict[int, EndpointSet] = {}

    def enter(self, target: Hashable) -> EndpointSet:
        """Count a request that joins the queue, and find its endpoint set."""
        entry = self._targets.get(target)
        if entry is None:
            entry = self._targets[target] = _TargetEntry(self._find(target))
            entry.endpoints.targets += 1
        entry.count += 1
        return entry.endpoints

    def leave(self, target: Hashable) -> None:
        """Remove a request that left the queue."""
        entry = self._targets[target]
        entry.count -= 1
        if not entry.count:
            del self._targets[target]
            endpoints = entry.endpoints
            endpoints.targets -= 1
            if not endpoints.targets:
                self._by_bits.pop(endpoints.bits, None)

    def current(self, target: Hashable) -> EndpointSet:
        """The endpoint set of a target that has queued requests."""
        return self._targets[target].endpoints

    def adopt(self, bits: EndpointBits | None) -> bool:
        """Replace the bits; returns whether they changed.

        A set whose first target gets other bits goes on with these, so that few requests change
        their set when an endpoint comes or goes.
        """
        if bits is self._bits:
            return False
        self._bits = bits
        self._by_bits = {}
        inherited: set[EndpointSet] = set()
        for target, entry in self._targets.items():
            before = entry.endpoints
            wanted = 0 if bits is None else bits.for_target(target)
            endpoint_set = None if bits is None else self._by_bits.get(wanted)
            if endpoint_set is None:
                endpoint_set = EndpointSet() if before in inherited else before
                inherited.add(endpoint_set)
                endpoint_set.bits, endpoint_set.targets = wanted, 0
                if bits is not None:
                    self._by_bits[wanted] = endpoint_set
            endpoint_set.targets += 1
            entry.endpoints = endpoint_set
        return True

    def named(self, addresses: Sequence[str]) -> int:
        """Bits of the endpoints at these addresses; 0 if the bits are unknown."""
        return self._bits.named(addresses) if self._bits is not None and addresses else 0

    def _find(self, target: Hashable) -> EndpointSet:
        if self._bits is None:
            return EndpointSet()
        bits = self._bits.for_target(target)
        endpoint_set = self._by_bits.get(bits)
        if endpoint_set is None:
            endpoint_set = self._by_bits[bits] = EndpointSet(bits)
        return endpoint_set
