import pytest

from extproc.endpoint import Endpoint
from extproc.parsing import envelope
from extproc.request import MAX_ID_BYTES
from extproc.scheduling.session_affinity import EncodedEndpointHeader, token
from tests.parsing import builders
from tests.parsing.builders import CHAT

ORDER = [
    {"prompt_cache_key": "s"},
    {"conversation": "s"},
    {"metadata": {"session_id": "s"}},
    "header",
    {"user": "s"},
    {"metadata": {"user_id": "s"}},
    {"safety_identifier": "s"},
    {"previous_response_id": "s"},
]


def ask(*sources):
    fields, headers = {}, {}
    for rank, source in enumerate(sources):
        if source == "header":
            headers["x_session_id"] = f"s{rank}"
            continue
        for name, value in source.items():
            if isinstance(value, dict):
                inner = dict.fromkeys(value, f"s{rank}")
                fields.setdefault(name, {}).update(inner)
            else:
                fields[name] = f"s{rank}"
    body = {"model": "m", "messages": [builders.user("hi")], **fields}
    return builders.parsed(CHAT, body, **headers).session


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_order(first):
    """Each source of the table gives way to those before it and overrules those behind it."""
    assert ask(*ORDER[first:]) == "s0"


@pytest.mark.parametrize("name", envelope.SESSION_HEADERS)
def test_headers(name):
    """Every header of the list is a hint, with and without a body."""
    assert builders.parsed("/v1/models", b"x", **{name: "s"}).session == "s"
    body = {"model": "m", "messages": [builders.user("hi")]}
    assert builders.parsed(CHAT, body, **{name: "s"}).session == "s"


def test_an_endpoint_token_is_no_session():
    """All clients of an endpoint send the same token, so it tells no conversations apart."""
    header = EncodedEndpointHeader().header
    value = token(Endpoint("10.0.0.1:8000"))
    assert builders.parsed("/v1/models", b"x", **{header: value}).session == ""
    body = {"model": "m", "messages": [builders.user("hi")]}
    assert builders.parsed(CHAT, body, **{header: value}).session == ""


def test_conversation_object():
    """The Responses API names a conversation by string or by object."""
    body = {"model": "m", "input": "hi", "conversation": {"id": "c1"}}
    assert builders.parsed("/v1/responses", body).session == "c1"


@pytest.mark.parametrize("hint", [None, 5, "", [], {}, {"id": 7}])
def test_hints_of_other_types(hint):
    """A value that is no non-empty string is no hint."""
    body = {"model": "m", "input": "hi", "conversation": hint, "prompt_cache_key": hint}
    assert builders.parsed("/v1/responses", body).session == ""


def test_long_hints_are_shortened():
    """A hint is a key in a table, so its length is bounded."""
    body = {"model": "m", "input": "hi", "prompt_cache_key": "k" * 10_000}
    assert len(builders.parsed("/v1/responses", body).session.encode()) <= MAX_ID_BYTES
