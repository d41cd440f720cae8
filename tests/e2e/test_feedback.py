"""The buffered profile: usage is read from answers, and streams are not held back for it."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from extproc.demo import stack
from tests.e2e import backend, http1, http2, installation

SELECTION = "test-epp-endpoint-selection"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}


@pytest.fixture(scope="module")
def engine(live):
    with live.holding(stack.stack()) as children:
        _, address = live.run(children.engine("--speed", "1000"))
        yield address


@pytest.fixture(scope="module")
def place(live, served, engine):
    with live.holding(
        installation.installed(
            engine,
            served.address,
            template="original-dst-buffered.yaml",
            change=installation.keep_selection,
            arguments=["--conformance-testing", "true"],
        )
    ) as item:
        yield item


async def ask(fixture, to, body, **how):
    return await http1.ask(
        fixture.port,
        "/v1/chat/completions",
        json.dumps(body).encode(),
        headers=[(SELECTION, to)],
        **how,
    )


async def used(fixture):
    """Tokens reported so far, by kind."""
    result = await fixture.metrics()
    return {
        kind: sum(
            tokens
            for name, tokens in result.items()
            if name.startswith(f'extproc_usage_tokens_total{{kind="{kind}",')
        )
        for kind in ("prompt", "completion", "cached")
    }


async def test_102_usage_of_whole_answers(place, engine):
    """Usage in an unstreamed answer is counted, and the answer is unchanged."""
    before = await used(place)
    answer = await ask(place, engine, CHAT)
    result = answer.json()["usage"]
    await place.settled()
    after = await used(place)
    assert result["completion_tokens"] == 20
    assert after["completion"] - before["completion"] == result["completion_tokens"]
    assert after["prompt"] - before["prompt"] == result["prompt_tokens"]


async def test_092_streams_are_not_held_back(place, served):
    """The first event of a stream is with the client before the second exists."""
    observed = asyncio.Event()
    served.plays["/v1/chat/completions"] = backend.two_events(observed)
    try:
        async with http1.calling(place.port) as call:
            body = json.dumps(CHAT | {"stream": True}).encode()
            length = ("content-length", str(len(body)))
            await call.start("POST", "/v1/chat/completions", [(SELECTION, served.address), length])
            await call.send(body)
            await call.begun()
            assert await call.body.piece() == b"data: 1\n\n"
            observed.set()
            assert await call.body.rest() == b"data: 2\n\n"
    finally:
        served.plays.clear()


async def test_102_streams_of_the_engine(place, engine):
    """A stream of a simulated engine passes with its usage event, and is not asked for."""
    before = await used(place)
    events = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await ask(place, engine, CHAT | events)
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert b'"completion_tokens":20' in answer.body.replace(b" ", b"")
    await place.settled()
    assert await used(place) == before


@pytest.mark.parametrize("size", [1_000, 262_144, 262_145, 3_000_000])
async def test_097_answers_of_any_size(place, served, size):
    """Answers around the largest size that is asked for arrive whole."""
    text = json.dumps({"text": "y" * size, "usage": {"prompt_tokens": 1}}).encode()
    head = [("content-type", "application/json"), ("content-length", str(len(text)))]

    async def play(_, peer):
        lines = ["HTTP/1.1 200 OK", *(f"{name}: {value}" for name, value in head), "", ""]
        await peer.say("\r\n".join(lines).encode() + text)

    served.plays["/v1/chat/completions"] = play
    answer = await ask(place, served.address, CHAT)
    served.plays.clear()
    assert answer.body == text


async def test_095_invalid_json_answers(place, served):
    """An answer that is no JSON passes unchanged."""
    text = b"no healthy upstream"
    head = [("content-type", "application/json")]
    served.plays["/v1/chat/completions"] = backend.saying(text, headers=head)
    answer = await ask(place, served.address, CHAT)
    served.plays.clear()
    assert (answer.status, answer.body) == (200, text)


async def test_101_cookies_are_not_merged(place, served):
    """Two Set-Cookie headers survive the override of the body mode."""

    async def play(_, peer):
        cookies = b"set-cookie: a=1\r\nset-cookie: b=2\r\n"
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n" + cookies + b"\r\nok")

    served.plays["/v1/chat/completions"] = play
    answer = await ask(place, served.address, CHAT)
    served.plays.clear()
    assert answer.head.all("set-cookie") == ["a=1", "b=2"]


async def test_022_body_ended_by_trailers(place, served):
    """With retries on, a body that ends with trailers arrives once."""

    def received():
        """Bodies of the requests, without those of the scraper."""
        return [ask.body for ask in served.asks if ask.path == "/v1/chat/completions"]

    body, before = json.dumps(CHAT).encode(), len(received())
    answer = await http2.ask(
        place.port,
        "/v1/chat/completions",
        body,
        headers=[(SELECTION, served.address)],
        trailers=[("x-sum", "1")],
    )
    assert answer.status == 200
    assert received()[before:] == [body]


async def test_119_client_disconnects_during_a_buffered_answer(place, served):
    """A client that leaves while its answer is being buffered frees the account."""

    async def play(_, peer):
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc")
        await peer.gone()

    served.plays["/v1/chat/completions"] = play
    arrived = served.arrival()
    async with http1.calling(place.port) as call:
        body = json.dumps(CHAT).encode()
        length = ("content-length", str(len(body)))
        await call.start("POST", "/v1/chat/completions", [(SELECTION, served.address), length])
        await call.send(body)
        await arrived
        call.cut()
    await place.settled()
    served.plays.clear()


async def test_many_at_once(place, engine):
    """300 unstreamed answers at once: all 200, all counted, nothing left."""
    before = await used(place)
    connector = aiohttp.TCPConnector(limit=60)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def item():
            url = f"http://127.0.0.1:{place.port}/v1/chat/completions"
            async with session.post(url, json=CHAT, headers={SELECTION: engine}) as answer:
                assert answer.status == 200
                return (await answer.json())["usage"]["completion_tokens"]

        tokens = sum(await asyncio.gather(*(item() for _ in range(300))))
    await place.settled()
    assert (await used(place))["completion"] - before["completion"] == tokens
