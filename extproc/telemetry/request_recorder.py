"""Request recorder: counts streams and requests, and remembers decisions and rejections."""

from __future__ import annotations

import heapq
import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import msgspec

from extproc.decision import Decision, Rejection
from extproc.parsing import surfaces
from extproc.protocol.trace_context import TraceContext
from extproc.request import UNNAMED, RequestLabels, shorten_id
from extproc.supervision import ExceptionLog
from extproc.telemetry.counters import MAX_DEFERRED, REMOVED_ENDPOINT, PoolCounters, ProcessCounters
from extproc.telemetry.request_series import (
    NO_STATUS,
    UNOBSERVED_STATUS,
    UNPARSED,
    RequestSeries,
)

if TYPE_CHECKING:
    from extproc.recording.recorder import Recordings
    from extproc.telemetry.request_trace import TracedRequest

#: What engines put in front of the request id, by API, to make the id of an answer.
_ENGINE_PREFIX = re.compile(r"^(chatcmpl|cmpl|resp|msg|embd|pool|score|rerank|classify)[-_]")

#: What they append for one of several prompts.
_CHOICE_SUFFIX = re.compile(r"-\d{1,4}$")

#: Of responses that were not read.
NO_USAGE: Mapping[str, int] = {}

#: Results of recorded requests: `refused` is the picker's, `failed` has a status of 400 or more, or
#: none at its end.
RequestResult = Literal["open", "ok", "failed", "refused"]


class DecisionRecord(msgspec.Struct, eq=False, gc=False):
    """One decision and the result of its request.

    Attributes:
        id: Request id.
        at: Monotonic seconds of the decision.
        decision: Without prompt and blocks, and with few candidates where the log dropped it open.
        status: HTTP status of the answer; empty while there is none.
        seconds: Seconds from the first event to the end of the stream; None while it is open.
        usage: Tokens the engine reported, by kind.
        trace_id: Sampled trace that it belongs to; empty without one.
        headers_s: Seconds from the choice of the endpoint to response headers; None without any.
        first_token_s: Seconds from the choice of the endpoint to the first chunk of a stream, or to
            the headers of another response; None where chunks are not shown.
        answer_ids: Ids that the headers and the body of the answer have.
    """

    id: str
    at: float
    decision: Decision
    status: str = ""
    seconds: float | None = None
    usage: Mapping[str, int] = NO_USAGE
    trace_id: str = ""
    headers_s: float | None = None
    first_token_s: float | None = None
    answer_ids: tuple[str, ...] = ()

    @property
    def result(self) -> RequestResult:
        """Result of the request; `ok` also where its response is not observed."""
        if self.seconds is None:
            return "open"
        if not self.status:
            return "ok" if self.decision.request.api in surfaces.UNOBSERVED else "failed"
        return "ok" if "200" <= self.status < "400" else "failed"


class RejectionRecord(msgspec.Struct, frozen=True, eq=False):
    """One refused request.

    Attributes:
        id: Request id.
        at: Monotonic seconds of the rejection.
        model: Model or adapter; empty where unknown.
        rejection: Response to the client, and its cause.
        trace_id: Sampled trace that it belongs to; empty without one.
    """

    id: str
    at: float
    pool: str
    model: str
    rejection: Rejection
    trace_id: str = ""
    result: ClassVar[RequestResult] = "refused"


