"""Engines with data-parallel ranks behind a real Envoy: each request names its rank."""

from __future__ import annotations

import asyncio
import json

import pytest

from extproc.simulator import profiles
from extproc.simulator.http import server
from tests.e2e import backend, http1, installation

PATH = "/v1/chat/completions"
RANK = "x-data-parallel-rank"
RANKS = 3

CONFIG = (
    "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, "
    "scrape: {idle_interval_s: 0.2, models: false}, scheduling: {strategy: STRATEGY}}"
)


def arguments(strategy):
    return ["--config-text", CONFIG.replace("STRATEGY", strategy)]


#: Only the prefix counts: the speeds of engines that a busy machine shows are no reason to move.
BY_PREFIX = (
    "profile: {name: prefixes, picker: {kind: max-score-picker}, "
    "scorers: [{kind: prefix-cache-scorer, weight: 1}]}"
)


@pytest.fixture
def engines(live):
    """Two simulated engines with three ranks each."""
    settings = server.EngineServerSettings(
        profile=profiles.PROFILES["demo"], speed=1000.0, ranks=RANKS
    )
    with (
        live.holding(server.serving(settings)) as first,
        live.holding(server.serving(settings)) as second,
    ):
        yield first, second


def chat(*texts):
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return json.dumps({"model": "demo", "messages": messages, "max_tokens": 2}).encode()


def received(engines):
    return [[rank.received for rank in engine.ranks] for engine in engines]


@pytest.mark.parametrize(
    "template", installation.first_and_slow(["original-dst.yaml", "override-host.yaml"])
)
async def test_requests_reach_every_rank_that_the_pages_show(engines, template):
    """Round robin over two engines goes over six ranks; a client's header changes nothing."""
    addresses = [f"127.0.0.1:{engine.port}" for engine in engines]
    async with installation.installed(
        *addresses, template=template, arguments=arguments("round-robin")
    ) as place:
        await place.until(lambda page: count_endpoints(page) == 2 * RANKS)
        for n in range(4 * RANKS):
            answer = await http1.ask(
                place.port, PATH, chat(f"hello {n}"), headers=[(RANK, "1"), (RANK, "77")]
            )
            assert answer.status == 200
        assert received(engines) == [[2] * RANKS] * 2
        page = await place.metrics()
        for address in addresses:
            for rank in range(RANKS):
                assert page[f'extproc_routed_requests_total{{endpoint="{address}@{rank}"}}'] == 2
            assert page[f'extproc_scrapes_total{{endpoint="{address}",result="ok"}}'] > 0
        entry = await place.access(path=PATH)
        assert entry


async def test_a_conversation_stays_on_its_rank(engines, binary):
    """The prefix index is one of each rank: follow-up turns find their prompt cached."""
    addresses = [f"127.0.0.1:{engine.port}" for engine in engines]
    arguments = ["--config-text", CONFIG.replace("strategy: STRATEGY", BY_PREFIX)]
    async with installation.installed(*addresses, arguments=arguments, binary=binary) as place:
        await place.until(lambda page: count_endpoints(page) == 2 * RANKS)

        async def talk(name):
            texts, cached = [f"{name} begins a talk of many words " * 60], []
            for turn in range(4):
                answer = await http1.ask(place.port, PATH, chat(*texts))
                assert answer.status == 200
                usage = answer.json()["usage"]
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
                reply = answer.json()["choices"][0]["message"]["content"]
                texts += [reply, f"{name} goes on in turn {turn} " * 20]
            return cached

        for first, *later in await asyncio.gather(*(talk(f"client {n}") for n in range(6))):
            assert first < 100
            assert all(tokens > 400 for tokens in later)


async def test_an_engine_without_ranks_gets_no_header(live, binary):
    """Neither ours nor the client's reaches it."""
    async with backend.backend() as engine:
        async with installation.installed(engine.address, binary=binary) as place:
            answer = await http1.ask(place.port, PATH, chat("hello"), headers=[(RANK, "1")])
            assert answer.status == 200
        (ask,) = [ask for ask in engine.asks if ask.path == PATH]
        assert RANK not in dict(ask.head.headers)


def count_endpoints(page):
    return sum(key.startswith("extproc_endpoint_waiting_requests{") for key in page)
