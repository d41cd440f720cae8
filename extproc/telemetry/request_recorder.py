"""Request recorder: counts streams and requests, and remembers decisions and rejections."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from extproc.decision import Decision, Rejection
from extproc.parsing import surfaces
from extproc.protocol.trace_context import TraceContext
from extproc.recording.rows import EndRow
from extproc.request import UNNAMED, RequestLabels, shorten_id
from extproc.supervision import ExceptionLog
from extproc.telemetry import explanation
from extproc.telemetry.counters import REMOVED_ENDPOINT, PoolCounters, ProcessCounters
from extproc.telemetry.decision_log import (
    NO_USAGE,
    DecisionLog,
    DecisionRecord,
    RejectionRecord,
)
from extproc.telemetry.log_format import DelayedCall, RequestLine, log_requests
from extproc.telemetry.request_series import (
    NO_STATUS,
    TOKEN_KINDS,
    UNOBSERVED_STATUS,
    UNPARSED,
    RequestSeries,
    WaitingValues,
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


#: Requests whose facts are counted together (count): some 1 ms of work where they are logged and
#: recorded, too. At 1,000 requests a second fewer cost more, as code is not in the caches.
_BATCH: Final = 128

#: Seconds that the line of a request may wait for others: at 1,000 a second, a batch.
_LINE_DELAY_S: Final = 0.125

#: Statuses that are numbers; empty where there was none.
_STATUS: Final = re.compile("[1-9][0-9]{2}")


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
        queue_s: Seconds in the queue; None without.
        number: Number of its decision in recordings; 0 for none.
        endpoint: The endpoint that served; None if it left the pool, or before the end.
        logged_at: Unix time of its end where that is to be logged; 0 otherwise.
        refusal_status: HTTP status of a refusal after the decision; empty without.
        response_s: Seconds from the first message to response headers; negative before. So are the
            next ones.
        first_chunk_s: The same to the first chunk of a streamed response.
        last_chunk_s: The same to the last one.
        is_stream: Whether the response is a stream.
        is_served: Whether its status is below 400.
        is_chunked: Whether its chunks are shown.
        is_ttft_due: Whether they are, and the time to the first one is still to be counted.
    """

    __slots__ = (
        "_series",
        "_streams",
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
        "queue_s",
        "refusal_status",
        "response_s",
        "routing_s",
    )

    routing_s: float
    endpoint: str | None
    queue_s: float | None
    _series: RequestSeries | None

    # Without the constructor of the base, which has the decision already.
    def __init__(self, streams: StreamRecorder, pool_counters: PoolCounters) -> None:
        self._streams = streams
        self.pool_counters = pool_counters
        self.labels = UNPARSED
        self.trace_id = self.status = self.refusal_status = ""
        self.usage = NO_USAGE
        self.answer_ids = ()
        self.number = 0
        self.logged_at = 0.0
        self.seconds = self.headers_s = self.first_token_s = self.queue_s = self._series = None
        self.response_s = self.first_chunk_s = self.last_chunk_s = -1.0
        self.is_routed = self.is_stream = self.is_served = self.is_chunked = False
        self.is_ttft_due = False

    @property
    def routed_s(self) -> float:
        """Seconds from the first message to the choice of the endpoint; 0 before response headers."""
        return 0.0 if self.headers_s is None else self.response_s - self.headers_s

    @property
    def tokens(self) -> Sequence[int | None]:
        """Prompt, cached and output tokens that the response reported; None for those it did not."""
        if not self.usage:
            return _NO_TOKENS
        known = self.usage.get
        return known("prompt"), known("cached"), known("completion")

    def on_traced(
        self, trace: TraceContext, *, started_s: float
    ) -> RequestRecorder | TracedRequest:
        """Note the trace of the request, and return the observer that sends its spans."""
        self.trace_id = trace.trace_id
        tracer = self._streams.tracer
        return self if tracer is None else tracer.observe(self, trace, started_s=started_s)

    def on_pool_selected(self, pool: str) -> None:
        """Count the request for another pool."""
        self.pool_counters = self._streams.counters.open_pools[pool]

    def on_direct_response(self) -> None:
        """Count a request that was answered without an endpoint."""
        self._streams.counters.direct_responses += 1

    def on_rejected(
        self, rejection: Rejection, *, request_id: str, labels: RequestLabels | None, now: float
    ) -> None:
        """Count a rejection, and record it where the request has an id."""
        self.pool_counters.record_rejection(rejection)
        self.refusal_status = str(rejection.status)
        RequestRecorder.on_abandoned(self, rejection, request_id=request_id, labels=labels, now=now)

    def on_abandoned(
        self, rejection: Rejection, *, request_id: str, labels: RequestLabels | None, now: float
    ) -> None:
        """Count a request by the status of its rejection, and record it where it has an id."""
        counters = self.pool_counters
        if not self.is_routed:
            # Requests that were routed before make the series of their model.
            self._streams.settle()
            counters.series.find(labels or UNPARSED).record_refused(rejection.status)
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
    ) -> None:
        """Note a routed request and its decision, without the prompt, which waits for no other."""
        self.id, self.at, self.labels = request_id, now, labels
        self.decision = decision.without_prompt(self.pool_counters.name)
        self.routing_s, self.is_routed = duration_s, True
        if trace_id:
            self.trace_id = trace_id
        streams = self._streams
        if streams.recordings is not None:
            streams.record(self, decision)
        routed = streams.routed
        routed.append(self)
        if len(routed) >= _BATCH:
            streams.settle()

    def find_series(self) -> RequestSeries:
        """The series of a routed request."""
        if self._series is None:
            self._series = self.pool_counters.series.find(
                self.labels, may_be_served=not self.decision.model_unlisted
            )
        return self._series

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
            if not is_stream:
                self.first_token_s = duration_s
            elif is_shown:
                self.is_chunked = self.is_ttft_due = True
        streams = self._streams
        answered = streams.answered
        answered.append(self)
        if len(answered) >= _BATCH:
            streams.settle()

    def on_response_chunk(self, elapsed_s: float) -> None:
        """Count the gap between two chunks of a stream; the first one has the first token."""
        if not self.is_stream or not self.is_routed:
            return
        if self.first_chunk_s < 0.0:
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
            explanation.format_short(decision),
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

    def on_usage(self, usage: Mapping[str, int]) -> None:
        """Note the tokens that the response reported, which are counted at the end."""
        self.usage = usage

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


