"""Bounds of names and ids, and the treatment of longer ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.parsing import surfaces
from extproc.request import MAX_ID_BYTES, MAX_NAME_BYTES, shorten_id
from tests.parsing import builders
from tests.parsing.builders import CHAT

LONGEST = "m" * MAX_NAME_BYTES


@pytest.mark.parametrize("name", [LONGEST, "é" * (MAX_NAME_BYTES // 2)])
def test_the_longest_names_are_taken(name):
    """A name of 512 bytes is one."""
    body = {"model": name, "messages": [{"role": "user", "content": "a"}]}
    assert builders.parsed(CHAT, body).model == name


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings", "/generate", "/other"])
@pytest.mark.parametrize("field", ["model", "lora_path"])
@pytest.mark.parametrize("name", [LONGEST + "m", "é" * 257])
def test_a_longer_model_or_adapter_name_is_refused(path, field, name):
    """On every path, with what was wanted, what was found and what to do."""
    body = {"model": "m", "prompt": "a", "input": "a", "text": "a", field: name}
    body["messages"] = [{"role": "user", "content": "a"}]
    message = builders.refused(path, body)
    assert "expected" in message
    assert "512" in message


def test_a_long_name_in_a_header_is_refused():
    """The header stands in for the body's name, also where there is no body."""
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    headers = {"x_llm_d_model_name_rewrite": LONGEST + "m"}
    assert surfaces.parse(builders.post(CHAT, body, **headers)) is surfaces.LONG_NAME


@given(st.text(max_size=600), st.text(max_size=600))
def test_shortened_ids_are_bounded_and_distinct(first, other):
    """Equal ids stay equal, different ones different, and none is longer than its bound."""
    assert len(shorten_id(first).encode("utf-8", "surrogatepass")) <= MAX_ID_BYTES
    assert (shorten_id(first) == shorten_id(other)) == (first == other)


def test_long_ids_with_a_common_prefix_stay_distinct():
    """Two tenants whose names differ behind the bound are two tenants."""
    assert shorten_id("t" * 5000 + "a") != shorten_id("t" * 5000 + "b")
    assert shorten_id("t" * MAX_ID_BYTES) == "t" * MAX_ID_BYTES
