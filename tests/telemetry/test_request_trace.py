"""The spans of a request: names, attributes, the decision table, and what they never hold."""

from __future__ import annotations

import itertools

import pytest

from extproc.decision import (
    CostResult,
    Decision,
    Disaggregation,
    FilterResult,
    Rejection,
    ScorerResult,
)
from extproc.endpoint import Candidate, Endpoint, Load
from extproc.protocol.trace_context import TraceContext
from extproc.request import InferenceRequest, RequestLabels
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.request_trace import MAX_CANDIDATES
from extproc.telemetry.stream_recorder import StreamRecorder
from tests.support import disaggregation
from tests.support.canary import CANARY

TRACE = TraceContext("a" * 32, "b" * 16, 1, "c" * 16)
LABELS = RequestLabels("m", "m", "tenant", 0)
STEPS = ["gateway.request_orchestration", "run_scheduler_profile", "filter_endpoints"]


def route(observer, decision):
    observer.on_routed(
        decision,
        request_id="my-id",
        labels=LABELS,
        trace_id=TRACE.trace_id,
        now=10.5,
        duration_s=0.001,
    )


class TraceFixture:
    """Observes requests as the tracer of a recorder, and keeps their spans."""

    def __init__(self):
        self.decisions = DecisionLog(10)
        self.recorder = StreamRecorder(ProcessCounters(), self.decisions, lambda: 0.0, tracer=self)
        self.traces = []
        self.spans = []
        self._ids = itertools.count(1)

    def make_span_id(self):
        return f"{next(self._ids):016x}"

    def add(self, trace, spans):
        self.spans = list(spans)
        self.traces.append((trace, {span.name: span for span in self.spans}))

    def begin(self):
        """The recorder of a traced request whose first message came at 10 s."""
        request = self.recorder.observe_request("demo")
        request.on_traced(TRACE, started_s=10.0)
        return request

    def serve(
        self, decision, *, status="200", headers_s=0.25, usage=None, wait_s=None, is_shown=False
    ):
        """The spans of a routed request that ended at 12 s."""
        request = self.begin()
        if wait_s is not None:
            request.on_dequeued(wait_s, priority=0)
        route(request, decision)
        if headers_s is not None:
            request.on_response_headers(
                headers_s,
                elapsed_s=0.501 + headers_s,
                status=status,
                is_stream=decision.request.stream,
                is_shown=is_shown,
            )
        if is_shown:
            request.on_response_chunk(0.901)
            request.on_response_chunk(0.951)
        if usage is not None:
            request.on_usage(usage)
        request.on_finished(endpoint="10.0.0.1:8000", status=status, duration_s=2.0)
        ((trace, spans),) = self.traces
        assert trace is TRACE
        return spans


def candidates(count):
    return [
        Candidate(
            Endpoint(f"10.0.0.{at + 1}:8000", f"pod-{at}"),
            Load(waiting=at, running=2, kv_usage=0.5),
            in_flight=at,
            matched_tokens=4,
        )
        for at in range(count)
    ]


def request(**fields):
    return InferenceRequest(
        "chat",
        "m",
        prompt=CANARY.encode(),
        prompt_tokens=12,
        session=CANARY,
        **fields,
    )


def timed(count=3, **fields):
    """A decision by estimated time; the second candidate is the cheapest."""
    listed = candidates(count)
    costs = [0.3, 0.1, *(0.5 + at for at in range(count - 2))]
    terms = [("queue", [0.1 * at for at in range(count)]), ("prefill", [0.05] * count)]
    terms.append(("slowdown", [9.0] * count))
    return Decision(
        request(stream=True, priority=-1),
        [listed[1].endpoint],
        profile="adaptive",
        candidates=listed,
        filters=[FilterResult("any", listed)],
        scored_candidates=listed,
        cost=CostResult("estimated-time", "s", costs, terms, lambda candidate: 0.15),
        totals=[-cost for cost in costs],
        picker="rendezvous",
        matched_tokens=4,
        plugin_keys={"session": CANARY},
        pool="demo",
        **fields,
    )


