"""Token blocks: which engine holds which block of tokens, exactly, as engines publish it.

A block is known by a key of our own over every token up to its end (`kv_events.block_keys`). Each
engine has a map from its own hashes to our keys, since removals name hashes only, and one map for
all engines has the bits of those that hold a key. Both are packed: about 20 bytes for an entry. Lower
tiers, the memory of the host and storage, have bits of their own there, and one map per engine.

Forgetting an engine takes no time: it gets another bit, and its old one is swept in small steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from extproc.prefix_cache import kv_events
from extproc.prefix_cache.packed_map import Continuations, MaskMap, PackedMap, split_mask

#: Cost of a wipe in blocks: bits are free again only once they are swept, after the turn.
_WIPE_COST: Final = 32

#: Groups of hybrid models that are remembered as left out (count).
_MAX_GROUPS: Final = 64

#: Tiers below the device, from which an engine loads blocks instead of computing them: the memory of the
#: host, and storage of any other kind.
LOWER_TIERS: Final = ("CPU", "storage")


class EngineBlocks:
    """Blocks on the device of one engine, or one rank of it. Changed by `TokenBlockIndex` only.

    Attributes:
        is_complete: Whether every block that it holds is known; else those that it held when we began
            to listen are not.
        is_live: Whether its events arrive.
        dropped: Stored blocks that were not taken in: their parents are unknown, there are too many,
            or they have another size (count).
        lower_bits: Its bits of the lower tiers, 0 for those in which it stored nothing yet.
        lower_keys: Our keys by the engine's hashes, of blocks in lower tiers.
        lower_weights: Of the lower tiers: the share of computing a token that is saved by loading it.
        keys: Our keys by the engine's hashes.
        copies: Further blocks of the same content by the engine's hashes (count). vLLM computes the
            last block of a prompt that fills it again, and stores it beside the first one; each is
            removed by an event of its own.
        num_copies: Copies of all blocks together (count).
        has_gap: Whether blocks were dropped since it was empty, so that it holds more than is known.
        group: Group of layers whose copies count, that of the first stored block; -1 before. A prefix
            needs its blocks in every group, so a removal from another group removes them.
        left_out: Groups of layers whose blocks do not stand for all tokens up to them.
        block_tokens: Tokens of its blocks; 0 while it has none.
    """

    __slots__ = (
        "bit",
        "block_tokens",
        "copies",
        "dropped",
        "group",
        "has_gap",
        "is_complete",
        "is_live",
        "keys",
        "left_out",
        "lower_bits",
        "lower_keys",
        "lower_weights",
        "num_copies",
    )

    def __init__(self, bit: int, lower_weights: Sequence[float]) -> None:
        self.bit = bit
        self.lower_bits = [0] * len(LOWER_TIERS)
        self.lower_keys = PackedMap()
        self.lower_weights = list(lower_weights)
        self.is_complete = False
        self.is_live = False
        self.dropped = 0
        self.keys = PackedMap()
        self.copies: dict[int, int] = {}
        self.num_copies = 0
        self.has_gap = False
        self.group = -1
        self.left_out: set[int] = set()
        self.block_tokens = 0

    @property
    def slot(self) -> int:
        """Position of its bit."""
        return self.bit.bit_length() - 1

    @property
    def held(self) -> int:
        """Blocks of different content that it holds on the device, as far as known (count)."""
        return len(self.keys)

    def find_key(self, hashed: int) -> int | None:
        """Our key by the engine's hash of a block, in any tier; None where it is unknown."""
        key = self.keys.get(hashed)
        return self.lower_keys.get(hashed) if key is None else key

    @property
    def spared_ratio(self) -> float:
        """Share of computing a block that is saved although the device evicted it; 0 without a host.

        Engines that copy blocks to the memory of the host do so before they evict them.
        """
        return self.lower_weights[0] if self.lower_bits[0] else 0.0

    @property
    def is_exact(self) -> bool:
        """True while what it holds is known, and nothing else is."""
        return self.is_live and self.is_complete


