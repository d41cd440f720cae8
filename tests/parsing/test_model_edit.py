import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.parsing import envelope, model_edit
from extproc.request import HttpRequest
from tests.parsing import builders


def edited(body, model="new", path=builders.CHAT, *, truncated=False, **headers):
    """The body after the edit; None where there is none."""
    raw = msgspec.structs.replace(builders.post(path, body, **headers), truncated=truncated)
    splice = model_edit.locate_model(raw, model)
    return None if splice is None else splice.apply(raw.body)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"model":"old"}', b'{"model":"new"}'),
        (b' {\n "model" \t: "old" , "a" : 1.0e2 } ', b' {\n "model" \t: "new" , "a" : 1.0e2 } '),
        (b'{"a": {"model": "x"}, "model": "old"}', b'{"a": {"model": "x"}, "model": "new"}'),
        (b'{"model": "old", "a": [{"model": "x"}]}', b'{"model": "new", "a": [{"model": "x"}]}'),
        (b'{"model": "1", "model": "2"}', b'{"model": "1", "model": "new"}'),
        (b'{"mod\\u0065l": "old"}', b'{"mod\\u0065l": "new"}'),
        (b'{"\\u006D\\u006fdel": "o\\"l\\\\d"}', b'{"\\u006D\\u006fdel": "new"}'),
        (b'{"model": "1", "\\u006dodel": "2"}', b'{"model": "1", "\\u006dodel": "new"}'),
        (b'{"x\\"model": "a", "model": ""}', b'{"x\\"model": "a", "model": "new"}'),
        (
            b'{"a": "model", "b": "{\\"model\\":", "model": "o"}',
            b'{"a": "model", "b": "{\\"model\\":", "model": "new"}',
        ),
        (b'{"Model": "x", "models": "y"}', b'{"model":"new","Model": "x", "models": "y"}'),
        (b"{}", b'{"model":"new"}'),
        (b"{ }", b'{ "model":"new"}'),
        (b'{"a": "\xff\\ud83d", "model": "old"}', b'{"a": "\xff\\ud83d", "model": "new"}'),
    ],
)
def test_only_the_value_is_replaced(body, wanted):
    """The last top-level `model` changes, whatever is escaped or spaced how; nothing else does."""
    assert edited(body) == wanted


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b'"model"',
        b"hello",
        b'{"model": 3}',
        b'{"model": null, "a": "b"}',
        b'{"model": "a", "model": ["b"]}',
    ],
)
def test_body_without_a_model_is_not_edited(body):
    """No object, or a `model` that is no string: the engine will say."""
    assert edited(body) is None


def test_the_name_is_written_as_json():
    """Quotes, backslashes and other scripts arrive as the name they are."""
    name = 'a"b\\c\n\u00e9\U0001f600'
    assert json.loads(edited(b'{"model": "old"}', name)) == {"model": name}


def test_a_cut_body_is_edited_where_the_name_is_complete():
    """BUFFERED_PARTIAL: before the closing quote of the name nothing is known, so nothing is done."""
    body = b'{"a": [{"b": 1}], "model": "old", "prompt": "x'
    value_end = body.index(b'"old"') + len(b'"old"')
    for size in range(len(body)):
        beginning = body[:size]
        wanted = beginning.replace(b'"old"', b'"new"') if size >= value_end else None
        assert edited(beginning, truncated=True) == wanted


def test_brackets_beyond_the_limit_end_the_search():
    """The time a made-up body takes is bounded."""
    for count, is_edited in ((100, True), (envelope.MAX_TOKENS, False)):
        body = b'{"a": [' + b"[]," * count + b'1], "mod\\u0065l": "old"}'
        assert (edited(body) is not None) is is_edited
    strings = b'{"a": [' + b'"]",' * envelope.MAX_TOKENS + b'1], "mod\\u0065l": "old"}'
    assert edited(strings) is not None


def test_nested_model_keys_are_ignored():
    """The value is found behind more nested keys of that name than are tried."""
    nested = b'{"model": "old", "tools": [' + b'{"model": "x"}, ' * 10 + b"{}]}"
    assert edited(nested) == nested.replace(b"old", b"new")
    same = b'{"model": "old", "tools": [' + b'{"model": "old"}, ' * 10 + b"{}]}"
    assert edited(same) == same.replace(b"old", b"new", 1)


def test_deep_and_unbalanced_bodies_end():
    """Nothing recurses, and a stray bracket ends the object."""
    assert edited(b'{"model": "old"}}}}') == b'{"model": "new"}}}}'
    assert edited(b'{"a": ' + b"[" * 1_000) is not None
    assert edited(b'{"a": ' + b"[" * 100_000) is None


FORM = (
    b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nfirst\r\n'
    b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nmodel\r\n'
    b"--B\r\nContent-Disposition: form-data; name=model\r\n\r\nold\r\n--B--\r\n"
)
AUDIO = "/v1/audio/transcriptions"


def test_a_form_is_edited_in_its_last_field():
    """Transcriptions: the value's bytes, unquoted."""
    result = edited(FORM, path=AUDIO, content_type="multipart/form-data; boundary=B")
    assert result == FORM.replace(b"\r\nold\r\n", b"\r\nnew\r\n")


def test_a_form_is_unchanged_where_the_name_would_break_it():
    """Line breaks in a name, a value that may go on, or no such field."""
    how = {"path": AUDIO, "content_type": "multipart/form-data; boundary=B"}
    assert edited(FORM, "a\r\nb", **how) is None
    assert edited(FORM[: FORM.index(b"ld\r\n")], truncated=True, **how) is None
    assert edited(b"--B\r\n\r\nx\r\n--B--", **how) is None


def test_grpc_bodies_are_unchanged():
    """The surface names no model."""
    assert edited(b'{"model": "old"}', content_type="application/grpc") is None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["model", "a"]) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.text(max_size=6), values, max_size=5),
    st.text(min_size=1),
    st.text(min_size=1),
    st.integers(0, 5),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")]),
    st.booleans(),
)
def test_only_the_model_differs_afterwards(fields, old, new, at, separators, ascii_only):
    """Of any JSON object: decoded, it equals the original with the other name."""
    items = [(key, value) for key, value in fields.items() if key != "model"]
    items.insert(at, ("model", old))
    body = json.dumps(dict(items), separators=separators, ensure_ascii=ascii_only).encode(
        "utf-8", "surrogatepass"
    )
    result = edited(body, new)
    assert json.loads(result.decode("utf-8", "surrogatepass")) == {**dict(items), "model": new}
    assert edited(result, old) == edited(body, old)


@given(st.binary(max_size=60) | st.text('{}[]":,\\ mode', max_size=60).map(str.encode))
def test_any_bytes_are_handled(body):
    """Total on garbage, cut or whole."""
    for truncated in (False, True):
        edited(body, truncated=truncated)


def test_the_raw_request_is_unchanged():
    """The request that was parsed and hashed is not touched."""
    raw = HttpRequest({":path": builders.CHAT}, b'{"model": "old"}')
    assert model_edit.locate_model(raw, "new") is not None
    assert raw.body == b'{"model": "old"}'
