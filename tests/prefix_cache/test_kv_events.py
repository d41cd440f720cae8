"""KV events of engines: every form that vLLM and SGLang send, and bytes that are none."""

from array import array

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.prefix_cache import kv_events
from extproc.prefix_cache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

_encode = msgspec.msgpack.encode
_TOKENS = list(range(32))

#: As vLLM 0.32 sends it: fields with their default values are left out.
_MAP = {
    "type": "BlockStored",
    "block_hashes": [2**64 - 1, 7],
    "parent_block_hash": 5,
    "token_ids": _TOKENS,
    "block_size": 16,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None, None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "session_id": "of a later version",
}
_STORED = BlockStored([2**64 - 1, 7], 5, array("I", _TOKENS).tobytes(), 16)


def decode(batch):
    """Events of a batch, which are the same where it is long."""
    events = read(batch)
    padding = bytes(kv_events.MAX_SMALL_BATCH_BYTES)
    batch = batch | {"more": padding} if isinstance(batch, dict) else [padding, *batch[1:]]
    assert [*singly(filter(None, read(batch)))] == [*singly(filter(None, events))]
    return events


def read(batch):
    return [kv_events.decode_event(raw) for raw in kv_events.decode_batch(_encode(batch))]


def singly(events):
    """Events with a removal for each block."""
    for event in events:
        if isinstance(event, BlockRemoved):
            yield from (
                BlockRemoved([hashed], event.medium, event.group) for hashed in event.hashes
            )
        else:
            yield event


@given(
    st.lists(
        st.sampled_from(
            [
                _MAP,
                {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"},
                {"type": "BlockRemoved", "block_hashes": [-2, b"12345678"], "group_idx": 1},
                {"type": "BlockRemoved", "block_hashes": list(range(100)), "group_idx": 1},
                {"type": "AllBlocksCleared"},
                {"type": "Unknown"},
            ]
        )
    )
)
def test_small_batches_have_the_events_of_long_ones(events):
    """They are decoded at once, with removals that follow each other as one event, up to a bound."""
    known = [event for event in decode([0.0, events]) if event]
    assert len(known) <= len(events)
    assert all(len(event.hashes) < 300 for event in known if isinstance(event, BlockRemoved))


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param([1.5, [_MAP], 0], id="map"),
        pytest.param([1.5, [_MAP]], id="map, no rank"),
        pytest.param({"ts": 1.5, "events": [_MAP], "attn_dp_rank": 0}, id="batch as a map"),
        pytest.param(
            [1.5, [["BlockStored", [2**64 - 1, 7], 5, _TOKENS, 16, None]], None],
            id="short array of vLLM up to 0.10",
        ),
        pytest.param(
            [
                1.5,
                [
                    [
                        "BlockStored",
                        [2**64 - 1, 7],
                        5,
                        _TOKENS,
                        16,
                        None,
                        "GPU",
                        None,
                        [None, None],
                        0,
                        "full_attention",
                        None,
                        "more",
                    ]
                ],
            ],
            id="array of vLLM 0.23 with more behind it",
        ),
        pytest.param(
            [1.5, [["BlockStored", [-1, 7], 5, _TOKENS, 16, None, "GPU"]]],
            id="negative hash of SGLang",
        ),
        pytest.param(
            [
                1.5,
                [
                    [
                        "BlockStored",
                        [bytes(24) + b"\xff" * 8, bytes(31) + b"\7"],
                        bytes(31) + b"\5",
                        _TOKENS,
                        16,
                        None,
                    ]
                ],
            ],
            id="hashes as bytes",
        ),
        pytest.param(
            [1.5, [["BlockStored", [-1, 7], 5, [[t, t + 1] for t in _TOKENS], 16, None]]],
            id="pairs of tokens of SGLang with EAGLE",
        ),
    ],
)
def test_stored_blocks_read_alike_in_every_form(batch):
    """Stored blocks do not depend on the version of the event format."""
    assert decode(batch) == [_STORED]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"type": "BlockRemoved", "block_hashes": [3]}, BlockRemoved([3])),
        (["BlockRemoved", [3, -1], "cpu"], BlockRemoved([3, 2**64 - 1], "CPU")),
        (["BlockRemoved", [3], None, 2], BlockRemoved([3], "GPU", 2)),
        ({"type": "AllBlocksCleared"}, AllBlocksCleared()),
        (["AllBlocksCleared"], AllBlocksCleared()),
        (["BlockMigrated", [3], "elsewhere"], None),
        ({"type": "Heartbeat", "at": 1}, None),
    ],
)
def test_events_read_in_both_forms(event, expected):
    """Removals name tier and group; events of another kind are none."""
    assert decode([0.0, [event]]) == [expected]


