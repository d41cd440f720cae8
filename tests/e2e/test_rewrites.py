"""Objectives and rewrites through a real Envoy: other names in bodies, the client's in answers."""

from __future__ import annotations

import asyncio
import collections
import gzip
import json

import pytest

from extproc.demo import stack
from tests.e2e import backend, http1, installation
from tests.e2e.test_modes import MODES, SEEING, every_mode

PATH = "/v1/chat/completions"
COST = "x-gateway-inference-request-cost"
OBJECTIVE = "x-llm-d-inference-objective"

CONFIG = (
    "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, "
    "scrape: {idle_interval_s: 0.2, models: false}, scheduling: {strategy: round-robin}, "
    "responses: {request_cost: {prompt: 1, completion: 2}}, "
    "pool: {objectives: {batch: -1, gold: 1}, rewrites: ["
    "{models: [big], targets: [{model: big-v2}]}, "
    "{models: [split], targets: [{model: a, weight: 70}, {model: b, weight: 30}]}]}}"
)

#: Modes in which a request that was edited has an answer that is shown, or can be asked for.
SHOWN = [pair for pair in MODES if pair[0] in SEEING and pair != ("FULL_DUPLEX_STREAMED", "NONE")]

#: The same in which an answer of this kind passes piece by piece.
PASSING = [pair for pair in SHOWN if pair[1] in {"FULL_DUPLEX_STREAMED", "STREAMED", "NONE"}]

NAMED = b'{"id":"c","model":"big-v2","choices":[{"text":"\\"model\\":\\"big-v2\\""}]}'
EVENTS = (
    b'data: {"id":"c","model":"big-v2","choices":[]}\n\n',
    b'data: {"id":"c","model": "big-v2"}\n\n',
    b"data: [DONE]\n\n",
)


def restored(body: bytes) -> bytes:
    return body.replace(b'"model":"big-v2"', b'"model":"big"').replace(
        b'"model": "big-v2"', b'"model": "big"'
    )


def counted(body: bytes, *headers: tuple[str, str]) -> backend.Play:
    """An answer that tells its length."""
    lines = ["HTTP/1.1 200 OK", *(f"{name}: {value}" for name, value in headers)]
    head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode()

    async def play(_: backend.ReceivedRequest, peer: backend.HttpPeer) -> None:
        await peer.say(head + body)

    return play


JSON = ("content-type", "application/json")


def overriding(config, listeners):
    """Every mode; answers may be asked for, and say what they cost where their headers wait."""
    every_mode(config, listeners)
    installation.keep_headers(config, OBJECTIVE)
    text = {"key": "x-cost", "value": f"%DYNAMIC_METADATA(envoy.lb:{COST})%"}
    for at in range(len(config["static_resources"]["listeners"])):
        installation.processor(config, at)["allow_mode_override"] = True
        first = installation.manager(config, at)["http_filters"][0]
        first["typed_config"]["mutations"]["response_mutations"] = [{"append": {"header": text}}]


def page(waiting):
    """A metrics page of vLLM's."""
    text = f'vllm:num_requests_waiting{{model_name="m"}} {waiting}\nvllm:kv_cache_usage_perc 0.1\n'
    return backend.saying(text.encode(), headers=[("content-type", "text/plain")])


@pytest.fixture(scope="module")
def served(live):
    with live.holding(backend.backend()) as item:
        item.plays["/metrics"] = page(0)
        yield item


@pytest.fixture(scope="module")
def listeners():
    return {}


@pytest.fixture(scope="module")
def place(live, served, listeners, binary):
    change = lambda config: overriding(config, listeners)  # noqa: E731  keeps the port table at hand
    arguments = ["--config-text", CONFIG]
    with live.holding(
        installation.installed(served.address, change=change, arguments=arguments, binary=binary)
    ) as item:
        yield item


@pytest.fixture(autouse=True)
def quiet(served):
    """Every test says itself what is answered."""
    yield
    served.plays.pop(PATH, None)


def chat(model="big", **more):
    text = [{"role": "user", "content": "hello"}]
    return json.dumps({"model": model, "messages": text, **more}).encode()


def chat_requests(served):
    return [ask for ask in served.asks if ask.path == PATH]


@pytest.mark.parametrize("mode", SHOWN, ids="-".join)
@pytest.mark.parametrize("framing", ["counted", "chunked"])
async def test_086_json_answers(place, served, listeners, mode, framing):
    """The engine is asked under its name, the client answered under its own, in whole bytes."""
    cut = NAMED.index(b"-v2")
    served.plays[PATH] = (
        counted(NAMED, JSON)
        if framing == "counted"
        else backend.saying(NAMED[:cut], NAMED[cut:], headers=[JSON])
    )
    answer = await http1.ask(listeners[mode], PATH, chat())
    assert chat_requests(served)[-1].body == chat("big-v2")
    assert answer.body == restored(NAMED)
    assert answer.head.get("content-length") in {"", str(len(answer.body))}


@pytest.mark.parametrize("mode", SHOWN, ids="-".join)
async def test_086_streams_of_events(place, served, listeners, mode):
    """Events cut at odd places arrive changed and complete."""
    body = b"".join(EVENTS)
    pieces = [body[at : at + 13] for at in range(0, len(body), 13)]
    served.plays[PATH] = backend.saying(*pieces, headers=[("content-type", "text/event-stream")])
    answer = await http1.ask(listeners[mode], PATH, chat(stream=True))
    assert answer.body == restored(body)


