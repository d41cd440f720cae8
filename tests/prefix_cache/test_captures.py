"""Recorded bytes of real engines: the index predicts the hits that they reported.

`captures/README.md` names the command.
"""

import json
from array import array
from pathlib import Path

import pytest

from bench.real_vllm import tiny
from extproc.prefix_cache import kv_events
from extproc.prefix_cache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from extproc.prefix_cache.token_blocks import TokenBlockIndex
from tests.parsing.builders import CHAT, parsed

FOLDER = Path(__file__).parent / "captures"
FILES = sorted(FOLDER.glob("*.json"))


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.stem)
def capture(request):
    return json.loads(request.param.read_text())


def events(message):
    """Decoded events of the frames of a message, whose payload is the last one."""
    return [
        kv_events.decode_event(raw) for raw in kv_events.decode_batch(bytes.fromhex(message[-1]))
    ]


def prompt_keys(row, block_tokens):
    """Keys of the blocks of a request that an engine can find, by its token ids."""
    body, tokens = row["body"], row["token_ids"]
    adapter = body["model"] if body["model"] in tiny.ADAPTERS else ""
    packed = array("I", tokens).tobytes()
    count = (len(tokens) - 1) // block_tokens
    extras = kv_events.block_extras(
        row.get("placeholders", ()),
        block_tokens,
        len(tokens) // block_tokens,
        salt=body.get("cache_salt", ""),
    )
    keys = kv_events.block_keys(kv_events.root_key(adapter), packed, block_tokens, extras)
    return keys[:count]


def test_there_is_a_capture():
    """The tests below are not empty by mistake."""
    assert FILES


def test_frames_are_those_that_the_subscriber_reads(capture):
    """Topic, number and batch; replays have an empty frame before, and end with all ones."""
    for life in capture["lives"]:
        numbers = [int(frames[1], 16) for frames in life["messages"]]
        assert numbers == list(range(len(numbers)))
        assert {len(frames) for frames in life["messages"]} == {3}
    replay = capture["replay_from_5"]
    assert {len(frames) for frames in replay} <= {3, 4}
    assert all(not frames[0] for frames in replay)
    assert replay[-1][-2:] == ["f" * 16, ""]
    published = capture["lives"][0]["messages"][5:]
    assert [frames[-2:] for frames in replay[:-1]] == [frames[1:] for frames in published]


def test_every_event_is_of_a_known_kind(capture):
    """Nothing of a real engine is malformed or left out."""
    kinds = {type(event) for frames in capture["lives"][0]["messages"] for event in events(frames)}
    assert kinds == {BlockStored, BlockRemoved, AllBlocksCleared}
    for life in capture["lives"]:
        for frames in life["messages"]:
            for event in events(frames):
                if isinstance(event, BlockStored):
                    assert event.block_tokens == capture["block_tokens"]
                    assert (event.medium, event.group, event.is_prefix) == ("GPU", 0, True)


def test_the_index_predicts_what_the_engine_finds(capture):
    """Of every request, in both lives, with adapters, salts, copies, evictions and a reset."""
    block_tokens = capture["block_tokens"]
    index = TokenBlockIndex(1000)
    for life in capture["lives"]:
        engine, taken = index.open(), 0
        for row in life["requests"]:
            for frames in life["messages"][taken : row["batches_before"]]:
                for event in events(frames):
                    index.apply(engine, event)
            taken = row["batches_before"]
            keys = prompt_keys(row, block_tokens)
            ends = index.holders(keys, len(keys))
            depth = max((end for end, bits in ends if bits & engine.bit), default=0)
            if row["name"] == "after a reset":
                # An engine publishes that its cache was cleared with its next step.
                assert row["cached_tokens"] == 0
                continue
            assert depth * block_tokens == row["cached_tokens"], row["name"]
        for frames in life["messages"][taken:]:
            for event in events(frames):
                index.apply(engine, event)
        assert engine.held + engine.num_copies <= capture["blocks"]
        assert not engine.dropped
        index.close(engine)


def rows_of(name):
    """Requests of the first life of a capture, by name."""
    capture = json.loads((FOLDER / f"{name}.json").read_text())
    return {row["name"]: row for row in capture["lives"][0]["requests"]}


def test_images_keep_blocks_apart_by_what_the_engine_calls_them():
    """By their content, or by the name that a client chose, and not by their size."""
    rows = rows_of("vllm-0.32.0-images")
    cached = {name: row["cached_tokens"] for name, row in rows.items()}
    assert cached["again"] == cached["again after a reset"] == cached["two images"] == 96
    assert cached["another image"] == cached["another size"] == cached["behind a text"] == 0
    assert cached["another question"] == 64
    assert cached["named"] == cached["after evictions"] == 0
    assert cached["another image of that name"] == 96


def test_tokens_of_images_are_counted_by_their_size():
    """As many as a running engine of that family puts into the prompt."""
    rows = rows_of("vllm-0.32.0-images").values()
    for row in rows:
        items = parsed(CHAT, row["body"]).media
        assert [item.tokens for item in items] == [p[1] for p in row["placeholders"]]
    assert {p[1] for row in rows for p in row["placeholders"]} == {64, 77, 1044}


def test_the_capture_shows_what_it_is_for():
    """Hits, evictions, an adapter, a salt, and a block that was stored twice."""
    rows = rows_of("vllm-0.32.0")
    assert rows["again"]["cached_tokens"] == 96
    assert rows["copies its last block"]["cached_tokens"] == 32
    assert rows["adapter"]["cached_tokens"] == rows["salt"]["cached_tokens"] == 0
    assert rows["next turn"]["cached_tokens"] > 96
    assert rows["after evictions"]["cached_tokens"] == 0
    assert rows["again after a reset"]["cached_tokens"] == 96


def test_render_and_tokenize_name_the_same_tokens(capture):
    """So it does not matter which of them an engine has."""
    for sample in capture["samples"]:
        rendered = sample["render"]
        first = rendered[0] if isinstance(rendered, list) else rendered
        assert first["token_ids"] == sample["tokenize"]["tokens"]
    assert all(row["tokenize_agrees"] for life in capture["lives"] for row in life["requests"])
