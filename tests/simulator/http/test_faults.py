from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from extproc import errors
from extproc.simulator import faults
from tests.simulator import engine_server
from tests.simulator.engine_server import chat

PATH = "/v1/chat/completions"


async def ask(client, fault="", **more):
    """One chat request, with a fault header if named."""
    headers = {"x-engine-fault": fault} if fault else {}
    return await client.post(PATH, json=chat("hi", max_tokens=20, **more), headers=headers)


async def test_a_status_fault_answers_that_status():
    """By header, with an error body."""
    async with engine_server.engine() as (server, client):
        reply = await ask(client, "status=429")
        assert (reply.status, (await reply.json())["error"]["code"]) == (429, 429)
        assert server.engine.prefix_queries == 0


async def test_armed_faults_hit_inference_only_and_end_after_their_count():
    """PUT arms, GET lists what is left, DELETE clears."""
    async with engine_server.engine() as (_, client):
        armed = await client.put("/admin/faults", json={"faults": ["status=503,count=2"]})
        assert await armed.json() == {"faults": ["status=503,count=2"]}
        assert (await client.get("/v1/models")).status == 200
        assert [(await ask(client)).status for _ in range(3)] == [503, 503, 200]
        assert await (await client.get("/admin/faults")).json() == {"faults": []}
        await client.post("/admin/faults", json={"faults": ["status=500", "status=501"]})
        assert (await ask(client)).status == 500
        await client.delete("/admin/faults")
        assert (await ask(client)).status == 200


async def test_a_rate_hits_a_share_of_requests():
    """The share is drawn from the seed."""
    async with engine_server.engine(faults=("status=503,rate=0.5",)) as (_, client):
        hit = sum([(await ask(client)).status == 503 for _ in range(60)])
        assert 15 < hit < 45


@pytest.mark.parametrize("stream", [True, False])
async def test_reset_breaks_the_connection_before_any_answer(stream):
    """The client sees a broken connection, not a status."""
    async with engine_server.engine() as (server, client):
        with pytest.raises(aiohttp.ClientOSError):
            await ask(client, "reset", stream=stream)
        await engine_server.until(lambda: server.in_flight == 0)


async def test_reset_after_breaks_a_stream_with_so_many_tokens_sent():
    """Three words arrive, then the connection breaks; the engine is free again."""
    async with engine_server.engine() as (server, client):
        reply = await ask(client, "reset-after=3", stream=True)
        assert reply.status == 200
        got = b""
        with pytest.raises(aiohttp.ClientError):  # noqa: PT012  the bytes before the reset count
            async for chunk in reply.content.iter_any():
                got += chunk
        reply.close()
        await engine_server.until(lambda: server.in_flight == 0)
        assert server.engine.running == 0
        assert b"[DONE]" not in got


async def test_hang_and_stall_end_only_when_the_client_leaves():
    """No answer, or three words and then silence."""
    async with engine_server.engine() as (server, client):
        hung = asyncio.ensure_future(ask(client, "hang"))
        await engine_server.until(lambda: server.in_flight == 1)
        stalled = await ask(client, "stall-after=3", stream=True)
        first = await stalled.content.readany()
        assert b"data: " in first
        assert server.in_flight == 2
        assert not hung.done()
        await engine_server.leave(hung)
        stalled.close()
        await engine_server.until(lambda: server.in_flight == 0)


async def test_an_in_band_error_comes_with_status_200():
    """As a real engine rejects streams in a burst: a gateway cannot see it from the status."""
    async with engine_server.engine() as (_, client):
        reply = await ask(client, "sse-error", stream=True)
        error, done = await engine_server.events(reply)
        assert (reply.status, error["error"]["code"], done) == (200, 503, "[DONE]")


async def test_errors_of_messages_have_the_form_of_anthropic():
    """Clients of Anthropic read `type` beside the error, also in a stream."""
    async with engine_server.engine() as (_, client):
        for fault in ("status=503", "sse-error"):
            headers = {"x-engine-fault": fault}
            async with client.post("/v1/messages", data=b"{}", headers=headers) as reply:
                text = await reply.text()
            event, _, data = text.rpartition("data: ")
            assert event == ("event: error\n" if fault == "sse-error" else "")
            error = json.loads(data)
            assert (error["type"], error["error"]["code"]) == ("error", 503)
            assert error["error"]["message"]


async def test_a_delay_comes_before_the_usual_answer():
    """The request is served after it."""
    async with engine_server.engine() as (_, client):
        assert (await ask(client, "delay=0.001")).status == 200


async def test_not_ready_fails_health_and_requests_and_leaves_metrics():
    """As during the start of an engine; cleared, it serves."""
    async with engine_server.engine(faults=("not-ready",)) as (_, client):
        assert (await client.get("/health")).status == 503
        assert (await ask(client)).status == 503
        assert (await client.get("/metrics")).status == 200
        await client.delete("/admin/faults")
        assert (await client.get("/health")).status == 200
        assert (await ask(client)).status == 200


async def test_metrics_faults_freeze_garble_empty_and_fail_the_page():
    """Each changes the page only; without them it is alive again."""
    async with engine_server.engine() as (_, client):

        async def page(*armed):
            await client.put("/admin/faults", json={"faults": list(armed)})
            reply = await client.get("/metrics")
            return reply.status, await reply.read()

        async def frozen():
            return await (await client.get("/metrics")).read()

        _, before = await page("metrics-freeze")
        await ask(client)
        assert await frozen() == before
        assert (await page("metrics-empty"))[1] == b""
        assert (await page("metrics-status=500"))[0] == 500
        assert (await page("metrics-garble"))[1].startswith(b"<html>")
        assert b"vllm:prompt_tokens_total" in (await page("metrics-slow=0.001"))[1]
        assert (await page())[1] != before


def test_slow_stretches_steps_while_it_is_armed():
    """Factors multiply and end with their time."""
    armed = faults.Faults(None)
    armed.arm([faults.parse("slow=4,for=10"), faults.parse("slow=2")], 100.0)
    assert [armed.slowdown(now) for now in (100.0, 109.9, 110.0)] == [8.0, 8.0, 2.0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nope",
        "status",
        "reset=3",
        "status=abc",
        "status=99",
        "status=503,rate=2",
        "reset,odd=1",
        "delay=-1",
        "reset,count=-1",
        "not-ready,count=2",
        "not-ready,rate=0.5",
        "slow=4,count=2",
        "slow=0.5",
    ],
)
def test_what_is_no_fault_is_refused(text):
    """The error lists the kinds."""
    with pytest.raises(errors.ConfigError, match="reset-after=N"):
        faults.parse(text)


@pytest.mark.parametrize(
    "text", ["status=503", "reset", "reset-after=3,rate=0.5,count=2,for=9", "metrics-slow=0.5"]
)
def test_a_fault_prints_as_it_reads(text):
    """The grammar goes both ways."""
    assert str(faults.parse(text)) == text


async def test_a_bad_fault_is_a_bad_request():
    """In the header and in the admin body."""
    async with engine_server.engine() as (_, client):
        for header in ("nope", "not-ready", "metrics-empty", "kv-drop", "slow=10"):
            assert (await ask(client, header)).status == 400
        for body in (b"{", b"{}", b'{"faults": ["nope"]}'):
            assert (await client.put("/admin/faults", data=body)).status == 400
