"""Radix tree of all blocks that endpoints hold, in runs.

A run is a stretch of blocks in which no chain parts from another, so a path from the root is one
run after another. A block takes eight bytes, however many endpoints hold it; everything else is
paid for by the run, where a table of blocks costs more than a hundred bytes a block.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from extproc.prefix_cache.radix_tree import CachedSpan, EndpointCache

#: Bytes of a packed hash.
WIDTH: Final = 8


def packed(blocks: Sequence[int]) -> bytes:
    """Hashes side by side, eight bytes each."""
    return array("Q", blocks).tobytes()


class RadixNode:
    """Run of blocks, and the endpoints that hold it.

    Attributes:
        hashes: The blocks, packed; none only for the root.
        parent: The run before it.
        children: The runs behind it by their first block; None for a leaf.
        holders: Bit mask of the slots that hold all of it; never 0.
        partly: Bit mask of the slots that hold only its beginning.
        owner: The belief of one of them, which keeps its part of the run here: most runs have one
            holder, and a table of parts would cost more than the run.
        span: What the owner holds.
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
            depth: How many of them lie before this run.
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
