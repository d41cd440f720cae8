"""Request log: a line with times, tokens and the pick of each request, or of failed ones."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from extproc.decision import Decision, Rejection
from extproc.parsing import surfaces
from extproc.request import RequestLabels, shorten_id
from extproc.telemetry import explanation
from extproc.telemetry.log_format import REQUESTS, RequestLine, log_event, log_request
from extproc.telemetry.request_recorder import RequestRecorder, model_of


class LoggedRequestRecorder(RequestRecorder):
    """Recorder that logs its request: when it is refused or abandoned, or at its end."""

    failures_only: ClassVar[bool] = False

    def on_rejected(
        self, rejection: Rejection, *, request_id: str, labels: RequestLabels | None, now: float
    ) -> None:
        """Count, record and log a rejection."""
        RequestRecorder.on_rejected(self, rejection, request_id=request_id, labels=labels, now=now)
        self._log_unrouted("request refused", rejection, request_id, labels)

    def on_abandoned(
        self, rejection: Rejection, *, request_id: str, labels: RequestLabels | None, now: float
    ) -> None:
        """Count, record and log a request whose stream ended before it was routed."""
        RequestRecorder.on_abandoned(self, rejection, request_id=request_id, labels=labels, now=now)
        self._log_unrouted("request abandoned", rejection, request_id, labels)

    def _log_unrouted(
        self, message: str, rejection: Rejection, request_id: str, labels: RequestLabels | None
    ) -> None:
        log_event(
            logging.getLogger(REQUESTS),
            logging.INFO,
            message,
            id=shorten_id(request_id) or None,
            pool=self._pool_counters.name or None,
            model=model_of(labels) or None,
            status=rejection.status,
            cause=rejection.cause,
            retry_after_s=rejection.retry_after_s,
        )

    def on_finished(self, *, endpoint: str | None, status: str, duration_s: float) -> None:
        """Count and log the end of a routed request."""
        RequestRecorder.on_finished(self, endpoint=endpoint, status=status, duration_s=duration_s)
        record = self._record
        if record is None or self._refusal_status:
            return
        if not self.failures_only or _is_failure(record.decision, status):
            log_request(self._build_line)

    def _build_line(self) -> RequestLine:
        """The line of a routed request that ended."""
        record = self._record
        if record is None:
            raise RuntimeError("only a routed request has this line")
        decision, read = record.decision, record.usage.get
        request, status, has_headers = decision.request, record.status, self._headers_s >= 0.0
        # By position, which is ten times as fast: in the order of the fields.
        return RequestLine(
            record.id,
            decision.pool or None,
            request.target or None,
            self._end[0] or decision.endpoints[0].address,
            int(status) if _STATUS.fullmatch(status) else None,
            read("prompt"),
            read("cached"),
            read("completion"),
            request.prompt_tokens,
            decision.matched_tokens,
            self._queue_s,
            self._headers_s - self._routed_s if has_headers else None,
            record.first_token_s if self._first_chunk_s >= 0.0 else None,
            record.seconds,
            explanation.format_short(decision),
        )


class LoggedFailureRecorder(LoggedRequestRecorder):
    """Recorder that logs refused and abandoned requests, and others without a response below 400."""

    failures_only: ClassVar[bool] = True


#: Statuses that are numbers; empty where there was none.
_STATUS: Final = re.compile("[1-9][0-9]{2}")

_TYPES: Final[Mapping[str, type[RequestRecorder]]] = {
    "off": RequestRecorder,
    "errors": LoggedFailureRecorder,
    "all": LoggedRequestRecorder,
}


def recorder_type(requests: Literal["off", "errors", "all"]) -> type[RequestRecorder]:
    """Recorder of a request for a value of `log.requests`."""
    return _TYPES[requests]


def _is_failure(decision: Decision, status: str) -> bool:
    """True for a response without a status below 400, unless responses of its kind are not watched."""
    return status >= "4" if status else decision.request.api not in surfaces.UNOBSERVED