def weighted():
    """A decision by two scorers."""
    listed = candidates(2)
    return Decision(
        request(),
        [listed[0].endpoint],
        profile="weighted",
        candidates=listed,
        scored_candidates=listed,
        scores=[
            ScorerResult("queue-scorer", 2.0, [1.0, 0.5]),
            ScorerResult("prefix-cache-scorer", 3.0, [0.25, 0.25]),
        ],
        totals=[2.75, 1.75],
        picker="max-score-picker",
    )


def test_stages_have_the_attributes_of_upstream():
    """In a span of their own, beside those of the profiles that chose their endpoints."""
    fixture = TraceFixture()
    decision = disaggregation.decide(has_picture=True)
    stages = fixture.serve(decision)["prepare_disaggregation"]
    profiles = [span for span in fixture.spans if span.name == "run_scheduler_profile"]
    assert [span.attributes["llm_d.epp.scheduling.profile.name"] for span in profiles] == [
        *("decode", "prefill", "encode"),
    ]
    assert {span.parent_span_id for span in profiles} == {stages.parent_span_id}
    assert stages.attributes == {
        "gen_ai.request.id": "my-id",
        "gen_ai.request.model": "m",
        "llm_d.epp.pd.disaggregation_used": True,
        "llm_d.epp.pd.prefill_pod_address": decision.disaggregation.prefill.endpoints[0].ip,
        "llm_d.epp.pd.prefill_pod_port": "8000",
        "llm_d.epp.encode.disaggregation_used": True,
        "llm_d.epp.encode.endpoints": disaggregation.ENCODE,
    }


def test_stages_that_are_not_split_have_a_reason():
    """One that never is has none."""
    stages = TraceFixture().serve(disaggregation.decide("short"))["prepare_disaggregation"]
    assert stages.attributes["llm_d.epp.pd.reason"] == "short"
    assert stages.attributes["llm_d.epp.encode.reason"] == "no-media"
    stages = TraceFixture().serve(timed(disaggregation=Disaggregation(prefill_reason="cached")))[
        "prepare_disaggregation"
    ]
    assert stages.attributes == {
        "gen_ai.request.id": "my-id",
        "gen_ai.request.model": "m",
        "llm_d.epp.pd.disaggregation_used": False,
        "llm_d.epp.pd.reason": "cached",
        "llm_d.epp.encode.disaggregation_used": False,
    }


def test_spans_have_the_names_and_parents_of_upstream():
    """Each step is a child of the one it is part of, the first of the caller's span."""
    spans = TraceFixture().serve(timed())
    assert list(spans) == ["gateway.request", *STEPS, "pick_endpoints"]
    root = spans["gateway.request"]
    assert (root.span_id, root.parent_span_id) == (TRACE.span_id, TRACE.parent_span_id)
    orchestration, profile = (spans[name] for name in STEPS[:2])
    assert orchestration.parent_span_id == root.span_id
    assert profile.parent_span_id == orchestration.span_id
    for name in ("filter_endpoints", "pick_endpoints"):
        assert spans[name].parent_span_id == profile.span_id
    assert [name for name, span in spans.items() if span.is_server] == ["gateway.request"]


def test_spans_have_the_times_of_the_request():
    """The request from its first message to its end, and the decision within."""
    spans = TraceFixture().serve(timed(), wait_s=0.3)
    root = spans["gateway.request"]
    assert (root.start_s, root.end_s) == (10.0, 12.0)
    orchestration = spans["gateway.request_orchestration"]
    assert (orchestration.start_s, orchestration.end_s) == pytest.approx((10.2, 10.501))
    assert root.attributes["extproc.queue_s"] == 0.3
    for name in ("run_scheduler_profile", "filter_endpoints", "pick_endpoints"):
        assert (spans[name].start_s, spans[name].end_s) == (10.5, 10.501)


