"""Chain of block hashes of a prompt: a hash covers every byte up to the end of its block.

The hash of block k is the first word of MurmurHash3 x64 128 over the seed and every byte up to the
end of block k. One incremental hasher carries the full 128-bit state from block to block, so the
whole chain costs one pass over the prompt.

Where blocks end depends on the offset alone, never on the length of the prompt: equal beginnings
give equal chains. Blocks grow with the offset, because fine steps matter at the front, where
prompts part, and cost memory at the back.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

import mmh3
import msgspec

from extproc.request import BYTES_PER_TOKEN, MediaSpan

#: Hashes are cut to 60 bits: a Python int of two 30-bit digits takes 32 bytes, one of three 48.
#: Among ten million blocks the chance that any two share a hash is about 4e-5.
HASH_MASK = (1 << 60) - 1

#: Most blocks of a schedule (count): equal ones of 64 bytes, vLLM's 16 tokens, up to 4 MiB. Tables of
#: this length take 10 MB, and a prompt of the limit 40 ms.
MAX_BLOCKS: Final = 65_536


class Schedule(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, cache_hash=True
):
    """Block sizes by offset in the prompt.

    Blocks are `block_bytes` long up to offset `fine_bytes`, then `growth` times as long up to
    `fine_bytes * span`, then `growth` squared times as long up to `limit_bytes`. The defaults give
    256 bytes up to 8 KiB, 1 KiB up to 64 KiB and 4 KiB up to 4 MiB: 32 + 56 + 1008 blocks.
    What is shared inside the last block is not seen: with the defaults at most an eighth of any
    match beyond 8 KiB, a sixteenth beyond 64 KiB, and half of that on average.

    Attributes:
        block_bytes: Length of the first blocks (bytes), 4 or more. 256 bytes are 64 tokens, four blocks of
            vLLM: smaller blocks multiply memory and find matches that are too short to matter.
        growth: Factor by which blocks grow at each of the two borders; 1 keeps them equal.
        fine_bytes: Offset at which the first blocks end (bytes). Most prompts differ within 8 KiB
            (2k tokens); four times as much would double the time and memory for a prompt of 8k
            tokens.
        span: Ratio of the second border to the first. With 8 it is at 16k tokens.
        limit_bytes: Offset after which nothing is hashed (bytes), `block_bytes` or more. 4 MiB are 1M tokens, the longest
            context windows served today.
    """

    block_bytes: int = 256
    growth: int = 4
    fine_bytes: int = 8 * 1024
    span: int = 8
    limit_bytes: int = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        """Refuse what cannot make a chain.

        Raises:
            ValueError: A field is below one, a block is smaller than a token, none fits below the
                limit, or there are too many blocks; msgspec reports it with the path.
        """
        for name in self.__struct_fields__:
            # Caches are sized in blocks by their tokens, so none may have less than one.
            least = BYTES_PER_TOKEN if name == "block_bytes" else 1
            if getattr(self, name) < least:
                raise ValueError(f"expected {name} of at least {least}, got {getattr(self, name)}")
        if self.limit_bytes < self.block_bytes:
            raise ValueError(
                f"expected limit_bytes of at least block_bytes, {self.block_bytes}, "
                f"got {self.limit_bytes}; to hash nothing, set prefix.capacity_blocks to 0"
            )
        num_blocks = sum(count for _, count in _rows(self))
        if num_blocks > MAX_BLOCKS:
            raise ValueError(
                f"expected at most {MAX_BLOCKS} blocks up to limit_bytes, got {num_blocks}; "
                "raise block_bytes or growth"
            )

    @property
    def cuts(self) -> tuple[int, ...]:
        """Cumulative bytes by depth: `cuts[d]` is the length of the first d blocks."""
        return _cuts(self)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Cumulative estimated tokens by depth; exact when four bytes hold one token."""
        return self.tokens_at(BYTES_PER_TOKEN)

    def tokens_at(self, bytes_per_token: float) -> tuple[int, ...]:
        """Cumulative estimated tokens by depth for a tokenizer; where blocks end is unchanged.

        Args:
            bytes_per_token: Mean bytes of a token, above 0. Tables of the last few dozen are kept.
        """
        return _tokens(self, bytes_per_token)

    def tokens_with_media(
        self,
        media: Sequence[MediaSpan],
        media_tokens: Sequence[float],
        *,
        bytes_per_token: float,
        depth: int,
    ) -> list[int]:
        """Cumulative estimated tokens by depth of a prompt with media.

        Args:
            bytes_per_token: Bytes of a token of the text between media, above 0.
        """
        tokens: list[int] = []
        items = list(zip(media, media_tokens, strict=True))
        num_before, bytes_before, tokens_before = 0, 0, 0.0
        for cut in self.cuts[: depth + 1]:
            while num_before < len(items):
                span, some = items[num_before]
                if span.start + span.size > cut:
                    break
                bytes_before += span.size
                tokens_before += some
                num_before += 1
            text_bytes, sum_tokens = cut - bytes_before, tokens_before
            if num_before < len(items) and (span := items[num_before][0]).start < cut:
                text_bytes -= cut - span.start
                sum_tokens += items[num_before][1] * (cut - span.start) / span.size
            tokens.append(int(text_bytes / bytes_per_token + sum_tokens))
        return tokens


