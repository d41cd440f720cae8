"""Spans of a traced request, built from its recorder, in the names of the upstream EPP.

The spans are plain values, which `otlp` reads some time after the end of the request and sends.
Prompts, bodies and header values have no place in them, except the request id.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from extproc.decision import Decision, Disaggregation, Rejection
from extproc.endpoint import Candidate
from extproc.parsing import surfaces
from extproc.protocol.trace_context import TraceContext
from extproc.request import shorten_id

if TYPE_CHECKING:
    from extproc.telemetry.request_recorder import RequestRecorder

#: Candidates in the decision table of a trace and in `llm_d.epp.picker.top_endpoints` (count), best
#: first. Upstream has as many, and each costs the exporter 5 % of a trace.
MAX_CANDIDATES: Final = 5

#: Spans of scorers in a trace (count).
_MAX_SCORERS: Final = 16

AttributeValue = str | int | float | bool | Sequence[str] | Sequence[float]
Attributes = dict[str, AttributeValue]


class SpanEvent(msgspec.Struct, frozen=True, gc=False):
    """Event of a span, at monotonic seconds."""

    name: str
    at_s: float
    attributes: Mapping[str, AttributeValue]


class SpanRecord(msgspec.Struct, frozen=True):
    """Finished span, child of another one of its trace.

    Attributes:
        span_id: 16 hexadecimal digits.
        parent_span_id: The same of its parent; empty for the root of a trace.
        start_s: Monotonic seconds.
        end_s: Monotonic seconds, not before `start_s`.
        is_server: Whether it serves the request of another process.
        error: Cause of a failure; empty without one.
    """

    name: str
    span_id: str
    parent_span_id: str
    start_s: float
    end_s: float
    attributes: Mapping[str, AttributeValue]
    events: Sequence[SpanEvent] = ()
    is_server: bool = False
    error: str = ""


class RequestTracer(Protocol):
    """Sends the traces of requests."""

    def add(self, trace: TraceContext, spans: Iterable[SpanRecord]) -> None:
        """Send the spans of a request, the one of `trace` first; may read them later."""

    def make_span_id(self) -> str:
        """Draw an id for a span."""


class RequestTrace(msgspec.Struct):
    """Trace of a request: what its spans need besides its recorder.

    Attributes:
        context: Context of the span of the request.
        started_s: Monotonic seconds at which its stream was opened.
        decision: The decision with all of its candidates, which its recorder may lose.
        rejection: Refusal after the decision; None without one.
    """

    context: TraceContext
    started_s: float
    decision: Decision | None = None
    rejection: Rejection | None = None

    def on_routed(self, decision: Decision) -> None:
        """Note the decision, without its prompt."""
        self.decision = decision

    def on_rejected(self, rejection: Rejection) -> None:
        """Note a refusal."""
        self.rejection = rejection


def send_unrouted(
    trace: RequestTrace,
    rejection: Rejection,
    tracer: RequestTracer,
    *,
    what: str,
    names: Attributes,
    now: float,
) -> None:
    """Send the span of a request that was not routed.

    Args:
        what: Beginning of the error, as `refused`.
        names: Result of `name_request`.
        now: Monotonic seconds of its end.
    """
    attributes = names | {
        "http.response.status_code": rejection.status,
        "error.type": rejection.cause,
    }
    error = f"{what}: {rejection.cause}"
    tracer.add(trace.context, [_build_root(trace, now, attributes, error=error)])


def name_request(request_id: str, model: str, pool: str = "") -> Attributes:
    """Attributes by which requests are searched for; empty ones are left out."""
    names = {
        "gen_ai.request.id": shorten_id(request_id),
        "gen_ai.request.model": model,
        "extproc.pool": pool,
    }
    return {name: value for name, value in names.items() if value}


def build_spans(
    recorder: RequestRecorder, trace: RequestTrace, make_span_id: Callable[[], str]
) -> Iterator[SpanRecord]:
    """All spans of a routed request that ended, built as they are read."""
    decision = trace.decision
    if decision is None:
        return
    yield _describe_request(recorder, trace, decision)
    yield from _describe_decision(recorder, trace, decision, make_span_id)


def _describe_request(
    recorder: RequestRecorder, trace: RequestTrace, decision: Decision
) -> SpanRecord:
    """The span of a routed request, with what was predicted and what came of it."""
    request, status = decision.request, recorder.status
    attributes = name_request(recorder.id, decision.client_model or request.target, decision.pool)
    attributes |= {
        "extproc.endpoint": recorder.endpoint or decision.endpoints[0].address,
        "extproc.strategy": decision.profile,
    }
    attributes |= _compare_predictions(recorder, trace, decision)
    error = ""
    if trace.rejection is not None:
        status, error = str(trace.rejection.status), f"refused: {trace.rejection.cause}"
    elif not status and request.api not in surfaces.UNOBSERVED:
        error = "no response"
    if status.isascii() and status.isdigit():
        attributes["http.response.status_code"] = int(status)
        if status >= "5":
            error = error or f"status {status}"
    if error:
        attributes["error.type"] = error
    if recorder.queue_s is not None:
        attributes["extproc.queue_s"] = recorder.queue_s
    if decision.degraded:
        attributes["extproc.degraded"] = decision.degraded
    end_s = trace.started_s + (recorder.seconds or 0.0)
    return _build_root(trace, end_s, attributes, error=error)


def _build_root(
    trace: RequestTrace, end_s: float, attributes: Mapping[str, AttributeValue], *, error: str
) -> SpanRecord:
    return SpanRecord(
        "gateway.request",
        trace.context.span_id,
        trace.context.parent_span_id,
        trace.started_s,
        end_s,
        attributes,
        is_server=True,
        error=error,
    )


def _compare_predictions(
    recorder: RequestRecorder, trace: RequestTrace, decision: Decision
) -> Attributes:
    """Predicted and actual time to the first token, prompt tokens and cached tokens."""
    usage, ttft_s = recorder.usage, None
    if recorder.first_chunk_s >= 0.0:
        ttft_s = trace.started_s + recorder.first_chunk_s - (recorder.at + recorder.routing_s)
    elif recorder.is_stream and not recorder.is_chunked:
        ttft_s = recorder.headers_s
    values: dict[str, AttributeValue | None] = {
        "extproc.predicted.ttft_s": decision.predicted_ttft_s,
        "extproc.response_headers_s": recorder.headers_s,
        "extproc.ttft_s": ttft_s,
        "extproc.predicted.prompt_tokens": decision.request.prompt_tokens,
        "gen_ai.usage.input_tokens": usage.get("prompt"),
        "extproc.predicted.cached_tokens": decision.matched_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.get("cached"),
        "gen_ai.usage.output_tokens": usage.get("completion"),
    }
    return {name: value for name, value in values.items() if value is not None}


def _describe_decision(
    recorder: RequestRecorder,
    trace: RequestTrace,
    decision: Decision,
    make_span_id: Callable[[], str],
) -> Iterator[SpanRecord]:
    """Spans of the decision; its steps are not timed, and have the time of the whole."""
    orchestration = make_span_id()
    start_s, end_s = recorder.at, recorder.at + recorder.routing_s
    request = decision.request
    yield SpanRecord(
        "gateway.request_orchestration",
        orchestration,
        trace.context.span_id,
        start_s - (recorder.queue_s or 0.0),
        end_s,
        {
            "target_model": decision.model_rewrite or request.target,
            "request_prio": request.priority,
        },
    )
    names = name_request(recorder.id, request.target)
    stages = decision.disaggregation
    for choice in (decision,) if stages is None else (decision, *stages.parts.values()):
        yield from _describe_choice(
            choice, names, orchestration, make_span_id, start_s=start_s, end_s=end_s
        )
    if stages is not None:
        attributes = names | _describe_stages(stages)
        name = "prepare_disaggregation"
        yield SpanRecord(name, make_span_id(), orchestration, start_s, end_s, attributes)


def _describe_stages(stages: Disaggregation) -> Attributes:
    """The endpoints of stages, or why the serving endpoint does them, under the names of upstream."""
    attributes: Attributes = {}
    for name, part, reason in stages.choices:
        prefix = f"llm_d.epp.{'pd' if name == 'prefill' else name}"
        attributes[f"{prefix}.disaggregation_used"] = part is not None
        if part is None:
            if reason:
                attributes[f"{prefix}.reason"] = reason
        elif name == "prefill":
            attributes[f"{prefix}.prefill_pod_address"] = part.endpoints[0].ip
            attributes[f"{prefix}.prefill_pod_port"] = str(part.endpoints[0].port)
        else:
            hosts = [endpoint.host_port for endpoint in part.endpoints]
            attributes[f"{prefix}.endpoints"] = ",".join(hosts)
    return attributes


def _describe_choice(
    decision: Decision,
    names: Attributes,
    orchestration: str,
    make_span_id: Callable[[], str],
    *,
    start_s: float,
    end_s: float,
) -> Iterator[SpanRecord]:
    """Spans of the run of a profile and of its steps."""
    scheduling = make_span_id()
    yield SpanRecord(
        "run_scheduler_profile",
        scheduling,
        orchestration,
        start_s,
        end_s,
        {"llm_d.epp.scheduling.profile.name": decision.profile},
    )
    best = _best(decision)
    table = [SpanEvent("candidate", end_s, _describe_candidate(decision, at)) for at in best]
    steps = [
        ("filter_endpoints", _describe_filters(decision) | names, ()),
        *_describe_scorers(decision),
        ("pick_endpoints", _describe_picks(decision, best) | names, table),
    ]
    for name, attributes, events in steps:
        yield SpanRecord(name, make_span_id(), scheduling, start_s, end_s, attributes, events)


def _best(decision: Decision) -> list[int]:
    """Positions in `scored_candidates`: chosen endpoints, then others by descending total."""
    totals, candidates = decision.totals, decision.scored_candidates
    ranks = {endpoint.address: rank for rank, endpoint in enumerate(decision.endpoints)}
    chosen = [at for at, known in enumerate(candidates) if known.endpoint.address in ranks]
    chosen.sort(key=lambda at: ranks[candidates[at].endpoint.address])
    by_total = list(range(len(candidates)))
    if totals:
        by_total.sort(key=totals.__getitem__, reverse=True)
    others = (at for at in by_total if candidates[at].endpoint.address not in ranks)
    return list(itertools.islice(itertools.chain(chosen, others), MAX_CANDIDATES))


def _describe_candidate(decision: Decision, at: int) -> Attributes:
    """A row of the table; its numbers are one text, because attributes are what costs."""
    candidate, cost = decision.scored_candidates[at], decision.cost
    attributes: Attributes = {"extproc.candidate.endpoint": candidate.endpoint.address}
    if cost is not None:
        factor, unit = (1000.0, "ms") if cost.unit == "s" else (1.0, cost.unit)
        attributes[f"extproc.candidate.cost{unit and '_'}{unit}"] = factor * cost.costs[at]
        terms = [f"{name}={factor * values[at]:.1f}{unit}" for name, values in cost.terms]
    else:
        if decision.totals:
            attributes["extproc.candidate.score"] = decision.totals[at]
        terms = [f"{scored.name}={scored.scores[at]:.3f}" for scored in decision.scores]
    load, name = candidate.load, candidate.endpoint.name
    if name:
        terms.insert(0, f"name={name}")
    terms.append(
        f"waiting={_show(load.waiting)} running={_show(load.running)} "
        f"kv_usage={_show(load.kv_usage)} in_flight={candidate.in_flight} "
        f"queued_tokens={candidate.queued_tokens:.0f} cached_tokens={candidate.matched_tokens}"
    )
    attributes["extproc.candidate.terms"] = " ".join(terms)
    return attributes


def _show(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"


def _describe_filters(decision: Decision) -> Attributes:
    attributes: Attributes = {
        "llm_d.epp.filter.candidate_endpoints": len(decision.candidates),
        "llm_d.epp.filter.filtered_endpoints": len(decision.scored_candidates),
    }
    if decision.excluded_by_model:
        attributes["extproc.filter.excluded_by_model"] = len(decision.excluded_by_model)
    if decision.excluded_by_health:
        attributes["extproc.filter.excluded_by_health"] = sum(
            len(endpoints) for _, endpoints in decision.excluded_by_health
        )
    return attributes


def _describe_scorers(
    decision: Decision,
) -> Iterator[tuple[str, Attributes, Sequence[SpanEvent]]]:
    for scored in decision.scores[:_MAX_SCORERS]:
        scores = scored.scores
        yield (
            f"llm_d.epp.scorer.{scored.name}",
            {
                "llm_d.epp.scorer.type": scored.name,
                "llm_d.epp.scorer.name": scored.name,
                "llm_d.epp.scorer.weight": scored.weight,
                "llm_d.epp.scorer.score.max": max(scores, default=0.0),
                "llm_d.epp.scorer.score.avg": sum(scores) / len(scores) if scores else 0.0,
            },
            (),
        )


def _describe_picks(decision: Decision, top: Sequence[int]) -> Attributes:
    candidates = decision.scored_candidates
    attributes: Attributes = {
        "extproc.picker": decision.picker,
        "llm_d.epp.picker.candidate_endpoints": len(candidates),
        "llm_d.epp.picker.top_endpoints": [_title(candidates[at]) for at in top]
        or [endpoint.name or endpoint.address for endpoint in decision.endpoints[:MAX_CANDIDATES]],
    }
    if decision.totals:
        attributes["llm_d.epp.picker.top_scores"] = [decision.totals[at] for at in top]
    return attributes


def _title(candidate: Candidate) -> str:
    return candidate.endpoint.name or candidate.endpoint.address