def test_request_has_predictions_beside_what_came():
    """Time to the first token, prompt tokens and cached tokens, predicted and actual."""
    usage = {"prompt": 11, "cached": 8, "completion": 3}
    attributes = TraceFixture().serve(timed(), usage=usage)["gateway.request"].attributes
    assert attributes == {
        "gen_ai.request.id": "my-id",
        "gen_ai.request.model": "m",
        "http.response.status_code": 200,
        "extproc.pool": "demo",
        "extproc.endpoint": "10.0.0.1:8000",
        "extproc.strategy": "adaptive",
        "extproc.predicted.ttft_s": 0.15,
        "extproc.ttft_s": 0.25,
        "extproc.response_headers_s": 0.25,
        "extproc.predicted.prompt_tokens": 12,
        "gen_ai.usage.input_tokens": 11,
        "extproc.predicted.cached_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.usage.output_tokens": 3,
    }


def test_first_chunk_of_a_stream_has_the_first_token():
    """With chunks, the first one counts, from the choice of the endpoint."""
    attributes = TraceFixture().serve(timed(), is_shown=True)["gateway.request"].attributes
    assert attributes["extproc.response_headers_s"] == 0.25
    assert attributes["extproc.ttft_s"] == pytest.approx(0.4)


def test_decision_has_the_attributes_of_upstream():
    """Numbers of candidates, the best of them and their scores."""
    spans = TraceFixture().serve(timed(model_rewrite="m-v2"))
    common = {"gen_ai.request.id": "my-id", "gen_ai.request.model": "m"}
    assert spans["gateway.request_orchestration"].attributes == {
        "target_model": "m-v2",
        "request_prio": -1,
    }
    assert spans["run_scheduler_profile"].attributes == {
        "llm_d.epp.scheduling.profile.name": "adaptive"
    }
    assert spans["filter_endpoints"].attributes == common | {
        "llm_d.epp.filter.candidate_endpoints": 3,
        "llm_d.epp.filter.filtered_endpoints": 3,
    }
    assert spans["pick_endpoints"].attributes == common | {
        "extproc.picker": "rendezvous",
        "llm_d.epp.picker.candidate_endpoints": 3,
        "llm_d.epp.picker.top_endpoints": ["pod-1", "pod-0", "pod-2"],
        "llm_d.epp.picker.top_scores": [-0.1, -0.3, -0.5],
    }


def test_decision_table_is_events_of_the_pick():
    """A candidate is an event with its load, cost and terms; the chosen one is first."""
    chosen, other, _ = TraceFixture().serve(timed())["pick_endpoints"].events
    assert (chosen.name, chosen.at_s) == ("candidate", 10.501)
    assert chosen.attributes == {
        "extproc.candidate.endpoint": "10.0.0.2:8000",
        "extproc.candidate.cost_ms": 100.0,
        "extproc.candidate.terms": "name=pod-1 queue=100.0ms prefill=50.0ms "
        "slowdown=9000.0ms waiting=1 running=2 kv_usage=0.5 in_flight=1 queued_tokens=0 cached_tokens=4",
    }
    assert other.attributes["extproc.candidate.endpoint"] == "10.0.0.1:8000"


def test_decision_table_is_bounded():
    """Of many candidates the chosen one and the best are shown."""
    spans = TraceFixture().serve(timed(100))
    events = spans["pick_endpoints"].events
    assert len(events) == MAX_CANDIDATES
    costs = [event.attributes["extproc.candidate.cost_ms"] for event in events]
    assert costs == sorted(costs)
    assert len(spans["pick_endpoints"].attributes["llm_d.epp.picker.top_endpoints"]) == 5


