"""A body that was read in another process: everything reads it as one that was read here."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import hostile_bodies
from extproc.parsing import envelope, model_edit, surfaces
from extproc.request import HttpRequest, InferenceRequest
from extproc.server import parser_worker
from tests.parsing import builders
from tests.parsing.test_first_user_message import pieces
from tests.parsing.test_properties import METHODS, PATHS, bodies
from tests.support.seeded import examples

LIMIT = 4 << 20


def preparse(raw, *, max_prompt_bytes=LIMIT):
    """A request as it comes back from another process."""
    job = parser_worker.describe_job(raw, max_prompt_bytes=max_prompt_bytes)
    job = msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=parser_worker.ParseJob)
    result = msgspec.msgpack.encode(parser_worker.parse_body(job, raw.body))
    read = surfaces.attach(raw, msgspec.msgpack.decode(result, type=surfaces.ParseResult))
    assert type(read) is surfaces.PreparsedRequest
    assert (read.headers, read.body, read.subset) == (raw.headers, raw.body, raw.subset)
    return read


def check(raw):
    """The worker and this process read a body alike."""
    read = preparse(raw)
    outcome = surfaces.parse(raw)
    assert surfaces.parse(read) == outcome
    for model in ("new", 'q"\n'):
        assert model_edit.locate_model(read, model) == model_edit.locate_model(raw, model)
    if not isinstance(outcome, InferenceRequest) and outcome == envelope.NO_MODEL:
        supplied = surfaces.parse_supplied(raw, "other")
        result = surfaces.parse_supplied(read, "other")
        assert result == (supplied if isinstance(supplied, InferenceRequest) else None)


@pytest.mark.parametrize("body", [b"{", b"\x00\xff", b'{"model":"m","prompt":"x"}'])
def test_parsing_the_headers_leaves_the_body_unread(body):
    """No body is refused, and none names a model, which may not be put into it either."""
    headers = {":path": "/v1/completions", "content-encoding": "gzip", "x-session-id": "s"}
    raw = surfaces.parse_headers(HttpRequest(headers, body, subset=("10.0.0.1",)))
    assert (raw.headers, raw.body, raw.subset) == (headers, body, ("10.0.0.1",))
    assert surfaces.parse(raw) == InferenceRequest("opaque", session="s", subset=("10.0.0.1",))
    assert model_edit.locate_model(raw, "other") is None
    named = surfaces.parse_headers(HttpRequest({envelope.EPP_MODEL: "x" * 5000}, body))
    assert surfaces.parse(named) is surfaces.LONG_NAME


@settings(max_examples=examples(100), deadline=None)
@given(PATHS, METHODS, bodies, st.booleans(), st.booleans())
def test_any_json_gives_the_same_request(path, method, body, truncated, with_model):
    """Fields of any type on any path give the same request, refusal and place of the model."""
    headers = {":method": method, ":path": path, "x-session-id": "s"}
    written = json.dumps({**body, "model": "m"} if with_model else body).encode()
    check(HttpRequest(headers, written, truncated, ("10.0.0.1",)))


@settings(max_examples=examples(100), deadline=None)
@given(PATHS, st.binary(max_size=200), st.booleans())
def test_any_bytes_give_the_same_result(path, body, truncated):
    """Bytes that are no JSON, too."""
    check(HttpRequest({":path": path, "content-type": "multipart/x; boundary=b"}, body, truncated))


_HOSTILE = list(hostile_bodies.bodies(20_000))


@pytest.mark.parametrize(("name", "path", "body"), _HOSTILE, ids=[name for name, *_ in _HOSTILE])
def test_hostile_bodies_give_the_same_result(name, path, body):
    """Every body that was made to be slow."""
    headers = {":path": path, ":method": "POST", "content-type": "multipart/x; boundary=b"}
    check(HttpRequest(headers, body))


def test_a_form_gives_the_same_request():
    """The model of a form has another place than that of JSON, and no line breaks."""
    part = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n'
    check(
        builders.post(
            "/v1/audio/transcriptions", part, content_type="multipart/form-data; boundary=b"
        )
    )


def test_an_encoded_body_gives_the_same_rejection():
    """Its status is not that of a malformed body."""
    check(builders.post(builders.CHAT, b"\x1f\x8b", content_encoding="gzip"))


def test_a_long_prompt_is_cut_where_hashing_ends():
    """And all of it where the conversation opens behind that."""
    near = builders.post(builders.CHAT, {"model": "m", "messages": [builders.user("x" * 9000)]})
    assert len(preparse(near, max_prompt_bytes=1000).outcome.prompt) > 1000
    near = builders.post(builders.CHAT, {"model": "m", "messages": [builders.user("x" * 90_000)]})
    read = preparse(near, max_prompt_bytes=40_000)
    assert read.outcome.prompt == surfaces.parse(near).prompt[:40_000]
    assert read.outcome.prompt_bytes == surfaces.parse(near).prompt_bytes
    system = {"role": "system", "content": "s" * 50_000}
    far = builders.post(builders.CHAT, {"model": "m", "messages": [system, builders.user("x")]})
    assert preparse(far, max_prompt_bytes=40_000).outcome == surfaces.parse(far)


@given(
    prompt=st.lists(pieces, max_size=12).map(b"".join),
    api=st.sampled_from(["chat", "completions", "messages"]),
)
def test_a_queued_request_keeps_its_first_user_message(prompt, api):
    """Whatever the prompt is, what is left of it while it waits is short and opens alike."""
    request = InferenceRequest(api=api, prompt=prompt)
    raw = surfaces.attach(HttpRequest({}), surfaces.ParseResult(request, None, None, None))
    rested = surfaces.parse(surfaces.reduce_preparsed(raw))
    assert surfaces.first_user_message(rested) == surfaces.first_user_message(request)
    assert len(rested.prompt) <= 5 * surfaces.USER_MESSAGE_BYTES
