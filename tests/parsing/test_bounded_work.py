"""The work on a body is bounded by counts, and no conversation loses its prefix as it grows."""

import json
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import hostile_bodies
from extproc.parsing import bounded_decoder, canonical_prompt, surfaces
from extproc.prefix_cache import blocks
from extproc.request import HttpRequest, InferenceRequest

_SIZE = 1 << 18
_CASES = [
    (name, path, body)
    for name, path, body in hostile_bodies.bodies(_SIZE)
    if not name.startswith(("gRPC", "form", "/v1/score", "/v1/embeddings", "user", "model"))
]


class CountingReading(bounded_decoder.StepwiseReading):
    """A reading that counts the values it decodes and the elements it looks at."""

    all: ClassVar[list] = []

    def __init__(self, body):
        super().__init__(body)
        self.size = len(body)
        self.num_calls = 0
        self.granted = (self.values_left, self.elements_left)
        self.all.append(self)

    def value(self, raw, depth, *, may_be_ids=False):
        self.num_calls += 1
        return super().value(raw, depth, may_be_ids=may_be_ids)

    @property
    def spent(self):
        """Values and elements that were taken of the budget."""
        return self.granted[0] - self.values_left, self.granted[1] - self.elements_left


@pytest.mark.parametrize(("name", "path", "body"), _CASES, ids=[name for name, *_ in _CASES])
def test_work_on_a_hostile_body_is_bounded(name, path, body, monkeypatch):
    """Values that are built, and elements that are looked at, stay within a share of the bytes."""
    monkeypatch.setattr(bounded_decoder, "StepwiseReading", CountingReading)
    monkeypatch.setattr(CountingReading, "all", [])
    headers = {":path": path, ":method": "POST", "content-type": "multipart/x; boundary=b"}
    surfaces.parse(HttpRequest(headers, body))
    assert len(CountingReading.all) <= 3  # the body, once mended, and its envelope for the error
    for reading in CountingReading.all:
        values, elements = reading.spent
        share = bounded_decoder.MAX_VALUES + reading.size // 48
        # The last array may go one array beyond; then no other is looked at.
        assert values <= share
        assert elements <= 3 * bounded_decoder.MAX_ELEMENTS + share + 512
        assert reading.num_calls <= 3 * elements + 64


_PROSE = "Some prose with a comma, as people write it, and code: f(a, [1, 2]) {\\n}. "
_TOOLS = [
    {"type": "function", "function": {"name": f"tool{at}", "description": _PROSE * 3}}
    for at in range(8)
]


def _chain(messages, *, ascii_only, tools):
    body = {"model": "m", **({"tools": _TOOLS} if tools else {}), "messages": messages}
    written = json.dumps(body, ensure_ascii=ascii_only).encode()
    request = surfaces.parse(
        HttpRequest({":path": "/v1/chat/completions", ":method": "POST"}, written)
    )
    assert isinstance(request, InferenceRequest)
    return len(written), request.prompt, blocks.chain(request.prompt, b"")


def _content(kind, text):
    if kind == "text":
        return text
    if kind == "parts":
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 200}}
        return [{"type": "text", "text": text}, image]
    raise ValueError(kind)