@pytest.mark.parametrize("mode", PASSING, ids="-".join)
async def test_086_events_are_not_held_back(place, served, listeners, mode):
    """A complete event is with the client before the next one exists."""
    observed = asyncio.Event()

    async def play(_, peer):
        await peer.say(backend.EVENTS_HEAD + backend.framed(EVENTS[0]))
        await observed.wait()
        await peer.say(backend.framed(EVENTS[2]) + backend.framed(b""))

    served.plays[PATH] = play
    async with http1.calling(listeners[mode]) as call:
        body = chat(stream=True)
        await call.start("POST", PATH, [("content-length", str(len(body)))])
        await call.send(body)
        await call.begun()
        assert await call.body.piece() == restored(EVENTS[0])
        observed.set()
        assert await call.body.rest() == EVENTS[2]


@pytest.mark.parametrize("mode", PASSING, ids="-".join)
async def test_086_large_answers(place, served, listeners, mode):
    """An answer too large to be asked for in one message is changed as it passes."""
    body = NAMED[:-1] + b',"text":"' + b"y" * 700_000 + b'"}'
    served.plays[PATH] = counted(body, JSON)
    answer = await http1.ask(listeners[mode], PATH, chat())
    assert answer.body == restored(body)


@pytest.mark.parametrize("mode", SHOWN, ids="-".join)
async def test_086_compressed_answers_are_unchanged(place, served, listeners, mode):
    """A compressed answer arrives as it was sent."""
    body = gzip.compress(NAMED)
    served.plays[PATH] = counted(body, JSON, ("content-encoding", "gzip"))
    answer = await http1.ask(listeners[mode], PATH, chat())
    assert answer.body == body


async def test_086_unseen_answers_are_unchanged(place, served, listeners):
    """Full duplex for requests alone: the data plane shows no answer."""
    served.plays[PATH] = counted(NAMED, JSON)
    answer = await http1.ask(listeners["FULL_DUPLEX_STREAMED", "NONE"], PATH, chat())
    assert chat_requests(served)[-1].body == chat("big-v2")
    assert answer.body == NAMED


@pytest.mark.parametrize("mode", SHOWN, ids="-".join)
async def test_086_answers_of_other_requests_are_unchanged(place, served, listeners, mode):
    """A client that used the engine's name is answered under it."""
    served.plays[PATH] = counted(NAMED, JSON)
    answer = await http1.ask(listeners[mode], PATH, chat("big-v2"))
    assert answer.body == NAMED


@pytest.mark.parametrize("mode", [("BUFFERED", "BUFFERED"), ("BUFFERED", "NONE")], ids="-".join)
async def test_106_the_data_plane_knows_the_cost(place, served, listeners, mode):
    """The cost of an answer is in Envoy's dynamic metadata before its end."""
    used = b'{"usage":{"prompt_tokens":7,"completion_tokens":10}}'
    for model in ("big", "other"):
        served.plays[PATH] = counted(used, JSON)
        answer = await http1.ask(listeners[mode], PATH, chat(model))
        assert (answer.body, answer.head.get("x-cost")) == (used, "27")
    served.plays[PATH] = counted(NAMED, JSON)
    assert (await http1.ask(listeners[mode], PATH, chat())).head.get("x-cost") in {"", "-"}


async def test_086_head_requests_keep_their_length(place, served, listeners):
    """No body, nothing to change."""
    for mode in SHOWN:
        assert (await http1.ask(listeners[mode], "/v1/models", method="HEAD")).status == 200


@pytest.mark.parametrize("mode", SEEING)
async def test_085_a_canary(place, served, listeners, mode):
    """About 30 of 100 go to the variant, and turns of one conversation to one of both."""
    port = listeners[mode, "NONE"]
    before = len(chat_requests(served))
    for _ in range(100):
        await http1.ask(port, PATH, chat("split"))
    names = collections.Counter(
        json.loads(ask.body)["model"] for ask in chat_requests(served)[before:]
    )
    # Five standard deviations.
    assert abs(names["b"] - 30) <= 23
    assert names["a"] + names["b"] == 100
    for user in range(10):
        before = len(chat_requests(served))
        for _ in range(3):
            await http1.ask(port, PATH, chat("split", user=f"user {user}"))
        assert len({json.loads(ask.body)["model"] for ask in chat_requests(served)[before:]}) == 1


async def test_072_sheddable_requests_are_dropped_while_full(place, served, listeners):
    """Priority below 0 gets 429 while the one endpoint is full; others are served."""
    others = f'extproc_endpoint_foreign_requests{{endpoint="{served.address}"}}'
    port = listeners["BUFFERED", "NONE"]
    served.plays["/metrics"] = page(9)
    await place.until(lambda result: result.get(others) == 9)
    for name, status in (("batch", 429), ("gold", 200), ("unknown", 200)):
        answer = await http1.ask(port, PATH, chat(), headers=[(OBJECTIVE, name)])
        assert answer.status == status
    served.plays["/metrics"] = page(0)
    await place.until(lambda values: values.get(others) == 0)
    answer = await http1.ask(port, PATH, chat(), headers=[(OBJECTIVE, "batch")])
    assert answer.status == 200


async def test_086_answers_of_an_engine(live):
    """Answers and streams of a simulated vLLM, under the client's name from end to end."""
    rewrites = "rewrites: [{models: [mine], targets: [{model: demo}]}]"
    text = CONFIG[: CONFIG.index("pool:")] + f"pool: {{{rewrites}}}}}"
    async with stack.stack() as children:
        _, address = await children.engine("--speed", "1000")
        async with installation.installed(
            address, template="original-dst-buffered.yaml", arguments=["--config-text", text]
        ) as item:
            answer = await http1.ask(item.port, PATH, chat("mine", max_tokens=5))
            assert answer.json()["model"] == "mine"
            answer = await http1.ask(item.port, PATH, chat("mine", max_tokens=5, stream=True))
            lines = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: {")]
            assert lines
            assert {json.loads(line)["model"] for line in lines} == {"mine"}
            assert answer.body.endswith(b"data: [DONE]\n\n")
