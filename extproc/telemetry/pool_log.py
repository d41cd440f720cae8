"""Log lines of a pool: endpoints that come, go and fail, failing scrapes, refusals, and requests."""

from __future__ import annotations

import logging
import math
import operator
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from typing import ClassVar, Final, Literal

import msgspec

from extproc.decision import Decision, Rejection
from extproc.endpoint import Endpoint
from extproc.parsing import surfaces
from extproc.pool.snapshot import EndpointSnapshot, Pool
from extproc.request import RequestLabels, shorten_id
from extproc.telemetry.counters import REMOVED_ENDPOINT, EndpointResponses, PoolCounters
from extproc.telemetry.log_format import REQUESTS, FieldValue, log_event
from extproc.telemetry.request_recorder import RequestRecorder, model_of

_log = logging.getLogger("extproc.pool")

#: Seconds between two lines about failures that go on.
REPEAT_S: Final = 60.0

#: Endpoints that a line names (count); it counts all of them.
_MAX_NAMED = 10

#: Seconds in which an event has so many lines at most (count): in a large pool, hundreds of endpoints
#: may fail at once.
_BURST_S: Final = 10.0
_MAX_BURST: Final = 20


class _Ejection(msgspec.Struct):
    """An ejected endpoint: when it was ejected (monotonic seconds), and the cause in force."""

    at: float
    cause: str


class _FailedScrapes(msgspec.Struct):
    """Failed scrapes in a row: when the first was (monotonic seconds), how many, and the last line."""

    at: float
    outcome: str
    logged_at: float
    count: int = 1


class _Burst(msgspec.Struct):
    """Lines of an event within `_BURST_S`: since when (monotonic seconds), and how many it would be."""

    at: float = -math.inf
    count: int = 0