def test_scorers_have_spans():
    """A scorer is a span with its weight, highest and mean score, and a column of the table."""
    spans = TraceFixture().serve(weighted())
    span = spans["llm_d.epp.scorer.queue-scorer"]
    assert span.parent_span_id == spans["run_scheduler_profile"].span_id
    assert {
        "llm_d.epp.scorer.type": "queue-scorer",
        "llm_d.epp.scorer.weight": 2.0,
        "llm_d.epp.scorer.score.max": 1.0,
        "llm_d.epp.scorer.score.avg": 0.75,
    }.items() <= span.attributes.items()
    chosen = spans["pick_endpoints"].events[0].attributes
    assert chosen["extproc.candidate.score"] == 2.75
    terms = chosen["extproc.candidate.terms"]
    assert terms.startswith("name=pod-0 queue-scorer=1.000 prefix-cache-scorer=0.250 waiting=0 ")
    assert "extproc.predicted.ttft_s" not in spans["gateway.request"].attributes


def test_decision_without_comparison_has_no_table():
    """A fallback decision names its endpoint and the reason."""
    decision = Decision(
        InferenceRequest("opaque"),
        [Endpoint("10.0.0.1:8000")],
        picker="rescue",
        degraded="route raised KeyError",
    )
    spans = TraceFixture().serve(decision)
    assert not spans["pick_endpoints"].events
    picks = spans["pick_endpoints"].attributes
    assert picks["llm_d.epp.picker.top_endpoints"] == ["10.0.0.1:8000"]
    assert spans["gateway.request"].attributes["extproc.degraded"] == "route raised KeyError"


@pytest.mark.parametrize(
    ("status", "error"), [("200", ""), ("404", ""), ("503", "status 503"), ("", "no response")]
)
def test_failures_of_engines_are_errors(status, error):
    """A status from 500 on, or no response, is an error; what a client did wrong is none."""
    spans = TraceFixture().serve(timed(), status=status, headers_s=None)
    root = spans["gateway.request"]
    assert root.error == error
    assert root.attributes.get("error.type", "") == error


def test_refused_request_is_an_error_with_its_cause():
    """A request that is refused has one span, and is found by its trace."""
    fixture = TraceFixture()
    rejection = Rejection(429, CANARY, retry_after_s=3, cause="rate-limited")
    fixture.begin().on_rejected(rejection, request_id="my-id", labels=LABELS, now=10.25)
    ((_, spans),) = fixture.traces
    (root,) = spans.values()
    assert (root.name, root.end_s, root.error) == (
        "gateway.request",
        10.25,
        "refused: rate-limited",
    )
    assert root.attributes == {
        "gen_ai.request.id": "my-id",
        "gen_ai.request.model": "m",
        "extproc.pool": "demo",
        "http.response.status_code": 429,
        "error.type": "rate-limited",
    }
    assert fixture.decisions.find(TRACE.trace_id).id == "my-id"


def test_bug_after_the_decision_is_one_trace():
    """A request that was routed, and then refused for a bug, is sent once."""
    fixture = TraceFixture()
    observer = fixture.begin()
    route(observer, timed())
    observer.on_rejected(Rejection(500, "", cause="bug"), request_id="my-id", labels=None, now=10.6)
    assert not fixture.traces
    observer.on_finished(endpoint=None, status="", duration_s=0.7)
    ((_, spans),) = fixture.traces
    assert spans["gateway.request"].error == "refused: bug"
    assert spans["gateway.request"].attributes["http.response.status_code"] == 500


def test_traces_hold_no_text_of_requests():
    """Neither prompts nor sessions are in any value."""
    fixture = TraceFixture()
    spans = fixture.serve(timed(), usage={"prompt": 11})
    assert CANARY not in repr(spans)


def test_decisions_are_found_by_trace():
    """The id of a trace finds the decision, and no id finds none."""
    fixture = TraceFixture()
    fixture.serve(timed())
    assert fixture.decisions.find(TRACE.trace_id).id == "my-id"
    assert fixture.decisions.find("") is None


def test_recorder_without_tracer_only_notes_the_trace():
    """Without an exporter, the request is still known by its trace."""
    decisions = DecisionLog(10)
    recorder = StreamRecorder(ProcessCounters(), decisions, lambda: 0.0)
    observer = recorder.observe_request("demo")
    observer.on_traced(TRACE, started_s=10.0)
    route(observer, timed())
    assert decisions.find(TRACE.trace_id).trace_id == TRACE.trace_id
