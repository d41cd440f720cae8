"""Bodies of any content are read within bounds, and large ones as small ones are."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import hostile_bodies
from extproc.parsing import (
    bounded_decoder,
    canonical_prompt,
    envelope,
    narrow_types,
    openai_api,
    surfaces,
)
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
    # The first body of a kind builds decoders, which stay.
    surfaces.parse(raw)
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
    slowly = bounded_decoder.StepwiseReading(body).struct(openai_api.ChatBody, body)
    at_once = openai_api._CHAT_DECODER.decode(body)
    assert slowly.model == at_once.model
    prompts = []
    for read in (slowly, at_once):
        fields: list[bytes] = []
        openai_api._add_messages(fields, read.messages)
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


_IDS = json.dumps([7, 4_294_967_295, 0] * 40_000).encode()
_NUL = b'"\\u0000ids"'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"model":"m","prompt" : %b,"user":"a, b"}' % _IDS),
        ("/v1/embeddings", b'{"input":%b,"model":"m"}' % _IDS),
        ("/inference/v1/generate", b'{"token_ids":%b,"features":{"mm_hashes":{}}}' % _IDS),
        ("/generate", b'{"text":"a","input_ids":%b}' % _IDS),
        ("/v1/completions", b'{"model":"m","metadata":{"prompt":%b},"prompt":"a"}' % _IDS),
        ("/v1/completions", b'{"model":"m","prompt":%b,"prompt":"a"}' % _IDS),
        ("/v1/completions", b'{"model":"m","prompt":%b,"user":%b}' % (_IDS, _NUL)),
        ("/v1/completions", b'{"model":"m","user":"\\"prompt\\":%b","prompt":"a"}' % _IDS),
        ("/v1/completions", b'{"model":"m","prompt":[%b,%b]}' % (_IDS, _IDS)),
        ("/v1/completions", b'{"model":"m","prompt":%b]}' % _IDS),
        ("/v1/completions", b'{"model":"m","prompt":[1.5,%b}' % _IDS[1:]),
        ("/v1/completions", b'{"model":"m","prompt":[-1,%b}' % _IDS[1:]),
        ("/v1/completions", b'{"model":"m","prompt":%b' % _IDS),
        ("/v1/completions", b'{"prompt":%b}' % _IDS),
        ("/v1/responses", b'{"model":"m","prompt":%b,"input":"a"}' % _IDS),
    ],
)
def test_token_ids_are_read_apart_as_with_their_body(path, body, monkeypatch):
    """A body with many token ids is read, or refused, as if they were decoded with the rest."""
    raw = HttpRequest({":path": path, ":method": "POST"}, body)
    apart = surfaces.parse(raw)
    monkeypatch.setattr(narrow_types, "decode_around_ids", lambda *_: None)
    assert surfaces.parse(raw) == apart


_KEYS = st.sampled_from(["a", "text", "type", "content", "cache_control", "data", "b\n"])
_LEAVES = st.sampled_from([None, True, 1, 1.5, "a\nb", "text", "data:" + "A" * 70, "B" * 70])
_JSON = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_KEYS, inner, max_size=2),
    max_leaves=4,
)


@given(st.lists(_JSON, min_size=1, max_size=4), st.lists(_JSON, max_size=2))
def test_long_lists_have_the_parts_of_short_ones(often, rarely):
    """Parts of a long list are written as each alone, wherever it begins."""
    parts = [*often * 40, *rarely, *often * 40]
    alone = [canonical_prompt.content([part]) for part in parts]
    assert canonical_prompt.content(parts) == b"".join(alone)
    nested = json.loads(canonical_prompt.item({"a": parts})[1:])["a"]
    assert nested == [
        json.loads(canonical_prompt.item({"a": [part]})[1:])["a"][0] for part in parts
    ]
