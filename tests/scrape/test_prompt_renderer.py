"""Prompts of routed requests, mapped by what engines answer."""

import asyncio
import json
import tracemalloc
from array import array

import pytest

from extproc.decision import BodyEdit
from extproc.prefix_cache import blocks
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.prefix_cache.kv_events import BlockStored
from extproc.request import HttpRequest
from extproc.scrape.kv_event_subscriber import KvEventsSection
from extproc.scrape.prompt_renderer import _UnmappedPrompt
from tests.scrape.conftest import ScriptedServer, answer, serving
from tests.scrape.rendering_engines import (
    CAPTURES,
    CHAIN,
    IMAGE,
    RENDERED,
    TINY_CHUNKS,
    TOKENS,
    ZIPPED,
    decision,
    features,
    mapped,
    reply,
    running,
)
from tests.support.waiting import until


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
        ([reply({}, status="401 Unauthorized"), reply({"tokens": TOKENS})], {}, ["mapped"]),
        ([reply({}, status="401 Unauthorized")], {}, ["unsupported"]),
        ([reply({"tokens": [TOKENS]})], {"api": "completions"}, ["mapped"]),
        ([reply({"tokens": [TOKENS, TOKENS]})], {"api": "completions"}, ["unsupported"]),
        ([reply({"tokens": [[[1]]]})], {"api": "completions"}, ["failed"]),
        ([answer(b'{"tokens": [ [1], ')], {}, ["failed"]),
        ([reply({"tokens": []})], {}, ["failed"]),
        ([reply({}, status="403 Forbidden")], {}, ["unsupported"]),
        ([reply([RENDERED, RENDERED])], {"api": "completions"}, ["unsupported"]),
        ([reply(RENDERED | {"features": features("x")})], {"media": IMAGE}, ["mapped"]),
        ([reply(RENDERED | {"features": features("x" * 999)})], {"media": IMAGE}, ["unsupported"]),
        ([reply(RENDERED | {"features": features(None)})], {"media": IMAGE}, ["unsupported"]),
        ([reply(RENDERED | {"features": {"mm_hashes": 1}})], {"media": IMAGE}, ["unsupported"]),
        ([reply(RENDERED)], {"media": IMAGE}, ["unsupported"]),
        ([reply({}, status="500 Internal Server Error")], {}, ["failed"]),
        ([reply({"token_ids": [-1]})], {}, ["failed"]),
        ([reply({"token_ids": []})], {}, ["failed"]),
        ([answer(b"no json")], {}, ["failed"]),
        ([answer(b"[" * 100_000)], {}, ["failed"]),
        ([answer(b" " * 5_000_000)], {}, ["failed"]),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" * 40_000 + reply(RENDERED)], {}, ["failed"]),
        ([TINY_CHUNKS], {}, ["failed"]),
        (
            [answer(b'{"token_ids": [1], "features": {"mm_hashes": {"\xff": 1}}}')],
            {},
            ["failed"],
        ),
        (
            [reply(RENDERED | {"features": features("x" * 99_999)})],
            {"media": IMAGE},
            ["unsupported"],
        ),
        ([answer(b'{"token_ids": [1], "x": "\xff"}')], {}, ["mapped"]),
        ([answer(b"[]")], {"api": "completions"}, ["unsupported"]),
        ([reply(RENDERED | {"features": {"mm_hashes": {}}})], {}, ["mapped"]),
        ([reply(RENDERED | {"features": {"mm_hashes": None}})], {}, ["mapped"]),
        ([ZIPPED], {}, ["failed"]),
        ([reply(RENDERED)], {"body": b'{"cache_salt": "s"}'}, ["mapped"]),
        ([reply(RENDERED)], {"body": b'{"cache_salt": 1}'}, ["unsupported"]),
        ([reply(RENDERED)], {"api": "embeddings"}, []),
        ([reply(RENDERED)], {"body": b""}, []),
        ([reply(RENDERED)], {"chain": ()}, []),
    ],
)
async def test_each_answer_has_a_result(script, fields, expected):
    """A prompt is mapped, or counted as why not."""
    async with running(*script) as (server, prefixes, renderer):
        assert await mapped(server, renderer, **fields) == expected
        assert prefixes.prompts.covers(CHAIN) == (expected == ["mapped"])
        assert not renderer.num_unmapped


