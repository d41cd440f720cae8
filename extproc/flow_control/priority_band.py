"""The requests of one priority, by way and tenant."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

from extproc.flow_control.fair_share import Turns
from extproc.flow_control.flow_queue import Line
from extproc.flow_control.queue_lengths import Crowding
from extproc.flow_control.queued_item import Fairness, Order, Waiter
from extproc.flow_control.sweep import Sweep, Way, heads


class Band:
    """All requests of one priority.

    Args:
        order: Within a tenant.
        fairness: Among tenants.
        turns: What tenants attained; shared by all bands.

    Attributes:
        count: Requests that wait.
        bytes: Of their bodies.
    """

    def __init__(self, order: Order, fairness: Fairness, turns: Turns) -> None:
        self._order: Order = order
        self._turn = {
            "least-served": turns.standing,
            "round-robin": turns.last,
            "none": _no_turn,
        }[fairness]
        self._turns = turns
        self._version = turns.version
        self._lines: dict[Way, Line] = {}
        self._ways: dict[str, dict[Way, None]] = {}
        self._crowding = Crowding(self._waiting)
        self.count = 0
        self.bytes = 0

    def add(self, waiter: Waiter) -> None:
        """A request begins to wait."""
        self.count += 1
        self.bytes += waiter.bytes
        rank = waiter.rank(self._order)
        self._enter(waiter, rank)
        self._crowding.add(rank, waiter)

    def left(self, waiter: Waiter) -> None:
        """A request stopped waiting where it is."""
        self.count -= 1
        self.bytes -= waiter.bytes
        self._exit(waiter)
        self._crowding.left(waiter.tenant)

    def move(self, waiter: Waiter, way: Way) -> None:
        """A request waits another way now; it keeps its rank."""
        self._exit(waiter)
        waiter.endpoints, waiter.toward = way
        self._enter(waiter, waiter.rank(self._order))

    def heads(self, sweep: Sweep) -> Iterator[Waiter]:
        """Requests that go next among those that are not held up, again and again.

        Tenants come in the order of what they attained or of their last turn, and those that are
        equal in the order of their heads; within a tenant the head of lowest rank goes. The caller
        lets each go on or holds its way up before the next.
        """
        self._follow_turns()
        return heads(self._lines, sweep)

    def refresh(self, tenant: str) -> None:
        """The turn of a tenant went down."""
        for way in self._ways.get(tenant, ()):
            self._lines[way].refresh(tenant)

    def lasts(self) -> Generator[Waiter]:
        """Requests in the order in which they are displaced; see `Crowding.lasts`."""
        return self._crowding.lasts()

    def __iter__(self) -> Iterator[Waiter]:
        for line in self._lines.values():
            yield from line

    def _enter(self, waiter: Waiter, rank: float) -> None:
        way = (waiter.endpoints, waiter.toward)
        line = self._lines.get(way)
        if line is None:
            line = self._lines[way] = Line(self._turn)
        waiter.place += 1
        if line.add(rank, waiter):
            self._ways.setdefault(waiter.tenant, {})[way] = None

    def _exit(self, waiter: Waiter) -> None:
        way = (waiter.endpoints, waiter.toward)
        waiter.place += 1
        line = self._lines[way]
        if line.left(waiter.tenant):
            ways = self._ways[waiter.tenant]
            del ways[way]
            if not ways:
                del self._ways[waiter.tenant]
            if not len(line):
                del self._lines[way]

    def _waiting(self, tenant: str) -> Iterable[tuple[float, Waiter]]:
        for way in self._ways[tenant]:
            for waiter in self._lines[way].lane(tenant):
                yield waiter.rank(self._order), waiter

    def _follow_turns(self) -> None:
        """Sort anew where the turns of many tenants went down."""
        if self._version != self._turns.version:
            self._version = self._turns.version
            for line in self._lines.values():
                line.rebuild()


def _no_turn(_: str) -> float:
    """All tenants are equal."""
    return 0.0