def test_stored_blocks_carry_what_keeps_them_apart():
    """Adapter, salt and images are read; the name of the adapter counts once."""
    fields = _MAP | {"lora_name": "ad", "extra_keys": [["ad", "salt"], ["ad", ["img", 3]]]}
    (event,) = decode([0.0, [fields]])
    assert event.adapter == "ad"
    assert event.extras == [_encode("salt"), _encode("img")]
    (event,) = decode([0.0, [_MAP | {"lora_name": "ad", "extra_keys": [["ad"], ["ad"]]}]])
    assert event.extras == ()
    (event,) = decode([0.0, [_MAP | {"lora_id": 3}]])
    assert event.adapter == "#3"
    (event,) = decode([0.0, [_MAP | {"parent_block_hash": None, "cache_salt": "s"}]])
    assert event.extras == (_encode("s"), b"")
    metadata = ["BlockStored", [1, 2], None, _TOKENS, 16, None, "GPU", {"cache_salt": "s"}]
    (event,) = decode([0.0, [metadata]])
    assert event.adapter == ""
    assert event.extras == (_encode("s"), b"")


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "s"},
        {"extra_keys": [["s"], None]},
        {"cache_salt": "s", "extra_keys": [["s"], None]},
        {"lora_name": {"cache_salt": "s"}},
    ],
)
def test_salts_have_a_key_in_every_form(fields):
    """Those of a prompt are the same; a salt is in its first block only."""
    (event,) = decode([0.0, [_MAP | {"parent_block_hash": None} | fields]])
    assert list(event.extras) == kv_events.block_extras((), 4, 2, salt="s")


@pytest.mark.parametrize("fields", [{"cache_salt": "s"}, {"lora_name": {"cache_salt": "s"}}])
def test_a_salt_that_later_events_of_a_chain_repeat_counts_once(fields):
    """SGLang publishes an event per page, each with the salt; prompts have it in their first block."""
    page = _MAP | fields | {"extra_keys": None}
    first = page | {"block_hashes": [4], "parent_block_hash": None, "token_ids": _TOKENS[:16]}
    second = page | {"block_hashes": [5], "parent_block_hash": 4, "token_ids": _TOKENS[16:]}
    extras = [extra for event in decode([0.0, [first, second]]) for extra in event.extras or [b""]]
    assert extras == kv_events.block_extras((), 16, 2, salt="s")


def test_images_have_a_key_in_every_form():
    """Identifiers with and without the place of the block in the image are the same."""
    for entry in ("img", ["img", 3]):
        (event,) = decode([0.0, [_MAP | {"extra_keys": [None, [entry]]}]])
        assert list(event.extras) == kv_events.block_extras([(5, 3, "img")], 4, 2)


def test_blocks_have_the_images_that_they_overlap():
    """In order of their places; what is outside of the prompt, or within another, is left out."""
    placeholders = [
        (6, 3, "b"),
        (1, 4, "a"),
        (2, 9, "x"),
        (-1, 3, "y"),
        (15, 99, "c"),
        (200, 5, "d"),
    ]
    extras = kv_events.block_extras(placeholders, 4, 5)
    assert extras == [
        _encode("a"),
        _encode("a") + _encode("b"),
        _encode("b"),
        _encode("c"),
        _encode("c"),
    ]


def test_an_image_may_begin_where_another_one_ends():
    """It does not begin in it."""
    extras = kv_events.block_extras([(0, 4, "a"), (4, 4, "b")], 4, 2)
    assert extras == [_encode("a"), _encode("b")]


def test_blocks_of_sliding_windows_are_no_prefixes():
    """A block of such a group says nothing about the tokens before it."""
    (event,) = decode([0.0, [_MAP | {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}]])
    assert (event.group, event.is_prefix) == (1, False)


@pytest.mark.parametrize("padding", [0, kv_events.MAX_SMALL_BATCH_BYTES])
def test_groups_of_mamba_may_name_fewer_blocks_than_their_tokens_fill(padding):
    """They are left out, and the groups of full attention beside them are read."""
    mamba = {"block_hashes": [9], "extra_keys": [None], "group_idx": 1}
    sparse = _MAP | mamba | {"kv_cache_spec_kind": "mamba"}
    stored, left_out = read({"events": [_MAP, sparse], "more": bytes(padding)})
    assert stored == _STORED
    assert (left_out.hashes, left_out.group, left_out.is_prefix) == ([9], 1, False)


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(7, id="number"),
        pytest.param([1.0], id="no events"),
        pytest.param({"ts": 1.0}, id="map without events"),
        pytest.param([1.0, "events"], id="text for events"),
        pytest.param([1.0, [_MAP | {"block_hashes": "no"}]], id="hashes of another type"),
        pytest.param([1.0, [_MAP | {"token_ids": [1]}]], id="too few tokens"),
        pytest.param([1.0, [_MAP | {"token_ids": [-1] * 32}]], id="negative token"),
        pytest.param([1.0, [_MAP | {"token_ids": [[0, 1]] * 31 + [[-1, 0]]}]], id="negative pair"),
        pytest.param([1.0, [_MAP | {"block_size": 0}]], id="blocks of nothing"),
        pytest.param([1.0, [_MAP | {"extra_keys": [None, ["a"], None]}]], id="keys of more blocks"),
        pytest.param(
            [1.0, [{"type": "BlockRemoved", "block_hashes": [1] * 140_000}]], id="too many blocks"
        ),
        pytest.param([1.0, [[]] * 70_000], id="too many events"),
        pytest.param([1.0, [[]]], id="event without a tag"),
        pytest.param([1.0, [3]], id="event of another type"),
        pytest.param([1.0, bytes(2_000_000)], id="too many bytes"),
        pytest.param(
            [
                1.0,
                [
                    _MAP
                    | {"block_hashes": [1] * 300, "token_ids": None, "extra_keys": [[1] * 64] * 300}
                ],
            ],
            id="too many extra keys",
        ),
    ],
)
def test_malformed_batches_are_refused(batch):
    """They raise one exception."""
    with pytest.raises(kv_events.Malformed):
        decode(batch)


