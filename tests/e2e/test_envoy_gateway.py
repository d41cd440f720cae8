"""A real Envoy with the filters and clusters that Envoy Gateway and Envoy AI Gateway generate."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from extproc.config import envoy_lint
from extproc.config.settings import Settings
from tests.e2e import backend, http1, installation
from tests.e2e.installation import UNSCRAPED
from tests.manifests import tools

GENERATED = Path(__file__).parents[1] / "data/gateways/envoy-gateway-1.9.yaml"
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()

#: Unscraped, and with request ids on responses as in the manifests.
CONFIG = UNSCRAPED.removesuffix("}") + ", responses: {request_id: true}}"

#: Longer than the 32 KiB that a connection of Envoy Gateway buffers.
LONG = 200_000

#: By its header, the pool whose bodies are buffered; the other one is FULL_DUPLEX_STREAMED.
BUFFERED = ("x-pool", "second")
DUPLEX = ("x-pool", "vllm")


def generate(config):
    """Replace the listener and the clusters of a shipped file by generated ones."""
    shipped, generated = config["static_resources"], tools.loaded(GENERATED.read_text())
    picker = installation.cluster(config, "extproc")["load_assignment"]["endpoints"]
    listener = shipped["listeners"][0]
    shipped.update(generated["static_resources"])
    config["layered_runtime"] = generated["layered_runtime"]
    shipped["listeners"][0]["address"] = listener["address"]
    for cluster in shipped["clusters"]:
        if "endpointpicker" in cluster["name"]:
            cluster["load_assignment"]["endpoints"] = picker


@pytest.fixture(scope="module")
def place(live, served):
    fixture = installation.installed(
        served.address, plaintext=False, change=generate, arguments=["--config-text", CONFIG]
    )
    with live.holding(fixture) as item:
        yield item


@pytest.mark.parametrize("pool", [DUPLEX, BUFFERED])
async def test_requests_are_routed_and_refused(place, served, pool):
    """The pick is served, over TLS that nothing verifies; a refusal is JSON with its status."""
    answer = await http1.ask(place.port, "/v1/chat/completions", CHAT, headers=[pool])
    assert answer.status == 200
    assert served.asks[-1].body == CHAT
    answer = await http1.ask(place.port, "/v1/chat/completions", CHAT[:-1], headers=[pool])
    assert answer.status == 400
    assert answer.json()["error"]["message"].startswith("inference error: BadRequest - ")


@pytest.mark.parametrize("body", [CHAT, CHAT[:-1]])
async def test_responses_and_refusals_have_the_request_id(place, body):
    """It comes from extproc: nothing in the generated listener adds it."""
    answer = await http1.ask(place.port, "/v1/chat/completions", body, headers=[DUPLEX])
    request_id = answer.head.get("x-request-id")
    assert request_id
    decision = await http1.ask(place.pages, f"/debug/decisions/{request_id}")
    assert decision.json()["id"] == request_id


@pytest.mark.parametrize("pool", [DUPLEX, BUFFERED])
async def test_streams_are_not_held_back(place, served, pool):
    """The first event arrives before the second exists."""
    observed = asyncio.Event()
    served.plays["/events"] = backend.two_events(observed)
    async with http1.calling(place.port) as call:
        await call.start("POST", "/events", [pool, ("content-length", str(len(CHAT)))])
        await call.send(CHAT)
        await call.begun()
        assert await call.body.piece() == b"data: 1\n\n"
        observed.set()
        assert await call.body.rest() == b"data: 2\n\n"


async def test_long_responses_pass(place, served):
    """They are FULL_DUPLEX_STREAMED; a buffer would overflow before extproc answers."""
    served.plays["/long"] = backend.saying(b"x" * LONG)
    answer = await http1.ask(place.port, "/long", CHAT, headers=[DUPLEX])
    assert (answer.status, len(answer.body)) == (200, LONG)


@pytest.mark.parametrize(("pool", "status"), [(DUPLEX, 200), (BUFFERED, 413)])
async def test_long_requests_pass_unless_envoy_buffers_them(place, pool, status):
    """Its buffer is that of the connection; the overlay does not raise it."""
    answer = await http1.ask(place.port, "/upload", bytes(LONG), headers=[pool])
    assert answer.status == status


def test_doctor_judges_what_is_in_force():
    """Neither the filter of AI Gateway, nor what routes and the runtime replace, is a finding."""
    tree = tools.loaded(GENERATED.read_text())
    findings = envoy_lint.read(tree, Settings(), where="envoy.yaml")
    assert {
        (finding.severity, finding.check, finding.place.rpartition("/")[2])
        for finding in findings
        if finding.severity not in ("fine", "note")
    } == {
        ("warning", "buffer_limit", "http"),
        (
            "warning",
            "picker_breakers",
            "cluster envoy.clusters.endpointpicker_second_models_ext_proc",
        ),
    }
