"""Names that are known to be LoRA adapters, not models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from extproc.pool.snapshot import EndpointSnapshot

#: Names at which those that are not in use are forgotten (count); far more than a pool serves.
MAX_ADAPTERS: Final = 4096

_NONE: Final[frozenset[str]] = frozenset()


class AdapterNames:
    """Adapters of a pool that engines or discovery named; bounded, as clients make up names.

    Attributes:
        known: The names.
    """

    def __init__(self) -> None:
        self.known = _NONE
        #: Calls that named an adapter in vain (count).
        self._refused = 0

    def learn(self, named: frozenset[str], members: Sequence[EndpointSnapshot]) -> None:
        """Add adapters; of too many, those stay that the endpoints name, or serve requests of.

        Args:
            named: The adapters.
            members: All endpoints of the pool.
        """
        if named <= self.known:
            return
        if len(self.known) >= MAX_ADAPTERS:
            # All engines may list more than the bound. The names are collected once for as many pages
            # as there are engines, which takes less time than to read those.
            self._refused += 1
            if not 0 < len(members) <= self._refused:
                return
            self._refused = 0
            self.known = frozenset(islice(self._find_used(members), MAX_ADAPTERS))
        self.known |= named

    def _find_used(self, members: Sequence[EndpointSnapshot]) -> set[str]:
        used: set[str] = set()
        for member in members:
            load, serves = member.load, member.serves
            used.update(_NONE if serves is None else serves.adapters)
            used.update(load.adapters or _NONE, load.waiting_adapters or _NONE)
            used.update(self.known.intersection(member.account.adapters))
        return used
