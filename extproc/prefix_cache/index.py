"""Prefix index: a radix tree of block runs, with a bit mask of endpoints for every run.

One walk along a chain answers for all endpoints at once: from run to run the masks shrink, and the
depth at which an endpoint's bit drops out is its unbroken run from the root. A block behind a gap
never counts.

The index holds what `record` adds to it. It does not see what the engine evicts or generates;
`resize` brings its bound near the engine's own, `forget` drops the blocks of an endpoint that left. Beyond a
bound of bytes over all endpoints it evicts what was used longest ago, on any endpoint. Indexes of
several pools can share one bound: then the largest of them evicts.
"""

from __future__ import annotations

import heapq
import sys
import weakref
from collections.abc import Sequence
from typing import Final

from extproc.prefix_cache.evicted_runs import EvictedRuns
from extproc.prefix_cache.radix_tree import WIDTH, EndpointCache, RadixNode, SpanTotals, packed

#: An endpoint in one of its lives: its address and its incarnation.
Key = tuple[str, int]

#: Bytes of one run with its share of its parent's table, without the blocks; tracemalloc says 250
#: to 285.
_RUN_BYTES = 270

#: Bytes of an index unless another bound is set; `prefix.max_bytes` has the reason.
DEFAULT_MAX_BYTES: Final = 512 * 1024 * 1024

#: Calls of `record` in an epoch, in which all touches have one age: ages are few shared objects, and
#: among endpoints what was used longest ago is known to that many calls.
_EPOCH = 256

#: Calls of `record` of an index between two looks at what the indexes of all pools take together.
_LOOK = 64

#: Share of their bound that the largest index evicts beyond what is needed: not every look ends in
#: work, and each in some milliseconds at most.
_SPARE = 1 / 1024

#: Parts of runs that an endpoint gives up at a time (count), some 6 ms: the others with the next records.
_MAX_RELEASED: Final = 4096

#: Set bits above which looking at every bit is faster than searching for the next one.
_MANY = 32


