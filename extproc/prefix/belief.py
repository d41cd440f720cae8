"""What one endpoint is believed to hold: a bounded tree of blocks, forgotten leaf by leaf.

The tree is kept as runs. A run is a stretch of blocks that were last touched together; a path from
the root is one run after another. Runs stand in a ring by the time of their last touch, and of the
runs of one path the root counts as touched last. So the oldest run is always a leaf, and taking
blocks from its end is exactly least-recently-used with tails before roots, at eight bytes a block
and a few hundred bytes a run, where an ordered dict of blocks costs hundreds of bytes a block.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

#: Bytes of one run with its empty array, and of the int object its head is looked up by.
_RUN_BYTES = 168
_HEAD_BYTES = 32


class Run:
    """Blocks touched together, between two neighbours in the ring of runs."""

    __slots__ = ("blocks", "children", "newer", "older", "parent")

    def __init__(self, blocks: Sequence[int] = (), parent: Run | None = None) -> None:
        self.blocks = array("Q", blocks)
        self.parent = parent
        self.children = 0
        self.older = self
        self.newer = self


class Belief:
    """The blocks of one endpoint, at most `capacity` of them.

    The blocks held always form unbroken paths from a root. The caller keeps who holds which block;
    this class says which blocks to add and which to take away.

    Attributes:
        capacity: Bound on `held`; 0 holds nothing.
        held: Blocks held now.
    """

    __slots__ = ("_by_head", "_ring", "capacity", "held")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self._by_head: dict[int, Run] = {}
        self._ring = Run()  # the sentinel: its newer neighbour is the oldest run

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return len(self._by_head)

    def follow(self, chain: Sequence[int]) -> tuple[list[Run], int]:
        """Find how far a chain is held.

        Args:
            chain: Blocks from the root.

        Returns:
            The runs on the way, the last one perhaps left before its end, and the blocks held.
        """
        route: list[Run] = []
        depth = 0
        while depth < len(chain):
            run = self._by_head.get(chain[depth])
            if run is None or run.parent is not (route[-1] if route else None):
                break
            route.append(run)
            piece = array("Q", chain[depth : depth + len(run.blocks)])
            if piece != run.blocks:
                pairs = enumerate(zip(piece, run.blocks, strict=False))
                depth += next((i for i, (a, b) in pairs if a != b), len(piece))
                break
            depth += len(piece)
        return route, depth

    def touch(self, route: list[Run], depth: int, added: Sequence[int]) -> None:
        """Mark a held path as just used and hang new blocks under it.

        Args:
            route: What `follow` found.
            depth: What `follow` found.
            added: Blocks not held that follow the path; may be empty.
        """
        if route:
            keep = depth - sum(len(run.blocks) for run in route[:-1])
            route[-1] = self._split(route[-1], keep)
        if added:
            self._hang(added, route[-1] if route else None)
        for run in reversed(route):
            self._unlink(run)
            self._append(run)

    def shrink(self) -> list[int]:
        """Take away the least recently used blocks above `capacity`, tails first.

        Returns:
            The blocks no longer held.
        """
        gone: list[int] = []
        while self.held > self.capacity:
            run = self._ring.newer
            blocks = run.blocks
            excess = self.held - self.capacity
            keep = max(0, len(blocks) - excess)
            gone.extend(reversed(blocks[keep:]))
            self.held -= len(blocks) - keep
            if keep:
                del blocks[keep:]
            else:
                del self._by_head[blocks[0]]
                self._unlink(run)
                if run.parent is not None:
                    run.parent.children -= 1
        return gone

    def blocks(self) -> list[int]:
        """Every block held, in no useful order."""
        return [block for run in self._by_head.values() for block in run.blocks]

    def bytes_estimate(self) -> int:
        """Estimated bytes of memory, hashes as array items; arrays grow by about an eighth."""
        table = sys.getsizeof(self._by_head)
        return table + 9 * self.held + (_RUN_BYTES + _HEAD_BYTES) * len(self._by_head)

    def _hang(self, added: Sequence[int], parent: Run | None) -> None:
        """Put new blocks behind a run: into it while it is a leaf, else into a run of their own."""
        self.held += len(added)
        if parent is not None:
            if not parent.children:
                parent.blocks.extend(added)
                return
            parent.children += 1
        run = Run(added, parent)
        self._by_head[added[0]] = run
        self._append(run)

    def _split(self, run: Run, keep: int) -> Run:
        """Cut a run where a path leaves it: the part on the path, while the rest keeps its age."""
        if keep == len(run.blocks):
            return run
        upper = Run(run.blocks[:keep], run.parent)
        upper.children = 1
        del run.blocks[:keep]
        run.parent = upper
        self._by_head[upper.blocks[0]] = upper
        self._by_head[run.blocks[0]] = run
        self._append(upper)
        return upper

    def _append(self, run: Run) -> None:
        """Put a run at the newest end of the ring."""
        ring = self._ring
        run.older = ring.older
        run.newer = ring
        ring.older.newer = run
        ring.older = run

    def _unlink(self, run: Run) -> None:
        run.older.newer = run.newer
        run.newer.older = run.older
