"""Who is believed to hold which block: block hash to a bit mask of endpoints.

One walk along a chain answers for all endpoints at once: the masks are AND-ed block by block, and
the depth at which an endpoint's bit drops out is its unbroken run from the root. A block behind a
gap never counts.

The index believes what it was told to record. It does not see what the engine evicts or generates;
`resize` brings its bound near the engine's own, `forget` ends a belief with its endpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from extproc.prefix.belief import Belief

#: An endpoint in one of its lives: its address and its incarnation.
Key = tuple[str, int]

#: Bytes of one hash as an int object.
_HASH_BYTES = 32

#: Set bits above which looking at every bit is faster than searching for the next one.
_MANY = 32


class PrefixIndex:
    """Block hashes of all endpoints, bounded for each.

    Endpoints are addressed by slot, a small integer that `slot` hands out and `forget` takes back.
    A slot number is only good until its key is forgotten: look slots up when the pool changes.

    Args:
        capacity_blocks: Blocks believed held by one endpoint, until `resize` says otherwise.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._masks: dict[int, int] = {}
        # Masks of one endpoint are shared objects: most blocks are held by exactly one.
        self._bits: list[int] = []
        self._slots: dict[Key, int] = {}
        self._free: list[int] = []
        self._beliefs: dict[Key, Belief] = {}

    def slot(self, key: Key) -> int:
        """The slot of an endpoint; given out at the first call, the lowest free one."""
        slot = self._slots.get(key)
        if slot is None:
            if self._free:
                slot = min(self._free)
                self._free.remove(slot)
            else:
                slot = len(self._bits)
                self._bits.append(1 << slot)
            self._slots[key] = slot
            self._beliefs[key] = Belief(self._capacity)
        return slot

    def match(self, blocks: Sequence[int]) -> list[int]:
        """How many leading blocks each endpoint holds.

        Args:
            blocks: A chain, root first.

        Returns:
            Depth by slot, one for every slot ever given out; 0 where nothing matches.
        """
        depths = [0] * len(self._bits)
        if not blocks:
            return depths
        get = self._masks.get
        alive = get(blocks[0], 0)
        depth = 0
        for block in blocks:
            mask = get(block, 0)
            if mask != alive:
                mask &= alive
                if mask != alive:
                    _note(depths, alive ^ mask, depth)
                    alive = mask
                if not alive:
                    return depths
            depth += 1
        _note(depths, alive, depth)
        return depths

    def record(self, key: Key, blocks: Sequence[int]) -> None:
        """Believe that an endpoint now holds a chain, most recently used.

        A chain longer than the endpoint's capacity is cut at its tail. Recording stops short of a
        block that is held already but not behind this chain's root: that is a hash collision.

        Args:
            key: Which endpoint; unknown ones are given a slot.
            blocks: A chain, root first.
        """
        slot = self.slot(key)
        bit = self._bits[slot]
        belief = self._beliefs[key]
        masks = self._masks
        chain = blocks[: belief.capacity]
        route, depth = belief.follow(chain)
        end = depth
        for block in chain[depth:]:
            mask = masks.get(block)
            if mask is None:
                masks[block] = bit
            elif mask & bit:
                break
            else:
                masks[block] = mask | bit
            end += 1
        belief.touch(route, depth, chain[depth:end])
        self._wipe(slot, belief.shrink())

    def resize(self, key: Key, capacity_blocks: int) -> None:
        """Bound one endpoint; what no longer fits is forgotten, least recently used first.

        Args:
            key: Which endpoint; unknown ones are given a slot.
            capacity_blocks: Blocks believed held by it at most; 0 for none.
        """
        slot = self.slot(key)
        belief = self._beliefs[key]
        belief.capacity = capacity_blocks
        self._wipe(slot, belief.shrink())

    def capacity(self, key: Key) -> int:
        """Blocks believed held by an endpoint at most."""
        belief = self._beliefs.get(key)
        return self._capacity if belief is None else belief.capacity

    def wipe(self, key: Key) -> None:
        """Believe that an endpoint holds nothing; it keeps its slot and capacity."""
        capacity = self.capacity(key)
        self.resize(key, 0)
        self.resize(key, capacity)

    def forget(self, key: Key) -> None:
        """End every belief about an endpoint and take its slot back; O(blocks held)."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._wipe(slot, self._beliefs.pop(key).blocks())
            self._free.append(slot)

    def keys(self) -> tuple[Key, ...]:
        """The endpoints that have a slot."""
        return tuple(self._slots)

    def held(self, key: Key) -> int:
        """Blocks believed held by an endpoint; 0 for unknown ones."""
        belief = self._beliefs.get(key)
        return 0 if belief is None else belief.held

    @property
    def blocks_total(self) -> int:
        """Blocks believed held, summed over endpoints: a block that two hold counts twice."""
        return sum(belief.held for belief in self._beliefs.values())

    def bytes_estimate(self) -> int:
        """Estimated bytes of memory; O(endpoints)."""
        shared = min(len(self._masks), self.blocks_total - len(self._masks))
        tables = sys.getsizeof(self._masks) + _HASH_BYTES * len(self._masks)
        masks = shared * sys.getsizeof(1 << len(self._bits))
        return tables + masks + sum(b.bytes_estimate() for b in self._beliefs.values())

    def _wipe(self, slot: int, gone: Sequence[int]) -> None:
        """Clear one endpoint's bit of blocks it no longer holds."""
        bit = self._bits[slot]
        masks = self._masks
        for block in gone:
            mask = masks[block] ^ bit
            if not mask:
                del masks[block]
            elif mask & (mask - 1):
                masks[block] = mask
            else:
                masks[block] = self._bits[mask.bit_length() - 1]


def _note(depths: list[int], mask: int, depth: int) -> None:
    """Write a depth for every bit of a mask; text beats shifting wide integers."""
    bits = f"{mask:b}"[::-1]
    if mask.bit_count() > _MANY:
        for slot, bit in enumerate(bits):
            if bit == "1":
                depths[slot] = depth
        return
    slot = bits.find("1")
    while slot >= 0:
        depths[slot] = depth
        slot = bits.find("1", slot + 1)
