"""KV events: what engines publish of the blocks that they store and remove, decoded.

vLLM up to 0.23 and SGLang send events as arrays with the tag first, later versions as maps; the
batch around them is an array or a map as well (docs/concepts/kv-events.md). Unknown fields, further
elements and unknown events are ignored. Any other bytes are `Malformed`: lengths are bounded before
anything is created, and nothing is decoded deeper than the events go.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, TypeAlias, cast

import msgspec
import xxhash

#: Bytes of a batch at most. A step of 16,384 prompt tokens takes about 150 kB.
MAX_BATCH_BYTES: Final = 1024 * 1024

#: Bytes of a batch that is decoded at once: few, as decoded events take up to 16 times as much memory
#: until they are taken in. A step that continues 20 answers takes 3 kB.
MAX_SMALL_BATCH_BYTES: Final = 16_384

#: Blocks from which on removals are not joined to one event (count): a turn ends between events.
_MAX_JOINED: Final = 128

#: Events of a batch at most (count): those of 16 bytes that a batch has room for. Older versions of
#: SGLang publish one for each page that a step stores or removes, and a page has one token by default.
MAX_EVENTS: Final = MAX_BATCH_BYTES // 16

#: Tokens of an event at most (count), and of a block: they take 30 ms of the event loop, as pairs or in
#: blocks of 16. A step computes some 16,384, but a prompt whose cache was loaded is stored at once.
MAX_TOKENS: Final = 131_072

#: Blocks of an event at most (count), which take 30 ms to decode: of one token, as pages of SGLang have
#: by default. It joins pages that follow each other to one event.
MAX_BLOCKS: Final = MAX_TOKENS

#: Blocks that are taken in at once (count), which take 30 ms of the event loop; see `split`. Longer
#: events may have no extra keys.
MAX_SPLIT_BLOCKS: Final = 8192

_WORD: Final = (1 << 64) - 1

#: What keeps blocks of an event apart at most (count): 64 for each of 128 blocks with images.
MAX_EXTRAS: Final = 8_192

_Hash: TypeAlias = int | bytes
_Hashes = Annotated[list[_Hash], msgspec.Meta(max_length=MAX_BLOCKS)]


class _Metadata(msgspec.Struct, gc=False):
    """Metadata that old arrays of SGLang have in the place of the adapter's name."""

    cache_salt: str | None = None


class _Pair(msgspec.Struct, array_like=True, gc=False):
    """A token and the next one, as SGLang with EAGLE sends them."""

    token: int


_Tokens = Annotated[list[int | _Pair], msgspec.Meta(max_length=MAX_TOKENS)]
_Extras = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_SPLIT_BLOCKS)]

#: Kinds of KV cache in which a block stands for all tokens up to it.
_FULL_KINDS: Final = frozenset({"", "full_attention", "mla_attention", "sink_full_attention"})

#: Where blocks lie that are on the device.
DEVICE: Final = "GPU"

#: Malformed bytes, or a value outside of the bounds.
Malformed = msgspec.DecodeError


class BlockStored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that an engine stored, as a chain.

    Attributes:
        hashes: Hashes by the engine, 64 bits each, in order; opaque.
        parent: Hash of the block before them; None for the root.
        tokens: Token ids, 32 bits each, packed; empty where only the place of blocks changed, and for
            blocks that are no prefix.
        adapter: LoRA adapter; empty for the base model.
        extras: Per block, what besides tokens keeps it apart (a salt, images); empty for nothing.
        medium: Where they lie: `GPU`, `CPU`, or another tier.
        group: Group of layers of a hybrid model; 0 for the only one.
        is_prefix: Whether a block stands for all tokens up to it; not in groups of sliding windows.
    """

    hashes: Sequence[int]
    parent: int | None
    tokens: bytes
    block_tokens: int
    adapter: str = ""
    extras: Sequence[bytes] = ()
    medium: str = DEVICE
    group: int = 0
    is_prefix: bool = True


class BlockRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks that an engine removed.

    Attributes:
        hashes: Hashes by the engine, 64 bits each.
        medium: As of `BlockStored`.
        group: As of `BlockStored`.
    """

    hashes: Sequence[int]
    medium: str = DEVICE
    group: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False):
    """All blocks of an engine are removed."""


class BlocksLeftOut(msgspec.Struct, frozen=True, gc=False):
    """More stored blocks than are read of an event.

    Attributes:
        num_blocks: How many (count).
    """

    num_blocks: int


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared | BlocksLeftOut