@pytest.mark.parametrize("status", ["302 Found", "307 Temporary Redirect"])
async def test_redirects_are_not_followed(status):
    """No engine makes extproc send requests to an address of its choice."""
    async with serving(ScriptedServer(reply(RENDERED))) as other:
        location = f"location: http://127.0.0.1:{other.port}/v1/chat/completions/render"
        async with running(answer(b"", status=status, fields=[location])) as (
            server,
            _,
            renderer,
        ):
            assert await mapped(server, renderer) == ["failed"]
            assert b"accept-encoding: identity\r\n" in server.requests[0].lower()
            assert not other.requests


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"token_ids": [%b1]}' % (b"1," * 1_000_000), id="tokens"),
        pytest.param(
            b'{"token_ids": [1], "features": {"mm_hashes": {"a": [%b1]}}}' % (b"[]," * 600_000),
            id="hashes",
        ),
        pytest.param(b"[%b{}]" % (b"{}," * 600_000), id="prompts"),
        pytest.param(b'{"tokens": [%b[]]}' % (b"[]," * 1_000_000), id="lists"),
        pytest.param(b'{"token_ids": [1], "more": [%b{}]}' % (b"{}," * 600_000), id="unknown"),
    ],
)
async def test_work_on_an_answer_is_bounded(body):
    """Nothing is built of an answer but its tokens, whatever an engine puts into it."""
    async with running() as (server, _, renderer):
        prompt = _UnmappedPrompt("e", "chat", b"", CHAIN, "", "", 192, 0)
        tracemalloc.start()
        renderer._map_answer(prompt, body)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 12 * len(body)
        assert not server.requests


@pytest.mark.parametrize(("num_tokens", "result"), [(262_144, "mapped"), (262_145, "failed")])
async def test_tokens_of_an_answer_are_counted_before_they_are_read(num_tokens, result):
    """They may be a byte each."""
    async with running() as (_, _, renderer):
        prompt = _UnmappedPrompt("e", "chat", b"", CHAIN, "", "", 192, 0)
        body = b'{"token_ids":[1%b]}' % (b",1" * (num_tokens - 1))
        assert renderer._map_answer(prompt, body) == result


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
async def test_answers_of_real_engines_are_mapped(path):
    """Of both paths, for chats and completions."""
    samples = json.loads(path.read_text())["samples"]
    answers = [sample[name] for sample in samples for name in ("render", "tokenize")]
    async with running(*map(reply, answers)) as (server, _, renderer):
        for number in range(len(answers)):
            api = "completions" if number < 2 else "chat"
            assert await mapped(server, renderer, api=api, chain=[number]) == ["mapped"]


async def test_a_prompt_is_rendered_once_with_the_bytes_of_the_client():
    """As the engine got them, with another model name where that was replaced."""
    async with running(reply(RENDERED)) as (server, _, renderer):
        edit = BodyEdit(1, 4, b'"b"')
        assert await mapped(server, renderer, edit=edit) == ["mapped"]
        assert await mapped(server, renderer) == []
        assert len(server.requests) == 1
        assert server.requests[0].startswith(b"POST /v1/chat/completions/render ")
        assert b"content-length: 8\r\n" in server.requests[0].lower()


def test_images_are_rendered_without_their_pixels():
    """An engine answers with megabytes of an image otherwise; nothing changes in a prompt without any."""

    async def bodies():
        script = reply(RENDERED | {"features": features("x")}), reply(RENDERED)
        async with running(*script) as (server, _, renderer):
            body = b'{"model": "m", "mm_payload": "tensors"} \n'
            await mapped(server, renderer, media=IMAGE, body=body)
            await mapped(server, renderer, chain=[13, 14])
            await mapped(server, renderer, chain=[15, 16])
            # The server reads heads alone, so a body precedes the next one.
            return [request.partition(b"POST ")[0] for request in server.requests[1:]]

    images, text = asyncio.run(bodies())
    # Of a field that is there twice, the last one counts.
    assert json.loads(images) == {"model": "m", "mm_payload": "none", "return_mm_kwargs": False}
    assert text == b'{"a": 1}'


