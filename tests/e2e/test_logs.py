"""Log of extproc behind a real Envoy, as JSON lines."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from extproc.demo import stack
from tests.e2e import http1, installation
from tests.support.canary import CANARY

PATH = "/v1/chat/completions"
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": CANARY}]}).encode()

#: A tenant has four requests, and an ejected endpoint is probed soon.
CONFIG = (
    installation.UNSCRAPED[:-1]
    + ", health: {base_s: 0.3}, flow_control: {enabled: true, limit: {requests_per_s: 0.001, burst_s: 4000}}}"
)


@pytest.fixture(scope="module")
def dead():
    return f"127.0.0.1:{stack.free_port()}"


@pytest.fixture(scope="module")
def place(live, served, dead):
    with live.holding(
        installation.installed(
            served.address,
            dead,
            arguments=("--config-text", CONFIG, "--log-format", "json"),
            change=lambda config: installation.keep_headers(
                config, "x-llm-d-inference-fairness-id"
            ),
        )
    ) as running:
        yield running


def find_line(place, message, **fields):
    """The first line of the log with these fields; None while there is none."""
    for line in place.lines:
        if line.startswith("extproc: {"):
            known = json.loads(line.removeprefix("extproc: "))
            if known["message"] == message and fields.items() <= known.items():
                return known
    return None


async def logged(place, message, **fields):
    """The same, which may be on its way."""
    async with asyncio.timeout(300):
        while (line := find_line(place, message, **fields)) is None:
            await asyncio.sleep(0.05)
    return line


async def test_a_request_is_logged_under_the_id_of_the_client(place, served):
    """With its endpoint, status, times and the reason of the pick."""
    statuses = {}
    for at in range(4):
        name = f"my-id-{at}"
        headers = [("x-request-id", name), ("x-llm-d-inference-fairness-id", str(at))]
        statuses[name] = (await http1.ask(place.port, PATH, CHAT, headers=headers)).status
    name = next(name for name, status in statuses.items() if status == 200)
    line = await logged(place, "request", id=name)
    assert (line["status"], line["endpoint"], line["model"]) == (200, served.address, "m")
    assert 0 < line["response_headers_s"] <= line["total_s"]
    assert line["pick"].startswith("least-request; chose=")


async def test_a_client_that_leaves_within_its_body_is_logged(place):
    """With the status of clients that left, and counted by it."""
    async with http1.calling(place.port) as call:
        fields = [("content-length", str(len(CHAT))), ("x-request-id", "left")]
        await call.start("POST", PATH, fields)
        await call.send(CHAT[:20])
        await place.until(lambda result: result["extproc_body_buffer_bytes"] == 20)
        call.cut()
    line = await logged(place, "request abandoned", id="left")
    assert (line["status"], line["cause"]) == (499, "client-left")
    metrics = await place.metrics()
    assert metrics['extproc_requests_total{model="none",status="499"}'] == 1


async def test_refused_requests_are_logged_with_their_cause(place):
    """Each with its id, and the first of them with a count."""
    headers = [("x-request-id", "broken")]
    assert (await http1.ask(place.port, PATH, b"{", headers=headers)).status == 400
    line = await logged(place, "request refused", id="broken")
    assert (line["status"], line["cause"]) == (400, "bad-request")
    await logged(place, "requests refused", status=400, cause="bad-request", count=1)


async def test_a_limited_tenant_is_logged_as_rate_limited(place):
    """A limit of the configuration differs from engines that are busy."""
    headers = [("x-request-id", "limited"), ("x-llm-d-inference-fairness-id", "greedy")]
    for _ in range(5):
        status = (await http1.ask(place.port, PATH, CHAT, headers=headers)).status
    assert status == 429
    line = await logged(place, "request refused", id="limited", status=429)
    assert line["cause"] == "rate-limited"
    await logged(place, "requests refused", status=429, cause="rate-limited")


async def test_an_endpoint_that_fails_is_logged(place, dead):
    """The pool's first list, and the cause of an ejection."""
    assert (await logged(place, "endpoints added"))["total"] == 2
    async with asyncio.timeout(300):
        for at in itertools.count():
            headers = [("x-llm-d-inference-fairness-id", f"other-{at}")]
            await http1.ask(place.port, PATH, CHAT, headers=headers)
            line = find_line(place, "endpoint ejected", endpoint=dead)
            if line is not None:
                break
            await asyncio.sleep(0.05)
    assert (line["cause"], line["level"]) == ("errors", "warning")