class _StoredArray(msgspec.Struct, array_like=True, tag_field="type", tag="BlockStored", gc=False):
    block_hashes: _Hashes
    parent_block_hash: _Hash | None = None
    token_ids: _Tokens | None = None
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: msgspec.Raw = msgspec.Raw()
    extra_keys: _Extras | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _StoredMap(_StoredArray, array_like=False, gc=False):
    cache_salt: str | None = None


class _RemovedArray(
    msgspec.Struct, array_like=True, tag_field="type", tag="BlockRemoved", gc=False
):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class _RemovedMap(_RemovedArray, array_like=False, gc=False):
    pass


class _ClearedArray(
    msgspec.Struct, array_like=True, tag_field="type", tag="AllBlocksCleared", gc=False
):
    pass


class _ClearedMap(_ClearedArray, array_like=False, gc=False):
    pass


class _BatchMap(msgspec.Struct, gc=False):
    events: msgspec.Raw


class _BatchArray(msgspec.Struct, array_like=True, gc=False):
    ts: msgspec.Raw
    events: msgspec.Raw


class _OutlineArray(msgspec.Struct, array_like=True, gc=False):
    type: str
    block_hashes: msgspec.Raw = msgspec.Raw()
    parent_block_hash: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()


class _OutlineMap(_OutlineArray, array_like=False, gc=False):
    pass


_decode_batch_map = msgspec.msgpack.Decoder(_BatchMap).decode
_decode_batch_array = msgspec.msgpack.Decoder(_BatchArray).decode
_decode_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap).decode
_decode_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode
_decode_maps = msgspec.msgpack.Decoder(list[_StoredMap | _RemovedMap | _ClearedMap]).decode
_decode_arrays = msgspec.msgpack.Decoder(list[_StoredArray | _RemovedArray | _ClearedArray]).decode
_decode_events = msgspec.msgpack.Decoder(
    Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENTS)]
).decode
_decode_outline_map = msgspec.msgpack.Decoder(_OutlineMap).decode
_decode_outline_array = msgspec.msgpack.Decoder(_OutlineArray).decode
_decode_extra = msgspec.msgpack.Decoder(
    Annotated[list[msgspec.Raw], msgspec.Meta(max_length=64)]
).decode
_decode_pair = msgspec.msgpack.Decoder(tuple[msgspec.Raw, msgspec.Raw]).decode
_encode = msgspec.msgpack.encode

_NIL: Final = b"\xc0"
#: Start of an array of two.
_PAIR: Final = b"\x92"

_KNOWN: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def decode_batch(payload: bytes) -> Sequence[msgspec.Raw | KvEvent]:
    """Events of a batch, in order; for `decode_event`, unless it is small.

    Raises:
        Malformed: It is no batch, or longer than the bounds.
    """
    if len(payload) > MAX_BATCH_BYTES:
        raise Malformed(f"a batch of {len(payload)} bytes")
    try:
        is_map = _is_map(payload)
        events = (_decode_batch_map if is_map else _decode_batch_array)(payload).events
        if len(payload) <= MAX_SMALL_BATCH_BYTES:
            return _decode_small(events)
        raws: Sequence[msgspec.Raw] = _decode_events(events)
    except (RecursionError, UnicodeDecodeError) as error:
        raise Malformed(f"a batch that cannot be decoded: {type(error).__name__}") from None
    return raws


def _decode_small(events: msgspec.Raw) -> Sequence[msgspec.Raw | KvEvent]:
    """Events of a small batch, with removals that follow each other as one event.

    Raises:
        Malformed: They are no array.
    """
    encoded = bytes(events)
    first = _head_bytes(encoded)
    decode = _decode_maps if _is_map(encoded[first : first + 1]) else _decode_arrays
    try:
        return _join(decode(encoded))
    except msgspec.ValidationError:  # one of them is of an unknown kind, or malformed
        raws: Sequence[msgspec.Raw] = _decode_events(encoded)
        return raws


def _join(events: Sequence[_StoredArray | _RemovedArray | _ClearedArray]) -> Sequence[KvEvent]:
    joined: list[KvEvent] = []
    hashes: list[int] = []
    place: tuple[str | None, int | None] | None = None
    for event in events:
        if isinstance(event, _RemovedArray):
            its_place = event.medium, event.group_idx
            if its_place != place or len(hashes) >= _MAX_JOINED:
                hashes, place = [], its_place
                joined.append(BlockRemoved(hashes, _medium(event.medium), event.group_idx or 0))
            hashes += [_word(value) for value in event.block_hashes]
        else:
            place = None
            joined.append(_stored(event) if isinstance(event, _StoredArray) else AllBlocksCleared())
    return joined


