"""Problems of a running picker in words: endpoints, queues, configuration; the worst first.

Thresholds are those of the alerts (docs/operations/alerts.md), over the last minute; one refused
request is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from extproc.pool import plausibility
from extproc.pool.endpoint_health import HealthState
from extproc.pool.pool_step_times import find_slowness
from extproc.pool.snapshot import EndpointSnapshot
from extproc.telemetry.pool_state import PoolView
from extproc.telemetry.traffic_history import NO_TREND, EndpointTrend, TrafficHistory

Severity = Literal["critical", "warning", "info"]

_ORDER: Final[Mapping[Severity, int]] = {"critical": 0, "warning": 1, "info": 2}

#: Problems of a kind that are listed for a pool (count); the last one says how many more there are.
_MAX_ALIKE: Final = 5

#: Times that an endpoint computes slower than those like it or answers later than its pool, and share
#: of the predicted cached tokens, at which the alerts fire.
_SLOW_RATIO: Final = 3.0
_COLD_RATIO: Final = 0.5

#: Share of the responses of an endpoint that fail above which it is a problem, as in the alert, and
#: failures below which a share says nothing (count): so many in a row eject an endpoint.
_FAILED_RATIO: Final = 0.05
_MIN_FAILED: Final = 3

#: Share of a queue at which it is nearly full.
_NEARLY_FULL: Final = 0.8

#: Causes of refusals that mean too little capacity.
_QUEUE_CAUSES: Final = frozenset({"queue-full", "displaced", "queue-timeout"})

_CAUSES: Final[Mapping[str, str]] = {
    "errors": "its requests fail",
    "hung": "it has work and completes nothing",
    "passed-over": "the data plane passes it over",
    "unreachable": "it cannot be reached",
}


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One problem.

    Attributes:
        kind: Stable name, such as `endpoint-slow`.
        severity: `critical` where requests fail.
        title: One line with the subject first.
        pool: Name of the pool; empty where it is of the process.
        endpoint: Address of the endpoint; empty where it is of no single one.
    """

    kind: str
    severity: Severity
    title: str
    advice: str = ""
    pool: str = ""
    endpoint: str = ""


def find_pool_problems(
    name: str,
    view: PoolView,
    history: TrafficHistory,
    now: float,
    *,
    desired_replicas: float | None = None,
) -> list[Problem]:
    """Find the problems of one pool and its endpoints.

    Args:
        desired_replicas: Replicas that its autoscaling wants; None without autoscaling.
    """
    members = view.pool.members
    label = f"pool {name}" if name else "the pool"
    problems: list[Problem] = []
    if not members:
        problems.append(_describe_empty(name, view, is_wanted=desired_replicas != 0))
    elif all(member.is_ejected for member in members):
        problems.append(
            Problem(
                kind="all-ejected",
                severity="critical",
                title=f"Every endpoint of {label} is ejected",
                advice="The least bad one serves. Look at the causes below.",
                pool=name,
            )
        )
    trends = history.trends(name)
    endpoints = [
        _ObservedEndpoint(member, trends.get(member.endpoint.address, NO_TREND), slowness, now)
        for member, slowness in zip(members, find_slowness(members), strict=True)
    ]
    for find in _ENDPOINT_FINDERS:
        alike = [problem for endpoint in endpoints if (problem := find(endpoint)) is not None]
        problems += _limit(alike)
    problems = [msgspec.structs.replace(problem, pool=name) for problem in problems]
    return problems + list(_find_queue_problems(name, view, history))


def _describe_empty(name: str, view: PoolView, *, is_wanted: bool) -> Problem:
    """Of a pool without endpoints, which autoscaling may hold at zero."""
    label = f"Pool {name}" if name else "The pool"
    requests = "get 503" if view.queue is None else "wait for one, and get 503 in the end"
    if is_wanted:
        return Problem(
            kind="no-endpoint",
            severity="critical",
            title=f"{label} has no endpoint",
            advice=f"Look at its selector, list or names; requests {requests}.",
            pool=name,
        )
    return Problem(
        kind="scaled-to-zero",
        severity="info",
        title=f"{label} is scaled to zero",
        advice="Its next request starts an engine, if flow control lets it wait.",
        pool=name,
    )


