"""Rate limits of tenants: requests and tokens per second."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

from extproc.decision import Rejection

#: Tenants without a limit of their own that have a bucket of their own (count).
MAX_TENANTS = 16_384

#: Buckets looked at for a full one when another tenant comes (count): they are on the hot path.
_MAX_CHECKED = 64

#: Longest Retry-After (seconds).
_MAX_RETRY_AFTER_S = 3600

_Rate = Annotated[float, msgspec.Meta(ge=0)]


class RateLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rate limit of a tenant in each replica, over all pools; null is no limit.

    Attributes:
        requests_per_s: Requests per second. Null: no limit.
        tokens_per_s: Tokens of prompts and responses per second. A response counts with the
            `max_tokens` of its request, or the longest context of the pool's engines (2^20 where one
            lists none) if that is less, once for all its samples and prompts, until its usage is
            known, where it is visible. Null: no limit.
        burst_s: Seconds of either rate that may be used at once after a pause. With 10, a handful
            of requests may be sent together.
    """

    requests_per_s: _Rate | None = None
    tokens_per_s: _Rate | None = None
    burst_s: _Rate = 10.0


#: No tenant is limited.
NO_LIMIT = RateLimit()


class _TokenBucket:
    """A token bucket: level(t) = min(full, level(t0) + rate (t - t0)), full = max(1, rate burst)."""

    __slots__ = ("at", "full", "level", "rate")

    def __init__(self, rate: float, burst_s: float, now: float) -> None:
        self.rate = rate
        self.full = max(1.0, rate * burst_s)
        self.level = self.full if rate else 0.0
        self.at = now

    def fill(self, now: float) -> None:
        """Bring the level up to now."""
        self.level = min(self.full, self.level + self.rate * max(0.0, now - self.at))
        self.at = max(self.at, now)

    def full_at(self) -> float:
        """When it is full if nothing else is taken (monotonic seconds)."""
        missing = self.full - self.level
        if missing <= 0.0:
            return self.at
        return self.at + missing / self.rate if self.rate else math.inf


class _Account(msgspec.Struct, frozen=True):
    """The buckets of a tenant; None for no limit."""

    requests: _TokenBucket | None
    tokens: _TokenBucket | None

    def full_at(self) -> float:
        """When both buckets are full if nothing else is taken (monotonic seconds)."""
        return max(
            (bucket.full_at() for bucket in (self.requests, self.tokens) if bucket is not None),
            default=-math.inf,
        )


_UNLIMITED = _Account(None, None)


class Charge:
    """Charge of a request to its tenant's buckets; keeps no reference to the request.

    Attributes:
        tokens: Tokens that are taken now.
    """

    __slots__ = ("_account", "tokens")

    def __init__(self, account: _Account, tokens: float) -> None:
        self._account: _Account | None = account
        self.tokens = tokens

    def reconcile(self, tokens: float) -> None:
        """Replace the charge by the tokens that the request used."""
        bucket = None if self._account is None else self._account.tokens
        if bucket is not None:
            bucket.level -= tokens - self.tokens
            self.tokens = tokens

    def refund(self) -> None:
        """Refund a request that was not served; idempotent."""
        account, self._account = self._account, None
        if account is None:
            return
        if account.requests is not None:
            account.requests.level += 1.0
        if account.tokens is not None:
            account.tokens.level += self.tokens
        self.tokens = 0.0


