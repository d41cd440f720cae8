"""Prefill on another endpoint behind a real Envoy: what both endpoints get of a request."""

from __future__ import annotations

import json

import pytest

from extproc.protocol.headers import ENCODERS, PREFILLER
from tests.e2e import backend, http1, installation

PATH = "/v1/chat/completions"
ROLE = "llm-d.ai/role"


@pytest.fixture(scope="module")
def engines(live):
    """Engines for prefill and decode, in this order."""
    with live.holding(backend.backend()) as prefill, live.holding(backend.backend()) as decode:
        yield prefill, decode


@pytest.fixture(scope="module", params=["original-dst.yaml", "original-dst-buffered.yaml"])
def place(live, engines, binary, request):
    """An Envoy that removes no header of clients, and prefill for prompts of 100 tokens or more."""
    roles = zip(("prefill", "decode"), engines, strict=True)
    config = {
        "apiVersion": "extproc/v1alpha1",
        "kind": "ExtProcConfig",
        "scrape": {"enabled": False},
        "pool": {
            "endpoints": [{"address": e.address, "labels": {ROLE: role}} for role, e in roles]
        },
        "scheduling": {
            "profile": profile("decode"),
            "disaggregation": {
                "prefill": {
                    "profile": profile("prefill"),
                    "decider": {
                        "kind": "prefix-based-pd-decider",
                        "params": {"nonCachedTokens": 100},
                    },
                }
            },
        },
    }
    with live.holding(
        installation.installed(
            template=request.param,
            arguments=["--config-text", json.dumps(config)],
            change=lambda config: installation.keep_headers(config, PREFILLER, ENCODERS),
            binary=binary,
        )
    ) as item:
        yield item


def profile(role):
    return {"name": role, "filters": [{"kind": f"{role}-filter"}]}


async def send(place, engines, prompt, headers=()):
    """The headers with which the request arrived at the engine for decode, and no other."""
    before = [len(engine.asks) for engine in engines]
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({"model": "demo", "messages": messages, "max_tokens": 2}).encode()
    answer = await http1.ask(place.port, PATH, body, headers=headers)
    _, decode = engines
    assert answer.status == 200
    assert answer.json()["by"] == decode.address
    assert [len(engine.asks) for engine in engines] == [before[0], before[1] + 1]
    assert decode.asks[-1].body == body
    return decode.asks[-1].head


@pytest.mark.parametrize("headers", [[], [(PREFILLER, "10.0.0.9:1"), (ENCODERS, "10.0.0.9:2")]])
async def test_a_long_prompt_names_the_engine_for_prefill(place, engines, headers):
    """The header has the picker's address alone, and goes to the engine for decode."""
    prefill, _ = engines
    prompt = f"{place.port} {len(headers)} " + "a prompt of many words " * 100
    head = await send(place, engines, prompt, headers)
    assert head.all(PREFILLER) == [prefill.address]
    assert head.all(ENCODERS) == []
    # Cached there: the same prompt is computed by the engine for decode.
    head = await send(place, engines, prompt, headers)
    assert head.all(PREFILLER) == []


@pytest.mark.parametrize("headers", [[], [(PREFILLER, "10.0.0.9:1"), (ENCODERS, "10.0.0.9:2")]])
async def test_a_short_prompt_names_no_engine(place, engines, headers):
    """Headers of clients do not arrive either."""
    head = await send(place, engines, "hello", headers)
    assert head.all(PREFILLER) == head.all(ENCODERS) == []
    await place.settled()
