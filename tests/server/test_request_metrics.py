"""Metrics of requests, from the messages of Envoy to the page."""

from __future__ import annotations

import json

from bench import soak, soak_messages
from extproc.telemetry.exposition import Exposition

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
    exposition = Exposition(
        core.picker.counters,
        core.picker.pool_registry.views,
        clock=lambda: core.now,
        gauges={},
        about=dict,
    )
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