class _EndpointLines:
    """Lines about single endpoints of one pool, of which a few of an event follow in a short time."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._bursts: defaultdict[str, _Burst] = defaultdict(_Burst)

    def log(self, level: int, event: str, now: float, **fields: FieldValue) -> None:
        """Log an event of an endpoint, unless as many endpoints had one in a short time."""
        burst = self._bursts[event]
        unlogged = None
        if now - burst.at >= _BURST_S:
            unlogged = max(0, burst.count - _MAX_BURST) or None
            burst.at, burst.count = now, 0
        burst.count += 1
        if burst.count <= _MAX_BURST:
            silent_s = burst.at + _BURST_S - now if burst.count == _MAX_BURST else None
            log_event(
                _log,
                level,
                event,
                pool=self._pool,
                **fields,
                unlogged=unlogged,
                silent_s=silent_s,
            )


class PoolLog:
    """Log of one pool."""

    def __init__(self, pool: str, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._ejections: dict[str, _Ejection] = {}
        self._scrapes: dict[tuple[str, bool], _FailedScrapes] = {}
        self._lines = _EndpointLines(pool)
        self._empty_since: float | None = None
        self._failing_since: float | None = None

    def on_changed(self, before: Pool, after: Pool) -> None:
        """Log endpoints that were added, removed, ejected or readmitted."""
        if before.positions is not after.positions:
            self._log_members(before, after)
        is_failing = self._failing_since is not None  # also where all ejected ones were replaced
        if after.unhealthy_or_doubtful or self._ejections or is_failing:
            self._log_health(before, after)

    def on_scrape(self, address: str, outcome: str, *, is_model_list: bool) -> None:
        """Log the first of several failed scrapes, a count each minute, and their end.

        Args:
            outcome: `ok`, or the reason of the failure.
        """
        key = address, is_model_list
        failed = self._scrapes.get(key)
        if outcome == "ok":
            if failed is not None:
                del self._scrapes[key]
                failed.outcome = outcome
                self._log_scrape(logging.INFO, "scrape works again", key, failed)
            return
        now = self._clock()
        if failed is None:
            failed = self._scrapes[key] = _FailedScrapes(now, outcome, now)
        else:
            failed.count += 1
            if now - failed.logged_at < REPEAT_S:
                return
            failed.logged_at, failed.outcome = now, outcome
        self._log_scrape(logging.WARNING, "scrape failed", key, failed)

    def _log_scrape(
        self, level: int, event: str, key: tuple[str, bool], failed: _FailedScrapes
    ) -> None:
        address, is_model_list = key
        now = self._clock()
        self._lines.log(
            level,
            event,
            now,
            endpoint=address,
            page="models" if is_model_list else "metrics",
            outcome=failed.outcome,
            failures=failed.count,
            for_s=now - failed.at,
        )

    def _log_members(self, before: Pool, after: Pool) -> None:
        """Log endpoints that came and went, by incarnation, and whether any is left."""
        old, new = _by_incarnation(before), _by_incarnation(after)
        for event, endpoints in (
            ("endpoints removed", [old[key] for key in old.keys() - new.keys()]),
            ("endpoints added", [new[key] for key in new.keys() - old.keys()]),
        ):
            if endpoints:
                log_event(
                    _log,
                    logging.INFO,
                    event,
                    pool=self._pool,
                    count=len(endpoints),
                    endpoints=_join(endpoints),
                    total=len(after.members),
                )
        for key in old.keys() - new.keys():
            self._ejections.pop(old[key].address, None)
            if not after.ranks_at(old[key].host_port):
                for is_model_list in (False, True):
                    self._scrapes.pop((old[key].host_port, is_model_list), None)
        if not after.members and self._empty_since is None:
            self._empty_since = self._clock()
            log_event(_log, logging.WARNING, "pool is empty", pool=self._pool)
        elif after.members and self._empty_since is not None:
            empty_s, self._empty_since = self._clock() - self._empty_since, None
            log_event(
                _log, logging.INFO, "pool has endpoints again", pool=self._pool, after_s=empty_s
            )

    def _log_health(self, before: Pool, pool: Pool) -> None:
        """Log endpoints whose ejection began, ended or has another cause, and whether all are out."""
        now = self._clock()
        changed: Iterable[EndpointSnapshot] = pool.members
        if before.positions is pool.positions:
            changed = compress(changed, map(operator.is_not, before.members, pool.members))
        for member in changed:
            address = member.endpoint.address
            ejection = self._ejections.get(address)
            if not member.is_ejected:
                if ejection is not None:
                    del self._ejections[address]
                    self._log_ejection(logging.INFO, "endpoint is back", member, ejection, now)
            elif ejection is None:
                ejection = self._ejections[address] = _Ejection(now, member.condition.cause)
                self._log_ejection(logging.WARNING, "endpoint ejected", member, ejection, now)
            elif ejection.cause != member.condition.cause:
                ejection.cause = member.condition.cause
                self._log_ejection(logging.INFO, "endpoint still ejected", member, ejection, now)
        all_out = 0 < len(pool.members) == len(self._ejections)
        if all_out and self._failing_since is None:
            self._failing_since = now
            log_event(
                _log,
                logging.WARNING,
                "every endpoint is ejected; the least bad serves",
                pool=self._pool,
                total=len(pool.members),
            )
        elif pool.members and not all_out and self._failing_since is not None:
            failing_s, self._failing_since = now - self._failing_since, None
            log_event(
                _log,
                logging.INFO,
                "not every endpoint is ejected any more",
                pool=self._pool,
                after_s=failing_s,
                ejected=len(self._ejections),
                total=len(pool.members),
            )

    def _log_ejection(
        self, level: int, event: str, member: EndpointSnapshot, ejection: _Ejection, now: float
    ) -> None:
        until, is_out = member.condition.until, member.is_ejected
        self._lines.log(
            level,
            event,
            now,
            endpoint=member.endpoint.address,
            pod=_pod_name(member.endpoint) or None,
            cause=ejection.cause,
            retry_in_s=until - now if is_out and math.isfinite(until) else None,
            after_s=None if ejection.at == now else now - ejection.at,
        )


class RejectionLog:
    """Log of refused requests, by pool, status and cause: the first, then a count each minute.

    It reads counters, so that refusals cost no more than counting them.
    """

    def __init__(self, pools: Callable[[], Mapping[str, PoolCounters]]) -> None:
        self._pools = pools
        self._logged: dict[tuple[str, int, str], int] = {}
        self._logged_at: dict[tuple[str, int, str], float] = {}

    def step(self, now: float, *, is_last: bool = False) -> None:
        """Log what was refused since the last line, where one is due.

        Args:
            is_last: Whether all lines are due, however recent the one before is.
        """
        pools = self._pools()
        for key in [key for key in self._logged if key[0] not in pools]:
            del self._logged[key], self._logged_at[key]
        for pool, counters in pools.items():
            for (status, cause), count in counters.rejection_causes.items():
                key = pool, status, cause
                logged = self._logged.get(key, 0)
                new = count - logged if count >= logged else count
                age_s = now - self._logged_at.get(key, -math.inf)
                if not new or (age_s < REPEAT_S and not is_last):
                    continue
                self._logged[key], self._logged_at[key] = count, now
                level = logging.INFO if status < 429 else logging.WARNING
                log_event(
                    _log,
                    level,
                    "requests refused",
                    pool=pool,
                    status=status,
                    cause=cause,
                    count=new,
                    total=count,
                )


class _FailedResponses(msgspec.Struct):
    """Failed responses of an endpoint.

    Attributes:
        count: All so far.
        before: Those before the first of the failures that go on.
        since: Monotonic seconds of that one; None while none go on.
        failed_at: Monotonic seconds of the last one.
        served: Responses below 400 then (count).
        logged: All as of the last line, by status.
        logged_at: Monotonic seconds of that line.
    """

    count: int = 0
    before: int = 0
    since: float | None = None
    failed_at: float = -math.inf
    served: int = 0
    logged: Counter[str] = msgspec.field(default_factory=Counter)
    logged_at: float = -math.inf


class ResponseFailureLog:
    """Log of failed responses, by endpoint: the first, then a count each minute, and their end.

    An endpoint that fails some of its requests may never be ejected. It reads counters, so that a
    response costs no more than counting it.
    """

    def __init__(self, pools: Callable[[], Mapping[str, PoolCounters]]) -> None:
        self._pools = pools
        self._failures: dict[tuple[str, str], _FailedResponses] = {}
        self._lines: dict[str, _EndpointLines] = {}

    def step(self, now: float, *, is_last: bool = False) -> None:
        """Log what failed since the last line of an endpoint, where one is due; see `RejectionLog`."""
        pools = self._pools()
        failing = {
            (pool, address): responses
            for pool, counters in pools.items()
            for address, responses in counters.sum_responses().items()
            if responses.failed and address != REMOVED_ENDPOINT
        }
        for key in self._failures.keys() - failing.keys():
            del self._failures[key]
        for pool in self._lines.keys() - pools.keys():
            del self._lines[pool]
        for key, responses in failing.items():
            self._follow(key, responses, now, is_last=is_last)

    def _follow(
        self, key: tuple[str, str], responses: EndpointResponses, now: float, *, is_last: bool
    ) -> None:
        """Log failures of an endpoint, or their end: a minute without any, in which it served."""
        pool, address = key
        total, state = responses.failed.total(), self._failures.get(key)
        if state is None or total < state.count:
            state = self._failures[key] = _FailedResponses()
        if total > state.count:
            if state.since is None:
                state.since, state.before = now, state.count
            state.count, state.failed_at, state.served = total, now, responses.served
        lines = self._lines.setdefault(pool, _EndpointLines(pool))
        new = responses.failed - state.logged
        if new and (is_last or now - state.logged_at >= REPEAT_S):
            state.logged, state.logged_at = responses.failed, now
            ((status, _),) = new.most_common(1)
            lines.log(
                logging.WARNING,
                "requests fail",
                now,
                endpoint=address,
                status=status,
                count=new.total(),
                total=total,
            )
        elif (
            state.since is not None
            and now - state.failed_at >= REPEAT_S
            and responses.served > state.served
        ):
            lines.log(
                logging.INFO,
                "requests work again",
                now,
                endpoint=address,
                failures=state.count - state.before,
                for_s=state.failed_at - state.since,
            )
            state.since = None


class RequestFailureLog:
    """Log of refused requests and of failed responses."""

    def __init__(self, pools: Callable[[], Mapping[str, PoolCounters]]) -> None:
        self._rejections = RejectionLog(pools)
        self._responses = ResponseFailureLog(pools)

    def step(self, now: float, *, is_last: bool = False) -> None:
        """Log what was refused and what failed since the last lines, where one is due."""
        self._rejections.step(now, is_last=is_last)
        self._responses.step(now, is_last=is_last)


def _by_incarnation(pool: Pool) -> dict[int, Endpoint]:
    return {member.endpoint.incarnation: member.endpoint for member in pool.members}


def _join(endpoints: Iterable[Endpoint]) -> str:
    """Addresses of the first endpoints, with names of pods where known."""
    ordered = sorted(endpoints, key=lambda endpoint: endpoint.incarnation)
    names = [
        f"{endpoint.address}/{pod}" if (pod := _pod_name(endpoint)) else endpoint.address
        for endpoint in ordered[:_MAX_NAMED]
    ]
    if len(ordered) > _MAX_NAMED:
        names.append("...")
    return ",".join(names)


def _pod_name(endpoint: Endpoint) -> str:
    """Name of an endpoint; empty where it has none but its address."""
    return "" if endpoint.name == endpoint.address else endpoint.name


class LoggedRequestRecorder(RequestRecorder):
    """Recorder that logs its request: when it is refused or abandoned, or at its end."""

    __slots__ = ()
    failures_only: ClassVar[bool] = False

    def on_rejected(
        self,
        rejection: Rejection,
        *,
        request_id: str,
        labels: RequestLabels | None,
        now: float,
        started_s: float | None = None,
    ) -> None:
        """Count, record and log a rejection."""
        RequestRecorder.on_rejected(
            self, rejection, request_id=request_id, labels=labels, now=now, started_s=started_s
        )
        labels = self.labels if self.is_routed else labels
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
            pool=self.pool_counters.name or None,
            model=model_of(labels) or None,
            status=rejection.status,
            cause=rejection.cause,
            retry_after_s=rejection.retry_after_s,
        )

    def on_finished(self, *, endpoint: str | None, status: str, duration_s: float) -> None:
        """Count and log the end of a routed request."""
        is_logged = self.is_routed and not self.refusal_status
        if is_logged and (not self.failures_only or _is_failure(self.decision, status)):
            self.logged_at = time.time()  # noqa: TID251 - as other log records
        RequestRecorder.on_finished(self, endpoint=endpoint, status=status, duration_s=duration_s)
        # Where the request before is to be logged and waits, its line is due already.
        waiting = self._streams.ended
        if self.logged_at and not (len(waiting) > 1 and waiting[-2].logged_at):
            self._streams.settle_soon()


class LoggedFailureRecorder(LoggedRequestRecorder):
    """Recorder that logs refused and abandoned requests, and others without a response below 400."""

    __slots__ = ()
    failures_only: ClassVar[bool] = True


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
