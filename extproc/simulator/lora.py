"""LoRA adapter slots of one engine, with the number of sequences on each."""

from __future__ import annotations

import enum
from collections import OrderedDict


class SlotFit(enum.Enum):
    """Requirement to run another sequence with an adapter."""

    RESIDENT = enum.auto()  #: On the device already.
    EMPTY = enum.auto()  #: A slot is empty: load it.
    SWAP = enum.auto()  #: Every slot is taken, one by an adapter that no request uses: replace it.
    NONE = enum.auto()  #: Every slot is in use: the request has to wait.


class LoraSlots:
    """The adapters resident on the device. Mutable; one owner.

    Args:
        size: Adapters that fit (`max_loras`).
    """

    __slots__ = ("_users", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._users: OrderedDict[str, int] = OrderedDict()  # least recently used first

    @property
    def resident(self) -> tuple[str, ...]:
        """Adapters on the device, used or not."""
        return tuple(self._users)

    @property
    def active(self) -> tuple[str, ...]:
        """Adapters with sequences in the batch, sorted by name."""
        return tuple(sorted(name for name, users in self._users.items() if users))

    def fit(self, adapter: str) -> SlotFit:
        """Requirement to run another sequence with this adapter."""
        if adapter in self._users:
            return SlotFit.RESIDENT
        if len(self._users) < self.size:
            return SlotFit.EMPTY
        return SlotFit.SWAP if 0 in self._users.values() else SlotFit.NONE

    def enter(self, adapter: str) -> None:
        """One more sequence uses the adapter; `fit` must not be NONE."""
        if self.fit(adapter) is SlotFit.SWAP:
            del self._users[next(name for name, users in self._users.items() if not users)]
        self._users[adapter] = self._users.get(adapter, 0) + 1
        self._users.move_to_end(adapter)

    def leave(self, adapter: str) -> None:
        """One sequence less uses the adapter; it stays resident."""
        self._users[adapter] -= 1
