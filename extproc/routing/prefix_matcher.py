"""Prefix matching: predicted cached tokens of a prompt for every endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from extproc.pool.snapshot import EndpointSnapshot
from extproc.pool.store import PoolStore
from extproc.prefix_cache import cache_model
from extproc.prefix_cache.index import PrefixIndex


class PrefixMatcher:
    """Looks prompts up in the index for the members of a fleet.

    Args:
        fleet: Whose members.
        index: Predicted prefix blocks per endpoint.
    """

    def __init__(self, fleet: PoolStore, index: PrefixIndex) -> None:
        self._fleet = fleet
        self._index = index
        self._slots: Mapping[str, int] = {}
        self._slots_in_order: Sequence[int] = ()
        self._slots_of: object = None

    def match(
        self, chain: Sequence[int], members: Sequence[EndpointSnapshot], tokens: Sequence[int]
    ) -> Sequence[int]:
        """Predicted cached prompt tokens per member.

        Args:
            chain: The prompt's block hashes, root first.
            members: Endpoints to match.
            tokens: By depth in the chain.
        """
        if not chain:
            return [0] * len(members)
        self._follow_pool()
        depths = self._index.match(chain)
        if members is self._fleet.pool.members:
            return [tokens[depths[slot]] for slot in self._slots_in_order]
        slots = self._slots
        return [tokens[depths[slots[member.endpoint.address]]] for member in members]

    def _follow_pool(self) -> None:
        """Look index slots up again when the endpoint set changed."""
        pool = self._fleet.pool
        if self._slots_of is not pool.positions:
            self._slots_of = pool.positions
            self._slots_in_order = [
                self._index.slot(cache_model.index_key(member.endpoint)) for member in pool.members
            ]
            self._slots = dict(zip(pool.positions, self._slots_in_order, strict=True))
