"""Content of a request that is queued."""

from __future__ import annotations

import json

import msgspec
import pytest

from extproc.endpoint import Load
from extproc.request import HttpRequest
from tests.support.pool_fixture import PoolFixture

HEADERS = {":path": "/v1/chat/completions", ":method": "POST"}
#: Endpoints that are all equal, so that the opening of the conversation decides.
ALIKE = {
    f"10.0.0.{n}:8000": Load(at=100.0, waiting=0.0, running=0.0, kv_usage=0.0) for n in range(8)
}


def chat(text, **fields):
    """A chat that begins with a text."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return HttpRequest(HEADERS, json.dumps(body).encode())


@pytest.mark.parametrize("strategy", ["adaptive", "prefix-hash"])
def test_a_queued_request_drops_its_prompt_and_keeps_its_endpoint(strategy):
    """The prompt is as large as the body; where the opening decides, it is read out of the body."""
    pool_fixture = PoolFixture(ALIKE, profile=strategy)
    went = set()
    for n in range(40):
        prepared = pool_fixture.director.preparer.prepare(chat(f"{n} is a number " * 20))
        resting = prepared.without_prompt()
        assert resting.request.prompt == resting.parsed.prompt == b""
        assert resting.with_prompt() == prepared.request
        assert (resting.chain, resting.raw) == (prepared.chain, prepared.raw)
        direct, waited = (
            pool_fixture.director.decide(candidate, pool_fixture.now)
            for candidate in (prepared, resting)
        )
        assert direct.endpoints == waited.endpoints
        went.add(waited.endpoints[0].address)
    assert len(went) > 4


def test_a_rewritten_model_is_kept_when_the_prompt_is_read_again():
    """The prompt alone comes out of the body."""
    pool_fixture = PoolFixture(ALIKE)
    prepared = pool_fixture.director.preparer.prepare(chat("a"))
    renamed = msgspec.structs.replace(prepared.request, model="other")
    resting = msgspec.structs.replace(prepared, request=renamed).without_prompt()
    assert resting.with_prompt() == renamed
    assert resting.parsed == msgspec.structs.replace(prepared.request, prompt=b"")


def test_a_prompt_that_is_not_in_the_body_is_kept():
    """A request that was parsed elsewhere may have been prepared with another prompt."""
    pool_fixture = PoolFixture(ALIKE)
    raw = chat("a")
    prepared = pool_fixture.director.preparer.prepare_parsed(
        pool_fixture.director.preparer.prepare(raw).request, raw
    )
    assert prepared.without_prompt() is prepared
    assert prepared.with_prompt() is prepared.request


def test_no_prompt_is_hashed_where_no_plugin_reads_hashes():
    """A chain costs time in proportion to the prompt."""
    raw = chat("a number " * 1000)
    assert PoolFixture(ALIKE, profile="least-request").director.preparer.prepare(raw).chain == ()
    assert len(PoolFixture(ALIKE, profile="balanced").director.preparer.prepare(raw).chain) > 0