@given(
    kinds=st.lists(st.sampled_from(["text", "parts"]), min_size=1, max_size=3),
    unit=st.sampled_from(
        [_PROSE, "中文文本" * 12, "Прошу прощения, ", "so 😀 good, ", 'a "\\ b\n']
    ),
    ascii_only=st.booleans(),
    tools=st.booleans(),
    longest=st.sampled_from([100_000, 400_000, 1_500_000]),
)
def test_a_growing_conversation_keeps_its_blocks(kinds, unit, ascii_only, tools, longest):
    """Each turn extends the prompt of the one before, past the sizes at which reading changes."""
    messages, size, before, chain = [], 0, b"", blocks.chain(b"", b"")
    step = max(12_000, longest // 12)
    while size < longest:
        kind = kinds[len(messages) % len(kinds)]
        messages.append({"role": "user", "content": _content(kind, unit * (step // len(unit)))})
        messages.append({"role": "assistant", "content": "Well, yes."})
        size, prompt, grown = _chain(messages, ascii_only=ascii_only, tools=tools)
        assert prompt.startswith(before)
        assert grown[: len(chain)] == chain
        before, chain = prompt, grown


@given(
    unit=st.sampled_from([_PROSE, "中文文本" * 12, "so 😀 good, ", 'a "\\ b\n']),
    ascii_only=st.booleans(),
    turns=st.integers(1, 40),
)
def test_stepwise_decoding_gives_the_same_blocks(unit, ascii_only, turns):
    """A long ordinary body has the blocks it has when all of it is decoded in one step."""
    parts = [{"type": "text", "text": unit * 60}, {"type": "input_audio", "data": "B" * 100}]
    messages = [
        {"role": "user", "content": parts if at % 3 == 1 else unit * 300} for at in range(turns)
    ]
    messages[0]["tool_calls"] = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    slowly = _chain(messages, ascii_only=ascii_only, tools=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_decoder, "is_light", lambda _: True)
        at_once = _chain(messages, ascii_only=ascii_only, tools=True)
        patch.setattr(bounded_decoder, "SHORT_BYTES", -1)
        patch.setattr(bounded_decoder, "is_light", lambda _: False)
        always = _chain(messages, ascii_only=ascii_only, tools=True)
    assert slowly == at_once == always


def test_json_of_short_values_is_not_read_part_by_part():
    """It is hashed as it is written; elements of a batch are read all the same."""
    parts = b'[{"role":"user","content":[%b{}]}]' % (b"{}," * 100_000)
    reading = bounded_decoder.StepwiseReading(parts)
    before = reading.elements_left
    assert bytes(reading.value(msgspec.Raw(parts), 4)) == parts
    assert reading.elements_left == before
    batch = b"[[%b1],[2]]" % (b"1," * 100_000)
    packed = reading.value(msgspec.Raw(batch), 4, may_be_ids=True)
    assert [len(ids.ids) for ids in packed] == [400_004, 4]


def test_punctuation_in_texts_does_not_make_json_dense():
    """A text of nothing but numbers is a text, also in a body of thousands of messages."""
    text = "0,1," * 20_000
    part = {"type": "text", "text": "a"}
    messages = [{"role": "user", "content": [part, part]} for _ in range(3000)]
    messages[1]["content"] = [part, {**part, "text": text}]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    assert not bounded_decoder.is_light(body)
    _, prompt, _ = _chain(messages, ascii_only=True, tools=False)
    assert canonical_prompt.TEXT + text.encode() + canonical_prompt.MESSAGE in prompt


@pytest.mark.parametrize(
    "escape", ["\\\\ud83d", "\\\\\\\\ud83d", "\\ud83d\\ude00", "\\\\", "\\u4e2d"]
)
@pytest.mark.parametrize("shift", range(14))
def test_a_text_is_not_cut_inside_of_an_escape(escape, shift):
    """Wherever a chunk ends, backslashes that are escaped themselves begin no escape."""
    text = '"' + "a" * shift + escape * 60_000 + '\\ud83d\\ude00"'
    body = b'{"model":"m","prompt":%b}' % text.encode()
    read = surfaces.parse(HttpRequest({":path": "/v1/completions", ":method": "POST"}, body))
    assert isinstance(read, InferenceRequest)
    assert read.prompt == json.loads(text).encode()


def _body_with(text: str, more: str = "") -> bytes:
    message = f'{{"role":"user","content":"{text}"}}'
    return f'{{"model":"m","messages":[{message}]{more}}}'.encode()


@pytest.mark.parametrize(
    ("body", "is_light"),
    [
        (_body_with("so, it goes, " * 8000), True),
        (_body_with("[{," * 60_000), True),
        (_body_with('[{,\\"' * 300 + "[{," * 60_000), True),
        (_body_with("a" * 70_000 + "\\\\", ',"tools":[' + "{}," * 60_000 + "{}]"), False),
        (_body_with("a" * 70_000 + '\\\\\\"', ',"tools":[' + "{}," * 60_000 + "{}]"), False),
        (_body_with("so, it goes, " * 30_000), True),
        (_body_with("a" * 500_000 + "😀"), False),
        (_body_with("a" * 500_000, ',"user":"' + "😀" * 80_000 + '"'), False),
        (_body_with("\\" * 200_000 + '\\"' * 60_000), True),
    ],
    ids=[
        "commas in prose",
        "marks in a text",
        "escaped quotes",
        "values behind an escaped backslash",
        "values behind an escaped quote",
        "commas in one long text",
        "wide",
        "wide behind another",
        "backslashes",
    ],
)
def test_punctuation_in_long_texts_is_not_counted(body: bytes, is_light: bool) -> None:  # noqa: FBT001
    """Punctuation outside of strings decides if a body is decoded at once."""
    assert bounded_decoder.is_light(body) is is_light
