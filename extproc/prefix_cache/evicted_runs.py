"""Evicted runs: what an index gave up lately, which engines may still have.

An engine evicts in the order in which requests ended, the index in the order in which they were sent,
and both count room in other units. So where the index begins to evict, the engine does so as likely
earlier as later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from extproc.prefix_cache.radix_tree import WIDTH, RadixNode

#: Chance that an engine still has what the index has just evicted; its capacity is right on average
#: (`cache_model.Calibration`).
_AT_FIRST: Final = 0.5

#: Runs remembered, of all endpoints (count): some 3 MB, or 10 MB where prompts have 30 KiB.
_MAX_RUNS: Final = 8192

#: Bytes of one run without its blocks: tuple, bytes, two integers, and its place in the table.
_RUN_BYTES: Final = 250

#: Blocks given up where an engine begins anew (count): more than any endpoint holds.
_ANEW: Final = 1 << 40


class EvictedRuns:
    """The runs that endpoints gave up last.

    Attributes:
        runs: By their first block, in the order in which they were given up: slot, blocks, and how
            many blocks its endpoint will have given up when nothing is left of them.
        bytes_estimate: Estimated bytes of memory.
    """

    __slots__ = ("_given_up", "bytes_estimate", "runs")

    def __init__(self) -> None:
        self.runs: dict[int, tuple[int, bytes, int]] = {}
        #: Blocks that the endpoint of each slot gave up so far.
        self._given_up: list[int] = []
        self.bytes_estimate = 0

    def add_slot(self) -> None:
        """Count for one slot more."""
        self._given_up.append(0)

    def record(self, slot: int, head: int, hashes: bytes, given_up: int, capacity: int) -> None:
        """Record that an endpoint gave up a run; where several did, the last one counts.

        Args:
            head: First block of the run.
            hashes: Its blocks, packed; empty for none.
            given_up: Blocks that the endpoint gave up, those without hashes among them (count).
            capacity: Blocks that it holds at most.
        """
        total = self._given_up[slot] = self._given_up[slot] + given_up
        if not hashes:
            return
        runs = self.runs
        if head in runs:
            self._drop(head)
        runs[head] = slot, hashes, total + capacity
        self.bytes_estimate += _RUN_BYTES + len(hashes)
        # What has faded lies in front, where endpoints give up alike.
        while True:
            oldest = next(iter(runs))
            slot, _, faded_at = runs[oldest]
            if self._given_up[slot] < faded_at and len(runs) <= _MAX_RUNS:
                break
            self._drop(oldest)
            if not runs:
                break

    def drop_oldest(self) -> None:
        """Forget the run that was given up first; there must be one."""
        self._drop(next(iter(self.runs)))

    def forget(self, slot: int) -> None:
        """Let nothing linger that an endpoint held before, because its engine began anew."""
        self._given_up[slot] += _ANEW

    def find(
        self, blocks: Sequence[int], chain: bytes, depth: int, capacities: Sequence[int]
    ) -> tuple[int, list[tuple[int, float]]] | None:
        """Blocks behind a depth of a chain that an endpoint may still have.

        Args:
            blocks: The chain.
            chain: The hashes of `blocks`, packed.
            depth: Blocks that an index holds of the chain, less than all.
            capacities: Blocks that each endpoint holds at most, by slot.

        Returns:
            Its slot, and depths with the chances that it has all blocks to there; None for none.
        """
        holder, chances = -1, list[tuple[int, float]]()
        while depth < len(blocks) and (known := self.runs.get(blocks[depth])) is not None:
            slot, hashes, faded_at = known
            left = faded_at - self._given_up[slot]
            if left <= 0 or holder not in {-1, slot}:
                break
            holder = slot
            along = RadixNode(hashes, None).common(chain, depth)
            depth += along
            chances.append((depth, _AT_FIRST * min(1.0, left / max(1, capacities[slot]))))
            if along * WIDTH < len(hashes):
                break
        return (holder, chances) if chances else None

    def _drop(self, head: int) -> None:
        self.bytes_estimate -= _RUN_BYTES + len(self.runs.pop(head)[1])
