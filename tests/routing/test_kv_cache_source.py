"""Endpoints named as the source of a KV cache, as `p2p-source-producer` configures."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from extproc.config import factory, loader
from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.errors import ConfigError
from extproc.protocol.headers import KV_CACHE_SOURCE, steer_engine
from extproc.request import HttpRequest
from extproc.scheduling import registry
from extproc.scheduling.kv_cache_source import KvCacheSource
from extproc.testing import builders

EPP = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: p2p-source-producer, parameters: {minCachedTokenDelta: %s, prefillProfileName: p}}
- {type: prefix-cache-scorer}
- {type: random-picker}
"""


def sources(endpoints, delta=1, count=200, serving="a"):
    """Times that each endpoint is named where the first one computes a prompt."""
    candidates = builders.candidates(endpoints)
    context = builders.context(prompt_tokens=1000)
    profile = registry.profiles()["round-robin"]
    decision = profile.run(context, [c for c in candidates if c.endpoint.name == serving])
    selector = KvCacheSource(min_cached_token_delta=delta)
    named = Counter()
    for _ in range(count):
        source = selector.add_source(context, candidates, decision).kv_cache_source
        named[source and source.name] += 1
    return named


@pytest.mark.parametrize(
    ("own", "delta", "named"), [(0, 1, "b"), (799, 1, "b"), (800, 1, None), (500, 301, None)]
)
def test_a_source_has_enough_more_of_the_prompt(own, delta, named):
    """The endpoint that computes is not named, and one that has as much saves nothing."""
    endpoints = {"a": {"matched_tokens": own}, "b": {"matched_tokens": 800}, "c": {}}
    assert set(sources(endpoints, delta)) == {named}


def test_equal_sources_share_the_transfers_by_their_queues():
    """One that is a block behind counts as equal; a longer queue gets less."""
    endpoints = {
        "a": {},
        "b": {"matched_tokens": 800, "waiting": 0},
        "c": {"matched_tokens": 750},
        "d": {"matched_tokens": 800, "waiting": 9},
        "e": {"matched_tokens": 700},
    }
    named = sources(endpoints, count=2100)
    assert set(named) == {"b", "c", "d"}
    assert named["b"] == pytest.approx(1000, rel=0.1)
    assert named["d"] == pytest.approx(100, rel=0.4)


def test_the_header_names_the_source_in_place_of_the_clients():
    """Only extproc names endpoints."""
    endpoint, other = Endpoint("10.0.0.1:8000"), Endpoint("10.0.0.2:8000")
    request = builders.context().request
    named = Decision(request, [endpoint], kv_cache_source=other)
    assert steer_engine(named, {KV_CACHE_SOURCE}) == (((KV_CACHE_SOURCE, other.address),), ())
    assert named.without_prompt().kv_cache_source is other
    assert steer_engine(Decision(request, [endpoint]), {KV_CACHE_SOURCE}) == (
        (),
        (KV_CACHE_SOURCE,),
    )


def test_a_producer_of_an_endpoint_picker_config_names_sources():
    """A prompt that is computed again names the endpoint that has it; a hint excludes others."""
    parts = factory.build(loader.settings(loader.parse(EPP % 5, where="x")))
    assert parts.director.routing.kv_cache_source == KvCacheSource(min_cached_token_delta=5)
    body = b'{"model": "m", "prompt": "%s"}' % (b"a shared prompt " * 400)
    request = HttpRequest({":method": "POST", ":path": "/v1/completions"}, body)
    holder, other = "10.0.0.1:8000", "10.0.0.2:8000"
    parts.store.set_endpoints([Endpoint(holder)], 0.0)
    parts.director.reserve(parts.director.route(request, 1.0), 1.0)
    parts.store.set_endpoints([Endpoint(holder), Endpoint(other)], 2.0)
    decisions = [parts.director.route(request, 3.0) for _ in range(20)]
    named = {
        (d.endpoints[0].address, d.kv_cache_source and d.kv_cache_source.address) for d in decisions
    }
    assert named == {(holder, None), (other, holder)}
    hinted = HttpRequest(request.headers, body, subset=(other,))
    assert parts.director.route(hinted, 3.0).kv_cache_source is None


def test_pulled_tokens_do_not_correct_the_cache_of_the_endpoint_that_pulls():
    """Engines report what they pulled as cached: it says nothing of what they hold themselves."""
    parts = factory.build(loader.settings(loader.parse(EPP % 1, where="x")))
    body = b'{"model": "m", "prompt": "%s"}' % (b"a shared prompt " * 400)
    request = HttpRequest({":method": "POST", ":path": "/v1/completions"}, body)
    parts.store.set_endpoints([Endpoint("10.0.0.1:8000")], 0.0)
    decision = parts.director.route(request, 1.0)
    (served,) = decision.endpoints
    usage = {"prompt": 1600, "cached": 1500}
    calibration = parts.cache_model.state_of(served).calibration
    pulling = msgspec.structs.replace(decision, kv_cache_source=Endpoint("10.0.0.2:8000"))
    parts.director.on_usage(pulling, usage, served=served)
    assert calibration._hit == 0
    parts.director.on_usage(decision, usage, served=served)
    assert calibration._hit == 1500


@pytest.mark.parametrize("delta", [0, -1, '"x"'])
def test_a_producer_that_upstream_refuses_is_refused(delta):
    """With the place of the parameter."""
    with pytest.raises(ConfigError) as raised:
        loader.settings(loader.parse(EPP % delta, where="x"))
    assert raised.value.where.endswith("plugins[0].parameters.minCachedTokenDelta")
