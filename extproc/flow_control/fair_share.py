"""Fair share: order of tenants by the service they attained."""

from __future__ import annotations

import math

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
