import pytest

from extproc.request import HttpRequest
from extproc.scrape.kv_event_subscriber import KvEventsSection
from tests.scrape.conftest import ScriptedServer, answer, serving
from tests.scrape.rendering_engines import (
    CHAIN,
    RENDERED,
    TOKENS,
    decision,
    mapped,
    reply,
    running,
)
from tests.support.waiting import until


async def test_an_engine_that_fails_is_left_alone_for_a_while():
    """Prompts for it are not mapped meanwhile."""
    async with running(reply({}, status="500 Internal Server Error")) as (server, _, renderer):
        assert await mapped(server, renderer) == ["failed"]
        assert await mapped(server, renderer) == []


async def test_an_engine_that_keeps_failing_is_left_alone_longer():
    """Twice as long each time, until an answer comes."""
    failure = reply({}, status="500 Internal Server Error")
    now = 0.0
    async with running(failure, failure, reply(RENDERED), failure) as (server, _, renderer):
        renderer._clock = lambda: now
        pauses_s = []
        for number in range(4):
            await mapped(server, renderer, chain=[number])
            pauses_s.append(renderer._engine(f"127.0.0.1:{server.port}").paused_until - now)
            now += 1000.0
        assert pauses_s[:2] == [5.0, 10.0]
        assert pauses_s[2] < 0.0
        assert pauses_s[3] == 5.0


async def test_a_prompt_that_is_refused_does_not_stop_the_others():
    """The engine answers the next one: a client cannot end the mapping by prompts that are too long."""
    script = (reply({}, status="400 Bad Request"), reply(RENDERED))
    async with running(*script) as (server, _, renderer):
        assert await mapped(server, renderer) == ["failed"]
        assert await mapped(server, renderer) == ["mapped"]


async def test_an_unknown_model_does_not_stop_the_others():
    """An engine that has rendered has a path: 404 at all is about the model that a client names."""
    missing = [reply({}, status="404 Not Found")] * 4
    async with running(reply(RENDERED), *missing, reply(RENDERED)) as site:
        server, _, renderer = site
        assert await mapped(server, renderer) == ["mapped"]
        assert await mapped(server, renderer, chain=[21, 22]) == ["failed"]
        assert await mapped(server, renderer, chain=[31, 32]) == ["failed"]
        assert await mapped(server, renderer, chain=[41, 42]) == ["mapped"]
        assert b" /v1/chat/completions/render " in server.requests[-1]


async def test_an_engine_that_lost_its_path_is_asked_at_the_other():
    """It was started again with other options while no prompt was rendered."""
    script = (reply(RENDERED), reply({}, status="404 Not Found"), reply({"tokens": TOKENS}))
    async with running(*script) as (server, _, renderer):
        assert await mapped(server, renderer) == ["mapped"]
        assert await mapped(server, renderer, chain=[21, 22]) == ["mapped"]
        assert await mapped(server, renderer, chain=[31, 32]) == ["mapped"]
        assert sum(b" /tokenize " in head for head in server.requests) == 2


async def test_the_first_prompts_of_an_engine_find_its_path_together():
    """Two are rendered at a time, and both learn that the engine lacks the first path."""
    missing = [reply({}, status="404 Not Found")] * 2
    async with running(*missing, reply({"tokens": TOKENS})) as (server, _, renderer):
        for chain in ([21, 22], [31, 32]):
            renderer.note(decision(server, chain=chain), HttpRequest({}, b'{"a": 1}'))
        await until(lambda: not renderer.num_unmapped)
        assert renderer.results["mapped"] == 2


async def test_an_engine_that_failed_is_asked_at_every_path_again():
    """It may have been started again without the path."""
    clock = 0.0
    script = (
        reply(RENDERED),
        reply({}, status="500 Internal Server Error"),
        reply({}, status="404 Not Found"),
        reply({"tokens": TOKENS}),
    )
    async with running(*script) as (server, _, renderer):
        renderer._clock = lambda: clock
        assert await mapped(server, renderer) == ["mapped"]
        assert await mapped(server, renderer, chain=[21, 22]) == ["failed"]
        clock += 6.0
        assert await mapped(server, renderer, chain=[31, 32]) == ["mapped"]


async def test_a_server_for_rendering_without_a_model_goes_on():
    """It may have the base model only: prompts of adapters go to engines, and others to it."""
    script = (reply(RENDERED), reply({}, status="404 Not Found"), reply(RENDERED))
    async with serving(ScriptedServer(*script)) as renders:
        settings = KvEventsSection(render_url=f"http://127.0.0.1:{renders.port}")
        async with running(reply(RENDERED), settings=settings) as (server, _, renderer):
            for number in range(3):
                chain = [10 * number + 21, 10 * number + 22]
                assert await mapped(server, renderer, chain=chain) == ["mapped"]
            assert (len(renders.requests), len(server.requests)) == (3, 1)


async def test_a_server_for_rendering_is_asked_before_the_engine():
    """With the name of its model, which replaces an adapter of the request."""
    async with serving(ScriptedServer(reply(RENDERED))) as renders:
        settings = KvEventsSection(
            render_url=f"http://127.0.0.1:{renders.port}", render_model="base"
        )
        async with running(settings=settings) as (server, prefixes, renderer):
            body = b'{"model": "ad", "a": 1}'
            assert await mapped(server, renderer, body=body) == ["mapped"]
            assert prefixes.prompts.covers(CHAIN)
            assert not server.requests
            edited = b'{"model": "base", "a": 1}'
            assert b"content-length: %d\r\n" % len(edited) in renders.requests[0].lower()


@pytest.mark.parametrize(
    "failure",
    [
        reply({}, status="404 Not Found"),
        reply({}, status="500 Internal Server Error"),
        answer(b"no json"),
    ],
    ids=["404", "500", "malformed"],
)
async def test_the_engine_is_asked_where_the_server_fails(failure):
    """The server rests meanwhile."""
    async with serving(ScriptedServer(failure)) as renders:
        settings = KvEventsSection(render_url=f"http://127.0.0.1:{renders.port}")
        script = (reply(RENDERED), reply(RENDERED))
        async with running(*script, settings=settings) as (server, _, renderer):
            assert await mapped(server, renderer) == ["mapped"]
            assert await mapped(server, renderer, chain=[21, 22]) == ["mapped"]
            assert (len(renders.requests), len(server.requests)) == (1, 2)