class TenantRateLimiter:
    """Charges requests to tenants, and rejects requests above the limit.

    Tenants that the configuration limits by name always have buckets of their own. Of all others
    `MAX_TENANTS` have: when another one comes, a tenant whose buckets are full is forgotten, which changes
    nothing for it. While there is none, further tenants share one account, so that no number of
    names gives a tenant a bucket that is full again.
    """

    def __init__(
        self, default: RateLimit = NO_LIMIT, by_tenant: Mapping[str, RateLimit] | None = None
    ) -> None:
        self._default = default
        self._by_tenant = by_tenant or {}
        self._configured: dict[str, _Account] = {}
        self._accounts: dict[str, _Account] = {}
        self._shared: _Account | None = None
        #: When each account may be full at the earliest, and whose it is; refunds make it earlier.
        self._full_at: list[tuple[float, str]] = []

    def reconfigure(self, default: RateLimit, by_tenant: Mapping[str, RateLimit]) -> None:
        """Apply other limits; tenants whose limit is equal keep their buckets."""
        unchanged = {
            tenant: account
            for tenant, account in self._configured.items()
            if by_tenant.get(tenant) == self._by_tenant[tenant]
        }
        if default != self._default:
            self._accounts, self._shared, self._full_at = {}, None, []
        self._configured, self._default, self._by_tenant = unchanged, default, by_tenant

    def __len__(self) -> int:
        """Number of accounts in memory."""
        return len(self._configured) + len(self._accounts) + (self._shared is not None)

    @property
    def is_limiting(self) -> bool:
        """True if any tenant is limited."""
        return self._default != NO_LIMIT or bool(self._by_tenant)

    def take(self, tenant: str, tokens: float, now: float) -> Charge | Rejection:
        """Charge a request, or nothing if it exceeds a limit.

        A request that costs more than ever fits is let through once the bucket is full: it then
        takes more than there is, and what follows waits the longer.

        Args:
            tokens: Prompt tokens, and the most that the response may have.

        Returns:
            429 with the seconds until it would be let through, and the limit that takes longest.
        """
        account = self._account(tenant, now)
        amounts = ((account.requests, 1.0, "requests"), (account.tokens, tokens, "tokens"))
        reached: list[tuple[float, str]] = []
        for bucket, amount, unit in amounts:
            if bucket is None:
                continue
            bucket.fill(now)
            missing = min(amount, bucket.full) - bucket.level
            if missing > 1e-9:
                wait_s = missing / bucket.rate if bucket.rate else _MAX_RETRY_AFTER_S
                reached.append((wait_s, f"{bucket.rate:g} {unit}"))
        if reached:
            wait_s, limit = max(reached)
            return Rejection(
                429,
                f"the limit of {limit} per second is reached",
                reason="rejected-saturated",
                retry_after_s=max(1, math.ceil(min(_MAX_RETRY_AFTER_S, wait_s))),
                cause="rate-limited",
            )
        for bucket, amount, _ in amounts:
            if bucket is not None:
                bucket.level -= amount
        return Charge(account, tokens)

    def _account(self, tenant: str, now: float) -> _Account:
        """The account of a tenant, or the account it shares with others."""
        limit = self._by_tenant.get(tenant)
        if limit is not None:
            account = self._configured.get(tenant)
            if account is None:
                account = self._configured[tenant] = _build_account(limit, now)
            return account
        if self._default.requests_per_s is None and self._default.tokens_per_s is None:
            return _UNLIMITED
        account = self._accounts.get(tenant)
        if account is not None:
            return account
        if len(self._accounts) >= MAX_TENANTS and not self._forget_full(now):
            if self._shared is None:
                self._shared = _build_account(self._default, now)
            return self._shared
        account = self._accounts[tenant] = _build_account(self._default, now)
        heapq.heappush(self._full_at, (now, tenant))
        return account

    def _forget_full(self, now: float) -> bool:
        """Forget a tenant whose buckets are full; returns whether there was such a tenant."""
        heap = self._full_at
        for _ in range(_MAX_CHECKED):
            at, tenant = heap[0]
            if at > now:
                return False
            full_at = self._accounts[tenant].full_at()
            if full_at <= now:
                heapq.heappop(heap)
                del self._accounts[tenant]
                return True
            heapq.heapreplace(heap, (full_at, tenant))
        return False


def _build_account(limit: RateLimit, now: float) -> _Account:
    requests, tokens, burst_s = limit.requests_per_s, limit.tokens_per_s, limit.burst_s
    return _Account(
        requests=None if requests is None else _TokenBucket(requests, burst_s, now),
        tokens=None if tokens is None else _TokenBucket(tokens, burst_s, now),
    )
