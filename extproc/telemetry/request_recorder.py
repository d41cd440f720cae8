"""Request recorder: counts streams and requests, and logs decisions and unexpected exceptions."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from extproc.decision import Decision, Rejection
from extproc.supervision import origin_of
from extproc.telemetry.counters import LEFT, PoolCounters, ProcessCounters
from extproc.telemetry.decision_log import DecisionLog, DecisionRecord

_log = logging.getLogger("extproc.server")

#: Seconds between two log entries about one place: a client may run into a bug with every request.
_LOG_INTERVAL_S = 60.0

#: Places counted apart (count). The code has few of them, but plugins may raise any type.
_MAX_PLACES = 100

#: Key of all further places.
_OTHER = ("other", "other")


class ExceptionLog:
    """Counts and logs unexpected exceptions without messages, which may quote requests.

    Each place is logged once a minute.

    Args:
        counts: Exceptions by type and place; updated here.
        clock: Monotonic seconds.
    """

    def __init__(self, counts: Counter[tuple[str, str]], clock: Callable[[], float]) -> None:
        self._counts = counts
        self._clock = clock
        self._logged: dict[tuple[str, str], float] = {}

    def record(self, error: BaseException) -> None:
        """Count an exception, and log its type and stack."""
        key = origin_of(error)
        if key not in self._counts and len(self._counts) >= _MAX_PLACES:
            key = _OTHER
        self._counts[key] += 1
        now = self._clock()
        if now - self._logged.get(key, -_LOG_INTERVAL_S) < _LOG_INTERVAL_S:
            return
        self._logged[key] = now
        frames = traceback.extract_tb(error.__traceback__)
        places = (f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
        _log.error("a request ran into a bug: %s\n%s", key[0], "\n".join(places))


class RequestRecorder(msgspec.Struct, eq=False):
    """Recorder of one request, which `StreamRecorder` creates."""

    _counters: ProcessCounters
    _pool_counters: PoolCounters
    _decisions: DecisionLog
    _pool: str
    _record: DecisionRecord | None = None

    def on_pool_selected(self, pool: str) -> None:
        """Count the request for another pool."""
        self._pool_counters = self._counters.for_pool(pool)

    def on_direct_response(self) -> None:
        """Count a request that was answered without an endpoint."""
        self._counters.direct_responses += 1

    def on_rejected(self, rejection: Rejection) -> None:
        """Count a rejection."""
        self._pool_counters.rejected(rejection)

    def on_dequeued(self, wait_s: float) -> None:
        """Count the time in the queue."""
        self._counters.queue_duration_s.add(wait_s)

    def on_routed(
        self, decision: Decision, *, request_id: str, now: float, duration_s: float
    ) -> Decision:
        """Count a routed request, and log the decision.

        Returns:
            The decision without prompt and block hashes.
        """
        self._counters.routing_duration_s.add(duration_s)
        self._pool_counters.routed(decision)
        self._record = self._decisions.add(request_id, decision, now, pool=self._pool)
        return self._record.decision

    def on_model_rewritten(self, *, edited: bool) -> None:
        """Count a rewritten model name."""
        self._pool_counters.rewritten(edited=edited)

    def on_response_headers(self, duration_s: float) -> None:
        """Count the time from the choice of the endpoint to response headers."""
        self._counters.response_headers_s.add(duration_s)

    def on_finished(self, *, endpoint: str | None, status: str, duration_s: float) -> None:
        """Count the end of a routed request, and note it in the decision log."""
        self._pool_counters.finished(LEFT if endpoint is None else endpoint, status)
        self._counters.request_duration_s.add(duration_s)
        record = self._record
        if record is not None:
            record.status, record.seconds = status, duration_s

    def on_usage(self, usage: Mapping[str, int]) -> None:
        """Count the tokens that the response reported."""
        self._pool_counters.used(usage)
        if self._record is not None:
            self._record.usage = usage


class StreamRecorder:
    """Recorder of all streams.

    Args:
        counters: Metrics of the process; updated here.
        decisions: Log of recent decisions.
        clock: Monotonic seconds.
    """

    def __init__(
        self, counters: ProcessCounters, decisions: DecisionLog, clock: Callable[[], float]
    ) -> None:
        self.counters = counters
        self.decisions = decisions
        self._exceptions = ExceptionLog(counters.exceptions, clock)

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
        counters = self.counters
        return RequestRecorder(counters, counters.for_pool(pool), self.decisions, pool)
