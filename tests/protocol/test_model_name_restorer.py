"""The client's name for its model in answers, cut anywhere."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol import model_name_restorer

JSON = {"content-type": "application/json"}
SSE = {"content-type": "text/event-stream; charset=utf-8"}
EVENT = (
    b'data: {"id":"c","object":"chat.completion.chunk","model":"big-v2","choices":[{"index":0,'
    b'"delta":{"content":"\\"model\\":\\"big-v2\\" {["}}]}\n\n'
)


def changed(
    headers, *chunks: bytes, engine_model: str = "big-v2", client_model: str = "big"
) -> list[bytes]:
    """Each chunk after the rewrite; the last one ends the answer."""
    restorer = model_name_restorer.for_response(headers, engine_model, client_model)
    assert restorer is not None
    last = len(chunks) - 1
    return [restorer.pass_on(chunk, last=at == last) for at, chunk in enumerate(chunks)]


def restored(headers, body: bytes, **names: str) -> bytes:
    return b"".join(changed(headers, body, **names))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"big-v2","a":1}', b'{"model":"big","a":1}'),
        (b'{"model": "big-v2"}', b'{"model": "big"}'),
        (
            b'{\n  "id": "x",\n  "model" :\n    "big-v2"\n}',
            b'{\n  "id": "x",\n  "model" :\n    "big"\n}',
        ),
        (b'{"model":"big-v2-x"}', b'{"model":"big-v2-x"}'),
        (b'{"model":"other","model":"big-v2"}', b'{"model":"other","model":"big-v2"}'),
        (b'{"a":{"model":"big-v2"}}', b'{"a":{"model":"big-v2"}}'),
        (b'{"a":[{"model":"big-v2"}]}', b'{"a":[{"model":"big-v2"}]}'),
        (b'{"message":[{"model":"big-v2"}]}', b'{"message":[{"model":"big-v2"}]}'),
        (b'{"a":{"message":{"model":"big-v2"}}}', b'{"a":{"message":{"model":"big-v2"}}}'),
        (b'[{"model":"big-v2"}]', b'[{"model":"big-v2"}]'),
        (
            b'{"t":"a\\"model\\":\\"big-v2\\"","model":"big-v2"}',
            b'{"t":"a\\"model\\":\\"big-v2\\"","model":"big"}',
        ),
        (b'{"a\\"model":"big-v2"}', b'{"a\\"model":"big-v2"}'),
        (b'{"t":"\\\\","model":"big-v2"}', b'{"t":"\\\\","model":"big"}'),
        (b'{"t":"{[","model":"big-v2"}', b'{"t":"{[","model":"big"}'),
        (b'{"t":"model","model":"big-v2"}', b'{"t":"model","model":"big"}'),
        (b'{"a":[{}],"model":"big-v2"}', b'{"a":[{}],"model":"big"}'),
        (b'{"model":1}', b'{"model":1}'),
        (b'{"a":1}', b'{"a":1}'),
        (b"no healthy upstream", b"no healthy upstream"),
        (b"", b""),
    ],
)
def test_086_json_answers(body: bytes, expected: bytes):
    """The model an answer names for itself is the client's again; every other byte stays."""
    assert restored(JSON, body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (EVENT + EVENT, EVENT.replace(b'"big-v2"', b'"big"') * 2),
        (b"data: [DONE]\n\n", b"data: [DONE]\n\n"),
        (b'data:{"model": "big-v2"}\r\n\r\n', b'data:{"model": "big"}\r\n\r\n'),
        (b': say "model\ndata: {"model":"big-v2"}\n\n', b': say "model\ndata: {"model":"big"}\n\n'),
        (
            b'event: message_start\ndata: {"type":"message_start","message":{"model":"big-v2"}}\n\n',
            b'event: message_start\ndata: {"type":"message_start","message":{"model":"big"}}\n\n',
        ),
        (
            b'data: {"type":"response.created","response":{"metadata":{"model":"big-v2"},"model":"big-v2"}}\n\n',
            b'data: {"type":"response.created","response":{"metadata":{"model":"big-v2"},"model":"big"}}\n\n',
        ),
        (
            b'data: {"a":"\n\ndata: {"model":"big-v2"}\n\n',
            b'data: {"a":"\n\ndata: {"model":"big"}\n\n',
        ),
    ],
)
def test_086_streams_of_events(body: bytes, expected: bytes):
    """Every event on its own, whatever stood in the one before."""
    assert restored(SSE, body) == expected