class TokenBlockIndex:
    """Blocks of all engines of a pool.

    Args:
        max_blocks: Blocks of one engine at most, whatever it publishes; as many again in lower tiers
            (count).
        lower_weights: Weights of lower tiers until an engine shows them.
        on_resized: Called when `block_tokens` changes: keys of chains are others then.

    Attributes:
        block_tokens: Tokens of a block that most engines have, and of them the first one; 0 before.
            Engines with another size are not followed.
        version: Changes when an engine gets another bit, or another state.
        continuations: What went on from a block last.
    """

    def __init__(
        self,
        max_blocks: int,
        lower_weights: Sequence[float] = (0.0,) * len(LOWER_TIERS),
        *,
        on_resized: Callable[[], None] = lambda: None,
    ) -> None:
        self._max_blocks = max_blocks
        self._on_resized = on_resized
        self._lower_weights = lower_weights
        #: Engines with lower tiers by their bit on the device, and bits of all lower tiers.
        self._tiered: dict[int, EngineBlocks] = {}
        self._lower_mask = 0
        self._holders = MaskMap()
        self.continuations = Continuations()
        self._num_bits = 0
        self._free: list[int] = []
        self._retired: deque[tuple[int, PackedMap]] = deque()
        #: Engines, and how many of them have blocks of a size.
        self._engines: set[EngineBlocks] = set()
        self._num_sized: Counter[int] = Counter()
        self.block_tokens = 0
        self.version = 0

    @property
    def num_slots(self) -> int:
        """Bits that were ever in use at a time (count)."""
        return self._num_bits

    @property
    def has_lower_tiers(self) -> bool:
        """True if any engine stored blocks in a lower tier."""
        return bool(self._tiered)

    @property
    def num_keys(self) -> int:
        """Keys that any engine holds (count)."""
        return len(self._holders)

    def open(self) -> EngineBlocks:
        """The blocks of a new engine: none."""
        self.version += 1
        engine = EngineBlocks(self._take_bit(), self._lower_weights)
        self._engines.add(engine)
        return engine

    def close(self, engine: EngineBlocks) -> None:
        """Forget an engine."""
        self.version += 1
        self._engines.discard(engine)
        self._set_size(engine, 0)
        engine.is_live = engine.is_complete = False
        self._retired.append((engine.bit, engine.keys))
        engine.keys = PackedMap()
        if self._tiered.pop(engine.bit, None) is not None:
            self._retired.append((sum(engine.lower_bits), engine.lower_keys))
            engine.lower_bits = [0] * len(LOWER_TIERS)
            engine.lower_keys = PackedMap()
        engine.copies = {}
        engine.num_copies = 0

    def wipe(self, engine: EngineBlocks, *, is_complete: bool) -> None:
        """Forget the blocks of an engine that goes on.

        Args:
            is_complete: Whether it holds none now; else it is unknown which.
        """
        if engine.keys or engine.lower_keys:
            is_live = engine.is_live
            self.close(engine)
            engine.bit = self._take_bit()
            engine.is_live = is_live
            self._engines.add(engine)
        elif engine.is_complete != is_complete:
            self.version += 1
        engine.is_complete = is_complete
        engine.has_gap = False
        # It may have restarted with another layout of its cache, in which these groups are others.
        engine.left_out = set()
        engine.group = -1

    def set_live(self, engine: EngineBlocks, *, is_live: bool) -> None:
        """Note that events of an engine arrive, or no longer do."""
        if engine.is_live != is_live:
            self.version += 1
            engine.is_live = is_live

    def set_complete(self, engine: EngineBlocks) -> None:
        """Note that all events of an engine since its start were taken in."""
        if not engine.is_complete:
            self.version += 1
            engine.is_complete = True
            engine.has_gap = False

    def sweep(self, max_blocks: int) -> bool:
        """Remove some blocks of engines that were forgotten; returns whether any are left.

        Args:
            max_blocks: Blocks at most, but for one segment of a map (count).
        """
        holders = self._holders
        while self._retired and max_blocks > 0:
            bits, keys = self._retired[0]
            if not len(keys):
                self._retired.popleft()
                self._free.extend(split_mask(bits))
                self._lower_mask &= ~bits
                continue
            values = keys.pop_segment()
            max_blocks -= len(values)
            for key in values:
                holders.discard(key, bits)
        return bool(self._retired)

    def set_lower_weight(self, engine: EngineBlocks, tier: int, weight: float) -> None:
        """Note what an engine saves by loading blocks from a lower tier.

        Args:
            tier: Position in `LOWER_TIERS`.
            weight: Share of computing them, 0..1.
        """
        engine.lower_weights[tier] = weight

    def apply(self, engine: EngineBlocks, event: kv_events.KvEvent) -> int:
        """Apply an event of an engine; returns its blocks (count, at least 1)."""
        match event:
            case kv_events.BlockStored():
                self._store(engine, event)
                return 1 + len(event.hashes)
            case kv_events.BlockRemoved():
                self._remove(engine, event)
                return 1 + len(event.hashes)
            case kv_events.BlocksLeftOut():
                engine.dropped += event.num_blocks
                self._note_gap(engine)
                return 1
            case _:
                self.wipe(engine, is_complete=True)
                return _WIPE_COST

    def _store(self, engine: EngineBlocks, event: kv_events.BlockStored) -> None:
        if not event.is_prefix:
            if len(engine.left_out) < _MAX_GROUPS:
                engine.left_out.add(event.group)
            return
        if event.group in engine.left_out:
            return
        if event.medium != kv_events.DEVICE:
            self._store_lower(engine, event)
            return
        if not event.tokens:
            return
        keys = self._keys_of(engine, event, self._max_blocks - len(engine.keys))
        if not keys:
            self._note_gap(engine)
            return
        if engine.group < 0:
            engine.group = event.group
        # From the root, they may be a report of blocks that a request reuses, which are no copies.
        is_counted = event.parent is not None and event.group == engine.group
        self._add(engine, event.hashes, keys, is_counted=is_counted)

    def _note_gap(self, engine: EngineBlocks) -> None:
        engine.has_gap = True
        if engine.is_complete:
            self.version += 1
            engine.is_complete = False

    def _keys_of(
        self, engine: EngineBlocks, event: kv_events.BlockStored, room: int
    ) -> Sequence[int]:
        """Keys of stored blocks with tokens; none where they cannot be taken in.

        Args:
            room: Blocks that may be added (count).
        """
        if not engine.block_tokens == event.block_tokens == self.block_tokens:
            self._follow_size(engine, event.block_tokens)
        parent = (
            kv_events.root_key(event.adapter)
            if event.parent is None
            else engine.find_key(event.parent)
        )
        if parent is None or event.block_tokens != self.block_tokens or room < len(event.hashes):
            engine.dropped += len(event.hashes)
            return ()
        keys = kv_events.block_keys(parent, event.tokens, event.block_tokens, event.extras)
        if event.parent is not None:
            self.continuations.record(parent, keys)
        return keys

    def _follow_size(self, engine: EngineBlocks, size: int) -> None:
        """Note the size of an engine's blocks, and take it where twice as many have it, or none has any."""
        if not engine.keys:
            self._set_size(engine, size)
        self.block_tokens = self.block_tokens or size
        if size == self.block_tokens or engine.block_tokens != size:
            return
        if self._holders and self._num_sized[size] < 2 * self._num_sized[self.block_tokens]:
            return
        self.block_tokens = size
        self.version += 1
        for other in [other for other in self._engines if other.block_tokens not in (0, size)]:
            self.wipe(other, is_complete=False)
            other.has_gap = True
        self._on_resized()

    def _set_size(self, engine: EngineBlocks, size: int) -> None:
        self._num_sized[engine.block_tokens] -= 1
        self._num_sized[size] += 1
        self._num_sized += Counter()  # without those that no engine has
        engine.block_tokens = size

    def _store_lower(self, engine: EngineBlocks, event: kv_events.BlockStored) -> None:
        """Apply blocks of a lower tier, which engines name by their hashes alone, or describe."""
        room = self._max_blocks - len(engine.lower_keys)
        known: Sequence[int | None]
        if event.tokens:
            known = self._keys_of(engine, event, room)
        else:
            known = [engine.find_key(hashed) for hashed in event.hashes[: max(0, room)]]
            engine.dropped += len(event.hashes) - len(known) + known.count(None)
        tier = _tier(event.medium)
        if not engine.lower_bits[tier]:
            engine.lower_bits[tier] = self._take_bit()
            self._lower_mask |= engine.lower_bits[tier]
            self._tiered[engine.bit] = engine
        bit = engine.lower_bits[tier]
        for hashed, key in zip(event.hashes, known, strict=False):
            if key is not None:
                engine.lower_keys.set(hashed, key)
                self._holders.add(key, bit)

    def _add(
        self, engine: EngineBlocks, hashes: Sequence[int], keys: Sequence[int], *, is_counted: bool
    ) -> None:
        """Add blocks of an engine, and count those that it has already as copies."""
        known, hold, bit = engine.keys, self._holders.add, engine.bit
        for hashed, key in zip(hashes, keys, strict=True):
            if not known.set(hashed, key) and is_counted and engine.num_copies < self._max_blocks:
                engine.copies[hashed] = engine.copies.get(hashed, 0) + 1
                engine.num_copies += 1
            hold(key, bit)

    def _remove(self, engine: EngineBlocks, event: kv_events.BlockRemoved) -> None:
        if event.group in engine.left_out:
            return
        if event.medium != kv_events.DEVICE:
            self._remove_lower(engine, event)
            return
        known, discard, bit = engine.keys, self._holders.discard, engine.bit
        for hashed in event.hashes:
            if hashed in engine.copies and self._remove_copy(engine, hashed, event.group):
                continue
            key = known.pop(hashed)
            if key is not None:
                discard(key, bit)

    def _remove_lower(self, engine: EngineBlocks, event: kv_events.BlockRemoved) -> None:
        bit, others = engine.lower_bits[_tier(event.medium)], sum(engine.lower_bits)
        for hashed in event.hashes:
            key = engine.lower_keys.get(hashed)
            if key is not None and not self._holders.discard(key, bit) & others:
                engine.lower_keys.pop(hashed)

    def _remove_copy(self, engine: EngineBlocks, hashed: int, group: int) -> bool:
        """Remove a copy of a block; returns whether another one is left."""
        copies = engine.copies.pop(hashed)
        engine.num_copies -= 1
        if group != engine.group:
            engine.num_copies -= copies - 1
            return False
        if copies > 1:
            engine.copies[hashed] = copies - 1
        return True

    def is_held(self, key: int) -> bool:
        """True if any engine holds a key."""
        return self._holders.get(key) is not None

    def holders(
        self,
        keys: Sequence[int],
        count: int,
        guesses: Sequence[tuple[int, int]] = (),
        *,
        start: int = 0,
        lower: int = 0,
    ) -> Sequence[tuple[int, int]]:
        """Engines by the leading blocks of a chain that they hold on the device.

        One search for each depth at which engines end; see `MaskMap.find_end`.

        Args:
            count: Blocks of it that count.
            guesses: What was returned for a similar chain: engines may end at the same depths.
            start: Blocks at the beginning that do not matter (count).
            lower: Bits of lower tiers to look at instead of the device; 0 for the device.

        Returns:
            Depths, above `start`, ascending, and the bits that hold so many blocks.
        """
        if count <= start:
            return ()
        mask_of = self._holders.find
        alive = mask_of(keys[start]) & (lower or ~self._lower_mask)
        if not alive:
            return ()
        last = mask_of(keys[count - 1])
        ends: list[tuple[int, int]] = []
        held = start + 1
        while alive & ~last:
            end, held, left = self._holders.find_end(
                keys, alive, (held, count, last & alive), guesses
            )
            ends.append((end, alive ^ left))
            alive = left
        if alive:
            ends.append((count, alive))
        return ends

    def lower_tokens(
        self, keys: Sequence[int], count: int, ends: Sequence[tuple[int, int]]
    ) -> Mapping[int, int]:
        """Tokens that engines save by the blocks of lower tiers behind those on the device, by slot.

        Each tier goes on where the one above it ends, and counts by its weight.

        Args:
            keys: Keys of the chain.
            count: Blocks of it that count.
            ends: What the engines hold on the device, from `holders`.
        """
        tiered = self._tiered
        left = sum(tiered)
        at = [(depth, bits & left) for depth, bits in ends]
        at.append((0, left & ~sum([bits for _, bits in at])))
        saved: defaultdict[int, float] = defaultdict(float)
        for tier in range(len(LOWER_TIERS)):
            further: list[tuple[int, int]] = []
            for depth, bits in at:
                engines = {
                    engine.lower_bits[tier]: engine
                    for engine in map(tiered.__getitem__, split_mask(bits))
                }
                engines.pop(0, None)
                if engines:
                    for end, held in self.holders(keys, count, start=depth, lower=sum(engines)):
                        ended = [engines[bit] for bit in split_mask(held)]
                        for engine in ended:
                            saved[engine.slot] += (end - depth) * engine.lower_weights[tier]
                        moved = sum([engine.bit for engine in ended])
                        further.append((end, moved))
                        bits ^= moved  # noqa: PLW2901 - the rest stays where it ended
                further.append((depth, bits))
            at = further
        return {slot: int(blocks * self.block_tokens) for slot, blocks in saved.items()}

    def _take_bit(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_bits += 1
        return 1 << (self._num_bits - 1)


def _tier(medium: str) -> int:
    """Position of a medium in `LOWER_TIERS`; names such as CPU_PINNED are the memory of the host."""
    return 0 if medium.startswith("CPU") else 1
