"""Priority band: queued requests of the same priority, by target and tenant.

Fair share: order of tenants by the service they attained.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator

from extproc.flow_control.flow_queue import TenantQueues
from extproc.flow_control.queue_lengths import QueueLengths
from extproc.flow_control.queued_item import Fairness, Order, QueuedItem
from extproc.flow_control.sweep import FlowKey, Sweep, next_items

#: Tenants remembered (count): what clients send must not grow memory without end.
_MOST = 16_384

#: Half-lives after which amounts are written anew, long before they leave the range of floats.
_REBASE = 256.0


class FairShare:
    """Tokens that every tenant attained, exponentially decayed.

    attained(t) = sum of tokens_i 2^(-(t - t_i) / half_life). All fade alike, so what is kept is
    standing = attained(t) 2^((t - base) / half_life), which stays as it is while nothing is served:
    the order of tenants changes with service only. A tenant that comes back after a while has no
    more credit than one that was never there, so no tenant saves up turns.

    Args:
        half_life_s: Time after which service counts half.

    Attributes:
        version: Changes whenever the turns of many tenants went down.
    """

    def __init__(self, half_life_s: float) -> None:
        self.version = 0
        self._half_life_s = half_life_s
        self._base = 0.0
        self._standings: dict[str, float] = {}
        self._turns: dict[str, int] = {}
        self._turn = 0

    def adopt(self, half_life_s: float, now: float) -> None:
        """Replace the half-life."""
        if half_life_s != self._half_life_s:
            self._rebase(now)
            self._half_life_s = half_life_s

    def attained(self, tenant: str, now: float) -> float:
        """Decayed tokens that a tenant attained."""
        return self.normalized_service(tenant) / self._scale(now)

    def normalized_service(self, tenant: str) -> float:
        """Attained service for comparison of tenants; the lowest goes first."""
        return self._standings.get(tenant, 0.0)

    def last(self, tenant: str) -> int:
        """Sequence number of the tenant's last turn; 0 for never."""
        return self._turns.get(tenant, 0)

    def served(self, tenant: str, tokens: float, now: float) -> None:
        """Record that a request of a tenant is dispatched.

        Args:
            tenant: Whose.
            tokens: Estimated cost.
            now: Monotonic seconds.
        """
        self._turn += 1
        self._turns[tenant] = self._turn
        self.charge(tenant, tokens, now)

    def charge(self, tenant: str, tokens: float, now: float) -> None:
        """Correct the tokens that a tenant attained; the correction may be negative."""
        if (now - self._base) / self._half_life_s > _REBASE:
            self._rebase(now)
        total = self.normalized_service(tenant) + tokens * self._scale(now)
        self._standings[tenant] = max(0.0, total)
        if len(self._standings) > _MOST:
            self._forget()

    def _scale(self, now: float) -> float:
        return math.exp2(max(-_REBASE, (now - self._base) / self._half_life_s))

    def _rebase(self, now: float) -> None:
        shrink = math.exp2(-min(1000.0, (now - self._base) / self._half_life_s))
        self._standings = {name: value * shrink for name, value in self._standings.items()}
        self._base = now
        self.version += 1

    def _forget(self) -> None:
        """Drop the half of the tenants that attained least."""
        self.version += 1
        ordered = sorted(self._standings, key=self.normalized_service)
        for tenant in ordered[: _MOST // 2]:
            del self._standings[tenant]
            self._turns.pop(tenant, None)


class PriorityBand:
    """All requests of one priority.

    Args:
        order: Within a tenant.
        fairness: Among tenants.
        turns: Attained service of tenants; shared by all bands.

    Attributes:
        count: Requests that wait.
        bytes: Of their bodies.
    """

    def __init__(self, order: Order, fairness: Fairness, turns: FairShare) -> None:
        self._order: Order = order
        self._turn = {
            "least-served": turns.normalized_service,
            "round-robin": turns.last,
            "none": _no_turn,
        }[fairness]
        self._turns = turns
        self._version = turns.version
        self._lines: dict[FlowKey, TenantQueues] = {}
        self._ways: dict[str, dict[FlowKey, None]] = {}
        self._crowding = QueueLengths(self._waiting)
        self.count = 0
        self.bytes = 0

    def add(self, waiter: QueuedItem) -> None:
        """A request begins to wait."""
        self.count += 1
        self.bytes += waiter.bytes
        rank = waiter.rank(self._order)
        self._enter(waiter, rank)
        self._crowding.add(rank, waiter)

    def remove(self, waiter: QueuedItem) -> None:
        """A request stopped waiting where it is."""
        self.count -= 1
        self.bytes -= waiter.bytes
        self._exit(waiter)
        self._crowding.remove(waiter.tenant)

    def move(self, waiter: QueuedItem, way: FlowKey) -> None:
        """A request waits another way now; it keeps its rank."""
        self._exit(waiter)
        waiter.endpoints, waiter.toward = way
        self._enter(waiter, waiter.rank(self._order))

    def next_items(self, sweep: Sweep) -> Iterator[QueuedItem]:
        """Requests that go next among those that are not held up, again and again.

        Tenants come in the order of what they attained or of their last turn, and those that are
        equal in the order of their heads; within a tenant the head of lowest rank goes. The caller
        lets each go on or holds its way up before the next.
        """
        self._follow_turns()
        return next_items(self._lines, sweep)

    def refresh(self, tenant: str) -> None:
        """The turn of a tenant went down."""
        for way in self._ways.get(tenant, ()):
            self._lines[way].refresh(tenant)

    def lasts(self) -> Generator[QueuedItem]:
        """Requests in the order in which they are displaced; see `QueueLengths.lasts`."""
        return self._crowding.lasts()

    def __iter__(self) -> Iterator[QueuedItem]:
        for line in self._lines.values():
            yield from line

    def _enter(self, waiter: QueuedItem, rank: float) -> None:
        way = (waiter.endpoints, waiter.toward)
        line = self._lines.get(way)
        if line is None:
            line = self._lines[way] = TenantQueues(self._turn)
        waiter.place += 1
        if line.add(rank, waiter):
            self._ways.setdefault(waiter.tenant, {})[way] = None

    def _exit(self, waiter: QueuedItem) -> None:
        way = (waiter.endpoints, waiter.toward)
        waiter.place += 1
        line = self._lines[way]
        if line.remove(waiter.tenant):
            ways = self._ways[waiter.tenant]
            del ways[way]
            if not ways:
                del self._ways[waiter.tenant]
            if not len(line):
                del self._lines[way]

    def _waiting(self, tenant: str) -> Iterable[tuple[float, QueuedItem]]:
        for way in self._ways[tenant]:
            for waiter in self._lines[way].flow_queue(tenant):
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
