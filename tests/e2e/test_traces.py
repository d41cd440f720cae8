"""Traces through a real Envoy: from the client to the engine, with and without spans of Envoy."""

from __future__ import annotations

import asyncio
import json

import pytest
import yaml

from extproc.protocol.trace_context import parse_traceparent
from tests.e2e import http1, installation
from tests.manifests import envoy_files
from tests.support import otlp_receiver
from tests.support.canary import CANARY

PATH = "/v1/chat/completions"
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": CANARY}]}).encode()
SPAN = "b7ad6b7169203331"

#: An id of a trace for each test, so that spans of one are not taken for those of another.
TRACE, UNSAMPLED, REFUSED, TWICE = (f"0af7651916cd43dd8448eb211c8031{at:02}" for at in range(4))


@pytest.fixture(scope="module")
def receiver():
    with otlp_receiver.receiving() as result:
        yield result


@pytest.fixture(scope="module")
def environment(receiver):
    """Every trace of extproc goes to the receiver, soon; one that no caller samples is not sent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.grpc_port}")
        patch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        patch.setenv("OTEL_SERVICE_NAME", "picker")
        yield


@pytest.fixture(scope="module")
def place(live, served, environment):
    with live.holding(installation.installed(served.address)) as running:
        yield running


@pytest.fixture(scope="module")
def traced_place(live, served, environment, receiver):
    """The same, where Envoy traces every request."""
    text = (installation.SHIPPED / "original-dst.yaml").read_text()
    shipped = yaml.safe_load(envoy_files.with_traces(text))

    def trace(config):
        block = installation.manager(shipped)
        cluster = installation.cluster(shipped, "traces")
        (group,) = cluster["load_assignment"]["endpoints"]
        (item,) = group["lb_endpoints"]
        item["endpoint"]["address"]["socket_address"]["port_value"] = receiver.grpc_port
        manager = installation.manager(config)
        manager["tracing"] = {**block["tracing"], "random_sampling": {"value": 100}}
        manager["request_id_extension"] = block["request_id_extension"]
        config["static_resources"]["clusters"].append(cluster)

    with live.holding(installation.installed(served.address, change=trace)) as running:
        yield running


async def ask(place, served, *, trace="", flags="01", body=CHAT, request_id="id"):
    """Send a request; its response, and the trace context that the engine received."""
    headers = [("x-request-id", request_id)]
    if trace:
        headers.append(("traceparent", f"00-{trace}-{SPAN}-{flags}"))
        headers.append(("baggage", "user=me"))
    before = len(served.asks)
    answer = await http1.ask(place.port, PATH, body, headers=headers)
    if len(served.asks) == before:
        return answer, None
    head = served.asks[-1].head
    assert head.get("baggage") == ("user=me" if trace else "")
    value = head.get("traceparent")
    return answer, parse_traceparent(value) if value else None


async def wait_for(receiver, name, **attributes):
    """Wait for a span without stopping what reads the processes."""
    return await asyncio.to_thread(receiver.wait_for, name, **attributes)


async def test_engine_continues_the_trace_of_the_client(place, served, receiver):
    """Client -> span of extproc -> engine, with the decision in between."""
    answer, received = await ask(place, served, trace=TRACE, request_id="traced")
    assert answer.status == 200
    assert (received.trace_id, received.is_sampled) == (TRACE, True)
    span = await wait_for(receiver, "gateway.request", gen_ai__request__id="traced")
    assert (span.trace_id, span.parent_span_id) == (TRACE, SPAN)
    assert received.span_id == span.span_id
    assert span.resource["service.name"] == "picker"
    assert span.attributes["http.response.status_code"] == 200
    assert span.attributes["extproc.endpoint"] == served.address
    pick = await wait_for(receiver, "pick_endpoints", gen_ai__request__id="traced")
    assert pick.trace_id == TRACE
    assert pick.attributes["llm_d.epp.picker.top_endpoints"] == [served.address]
    ((name, candidate),) = pick.events
    assert (name, candidate["extproc.candidate.endpoint"]) == ("candidate", served.address)
    for name in ("gateway.request_orchestration", "run_scheduler_profile", "filter_endpoints"):
        await wait_for(receiver, name)


async def test_trace_id_explains_the_decision(place, served):
    """The pages know the request by its trace as well."""
    await ask(place, served, trace=TRACE, request_id="explained")
    decision = await http1.ask(place.pages, f"/debug/decisions/{TRACE}")
    assert decision.json()["id"] == "explained"
    assert decision.json()["trace_id"] == TRACE


async def test_refused_request_is_traced(place, served, receiver):
    """A request that no engine sees has a span with the cause."""
    answer, received = await ask(place, served, trace=REFUSED, body=b"{", request_id="refused")
    assert (answer.status, received) == (400, None)
    span = await wait_for(receiver, "gateway.request", gen_ai__request__id="refused")
    assert (span.trace_id, span.attributes["error.type"]) == (REFUSED, "bad-request")
    assert span.is_error


async def test_unsampled_request_has_no_span(place, served, receiver):
    """The client's flag decides, and its header reaches the engine as it was."""
    _, received = await ask(place, served, trace=UNSAMPLED, flags="00", request_id="unsampled")
    assert (received.trace_id, received.span_id) == (UNSAMPLED, SPAN)
    assert not received.is_sampled
    _, received = await ask(place, served, request_id="unsampled")
    assert received is None
    await ask(place, served, trace=TRACE, request_id="later")
    await wait_for(receiver, "gateway.request", gen_ai__request__id="later")
    assert UNSAMPLED not in {span.trace_id for span in receiver.spans}
    metrics = await place.metrics()
    assert metrics['extproc_trace_spans_total{result="failed"}'] == 0
    assert metrics['extproc_trace_spans_total{result="dropped"}'] == 0


async def test_nothing_of_a_prompt_is_in_a_span(place, served, receiver):
    """Nor is it in anything else that was sent."""
    await ask(place, served, trace=TRACE, request_id="secret")
    await wait_for(receiver, "gateway.request", gen_ai__request__id="secret")
    assert not any(CANARY in str(span.message) for span in receiver.spans)


async def test_trace_that_envoy_starts(traced_place, served, receiver):
    """Without a trace of the client, Envoy's span is the parent, and the engine's trace is the same."""
    answer, received = await ask(traced_place, served, request_id="by-envoy")
    assert answer.status == 200
    span = await wait_for(receiver, "gateway.request", gen_ai__request__id="by-envoy")
    assert received.trace_id == span.trace_id
    ingress = await wait_for(receiver, "ingress")
    assert ingress.resource["service.name"] == "envoy"
    assert ingress.trace_id == span.trace_id
    assert span.parent_span_id
    parents = {other.span_id: other for other in receiver.spans if other.trace_id == span.trace_id}
    assert parents[span.parent_span_id].resource["service.name"] == "envoy"


async def test_envoy_is_between_client_and_picker(traced_place, served, receiver):
    """Client -> Envoy -> extproc in one trace, and the engine in it."""
    _, received = await ask(traced_place, served, trace=TWICE, request_id="twice")
    assert received.trace_id == TWICE
    span = await wait_for(receiver, "gateway.request", gen_ai__request__id="twice")
    assert span.trace_id == TWICE
    assert span.parent_span_id not in {"", SPAN}
