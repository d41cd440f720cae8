"""What one endpoint is believed to hold: its bounded part of the tree of runs.

Of a run an endpoint holds the first so many blocks, and all of it if it holds anything behind it.
Its parts stand in a ring by the time of their last touch, and of the parts of one path the root
counts as touched last. So the oldest part is always a leaf of what the endpoint holds, and giving
up blocks from its end is exactly least-recently-used with tails before roots.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from extproc.prefix.runs import Run

#: Bytes of one part.
_PART_BYTES = 64


class Part:
    """What one endpoint holds of a run, between two neighbours in the endpoint's ring."""

    __slots__ = ("keep", "newer", "older", "run")

    def __init__(self, run: Run, keep: int) -> None:
        self.run = run
        self.keep = keep
        self.older = self
        self.newer = self


class Belief:
    """The blocks of one endpoint, at most `capacity` of them.

    Attributes:
        capacity: Bound on `held`; 0 holds nothing.
        held: Blocks held now.
    """

    __slots__ = ("_parts", "_ring", "capacity", "held")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self._parts: dict[Run, Part] = {}
        # The sentinel: its newer neighbour is the oldest part.
        self._ring = Part(Run(0, b"", None), 0)

    @property
    def runs(self) -> int:
        """How many runs the endpoint holds something of."""
        return len(self._parts)

    def keep(self, run: Run) -> int:
        """How many blocks of a run are held, from its start."""
        part = self._parts.get(run)
        return 0 if part is None else part.keep

    def touch(self, run: Run, keep: int) -> None:
        """Hold so many blocks of a run, at least as many as before, as the newest part."""
        part = self._parts.get(run)
        if part is None:
            part = self._parts[run] = Part(run, 0)
        else:
            part.older.newer = part.newer
            part.newer.older = part.older
        self.held += keep - part.keep
        part.keep = keep
        _stand(part, before=self._ring)

    def cut(self, upper: Run, lower: Run) -> int:
        """Follow a cut of a held run: `lower` is it, without the blocks that `upper` took.

        Returns:
            How many blocks of `lower` are held now.
        """
        part = self._parts[lower]
        taken = upper.size
        if part.keep <= taken:
            del self._parts[lower]
            part.run = upper
            self._parts[upper] = part
            return 0
        part.keep -= taken
        above = self._parts[upper] = Part(upper, taken)
        _stand(above, before=part.newer)
        return part.keep

    def shrink(self) -> Iterator[tuple[Run, int]]:
        """Give up the least recently used blocks above `capacity`, tails first.

        Yields:
            Each run of which blocks were given up, and how many are still held.
        """
        while self.held > self.capacity:
            part = self._ring.newer
            keep = max(0, part.keep - (self.held - self.capacity))
            self.held -= part.keep - keep
            part.keep = keep
            if not keep:
                del self._parts[part.run]
                part.older.newer = part.newer
                part.newer.older = part.older
            yield part.run, keep

    def parts(self) -> Iterator[tuple[Run, int]]:
        """Every run of which something is held, and how many blocks; the oldest first."""
        part = self._ring.newer
        while part is not self._ring:
            yield part.run, part.keep
            part = part.newer

    def bytes_estimate(self) -> int:
        """Estimated bytes of memory, without the runs."""
        return sys.getsizeof(self._parts) + _PART_BYTES * len(self._parts)


def _stand(part: Part, *, before: Part) -> None:
    """Put a part into a ring, as the older neighbour of another."""
    part.older = before.older
    part.newer = before
    before.older.newer = part
    before.older = part
