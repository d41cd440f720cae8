"""Sweep over the queued requests: order of dispatch and blocked endpoints."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping

from extproc.flow_control.endpoint_sets import EndpointSet
from extproc.flow_control.flow_queue import QueuePlace, TenantQueues
from extproc.flow_control.queued_item import QueuedItem

#: The endpoints that can serve a request, and the address of the one it would rather have; empty
#: for any of them.
FlowKey = tuple[EndpointSet, str]


class Sweep:
    """A sweep over all queued requests, possibly in several calls, and what it blocked.

    Attributes:
        priority: Of the band that is looked at; the bands above were.
    """

    def __init__(self) -> None:
        self.priority = math.inf
        self._sets: set[EndpointSet] = set()
        self._ways: set[FlowKey] = set()
        self._busy = 0

    def enter(self, priority: float) -> None:
        """Go on to a band of this priority, for which endpoints may have a place."""
        self.priority = priority
        self._sets.clear()
        self._ways.clear()
        self._busy = 0

    def hold_up(self, way: FlowKey) -> None:
        """Hold up those that would rather have the same endpoint."""
        self._ways.add(way)

    def hold_up_set(self, endpoints: EndpointSet, busy: int) -> None:
        """Hold up all that can be served by the same endpoints, or only by busy ones (bits)."""
        self._sets.add(endpoints)
        self._busy |= busy

    def holds_up(self, way: FlowKey) -> bool:
        """True if the requests of this target are blocked."""
        endpoints = way[0]
        bits = endpoints.bits
        return (
            endpoints in self._sets or (bits != 0 and not bits & ~self._busy) or way in self._ways
        )


class _Alone:
    """The ways in which only one tenant waits: its turn moves all of them alike.

    Args:
        entries: Rank and number of each head, and the way.
    """

    def __init__(self, entries: list[tuple[float, int, FlowKey]]) -> None:
        heapq.heapify(entries)
        self._heap = entries

    def key(
        self, lines: Mapping[FlowKey, TenantQueues], sweep: Sweep
    ) -> tuple[QueuePlace, FlowKey] | None:
        """The place of the request that goes next, and its way."""
        heap = self._heap
        while heap:
            rank, number, way = heap[0]
            line = lines.get(way)
            key = None if line is None or sweep.holds_up(way) else line.key()
            if key is None:
                heapq.heappop(heap)
            elif (key[1], key[2]) != (rank, number):
                heapq.heapreplace(heap, (key[1], key[2], way))
            else:
                return key, way
        return None


def next_items(lines: Mapping[FlowKey, TenantQueues], sweep: Sweep) -> Iterator[QueuedItem]:
    """See `PriorityBand.next_items`.

    Args:
        lines: By way; requests leave them meanwhile, and come only to what is held up.
        sweep: The blocked requests.
    """
    top, groups = _beginnings(lines, sweep)
    while top:
        key, in_way = top[0]
        head = groups[key[3]].key(lines, sweep) if in_way is None else _in_way(in_way, lines, sweep)
        if head is None:
            heapq.heappop(top)
            continue
        if head[0] != key:
            entry = (head[0], in_way)
            heapq.heapreplace(top, entry)
            if top[0] is not entry:
                continue
        yield lines[head[1]].head(head[0])


def _beginnings(
    lines: Mapping[FlowKey, TenantQueues], sweep: Sweep
) -> tuple[list[tuple[QueuePlace, FlowKey | None]], Mapping[str, _Alone]]:
    """A heap of the first places and their ways, and the ways in which only one tenant waits.

    None for a way stands for those in which only the tenant of that place waits. Comparisons end
    with the number, which no two requests share.
    """
    alone: dict[str, list[tuple[float, int, FlowKey]]] = {}
    top: list[tuple[QueuePlace, FlowKey | None]] = []
    for way, line in lines.items():
        key = None if sweep.holds_up(way) else line.key()
        if key is None:
            continue
        if len(line) == 1:
            alone.setdefault(key[3], []).append((key[1], key[2], way))
        else:
            top.append((key, way))
    groups = {tenant: _Alone(entries) for tenant, entries in alone.items()}
    for group in groups.values():
        head = group.key(lines, sweep)
        if head is not None:
            top.append((head[0], None))
    heapq.heapify(top)
    return top, groups


def _in_way(
    way: FlowKey, lines: Mapping[FlowKey, TenantQueues], sweep: Sweep
) -> tuple[QueuePlace, FlowKey] | None:
    line = lines.get(way)
    key = None if line is None or sweep.holds_up(way) else line.key()
    return None if key is None else (key, way)