def decode_event(raw: msgspec.Raw | KvEvent) -> KvEvent | None:
    """An event of a batch; None for one of another kind.

    Raises:
        Malformed: It lacks a field, or one is of another type or outside of the bounds.
    """
    if not isinstance(raw, msgspec.Raw):
        return raw
    try:
        return _read_event(raw)
    except (RecursionError, UnicodeDecodeError) as error:
        raise Malformed(f"an event that cannot be decoded: {type(error).__name__}") from None


def split(event: KvEvent) -> Sequence[KvEvent]:
    """Parts of an event, in order, of `MAX_SPLIT_BLOCKS` blocks each; mostly the event alone."""
    if not isinstance(event, BlockStored | BlockRemoved) or len(event.hashes) <= MAX_SPLIT_BLOCKS:
        return (event,)
    parts: list[KvEvent] = []
    for start in range(0, len(event.hashes), MAX_SPLIT_BLOCKS):
        end = start + MAX_SPLIT_BLOCKS
        part = msgspec.structs.replace(event, hashes=array("Q", event.hashes[start:end]))
        if isinstance(part, BlockStored):
            size = 4 * part.block_tokens
            part = msgspec.structs.replace(
                part,
                parent=event.hashes[start - 1] if start else part.parent,
                tokens=part.tokens[start * size : end * size],
                extras=part.extras[start:end],
            )
        parts.append(part)
    return parts


def _read_event(raw: msgspec.Raw) -> KvEvent | None:
    is_map = _is_map(memoryview(raw))
    try:
        event = _decode_map(raw) if is_map else _decode_array(raw)
    except msgspec.ValidationError:
        outline = (_decode_outline_map if is_map else _decode_outline_array)(raw)
        if outline.type not in _KNOWN:
            return None
        num_blocks, num_tokens = _length(outline.block_hashes), _length(outline.token_ids)
        is_long = num_blocks > MAX_SPLIT_BLOCKS or num_tokens > MAX_TOKENS
        if not is_long or outline.type != "BlockStored":
            raise
        return BlocksLeftOut(num_blocks)
    if isinstance(event, _StoredArray):
        return _stored(event)
    if isinstance(event, _RemovedArray):
        hashes = [_word(value) for value in event.block_hashes]
        return BlockRemoved(hashes, _medium(event.medium), event.group_idx or 0)
    return AllBlocksCleared()


def _stored(event: _StoredArray) -> BlockStored:
    """Stored blocks in one form.

    Raises:
        Malformed: Its lengths do not fit together.
    """
    hashes = [_word(value) for value in event.block_hashes]
    group = event.group_idx or 0
    if (event.kv_cache_spec_kind or "") not in _FULL_KINDS:
        # Groups of Mamba name fewer blocks than their tokens fill (vLLM issue 44451).
        return BlockStored(hashes, None, b"", event.block_size, group=group, is_prefix=False)
    tokens = event.token_ids or ()
    size = event.block_size
    if tokens and not (0 < size <= MAX_TOKENS and len(tokens) == size * len(hashes)):
        raise Malformed(f"{len(tokens)} tokens in {len(hashes)} blocks of {size}")
    try:
        try:
            packed = array("I", cast("Sequence[int]", tokens))  # pairs raise a TypeError
        except TypeError:
            packed = array("I", [t.token if isinstance(t, _Pair) else t for t in tokens])
    except OverflowError:
        raise Malformed("a token id outside of 32 bits") from None
    # Positions of old arrays of SGLang hold a map of metadata here.
    adapter, salt = _name(event.lora_name)
    if isinstance(event, _StoredMap) and event.cache_salt:
        salt = _encode(event.cache_salt)
    if event.parent_block_hash is not None:
        salt = b""  # SGLang repeats it in each event of a chain, and the first block has it already
    if not adapter and event.lora_id:
        adapter = f"#{event.lora_id}"
    return BlockStored(
        hashes,
        None if event.parent_block_hash is None else _word(event.parent_block_hash),
        packed.tobytes(),
        size,
        adapter,
        _extras(event.extra_keys, adapter, salt, len(hashes)),
        _medium(event.medium),
        group,
    )


def _name(raw: msgspec.Raw) -> tuple[str, bytes]:
    """Adapter and salt of what stands where newer engines write the adapter's name."""
    encoded = bytes(raw)
    if not encoded or encoded == _NIL:
        return "", b""
    if _is_map(encoded):
        salt = msgspec.msgpack.decode(encoded, type=_Metadata).cache_salt
        return "", _encode(salt) if salt else b""
    return msgspec.msgpack.decode(encoded, type=str), b""