class DecisionLog:
    """Bounded ring of decisions, and another one of refused requests.

    Args:
        capacity: Decisions kept, and refused requests (count each); 0 keeps none.
        most_candidates: Candidates kept, summed over decisions (count); some 500 bytes each.
    """

    def __init__(self, capacity: int, *, most_candidates: int = 20_000) -> None:
        self._capacity = capacity
        self._most = most_candidates
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._rejections: OrderedDict[str, RejectionRecord] = OrderedDict()
        self._candidates = 0

    def __len__(self) -> int:
        return len(self._records)

    def resize(self, capacity: int) -> None:
        """Keep another number of decisions, from the next one on."""
        self._capacity = capacity

    def add(
        self, request_id: str, decision: Decision, now: float, *, pool: str = ""
    ) -> DecisionRecord:
        """Adds a decision; a later decision of the same id replaces an earlier one.

        Args:
            pool: Name of the pool, where the decision does not name it.
        """
        request_id = shorten_id(request_id)
        slim = decision.without_prompt(pool)
        recorded, records = DecisionRecord(request_id, now, slim), self._records
        if not self._capacity:
            return recorded
        if request_id in records:
            self._candidates -= _weight(records.pop(request_id).decision)
        records[request_id] = recorded
        self._candidates += _weight(slim)
        while len(records) > self._capacity or (self._candidates > self._most and len(records) > 1):
            _, dropped = records.popitem(last=False)
            self._candidates -= _weight(dropped.decision)
            if dropped.seconds is None:
                dropped.decision = dropped.decision.without_candidates()
        return recorded

    def add_rejection(self, record: RejectionRecord) -> None:
        """Adds a refused request; a later one of the same id replaces it."""
        rejections = self._rejections
        rejections.pop(record.id, None)
        rejections[record.id] = record
        while len(rejections) > self._capacity:
            rejections.popitem(last=False)

    def find(self, request_id: str) -> DecisionRecord | RejectionRecord | None:
        """Returns the latest record of a request; None when it is no longer in a ring.

        Args:
            request_id: The `x-request-id`, or the id in the body of the answer that an engine makes
                of it, such as `chatcmpl-` and the request id; or an id that the engine made up
                for its answer, where it was shown; or the id of a sampled trace.
        """
        for name in _spellings(request_id):
            key = shorten_id(name)
            records = [ring[key] for ring in (self._records, self._rejections) if key in ring]
            if records:
                return max(records, key=lambda record: record.at)
        return next(filter(lambda record: _is_called(record, request_id), self.latest()), None)

    def latest(self, count: int | None = None) -> Iterator[DecisionRecord | RejectionRecord]:
        """Returns the latest records, newest first; all of them without a count."""
        rings: list[Iterator[DecisionRecord | RejectionRecord]] = [
            reversed(self._records.values()),
            reversed(self._rejections.values()),
        ]
        newest_first = heapq.merge(*rings, key=lambda record: -record.at)
        return itertools.islice(newest_first, count)


def _spellings(request_id: str) -> Iterator[str]:
    """Returns the request ids that an id may stand for, the most literal first."""
    yield request_id
    bare = _ENGINE_PREFIX.sub("", request_id)
    yield bare
    yield _CHOICE_SUFFIX.sub("", bare)


def _is_called(record: DecisionRecord | RejectionRecord, name: str) -> bool:
    """True for the id of its trace, or one of its answer."""
    if not name:
        return False
    ids = record.answer_ids if isinstance(record, DecisionRecord) else ()
    return record.trace_id == name or name in ids


def _weight(decision: Decision) -> int:
    return len(decision.candidates) + len(decision.request.subset or ())


class RequestTracer(Protocol):
    """Observes requests whose traces are sent."""

    def observe(
        self, recorder: RequestRecorder, trace: TraceContext, *, started_s: float
    ) -> TracedRequest:
        """Create the observer of a traced request, which reports to its recorder as well."""


