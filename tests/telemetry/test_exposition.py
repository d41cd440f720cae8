"""A page that is rendered in pieces, between which the event loop serves others."""

from __future__ import annotations

from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.request import InferenceRequest, RequestLabels
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.stream_recorder import StreamRecorder
from tests.support.metrics_pages import build_exposition, build_view
from tests.support.pool_fixture import PoolFixture
from tests.telemetry.test_llmd_metrics import FIRST


def test_a_request_that_ends_while_the_page_is_rendered_is_counted():
    """The event loop serves others between two pieces; a count that falls looks like a restart."""
    counters = ProcessCounters(has_llmd_names=True)
    recorder = StreamRecorder(counters, DecisionLog(10), lambda: 0.0)
    request = recorder.observe_request("pool")
    request.on_routed(
        Decision(InferenceRequest("chat", "llama"), [Endpoint(FIRST)]),
        request_id="",
        labels=RequestLabels("chat", "llama", "ann", 2),
        trace_id="",
        now=0.0,
        duration_s=0.015,
        body_bytes=700,
    )
    counters.settle()
    exposition = build_exposition(counters)
    pieces = exposition.pieces(is_openmetrics=False)
    text = ""
    for piece in pieces:
        text += piece
        if "# TYPE extproc_requests_total " in piece:
            break
    request.on_finished(endpoint=FIRST, status="200", duration_s=1.0)
    counters.settle()
    text += "".join(pieces)
    (line,) = [line for line in text.splitlines() if line.startswith("llm_d_epp_request_total{")]
    assert line.endswith(" 1.0")


def test_a_pool_that_is_removed_while_the_page_is_rendered_stays_removed():
    """The rest of the page makes no new counters for it, which would be there for good."""
    counters = ProcessCounters(has_llmd_names=True)
    counters.for_pool("pool")
    view = build_view(PoolFixture({FIRST: None}).store.pool, queue=(0, 0))
    exposition = build_exposition(counters, {"pool": view})
    for piece in exposition.pieces(is_openmetrics=False):
        if "# TYPE llm_d_epp_request_total " in piece:
            del counters.open_pools["pool"]
    assert not counters.open_pools
