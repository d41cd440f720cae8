import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.endpoint import ServedModels
from extproc.request import MAX_NAME_BYTES
from extproc.scrape import model_list


def page(*cards):
    return json.dumps({"object": "list", "data": list(cards)}).encode()


def test_vllm_lists_base_and_adapters():
    """Cards with a parent are adapters, the others names of the base model.

    Source: docs/spec/engines.md#models-page.
    """
    card = {"object": "model", "created": 1, "owned_by": "vllm", "permission": [{"id": "p"}]}
    models = model_list.read(
        page(
            {**card, "id": "tiny", "root": "/models/tiny", "parent": None, "max_model_len": 4096},
            {**card, "id": "small", "root": "/models/tiny", "parent": None},
            {**card, "id": "lora-a", "root": "/loras/a", "parent": "tiny", "max_model_len": None},
        )
    )
    assert models == ServedModels(frozenset({"tiny", "small"}), frozenset({"lora-a"}), 4096)
    assert "tiny" in models
    assert "lora-a" in models
    assert "lora-b" not in models


@pytest.mark.parametrize("parent", ["", "m", 3, [], {}])
def test_an_invalid_parent_is_no_adapter(parent):
    """Engines put other things into `parent`, such as nothing, or the model itself."""
    assert model_list.read(page({"id": "m", "parent": parent})) == ServedModels(frozenset({"m"}))


@pytest.mark.parametrize("length", ["4096", 0, -1, 1 << 31, 10**30, 8.5, True, None, [1], {}])
def test_an_invalid_context_length_is_unknown(length):
    """A length that is no number in range leaves the names as they are."""
    listed = page({"id": "m", "max_model_len": length})
    assert model_list.read(listed) == ServedModels(frozenset({"m"}))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"404 page not found",
        b"[]",
        b"{}",
        b'{"data": {}}',
        b'{"data": [{"name": "m"}]}',
        b'{"data": [{"id": "m"}, {"id": 3}]}',
        b'{"data": [{"id": ""}]}',
        b'{"data": [{"id": "m"}]',
        b'{"data": [{"id": "\xff"}]}',
        b"[" * 100_000,
    ],
)
def test_an_invalid_list_is_unknown(content):
    """A page that is not understood whole leaves the models unknown."""
    assert model_list.read(content) is None


def test_an_empty_list_is_unknown():
    """An engine that lists no model is not kept from all traffic."""
    assert model_list.read(page()) is None


@pytest.mark.parametrize(
    "content",
    [
        page(*({"id": f"m{n}"} for n in range(model_list.MAX_NAMES + 1))),
        page({"id": "m" * (MAX_NAME_BYTES + 1)}),
        page({"id": "m"}) + b" " * model_list.MAX_BYTES,
    ],
)
def test_lists_are_bounded(content):
    """A list longer than is taken is not taken in part."""
    assert model_list.read(content) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_read(content):
    """No bytes make reading raise."""
    model_list.read(content)


def test_a_parent_of_another_type_is_ignored():
    """A parent of another type makes no adapter, whatever it holds; one of broken text no list."""
    objects = b"[" + b"{}," * 300_000 + b"{}]"
    content = b'{"data":[{"id":"m","parent":%b}]}' % objects
    tracemalloc.start()
    read = model_list.read(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (read.bases, read.adapters) == ({"m"}, frozenset())
    assert peak < len(content)
    assert model_list.read(b'{"data":[{"id":"m","parent":"\\ud800"}]}') is None
