"""KV events from simulated engines over real sockets to decisions."""

import asyncio
import contextlib
import json
import time

import pytest

from extproc.config import factory
from extproc.config.settings import Settings
from extproc.endpoint import Endpoint
from extproc.prefix_cache.cache_model import index_key
from extproc.request import HttpRequest
from extproc.scrape.kv_event_subscriber import KvEventsSection
from extproc.supervision import Supervisor
from extproc.telemetry import pool_metrics
from tests.simulator import engine_server
from tests.support.waiting import until

pytest.importorskip("zmq", reason="the extra kv-events is not installed")

from extproc.server.pool_runtime import KvEventLoops
from extproc.simulator.http.kv_publisher import KvPublisherSettings
from tests.support.metrics_pages import build_view


class KvEventPool:
    """Parts of a pool over one engine, with loops of KV events."""

    def __init__(self, server, client, **events):
        self.server, self.client, self.answer = server, client, ""
        settings = Settings(kv_events=KvEventsSection(enabled=True, **events))
        self.parts = factory.build(settings)
        publisher = server.publisher
        self.endpoint = Endpoint(
            f"127.0.0.1:{server.port}",
            labels={
                "kv-events-port": str(publisher.port),
                "kv-events-replay-port": str(publisher.replay_port),
            },
        )
        self.parts.store.set_endpoints([self.endpoint], 0.0)
        self.loops = KvEventLoops(
            "p",
            self.parts,
            self.parts.exact,
            clock=time.monotonic,
            supervisor=Supervisor(),
            may_listen=lambda: True,
        )

    async def ask(self, path, body, *, settle=True):
        """Route a request and send it; returns the decision and the reported usage."""
        director = self.parts.director
        raw = HttpRequest({":path": path, ":method": "POST"}, json.dumps(body).encode())
        # Behind the time in which a prompt is on its way.
        decision = director.route(raw, time.monotonic() + (10.0 if settle else 0.0))
        reservation = director.reserve(decision, time.monotonic())
        director.prompt_listener.note(decision, raw)
        response = await self.client.post(path, data=raw.body)
        reply = await response.json()
        usage = reply["usage"]
        if path == "/v1/chat/completions":
            self.answer = reply["choices"][0]["message"]["content"]
        director.release(reservation, time.monotonic())
        return decision, usage

    async def settled(self):
        """Wait until all prompts are mapped, and every block of the engine is known."""
        await until(self.is_settled)

    def is_settled(self):
        engines = self.parts.exact.engines(index_key(self.parts.store.pool.members[0].endpoint))
        return (
            [engine.is_exact for engine in engines] == [True]
            and not self.loops.num_unmapped
            and sorted(engines[0].keys) == sorted(self.server.engine.pool.keys)
        )


@contextlib.asynccontextmanager
async def running(*, budget_ms=0.0, **engine):
    settings = KvPublisherSettings(**engine)
    machine = {"kv_tokens": 4096, "block_tokens": 16}
    async with engine_server.engine(kv_events=settings, machine=machine) as (server, client):
        pool = KvEventPool(server, client, render_budget_ms=budget_ms)
        tasks = [asyncio.ensure_future(loop()) for loop in pool.loops.loops()]
        try:
            # What is published before the subscription has come in does not reach it.
            await until(lambda: server.publisher.num_subscriptions)
            yield pool
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


def chat(*texts, max_tokens=8):
    return engine_server.chat(*texts, max_tokens=max_tokens)


def words(number, count=600):
    return "".join(f"{number:03}{word:04} " for word in range(count))


