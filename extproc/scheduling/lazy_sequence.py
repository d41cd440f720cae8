"""Sequence that is computed at its first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import eq
from typing import TypeVar, overload

Item = TypeVar("Item")


class LazySequence(Sequence[Item]):
    """Sequence computed at its first use: most decisions are never explained.

    Args:
        make: Makes it; called once at most, at any later time, so it must only hold values that
            stay as they are, and neither turn nor request, because decisions outlive prompts.
    """

    __slots__ = ("_build", "_items_built")

    def __init__(self, make: Callable[[], Sequence[Item]]) -> None:
        self._build = make
        self._items_built: Sequence[Item] | None = None

    @property
    def _items(self) -> Sequence[Item]:
        if self._items_built is None:
            self._items_built = self._build_items()
        return self._items_built

    def _build_items(self) -> Sequence[Item]:
        return self._build()

    @overload
    def __getitem__(self, at: int) -> Item: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Item]: ...

    def __getitem__(self, at: int | slice) -> Item | Sequence[Item]:
        """One of the items, or some."""
        return self._items[at]

    def __len__(self) -> int:
        """Number of items."""
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of the same items."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment] # as lists, which it stands for

    def __repr__(self) -> str:
        """As the sequence it is."""
        return repr(self._items)
