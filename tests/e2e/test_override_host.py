"""The override-host profile: fallback lists, retries, and serving on while no extproc is up."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest

from extproc.demo import stack
from tests.e2e import http1, http2, installation
from tests.support import serving

CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
DESTINATION = "x-gateway-destination-endpoint"

#: Endpoints stay what they are, failing ones stay in, and the pick goes round, so that every order
#: comes up.
ROUND_ROBIN = (
    installation.UNSCRAPED.replace("least-request", "round-robin")[:-1] + ", health: {failures: 0}}"
)


@pytest.fixture(scope="module")
def dead():
    return [f"127.0.0.1:{stack.free_port()}" for _ in range(2)]


@pytest.fixture(scope="module")
def place(live, served, dead):
    with live.holding(
        installation.installed(
            *dead,
            served.address,
            template="override-host.yaml",
            arguments=["--config-text", ROUND_ROBIN, "--fallback-endpoints", "2"],
        )
    ) as item:
        yield item


async def until_picked(place, served):
    """Ask until extproc chooses; the workers of Envoy learn later than its statistics that it is healthy."""
    async with asyncio.timeout(serving.LIMIT_S):
        while True:
            answer = await http1.ask(place.port, "/v1/chat/completions", CHAT)
            assert answer.status == 200
            if served.asks[-1].head.get(DESTINATION):
                return


async def test_059_dead_endpoints_in_front(place, served, dead):
    """With two dead endpoints named first, the third one serves."""
    lists = []
    for _ in range(12):
        answer = await http1.ask(place.port, "/v1/chat/completions", CHAT)
        assert answer.status == 200
        assert served.asks[-1].body == CHAT
        lists.append(served.asks[-1].head.get(DESTINATION).split(","))
    assert all(sorted(item) == sorted([*dead, served.address]) for item in lists)
    assert any(entry[2] == served.address for entry in lists)


async def test_122_large_body_is_sent_again(place, served):
    """A body of many buffers arrives whole after connections that failed."""
    body = bytes(range(256)) * 20_000
    for _ in range(3):
        answer = await http1.ask(place.port, "/upload", body)
        assert (answer.status, answer.json()["bytes"]) == (200, len(body))


async def test_022_body_ended_by_trailers(place, served):
    """With retries on, a body that ends with trailers arrives once."""
    answer = await http2.ask(place.port, "/v1/chat/completions", CHAT, trailers=[("x-sum", "1")])
    assert answer.status == 200
    assert served.asks[-1].body == CHAT


async def test_080_fail_open(place, served, dead):
    """With extproc gone, requests with and without a body are served by Envoy's own policy."""
    await place.settled()
    place.extproc.process.kill()
    await place.extproc.process.wait()
    for _ in range(6):
        answer = await http1.ask(
            place.port, "/v1/chat/completions", CHAT, headers=[(DESTINATION, dead[0])]
        )
        assert answer.status == 200
        assert served.asks[-1].body == CHAT
        # What a client writes into the header is not what decides while it is not overwritten.
        assert served.asks[-1].head.all(DESTINATION) == []
        assert (await http1.ask(place.port, "/v1/models")).status == 200
    await place.start_extproc()
    await until_picked(place, served)


async def test_a_picker_that_hangs_is_not_asked(place, served):
    """Once it is unhealthy, requests go to Envoy's own policy; none is repeated at it."""
    await place.settled()
    place.extproc.process.send_signal(signal.SIGSTOP)
    try:
        before = await place.until_stats(
            lambda stats: "cluster.extproc.membership_healthy" not in stats
        )
        answer = await http1.ask(place.port, "/v1/chat/completions", CHAT)
        after = await place.stats()
    finally:
        place.extproc.process.send_signal(signal.SIGCONT)
    assert answer.status == 200
    assert served.asks[-1].head.all(DESTINATION) == []
    refused = "cluster.extproc.upstream_cx_none_healthy"
    assert after[refused] > before.get(refused, 0)
    assert "cluster.extproc.lb_healthy_panic" not in after
    await until_picked(place, served)
