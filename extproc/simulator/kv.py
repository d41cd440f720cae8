"""KV cache blocks of an engine: references, content hashes and LRU eviction.

Blocks are counted, not numbered: a full block is known by the key of its content, any other by
being taken and not yet registered. So taking and growing are arithmetic, and only blocks with
content are touched one by one.

Differences from vLLM, all small: a block without reusable content is reused before any cached one;
two copies of the same content are one key plus one nameless cached block.

What is evicted may be copied to the memory of the host, as vLLM's CPU offloading does when it is lazy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import Final, TypeAlias

#: Where a block is, as KV events name it: on the device, or in the memory of the host.
DEVICE: Final = "GPU"
HOST: Final = "CPU"

#: Key of content, key of the content before it (None for the first block, and where it is unknown),
#: whether it was stored, else it was removed, and where.
BlockChange: TypeAlias = tuple[int, int | None, bool, str]

#: Key of a removal of all content.
ALL_BLOCKS: Final = -1


class HostCache:
    """Copies of evicted blocks in the memory of the host, least recently used first.

    Args:
        size: Blocks that it holds (count), at least 1.
    """

    __slots__ = ("_copies", "log", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.log: list[BlockChange] | None = None
        self._copies: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def keys(self) -> Iterator[int]:
        """Content of which there is a copy."""
        return iter(self._copies)

    def store(self, key: int) -> None:
        """Copy a block that is on the device; the least recently used copy makes room."""
        copies, log = self._copies, self.log
        if key in copies:
            copies.move_to_end(key)
            return
        copies[key] = None
        removed = copies.popitem(last=False)[0] if len(copies) > self.size else None
        if log is not None:
            log.append((key, None, True, HOST))
            if removed is not None:
                log.append((removed, None, False, HOST))

    def match(self, keys: Sequence[int], start: int, limit: int) -> int:
        """Length of the unbroken run of copies from a position of the first `limit` keys."""
        copies = self._copies
        return len(list(takewhile(copies.__contains__, islice(keys, start, limit))))

    def use(self, keys: Sequence[int]) -> None:
        """Note that copies are loaded, deepest first, so that a prefix's tail is evicted first."""
        for key in reversed(keys):
            self._copies.move_to_end(key)

    def clear(self) -> None:
        """Remove every copy, without events."""
        self._copies.clear()


class BlockPool:
    """The KV blocks of one engine. Mutable; one owner.

    Args:
        size: Blocks in the device's cache.
        host_size: Evicted blocks that the memory of the host holds (count); 0 for none.

    Attributes:
        host: Copies of evicted blocks; None where there are none.
    """

    __slots__ = ("_holders", "_idle", "_log", "_serial", "blank", "host", "size")

    def __init__(self, size: int, host_size: int = 0) -> None:
        self._log: list[BlockChange] | None = None
        self.host = HostCache(host_size) if host_size else None
        self.size = size
        self.blank = size
        # Sequences that hold a block by its key; 0 for those that are in `_idle` as well, the
        # least recently used first.
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._serial = 0

    @property
    def available(self) -> int:
        """Blocks that can be allocated: blank ones and unreferenced cached ones (count)."""
        return self.blank + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks referenced by live sequences, without unreferenced cached blocks (count)."""
        return self.size - self.blank - len(self._idle)

    @property
    def cached(self) -> int:
        """Unreferenced blocks with cached content (count)."""
        return len(self._idle)

    def match(self, keys: Sequence[int], limit: int) -> int:
        """Length of the unbroken run of cached keys at the start of the first `limit` keys."""
        known = self._holders.__contains__
        return len(list(takewhile(known, islice(keys, limit))))

    def idle_among(self, keys: Sequence[int], depth: int) -> int:
        """Number of cached, unreferenced blocks among the first `depth` keys."""
        idle = self._idle
        return sum(1 for key in keys[:depth] if key in idle)

    def pin(self, keys: Sequence[int]) -> None:
        """Reference cached blocks; every key must be cached."""
        holders, idle = self._holders, self._idle
        for key in keys:
            count = holders[key]
            if not count:
                del idle[key]
            holders[key] = count + 1

    def allocate(self, count: int) -> None:
        """Take `count` blocks for content to come; the least recently used cached ones make room.

        `count` must not exceed `available`.
        """
        short = count - self.blank
        if short <= 0:
            self.blank -= count
            return
        evict, holders, log, host = self._idle.popitem, self._holders, self._log, self.host
        for _ in range(short):
            key = evict(last=False)[0]
            del holders[key]
            if host is not None and key >= 0:
                host.store(key)
            if log is not None and key >= 0:
                log.append((key, None, False, DEVICE))
        self.blank = 0

    def register(self, held: list[int], hashes: Sequence[int], full: int) -> None:
        """Name the content of a sequence's taken blocks, up to its first `full` blocks.

        Args:
            held: Keys of the sequence's registered blocks, in prefix order; grows to `full` keys.
                A block whose content has no hash, or whose hash a live block already has, gets a
                fresh negative key: it is never found in the cache.
            hashes: Chained content hashes in prefix order; may be shorter than `full`.
            full: Blocks of the sequence that are full.
        """
        holders, log = self._holders, self._log
        start = len(held)
        for position, key in enumerate(hashes[start:full], start):
            count = holders.get(key)
            if count is None and log is not None:
                parent = hashes[position - 1] if position else None
                # Keys of a preempted sequence may be negative: those have no content to be found by.
                if key >= 0 and (parent is None or parent >= 0):
                    log.append((key, parent, True, DEVICE))
            if count == 0:  # an older copy that no request holds: its block is free to take again
                del self._idle[key]
                self.blank += 1
            elif count is not None:
                self._serial -= 1
                key = self._serial  # noqa: PLW2901 - what is held in its place
            holders[key] = 1
            held.append(key)
        for _ in range(len(held), full):
            self._serial -= 1
            holders[self._serial] = 1
            held.append(self._serial)

    def release(self, keys: Sequence[int], spare: int) -> None:
        """Give back a sequence's blocks: deepest first, so that a prefix's tail is evicted first.

        Args:
            keys: Its registered blocks, in prefix order; they stay cached.
            spare: Its taken blocks without reusable content.
        """
        holders, idle = self._holders, self._idle
        for key in reversed(keys):
            count = holders[key] - 1
            holders[key] = count
            if not count:
                idle[key] = None
        self.blank += spare

    def shrink(self, size: int) -> None:
        """Lose blocks for good, blank ones first, then the least recently used cached ones.

        Blocks that live sequences hold stay: then fewer are lost.
        """
        lost = min(self.size - size, self.available)
        if lost > 0:
            self.allocate(lost)
            self.size -= lost

    def clear(self) -> None:
        """Remove every unreferenced cached block, and all copies on the host."""
        self.blank += len(self._idle)
        for key in self._idle:
            del self._holders[key]
        if self._log is not None:
            removed = [key for key in self._idle if key >= 0] if self._holders else [ALL_BLOCKS]
            self._log += [(key, None, False, DEVICE) for key in removed]
            if self.host is not None and self._holders:
                self._log += [(key, None, False, HOST) for key in self.host.keys]
        self._idle.clear()
        if self.host is not None:
            self.host.clear()

    def log_changes(self) -> list[BlockChange]:
        """Log changes from now on; returns the log, which the caller empties."""
        if self._log is None:
            self._log = []
            if self.host is not None:
                self.host.log = self._log
        return self._log

    @property
    def keys(self) -> Iterator[int]:
        """Content that is cached, referenced or not."""
        return (key for key in self._holders if key >= 0)
