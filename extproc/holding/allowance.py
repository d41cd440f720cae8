"""What tenants may take: requests and tokens per second."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

from extproc.decision import Rejection

#: Tenants remembered (count); one that is forgotten starts with a full bucket.
_MOST = 16_384


_Rate = Annotated[float, msgspec.Meta(ge=0)]


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one tenant may take; null is no limit.

    Attributes:
        requests_per_s: Requests per second. Null: any number.
        tokens_per_s: Tokens of prompts and answers per second. An answer counts with what the
            request allows it at most until its usage is seen, where it is. Null: any number.
        burst_s: Seconds of either that may be taken at once after a pause. 10 lets people send a
            handful of requests together.
    """

    requests_per_s: _Rate | None = None
    tokens_per_s: _Rate | None = None
    burst_s: _Rate = 10.0


#: Nobody is limited.
NO_LIMIT = Limit()


class _Bucket:
    """A token bucket: level(t) = min(rate burst, level(t0) + rate (t - t0))."""

    __slots__ = ("at", "level")

    def __init__(self, level: float, at: float) -> None:
        self.level = level
        self.at = at

    def filled(self, rate: float, burst_s: float, now: float) -> float:
        """The level by now."""
        full = max(1.0, rate * burst_s)
        self.level = min(full, self.level + rate * max(0.0, now - self.at))
        self.at = now
        return self.level


class Allowance:
    """Counts what tenants take, and refuses what is too much.

    Args:
        usual: For tenants without a limit of their own.
        by_tenant: Limits of single tenants.
    """

    def __init__(
        self, usual: Limit = NO_LIMIT, by_tenant: Mapping[str, Limit] | None = None
    ) -> None:
        self._usual = usual
        self._by_tenant = by_tenant or {}
        self._requests: dict[str, _Bucket] = {}
        self._tokens: dict[str, _Bucket] = {}

    def __eq__(self, other: object) -> bool:
        """Whether it allows the same, whatever was taken."""
        if not isinstance(other, Allowance):
            return NotImplemented
        return (self._usual, self._by_tenant) == (other._usual, other._by_tenant)

    __hash__ = None  # type: ignore[assignment]  # it changes with what is taken

    @property
    def limits(self) -> bool:
        """Whether anybody is limited."""
        return self._usual != NO_LIMIT or bool(self._by_tenant)

    def take(self, tenant: str, tokens: float, now: float) -> Rejection | None:
        """Take what one request costs, or nothing where it is too much.

        A request that costs more than ever fits is let through once the bucket is full: it then
        takes more than there is, and what follows waits the longer.

        Args:
            tenant: Whose.
            tokens: Of its prompt and, at most, its answer.
            now: Monotonic seconds.

        Returns:
            429 with the seconds until it would be let through.
        """
        limit = self._by_tenant.get(tenant, self._usual)
        asked = (
            (self._requests, limit.requests_per_s, 1.0, "requests"),
            (self._tokens, limit.tokens_per_s, tokens, "tokens"),
        )
        for buckets, rate, amount, what in asked:
            if rate is None:
                continue
            level = self._bucket(buckets, tenant, rate, limit, now).filled(rate, limit.burst_s, now)
            missing = min(amount, max(1.0, rate * limit.burst_s)) - level
            if missing > 1e-9:
                wait_s = math.ceil(missing / rate) if rate else 3600
                return Rejection(
                    429,
                    f"the limit of {rate:g} {what} per second is reached",
                    reason="rejected-saturated",
                    retry_after_s=max(1, min(3600, wait_s)),
                )
        for buckets, rate, amount, _ in asked:
            if rate is not None:
                buckets[tenant].level -= amount
        return None

    def settle(self, tenant: str, tokens: float) -> None:
        """Take more tokens, or give some back, once it is known what a request really took."""
        bucket = self._tokens.get(tenant)
        if bucket is not None:
            bucket.level -= tokens

    def _bucket(
        self, buckets: dict[str, _Bucket], tenant: str, rate: float, limit: Limit, now: float
    ) -> _Bucket:
        # Whoever asked last is last, so that the first is the one to forget.
        found = buckets.pop(tenant, None)
        if found is None:
            if len(buckets) >= _MOST:
                # A tenant that was quiet longest has the fullest bucket anyway.
                del buckets[next(iter(buckets))]
            found = _Bucket(max(1.0, rate * limit.burst_s), now)
        buckets[tenant] = found
        return found
