"""Metrics of requests, from the messages of Envoy to the page."""

from __future__ import annotations

import json

import pytest

from bench import soak, soak_messages
from extproc.server.stream_handler import StreamHandler
from tests.parsing.builders import field, frame
from tests.support.metrics_pages import build_exposition

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"

#: A chat as Envoy shows it, in a sampled trace and of a tenant with a priority.
HEADERS = {
    ":method": "POST",
    ":path": "/v1/chat/completions",
    "content-type": "application/json",
    "traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01",
    "x-llm-d-inference-fairness-id": "ann",
}
BODY = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]})
USAGE = b'data: {"usage": {"prompt_tokens": 9, "completion_tokens": 5}}\n\n'


def page_of(core: soak.Core) -> list[str]:
    """The lines of the metrics page."""
    views = core.picker.pool_registry.views()
    exposition = build_exposition(core.picker.counters, views, now=core.now)
    return exposition.render(is_openmetrics=True).decode().splitlines()


async def test_a_stream_has_times_tokens_and_a_trace_on_the_page():
    """First token, gaps between chunks and time per token are those of the chunks that are shown."""
    core = soak.Core(soak.settings(engines=2, holding=False))
    await core.picker.sync()
    stream = core.open(soak_messages.headers(HEADERS), soak_messages.body(BODY.encode()))
    assert 'extproc_requests_running{model="m",pool=""} 1.0' in page_of(core)
    core.now += 0.25
    kind = {":status": "200", "content-type": "text/event-stream"}
    core.say(stream, soak_messages.headers(kind, response=True))
    for chunk, is_last in ((b"data: {}\n\n", False), (b"data: {}\n\n", False), (USAGE, True)):
        core.now += 0.5
        core.say(stream, soak_messages.body(chunk, response=True, ends=is_last))
    stream.finish()
    lines = page_of(core)
    for line in (
        'extproc_requests_total{model="m",pool="",status="200"} 1.0',
        'extproc_requests_running{model="m",pool=""} 0.0',
        'extproc_request_duration_seconds_sum{model="m",pool="",status="200"} 1.75',
        'extproc_request_ttft_seconds_sum{model="m",pool="",streaming="true"} 0.75',
        'extproc_request_itl_seconds_count{model="m",pool=""} 2.0',
        'extproc_request_itl_seconds_sum{model="m",pool=""} 1.0',
        'extproc_request_tpot_seconds_sum{model="m",pool=""} 0.25',
        'extproc_tenant_tokens_total{kind="completion",model="m",pool="",tenant="ann"} 5.0',
    ):
        assert line in lines
    bucket = 'extproc_request_duration_seconds_bucket{model="m",pool="",status="200",le="2.0"}'
    assert f'{bucket} 1.0 # {{trace_id="{TRACE_ID}"}} 1.75' in lines
    (predicted,) = [
        line.rpartition(" ")[2]
        for line in lines
        if line.startswith("extproc_request_predicted_ttft_seconds_sum")
    ]
    assert 0.0 < float(predicted) < 0.1


_GRPC = {"content-type": "application/grpc"}


def _open_grpc(core: soak.Core, *, is_stream: bool) -> StreamHandler:
    """A call of Generate that was routed."""
    path = "/vllm.grpc.engine.VllmEngine/Generate"
    request = field(2, field(2, bytes(range(1, 10)))) + (field(5, 1) if is_stream else b"")
    return core.open(
        soak_messages.headers({**HEADERS, **_GRPC, ":path": path}),
        soak_messages.body(frame(request)),
    )


@pytest.mark.parametrize(
    ("is_stream", "streaming", "ttft_s", "num_gaps"),
    [(True, "true", "0.75", 1), (False, "false", "0.25", 0)],
)
async def test_a_stream_of_the_grpc_api_counts_as_a_stream(is_stream, streaming, ttft_s, num_gaps):
    """Its method is the same for one message and for many; the request says which."""
    core = soak.Core(soak.settings(engines=2, holding=False))
    await core.picker.sync()
    stream = _open_grpc(core, is_stream=is_stream)
    core.now += 0.25
    core.say(stream, soak_messages.headers({":status": "200", **_GRPC}, response=True))
    for token in (1, 2):
        core.now += 0.5
        chunk = frame(field(1, field(1, bytes([token]))))
        core.say(stream, soak_messages.body(chunk, response=True, ends=False))
    stream.finish()
    lines = page_of(core)
    name = "extproc_request_ttft_seconds_sum"
    assert [line for line in lines if line.startswith(name)] == [
        f'{name}{{model="none",pool="",streaming="{streaming}"}} {ttft_s}'
    ]
    gaps = [line for line in lines if line.startswith("extproc_request_itl_seconds_count")]
    assert sum(float(line.rpartition(" ")[2]) for line in gaps) == num_gaps