def _extras(
    keys: Sequence[msgspec.Raw] | None, adapter: str, salt: bytes, count: int
) -> Sequence[bytes]:
    """Salts and images of each block; empty where none has any."""
    if keys is None or all(bytes(key) == _NIL for key in keys):
        return (salt, *([b""] * (count - 1))) if salt and count else ()
    if len(keys) != count:
        raise Malformed(f"{len(keys)} extra keys for {count} blocks")
    name = _encode(adapter)
    extras, left = [b""] * count, MAX_EXTRAS
    for position, key in enumerate(keys):
        if bytes(key) != _NIL:
            items = _decode_extra(key)
            left -= len(items)
            if left < 0:
                raise Malformed(f"more than {MAX_EXTRAS} extra keys")
            extras[position] = b"".join(_without(items, name, salt))
    extras[0] += salt
    return extras if any(extras) else ()


def _without(items: Sequence[msgspec.Raw], name: bytes, salt: bytes) -> Iterator[bytes]:
    for item in items:
        encoded = bytes(item)
        # An image is its identifier, or that and the place of the block in it, which follows from the
        # tokens before it.
        if encoded[:1] == _PAIR:
            encoded = bytes(_decode_pair(encoded)[0])
        if encoded not in (name, salt, _NIL):
            yield encoded


def block_extras(
    placeholders: Sequence[tuple[int, int, str]],
    block_tokens: int,
    num_blocks: int,
    *,
    salt: str = "",
) -> list[bytes]:
    """Salt, and identifiers of the images, of each block of a prompt, as of `BlockStored.extras`.

    Args:
        placeholders: (offset in tokens, length in tokens, identifier) of each item, in any order;
            one that begins in another is left out.
        num_blocks: Full blocks of the prompt (count).
        salt: Its cache salt; empty for none.
    """
    extras = [b""] * num_blocks
    end = 0
    for offset, length, identifier in sorted(placeholders):
        if offset < end or length <= 0:
            continue
        end = offset + length
        encoded = _encode(identifier)
        last = min(num_blocks, (end - 1) // block_tokens + 1)
        for block in range(offset // block_tokens, last):
            extras[block] += encoded
    if salt and extras:
        extras[0] += _encode(salt)
    return extras


def _word(value: _Hash) -> int:
    """A hash as 64 bits; of longer ones the last eight bytes, as engines shorten them."""
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:])
    return value & _WORD


def _medium(value: str | None) -> str:
    return DEVICE if value is None else value[:16].upper()


def _head_bytes(encoded: bytes) -> int:
    """Bytes of the head of an array in MessagePack."""
    return {0xDD: 5, 0xDC: 3}.get(encoded[0], 1)


def _length(raw: msgspec.Raw) -> int:
    """Elements of an array in MessagePack; 0 for any other value."""
    encoded = bytes(memoryview(raw)[:5])
    if encoded[:1] in (b"\xdc", b"\xdd"):
        return int.from_bytes(encoded[1 : _head_bytes(encoded)])
    return encoded[0] & 0x0F if encoded and encoded[0] & 0xF0 == 0x90 else 0


def _is_map(encoded: bytes | memoryview) -> bool:
    """True if MessagePack begins with a map."""
    return len(encoded) > 0 and (encoded[0] & 0xF0 == 0x80 or encoded[0] in (0xDE, 0xDF))


def root_key(adapter: str) -> int:
    """Key before the first block of a prompt, 64 bits."""
    return xxhash.xxh3_64_intdigest(adapter.encode("utf-8", "surrogatepass"))


def block_keys(
    parent: int, tokens: bytes, block_tokens: int, extras: Sequence[bytes] = ()
) -> list[int]:
    """Keys of a chain of blocks, 64 bits each: of the key before, the tokens and the extras.

    They are our own, so that it does not matter how, and with which seed, an engine hashes.

    Args:
        parent: Key of the block before them, or `root_key`.
        tokens: Token ids, 32 bits each, packed; what does not fill a block is left out.
        extras: As of `BlockStored`.
    """
    digest, size, key = xxhash.xxh3_64_intdigest, 4 * block_tokens, parent
    keys: list[int] = []
    starts = range(0, len(tokens) - size + 1, size)
    if not extras:
        for start in starts:
            key = digest(tokens[start : start + size], key)
            keys.append(key)
        return keys
    for start, extra in zip(starts, extras, strict=True):
        key = digest(extra + tokens[start : start + size], key)
        keys.append(key)
    return keys
