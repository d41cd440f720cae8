"""Stream recorder: counts streams, and counts, records and logs requests a batch at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from extproc.parsing import surfaces
from extproc.recording.rows import EndRow
from extproc.supervision import ExceptionLog
from extproc.telemetry.counters import REMOVED_ENDPOINT, PoolCounters, ProcessCounters
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.log_format import DelayedCall, RequestLine, log_requests
from extproc.telemetry.request_recorder import RequestRecorder
from extproc.telemetry.request_series import (
    NO_STATUS,
    TOKEN_KINDS,
    UNOBSERVED_STATUS,
    RequestSeries,
    WaitingValues,
)

if TYPE_CHECKING:
    from extproc.recording.recorder import Recordings
    from extproc.telemetry.request_trace import RequestTracer


#: Seconds that the line of a request may wait for others: at 1,000 a second, a batch.
_LINE_DELAY_S: Final = 0.125

#: Bytes of a token in llm-d's length of a cached prefix.
_BYTES_PER_TOKEN: Final = 4


class StreamRecorder:
    """Recorder of all streams.

    Args:
        recorder_type: Recorder of a request, which may log it as well.

    Attributes:
        tracer: Sends the traces of requests; None sends none.
        routed: Requests that were routed and wait to be counted and recorded, a few at most.
        answered: Requests whose response headers came, which wait to be counted and recorded.
        ended: Requests that ended, which wait to be counted and recorded.
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

    def _record(self, recordings: Recordings, requests: Sequence[RequestRecorder]) -> None:
        """Put decisions into recordings, all but those that a bug prevents."""
        for request in requests:
            self._attempt(request.record, recordings)

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
        self.decisions.free_dropped()
        return self._recorder_type(self, self.counters.open_pools[pool])

    def settle(self) -> None:
        """Count, record and remember what waits."""
        self._due_lines.cancel()  # what comes next can wait for others as long
        routed, answered, ended = self.routed, self.answered, self.ended
        self.routed, self.answered, self.ended = [], [], []
        if self.recordings is not None:
            self._record(self.recordings, routed)
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
        """Do a part of the work: a bug there must not keep the others from being done."""
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
        if requests and self.counters.open_pools.num_created == 1:
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
            series, stages = request.find_series(), request.decision.disaggregation
            series.change_running(1)
            if stages is not None:
                counters.record_stages(stages, model=series.labels.target_model)
        if self.counters.has_llmd_names:
            self._count_llmd_routed(counters, requests)
        self.decisions.extend(requests)

    def _count_llmd_routed(
        self, counters: PoolCounters, requests: Sequence[RequestRecorder]
    ) -> None:
        """Count values of routed requests of a pool that only families of llm-d have."""
        self.counters.prefix_hit_bytes.add_all(
            [request.decision.matched_tokens * _BYTES_PER_TOKEN for request in requests]
        )
        attempts: list[tuple[str, str]] = []
        sizes: defaultdict[RequestSeries, list[int]] = defaultdict(list)
        for request in requests:
            series = request.find_series()
            attempts.append((request.decision.endpoints[0].address, series.labels.target_model))
            if request.request_bytes:
                sizes[series].append(request.request_bytes)
        counters.record_attempts(attempts)
        for series, values in sizes.items():
            series.record("request_bytes", values)

    def _settle_answered(self, counters: PoolCounters, requests: Sequence[RequestRecorder]) -> None:
        """Count times to response headers, which are those to the first token without chunks."""
        counters.response_headers_s.add_all(
            [request.headers_s for request in requests if request.headers_s is not None]
        )
        if self.counters.has_llmd_names:
            self.counters.request_processing_s.add_all(
                [request.routed_s for request in requests if request.is_routed]
            )
        ttft_s: defaultdict[RequestSeries, list[float]] = defaultdict(list)
        for request in requests:
            if not request.is_served or request.is_chunked or not request.is_routed:
                continue
            if request.is_stream or request.trace_id:
                self.add_ttft(request, request.response_s)
            else:
                ttft_s[request.find_series()].append(request.response_s)
        for series, durations_s in ttft_s.items():
            series.record("complete_ttft", durations_s)

    def _settle_ended(self, counters: PoolCounters, requests: Sequence[RequestRecorder]) -> None:
        """Count ends of requests of a pool and their tokens, and record them."""
        counters.record_finished(
            [
                (REMOVED_ENDPOINT if request.endpoint is None else request.endpoint, request.status)
                for request in requests
            ],
            num_reported=sum(["completion" in request.usage for request in requests]),
        )
        if self.counters.has_llmd_names:
            self.counters.stream_duration_s.add_all(
                [request.seconds for request in requests if request.seconds is not None]
            )
        headers_s: defaultdict[str, list[float]] = defaultdict(list)
        by_series: defaultdict[RequestSeries, list[RequestRecorder]] = defaultdict(list)
        for request in requests:
            if not request.is_routed:
                continue
            if request.endpoint and request.is_served and request.headers_s is not None:
                headers_s[request.endpoint].append(request.headers_s)
            by_series[request.find_series()].append(request)
        for address, durations_s in headers_s.items():
            counters.record_headers(address, durations_s)
        for series, members in by_series.items():
            self._count_ends(series, members)
            if self.counters.has_llmd_names:
                _count_llmd_ends(series, members)
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

    def _count_ends(self, series: RequestSeries, requests: Sequence[RequestRecorder]) -> None:
        """Count ends of routed requests of a series."""
        series.change_running(-len(requests))
        columns = zip(*[request.tokens for request in requests], strict=True)
        for kind, column in zip(TOKEN_KINDS, columns, strict=True):
            if known := [tokens for tokens in column if tokens is not None]:
                series.record(kind, known)
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for request in requests:
            if request.is_ttft_due:  # a stream that is shown, and of which no chunk came
                # A call of gRPC failed then, which its trailers say and its HTTP status does not.
                if request.decision.request.api != "grpc_generate":
                    self.add_ttft(request, request.response_s)
            elif request.last_chunk_s > request.first_chunk_s:
                self._count_tpot(series, request)
            status = request.status or request.refusal_status
            if not status:
                is_watched = request.decision.request.api not in surfaces.UNOBSERVED
                status = NO_STATUS if is_watched else UNOBSERVED_STATUS
            duration_s = request.seconds or 0.0
            if request.trace_id:
                name = series.histograms.name_status(status)
                self.values.add(series, name, duration_s, request.trace_id)
            else:
                seconds[status].append(duration_s)
        for status, durations_s in seconds.items():
            series.record(series.histograms.name_status(status), durations_s)

    def _count_tpot(self, series: RequestSeries, request: RequestRecorder) -> None:
        """Count the time that each token of a stream took, if it reported how many there are."""
        gaps = request.usage.get("completion", 0) - 1
        if gaps > 0:
            self.values.add(series, "tpot", (request.last_chunk_s - request.first_chunk_s) / gaps)


def _count_llmd_ends(series: RequestSeries, requests: Sequence[RequestRecorder]) -> None:
    """Count values of requests of a series that only families of llm-d have."""
    sizes = [size for request in requests if (size := request.response_bytes) is not None]
    if sizes:
        series.record("response_bytes", sizes)
    paces_s = [
        (request.seconds or 0.0) / tokens
        for request in requests
        if (tokens := request.usage.get("completion", 0)) > 0
    ]
    if paces_s:
        series.record("ntpot", paces_s)
