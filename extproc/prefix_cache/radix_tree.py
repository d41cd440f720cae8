"""Radix tree of the blocks that endpoints hold, in runs, and the bounded part of each endpoint.

A run is a sequence of blocks in which no two chains differ, so a path from the root is a sequence of
runs. A block takes eight bytes, however many endpoints hold it; all other memory is per run. A table
of blocks would take more than a hundred bytes per block.

An endpoint (`EndpointCache`) holds a number of leading blocks of a run, and the complete run if it
holds anything behind it. Its parts are a ring ordered by last use, and on one path the root counts as
used last. So the oldest part is always a leaf of what the endpoint holds, and evicting blocks from
its end is exactly least-recently-used, tails before roots.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

#: Bytes of a packed hash.
WIDTH: Final = 8


def packed(blocks: Sequence[int]) -> bytes:
    """Hashes side by side, eight bytes each."""
    if isinstance(blocks, array) and blocks.typecode == "Q":
        return blocks.tobytes()
    return array("Q", blocks).tobytes()


class RadixNode:
    """Run of blocks, and the endpoints that hold it.

    Attributes:
        hashes: The blocks, packed; none only for the root.
        parent: The run before it.
        children: The runs behind it by their first block; None for a leaf.
        holders: Bit mask of the slots that hold all of it; never 0.
        partly: Bit mask of the slots that hold only its beginning.
        owner: The cache of one of them, which keeps its part of the run here: most runs have one
            holder, and a table of parts would cost more than the run.
        span: Span of the owner.
    """

    __slots__ = ("children", "hashes", "holders", "owner", "parent", "partly", "span")

    def __init__(self, hashes: bytes, parent: RadixNode | None) -> None:
        self.hashes = hashes
        self.parent = parent
        self.children: dict[int, RadixNode] | None = None
        self.holders = 0
        self.partly = 0
        self.owner: EndpointCache | None = None
        self.span: CachedSpan | None = None

    @property
    def size(self) -> int:
        """Number of blocks."""
        return len(self.hashes) // WIDTH

    @property
    def head(self) -> int:
        """The first block."""
        return int.from_bytes(self.hashes[:WIDTH], sys.byteorder)

    def child(self, block: int) -> RadixNode | None:
        """The run behind this one that begins with a block."""
        return None if self.children is None else self.children.get(block)

    def adopt(self, child: RadixNode, head: int) -> None:
        """Put a run that begins with a block behind this one, in place of the one that did."""
        if self.children is None:
            self.children = {}
        self.children[head] = child
        child.parent = self

    def detach(self) -> None:
        """Take this run, which must be a leaf, out of the tree."""
        parent = self.parent
        if parent is None or parent.children is None:
            return
        del parent.children[self.head]
        if not parent.children and parent.parent is not None:
            parent.children = None

    def extend(self, hashes: bytes) -> None:
        """Put packed blocks at the end."""
        self.hashes += hashes

    def shorten(self, size: int) -> None:
        """Keep only so many blocks, at least one."""
        self.hashes = self.hashes[: size * WIDTH]

    def split(self, size: int) -> RadixNode:
        """Give the first blocks, fewer than all, to a new run, which is not in the tree yet."""
        border = size * WIDTH
        upper = RadixNode(self.hashes[:border], None)
        self.hashes = self.hashes[border:]
        return upper

    def common(self, chain: bytes, depth: int) -> int:
        """Count the blocks that this run and a chain have in common.

        Args:
            chain: Packed blocks from the root.
            depth: Blocks of the chain before this node (count).
        """
        hashes = self.hashes
        start = depth * WIDTH
        piece = chain[start : start + len(hashes)]
        if piece == hashes:
            return len(hashes) // WIDTH
        # The lowest bit in which two little-endian numbers differ is in the first unlike block.
        unlike = int.from_bytes(piece, "little") ^ int.from_bytes(hashes, "little")
        if not unlike:
            # A shorter piece, and zeros behind it.
            return len(piece) // WIDTH
        along = ((unlike & -unlike).bit_length() - 1) // (8 * WIDTH)
        return min(along, len(piece) // WIDTH)


#: Bytes of one part.
_PART_BYTES = 88

#: Bytes of a place in the table of parts of runs that another cache owns.
_SHARED_BYTES = 70


class SpanTotals:
    """Parts of all caches of an index.

    Attributes:
        parts: Spans of all caches (count).
        shared: Spans of runs that another cache owns (count).
    """

    __slots__ = ("parts", "shared")

    def __init__(self) -> None:
        self.parts = 0
        self.shared = 0

    @property
    def bytes_estimate(self) -> int:
        """Estimated bytes of memory, without the runs."""
        return _PART_BYTES * self.parts + _SHARED_BYTES * self.shared


class CachedSpan:
    """Part of a run that one endpoint holds, between its neighbors in the LRU ring.

    Attributes:
        held_blocks: Blocks of the run that are held, from its head (count).
        unnamed_blocks: Blocks behind them whose content has no hash: the end of a prompt, and its
            answer (count).
        age: Epoch of the last touch, see `PrefixIndex`.
        older: The neighbor that was touched before.
        newer: The neighbor that was touched after.
    """

    __slots__ = ("age", "held_blocks", "newer", "older", "run", "unnamed_blocks")

    def __init__(self, run: RadixNode, keep: int, age: int) -> None:
        self.run = run
        self.held_blocks = keep
        self.unnamed_blocks = 0
        self.age = age
        self.older = self
        self.newer = self


class EndpointCache:
    """The blocks of one endpoint, at most `capacity` of them.

    Args:
        capacity: Bound on `held` in blocks; 0 holds nothing.

    Attributes:
        capacity: Bound on `held`; 0 holds nothing.
        held: Blocks held now, unnamed ones among them.
        unnamed: Of these, blocks without hashes.
    """

    __slots__ = ("_ring", "_shared", "_totals", "capacity", "held", "unnamed")

    def __init__(self, capacity: int, totals: SpanTotals) -> None:
        self.capacity = capacity
        self.held = self.unnamed = 0
        self._totals = totals
        #: Parts of runs that another cache owns.
        self._shared: dict[RadixNode, CachedSpan] = {}
        # The sentinel: its newer neighbor is the oldest part.
        self._ring = CachedSpan(RadixNode(b"", None), 0, 0)

    def resize(self, capacity: int) -> None:
        """Bound the held blocks from the next `shrink` on."""
        self.capacity = capacity

    @property
    def oldest(self) -> int | None:
        """Epoch of the part that was touched longest ago; None where nothing is held."""
        part = self._ring.newer
        return None if part is self._ring else part.age

    def held_blocks(self, run: RadixNode) -> int:
        """Number of leading blocks of a run that are held."""
        part = run.span if run.owner is self else self._shared.get(run)
        return 0 if part is None else part.held_blocks

    def touch(self, run: RadixNode, keep: int, age: int, unnamed: int = 0) -> None:
        """Hold so many blocks of a run, at least as many as before, as the newest part.

        Args:
            unnamed: Blocks without hashes behind them, in place of those that were there.
        """
        part = run.span if run.owner is self else self._shared.get(run)
        if part is None:
            part = CachedSpan(run, 0, age)
            self._enter(part)
        else:
            part.older.newer = part.newer
            part.newer.older = part.older
            part.age = age
        self.held += keep - part.held_blocks
        part.held_blocks = keep
        if unnamed != part.unnamed_blocks:
            self._set_unnamed(part, unnamed)
        # `_link`, written out: it runs for every request.
        part.newer = ring = self._ring
        part.older = before = ring.older
        before.newer = ring.older = part

    def split(self, upper: RadixNode, lower: RadixNode) -> int:
        """Follow a cut of a held run: `lower` is it, without the blocks that `upper` took.

        Returns:
            How many blocks of `lower` are held now.
        """
        part = lower.span if lower.owner is self else self._shared.get(lower)
        if part is None:
            return 0
        taken = upper.size
        if part.held_blocks <= taken:
            self._drop(lower)
            part.run = upper
            self._enter(part)
            return 0
        part.held_blocks -= taken
        above = CachedSpan(upper, taken, part.age)
        self._enter(above)
        _link(above, before=part.newer)
        return part.held_blocks

    def evict_excess(self) -> tuple[RadixNode, int, int]:
        """Give up blocks above `capacity` of the part that was touched longest ago, its tail first.

        More may be held than `capacity` when it is called, and still afterwards.

        Returns:
            Its run, how many blocks of it are still held, and how many were.
        """
        part = self._ring.newer
        keep = part.held_blocks + part.unnamed_blocks - (self.held - self.capacity)
        if keep < 0:
            keep = 0
        elif keep >= part.held_blocks:
            self._set_unnamed(part, keep - part.held_blocks)
            return part.run, part.held_blocks, part.held_blocks
        before = part.held_blocks
        self._keep_of(part, keep)
        return part.run, keep, before

    def evict_oldest(self) -> RadixNode:
        """Give up the part that was touched longest ago; there must be one.

        Returns:
            Its run.
        """
        part = self._ring.newer
        self._keep_of(part, 0)
        return part.run

    def truncate(self, run: RadixNode, keep: int) -> int:
        """Hold at most so many blocks of a run.

        Returns:
            Evicted blocks (count).
        """
        part = run.span if run.owner is self else self._shared.get(run)
        if part is None or part.held_blocks <= keep:
            return 0
        removed = part.held_blocks - keep
        self._keep_of(part, keep)
        return removed

    def parts(self) -> Iterator[tuple[RadixNode, int]]:
        """Every run of which something is held, and how many blocks; the oldest first."""
        part = self._ring.newer
        while part is not self._ring:
            yield part.run, part.held_blocks
            part = part.newer

    def _keep_of(self, part: CachedSpan, keep: int) -> None:
        """Hold only so many blocks of a part, or none of it any more; unnamed ones go first."""
        self.held -= part.held_blocks - keep
        part.held_blocks = keep
        self._set_unnamed(part, 0)
        if not keep:
            self._drop(part.run)
            part.older.newer = part.newer
            part.newer.older = part.older

    def _set_unnamed(self, part: CachedSpan, blocks: int) -> None:
        """Hold so many blocks without hashes behind a part."""
        more = blocks - part.unnamed_blocks
        part.unnamed_blocks = blocks
        self.unnamed += more
        self.held += more

    def _enter(self, part: CachedSpan) -> None:
        """Store a part in its run if it has no owner yet, else in the shared table."""
        self._totals.parts += 1
        run = part.run
        if run.owner is None:
            run.owner = self
            run.span = part
        else:
            self._totals.shared += 1
            self._shared[run] = part

    def _drop(self, run: RadixNode) -> None:
        """Forget the part of a run."""
        self._totals.parts -= 1
        if run.owner is self:
            run.owner = run.span = None
        else:
            self._totals.shared -= 1
            del self._shared[run]


def _link(part: CachedSpan, *, before: CachedSpan) -> None:
    """Put a part into a ring, as the older neighbor of another."""
    part.older = before.older
    part.newer = before
    before.older.newer = part
    before.older = part
