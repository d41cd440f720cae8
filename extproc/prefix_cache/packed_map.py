"""Sorted map of 64-bit keys in arrays: eight bytes for a key and eight for a value.

A dict of integers takes 60 to 130 bytes for an entry, with the objects. Here keys stand in sorted
arrays of bounded length, so that looking up and changing an entry costs two binary searches and one
short move of memory, whatever the keys are: no choice of keys makes it slower.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from typing import Final

#: Entries of a segment at most (count); a full one is cut in two. Longer ones move more memory per
#: change, shorter ones cost objects.
_MAX_SEGMENT: Final = 1024

#: Masks that are remembered as shared objects (count).
_MAX_SHARED: Final = 65_536

#: Masks that are found at once once they were looked up (count): those at which engines end in the
#: prompts of conversations, and those of system prompts.
_MAX_LOOKED_UP: Final = 16_384

#: Chains that are remembered as what went on from a block (count), blocks of each (count), and of all: 2 MB.
#: They are answers, of which most come block by block, until the next turn is mapped.
_MAX_CONTINUATIONS: Final = 16_384
_MAX_CONTINUED: Final = 512
_MAX_CONTINUED_TOTAL: Final = 262_144

_NOTHING: Final = array("Q")


def packed_values() -> MutableSequence[int]:
    """Values of a segment that are numbers of 64 bits."""
    return array("Q")


class PackedMap:
    """Map of 64-bit integers to integers, in segments of sorted arrays.

    Args:
        make_values: Makes the values of a segment: `packed_values`, or `list` where values are few
            shared objects of any width.
    """

    __slots__ = ("_keys", "_lasts", "_make_values", "_size", "_values")

    def __init__(self, make_values: Callable[[], MutableSequence[int]] = packed_values) -> None:
        self._make_values = make_values
        #: Greatest key of each segment; objects, as searches would make them again and again.
        self._lasts: list[int] = []
        self._keys: list[array[int]] = []
        self._values: list[MutableSequence[int]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        for keys in self._keys:
            yield from keys

    def get(self, key: int) -> int | None:
        """Value of a key; None where it is not there."""
        segment = bisect_left(self._lasts, key)
        if segment == len(self._lasts):
            return None
        keys = self._keys[segment]
        position = bisect_left(keys, key)
        return self._values[segment][position] if keys[position] == key else None

    def set(self, key: int, value: int) -> bool:
        """Add a key, or replace its value; returns whether it was added."""
        lasts = self._lasts
        segment = bisect_left(lasts, key)
        if segment < len(lasts):
            keys, values = self._keys[segment], self._values[segment]
            position = bisect_left(keys, key)
            if keys[position] == key:
                values[position] = value
                return False
            self._insert(segment, position, key, value)
        else:
            self._append(key, value)
        return True

    def pop(self, key: int) -> int | None:
        """Remove a key; returns its value, None where it was not there."""
        segment = bisect_left(self._lasts, key)
        if segment == len(self._lasts):
            return None
        keys = self._keys[segment]
        position = bisect_left(keys, key)
        return self._pop_at(segment, position) if keys[position] == key else None

    def pop_segment(self) -> MutableSequence[int]:
        """Remove the last segment; returns its values. There must be an entry."""
        values = self._values.pop()
        self._lasts.pop()
        self._size -= len(self._keys.pop())
        return values

    def _insert(self, segment: int, position: int, key: int, value: int) -> None:
        """Add a key before another one of a segment."""
        keys = self._keys[segment]
        keys.insert(position, key)
        self._values[segment].insert(position, value)
        self._size += 1
        if len(keys) > _MAX_SEGMENT:
            self._split(segment)

    def _append(self, key: int, value: int) -> None:
        """Add a key behind all others."""
        self._size += 1
        if not self._lasts:
            values = self._make_values()
            values.append(value)
            self._lasts.append(key)
            self._keys.append(array("Q", (key,)))
            self._values.append(values)
            return
        self._keys[-1].append(key)
        self._values[-1].append(value)
        self._lasts[-1] = key
        if len(self._keys[-1]) > _MAX_SEGMENT:
            self._split(len(self._lasts) - 1)

    def _pop_at(self, segment: int, position: int) -> int:
        """Remove an entry; returns its value."""
        keys = self._keys[segment]
        del keys[position]
        value = self._values[segment].pop(position)
        self._size -= 1
        if not keys:
            del self._lasts[segment], self._keys[segment], self._values[segment]
        elif position == len(keys):
            self._lasts[segment] = keys[-1]
        return value

    def _split(self, segment: int) -> None:
        """Cut a segment in two."""
        keys, values = self._keys[segment], self._values[segment]
        half = len(keys) // 2
        self._keys[segment : segment + 1] = [keys[:half], keys[half:]]
        self._values[segment : segment + 1] = [values[:half], values[half:]]
        self._lasts.insert(segment, keys[half - 1])


class MaskMap(PackedMap):
    """Map of keys to the bits of the engines that hold them; masks of several engines are shared objects."""

    __slots__ = ("_looked_up", "_shared")

    def __init__(self) -> None:
        super().__init__(list)
        self._shared: dict[int, int] = {}
        #: Masks by key, once they were looked up.
        self._looked_up: dict[int, int] = {}

    def find(self, key: int) -> int:
        """Mask of a key; 0 for none."""
        mask = self._looked_up.get(key)
        if mask is None:
            mask = self.get(key) or 0
            if mask:
                if len(self._looked_up) >= _MAX_LOOKED_UP:
                    self._looked_up.clear()
                self._looked_up[key] = mask
        return mask

    def add(self, key: int, bits: int) -> None:
        """Let bits hold a key."""
        lasts = self._lasts
        segment = bisect_left(lasts, key)
        if segment == len(lasts):
            self._append(key, bits)
            return
        keys = self._keys[segment]
        position = bisect_left(keys, key)
        if keys[position] != key:
            self._insert(segment, position, key, bits)
            return
        mask = self._values[segment][position]
        if bits & ~mask:
            self._put(segment, position, key, mask | bits)

    def discard(self, key: int, bits: int) -> int:
        """Let bits no longer hold a key; returns those that still do."""
        lasts = self._lasts
        segment = bisect_left(lasts, key)
        if segment == len(lasts):
            return 0
        keys = self._keys[segment]
        position = bisect_left(keys, key)
        if keys[position] != key:
            return 0
        mask = self._values[segment][position]
        left = mask & ~bits
        if not left:
            self._looked_up.pop(key, None)
            self._pop_at(segment, position)
        elif left != mask:
            self._put(segment, position, key, left)
        return left

    def find_end(
        self,
        keys: Sequence[int],
        alive: int,
        bounds: tuple[int, int, int],
        guesses: Sequence[tuple[int, int]],
    ) -> tuple[int, int, int]:
        """Depth up to which all engines hold a chain, the next one that is known, and its holders.

        A binary search: engines evict the end of a chain before its beginning.

        Args:
            alive: Bits of the engines.
            bounds: A depth that all hold, one that fewer do, and those that hold it.
            guesses: Depths at which engines may end, each with their bits.
        """
        held, above, left = bounds
        mask_of = self.find
        for guess, _ in guesses:
            if held <= guess < above:
                mask = mask_of(keys[guess]) & alive
                if mask == alive:
                    held = guess + 1
                    continue
                above, left = guess + 1, mask
                if guess > held and mask_of(keys[guess - 1]) & alive == alive:
                    held = guess
                break
        while above - held > 1:
            middle = (held + above) // 2
            mask = mask_of(keys[middle - 1]) & alive
            if mask == alive:
                held = middle
            else:
                above, left = middle, mask
        return held, above, left

    def _put(self, segment: int, position: int, key: int, mask: int) -> None:
        self._looked_up.pop(key, None)
        if len(self._shared) > _MAX_SHARED:
            self._shared.clear()
        self._values[segment][position] = self._shared.setdefault(mask, mask)


def split_mask(bits: int) -> Iterator[int]:
    """The bits of a mask, each as a mask."""
    while bits:
        bit = bits & -bits
        yield bit
        bits ^= bit


class Continuations:
    """Chains of blocks by the block before them; bounded, those stored longest ago go first."""

    __slots__ = ("_known", "_num_blocks")

    def __init__(self) -> None:
        self._known: OrderedDict[int, array[int]] = OrderedDict()
        self._num_blocks = 0

    def find(self, key: int) -> array[int]:
        """Keys of the blocks that went on from a block last, on any engine; empty for none."""
        known = self._known
        start = known.get(key)
        if start is None:
            return _NOTHING
        # A chain is put together once, where it begins.
        last = start[-1]
        while len(start) < _MAX_CONTINUED and (further := known.pop(last, None)) is not None:
            start.extend(further)
            last = start[-1]
        return start

    def record(self, parent: int, keys: Sequence[int]) -> None:
        """Note the keys that an engine stored behind a block."""
        known = self._known
        replaced = known.pop(parent, _NOTHING)
        known[parent] = chain = array("Q", keys[:_MAX_CONTINUED])
        self._num_blocks += len(chain) - len(replaced)
        while len(known) > _MAX_CONTINUATIONS or self._num_blocks > _MAX_CONTINUED_TOTAL:
            self._num_blocks -= len(known.popitem(last=False)[1])
