"""Fair share: order of the tenants of a queue by the service they attained."""

from __future__ import annotations

import heapq
import math

#: Tenants without waiting requests that are remembered (count): what clients send must not grow memory
#: without end.
_MOST = 16_384

#: Half-lives after which amounts are written anew, long before they leave the range of floats.
_REBASE = 256.0

#: Entries that may be stale before the heap is made anew (count).
_SLACK = 16


class FairShare:
    """Tokens that every tenant attained, exponentially decayed.

    attained(t) = sum of tokens_i 2^(-(t - t_i) / half_life). All fade alike, so what is kept is
    standing = attained(t) 2^((t - base) / half_life), which stays as it is while nothing is served:
    the order of tenants changes with service only.

    A tenant of which no request waits saves up no turns: when one begins to wait, the tenant starts
    no lower than the lowest of those that wait. Otherwise the others would not be served until it had
    attained as much, which may take longer than they can wait. While none waits, it starts no lower than
    the tenant that was charged last, which may be about to wait.
    Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), virtual token counter.

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
        self._charged_last = ""
        #: Requests that wait, by tenant (count), and a heap of these tenants by standing.
        self._waiting: dict[str, int] = {}
        self._heap: list[tuple[float, str]] = []

    def enter(self, tenant: str) -> None:
        """Record that a request begins to wait, before it is put into its band."""
        count = self._waiting.get(tenant, 0)
        if not count:
            lowest = self._lowest_waiting()
            if lowest > self.normalized_service(tenant):
                self._standings[tenant] = lowest
            heapq.heappush(self._heap, (self.normalized_service(tenant), tenant))
        self._waiting[tenant] = count + 1
        self._bound()

    def leave(self, tenant: str) -> None:
        """Record that a request waits no longer."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._clean()

    def _lowest_waiting(self) -> float:
        """Standing of the tenant with a waiting request that attained least; see the class."""
        heap = self._heap
        while heap:
            standing, tenant = heap[0]
            current = self.normalized_service(tenant)
            if tenant not in self._waiting:
                heapq.heappop(heap)
            elif current != standing:
                heapq.heapreplace(heap, (current, tenant))
            else:
                return standing
        return self.normalized_service(self._charged_last)

    def _clean(self) -> None:
        if len(self._heap) > 2 * len(self._waiting) + _SLACK:
            self._rebuild()

    def _rebuild(self) -> None:
        """Sort the tenants that wait anew after the standings of many went down."""
        self._heap = [(self.normalized_service(tenant), tenant) for tenant in self._waiting]
        heapq.heapify(self._heap)

    def set_half_life(self, half_life_s: float, now: float) -> None:
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
        """Record that a request of a tenant is dispatched."""
        self._turn += 1
        self._turns[tenant] = self._turn
        self.charge(tenant, tokens, now)

    def charge(self, tenant: str, tokens: float, now: float) -> None:
        """Correct the tokens that a tenant attained; the correction may be negative."""
        if (now - self._base) / self._half_life_s > _REBASE:
            self._rebase(now)
        standings = self._standings
        total = standings.get(tenant, 0.0) + tokens * self._scale(now)
        standings[tenant] = total if total > 0.0 else 0.0  # noqa: FURB136 - a call takes longer
        self._charged_last = tenant
        if tokens < 0.0 and tenant in self._waiting:
            heapq.heappush(self._heap, (standings[tenant], tenant))
            self._clean()
        self._bound()

    def _scale(self, now: float) -> float:
        half_lives = (now - self._base) / self._half_life_s
        return math.exp2(half_lives if half_lives > -_REBASE else -_REBASE)  # noqa: FURB136 - a call

    def _rebase(self, now: float) -> None:
        shrink = math.exp2(-min(1000.0, (now - self._base) / self._half_life_s))
        self._standings = {name: value * shrink for name, value in self._standings.items()}
        self._base = now
        self.version += 1
        self._rebuild()

    def _bound(self) -> None:
        """Drop those that attained least of too many tenants without waiting requests."""
        standings, waiting = self._standings, self._waiting
        if len(standings) <= _MOST + len(waiting):
            return
        gone = (tenant for tenant in standings if tenant not in waiting)
        for tenant in sorted(gone, key=self.normalized_service)[: _MOST // 2]:
            del standings[tenant]
            self._turns.pop(tenant, None)
