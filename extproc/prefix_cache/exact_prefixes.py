"""Exact prefixes: the leading tokens of a prompt that engines hold, by their events.

Requests are known by the byte blocks of their prompts, events by tokens. `PromptMap` remembers for
the byte blocks of earlier prompts how many token blocks they are, once an engine rendered them; so
the next turn of a conversation, or a prompt with the same beginning, is matched exactly, and no
request waits for a tokenizer.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from extproc.decision import MatchSource
from extproc.endpoint import Endpoint
from extproc.prefix_cache import blocks, kv_events
from extproc.prefix_cache.index import note_depth
from extproc.prefix_cache.token_blocks import EngineBlocks, TokenBlockIndex

#: Token blocks of all prompts of a map at most (count); a prompt counts as its byte blocks where it
#: has fewer. A million take 8 MB, and the table of their byte blocks some 40 MB: 16 million tokens.
MAX_MAPPED_BLOCKS: Final = 1_000_000

#: Blocks that a prompt counts as besides (count): clients choose how short prompts are, and one takes up
#: to two kilobytes with where it was sent, and a microsecond to evict.
_PROMPT_BLOCKS: Final = 32

#: Seconds after a prompt was sent, within which its events may not be there yet, although its request
#: is over.
_SETTLE_S: Final = 2.0

#: No engine has blocks in lower tiers.
NOTHING_LOWER: Final[Mapping[int, int]] = {}

#: Engines of which a prompt remembers that it was sent there (count).
_MAX_SENT: Final = 16

#: Depths at which engines ended that a prompt remembers (count).
_MAX_ENDS: Final = 4

#: Prompts that are remembered as sent until they are mapped (count).
_MAX_UNMAPPED: Final = 1024

#: Blocks of a prompt at most (count), which take 20 ms of the event loop: engines choose their size.
_MAX_PROMPT_BLOCKS: Final = 131_072


class Account(Protocol):
    """Account of an endpoint, such as `pool.inflight.InflightLoad`."""

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint."""


class SentRequest(Account, Protocol):
    """A request that was sent to an endpoint, such as `pool.inflight.Reservation`."""

    def track_prompt(self, prompt: SentPrompt) -> None:
        """Mark the prompt when the request moves or ends."""


class SentPrompt(msgspec.Struct, eq=False, gc=False):
    """A prompt that was sent to an engine; thousands are remembered, their requests are not.

    Attributes:
        at: When (monotonic seconds).
        address: Address of the endpoint of its request, which may have moved.
        is_open: Whether its request is open.
    """

    at: float
    address: str
    is_open: bool = True

    def end(self, now: float) -> None:
        """Mark the end of its request."""
        del now
        self.is_open = False

    def move(self, account: Account) -> None:
        """Mark its request as open on another endpoint."""
        self.address, self.is_open = account.endpoint.address, True

    def is_arriving(self, address: str, now: float) -> bool:
        """True while its blocks may not be in the cache yet, but will be.

        They are on their way until they are computed, behind all that waits there, and no engine
        evicts them while it serves their request.
        """
        if self.is_open:
            return self.address == address
        return now - self.at <= _SETTLE_S


def _note_sent(known: dict[str, SentPrompt], address: str, sent: SentPrompt) -> None:
    """Note an engine as the latest, and evict the earliest where there are too many."""
    known.pop(address, None)
    if len(known) >= _MAX_SENT:
        del known[next(iter(known))]
    known[address] = sent