@pytest.mark.parametrize(
    ("num_blocks", "size", "is_read"),
    [
        (kv_events.MAX_BLOCKS // 16, 16, True),
        (kv_events.MAX_BLOCKS, 1, True),
        (kv_events.MAX_BLOCKS + 1, 1, False),
        (kv_events.MAX_BLOCKS // 16, 17, False),
        (10, kv_events.MAX_TOKENS // 10 + 1, False),
    ],
)
def test_stored_blocks_beyond_the_bounds_are_left_out(num_blocks, size, is_read):
    """A prompt whose cache was loaded is one event; what an engine holds besides it stays known."""
    hashes, tokens = [*range(num_blocks)], [7] * (num_blocks * size)
    event = {"type": "BlockStored", "block_hashes": hashes, "token_ids": tokens, "block_size": size}
    for form in (event, ["BlockStored", hashes, None, tokens, size]):
        (stored,) = read([0.0, [form]])
        if is_read:
            assert (stored.hashes, len(stored.tokens)) == (hashes, 4 * len(tokens))
        else:
            assert stored == kv_events.BlocksLeftOut(num_blocks)
    if num_blocks > kv_events.MAX_SPLIT_BLOCKS:
        (stored,) = read([0.0, [event | {"extra_keys": [None] * num_blocks}]])
        assert stored == kv_events.BlocksLeftOut(num_blocks)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("parent", [None, 9])
def test_long_events_are_split(num_blocks, parent, monkeypatch):
    """Their parts have the same blocks, each behind the last one of the part before."""
    monkeypatch.setattr(kv_events, "MAX_SPLIT_BLOCKS", 2)
    hashes = [*range(10, 10 + num_blocks)]
    tokens = array("I", range(3 * num_blocks)).tobytes()
    extras = [b"%d" % hashed for hashed in hashes]
    parts = kv_events.split(BlockStored(hashes, parent, tokens, 3, "a", extras))
    assert len(parts) == (num_blocks + 1) // 2
    assert [hashed for part in parts for hashed in part.hashes] == hashes
    assert b"".join(part.tokens for part in parts) == tokens
    assert [extra for part in parts for extra in part.extras] == extras
    assert [part.parent for part in parts] == [parent, 11, 13][: len(parts)]
    removed = kv_events.split(BlockRemoved(hashes, "CPU", 3))
    assert [hashed for part in removed for hashed in part.hashes] == hashes
    assert {(part.medium, part.group) for part in removed} == {("CPU", 3)}
    assert kv_events.split(AllBlocksCleared()) == (AllBlocksCleared(),)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=9)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=12,
)
_FIELDS = st.dictionaries(st.sampled_from(sorted(_MAP)), _VALUES)


@given(
    st.binary(max_size=200)
    | st.builds(lambda fields: _encode([0.0, [_MAP | fields]]), _FIELDS)
    | st.builds(
        lambda values: _encode([0.0, [["BlockStored", *values]]]), st.lists(_VALUES, max_size=11)
    )
)
@example(b"\x91" * 100_000)
@example(b"\x92\x00\x91" + b"\x91" * 100_000)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x81\xa1\xff\x91")
@example(b"\x92\x00\x91\x91\xa2\xff\xfe")
@example(b"\x92\x00\x91\x81\xa4type\xa2\xff\xfe")
@example(b"\x92\x00\x91\x93\xacBlockRemoved\x91\x01\xa2\xff\xfe")
def test_any_bytes_have_an_answer(payload):
    """An event, none, or the one exception: nothing else."""
    try:
        for raw in kv_events.decode_batch(payload):
            event = kv_events.decode_event(raw)
            assert event is None or isinstance(event, kv_events.KvEvent)
    except kv_events.Malformed:
        pass


def test_keys_cover_all_tokens_before_them():
    """A key depends on the adapter, every token up to the end of its block, and the extras."""
    tokens = array("I", range(40)).tobytes()
    root = kv_events.root_key("")
    keys = kv_events.block_keys(root, tokens, 16)
    assert len(keys) == 2
    assert kv_events.block_keys(keys[0], tokens[64:128], 16) == keys[1:]
    assert kv_events.block_keys(kv_events.root_key("ad"), tokens, 16)[0] != keys[0]
    salted = kv_events.block_keys(root, tokens[:128], 16, (b"salt", b""))
    assert not set(salted) & set(keys)
