"""Request recorder: counts streams and requests, and remembers decisions and rejections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from extproc.decision import Decision, Rejection
from extproc.parsing import surfaces
from extproc.protocol.trace_context import TraceContext
from extproc.recording.rows import EndRow
from extproc.request import UNNAMED, RequestLabels, shorten_id
from extproc.supervision import ExceptionLog
from extproc.telemetry.counters import MAX_DEFERRED, REMOVED_ENDPOINT, PoolCounters, ProcessCounters
from extproc.telemetry.decision_log import DecisionLog, DecisionRecord, RejectionRecord
from extproc.telemetry.request_series import (
    NO_STATUS,
    UNOBSERVED_STATUS,
    UNPARSED,
    RequestSeries,
)

if TYPE_CHECKING:
    from extproc.recording.recorder import Recordings
    from extproc.telemetry.request_trace import TracedRequest


class RequestTracer(Protocol):
    """Observes requests whose traces are sent."""

    def observe(
        self, recorder: RequestRecorder, trace: TraceContext, *, started_s: float
    ) -> TracedRequest:
        """Create the observer of a traced request, which reports to its recorder as well."""


#: Facts of a request that are to be counted, as bits.
_ROUTED, _ANSWERED, _ENDED = 1, 2, 4


class RequestRecorder:
    """Recorder of one request, which `StreamRecorder` creates.

    Facts are noted as they come, and counted together later.
    """

    # No struct, whose fields are written by a call each; the interpreter writes slots itself.
    __slots__ = (
        "_due",
        "_end",
        "_first_chunk_s",
        "_headers_s",
        "_is_chunked",
        "_is_served",
        "_is_stream",
        "_is_ttft_due",
        "_labels",
        "_last_chunk_s",
        "_number",
        "_pool_counters",
        "_queue_s",
        "_record",
        "_refusal_status",
        "_response_s",
        "_routed_s",
        "_routing_s",
        "_series",
        "_streams",
        "_trace_id",
    )

    #: The endpoint that served, None if it left the pool; the status, and the duration in seconds.
    _end: tuple[str | None, str, float]
    #: Seconds that routing took, and from the choice of the endpoint to response headers.
    _routing_s: float
    _response_s: float
    _is_chunked: bool

    def __init__(self, streams: StreamRecorder, pool_counters: PoolCounters) -> None:
        self._streams = streams
        self._pool_counters = pool_counters
        self._trace_id = self._refusal_status = ""
        self._record: DecisionRecord | None = None
        self._labels = UNPARSED
        self._series: RequestSeries | None = None
        #: `_ROUTED` and others; 0 while nothing waits in `ProcessCounters.deferred`.
        self._due = 0
        #: Number of its decision in recordings; 0 for none.
        self._number = 0
        #: Seconds in the queue; None without.
        self._queue_s: float | None = None
        # Seconds from the first message to the choice of the endpoint, response headers, and the
        # first and the last chunk of a streamed response; negative before.
        self._routed_s = self._headers_s = self._first_chunk_s = self._last_chunk_s = -1.0
        self._is_stream = self._is_served = self._is_chunked = self._is_ttft_due = False

    def on_traced(
        self, trace: TraceContext, *, started_s: float
    ) -> RequestRecorder | TracedRequest:
        """Note the trace of the request, and return the observer that sends its spans."""
        self._trace_id = trace.trace_id
        tracer = self._streams.tracer
        return self if tracer is None else tracer.observe(self, trace, started_s=started_s)

    def on_pool_selected(self, pool: str) -> None:
        """Count the request for another pool."""
        self._pool_counters = self._streams.counters.open_pools[pool]

    def on_direct_response(self) -> None:
        """Count a request that was answered without an endpoint."""
        self._streams.counters.direct_responses += 1

    def on_rejected(
        self, rejection: Rejection, *, request_id: str, labels: RequestLabels | None, now: float
    ) -> None:
        """Count a rejection, and record it where the request has an id."""
        self._pool_counters.record_rejection(rejection)
        self._refusal_status = str(rejection.status)
        RequestRecorder.on_abandoned(self, rejection, request_id=request_id, labels=labels, now=now)

    def on_abandoned(
        self, rejection: Rejection, *, request_id: str, labels: RequestLabels | None, now: float
    ) -> None:
        """Count a request by the status of its rejection, and record it where it has an id."""
        counters = self._pool_counters
        if self._record is None:
            # Requests that were routed before make the series of their model.
            self._streams.counters.settle()
            counters.series.find(labels or UNPARSED).record_refused(rejection.status)
        if request_id:
            record = RejectionRecord(
                shorten_id(request_id),
                now,
                counters.name,
                model_of(labels),
                rejection,
                self._trace_id,
            )
            self._streams.decisions.add_rejection(record)

    def on_dequeued(self, wait_s: float, *, priority: int) -> None:
        """Count the time in the queue."""
        self._pool_counters.record_queued(wait_s, priority=priority)
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
        """Count a routed request, and record the decision."""
        streams, counters = self._streams, self._pool_counters
        record = streams.decisions.add(request_id, decision, now, pool=counters.name)
        if trace_id:
            self._trace_id = trace_id
            record.set_trace(trace_id)
        self._record, self._labels, self._routing_s = record, labels, duration_s
        if streams.recordings is not None:
            self._number = streams.recordings.add_routed(
                decision,
                record.decision,
                now=now,
                queued_s=self._queue_s or 0.0,
                pool=counters.name,
            )
        self._due = _ROUTED
        streams.counters.defer(self._count)

    @property
    def decision(self) -> Decision | None:
        """The decision as it is recorded; None before it."""
        return None if self._record is None else self._record.decision

    def _count(self) -> None:
        """Count what is due."""
        due, self._due, record = self._due, 0, self._record
        if record is not None and due & _ROUTED:
            self._streams.counters.routing_duration_s.add(self._routing_s)
            self._pool_counters.record_routed(record.decision)
            self._find_series(record).change_running(1)
        if due & _ANSWERED:
            self._pool_counters.response_headers_s.add(self._response_s)
            if self._is_served and not self._is_chunked:
                self._count_ttft(self._headers_s)
        if due & _ENDED:
            self._count_end()

    def _find_series(self, record: DecisionRecord) -> RequestSeries:
        """The series of the request."""
        series = self._series
        if series is None:
            series = self._series = self._pool_counters.series.find(
                self._labels, may_be_served=not record.decision.model_unlisted
            )
        return series

    def on_model_rewritten(self, *, edited: bool) -> None:
        """Count a rewritten model name."""
        self._pool_counters.record_rewrite(edited=edited)

    def on_response_headers(
        self, duration_s: float, *, elapsed_s: float, status: str, is_stream: bool, is_shown: bool
    ) -> None:
        """Note the time to response headers, which is that to the first token without chunks."""
        self._routed_s, self._headers_s = elapsed_s - duration_s, elapsed_s
        self._response_s, self._is_stream = duration_s, is_stream
        self._is_served = status < "4"
        self._is_chunked = self._is_ttft_due = self._is_served and is_stream and is_shown
        record = self._record
        if record is not None:
            record.headers_s = duration_s
            if self._is_served and not is_stream:
                record.first_token_s = duration_s
        due, self._due = self._due, self._due | _ANSWERED
        if not due:
            self._streams.counters.defer(self._count)

    def on_response_chunk(self, elapsed_s: float) -> None:
        """Count the gap between two chunks of a stream; the first one has the first token."""
        record = self._record
        if not self._is_stream or record is None:
            return
        if self._first_chunk_s < 0.0:
            self._first_chunk_s = elapsed_s
            if self._is_ttft_due:
                self._is_ttft_due = False
                record.first_token_s = elapsed_s - self._routed_s
                self._count_ttft(elapsed_s)
        else:
            self._find_series(record).record("itl", elapsed_s - self._last_chunk_s)
        self._last_chunk_s = elapsed_s

    def _count_ttft(self, ttft_s: float) -> None:
        """Count the time to the first token, and what was predicted of a stream."""
        record = self._record
        if record is None:
            return
        series = self._find_series(record)
        if not self._is_stream:
            series.record("complete_ttft", ttft_s, self._trace_id)
            return
        series.record("stream_ttft", ttft_s, self._trace_id)
        predicted_s = record.decision.predicted_ttft_s
        if predicted_s:
            series.record("predicted_ttft", predicted_s)
            series.record("ttft_ratio", (ttft_s - self._routed_s) / predicted_s)

    def on_finished(self, *, endpoint: str | None, status: str, duration_s: float) -> None:
        """Note the end of a routed request in the decision log, and count it with others."""
        record = self._record
        self._end = endpoint, status, duration_s
        if record is not None:
            record.status, record.seconds = status, duration_s
        counters = self._streams.counters
        due, self._due = self._due, self._due | _ENDED
        if not due:
            counters.defer(self._count)
        if len(counters.deferred) >= MAX_DEFERRED:
            counters.settle()

    def _count_end(self) -> None:
        """Count the end of a routed request, and its tokens."""
        counters, record = self._pool_counters, self._record
        endpoint, status, duration_s = self._end
        counters.record_finished(
            REMOVED_ENDPOINT if endpoint is None else endpoint,
            status,
            is_reported=record is not None and "completion" in record.usage,
        )
        if record is None:
            return
        if self._number:
            self._record_end(record, status, duration_s)
        series = self._find_series(record)
        if usage := record.usage:
            series.record_tokens(usage)
            gaps = usage.get("completion", 0) - 1
            span_s = self._last_chunk_s - self._first_chunk_s
            if gaps > 0 and span_s > 0.0:
                series.record("tpot", span_s / gaps)
        if self._is_ttft_due:
            self._count_ttft(self._headers_s)
        series.change_running(-1)
        if self._is_served:
            if endpoint is not None:
                counters.record_headers(endpoint, self._headers_s - self._routed_s)
            if series.labels != self._labels:
                # The engine serves the model, even if it does not list it.
                series = counters.series.find(self._labels, is_served=True)
        status = status or self._refusal_status
        if not status:
            is_watched = record.decision.request.api not in surfaces.UNOBSERVED
            status = NO_STATUS if is_watched else UNOBSERVED_STATUS
        series.record_duration(status, duration_s, self._trace_id)

    def _record_end(self, record: DecisionRecord, status: str, duration_s: float) -> None:
        """Put the end into recordings; only chunks of a stream show the first token."""
        recordings, read = self._streams.recordings, record.usage.get
        if recordings is None:
            return
        routed_s = max(self._routed_s, 0.0)
        has_token = self._first_chunk_s >= 0.0 and self._is_chunked
        recordings.add_end(
            EndRow(
                self._number,
                status,
                self._first_chunk_s - routed_s if has_token else None,
                duration_s - routed_s,
                read("prompt"),
                read("cached"),
                read("completion"),
            )
        )

    def on_usage(self, usage: Mapping[str, int]) -> None:
        """Note the tokens that the response reported, which are counted at the end."""
        if self._record is not None:
            self._record.usage = usage

    def on_answer_ids(self, ids: Sequence[str]) -> None:
        """Note ids of the answer."""
        if (record := self._record) is not None:
            record.add_answer_ids(ids)


def model_of(labels: RequestLabels | None) -> str:
    """Model of a refused request; empty where it names none or was not read."""
    return "" if labels is None or labels.target_model == UNNAMED else labels.target_model


class StreamRecorder:
    """Recorder of all streams.

    Args:
        recorder_type: Recorder of a request, which may log it as well.
        tracer: Sends the traces of requests; None sends none.

    Attributes:
        recordings: Recordings under way; None without any.
    """

    def __init__(
        self,
        counters: ProcessCounters,
        decisions: DecisionLog,
        clock: Callable[[], float],
        recorder_type: type[RequestRecorder] = RequestRecorder,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.counters = counters
        self.decisions = decisions
        self.tracer = tracer
        self.recordings: Recordings | None = None
        self._recorder_type = recorder_type
        self._exceptions = ExceptionLog(counters.exceptions, clock)

    def reconfigure(self, recorder_type: type[RequestRecorder]) -> None:
        """Record requests with another recorder from the next one on."""
        self._recorder_type = recorder_type

    def set_recordings(self, recordings: Recordings | None) -> None:
        """Put requests into recordings from the next decision on; None ends that."""
        self.recordings = recordings

    def on_stream_opened(self) -> None:
        """Count an open stream."""
        self.counters.streams_open += 1

    def on_stream_ended(self, result: str) -> None:
        """Count the end of a stream by its result."""
        self.counters.streams_open -= 1
        self.counters.streams[result] += 1

    def on_exception(self, error: BaseException) -> None:
        """Count and log an unexpected exception."""
        self._exceptions.record(error)

    def observe_request(self, pool: str) -> RequestRecorder:
        """Create the recorder of a request; `pool` is the default pool."""
        return self._recorder_type(self, self.counters.open_pools[pool])