def test_longer_bodies_are_rendered_with_images_than_without():
    """Of a few megabytes, and no more."""

    async def results():
        answers = reply(RENDERED | {"features": features("x")})
        async with running(answers) as (server, _, renderer):
            for size, media in ((2, ()), (2, IMAGE), (5, IMAGE)):
                body = json.dumps({"image": "x" * (size << 20)}).encode()
                chain = [size, len(media)]
                yield await mapped(server, renderer, chain=chain, media=media, body=body)

    async def listed():
        return [result async for result in results()]

    assert asyncio.run(listed()) == [[], ["mapped"], []]


def test_an_answer_with_pixels_does_not_stop_the_others():
    """An engine that cannot leave them out is asked for texts on, and for that prompt once."""
    pixels = b"HTTP/1.1 200 OK\r\ncontent-length: 6553403\r\n\r\n"

    async def results():
        async with running(pixels, reply(RENDERED)) as (server, _, renderer):
            for chain, media in (([1, 2], IMAGE), ([1, 2, 3], IMAGE), ([4, 5], ())):
                yield await mapped(server, renderer, chain=chain, media=media)
            yield len(server.requests)

    async def listed():
        return [result async for result in results()]

    assert asyncio.run(listed()) == [["unsupported"], ["unsupported"], ["mapped"], 2]


async def test_a_prompt_of_too_many_blocks_is_rendered_once(monkeypatch):
    """Nor is what goes on from it; it counts as unsupported each time."""
    monkeypatch.setattr("extproc.prefix_cache.exact_prefixes._MAX_PROMPT_BLOCKS", 2)
    async with running(reply(RENDERED)) as (server, prefixes, renderer):
        for chain in (CHAIN, CHAIN, [*CHAIN, 13]):
            assert await mapped(server, renderer, chain=chain) == ["unsupported"]
        assert renderer.results["unsupported"] == 3
        assert len(server.requests) == 1
        assert not prefixes.prompts.covers(CHAIN)


async def test_a_prompt_of_too_many_blocks_is_forgotten_in_time(monkeypatch):
    """As many are remembered as have a place."""
    monkeypatch.setattr("extproc.prefix_cache.exact_prefixes._MAX_PROMPT_BLOCKS", 2)
    monkeypatch.setattr("extproc.scrape.prompt_renderer._MAX_TOO_LONG", 1)
    async with running(reply(RENDERED)) as (server, _, renderer):
        for number in (1, 2, 1):
            await mapped(server, renderer, chain=[number])
        assert len(server.requests) == 3


async def test_the_first_prompts_wait_for_the_size_of_blocks():
    """It comes with the events of the prompt itself; without any event nothing is rendered."""
    prefixes = ExactPrefixes(blocks.DEFAULT, max_blocks=100)
    engine = prefixes.open(("e", 0), 0)
    async with running(reply(RENDERED), prefixes=prefixes) as (server, _, renderer):
        assert await mapped(server, renderer) == []
        prefixes.index.set_live(engine, is_live=True)
        renderer.note(decision(server), HttpRequest({}, b"{}"))
        await asyncio.sleep(0)
        assert renderer.num_unmapped
        assert not server.requests
        event = BlockStored([1], None, array("I", range(16)).tobytes(), 16)
        prefixes.index.apply(engine, event)
        await until(lambda: not renderer.num_unmapped)
        assert renderer.results["mapped"] == 1


async def test_prompts_beyond_the_queue_are_dropped():
    """They are counted, and nothing waits for them."""
    async with running(None) as (server, _, renderer):
        for number in range(400):
            renderer.note(decision(server, chain=[number]), HttpRequest({}, b"{}"))
        assert renderer.results["dropped"] == 400 - 256


