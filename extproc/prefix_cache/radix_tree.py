"""Cached blocks of one endpoint: its bounded part of the radix tree.

Of a run an endpoint holds the first so many blocks, and all of it if it holds anything behind it.
Its parts stand in a ring by the time of their last touch, and of the parts of one path the root
counts as touched last. So the oldest part is always a leaf of what the endpoint holds, and giving
up blocks from its end is exactly least-recently-used with tails before roots.
"""

from __future__ import annotations

from collections.abc import Iterator

from extproc.prefix_cache.runs import RadixNode

#: Bytes of one part.
_PART_BYTES = 80

#: Bytes of a place in the table of parts of runs that another belief owns.
_SHARED_BYTES = 70


class Totals:
    """Parts of all beliefs of an index.

    Attributes:
        parts: All of them (count).
        shared: Those of runs that another belief owns (count).
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
        run: Of which.
        held_blocks: How many blocks of it, from its start.
        age: Epoch of the last touch, see `PrefixIndex`.
        older: The neighbour that was touched before.
        newer: The neighbour that was touched after.
    """

    __slots__ = ("age", "held_blocks", "newer", "older", "run")

    def __init__(self, run: RadixNode, keep: int, age: int) -> None:
        self.run = run
        self.held_blocks = keep
        self.age = age
        self.older = self
        self.newer = self


class EndpointCache:
    """The blocks of one endpoint, at most `capacity` of them.

    Args:
        capacity: Bound on `held`.
        totals: Where parts of all beliefs are counted.

    Attributes:
        capacity: Bound on `held`; 0 holds nothing.
        held: Blocks held now.
    """

    __slots__ = ("_ring", "_shared", "_totals", "capacity", "held")

    def __init__(self, capacity: int, totals: Totals) -> None:
        self.capacity = capacity
        self.held = 0
        self._totals = totals
        #: Parts of runs that another cache owns.
        self._shared: dict[RadixNode, CachedSpan] = {}
        # The sentinel: its newer neighbour is the oldest part.
        self._ring = CachedSpan(RadixNode(b"", None), 0, 0)

    @property
    def oldest(self) -> int | None:
        """Epoch of the part that was touched longest ago; None where nothing is held."""
        part = self._ring.newer
        return None if part is self._ring else part.age

    def held_blocks(self, run: RadixNode) -> int:
        """Number of leading blocks of a run that are held."""
        part = run.span if run.owner is self else self._shared.get(run)
        return 0 if part is None else part.held_blocks

    def touch(self, run: RadixNode, keep: int, age: int) -> None:
        """Hold so many blocks of a run, at least as many as before, as the newest part."""
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
        _link(part, before=self._ring)

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

    def shrink(self) -> Iterator[tuple[RadixNode, int]]:
        """Give up the least recently used blocks above `capacity`, tails first.

        Yields:
            Each run of which blocks were given up, and how many are still held.
        """
        while self.held > self.capacity:
            part = self._ring.newer
            keep = max(0, part.held_blocks - (self.held - self.capacity))
            self._keep_of(part, keep)
            yield part.run, keep

    def give_up_oldest(self) -> RadixNode:
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
            How many were given up.
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
        """Hold only so many blocks of a part, or none of it any more."""
        self.held -= part.held_blocks - keep
        part.held_blocks = keep
        if not keep:
            self._drop(part.run)
            part.older.newer = part.newer
            part.newer.older = part.older

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
    """Put a part into a ring, as the older neighbour of another."""
    part.older = before.older
    part.newer = before
    before.older.newer = part
    before.older = part
