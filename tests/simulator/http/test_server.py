from __future__ import annotations

import asyncio
import hashlib
import io

import aiohttp
import pytest

from extproc.simulator.http import responses
from tests.simulator import engine_server
from tests.simulator.engine_server import chat

LONG = "tell me about rivers " * 40


async def test_a_chat_answer_has_text_usage_and_the_request_id():
    """One word of four bytes per token, tokens counted, id from X-Request-Id."""
    async with engine_server.engine() as (server, client):
        reply = await client.post(
            "/v1/chat/completions",
            json=chat("hi", max_tokens=5),
            headers={"x-request-id": "abc-123"},
        )
        body = await reply.json()
        assert reply.status == 200
        assert body["id"] == "chatcmpl-abc-123"
        assert len(body["choices"][0]["message"]["content"]) == 20
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 5
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert reply.headers["x-inference-port"] == str(server.port)


async def test_the_same_prompt_gets_the_same_answer():
    """Answers depend on the prompt alone, not on the engine or its history."""
    texts = []
    for seed in (0, 1):
        async with engine_server.engine(seed=seed) as (_, client):
            for _ in range(2):
                reply = await client.post("/v1/chat/completions", json=chat("hi"))
                texts.append((await reply.json())["choices"][0]["message"]["content"])
    assert len(set(texts)) == 1


async def test_cached_tokens_grow_when_a_follow_up_carries_the_answer():
    """The second turn finds the first prompt and the generated answer in the cache."""
    async with engine_server.engine() as (_, client):
        first = await (
            await client.post("/v1/chat/completions", json=chat(LONG, max_tokens=65))
        ).json()
        answer = first["choices"][0]["message"]["content"]
        second = await (
            await client.post("/v1/chat/completions", json=chat(LONG, answer, "and lakes?"))
        ).json()
        before, cached = (
            u["usage"]["prompt_tokens_details"]["cached_tokens"] for u in (first, second)
        )
        known = first["usage"]["prompt_tokens"] + 64
        assert before == 0
        assert known - 16 <= cached <= known


async def test_cached_tokens_can_be_hidden():
    """Without --enable-prompt-tokens-details a real engine does not tell."""
    async with engine_server.engine(show_cached=False) as (_, client):
        body = await (await client.post("/v1/chat/completions", json=chat("hi"))).json()
        assert "prompt_tokens_details" not in body["usage"]