async def test_an_engine_that_hangs_has_its_share_of_the_renderer():
    """Prompts of others are mapped meanwhile, and its own end with it."""
    async with (
        running(None) as (hung, _, renderer),
        serving(ScriptedServer(reply(RENDERED))) as other,
    ):
        for number in range(20):
            renderer.note(decision(hung, chain=[100 + number]), HttpRequest({}, b"{}"))
        renderer.note(decision(other, chain=CHAIN), HttpRequest({}, b"{}"))
        await until(lambda: renderer.results["mapped"] and len(hung.requests) >= 2)
        assert renderer.num_unmapped == 20
        assert len(hung.requests) == 2
        for writer in hung.writers:
            writer.transport.abort()
        await until(lambda: not renderer.num_unmapped)
        assert renderer.results["failed"] == 20


#: Settings of a renderer for which requests wait.
PATIENT = KvEventsSection(render_budget_ms=600_000.0)


async def test_a_request_waits_until_its_prompt_is_mapped():
    """Others with the same prompt wait for the same answer; a mapped one does not wait."""
    async with running(reply(RENDERED), settings=PATIENT) as (server, prefixes, renderer):
        raw = HttpRequest({}, b'{"a": 1}')
        waits = [renderer.render_ahead(decision(server), raw) for _ in range(3)]
        waits.pop().cancel()  # its client left
        async with asyncio.timeout(300):
            await asyncio.gather(*waits)
        assert prefixes.prompts.covers(CHAIN)
        assert not prefixes.prompts.find(CHAIN)[0].sent
        assert renderer.render_ahead(decision(server), raw) is None
        assert len(server.requests) == 1
        assert renderer.waits == {"mapped": 2, "failed": 0, "expired": 0}
        assert renderer.num_waiting_bytes == 0


async def test_a_prompt_that_cannot_be_mapped_ends_the_wait():
    """And the next one does not wait while the engine rests."""
    script = reply({}, status="500 Internal Server Error")
    async with running(script, settings=PATIENT) as (server, _, renderer):
        raw = HttpRequest({}, b'{"a": 1}')
        async with asyncio.timeout(300):
            await renderer.render_ahead(decision(server), raw)
        assert renderer.waits["failed"] == 1
        assert renderer.render_ahead(decision(server), raw) is None


async def test_a_wait_ends_with_its_budget():
    """The prompt is mapped behind it, as sent to where its request was routed meanwhile."""
    settings = KvEventsSection(render_budget_ms=10.0)
    async with running(None, settings=settings) as (server, _, renderer):
        raw = HttpRequest({}, b'{"a": 1}')
        async with asyncio.timeout(300):
            await renderer.render_ahead(decision(server), raw)
        renderer.note(decision(server), raw)
        assert renderer.waits == {"mapped": 0, "failed": 0, "expired": 1}
        assert renderer.num_unmapped == 1
        assert renderer.num_waiting_bytes == 0


async def test_no_request_waits_without_budget_or_blocks_or_place():
    """Waiting prompts are bounded by bytes and number."""
    empty = ExactPrefixes(blocks.DEFAULT, max_blocks=100)
    async with running(None, settings=PATIENT, prefixes=empty) as (server, _, renderer):
        assert renderer.render_ahead(decision(server), HttpRequest({}, b"{}")) is None
    async with running(None) as (server, _, renderer):
        assert renderer.render_ahead(decision(server), HttpRequest({}, b"{}")) is None
    async with running(None, settings=PATIENT) as (server, _, renderer):
        raw = HttpRequest({}, b" " * 1_000_000)
        waits = [renderer.render_ahead(decision(server), raw) for _ in range(20)]
        assert [wait is None for wait in waits] == [False] * 16 + [True] * 4
    async with running(None, settings=PATIENT) as (server, _, renderer):
        raw = HttpRequest({}, b"{}")
        waits = [renderer.render_ahead(decision(server), raw) for _ in range(300)]
        assert sum(wait is None for wait in waits) == 300 - 256