@pytest.mark.parametrize(
    ("headers", "ends", "status"),
    [
        ({"grpc-status": "13"}, True, "500"),
        ({"grpc-status": "14"}, False, "503"),
        ({}, False, "200"),
    ],
)
async def test_a_failed_grpc_call_has_no_first_token_of_a_stream(headers, ends, status):
    """Its HTTP status is 200; it counts with that of its gRPC status, and without a first token."""
    core = soak.Core(soak.settings(engines=2, holding=False))
    await core.picker.sync()
    stream = _open_grpc(core, is_stream=True)
    core.now += 0.25
    answer = {":status": "200", **_GRPC, **headers}
    core.say(stream, soak_messages.headers(answer, response=True, ends=ends))
    stream.finish()
    names = tuple(
        f"extproc_request_{name}_count"
        for name in ("ttft_seconds", "predicted_ttft_seconds", "ttft_ratio")
    )
    lines = page_of(core)
    assert not [line for line in lines if line.startswith(names) and not line.endswith(" 0.0")]
    responses = [line for line in lines if line.startswith("extproc_responses_total")]
    assert [line.partition("status=")[2] for line in responses] == [f'"{status}"}} 1.0']


async def _stream(
    path: str, status: str, kind: str, chunks: list[tuple[float, bytes]]
) -> list[str]:
    """The page behind a stream whose chunks come so long after what precedes them."""
    core = soak.Core(soak.settings(engines=2, holding=False))
    await core.picker.sync()
    body = {
        "model": "m",
        "stream": True,
        "messages": [{"role": "user", "content": "x"}],
        "input": "x",
    }
    request = soak_messages.headers({**HEADERS, ":path": path})
    stream = core.open(request, soak_messages.body(json.dumps(body).encode()))
    core.say(
        stream, soak_messages.headers({":status": status, "content-type": kind}, response=True)
    )
    for wait_s, chunk in chunks:
        core.now += wait_s
        core.say(stream, soak_messages.body(chunk, response=True, ends=False))
    core.say(stream, soak_messages.body(b"", response=True, ends=True))
    stream.finish()
    return page_of(core)


_CREATED = (
    b'event: response.created\ndata: {"response":{"usage":null}}\n\n'
    b'event: response.in_progress\ndata: {"response":{"usage":null}}\n\n'
)


@pytest.mark.parametrize("cut", [0, 30, 70, len(_CREATED)])
async def test_the_first_token_of_responses_is_behind_the_events_that_precede_the_engine(cut):
    """VLLM sends them before it asks the engine, in whatever pieces the network makes of them."""
    added = b'event: response.output_item.added\ndata: {"item":{}}\n\n'
    delta = b'event: response.output_text.delta\ndata: {"delta":"x"}\n\n'
    end = b'event: response.completed\ndata: {"response":{"usage":{"output_tokens":3}}}\n\n'
    chunks = [(0.5, _CREATED[:cut]), (0.5, _CREATED[cut:]), (7.0, added), (0.5, delta), (0.5, end)]
    lines = await _stream("/v1/responses", "200", "text/event-stream", chunks)
    labels = '{model="m",pool=""'
    assert f'extproc_request_ttft_seconds_sum{labels},streaming="true"}} 8.0' in lines
    assert f"extproc_request_itl_seconds_count{labels}}} 2.0" in lines
    assert f"extproc_request_tpot_seconds_sum{labels}}} 0.5" in lines


async def test_responses_whose_events_have_no_names_begin_with_their_first_chunk():
    """Their order of keys is not known, so that no event can be told from another at its start."""
    chunks = [(0.5, b'data: {"type":"response.created"}\n\n'), (0.5, b"data: {}\n\n")]
    lines = await _stream("/v1/responses", "200", "text/event-stream", chunks)
    assert 'extproc_request_ttft_seconds_sum{model="m",pool="",streaming="true"} 0.5' in lines


async def test_a_failed_stream_has_no_times_between_tokens():
    """An error may be a stream as well."""
    chunks = [(0.5, b"data: {}\n\n"), (0.5, b"data: {}\n\n"), (0.5, USAGE)]
    lines = await _stream("/v1/chat/completions", "500", "text/event-stream", chunks)
    assert not [
        line for line in lines if "_itl_seconds_count{" in line or "_tpot_seconds_c" in line
    ]


async def test_a_content_type_in_upper_case_is_that_of_a_stream():
    """Types of media have no case."""
    chunks = [(0.5, b"data: {}\n\n"), (0.5, USAGE)]
    lines = await _stream("/v1/chat/completions", "200", "Text/Event-Stream", chunks)
    assert 'extproc_request_itl_seconds_count{model="m",pool=""} 1.0' in lines
