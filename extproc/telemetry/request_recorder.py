"""Request recorder: notes what happens to a request, and remembers decisions and rejections."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from extproc.decision import Decision, Rejection
from extproc.protocol.trace_context import TraceContext
from extproc.recording.rows import EndRow
from extproc.request import UNNAMED, RequestBody, RequestLabels, shorten_id
from extproc.telemetry import explanation
from extproc.telemetry.counters import PoolCounters
from extproc.telemetry.decision_log import NO_USAGE, DecisionRecord, RejectionRecord
from extproc.telemetry.log_format import RequestLine
from extproc.telemetry.request_series import TOKEN_KINDS, UNPARSED, RequestSeries
from extproc.telemetry.request_trace import RequestTrace, build_spans, name_request, send_unrouted

if TYPE_CHECKING:
    from extproc.recording.recorder import PromptHashes, Recordings
    from extproc.telemetry.stream_recorder import StreamRecorder


#: Requests whose facts are counted together (count): 2 to 4 ms of work where they are logged and
#: recorded, too. At 1,000 requests a second fewer cost more, as code is not in the caches.
_BATCH: Final = 128

#: Statuses that are numbers; empty where there was none.
_STATUS: Final = re.compile("[1-9][0-9]{2}")


#: An event of `/v1/responses` other than those that vLLM sends before its engine has read the prompt,
#: or data where the stream does not name its events. Chunks may begin anywhere in an event.
_OUTPUT_EVENT: Final = re.compile(
    rb"\Adata:|(?:\A|\n)event: ?+(?!response\.(?:created|in_progress|queued))[^\n]*+\n"
)

#: Tokens by `TOKEN_KINDS` of a response that reported none.
_NO_TOKENS: Final[Sequence[None]] = (None,) * len(TOKEN_KINDS)


class RequestRecorder(DecisionRecord):
    """Recorder of one request, which `StreamRecorder` creates.

    Facts are noted as they come. They are counted, recorded and added to the decision log later,
    together with those of other requests: then code and data are in the caches.

    Attributes:
        pool_counters: Counters of its pool.
        labels: Labels of a routed request.
        is_routed: Whether it has a decision.
        routing_s: Seconds that routing took.
        request_bytes: Bytes of its body; 0 where unknown.
        response_bytes: Bytes of the body of the response; None where unknown.
        tokens: Tokens that the response reported, by `TOKEN_KINDS`; None for those it did not.
        queue_s: Seconds in the queue; None without.
        number: Number of its decision in recordings; 0 for none.
        description: Decision as it is logged, where the data plane has it; empty elsewhere.
        prompt_hashes: Result of `Recordings.hash_prompt` of a request to be recorded; None elsewhere.
        trace: Trace of a sampled request whose spans are sent; None elsewhere.
        endpoint: The endpoint that served; None if it left the pool, or before the end.
        logged_at: Unix time of its end where that is to be logged; 0 otherwise.
        refusal_status: HTTP status of a refusal after the decision; empty without.
        response_s: Seconds from the first message to response headers; negative before. So are the
            next ones.
        first_chunk_s: The same to the first chunk with output of a streamed response.
        last_chunk_s: The same to the last one.
        is_stream: Whether the response is a stream.
        is_served: Whether its status is below 400.
        is_chunked: Whether its chunks are shown.
        is_ttft_due: Whether they are, and the time to the first one is still to be counted.
    """

    __slots__ = (
        "_series",
        "_streams",
        "description",
        "endpoint",
        "first_chunk_s",
        "is_chunked",
        "is_routed",
        "is_served",
        "is_stream",
        "is_ttft_due",
        "labels",
        "last_chunk_s",
        "logged_at",
        "number",
        "pool_counters",
        "prompt_hashes",
        "queue_s",
        "refusal_status",
        "request_bytes",
        "response_bytes",
        "response_s",
        "routing_s",
        "tokens",
        "trace",
    )

    routing_s: float
    tokens: Sequence[int | None]
    endpoint: str | None
    queue_s: float | None
    response_bytes: int | None
    prompt_hashes: PromptHashes | None
    trace: RequestTrace | None
    _series: RequestSeries | None

    # Without the constructor of the base, which has the decision already.
    def __init__(self, streams: StreamRecorder, pool_counters: PoolCounters) -> None:
        self._streams = streams
        self.pool_counters = pool_counters
        self.labels = UNPARSED
        self.trace_id = self.status = self.refusal_status = self.description = ""
        self.usage, self.tokens = NO_USAGE, _NO_TOKENS
        self.answer_ids = ()
        self.number = self.request_bytes = 0
        self.logged_at = 0.0
        self.seconds = self.headers_s = self.first_token_s = self.queue_s = None
        self._series = self.prompt_hashes = self.trace = self.response_bytes = None
        self.response_s = self.first_chunk_s = self.last_chunk_s = -1.0
        self.is_routed = self.is_stream = self.is_served = self.is_chunked = False
        self.is_ttft_due = False

    @property
    def routed_s(self) -> float:
        """Seconds from the first message to the choice of the endpoint; 0 before response headers."""
        return 0.0 if self.headers_s is None else self.response_s - self.headers_s

    def on_traced(self, trace: TraceContext, *, started_s: float) -> None:
        """Note the trace of the request."""
        self.trace_id = trace.trace_id
        if self._streams.tracer is not None:
            self.trace = RequestTrace(trace, started_s)

    def on_pool_selected(self, pool: str) -> None:
        """Count the request for another pool, unless that was removed while the request waited."""
        self.pool_counters = self._streams.counters.open_pools.get(pool, self.pool_counters)

    def on_direct_response(self) -> None:
        """Count a request that was answered without an endpoint."""
        self._streams.counters.direct_responses += 1

    def on_rejected(
        self,
        rejection: Rejection,
        *,
        request_id: str,
        labels: RequestLabels | None,
        now: float,
        started_s: float | None = None,
    ) -> None:
        """Count a rejection, and record it where the request has an id."""
        if self.is_routed:
            labels = self.labels
        self.pool_counters.record_rejection(rejection)
        self.refusal_status = str(rejection.status)
        if self.trace is not None:
            self.trace.on_rejected(rejection)
        self._record_rejection(rejection, request_id, labels, now)
        if self._streams.counters.has_llmd_names:
            self._count_failed_attempt(labels or UNPARSED)
            if started_s is not None:
                self._count_refused_time(now - started_s)

    def _count_refused_time(self, duration_s: float) -> None:
        """Count the time of a refused request, whose stream ends unless it was routed before."""
        counters = self._streams.counters
        counters.request_processing_s.add(duration_s)
        if not self.is_routed:
            counters.stream_duration_s.add(duration_s)

    def _count_failed_attempt(self, labels: RequestLabels) -> None:
        """Count a refused request by the model of its series."""
        counters = self.pool_counters
        series = self.find_series() if self.is_routed else counters.series.find_refused(labels)
        counters.record_attempts([("", series.labels.target_model)])

    def on_abandoned(
        self, rejection: Rejection, *, request_id: str, labels: RequestLabels | None, now: float
    ) -> None:
        """Count a request whose stream ended, and record it where it has an id."""
        self._record_rejection(rejection, request_id, labels, now)

    def _record_rejection(
        self, rejection: Rejection, request_id: str, labels: RequestLabels | None, now: float
    ) -> None:
        """Count a request by the status of its rejection, and record it where it has an id."""
        counters, trace, tracer = self.pool_counters, self.trace, self._streams.tracer
        if not self.is_routed:
            # Requests that were routed before make the series of their model.
            self._streams.settle()
            counters.series.find_refused(labels or UNPARSED).record_refused(rejection.status)
            if trace is not None and tracer is not None:
                names = name_request(request_id, model_of(labels), counters.name)
                what = "refused" if self.refusal_status else "abandoned"
                send_unrouted(trace, rejection, tracer, what=what, names=names, now=now)
        if request_id:
            record = RejectionRecord(
                shorten_id(request_id),
                now,
                counters.name,
                model_of(labels),
                rejection,
                self.trace_id,
            )
            self._streams.decisions.add_rejection(record)

    def on_dequeued(self, wait_s: float, *, priority: int) -> None:
        """Count the time in the queue."""
        self.pool_counters.record_queued(wait_s, priority=priority)
        self.queue_s = wait_s

    def on_routed(
        self,
        decision: Decision,
        *,
        request_id: str,
        labels: RequestLabels,
        trace_id: str,
        now: float,
        duration_s: float,
        body_bytes: int = 0,
    ) -> None:
        """Note a routed request and its decision without the prompt, of which recordings have hashes."""
        self.id, self.at, self.labels = request_id, now, labels
        self.routing_s, self.is_routed, self.request_bytes = duration_s, True, body_bytes
        if trace_id:
            self.trace_id = trace_id
        if decision.model_unlisted:  # not later: model lists are polled for it
            self.pool_counters.record_unlisted()
        streams = self._streams
        self.decision = decision.without_prompt(self.pool_counters.name)
        recordings = streams.recordings
        if recordings is not None:
            try:
                self.prompt_hashes = recordings.hash_prompt(decision)
            except Exception as error:  # noqa: BLE001 - a bug there must not cost the request
                streams.on_exception(error)
        if self.trace is not None:
            self.trace.on_routed(self.decision)
        routed = streams.routed
        routed.append(self)
        if len(routed) >= _BATCH:
            streams.settle()

    def on_described(self, description: str) -> None:
        """Note the description of the decision: to make it again would take a third of a log line."""
        self.description = description

    def record(self, recordings: Recordings) -> None:
        """Record the decision, if its prompt was hashed."""
        hashes, self.prompt_hashes = self.prompt_hashes, None
        if hashes is not None:
            self.number = recordings.add_routed(
                self.decision, hashes, now=self.at, queued_s=self.queue_s or 0.0
            )

    def find_series(self) -> RequestSeries:
        """The series of a routed request."""
        if self._series is None:
            self._series = self.pool_counters.series.find(
                self.labels,
                is_served=self.is_served,
                may_be_served=not self.decision.model_unlisted,
            )
        return self._series

    def _move_to_own_series(self, series: RequestSeries) -> None:
        """Leave a series of several models or tenants, where the request has one of its own now."""
        own = self.pool_counters.series.find(self.labels, is_served=True)
        if own is not series:
            series.change_running(-1)
            own.change_running(1)
            self._series = own

    def on_model_rewritten(self, *, edited: bool) -> None:
        """Count a rewritten model name."""
        self.pool_counters.record_rewrite(edited=edited)

    def on_response_headers(
        self, duration_s: float, *, elapsed_s: float, status: str, is_stream: bool, is_shown: bool
    ) -> None:
        """Note the time to response headers, which is that to the first token without chunks."""
        self.headers_s, self.response_s, self.is_stream = duration_s, elapsed_s, is_stream
        if status < "4":
            self.is_served = True
            series = self._series
            if series is not None and series.labels != self.labels:
                # The engine serves the model, even if it does not list it.
                self._move_to_own_series(series)
            if not is_stream:
                self.first_token_s = duration_s
            elif is_shown:
                self.is_chunked = self.is_ttft_due = True
        streams = self._streams
        answered = streams.answered
        answered.append(self)
        if len(answered) >= _BATCH:
            streams.settle()

    def on_response_chunk(self, elapsed_s: float, chunk: RequestBody = b"") -> None:
        """Count the gap between two chunks of a stream; the first one has the first token."""
        if not self.is_served or not self.is_routed:
            return
        if self.first_chunk_s < 0.0:
            if self.decision.request.api == "responses" and not _OUTPUT_EVENT.search(chunk):
                return
            self.first_chunk_s = elapsed_s
            if self.is_ttft_due:
                self.is_ttft_due = False
                self.first_token_s = elapsed_s - self.routed_s
                self._streams.add_ttft(self, elapsed_s)
        else:
            self._streams.values.add(self.find_series(), "itl", elapsed_s - self.last_chunk_s)
        self.last_chunk_s = elapsed_s

    def on_finished(self, *, endpoint: str | None, status: str, duration_s: float) -> None:
        """Note the end of a routed request."""
        self.endpoint, self.status, self.seconds = endpoint, status, duration_s
        streams = self._streams
        ended = streams.ended
        ended.append(self)
        if len(ended) >= _BATCH:
            streams.settle()
        if self.trace is not None and streams.tracer is not None:
            spans = build_spans(self, self.trace, streams.tracer.make_span_id)
            streams.tracer.add(self.trace.context, spans)

    def build_line(self) -> RequestLine:
        """The line of a request that ended and is in the log of decisions, which shortened its id."""
        decision, (prompt, cached, output) = self.decision, self.tokens
        request = decision.request
        # By position, which is ten times as fast: in the order of the fields.
        return RequestLine(
            self.id,
            decision.pool or self.pool_counters.name or None,
            request.adapter or request.model or None,
            self.endpoint or decision.endpoints[0].address,
            _to_number(self.status),
            prompt,
            cached,
            output,
            request.prompt_tokens,
            decision.matched_tokens,
            self.queue_s,
            self.headers_s,
            self.first_token_s if self.first_chunk_s >= 0.0 else None,
            self.seconds,
            self.description or explanation.format_short(decision),
        )

    def build_end(self) -> EndRow:
        """The row of a recorded request that ended; only chunks of a stream show the first token."""
        routed_s, (prompt, cached, output) = self.routed_s, self.tokens
        has_token = self.first_chunk_s >= 0.0 and self.is_chunked
        return EndRow(
            self.number,
            self.status,
            self.first_chunk_s - routed_s if has_token else None,
            (self.seconds or 0.0) - routed_s,
            prompt,
            cached,
            output,
        )

    def on_usage(self, usage: Mapping[str, int], response_bytes: int | None = None) -> None:
        """Note the tokens that the response reported, which are counted at the end."""
        self.usage, self.response_bytes, known = usage, response_bytes, usage.get
        self.tokens = known("prompt"), known("cached"), known("completion")

    def on_answer_ids(self, ids: Sequence[str]) -> None:
        """Note ids of the answer."""
        self.add_answer_ids(ids)


@functools.lru_cache(maxsize=64)
def _to_number(status: str) -> int | None:
    """A status as a number, cached; None where it is not."""
    return int(status) if _STATUS.fullmatch(status) else None


def model_of(labels: RequestLabels | None) -> str:
    """Model of a refused request; empty where it names none or was not read."""
    return "" if labels is None or labels.target_model == UNNAMED else labels.target_model
