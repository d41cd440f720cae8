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

    __slots__ = ("_count", "_ring", "_shared", "capacity", "held")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self._count = 0
        #: Parts of runs that somebody else owns.
        self._shared: dict[Run, Part] = {}
        # The sentinel: its newer neighbour is the oldest part.
        self._ring = Part(Run(b"", None), 0)

    def keep(self, run: Run) -> int:
        """How many blocks of a run are held, from its start."""
        part = run.part if run.owner is self else self._shared.get(run)
        return 0 if part is None else part.keep

    def touch(self, run: Run, keep: int) -> None:
        """Hold so many blocks of a run, at least as many as before, as the newest part."""
        part = run.part if run.owner is self else self._shared.get(run)
        if part is None:
            part = Part(run, 0)
            self._enter(part)
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
        part = lower.part if lower.owner is self else self._shared.get(lower)
        if part is None:
            return 0
        taken = upper.size
        if part.keep <= taken:
            self._drop(lower)
            part.run = upper
            self._enter(part)
            return 0
        part.keep -= taken
        above = Part(upper, taken)
        self._enter(above)
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
                self._drop(part.run)
                part.older.newer = part.newer
                part.newer.older = part.older
            yield part.run, keep

    def give_up(self, run: Run, keep: int) -> int:
        """Hold at most so many blocks of a run.

        Returns:
            How many were given up.
        """
        part = run.part if run.owner is self else self._shared.get(run)
        if part is None or part.keep <= keep:
            return 0
        given = part.keep - keep
        self.held -= given
        part.keep = keep
        if not keep:
            self._drop(run)
            part.older.newer = part.newer
            part.newer.older = part.older
        return given

    def parts(self) -> Iterator[tuple[Run, int]]:
        """Every run of which something is held, and how many blocks; the oldest first."""
        part = self._ring.newer
        while part is not self._ring:
            yield part.run, part.keep
            part = part.newer

    def bytes_estimate(self) -> int:
        """Estimated bytes of memory, without the runs."""
        return sys.getsizeof(self._shared) + _PART_BYTES * self._count

    def _enter(self, part: Part) -> None:
        """Keep a part where it is found: in its run, unless somebody else is there."""
        self._count += 1
        run = part.run
        if run.owner is None:
            run.owner = self
            run.part = part
        else:
            self._shared[run] = part

    def _drop(self, run: Run) -> None:
        """Forget the part of a run."""
        self._count -= 1
        if run.owner is self:
            run.owner = run.part = None
        else:
            del self._shared[run]


def _stand(part: Part, *, before: Part) -> None:
    """Put a part into a ring, as the older neighbour of another."""
    part.older = before.older
    part.newer = before
    before.older.newer = part
    before.older = part