def find_process_problems(
    *,
    is_ready: bool,
    reload_error: str,
    needs_restart: Sequence[str],
    degraded: Sequence[str],
    recording_error: str,
) -> list[Problem]:
    """Find the problems of the process.

    Args:
        reload_error: Why the last reload was refused; empty where it was not.
        needs_restart: Fields of the configuration that only a restart changes.
        recording_error: Why decisions are not recorded; empty while they are, or are not to be.
    """
    problems: list[Problem] = []
    if not is_ready:
        problems.append(
            Problem(
                kind="not-ready",
                severity="critical",
                title="The picker is not ready",
                advice="GET /readyz says what it waits for.",
            )
        )
    if reload_error:
        problems.append(
            Problem(
                kind="configuration-refused",
                severity="critical",
                title="The changed configuration was refused; the old one is in force",
                advice=reload_error,
            )
        )
    if needs_restart:
        problems.append(
            Problem(
                kind="restart-needed",
                severity="info",
                title="Part of the configuration needs a restart",
                advice=f"Waiting for it: {', '.join(needs_restart)}.",
            )
        )
    if degraded:
        problems.append(
            Problem(
                kind="loop-failing",
                severity="warning",
                title=f"Background work fails and is repeated: {', '.join(degraded)}",
                advice="The log says where and why.",
            )
        )
    if recording_error:
        problems.append(
            Problem(
                kind="recording-failing",
                severity="warning",
                title=f"Decisions are not recorded: {recording_error}",
                advice="Requests are served. Let extproc write `decisions.record.file`.",
            )
        )
    return problems


