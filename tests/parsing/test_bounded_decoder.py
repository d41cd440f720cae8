"""Bodies of any content are read within bounds, and large ones as small ones are."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import hostile_bodies
from extproc.parsing import bounded_decoder, canonical_prompt, envelope, openai_chat, surfaces
from extproc.request import HttpRequest, InferenceRequest

_SIZE = 1 << 19
_KINDS = ("/v1/chat/completions", "/v1/completions", "metadata", "back", "form", "gRPC")
_CASES = [
    (name, path, body)
    for name, path, body in hostile_bodies.bodies(_SIZE)
    if name.startswith(_KINDS)
]


@pytest.mark.parametrize(("name", "path", "body"), _CASES, ids=[name for name, *_ in _CASES])
def test_memory_of_a_hostile_body_is_bounded(name, path, body):
    """Parsing takes four times the size of a body at most, and what a few thousand values take."""
    headers = {":path": path, ":method": "POST", "content-type": "multipart/x; boundary=b"}
    raw = HttpRequest(headers, body)
    tracemalloc.start()
    surfaces.parse(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= hostile_bodies.MAX_TIMES_SIZE * len(body) + hostile_bodies.FLOOR_BYTES


_TEXTS = st.text(st.sampled_from('a \n"\\é中😀'), max_size=30)
_CONTENTS = st.one_of(
    st.none(),
    _TEXTS,
    st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": _TEXTS}), max_size=3),
    st.just([{"type": "image_url", "image_url": {"url": "data:" + "A" * 100}}]),
)
_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "x"]), "content": _CONTENTS}),
    min_size=1,
    max_size=5,
)


@given(_MESSAGES, st.booleans())
def test_stepwise_decoding_gives_the_same_prompt(messages, ascii_only):
    """A body that is not decoded at once has the prompt it would have had."""
    body = json.dumps({"model": "m", "messages": messages}, ensure_ascii=ascii_only).encode()
    slowly = bounded_decoder._Reading(body).struct(openai_chat.ChatBody, body)
    at_once = openai_chat._DECODER.decode(body)
    assert slowly.model == at_once.model
    prompts = []
    for read in (slowly, at_once):
        fields: list[bytes] = []
        openai_chat._add_messages(fields, read.messages)
        prompts.append(b"".join(fields))
    assert prompts[0] == prompts[1]


@given(st.text(st.sampled_from('ab\n"\\é中😀'), min_size=1, max_size=12), st.integers(6000, 60_000))
def test_a_long_text_is_cut_between_characters(unit, times):
    """Chunks end neither inside a character nor an escape nor a surrogate pair."""
    text = unit * times
    for ascii_only in (True, False):
        body = json.dumps({"model": "m", "prompt": text}, ensure_ascii=ascii_only).encode()
        read = surfaces.parse(HttpRequest({":path": "/v1/completions", ":method": "POST"}, body))
        assert isinstance(read, InferenceRequest)
        assert read.prompt == text.encode()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50), st.integers(1, 2000))
def test_long_lists_of_token_ids_are_packed(ids, times):
    """However long a list is, each id is four bytes."""
    scanned = canonical_prompt.scan(json.dumps(ids * times).encode())
    assert scanned is not None
    assert scanned.ids == canonical_prompt.pack(ids * times)


def test_a_few_lone_surrogates_are_mended_and_many_are_not():
    """A cut emoji is mended; a body made of them is none."""
    assert envelope.mend_surrogates(b'"\\ud83d\\ud83d\\ude00"') == b'"\\ufffd\\ud83d\\ude00"'
    many = b"\\ud83d" * 5000
    assert envelope.mend_surrogates(many) == many