class RequestRecorder(msgspec.Struct, eq=False, gc=False):
    """Recorder of one request, which `StreamRecorder` creates."""

    _streams: StreamRecorder
    _pool_counters: PoolCounters
    _trace_id: str = ""
    _record: DecisionRecord | None = None
    _labels: RequestLabels = UNPARSED
    _series: RequestSeries | None = None
    #: Number of its decision in recordings; 0 for none.
    _number: int = 0
    #: Seconds in the queue; None without.
    _queue_s: float | None = None
    #: Seconds from the first message to the choice of the endpoint, response headers, and the
    #: first and the last chunk of a streamed response; negative before.
    _routed_s: float = -1.0
    _headers_s: float = -1.0
    _first_chunk_s: float = -1.0
    _last_chunk_s: float = -1.0
    #: Seconds that routing took, and from the choice of the endpoint to response headers.
    _routing_s: float = 0.0
    _response_s: float = 0.0
    _is_stream: bool = False
    _is_served: bool = False
    _is_chunked: bool = False
    _is_ttft_due: bool = False
    _refusal_status: str = ""
    #: The endpoint that served, None if it left the pool; the status, and the duration in seconds.
    _end: tuple[str | None, str, float] = (None, "", 0.0)

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
        if self._series is None:
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
        record.trace_id, slim = trace_id, record.decision
        series = counters.series.find(labels, may_be_served=not decision.model_unlisted)
        series.record_routed()
        self._record, self._series = record, series
        self._labels, self._trace_id, self._routing_s = labels, trace_id, duration_s
        if streams.recordings is not None:
            self._number = streams.recordings.add_routed(
                decision, slim, now=now, queued_s=self._queue_s or 0.0, pool=counters.name
            )
        streams.counters.deferred.append(self._count_routed)

    @property
    def decision(self) -> Decision | None:
        """The decision as it is recorded; None before it."""
        return None if self._record is None else self._record.decision

    def _count_routed(self) -> None:
        """Count a routed request."""
        self._streams.counters.routing_duration_s.add(self._routing_s)
        if self._record is not None:
            self._pool_counters.record_routed(self._record.decision)

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
        self._streams.counters.deferred.append(self._count_headers)

    def _count_headers(self) -> None:
        """Count the time to response headers."""
        self._pool_counters.response_headers_s.add(self._response_s)
        if self._is_served and not self._is_chunked:
            self._count_ttft(self._headers_s)

    def on_response_chunk(self, elapsed_s: float) -> None:
        """Count the gap between two chunks of a stream; the first one has the first token."""
        if not self._is_stream or self._series is None:
            return
        if self._first_chunk_s < 0.0:
            self._first_chunk_s = elapsed_s
            if self._is_ttft_due:
                self._is_ttft_due = False
                if self._record is not None:
                    self._record.first_token_s = elapsed_s - self._routed_s
                self._count_ttft(elapsed_s)
        else:
            self._series.record("itl", elapsed_s - self._last_chunk_s)
        self._last_chunk_s = elapsed_s

    def _count_ttft(self, ttft_s: float) -> None:
        """Count the time to the first token, and what was predicted of a stream."""
        series, record = self._series, self._record
        if series is None or record is None:
            return
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
            if self._number:
                self._record_end(record, status, duration_s)
        counters = self._streams.counters
        counters.deferred.append(self._count_end)
        if len(counters.deferred) >= MAX_DEFERRED:
            counters.settle()

    def _count_end(self) -> None:
        """Count the end of a routed request, and its tokens."""
        counters, record, series = self._pool_counters, self._record, self._series
        endpoint, status, duration_s = self._end
        counters.record_finished(REMOVED_ENDPOINT if endpoint is None else endpoint, status)
        if series is None or record is None:
            return
        if usage := record.usage:
            counters.record_usage(usage)
            series.record_tokens(usage)
            gaps = usage.get("completion", 0) - 1
            span_s = self._last_chunk_s - self._first_chunk_s
            if gaps > 0 and span_s > 0.0:
                series.record("tpot", span_s / gaps)
        if self._is_ttft_due:
            self._count_ttft(self._headers_s)
        series.record_ended()
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
        recordings, routed_s = self._streams.recordings, max(self._routed_s, 0.0)
        if recordings is None:
            return
        has_token = self._is_chunked and self._first_chunk_s >= 0.0
        recordings.add_end(
            self._number,
            status=status,
            ttft_s=self._first_chunk_s - routed_s if has_token else None,
            total_s=duration_s - routed_s,
            usage=record.usage,
        )

    def on_usage(self, usage: Mapping[str, int]) -> None:
        """Note the tokens that the response reported, which are counted at the end."""
        if self._record is not None:
            self._record.usage = usage

    def on_answer_ids(self, ids: Sequence[str]) -> None:
        """Note ids of the answer."""
        if (record := self._record) is not None:
            record.answer_ids = (*record.answer_ids, *ids)


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
