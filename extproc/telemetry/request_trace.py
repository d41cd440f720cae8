"""Spans of a traced request: what an observer sees of it, in the names of the upstream EPP.

The spans are plain values, which `otlp` reads some time after the end of the request and sends.
Prompts, bodies and header values have no place in them, except the request id.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from extproc.decision import Decision, Rejection
from extproc.endpoint import Candidate
from extproc.parsing import surfaces
from extproc.protocol.trace_context import TraceContext
from extproc.request import RequestLabels, shorten_id
from extproc.telemetry.request_recorder import RequestRecorder, model_of

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


class SpanSink(Protocol):
    """Receiver of finished traces."""

    def add(self, trace: TraceContext, spans: Iterable[SpanRecord]) -> None:
        """Send the spans of a request, the one of `trace` first; may read them later."""

    def make_span_id(self) -> str:
        """Draw an id for a span."""


class TracedRequest:
    """Observer of a traced request: reports to its recorder, and sends its spans at its end."""

    def __init__(
        self, recorder: RequestRecorder, trace: TraceContext, *, started_s: float, sink: SpanSink
    ) -> None:
        self._recorder = recorder
        self._trace = trace
        self._started_s = started_s
        self._sink = sink
        self._pool = ""
        self._request_id = ""
        self._decision: Decision | None = None
        self._rejection: Rejection | None = None
        self._queue_s: float | None = None
        self._routing_s = 0.0
        self._routed_s = 0.0
        self._headers_s: float | None = None
        self._ttft_s: float | None = None
        self._is_ttft_due = False
        self._usage: Mapping[str, int] = {}

    def on_traced(self, trace: TraceContext, *, started_s: float) -> TracedRequest:
        """Return itself: a request is traced once."""
        del trace, started_s
        return self

    def on_pool_selected(self, pool: str) -> None:
        """Note the pool."""
        self._recorder.on_pool_selected(pool)
        self._pool = pool

    def on_direct_response(self) -> None:
        """Report a request that was answered without an endpoint; it has no span."""
        self._recorder.on_direct_response()

    def on_rejected(
        self, rejection: Rejection, *, request_id: str, labels: RequestLabels | None, now: float
    ) -> None:
        """Send the span of a rejected request, unless it was routed before."""
        self._recorder.on_rejected(rejection, request_id=request_id, labels=labels, now=now)
        self._rejection = rejection
        if self._decision is None:
            self._request_id = request_id
            self._send_unrouted("refused", rejection, model_of(labels), now)

    def on_abandoned(
        self, rejection: Rejection, *, request_id: str, labels: RequestLabels | None, now: float
    ) -> None:
        """Send the span of a request whose stream ended before it was routed."""
        self._recorder.on_abandoned(rejection, request_id=request_id, labels=labels, now=now)
        self._request_id = request_id
        self._send_unrouted("abandoned", rejection, model_of(labels), now)

    def on_dequeued(self, wait_s: float, *, priority: int) -> None:
        """Note the time in the queue."""
        self._recorder.on_dequeued(wait_s, priority=priority)
        self._queue_s = wait_s

    def on_routed(
        self,
        decision: Decision,
        *,
        request_id: str,
        labels: RequestLabels,
        trace_id: str,
        now: float,
        duration_s: float,
    ) -> None:
        """Note the decision."""
        self._recorder.on_routed(
            decision,
            request_id=request_id,
            labels=labels,
            trace_id=trace_id,
            now=now,
            duration_s=duration_s,
        )
        self._request_id = request_id
        self._decision = decision.without_prompt(self._recorder.pool_counters.name)
        self._routing_s, self._routed_s = now, now + duration_s

    @property
    def decision(self) -> Decision | None:
        """The decision as it is recorded; None before it."""
        return self._recorder.decision

    def on_model_rewritten(self, *, edited: bool) -> None:
        """Report a rewritten model name, which the decision has."""
        self._recorder.on_model_rewritten(edited=edited)

    def on_response_headers(
        self, duration_s: float, *, elapsed_s: float, status: str, is_stream: bool, is_shown: bool
    ) -> None:
        """Note the time to response headers, which for streams without chunks has the first token."""
        self._recorder.on_response_headers(
            duration_s, elapsed_s=elapsed_s, status=status, is_stream=is_stream, is_shown=is_shown
        )
        self._headers_s = duration_s
        self._is_ttft_due = is_stream and is_shown
        if is_stream and not is_shown:
            self._ttft_s = duration_s

    def on_response_chunk(self, elapsed_s: float) -> None:
        """Note the time of the first chunk of a stream."""
        self._recorder.on_response_chunk(elapsed_s)
        if self._is_ttft_due:
            self._is_ttft_due = False
            self._ttft_s = self._started_s + elapsed_s - self._routed_s

    def on_usage(self, usage: Mapping[str, int]) -> None:
        """Note the tokens that the response reported."""
        self._recorder.on_usage(usage)
        self._usage = usage

    def on_answer_ids(self, ids: Sequence[str]) -> None:
        """See `RequestObserver`."""
        self._recorder.on_answer_ids(ids)

    def on_finished(self, *, endpoint: str | None, status: str, duration_s: float) -> None:
        """Send the spans of a routed request."""
        self._recorder.on_finished(endpoint=endpoint, status=status, duration_s=duration_s)
        decision = self._decision
        if decision is not None:
            endpoint = endpoint or decision.endpoints[0].address
            end_s = self._started_s + duration_s
            self._sink.add(self._trace, self._spans(decision, endpoint, status, end_s))

    def _spans(
        self, decision: Decision, endpoint: str, status: str, end_s: float
    ) -> Iterator[SpanRecord]:
        """All spans of a routed request, built as they are read."""
        yield self._root(decision, endpoint, status, end_s)
        yield from self._decision_spans(decision)

    def _send_unrouted(self, what: str, rejection: Rejection, model: str, now: float) -> None:
        attributes = self._common_attributes(model)
        attributes |= {
            "http.response.status_code": rejection.status,
            "error.type": rejection.cause,
        }
        self._sink.add(
            self._trace,
            [self._root_record(now, attributes, error=f"{what}: {rejection.cause}")],
        )

    def _root(self, decision: Decision, endpoint: str, status: str, end_s: float) -> SpanRecord:
        """The span of the request, with what was predicted and what came of it."""
        self._pool = decision.pool or self._pool
        attributes = self._common_attributes(decision.client_model or decision.request.target)
        attributes |= {"extproc.endpoint": endpoint, "extproc.strategy": decision.profile}
        attributes |= self._compare_predictions(decision)
        error = ""
        if self._rejection is not None:
            status, error = str(self._rejection.status), f"refused: {self._rejection.cause}"
        elif not status and decision.request.api not in surfaces.UNOBSERVED:
            error = "no response"
        if status.isascii() and status.isdigit():
            attributes["http.response.status_code"] = int(status)
            if status >= "5":
                error = error or f"status {status}"
        if error:
            attributes["error.type"] = error
        optional = {
            "extproc.queue_s": self._queue_s,
            "extproc.degraded": decision.degraded or None,
        }
        attributes |= {name: value for name, value in optional.items() if value is not None}
        return self._root_record(end_s, attributes, error=error)

    def _root_record(
        self, end_s: float, attributes: Mapping[str, AttributeValue], *, error: str
    ) -> SpanRecord:
        trace = self._trace
        return SpanRecord(
            "gateway.request",
            trace.span_id,
            trace.parent_span_id,
            self._started_s,
            end_s,
            attributes,
            is_server=True,
            error=error,
        )

    def _common_attributes(self, model: str) -> Attributes:
        """Attributes by which requests are searched for."""
        names = {
            "gen_ai.request.id": shorten_id(self._request_id),
            "gen_ai.request.model": model,
            "extproc.pool": self._pool,
        }
        return {name: value for name, value in names.items() if value}

    def _compare_predictions(self, decision: Decision) -> Attributes:
        """Predicted and actual time to the first token, prompt tokens and cached tokens."""
        request, usage = decision.request, self._usage
        values: dict[str, AttributeValue | None] = {
            "extproc.predicted.ttft_s": decision.predicted_ttft_s,
            "extproc.response_headers_s": self._headers_s,
            "extproc.ttft_s": self._ttft_s,
            "extproc.predicted.prompt_tokens": request.prompt_tokens,
            "gen_ai.usage.input_tokens": usage.get("prompt"),
            "extproc.predicted.cached_tokens": decision.matched_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.get("cached"),
            "gen_ai.usage.output_tokens": usage.get("completion"),
        }
        return {name: value for name, value in values.items() if value is not None}

    def _decision_spans(self, decision: Decision) -> Iterator[SpanRecord]:
        """Spans of the decision; its steps are not timed, and have the time of the whole."""
        make = self._sink.make_span_id
        orchestration, scheduling = make(), make()
        start_s, end_s = self._routing_s, self._routed_s
        request = decision.request
        yield SpanRecord(
            "gateway.request_orchestration",
            orchestration,
            self._trace.span_id,
            start_s - (self._queue_s or 0.0),
            end_s,
            {
                "target_model": decision.model_rewrite or request.target,
                "request_prio": request.priority,
            },
        )
        yield SpanRecord(
            "run_scheduler_profile",
            scheduling,
            orchestration,
            start_s,
            end_s,
            {"llm_d.epp.scheduling.profile.name": decision.profile},
        )
        common = self._common_attributes(request.target)
        common.pop("extproc.pool", None)
        best = _best(decision)
        table = [SpanEvent("candidate", end_s, _describe_candidate(decision, at)) for at in best]
        steps = [
            ("filter_endpoints", _describe_filters(decision) | common, ()),
            *_describe_scorers(decision),
            ("pick_endpoints", _describe_picks(decision, best) | common, table),
        ]
        for name, attributes, events in steps:
            yield SpanRecord(name, make(), scheduling, start_s, end_s, attributes, events)


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