@pytest.mark.parametrize(
    ("engine_model", "client_model"), [("m", "m"), ("", "m"), ("m", ""), ("", "")], ids=repr
)
def test_086_equal_or_empty_names_change_nothing(engine_model: str, client_model: str):
    """Nothing to put back."""
    assert model_name_restorer.for_response(JSON, engine_model, client_model) is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "audio/mpeg"},
        {"content-type": "application/grpc+json-no"},
        {**JSON, "content-encoding": "gzip"},
        {**SSE, "content-encoding": "br"},
    ],
)
def test_other_answers_are_unchanged(headers: dict[str, str]):
    """Compressed answers, and those that are neither JSON nor events, are unchanged."""
    assert model_name_restorer.for_response(headers, "a", "b") is None


@pytest.mark.parametrize("name", ["größe", 'a"b', "a\\b", "x/y", "模型", "a.b*c"])
def test_names_of_any_kind(name: str):
    """As engines write names: in UTF-8 or in ASCII."""
    for ascii_only in (False, True):
        body = json.dumps({"model": name}, ensure_ascii=ascii_only).encode()
        assert json.loads(restored(JSON, body, engine_model=name, client_model="m")) == {
            "model": "m"
        }
        body = json.dumps({"model": "m"}, ensure_ascii=ascii_only).encode()
        assert json.loads(restored(JSON, body, engine_model="m", client_model=name)) == {
            "model": name
        }


_PIECES = [
    *(b'"model"', b'"big-v2"', b'"big-v2', b'"big', b'"message"', b'"response"', b"model"),
    *(b":", b" ", b'"', b"\\", b"\\\\", b"{", b"}", b"[", b"]", b",", b"\n", b"data: ", b"x"),
    *(b'{"model":"big-v2"', b'{"message":{"model": "big-v2"', b"\n\n", b" " * 17, EVENT),
]


@given(
    body=st.lists(st.sampled_from(_PIECES), max_size=20).map(b"".join),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    events=st.booleans(),
)
def test_any_cut_gives_the_same_bytes(body: bytes, cuts: list[int], *, events: bool):
    """However an answer is cut, its pieces join to what the whole becomes."""
    headers = SSE if events else JSON
    places = sorted({cut for cut in cuts if cut < len(body)})
    chunks = [body[a:b] for a, b in zip([0, *places], [*places, len(body)], strict=True)]
    assert b"".join(changed(headers, *chunks)) == restored(headers, body)
    assert b"".join(changed(headers, *chunks, b"")) == restored(headers, body)


@given(cut=st.integers(0, 2 * len(EVENT)))
def test_complete_events_are_not_held_back(cut: int):
    """At any cut only what may begin a name waits, and nothing behind a complete event."""
    restorer = model_name_restorer.for_response(SSE, "big-v2", "big")
    assert restorer is not None
    given_out = restorer.pass_on((EVENT + EVENT)[:cut], last=False)
    expected = EVENT.replace(b'"big-v2"', b'"big"') * 2
    assert expected.startswith(given_out)
    waiting = restorer.rest()
    assert len(waiting) < len(b'"model":"big-v2"')
    if cut % len(EVENT) == 0:
        assert not waiting


def test_byte_by_byte():
    """One byte at a time: the joined answer is the same, and most bytes pass at once."""
    chunks = [bytes([byte]) for byte in EVENT + EVENT]
    given_out = changed(SSE, *chunks)
    assert b"".join(given_out) == restored(SSE, EVENT + EVENT)
    assert sum(not chunk for chunk in given_out) < 60


@given(
    tree=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(), below, max_size=3),
    ),
    behind=st.booleans(),
)
def test_only_the_model_changes(tree: object, *, behind: bool):
    """In any JSON answer the one value is another, wherever it stands."""
    document = {"a": tree, "model": "big-v2"} if behind else {"model": "big-v2", "a": tree}
    body = json.dumps(document).encode()
    assert json.loads(restored(JSON, body)) == {**document, "model": "big"}