async def test_adapters_and_cache_salts_do_not_share_blocks():
    """The same prompt is a miss under another adapter or another salt."""
    async with engine_server.engine(loras=("a",)) as (_, client):
        cached = []
        for more in ({}, {"model": "a"}, {"cache_salt": "tenant"}, {}):
            reply = await client.post("/v1/chat/completions", json=chat(LONG) | more)
            cached.append((await reply.json())["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[:3] == [0, 0, 0]
        assert cached[3] > 0


async def test_a_stream_is_chunks_then_usage_then_done():
    """Role first, text in pieces, the finish reason, usage on request, [DONE]; and equal text."""
    async with engine_server.engine() as (_, client):
        body = chat("hi", max_tokens=40)
        unary = await (await client.post("/v1/chat/completions", json=body)).json()
        streamed_body = body | {"stream": True, "stream_options": {"include_usage": True}}
        reply = await client.post("/v1/chat/completions", json=streamed_body)
        assert reply.headers["content-type"].startswith("text/event-stream")
        *chunks, usage, done = await engine_server.events(reply)
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        assert text == unary["choices"][0]["message"]["content"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 40)
        assert done == "[DONE]"


@pytest.mark.parametrize(("coalesce_s", "fewest"), [(0.0, 40), (10.0, 1)])
async def test_chunks_are_not_tokens(coalesce_s, fewest):
    """Tokens that come close together share a chunk; 0 sends every token by itself."""
    async with engine_server.engine(speed=100, coalesce_s=coalesce_s) as (_, client):
        reply = await client.post(
            "/v1/completions", json={"prompt": "hi", "max_tokens": 40, "stream": True}
        )
        texts = [c["choices"][0]["text"] for c in (await engine_server.events(reply))[:-1]]
        pieces = [text for text in texts if text]
        assert sum(map(len, pieces)) == 160
        assert fewest <= len(pieces) <= max(fewest, 2)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/chat/completions", chat("hi")),
        ("/v1/chat/completions", chat([{"type": "text", "text": "hi"}], tools=[{"x": 1}])),
        ("/v1/embeddings", {"input": ["one", "two"]}),
        ("/v1/responses", {"input": "hi", "instructions": "be brief"}),
        ("/v1/responses", {"input": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages", {"max_tokens": 9, "messages": chat("hi")["messages"], "system": "s"}),
    ],
)
async def test_every_surface_answers_whole_and_streamed(path, body):
    """Each API has its shape; unknown fields are ignored, a missing model is the base model."""
    async with engine_server.engine() as (server, client):
        body = {key: value for key, value in body.items() if key != "model"} | {"odd": [1]}
        unary = await client.post(path, json=body)
        assert unary.status == 200
        assert (await unary.json())["model"] == "demo"
        streamed = await client.post(path, json=body | {"stream": True})
        assert streamed.status == 200
        assert await engine_server.events(streamed)
        assert server.engine.running == 0


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")]
)
async def test_prompts_may_be_lists_of_tokens(path, field):
    """Clients send them one by one or several; two of a list are one here."""
    async with engine_server.engine() as (_, client):
        for value, tokens in (([1, 2, 3], 3), ([[1, 2, 3]], 3), ([[1, 2], [3]], 3)):
            answer = await (await client.post(path, json={field: value})).json()
            assert answer["usage"]["prompt_tokens"] == tokens


async def test_tokens_are_four_bytes_of_the_rendered_prompt():
    """The stand-in for a tokenizer; /tokenize agrees with usage."""
    async with engine_server.engine() as (_, client):
        for path, body in (
            ("/v1/completions", {"prompt": "x" * 41}),
            ("/v1/chat/completions", chat("x" * 9)),
        ):
            used = (await (await client.post(path, json=body)).json())["usage"]["prompt_tokens"]
            counted = (await (await client.post("/tokenize", json=body)).json())["count"]
            assert used == counted
        assert (await (await client.post("/tokenize", json={"prompt": "x" * 41})).json())[
            "count"
        ] == 11


async def test_input_of_messages_is_without_cached_tokens():
    """The second request has the same tokens, most of them read from the cache."""
    async with engine_server.engine() as (_, client):
        body = {"max_tokens": 1, "messages": chat("x" * 4000)["messages"]}
        first, second = [
            (await (await client.post("/v1/messages", json=body)).json())["usage"] for _ in range(2)
        ]
        assert first["cache_read_input_tokens"] == 0
        assert second["cache_read_input_tokens"] > second["input_tokens"] > 0
        total = second["cache_read_input_tokens"] + second["input_tokens"]
        assert total == first["input_tokens"]


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"{", 400, "BadRequestError"),
        (b"[]", 400, "BadRequestError"),
        (b'{"prompt": 3}', 400, "BadRequestError"),
        (b"\xff\xfe", 400, "BadRequestError"),
        (b'{"prompt": "a", "max_tokens": 0}', 400, "BadRequestError"),
        (b'{"prompt": "a", "model": "nope"}', 404, "NotFoundError"),
        (b'{"prompt": "' + b"a" * 100_000 + b'"}', 400, "BadRequestError"),
    ],
)
async def test_bad_requests_get_error_bodies(body, status, kind):
    """`{"error": {message, type, param, code}}`, as vLLM answers."""
    async with engine_server.engine() as (_, client):
        reply = await client.post("/v1/completions", data=body)
        error = (await reply.json())["error"]
        assert (reply.status, error["type"], error["code"]) == (status, kind, status)
        assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/tokenize", "/v1/chat/completions/render"]
)
async def test_a_body_that_nests_too_deep_is_a_bad_request(path):
    """3,000 arrays in a message, which is valid JSON."""
    nested = b"[" * 3000 + b"]" * 3000
    body = b'{"messages": [{"role": "user", "content": ' + nested + b"}]}"
    async with engine_server.engine() as (_, client):
        reply = await client.post(path, data=body)
        assert reply.status == 400
        assert (await reply.json())["error"]["type"] == "BadRequestError"


async def test_unknown_paths_answer_like_fastapi():
    """404 `{"detail": "Not Found"}` for any method; 405 for a known path."""
    async with engine_server.engine() as (_, client):
        for method, path, status in (
            ("GET", "/", 404),
            ("POST", "/whatever", 404),
            ("DELETE", "/admin/x", 404),
            ("GET", "/v1/completions", 405),
        ):
            reply = await client.request(method, path)
            assert reply.status == status
            assert set(await reply.json()) == {"detail"}


async def test_echo_hashes_the_body_as_received_on_any_path():
    """Also for a body of 5 MiB to an unknown path, and for one that is no JSON."""
    async with engine_server.engine() as (_, client):
        body = b"\x00\xff" * (5 << 19)
        for path in ("/v1/chat/completions", "/whatever"):
            reply = await client.post(
                path, data=io.BytesIO(body), headers={"x-engine-echo": "sha256"}
            )
            assert await reply.json() == {
                "sha256": hashlib.sha256(body).hexdigest(),
                "bytes": len(body),
            }


async def test_models_lists_base_and_adapters_with_their_parent():
    """An adapter loaded at run time is listed and served; unloaded it is gone."""
    async with engine_server.engine(loras=("a",)) as (_, client):

        async def listed():
            data = (await (await client.get("/v1/models")).json())["data"]
            return [(card["id"], card["parent"]) for card in data]

        assert await listed() == [("demo", None), ("a", "demo")]
        load = {"lora_name": "b", "lora_path": "somewhere"}
        assert (await client.post("/v1/load_lora_adapter", json=load)).status == 200
        assert (await client.post("/v1/load_lora_adapter", json=load)).status == 400
        assert (
            await client.post("/v1/completions", json={"model": "b", "prompt": "x"})
        ).status == 200
        assert (await listed())[-1] == ("b", "demo")
        assert (await client.post("/v1/unload_lora_adapter", json=load)).status == 200
        assert (await client.post("/v1/unload_lora_adapter", json=load)).status == 404
        assert (
            await client.post("/v1/completions", json={"model": "b", "prompt": "x"})
        ).status == 404