class IndexBudget:
    """Bytes that the indexes of several pools take together.

    Args:
        max_bytes: Estimated bytes of all indexes at most, but for what each records between two
            looks.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._indexes: weakref.WeakSet[PrefixIndex] = weakref.WeakSet()

    def add(self, index: PrefixIndex) -> None:
        """Count an index, until it is removed or freed."""
        self._indexes.add(index)

    def remove(self, index: PrefixIndex) -> None:
        """Count an index no longer; what lies in a removed pool takes no room of others."""
        self._indexes.discard(index)

    def enforce(self) -> None:
        """Evict blocks of the largest indexes until all fit."""
        sizes = {index: index.bytes_estimate() for index in self._indexes}
        excess = sum(sizes.values()) - self._max_bytes
        spare = int(_SPARE * self._max_bytes)
        while excess > 0:
            largest = max(sizes, key=sizes.__getitem__)
            size = sizes[largest]
            largest.shrink(max(0, size - excess - spare))
            sizes[largest] = left = largest.bytes_estimate()
            if left == size:
                return
            excess -= size - left


class PrefixIndex:
    """Block hashes of all endpoints, bounded for each and for all of them.

    Endpoints are addressed by slot, a small integer that `slot` hands out and `forget` takes back.
    A slot number is only good until its key is forgotten: look slots up when the pool changes.

    Args:
        capacity_blocks: Blocks predicted as held by one endpoint, until `resize` says otherwise.
        max_bytes: Estimated bytes of memory at most.
        budget: Bound that it shares with the indexes of other pools; None for none.
    """

    def __init__(
        self,
        capacity_blocks: int,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        budget: IndexBudget | None = None,
    ) -> None:
        self._capacity = capacity_blocks
        self._max_bytes = max_bytes
        self._budget = budget
        if budget is not None:
            budget.add(self)
        self._root = RadixNode(b"", None)
        self._root.children = {}
        # Masks of one endpoint are shared objects: most runs are held by exactly one.
        self._bits: list[int] = []
        self._slots: dict[Key, int] = {}
        #: A heap.
        self._free: list[int] = []
        self._caches: list[EndpointCache] = []
        self._runs = 0
        self._blocks = 0
        self._totals = SpanTotals()
        self._records = 0
        self._epoch = 0
        #: The last chain and its packed form: what is matched is mostly recorded next.
        self._last_chain: Sequence[int] = ()
        self._last_packed = b""
        #: Slots that hold nothing any more but for what was recorded from an epoch on, and those of them
        #: whose endpoint left.
        self._clearing: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._evicted = EvictedRuns()
        #: A heap of every slot with an epoch: none of its parts was touched before that.
        self._ages: list[tuple[int, int]] = []

    def slot(self, key: Key) -> int:
        """The slot of an endpoint; given out at the first call, the lowest free one."""
        slot = self._slots.get(key)
        if slot is None:
            if self._free:
                slot = heapq.heappop(self._free)
                self._caches[slot] = EndpointCache(self._capacity, self._totals)
            else:
                slot = len(self._bits)
                self._bits.append(1 << slot)
                self._evicted.add_slot()
                self._caches.append(EndpointCache(self._capacity, self._totals))
                heapq.heappush(self._ages, (self._epoch, slot))
            self._slots[key] = slot
        return slot

    def match(self, blocks: Sequence[int]) -> list[int]:
        """Count the leading blocks that each endpoint holds.

        Returns:
            Depth by slot, one for every slot ever given out; 0 where nothing matches.
        """
        depths = [0] * len(self._bits)
        children = self._root.children
        run = children.get(blocks[0]) if blocks and children else None
        if run is None:
            return depths
        chain = self._pack(blocks)
        end = len(blocks)
        alive = run.holders
        depth = 0
        while run is not None:
            if run.holders != alive:
                note_depth(depths, alive ^ run.holders, depth)
                alive = run.holders
            along = run.common(chain, depth)
            if run.partly:
                for slot in _slots(run.partly):
                    depths[slot] = depth + min(along, self._caches[slot].held_blocks(run))
            depth += along
            if depth == end or along * WIDTH < len(run.hashes):
                break
            run = run.children.get(blocks[depth]) if run.children else None
        note_depth(depths, alive, depth)
        for slot in self._clearing:
            depths[slot] = 0
        return depths

    def lingering(
        self, blocks: Sequence[int], depths: Sequence[int]
    ) -> tuple[int, list[tuple[int, float]]] | None:
        """Blocks of a chain behind those that any endpoint holds, which one may still have.

        Args:
            depths: What `match` returned for it.

        Returns:
            Its slot, and depths with the chances that it has all blocks to there; None for none.
        """
        deepest = max(depths)
        if deepest >= len(blocks) or blocks[deepest] not in self._evicted.runs:
            return None
        capacities = [cache.capacity for cache in self._caches]
        remains = self._evicted.find(blocks, self._pack(blocks), deepest, capacities)
        return None if remains is None or depths[remains[0]] < deepest else remains

    def record(self, key: Key, blocks: Sequence[int], unnamed: int = 0) -> None:
        """Predict that an endpoint holds a chain, as the most recently used one.

        A chain longer than the endpoint's capacity is cut at its tail.

        Args:
            key: Key of the endpoint; a new key is given a slot.
            unnamed: Blocks that the request takes behind the chain. They are evicted before it, and
                those of the next request that ends or goes on here take their place.
        """
        slot = self._slots.get(key)
        if slot is None:
            slot = self.slot(key)
        cache = self._caches[slot]
        end = len(blocks)
        if end <= cache.capacity:
            chain = self._pack(blocks)
        else:
            end = cache.capacity
            chain = packed(blocks[:end])
        path: list[tuple[RadixNode, int]] = []
        run = self._root
        depth = 0
        while depth < end:
            head = blocks[depth]
            child = run.children.get(head) if run.children else None
            if child is None:
                run = self._grow(run, head, chain[depth * WIDTH :], slot=slot)
                if path and path[-1][0] is run:
                    path.pop()
                path.append((run, run.size))
                break
            along = child.common(chain, depth)
            depth += along
            if along * WIDTH < len(child.hashes) and (
                depth < end or cache.held_blocks(child) > along
            ):
                child = self._cut(run, child, taken=along)
            path.append((child, along))
            run = child
        self._touch(slot, path, unnamed)
        if self._clearing or cache.held > cache.capacity:
            self._release(slot)
        # As `bytes_estimate`, without a call.
        tree_bytes = _RUN_BYTES * self._runs + WIDTH * self._blocks
        tree_bytes += self._totals.bytes_estimate
        if tree_bytes + self._evicted.bytes_estimate > self._max_bytes:
            self.shrink(self._max_bytes)
        if self._budget is not None and not self._records % _LOOK:
            self._budget.enforce()

    def _pack(self, blocks: Sequence[int]) -> bytes:
        """Blocks as `packed` has them."""
        if blocks is not self._last_chain:
            self._last_chain, self._last_packed = blocks, packed(blocks)
        return self._last_packed

    def shrink(self, max_bytes: int) -> None:
        """Give up what was used longest ago, on any endpoint, until so many bytes are left."""
        while self._evicted.runs and self.bytes_estimate() > max_bytes:
            self._evicted.drop_oldest()
        ages = self._ages
        while self._totals.parts and self.bytes_estimate() > max_bytes:
            age, slot = ages[0]
            cache = self._caches[slot]
            oldest = cache.oldest
            if oldest is not None and oldest <= age:
                self._detach(cache.evict_oldest(), self._bits[slot], 0)
            else:
                # Nothing that old is left. Without any part the next one will be of this epoch.
                later = max(age, self._epoch) + 1 if oldest is None else oldest
                heapq.heapreplace(ages, (later, slot))

    def retract(self, key: Key, blocks: Sequence[int], keep: int) -> None:
        """Drop the prediction that an endpoint holds a chain, or anything that continues it.

        Args:
            keep: Leading blocks that are still predicted as held.
        """
        slot = self._slots.get(key)
        if slot is None:
            return
        chain = packed(blocks)
        run, depth = self._root, 0
        while depth < len(blocks):
            child = run.child(blocks[depth])
            if child is None:
                return
            along = child.common(chain, depth)
            if depth + along > keep:
                self._truncate_below(child, slot, max(0, keep - depth))
                return
            if along * WIDTH < len(child.hashes):
                return
            run, depth = child, depth + along

    def resize(self, key: Key, capacity_blocks: int) -> None:
        """Bound one endpoint; what no longer fits is forgotten, least recently used first.

        Args:
            capacity_blocks: Blocks predicted as held by it at most; 0 for none.
        """
        slot = self.slot(key)
        self._caches[slot].resize(capacity_blocks)
        self._release(slot)
        # A run that is cut takes more than before.
        self.shrink(self._max_bytes)

    def capacity(self, key: Key) -> int:
        """Blocks predicted as held by an endpoint at most."""
        slot = self._slots.get(key)
        return self._capacity if slot is None else self._caches[slot].capacity

    def clear(self, key: Key) -> None:
        """Predict that an endpoint holds nothing; it keeps its slot and capacity.

        What is recorded of it before the last of many runs is given up counts from then on.
        """
        self._clear(self.slot(key))

    def forget(self, key: Key) -> None:
        """Drop the blocks of an endpoint, and reuse its slot once all are given up."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._leaving.add(slot)
            self._clear(slot)

    def keys(self) -> tuple[Key, ...]:
        """The endpoints that have a slot."""
        return tuple(self._slots)

    def held(self, key: Key) -> int:
        """Blocks predicted as held by an endpoint; 0 for unknown ones."""
        slot = self._slots.get(key)
        return 0 if slot is None else self._caches[slot].held - self._caches[slot].unnamed

    @property
    def blocks_total(self) -> int:
        """Blocks predicted as held, summed over endpoints: a block that two hold counts twice."""
        return sum(cache.held - cache.unnamed for cache in self._caches)

    def bytes_estimate(self) -> int:
        """Estimated bytes of memory."""
        tree = _RUN_BYTES * self._runs + WIDTH * self._blocks
        return tree + self._totals.bytes_estimate + self._evicted.bytes_estimate

    def _touch(self, slot: int, path: Sequence[tuple[RadixNode, int]], unnamed: int) -> None:
        """Hold the first blocks of each run of a path, the root as used last."""
        self._records += 1
        if not self._records % _EPOCH:
            self._epoch += 1
        bit, cache, epoch = self._bits[slot], self._caches[slot], self._epoch
        for run, keep in reversed(path):
            cache.touch(run, keep, epoch, unnamed)
            unnamed = 0
            if keep * WIDTH < len(run.hashes):
                run.partly |= bit
            elif not run.holders & bit:
                run.holders = run.holders | bit if run.holders else bit
                run.partly &= ~bit

    def _grow(self, run: RadixNode, head: int, hashes: bytes, *, slot: int) -> RadixNode:
        """Put new blocks behind a run: into it while only this endpoint holds it, to its end."""
        self._blocks += len(hashes) // WIDTH
        bit = self._bits[slot]
        if run.holders == bit and not run.partly and run.children is None:
            run.extend(hashes)
            return run
        self._runs += 1
        child = RadixNode(hashes, run)
        run.adopt(child, head)
        return child

    def _cut(self, parent: RadixNode, lower: RadixNode, *, taken: int) -> RadixNode:
        """Cut a run where a chain parts from it: a new one takes the first blocks."""
        upper = lower.split(taken)
        parent.adopt(upper, upper.head)
        upper.adopt(lower, lower.head)
        upper.holders = lower.holders
        self._runs += 1
        for slot in _slots(lower.holders):
            self._caches[slot].split(upper, lower)
        for slot in _slots(lower.partly):
            bit = self._bits[slot]
            if not self._caches[slot].split(upper, lower):
                lower.partly ^= bit
            if self._caches[slot].held_blocks(upper) == taken:
                upper.holders |= bit
            else:
                upper.partly |= bit
        return upper

    def _release(self, slot: int) -> None:
        """Evict what is above the bound of an endpoint, and more of what cleared ones held."""
        cache, bit = self._caches[slot], self._bits[slot]
        cleared = self._clearing.get(slot, 0)
        for _ in range(_MAX_RELEASED):
            if cache.held <= cache.capacity:
                break
            held, oldest = cache.held, cache.oldest
            run, keep, before = cache.evict_excess()
            if oldest is None or oldest >= cleared:  # of what was cleared, nothing lingers
                gone = run.hashes[keep * WIDTH : before * WIDTH]
                head = int.from_bytes(gone[:WIDTH], sys.byteorder)
                self._evicted.record(slot, head, gone, held - cache.held, cache.capacity)
            if keep * WIDTH < len(run.hashes):
                self._detach(run, bit, keep)
        if self._clearing:
            self._sweep()

    def _clear(self, slot: int) -> None:
        # Parts that are touched from now on have another age than those before.
        self._epoch += 1
        self._evicted.forget(slot)
        self._clearing[slot] = self._epoch
        self._sweep()

    def _sweep(self) -> None:
        """Evict some blocks of cleared endpoints, those of the first cleared one first."""
        left = _MAX_RELEASED
        while left and self._clearing:
            slot, epoch = next(iter(self._clearing.items()))
            cache, bit = self._caches[slot], self._bits[slot]
            while left and (oldest := cache.oldest) is not None and oldest < epoch:
                self._detach(cache.evict_oldest(), bit, 0)
                left -= 1
            if not left:
                return
            del self._clearing[slot]
            if slot in self._leaving:
                self._leaving.discard(slot)
                heapq.heappush(self._free, slot)

    def _truncate_below(self, top: RadixNode, slot: int, keep: int) -> None:
        """Evict all that an endpoint holds behind the first blocks of a run, leaves first."""
        bit, cache = self._bits[slot], self._caches[slot]
        below = [top]
        for run in below:
            if run.children:
                held = [
                    child for child in run.children.values() if (child.holders | child.partly) & bit
                ]
                below += held
        for run in reversed(below):
            remaining = keep if run is top else 0
            if cache.truncate(run, remaining):
                self._detach(run, bit, remaining)

    def _detach(self, run: RadixNode, bit: int, keep: int) -> None:
        """Truncate an endpoint's part of a run, and drop blocks without a holder."""
        run.holders &= ~bit
        run.partly = run.partly | bit if keep else run.partly & ~bit
        if run.holders:
            return
        held = len(run.hashes) // WIDTH
        if not run.partly:
            run.detach()
            self._runs -= 1
        elif run.partly == bit:
            # As `_shorten`, without the search for others that hold it.
            run.shorten(keep)
            run.holders, run.partly = bit, 0
            held -= keep
        else:
            self._shorten(run)
            held -= run.size
        self._blocks -= held

    def _shorten(self, run: RadixNode) -> None:
        """Cut a leaf to the longest part that an endpoint still holds."""
        keeps = [(self._caches[slot].held_blocks(run), slot) for slot in _slots(run.partly)]
        longest = max(keep for keep, _ in keeps)
        run.shorten(longest)
        for keep, slot in keeps:
            if keep == longest:
                run.partly &= ~self._bits[slot]
                run.holders = run.holders | self._bits[slot] if run.holders else self._bits[slot]


def _slots(mask: int) -> list[int]:
    """The slots of a mask, ascending; text beats shifting wide integers."""
    return [slot for slot, bit in enumerate(f"{mask:b}"[::-1]) if bit == "1"]


def note_depth(depths: list[int], mask: int, depth: int) -> None:
    """Write a depth for every bit of a mask."""
    if mask.bit_count() > _MANY:
        for slot, bit in enumerate(f"{mask:b}"[::-1]):
            if bit == "1":
                depths[slot] = depth
        return
    while mask:
        slot = mask.bit_length() - 1
        depths[slot] = depth
        mask ^= 1 << slot