def sort_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Sort problems, the worst first."""
    return sorted(problems, key=lambda problem: _ORDER[problem.severity])


class _ObservedEndpoint(NamedTuple):
    """An endpoint, and its last minute.

    Attributes:
        slowness: Times that it computes slower than others like it; None while unknown.
        now: Monotonic seconds.
    """

    member: EndpointSnapshot
    trend: EndpointTrend
    slowness: float | None
    now: float


def _find_ejected(endpoint: _ObservedEndpoint) -> Problem | None:
    member, condition = endpoint.member, endpoint.member.condition
    if not member.is_ejected:
        return None
    address, state = member.endpoint.address, condition.state
    word = "is out of reach" if state is HealthState.DOWN else "is ejected"
    cause = _CAUSES.get(condition.cause, condition.cause)
    because = f": {cause}" if cause and state is not HealthState.DOWN else ""
    since_s = max(0.0, endpoint.now - condition.since)
    return Problem(
        kind="endpoint-ejected",
        severity="critical",
        title=f"{address} {word}{because} (for {since_s:.0f} s)",
        advice="It gets no requests until a trial request or a scrape succeeds. "
        "Look at the log of the engine.",
        endpoint=address,
    )


def _find_failing(endpoint: _ObservedEndpoint) -> Problem | None:
    """Of an endpoint that fails some of its requests, too few to be ejected."""
    trend, address = endpoint.trend, endpoint.member.endpoint.address
    is_failing = trend.failed >= _MIN_FAILED and trend.failed > _FAILED_RATIO * trend.answered
    if endpoint.member.is_ejected or not is_failing:
        return None
    return Problem(
        kind="endpoint-errors",
        severity="critical",
        title=f"{address} fails {trend.failed} of {trend.answered} requests in the last minute",
        advice="It still gets requests. Lines `requests fail` of the log have the status; "
        "look at the log of the engine.",
        endpoint=address,
    )


def _find_unread(endpoint: _ObservedEndpoint) -> Problem | None:
    member = endpoint.member
    address, distrust = member.endpoint.address, plausibility.distrust_reason(member.flaws)
    if member.is_ejected or not (member.failure or distrust):
        return None
    reason = member.failure or f"they are {distrust}"
    return Problem(
        kind="metrics-unread",
        severity="warning",
        title=f"Metrics of {address} cannot be used: {reason}",
        advice="Its load counts as the mean of the others.",
        endpoint=address,
    )


def _find_slow(endpoint: _ObservedEndpoint) -> Problem | None:
    """Of an engine that computes slowly; else of one that answers late, for whatever reason."""
    address, answers = endpoint.member.endpoint.address, endpoint.trend.slowness_ratio or 0.0
    computes = endpoint.slowness or 0.0
    if max(computes, answers) < _SLOW_RATIO:
        return None
    title = f"{address} answers {answers:.1f} times slower than the quicker quarter of its pool"
    advice = "With equal load it is the engine: look at its device, restart or replace it."
    if computes >= _SLOW_RATIO:
        title = f"{address} computes {computes:.1f} times slower than others like it"
        advice = "Load makes no difference to that: look at its device, restart or replace it."
    return Problem(
        kind="endpoint-slow", severity="warning", title=title, advice=advice, endpoint=address
    )


def _find_cold(endpoint: _ObservedEndpoint) -> Problem | None:
    ratio = endpoint.trend.observed_ratio
    if ratio is None or ratio >= _COLD_RATIO:
        return None
    address = endpoint.member.endpoint.address
    return Problem(
        kind="cache-cold",
        severity="warning",
        title=f"The cache of {address} is cold: it holds {ratio:.0%} of the predicted tokens",
        advice="It was reset, others fill it, or prefix caching is off.",
        endpoint=address,
    )


#: Finders of a problem of one endpoint.
_ENDPOINT_FINDERS: Final[Sequence[Callable[[_ObservedEndpoint], Problem | None]]] = (
    _find_ejected,
    _find_failing,
    _find_unread,
    _find_slow,
    _find_cold,
)


def _limit(problems: list[Problem]) -> list[Problem]:
    """The first problems of a kind; the last of these counts the others."""
    more = len(problems) - _MAX_ALIKE
    if more <= 0:
        return problems
    last = problems[_MAX_ALIKE - 1]
    title = f"{last.title}, and {more} more endpoints like it"
    return [*problems[: _MAX_ALIKE - 1], msgspec.structs.replace(last, title=title)]


def _find_queue_problems(name: str, view: PoolView, history: TrafficHistory) -> Iterator[Problem]:
    label = f" of pool {name}" if name else ""
    refused = history.refused(name)
    by_queue = sum(count for (_, cause), count in refused.items() if cause in _QUEUE_CAUSES)
    queued, capacity = (view.queue[0], view.queue_capacity) if view.queue else (0, 0)
    window_s = history.window_s()
    if by_queue:
        yield Problem(
            kind="queue-full",
            severity="critical",
            title=f"The queue{label} is full: {by_queue} requests refused in {window_s:.0f} s "
            f"({queued} of {capacity} places taken)",
            advice="Add engines, or give batch traffic a priority below 0.",
            pool=name,
        )
    elif capacity and queued >= _NEARLY_FULL * capacity:
        yield Problem(
            kind="queue-nearly-full",
            severity="warning",
            title=f"The queue{label} is nearly full: {queued} of {capacity} places taken",
            advice="Add engines, or give batch traffic a priority below 0.",
            pool=name,
        )
    for (status, cause), count in refused.items():
        if status >= 429 and cause not in _QUEUE_CAUSES:
            yield Problem(
                kind="requests-refused",
                severity="warning",
                title=f"{count} requests{label} refused in {window_s:.0f} s: {cause} ({status})",
                advice="Decisions, result refused, lists them.",
                pool=name,
            )