class StreamRecorder:
    """Recorder of all streams.

    Args:
        recorder_type: Recorder of a request, which may log it as well.
        tracer: Sends the traces of requests; None sends none.

    Attributes:
        routed: Requests that were routed and wait to be counted and recorded, a few at most.
        answered: The same whose response headers came.
        ended: The same that ended.
        values: Values of series that wait to be counted.
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
        self.routed: list[RequestRecorder] = []
        self.answered: list[RequestRecorder] = []
        self.ended: list[RequestRecorder] = []
        self.values = WaitingValues()
        self.recordings: Recordings | None = None
        self._due_lines = DelayedCall(self.settle)
        self._recorder_type = recorder_type
        self._exceptions = ExceptionLog(counters.exceptions, clock)
        counters.before_reading(self.settle)
        decisions.before_reading(self.settle)

    def reconfigure(self, recorder_type: type[RequestRecorder]) -> None:
        """Record requests with another recorder from the next one on."""
        self._recorder_type = recorder_type

    def set_recordings(self, recordings: Recordings | None) -> None:
        """Put requests into recordings from the next decision on; None ends that."""
        self.settle()
        self.recordings = recordings

    def record(self, request: RequestRecorder, decision: Decision) -> None:
        """Put a decision with its prompt into recordings; a bug there must not cost the request."""
        if self.recordings is None:
            return
        try:
            request.number = self.recordings.add_routed(
                decision, request.decision, now=request.at, queued_s=request.queue_s or 0.0
            )
        except Exception as error:  # noqa: BLE001
            self.on_exception(error)

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

    def settle(self) -> None:
        """Count, record and remember what waits."""
        routed, answered, ended = self.routed, self.answered, self.ended
        self.routed, self.answered, self.ended = [], [], []
        steps = (
            (self._settle_routed, routed),
            (self._settle_answered, answered),
            (self._settle_ended, ended),
        )
        for step, waiting in steps:
            for counters, requests in self._by_pool(waiting):
                self._attempt(step, counters, requests)
        self.values.settle()
        if self.recordings is not None:
            self._attempt(self.recordings.encode)
        if any(request.logged_at for request in ended):
            self._attempt(self._log, ended)

    def _attempt(self, step: Callable[..., None], *arguments: object) -> None:
        """Do a part of the work on a batch: a bug there must not keep the others from being counted."""
        try:
            step(*arguments)
        except Exception as error:  # noqa: BLE001
            self.on_exception(error)

    def _log(self, ended: Sequence[RequestRecorder]) -> None:
        """Log the requests that are to be, all but those whose line a bug prevents."""
        lines: list[tuple[float, RequestLine]] = []
        for request in ended:
            if request.logged_at:
                try:
                    lines.append((request.logged_at, request.build_line()))
                except Exception as error:  # noqa: BLE001
                    self.on_exception(error)
        log_requests(lines)

    def settle_soon(self) -> None:
        """Settle in a moment, so that no line is late; at once where no event loop runs."""
        if not self._due_lines.schedule(_LINE_DELAY_S):
            self.settle()

    def _by_pool(
        self, requests: Sequence[RequestRecorder]
    ) -> Iterable[tuple[PoolCounters, Sequence[RequestRecorder]]]:
        """Requests by the counters of their pool."""
        if requests and len(self.counters.open_pools) == 1:
            return [(requests[0].pool_counters, requests)]
        by_pool: defaultdict[PoolCounters, list[RequestRecorder]] = defaultdict(list)
        for request in requests:
            by_pool[request.pool_counters].append(request)
        return by_pool.items()

    def add_ttft(self, request: RequestRecorder, ttft_s: float) -> None:
        """Count the time to the first token, and what was predicted of a stream."""
        series, trace_id, add = request.find_series(), request.trace_id, self.values.add
        if not request.is_stream:
            add(series, "complete_ttft", ttft_s, trace_id)
            return
        add(series, "stream_ttft", ttft_s, trace_id)
        predicted_s = request.decision.predicted_ttft_s
        if predicted_s:
            add(series, "predicted_ttft", predicted_s)
            add(series, "ttft_ratio", (ttft_s - request.routed_s) / predicted_s)

    def _settle_routed(self, counters: PoolCounters, requests: Sequence[RequestRecorder]) -> None:
        """Count routed requests of a pool, and remember their decisions."""
        self.counters.routing_duration_s.add_all([request.routing_s for request in requests])
        counters.record_routed([request.decision for request in requests])
        for request in requests:
            request.find_series().change_running(1)
        self.decisions.extend(requests)

    def _settle_answered(self, counters: PoolCounters, requests: Sequence[RequestRecorder]) -> None:
        """Count times to response headers, which are those to the first token without chunks."""
        counters.response_headers_s.add_all(
            [request.headers_s for request in requests if request.headers_s is not None]
        )
        for request in requests:
            if request.is_served and not request.is_chunked and request.is_routed:
                self.add_ttft(request, request.response_s)

    def _settle_ended(self, counters: PoolCounters, requests: Sequence[RequestRecorder]) -> None:
        """Count ends of requests of a pool and their tokens, and record them."""
        counters.record_finished(
            [
                (REMOVED_ENDPOINT if request.endpoint is None else request.endpoint, request.status)
                for request in requests
            ],
            num_reported=sum(["completion" in request.usage for request in requests]),
        )
        headers_s: defaultdict[str, list[float]] = defaultdict(list)
        for request in requests:
            if not request.is_routed:
                continue
            if request.endpoint and request.is_served and request.headers_s is not None:
                headers_s[request.endpoint].append(request.headers_s)
            self._count_end(request)
        for address, durations_s in headers_s.items():
            counters.record_headers(address, durations_s)
        if self.recordings is not None:
            self._record_ends(self.recordings, requests)

    def _record_ends(self, recordings: Recordings, requests: Sequence[RequestRecorder]) -> None:
        """Record ends; a bug at one of them must not keep the others from it."""
        ends: list[EndRow] = []
        for request in requests:
            if request.number:
                try:
                    ends.append(request.build_end())
                except Exception as error:  # noqa: BLE001
                    self.on_exception(error)
        recordings.add_ends(ends)

    def _count_end(self, request: RequestRecorder) -> None:
        """Count the end of a routed request in its series."""
        series = request.find_series()
        if request.usage:
            self._count_tokens(request, series)
        if request.is_ttft_due:  # a stream that is shown, and of which no chunk came
            self.add_ttft(request, request.response_s)
        series.change_running(-1)
        if request.is_served and series.labels != request.labels:
            # The engine serves the model, even if it does not list it.
            series = request.pool_counters.series.find(request.labels, is_served=True)
        status = request.status or request.refusal_status
        if not status:
            is_watched = request.decision.request.api not in surfaces.UNOBSERVED
            status = NO_STATUS if is_watched else UNOBSERVED_STATUS
        name = series.name_status(status)
        self.values.add(series, name, request.seconds or 0.0, request.trace_id)

    def _count_tokens(self, request: RequestRecorder, series: RequestSeries) -> None:
        """Count the tokens of a request, and the time that each took."""
        for kind in TOKEN_KINDS:
            if kind in request.usage:
                self.values.add(series, kind, request.usage[kind])
        gaps = request.usage.get("completion", 0) - 1
        span_s = request.last_chunk_s - request.first_chunk_s
        if gaps > 0 and span_s > 0.0:
            self.values.add(series, "tpot", span_s / gaps)