# Every schedule of a process comes from its configuration, so this holds a handful of tables.
@lru_cache(maxsize=16)
def _cuts(schedule: Schedule) -> tuple[int, ...]:
    cuts = [0]
    for step, count in _rows(schedule):
        begin = cuts[-1]
        cuts += [begin + step * number for number in range(1, count + 1)]
    return tuple(cuts)


def _rows(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Length of blocks, and how many there are of it, in order."""
    begin, step, last = 0, schedule.block_bytes, schedule.limit_bytes
    for border in (schedule.fine_bytes, schedule.fine_bytes * schedule.span, last):
        count = max(0, min(-((begin - border) // step), (last - begin) // step))
        yield step, count
        begin += count * step
        step *= schedule.growth


@lru_cache(maxsize=16)
def _slices(schedule: Schedule) -> tuple[slice, ...]:
    """Begin and end of each block."""
    return tuple(slice(begin, end) for begin, end in pairwise(_cuts(schedule)))


# One of four bytes, and one for each model whose ratio was learned.
@lru_cache(maxsize=64)
def _tokens(schedule: Schedule, bytes_per_token: float) -> tuple[int, ...]:
    return tuple(int(cut / bytes_per_token) for cut in _cuts(schedule))


#: The schedule without a configuration.
DEFAULT = Schedule()


@lru_cache(maxsize=1024)
def seed(*parts: str) -> bytes:
    """The seed of a chain: model, adapter and salt, each behind its length.

    The lengths keep ("ab", "c") apart from ("a", "bc"); the count keeps the seed apart from the
    prompt that follows it.

    Args:
        parts: Values, such as model and adapter, that separate equal prompts in the engine's cache.
    """
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    head = b"".join(b"%d:%b" % (len(part), part) for part in encoded)
    return b"%d;%b" % (len(encoded), head)


def chain(prompt: bytes, seed: bytes, *, schedule: Schedule = DEFAULT) -> array[int]:
    """Hash the full blocks of a prompt; the rest behind the last full block does not count.

    Returns:
        One 60-bit hash per full block, from the root to the tail; packed, because a request keeps its
        chain while it waits or its prediction may have to be taken back.
    """
    num_blocks = bisect_right(_cuts(schedule), len(prompt)) - 1
    hasher = mmh3.mmh3_x64_128(seed)
    update = hasher.update
    digest = hasher.uintdigest  # its low half is the first of the two 64-bit words
    hashes: list[int] = []
    for block in _slices(schedule)[:num_blocks]:
        update(prompt[block])
        hashes.append(digest() & HASH_MASK)
    return array("Q", hashes)  # to append to an array takes longer
