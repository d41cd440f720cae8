"""Observer of a request whose decision and end go into recordings."""

from __future__ import annotations

from collections.abc import Mapping

from extproc.decision import Decision, Rejection
from extproc.protocol.trace_context import TraceContext
from extproc.recording.recorder import Recordings
from extproc.request import RequestLabels
from extproc.telemetry.request_recorder import NO_USAGE, RequestRecorder
from extproc.telemetry.request_trace import TracedRequest


class RecordedRequest:
    """Reports to another observer, and adds the request to the recordings under way.

    Args:
        observer: Observer of the request.
        recordings: Recordings under way.
        pool: Name of the default pool.
    """

    __slots__ = (
        "_first_token_s",
        "_is_chunk_due",
        "_number",
        "_observer",
        "_pool",
        "_queue_s",
        "_recordings",
        "_routed_s",
        "_usage",
    )

    def __init__(self, observer: RequestRecorder, recordings: Recordings, pool: str) -> None:
        self._observer: RequestRecorder | TracedRequest = observer
        self._recordings = recordings
        self._pool = pool
        self._number = 0
        self._queue_s = 0.0
        #: Seconds from the opening of the stream to the choice and to the first token; None before.
        self._routed_s: float | None = None
        self._first_token_s: float | None = None
        self._is_chunk_due = False
        self._usage = NO_USAGE

    def on_traced(self, trace: TraceContext, *, started_s: float) -> RecordedRequest:
        """Report the trace of the request."""
        self._observer = self._observer.on_traced(trace, started_s=started_s)
        return self

    def on_pool_selected(self, pool: str) -> None:
        """Note the pool."""
        self._pool = pool
        self._observer.on_pool_selected(pool)

    def on_direct_response(self) -> None:
        """Report a request that was answered without an endpoint."""
        self._observer.on_direct_response()

    def on_rejected(
        self,
        rejection: Rejection,
        *,
        request_id: str,
        labels: RequestLabels | None,
        now: float,
    ) -> None:
        """Report a rejection, which has no row."""
        self._observer.on_rejected(rejection, request_id=request_id, labels=labels, now=now)

    def on_abandoned(
        self,
        rejection: Rejection,
        *,
        request_id: str,
        labels: RequestLabels | None,
        now: float,
    ) -> None:
        """Report a request that ended before it was routed, which has no row."""
        self._observer.on_abandoned(rejection, request_id=request_id, labels=labels, now=now)

    def on_dequeued(self, wait_s: float, *, priority: int) -> None:
        """Note the time in the queue."""
        self._queue_s = wait_s
        self._observer.on_dequeued(wait_s, priority=priority)

    def on_routed(
        self,
        decision: Decision,
        *,
        request_id: str,
        labels: RequestLabels,
        trace_id: str,
        now: float,
        duration_s: float,
    ) -> Decision:
        """Record the decision."""
        slim = self._observer.on_routed(
            decision,
            request_id=request_id,
            labels=labels,
            trace_id=trace_id,
            now=now,
            duration_s=duration_s,
        )
        self._number = self._recordings.add_routed(
            decision, slim, now=now, queued_s=self._queue_s, pool=self._pool
        )
        return slim

    def on_model_rewritten(self, *, edited: bool) -> None:
        """Report a rewritten model name."""
        self._observer.on_model_rewritten(edited=edited)

    def on_response_headers(
        self, duration_s: float, *, elapsed_s: float, status: str, is_stream: bool, is_shown: bool
    ) -> None:
        """Note the time of the choice; engines may send headers before the first token."""
        self._routed_s = elapsed_s - duration_s
        self._is_chunk_due = is_stream and is_shown and status < "4"
        self._observer.on_response_headers(
            duration_s, elapsed_s=elapsed_s, status=status, is_stream=is_stream, is_shown=is_shown
        )

    def on_response_chunk(self, elapsed_s: float) -> None:
        """Note the time of the first chunk of a stream."""
        if self._is_chunk_due:
            self._is_chunk_due = False
            self._first_token_s = elapsed_s
        self._observer.on_response_chunk(elapsed_s)

    def on_usage(self, usage: Mapping[str, int]) -> None:
        """Note the tokens that the response reported."""
        self._usage = usage
        self._observer.on_usage(usage)

    def on_finished(self, *, endpoint: str | None, status: str, duration_s: float) -> None:
        """Record the end of the request."""
        self._observer.on_finished(endpoint=endpoint, status=status, duration_s=duration_s)
        if not self._number:
            return
        routed_s, first_token_s = self._routed_s, self._first_token_s
        self._recordings.add_end(
            self._number,
            status=status,
            ttft_s=None if first_token_s is None or routed_s is None else first_token_s - routed_s,
            total_s=duration_s - (routed_s or 0.0),
            usage=self._usage,
        )