async def test_adapters_need_a_name_and_a_path():
    """Fields that are missing or empty are errors of vLLM's form, and nothing is loaded."""
    async with engine_server.engine(loras=("a",)) as (server, client):
        for path, body, message in (
            ("load", {"lora_name": "b"}, "lora_path"),
            ("load", {"lora_name": "b", "lora_path": None}, "lora_path"),
            ("load", {"lora_name": "b", "lora_path": ""}, "must be provided"),
            ("load", {"lora_path": "somewhere"}, "lora_name"),
            ("load", ["b"], "object"),
            ("unload", {}, "lora_name"),
            ("unload", {"lora_name": ""}, "needs to be provided"),
        ):
            reply = await client.post(f"/v1/{path}_lora_adapter", json=body)
            assert reply.status == 400
            error = (await reply.json())["error"]
            assert message in error["message"]
            assert error["code"] == 400
        assert server.adapters.names == ["a"]


async def test_over_the_queue_limit_it_is_busy():
    """503 without Retry-After once so many requests are in the engine."""
    async with engine_server.engine(speed=0.001, machine={"max_queued": 1}) as (server, client):
        first = asyncio.ensure_future(client.post("/v1/chat/completions", json=chat("a")))
        await engine_server.until(lambda: server.in_flight == 1 and server.engine.running)
        reply = await client.post("/v1/chat/completions", json=chat("b"))
        assert reply.status == 503
        assert "different instance" in (await reply.json())["error"]["message"]
        assert "retry-after" not in reply.headers
        await engine_server.leave(first)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(stream):
    """The running gauge is back and the abort counted, before any token came."""
    async with engine_server.engine(speed=0.001) as (server, client):
        task = asyncio.ensure_future(
            client.post("/v1/chat/completions", json=chat("hi", stream=stream))
        )
        await engine_server.until(lambda: server.engine.running == 1)
        assert (await (await client.get("/load")).json())["server_load"] == 1
        if stream:
            (await task).close()
        else:
            await engine_server.leave(task)
        await engine_server.until(lambda: server.engine.running == 0)
        assert server.engine.pool.used == 0
        assert server.stats.totals["request_success/abort"] == 1
        await engine_server.until(lambda: server.in_flight == 0)


async def test_a_client_that_leaves_as_an_answer_is_written_is_no_error(monkeypatch, caplog):
    """Its connection closes before the handler is cancelled."""
    generate = responses.generate

    async def leave_and_generate(request, *others):
        request.transport.abort()
        return await generate(request, *others)

    monkeypatch.setattr(responses, "generate", leave_and_generate)
    async with engine_server.engine() as (server, client):
        with pytest.raises(aiohttp.ClientError):
            await client.post("/v1/chat/completions", json=chat("hi", stream=True))
        await engine_server.until(lambda: server.in_flight == 0)
        assert server.engine.running + server.engine.waiting == 0
    assert not caplog.records


async def test_load_is_piggybacked_on_an_answer_for_who_asks():
    """ORCA as text or JSON, in a response header."""
    async with engine_server.engine() as (_, client):
        for form, start in (
            ("TEXT", "TEXT named_metrics.num_requests_waiting=0.0"),
            ("json", "JSON {"),
        ):
            headers = {"endpoint-load-metrics-format": form}
            reply = await client.post("/v1/chat/completions", json=chat("x"), headers=headers)
            assert reply.headers["endpoint-load-metrics"].startswith(start)


async def test_forty_clients_at_once_are_all_answered():
    """More than the batch holds: the rest waits its turn, and nothing stays behind."""
    async with engine_server.engine(machine={"max_num_seqs": 8}) as (_, client):

        async def status_of(number):
            body = chat(f"{number} {LONG}", max_tokens=30, stream=number % 2 == 0)
            reply = await client.post("/v1/chat/completions", json=body)
            await reply.read()
            return reply.status

        assert set(await asyncio.gather(*map(status_of, range(40)))) == {200}
        state = await (await client.get("/admin/state")).json()
        assert (state["running"], state["waiting"], state["kv_blocks_used"]) == (0, 0, 0)
        assert state["received"] == {"/v1/chat/completions": 40}
        assert state["ended"] == {"length": 40}
        assert state["most_in_flight"] > 8


async def test_resetting_the_prefix_cache_forgets_everything():
    """The next equal prompt is a miss."""
    async with engine_server.engine() as (_, client):
        await client.post("/v1/chat/completions", json=chat(LONG))
        assert (await client.post("/reset_prefix_cache")).status == 200
        body = await (await client.post("/v1/chat/completions", json=chat(LONG))).json()
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