def test_a_new_name_compiles_no_pattern(monkeypatch):
    """Clients choose names, so that what is compiled for one is work that they choose."""

    def refuse(*_):
        raise AssertionError("compiled")

    monkeypatch.setattr("re.compile", refuse)
    for name in ("a" * 512, "中" * 170, '"\\' * 256, "(.*)+"):
        changed = model_name_restorer.ModelNameRestorer(name, "told", events=False)
        body = json.dumps({"id": 1, "model": name, "x": name}).encode()
        assert json.loads(changed.pass_on(body, last=True)) == {"id": 1, "model": "told", "x": name}


def test_restorer_leaves_a_document_after_many_members():
    """An answer of keys without end costs bounded work, and what follows stays as it is."""
    keys = b"".join(b'"%d":[],' % at for at in range(20_000))
    body = b"{" + keys + b'"model":"big-v2"}'
    assert restored(JSON, body) == body
    few = b'{"a":[],"model":"big-v2"}'
    assert restored(SSE, few + b"\n" + body + b"\n" + few) == restored(
        SSE, few
    ) + b"\n" + body + b"\n" + restored(SSE, few)


def test_restorer_leaves_events_after_many_in_one_piece():
    """Lines without end in one piece cost bounded work, and the next piece is rewritten again."""
    event = b'data: {"model":"big-v2"}\n'
    renamed = event.replace(b"big-v2", b"big")
    limit = model_name_restorer.MAX_LINES
    pieces = changed(SSE, b"\n" * 100_000 + event * (limit + 7), event * 2)
    assert pieces == [b"\n" * 100_000 + renamed * limit + event * 7, renamed * 2]


class CountingBytes(bytes):
    """Bytes that count what is copied of them, and how often."""

    num_copied = num_copies = 0

    def __getitem__(self, place):
        copied = super().__getitem__(place)
        if isinstance(place, slice):
            CountingBytes.num_copied += len(copied)
            CountingBytes.num_copies += 1
        return copied


def test_work_on_an_answer_follows_its_size():
    """However many members stand before what is long, a piece is not copied for each of them."""
    piece = CountingBytes(b'{"usage":{}' + b',"a":1' * 5000 + b',"b":"' + b"x" * 500_000)
    restorer = model_name_restorer.for_response(JSON, "big-v2", "big")
    CountingBytes.num_copied = 0
    assert restorer.pass_on(piece, last=False) == piece
    assert CountingBytes.num_copied < 4 * len(piece)


@pytest.mark.parametrize("text", [rb"\"" * 10_000, rb"\\\"" * 10_000, rb"\\" * 9_999])
def test_a_text_with_escapes_is_one_step(text):
    """Instructions of the client stand before the model in vLLM's Responses API."""
    piece = CountingBytes(b'{"instructions":"' + text + b'","model":"big-v2"}')
    restorer = model_name_restorer.for_response(JSON, "big-v2", "big")
    CountingBytes.num_copies = 0
    assert restorer.pass_on(piece, last=True) == piece.replace(b"big-v2", b"big")
    assert CountingBytes.num_copies < 50


@pytest.mark.parametrize("name", ["big-v2", "x"])
@pytest.mark.parametrize("spaces", [0, 15, 16, 17])
def test_what_cannot_become_the_model_is_not_held_back(name, spaces):
    """Bytes are held back as long as more of them could complete the name, and no longer."""
    blanks = b" " * spaces
    written = b'{"a":{},"model"' + blanks + b":" + blanks + b'"' + name.encode()
    restorer = model_name_restorer.for_response(JSON, name, "big")
    is_held = spaces < 17
    assert restorer.pass_on(written, last=False) == (b'{"a":{},' if is_held else written)
    rest = restorer.pass_on(b'",' + b"x" * 100, last=False)
    expected = b'"model"' + blanks + b":" + blanks + b'"big",' if is_held else b'",'
    assert rest == expected + b"x" * 100
