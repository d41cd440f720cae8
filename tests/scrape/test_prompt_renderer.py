"""Prompts of routed requests, mapped by what engines answer."""

import asyncio
import contextlib
import json
from array import array

import pytest

from extproc.decision import BodyEdit, Decision
from extproc.endpoint import Endpoint
from extproc.prefix_cache import blocks
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.prefix_cache.kv_events import BlockStored
from extproc.request import HttpRequest, InferenceRequest
from extproc.scrape.prompt_renderer import PromptRenderer
from extproc.supervision import Supervisor
from tests.scrape.conftest import Server, answer, serving

CHAIN = [11, 12]
TOKENS = list(range(48))
RENDERED = {"token_ids": TOKENS, "features": None}


def reply(document, **fields):
    return answer(json.dumps(document).encode(), **fields)


def exact():
    """A pool whose engines have blocks of 16 tokens."""
    prefixes = ExactPrefixes(blocks.DEFAULT, max_blocks=100)
    engine = prefixes.open(("e", 0), 0)
    event = BlockStored([1], None, array("I", range(16)).tobytes(), 16)
    prefixes.index.apply(engine, event)
    return prefixes


@contextlib.asynccontextmanager
async def running(*script):
    """A renderer beside an engine that answers by a script."""
    async with serving(Server(*script)) as server:
        clock = asyncio.get_running_loop().time
        prefixes = exact()
        renderer = PromptRenderer(
            prefixes,
            adapters=frozenset,
            scheme="http",
            tls=None,
            clock=clock,
            supervisor=Supervisor(),
        )
        task = asyncio.ensure_future(renderer.run())
        try:
            yield server, prefixes, renderer
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def decision(server, *, api="chat", chain=CHAIN, edit=None):
    return Decision(
        request=InferenceRequest(api=api, model="m", prompt_bytes=192),
        endpoints=(Endpoint(f"127.0.0.1:{server.port}"),),
        block_hashes=chain,
        body_edit=edit,
    )


async def mapped(server, renderer, *, body=b'{"a": 1}', **fields):
    """Note a request, and wait for the result."""
    before = dict(renderer.results)
    renderer.note(decision(server, **fields), HttpRequest({}, body))
    async with asyncio.timeout(300):
        while renderer.num_unmapped:
            await asyncio.sleep(0.001)
    return [name for name, count in renderer.results.items() if count != before[name]]


@pytest.mark.parametrize(
    ("script", "fields", "expected"),
    [
        ([reply(RENDERED)], {}, ["mapped"]),
        ([reply([RENDERED])], {"api": "completions"}, ["mapped"]),
        (
            [reply({}, status="404 Not Found"), reply({"tokens": TOKENS, "count": 48})],
            {},
            ["mapped"],
        ),
        ([reply({}, status="403 Forbidden")], {}, ["unsupported"]),
        ([reply([RENDERED, RENDERED])], {"api": "completions"}, ["unsupported"]),
        ([reply(RENDERED | {"features": {"mm_hashes": {"image": ["x"]}}})], {}, ["unsupported"]),
        ([reply({}, status="500 Internal Server Error")], {}, ["failed"]),
        ([reply({"token_ids": [-1]})], {}, ["failed"]),
        ([reply({"token_ids": []})], {}, ["failed"]),
        ([answer(b"no json")], {}, ["failed"]),
        ([answer(b"[" * 100_000)], {}, ["failed"]),
        ([answer(b" " * 5_000_000)], {}, ["failed"]),
        ([reply(RENDERED)], {"body": b'{"cache_salt": "s"}'}, ["unsupported"]),
        ([reply(RENDERED)], {"api": "embeddings"}, []),
        ([reply(RENDERED)], {"body": b""}, []),
        ([reply(RENDERED)], {"chain": ()}, []),
    ],
)
def test_each_answer_has_a_result(script, fields, expected):
    """A prompt is mapped, or counted as why not."""

    async def test():
        async with running(*script) as (server, prefixes, renderer):
            assert await mapped(server, renderer, **fields) == expected
            assert prefixes.prompts.covers(CHAIN) == (expected == ["mapped"])
            assert not renderer.num_unmapped

    asyncio.run(test())


def test_a_prompt_is_rendered_once_with_the_bytes_of_the_client():
    """As the engine got them, with another model name where that was replaced."""

    async def test():
        async with running(reply(RENDERED)) as (server, _, renderer):
            edit = BodyEdit(1, 4, b'"b"')
            assert await mapped(server, renderer, edit=edit) == ["mapped"]
            assert await mapped(server, renderer) == []
            assert len(server.requests) == 1
            assert server.requests[0].startswith(b"POST /v1/chat/completions/render ")
            assert b"content-length: 8\r\n" in server.requests[0].lower()

    asyncio.run(test())


def test_an_engine_that_fails_is_left_alone_for_a_while():
    """Prompts for it are not mapped meanwhile."""

    async def test():
        async with running(reply({}, status="500 Internal Server Error")) as (server, _, renderer):
            assert await mapped(server, renderer) == ["failed"]
            assert await mapped(server, renderer) == []

    asyncio.run(test())


def test_prompts_beyond_the_queue_are_dropped():
    """They are counted, and nothing waits for them."""

    async def test():
        async with running(None) as (server, _, renderer):
            for number in range(400):
                renderer.note(decision(server, chain=[number]), HttpRequest({}, b"{}"))
            assert renderer.results["dropped"] == 400 - 256

    asyncio.run(test())