@pytest.mark.parametrize("form", ["map", "array"])
async def test_repeated_prompts_are_predicted_to_the_token(form):
    """At cache pressure, predictions are what the engine reports, where belief alone is wrong."""
    async with running(form=form) as pool:
        path, sources, wrong_beliefs = "/v1/chat/completions", [], 0
        await pool.ask(path, chat(words(999)))
        await until(lambda: pool.parts.exact.index.block_tokens)
        order = [n % 5 for n in range(20)] + [0, 1, 0, 2, 0, 1, 4, 0]
        for number in order:
            decision, usage = await pool.ask(path, chat(words(number)))
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            sources.append(decision.match_source)
            if decision.match_source == "events":
                assert decision.matched_tokens == cached
                wrong_beliefs += not cached
            await pool.settled()
        assert sources[:5] == ["estimate"] * 5
        assert set(sources[5:]) == {"events"}
        assert wrong_beliefs


async def test_follow_up_turns_are_predicted_with_the_answer():
    """The earlier prompt and the generated answer count as cached."""
    async with running() as pool:
        path = "/v1/chat/completions"
        await pool.ask(path, chat(words(999)))
        await until(lambda: pool.parts.exact.index.block_tokens)
        texts = [words(1, 150)]
        for turn in range(4):
            decision, usage = await pool.ask(path, chat(*texts, max_tokens=60))
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert decision.match_source == ("events" if turn else "estimate")
            assert decision.matched_tokens == cached
            await pool.settled()
            texts += [pool.answer, words(2 + turn, 40)]


async def test_the_first_request_of_a_prompt_is_exact_where_it_waits():
    """Another replica routed the same prompt before."""
    async with running(budget_ms=10_000.0) as pool:
        path, body = "/v1/chat/completions", chat(words(1, 150))
        await pool.ask(path, chat(words(999)))
        await pool.settled()
        await pool.client.post(path, data=json.dumps(body).encode())
        await pool.settled()
        director = pool.parts.director
        raw = HttpRequest({":path": path, ":method": "POST"}, json.dumps(body).encode())
        estimated = director.route(raw, time.monotonic())
        assert (estimated.match_source, estimated.matched_tokens) == ("estimate", 0)
        await director.prompt_listener.render_ahead(estimated, raw)
        assert pool.loops.stats().waits["mapped"] == 1
        decision, usage = await pool.ask(path, body)
        assert decision.match_source == "events"
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert decision.matched_tokens == min(cached, decision.request.prompt_tokens) > 300


async def test_a_cleared_cache_is_forgotten_at_once():
    """Events and belief alike."""
    async with running() as pool:
        path = "/v1/completions"
        body = {"model": "demo", "prompt": words(1), "max_tokens": 4}
        # Prompts are mapped once events arrive: whether an earlier one is depends on the time.
        await until(lambda: pool.parts.exact.is_any_live)
        await pool.ask(path, body)
        await pool.settled()
        assert pool.loops.stats().prompts["mapped"] == 1
        await pool.client.post("/reset_prefix_cache")
        await until(lambda: not pool.loops.stats().blocks[0][2])
        decision, usage = await pool.ask(path, body)
        assert decision.matched_tokens == usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_metrics_show_subscriptions_blocks_and_prompts():
    """Every family has a series."""
    async with running() as pool:
        await until(lambda: pool.parts.exact.is_any_live)
        await pool.ask("/v1/chat/completions", chat(words(1)))
        await until(pool.is_settled)
        view = build_view(pool.parts.store.pool, kv_events=pool.loops.stats())
        families = {family.name: family for family in pool_metrics.state_families({"p": view}, 1.0)}
        address = pool.endpoint.address
        state = families["extproc_kv_event_subscription_state"].samples
        labels = f'{{endpoint="{address}",pool="p",rank="0",state="exact"}}'
        assert state == [(labels, 1)]
        blocks = families["extproc_kv_event_blocks"].samples
        assert blocks[0][1] == len([*pool.server.engine.pool.keys])
        results = dict(families["extproc_mapped_prompts"].samples)
        assert [labels for labels, count in results.items() if count] == [
            '{pool="p",result="mapped"}'
        ]
        assert len(families["extproc_kv_event_batches"].samples) == 5
        ((endpoint, num_received),) = view.kv_events.received
        assert endpoint.address == address
        assert num_received > 0