class MappedPrompt:
    """Token blocks of an earlier prompt.

    Attributes:
        keys: Keys of its full token blocks.
        max_cached: Blocks that an engine finds of the same prompt at most: it computes the last token
            again (count).
        chain: Hashes of its byte blocks.
        ends: Depths at which the first engines ended when it was matched, ascending, with their bits.
        first_extra: Position of the first block that more than tokens keeps apart, such as an adapter, a
            salt or an image; -1 for none.
        sent: It, or a prompt that shares a beginning with it, as last sent to an engine, by address
            of the endpoint, the latest last.
    """

    __slots__ = ("chain", "ends", "first_extra", "keys", "max_cached", "sent")

    def __init__(
        self, chain: Sequence[int], keys: array[int], max_cached: int, first_extra: int
    ) -> None:
        self.chain = chain
        self.keys = keys
        self.max_cached = max_cached
        self.ends: Sequence[tuple[int, int]] = ()
        self.first_extra = first_extra
        self.sent: dict[str, SentPrompt] = {}

    def note_sent(self, address: str, sent: SentPrompt) -> None:
        """Note that it, or a prompt that shares a beginning with it, was sent to an engine."""
        _note_sent(self.sent, address, sent)

    @property
    def num_blocks(self) -> int:
        """Token blocks that it counts as (count): engines may have blocks of any size."""
        return _PROMPT_BLOCKS + max(len(self.keys), len(self.chain))


