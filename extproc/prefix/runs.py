"""The tree of all blocks that anybody holds, in runs.

A run is a stretch of blocks in which no chain parts from another, so a path from the root is one
run after another. A block takes eight bytes, however many endpoints hold it; everything else is
paid for by the run, where a table of blocks costs more than a hundred bytes a block.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Final

#: Bytes of a packed hash.
WIDTH: Final = 8


def packed(blocks: Sequence[int]) -> bytes:
    """Hashes side by side, eight bytes each."""
    return array("Q", blocks).tobytes()


class Run:
    """A stretch of blocks, and who holds it.

    Attributes:
        hashes: The blocks, packed; none only for the root.
        head: The first block; 0 for the root.
        size: How many blocks.
        parent: The run before it.
        children: The runs behind it by their first block; None for a leaf.
        holders: Bit mask of the slots that hold all of it; never 0.
        partly: Bit mask of the slots that hold only its beginning.
    """

    __slots__ = ("children", "hashes", "head", "holders", "parent", "partly", "size")

    def __init__(self, head: int, hashes: bytes, parent: Run | None) -> None:
        self.head = head
        self.hashes = hashes
        self.size = len(hashes) // WIDTH
        self.parent = parent
        self.children: dict[int, Run] | None = None
        self.holders = 0
        self.partly = 0

    def child(self, block: int) -> Run | None:
        """The run behind this one that begins with a block."""
        return None if self.children is None else self.children.get(block)

    def adopt(self, child: Run) -> None:
        """Put a run behind this one, in place of the one that begins alike."""
        if self.children is None:
            self.children = {}
        self.children[child.head] = child
        child.parent = self

    def leave(self) -> None:
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
        self.size = len(self.hashes) // WIDTH

    def shorten(self, size: int) -> None:
        """Keep only so many blocks, at least one."""
        self.hashes = self.hashes[: size * WIDTH]
        self.size = size

    def part(self, size: int) -> Run:
        """Give the first blocks, fewer than all, to a new run, which is not in the tree yet."""
        border = size * WIDTH
        upper = Run(self.head, self.hashes[:border], None)
        self.head = int.from_bytes(self.hashes[border : border + WIDTH], sys.byteorder)
        self.hashes = self.hashes[border:]
        self.size -= size
        return upper

    def common(self, chain: bytes, depth: int) -> int:
        """How many blocks of this run a chain goes along with.

        Args:
            chain: Packed blocks from the root.
            depth: How many of them lie before this run.
        """
        hashes = self.hashes
        start = depth * WIDTH
        piece = chain[start : start + len(hashes)]
        if piece == hashes:
            return self.size
        # The lowest bit in which two little-endian numbers differ is in the first unlike block.
        unlike = int.from_bytes(piece, "little") ^ int.from_bytes(hashes, "little")
        along = ((unlike & -unlike).bit_length() - 1) // (8 * WIDTH)
        return min(along, len(piece) // WIDTH)
