"""Sets of a pool's endpoints as bits of an int: bit n stands for the n-th member."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.pool import snapshot
from extproc.pool.model_index import ModelIndex, ModelMatch
from extproc.pool.snapshot import Pool


class ModelBitsets:
    """Eligible endpoints as bits, regardless of load and health; see `eligibility`.

    It stands for as long as neither the endpoints nor their lists of models change.

    Args:
        pool: The snapshot.
        respect_subset: Keep to the endpoints the data plane allows.
        reject_unlisted: Whether requests for models that no endpoint serves are rejected.

    Attributes:
        serving: Endpoints by model, as of the snapshot.
    """

    def __init__(self, pool: Pool, *, respect_subset: bool, reject_unlisted: bool) -> None:
        self.serving: ModelIndex = pool.serving
        self._honors_subset = respect_subset
        self._rejects_unlisted = reject_unlisted
        self._all = (1 << len(pool.members)) - 1
        self._by_token: dict[str, int] = {}
        for at, member in enumerate(pool.members):
            self._by_token[member.endpoint.address] = 1 << at
        for at, member in enumerate(pool.members):
            ip = member.endpoint.ip
            self._by_token[ip] = self._by_token.get(ip, 0) | 1 << at
        #: The last split and its bits: names that no endpoint lists share one.
        self._last: tuple[ModelMatch | None, int] = (None, self._all)

    def bits_for(self, model: str, adapter: str = "", subset: Sequence[str] | None = None) -> int:
        """Bits of the endpoints that a request may be sent to; 0 for none."""
        allowed = self._all
        if subset is not None and self._honors_subset:
            allowed = 0
            for token in subset:
                allowed |= self._by_token.get(snapshot.normalize_token(token), 0)
        split = self.serving.match(model, adapter)
        bits = allowed & self._bits(split)
        return bits or (0 if self._rejects_unlisted else allowed)

    def bits_of_addresses(self, addresses: Sequence[str]) -> int:
        """Bits of the endpoints at these addresses, `ip:port`."""
        bits = 0
        for address in addresses:
            bits |= self._by_token.get(address, 0)
        return bits

    def _bits(self, split: ModelMatch | None) -> int:
        if split is None:
            return self._all
        if split is not self._last[0]:
            bits = 0
            for at in split.positions:
                bits |= 1 << at
            self._last = (split, bits)
        return self._last[1]