class PromptMap:
    """Map from byte blocks of prompts to their token blocks; the oldest prompts are evicted.

    Args:
        cuts: Cumulative bytes by depth of a chain.
    """

    def __init__(self, cuts: Sequence[int], *, max_blocks: int = MAX_MAPPED_BLOCKS) -> None:
        self._cuts = cuts
        self._max_blocks = max_blocks
        self._num_blocks = 0
        #: By the last byte block, the oldest first.
        self._prompts: OrderedDict[int, MappedPrompt] = OrderedDict()
        #: Prompt and token blocks up to a byte block. A prompt has all blocks before one that it has,
        #: because a later prompt takes over those that it shares.
        self._at: dict[int, tuple[MappedPrompt, int]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def covers(self, chain: Sequence[int]) -> bool:
        """True if every byte block of a prompt is mapped."""
        return not chain or chain[-1] in self._at

    def find(self, chain: Sequence[int]) -> tuple[MappedPrompt, int, int] | None:
        """The prompt that shares most blocks with a chain, and the byte and token blocks it shares.

        None where it shares none.
        """
        at = self._at
        if not chain or chain[0] not in at:
            return None
        # The next turn of a conversation adds few blocks: the search begins at the end, with wider steps.
        low, high, step = 0, len(chain) - 1, 1
        probe = high
        while probe > 0:
            if chain[probe] in at:
                low = probe
                break
            high = probe - 1
            probe -= step
            step *= 4
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle] in at:
                low = middle
            else:
                high = middle - 1
        prompt, count = at[chain[low]]
        if low + 1 == len(chain) == len(prompt.chain):
            return prompt, low + 1, prompt.max_cached
        return prompt, low + 1, count

    def add(
        self,
        chain: Sequence[int],
        keys: Sequence[int],
        *,
        tokens: int,
        block_tokens: int,
        prompt_bytes: int,
        first_extra: int = -1,
    ) -> MappedPrompt | None:
        """Map a prompt; returns None for one that is longer than all may be.

        Between prompts, block borders are estimated in proportion to bytes. Where two prompts part,
        the blocks that they share are counted.

        Args:
            chain: Hashes of its byte blocks, at least one.
            keys: Keys of its full token blocks.
            tokens: Its length in tokens, at least 1.
        """
        if len(keys) > self._max_blocks:
            return None
        packed = array("Q", keys)
        prompt = MappedPrompt(tuple(chain), packed, (tokens - 1) // block_tokens, first_extra)
        at, cuts = self._at, self._cuts
        per_byte = tokens / block_tokens / max(prompt_bytes, cuts[len(chain)])
        shared: tuple[MappedPrompt, int] | None = None
        for depth, block in enumerate(chain, 1):
            known = at.get(block)
            count = int(cuts[depth] * per_byte)
            if known is not None:
                prompt.ends, prompt.sent = known[0].ends, known[0].sent
                # As many as were counted or estimated for the prompts before it, as far as it agrees.
                # With many tokens behind those, the estimate may be more than this one has.
                shared, count = known, min(known[1], len(packed))
                at[block] = prompt, count
                continue
            if shared is not None:
                self._count_shared(chain[depth - 2], prompt, shared[0])
                shared = None
            at[block] = prompt, count
        prompt.sent = prompt.sent.copy()
        at[chain[-1]] = prompt, len(packed)
        replaced = self._prompts.pop(chain[-1], None)
        if replaced is not None:
            self._num_blocks -= replaced.num_blocks
        self._prompts[chain[-1]] = prompt
        self._num_blocks += prompt.num_blocks
        while self._num_blocks > self._max_blocks:
            self._evict_oldest()
        return prompt

    def _count_shared(self, block: int, prompt: MappedPrompt, earlier: MappedPrompt) -> None:
        """Count the token blocks that two prompts share which part behind a byte block."""
        low, high = 0, min(len(prompt.keys), len(earlier.keys))
        while low < high:
            middle = (low + high + 1) // 2
            if prompt.keys[middle - 1] == earlier.keys[middle - 1]:
                low = middle
            else:
                high = middle - 1
        self._at[block] = prompt, low

    def clear(self) -> None:
        """Give up all prompts."""
        self._prompts.clear()
        self._at.clear()
        self._num_blocks = 0

    def _evict_oldest(self) -> None:
        _, prompt = self._prompts.popitem(last=False)
        self._num_blocks -= prompt.num_blocks
        for block in prompt.chain:
            known = self._at.get(block)
            if known is not None and known[0] is prompt:
                del self._at[block]


class PromptMatch(NamedTuple):
    """Engines that hold a beginning of a prompt.

    Attributes:
        prompt: The mapped prompt that shares most with it.
        depth: Byte blocks that they share (count).
        ends: Depths in token blocks, ascending, with the bits of the engines that hold so many.
        lower: Tokens that engines save by blocks of lower tiers behind these, by slot.
    """

    prompt: MappedPrompt
    depth: int
    ends: Sequence[tuple[int, int]]
    lower: Mapping[int, int]


class ExactPrefixes:
    """Engines of a pool, their blocks, and the prompts that are mapped to tokens.

    Args:
        max_blocks: Blocks of one engine at most (count).
        lower_weights: Weights of lower tiers until an engine shows them; see `TokenBlockIndex`.

    Attributes:
        usage_tokens: Prompt tokens that were predicted as cached and those that answers report, of the
            same requests, by source of the prediction and `predicted` or `observed`.
    """

    def __init__(
        self,
        schedule: blocks.Schedule,
        *,
        max_blocks: int,
        lower_weights: Sequence[float] = (0.0, 0.0),
    ) -> None:
        self.prompts = PromptMap(schedule.cuts)
        self.index = TokenBlockIndex(max_blocks, lower_weights, on_resized=self.prompts.clear)
        self.usage_tokens: Counter[tuple[MatchSource, str]] = Counter()
        self._engines: dict[tuple[str, int], list[EngineBlocks]] = {}
        #: Prompts that are not mapped yet, by the last byte block: where they were sent.
        self._unmapped: OrderedDict[int, dict[str, SentPrompt]] = OrderedDict()

    def open(self, key: tuple[str, int], rank: int) -> EngineBlocks:
        """Blocks of a rank of an endpoint, empty; ranks are opened in order."""
        engines = self._engines.setdefault(key, [])
        if len(engines) != rank:
            raise ValueError(f"expected rank {len(engines)} of {key[0]}, got {rank}")
        engines.append(self.index.open())
        return engines[rank]

    def forget(self, key: tuple[str, int]) -> None:
        """Forget an endpoint."""
        for engine in self._engines.pop(key, ()):
            self.index.close(engine)

    @property
    def is_any_live(self) -> bool:
        """True while events of any engine arrive."""
        return any(engine.is_live for engines in self._engines.values() for engine in engines)

    def engines(self, key: tuple[str, int]) -> Sequence[EngineBlocks]:
        """Engines of an endpoint, by rank; empty where it is not followed."""
        return self._engines.get(key, ())

    def map_prompt(
        self,
        chain: Sequence[int],
        tokens: array[int],
        *,
        adapter: str,
        prompt_bytes: int,
        placeholders: Sequence[tuple[int, int, str]] = (),
        salt: str = "",
    ) -> bool:
        """Remember the tokens of a prompt; returns False where it has too many blocks.

        Args:
            chain: Hashes of its byte blocks, at least one.
            tokens: Its token ids, 32 bits each, at least one.
            adapter: LoRA adapter; empty for the base model.
            placeholders: (offset in tokens, length in tokens, identifier) of each image, video and
                audio.
            salt: Its cache salt; empty for none.
        """
        size = self.index.block_tokens
        if not size or len(tokens) // size > _MAX_PROMPT_BLOCKS:
            return False
        extras = kv_events.block_extras(placeholders, size, len(tokens) // size, salt=salt)
        keys = kv_events.block_keys(kv_events.root_key(adapter), tokens.tobytes(), size, extras)
        prompt = self.prompts.add(
            chain,
            keys,
            tokens=len(tokens),
            block_tokens=size,
            prompt_bytes=prompt_bytes,
            first_extra=0
            if adapter
            else next((at for at, extra in enumerate(extras) if extra), -1),
        )
        unmapped = self._unmapped.pop(chain[-1], None)
        if prompt is None:
            return False
        for address, sent in (unmapped or {}).items():
            prompt.note_sent(address, sent)
        return True

    def record_sent(self, chain: Sequence[int], request: SentRequest, now: float) -> None:
        """Record that a prompt was sent to the engine of its request."""
        address = request.endpoint.address
        sent = SentPrompt(now, address)
        request.track_prompt(sent)
        mapped = self.prompts.find(chain)
        if mapped is not None:
            mapped[0].note_sent(address, sent)
        if chain and not self.prompts.covers(chain):
            unmapped = self._unmapped
            _note_sent(unmapped.setdefault(chain[-1], {}), address, sent)
            unmapped.move_to_end(chain[-1])
            if len(unmapped) > _MAX_UNMAPPED:
                unmapped.popitem(last=False)

    def record_usage(self, source: MatchSource, predicted: int, observed: int) -> None:
        """Note the cached tokens that an answer reports, beside those that were predicted."""
        self.usage_tokens[source, "predicted"] += predicted
        self.usage_tokens[source, "observed"] += observed

    def match(self, chain: Sequence[int]) -> PromptMatch | None:
        """Engines that hold a beginning of a prompt.

        None where no beginning of the prompt is mapped, and where no engine holds its first block of
        an adapter, or with an image or a salt: whether engines name images as they render them, and
        adapters and salts at all, is known by those that do.
        """
        mapped = self.prompts.find(chain)
        if mapped is None:
            return None
        prompt, num_shared, count = mapped
        index, keys = self.index, prompt.keys
        if 0 <= prompt.first_extra < count and not index.is_held(keys[prompt.first_extra]):
            return None
        if count == len(keys) and num_shared == len(prompt.chain) < len(chain):
            # The next turn: it most likely goes on with the answer that the engine generated.
            answer = index.continuations.find(keys[-1]) if keys else ()
            if answer:
                keys = keys + answer
                count = len(keys)
        ends = index.holders(keys, count, prompt.ends)
        prompt.ends = ends if len(ends) <= _MAX_ENDS else ends[:_MAX_ENDS]
        lower = index.lower_tokens(keys, count, ends) if index.has_lower_tiers else NOTHING_LOWER
        return PromptMatch(prompt, num_shared, ends, lower)

    def tokens_by_slot(
        self, ends: Sequence[tuple[int, int]], lower: Mapping[int, int] = NOTHING_LOWER
    ) -> list[int]:
        """Tokens that engines will find, by the positions of their bits; see `match`."""
        index = self.index
        num_slots, size = index.num_slots, index.block_tokens
        tokens = [0] * num_slots
        if ends and 2 * ends[0][1].bit_count() > num_slots:
            # Most hold the same, such as a system prompt: the few others are set after.
            depth, bits = ends[0]
            tokens = [depth * size] * num_slots
            note_depth(tokens, ((1 << num_slots) - 1) ^ bits, 0)
            ends = ends[1:]
        for depth, bits in ends:
            note_depth(tokens, bits, depth * size)
        for slot, saved in lower.items():
            tokens[slot] += saved
        return tokens
