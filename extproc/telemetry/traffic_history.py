"""Traffic of the last minutes: rates, times to first token and trends of endpoints.

A ring of points for the charts of the console, which no request touches: `TrafficHistory.sample`
reads counters every few seconds. Trends compare the counters of an endpoint with those of a minute
ago.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from extproc.pool.snapshot import EndpointSnapshot
from extproc.telemetry.counters import EndpointResponses, PoolCounters, ProcessCounters
from extproc.telemetry.pool_state import PoolView
from extproc.telemetry.request_series import (
    NO_STATUS,
    TTFT_BOUNDS_S,
    RequestSeries,
    merge_histogram,
)

#: Seconds between two samples. 5 show a failing engine soon, and a chart needs no more.
INTERVAL_S: Final = 5.0

#: Points that are kept (count): a quarter of an hour.
_MAX_POINTS: Final = 180

#: Samples between the two that a trend compares (count): a minute.
_WINDOW_SAMPLES: Final = 12

#: Responses of an endpoint within the window without which its time says nothing (count).
_MIN_RESPONSES: Final = 5

#: Predicted tokens within the window without which the prediction cannot be judged (count).
_MIN_PREDICTED_TOKENS: Final = 1000

#: Quantile of an endpoint's pool that its time is compared with, as in the alert on slow endpoints.
_QUICK_QUANTILE: Final = 0.25


class TrafficPoint(msgspec.Struct, frozen=True, gc=False):
    """Traffic of one pool, or of all, between two samples.

    Attributes:
        at: Monotonic seconds of the later sample.
        routed: Routed requests per second.
        refused: Requests per second that the picker refused.
        failed: Routed requests per second that ended with a 5xx status or without response headers.
        ttft_p50_s: Median seconds to the first token of streams; None without any.
        ttft_p95_s: 95th percentile of the same.
        complete_p95_s: 95th percentile of the seconds to response headers of answers that are not
            streamed, which engines send when the answer is complete; None without any.
        queued: Requests in the queues of flow control (count).
        in_flight: Open requests (count).
    """

    at: float
    routed: float
    refused: float
    failed: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    complete_p95_s: float | None
    queued: int
    in_flight: int


class EndpointTrend(msgspec.Struct, frozen=True, gc=False):
    """Last minute of one endpoint; None where too little happened to say.

    Attributes:
        requests_per_s: Requests that were routed to it, per second.
        answered: Responses that it gave (count).
        failed: Those of them that count as failures of the endpoint (count).
        response_headers_s: Mean seconds from the choice of the endpoint to response headers.
        slowness_ratio: The same over that of the quicker quarter of its pool.
        observed_ratio: Tokens found in its cache by its own counters, over those that were predicted.
        hit_ratio: Prompt tokens that its prefix cache held, over all that were looked up.
    """

    requests_per_s: float | None = None
    answered: int = 0
    failed: int = 0
    response_headers_s: float | None = None
    slowness_ratio: float | None = None
    observed_ratio: float | None = None
    hit_ratio: float | None = None


#: Of an endpoint that came within the last minute.
NO_TREND: Final = EndpointTrend()


class _EndpointMark(msgspec.Struct, frozen=True, gc=False):
    """Counters of an endpoint at a sample; None is what its page did not carry."""

    routed: float
    answered: int
    failed: int
    responses: float
    response_headers_s: float
    predicted_tokens: float
    observed_tokens: float
    prefix_queries: float | None
    prefix_hits: float | None


class _PoolMark(msgspec.Struct, frozen=True):
    """Counters of a pool at a sample: endpoints by address, rejections by (status, cause)."""

    endpoints: Mapping[str, _EndpointMark] = {}
    rejections: Mapping[tuple[int, str], int] = {}


_NO_MARK: Final = _PoolMark()
_NO_RESPONSES: Final = EndpointResponses()


class _Mark(msgspec.Struct, frozen=True):
    """Counters of all pools at a sample, by name."""

    at: float
    pools: Mapping[str, _PoolMark]


class _Totals(msgspec.Struct, frozen=True):
    """Sums of one pool, or of all, since the start."""

    routed: int = 0
    refused: int = 0
    failed: int = 0
    ttft_counts: Sequence[int] = ()
    complete_counts: Sequence[int] = ()


_NO_TOTALS: Final = _Totals()


class TrafficHistory:
    """Rings of samples: of all pools together, and of each where there are several.

    Attributes:
        points: Of all pools, oldest first.
    """

    def __init__(self) -> None:
        self.points: deque[TrafficPoint] = deque(maxlen=_MAX_POINTS)
        self._pool_points: dict[str, deque[TrafficPoint]] = {}
        self._marks: deque[_Mark] = deque(maxlen=_WINDOW_SAMPLES + 1)
        self._totals: Mapping[str, _Totals] = {}
        self._streams_ended = -1

    def sample(self, counters: ProcessCounters, views: Mapping[str, PoolView], now: float) -> None:
        """Add a point of all pools and one of each, and one mark for trends."""
        ended = sum(counters.streams.values())
        is_idle = bool(self._marks) and not counters.streams_open and ended == self._streams_ended
        self._streams_ended = ended
        before = self._totals
        totals = (
            before
            if is_idle
            else {name: _sum_totals(pool) for name, pool in counters.pools.items()}
        )
        if self._marks:
            since = self._marks[-1].at
            sums = _merge_totals(before.values()), _merge_totals(totals.values())
            self._add_pool_points(before, totals, now, views)
            self.points.append(_point(*sums, since, now, views.values()))
        self._totals = totals
        self._marks.append(
            _Mark(
                now, {name: _mark(view, counters.pools.get(name)) for name, view in views.items()}
            )
        )

    def points_of(self, pool: str) -> Sequence[TrafficPoint]:
        """Points of a pool, oldest first; empty where it is not known."""
        return self._pool_points.get(pool, ())

    def _add_pool_points(
        self,
        before: Mapping[str, _Totals],
        after: Mapping[str, _Totals],
        now: float,
        views: Mapping[str, PoolView],
    ) -> None:
        if len(views) < 2:
            # The points of all pools are those of the only one.
            self._pool_points = dict.fromkeys(views, self.points)
            return
        since = self._marks[-1].at
        known, self._pool_points = self._pool_points, {}
        for name, view in views.items():
            points = known.get(name)
            if points is None or points is self.points:
                points = deque(() if points is None else points, maxlen=_MAX_POINTS)
            sums = before.get(name, _NO_TOTALS), after.get(name, _NO_TOTALS)
            points.append(_point(*sums, since, now, [view]))
            self._pool_points[name] = points

    def window_s(self) -> float:
        """Seconds that trends cover; 0 before the second sample."""
        return self._marks[-1].at - self._marks[0].at if self._marks else 0.0

    def refused(self, pool: str) -> Mapping[tuple[int, str], int]:
        """Rejections of a pool within the window, by (status, cause)."""
        if not self._marks:
            return {}
        before, after = self._first_and_last(pool)
        return Counter(after.rejections) - Counter(before.rejections)

    def trends(self, pool: str) -> Mapping[str, EndpointTrend]:
        """Trends of the endpoints of a pool, by address; empty before the second sample."""
        window_s = self.window_s()
        if not window_s:
            return {}
        before, after = self._first_and_last(pool)
        deltas = {
            address: (before.endpoints[address], mark)
            for address, mark in after.endpoints.items()
            if address in before.endpoints
        }
        times_s = {
            address: seconds
            for address, (old, new) in deltas.items()
            if (seconds := _mean_headers_s(old, new)) is not None
        }
        quick_s = _quantile_of_values(sorted(times_s.values()), _QUICK_QUANTILE)
        return {
            address: EndpointTrend(
                requests_per_s=max(0.0, new.routed - old.routed) / window_s,
                answered=max(0, new.answered - old.answered),
                failed=max(0, new.failed - old.failed),
                response_headers_s=times_s.get(address),
                slowness_ratio=times_s[address] / quick_s
                if address in times_s and quick_s
                else None,
                observed_ratio=_ratio(
                    new.observed_tokens - old.observed_tokens,
                    new.predicted_tokens - old.predicted_tokens,
                    at_least=_MIN_PREDICTED_TOKENS,
                ),
                hit_ratio=_hit_ratio(old, new),
            )
            for address, (old, new) in deltas.items()
        }

    def _first_and_last(self, pool: str) -> tuple[_PoolMark, _PoolMark]:
        first, last = self._marks[0].pools, self._marks[-1].pools
        return first.get(pool, _NO_MARK), last.get(pool, _NO_MARK)


def _point(
    before: _Totals, after: _Totals, since: float, now: float, views: Collection[PoolView]
) -> TrafficPoint:
    span_s = max(now - since, 1e-3)
    first_tokens = _subtract_counts(after.ttft_counts, before.ttft_counts)
    complete = _subtract_counts(after.complete_counts, before.complete_counts)
    return TrafficPoint(
        at=now,
        routed=max(0, after.routed - before.routed) / span_s,
        refused=max(0, after.refused - before.refused) / span_s,
        failed=max(0, after.failed - before.failed) / span_s,
        ttft_p50_s=quantile(TTFT_BOUNDS_S, first_tokens, 0.5),
        ttft_p95_s=quantile(TTFT_BOUNDS_S, first_tokens, 0.95),
        complete_p95_s=quantile(TTFT_BOUNDS_S, complete, 0.95),
        queued=sum(view.queue[0] for view in views if view.queue is not None),
        in_flight=sum(view.pool.count_requests() for view in views),
    )


def _sum_totals(counters: PoolCounters) -> _Totals:
    ttft = merge_histogram(counters.series.histograms, "stream_ttft")
    complete = merge_histogram(counters.series.histograms, "complete_ttft")
    return _Totals(
        routed=counters.routed_total,
        refused=sum(counters.rejections.values()),
        failed=sum(map(_count_failed, counters.series)),
        ttft_counts=() if ttft is None else ttft.counts,
        complete_counts=() if complete is None else complete.counts,
    )


def _subtract_counts(after: Sequence[int], before: Sequence[int]) -> Sequence[int]:
    """Counts of buckets that were gained between two samples."""
    pairs = itertools.zip_longest(after, before, fillvalue=0)
    return [max(0, count - less) for count, less in pairs]


def _add_counts(counts: Iterable[Sequence[int]]) -> Sequence[int]:
    """Counts of the same buckets in several pools, added."""
    return list(map(sum, itertools.zip_longest(*counts, fillvalue=0)))


def _merge_totals(totals: Collection[_Totals]) -> _Totals:
    if len(totals) == 1:
        return next(iter(totals))
    return _Totals(
        routed=sum(pool.routed for pool in totals),
        refused=sum(pool.refused for pool in totals),
        failed=sum(pool.failed for pool in totals),
        ttft_counts=_add_counts(pool.ttft_counts for pool in totals),
        complete_counts=_add_counts(pool.complete_counts for pool in totals),
    )


def _count_failed(series: RequestSeries) -> int:
    """Routed requests of a series that failed; refused ones are another matter."""
    return sum(
        count - series.refused.get(status, 0)
        for status, count in series.requests.items()
        if status == NO_STATUS or (len(status) == 3 and status >= "500")
    )


def _mark(view: PoolView, counters: PoolCounters | None) -> _PoolMark:
    if counters is None:
        return _NO_MARK
    responses = counters.sum_responses()
    return _PoolMark(
        {
            member.endpoint.address: _endpoint_mark(
                member, view, counters, responses.get(member.endpoint.address, _NO_RESPONSES)
            )
            for member in view.pool.members
        },
        dict(counters.rejection_causes),
    )


def _endpoint_mark(
    member: EndpointSnapshot,
    view: PoolView,
    counters: PoolCounters,
    responses: EndpointResponses,
) -> _EndpointMark:
    address = member.endpoint.address
    headers, cache = counters.endpoint_headers_s.get(address), view.cache(member.endpoint)
    return _EndpointMark(
        counters.requests_routed[address],
        responses.total,
        responses.failed.total(),
        0 if headers is None else headers.count,
        0.0 if headers is None else headers.total,
        cache.predicted_tokens,
        cache.observed_tokens,
        member.load.prefix_queries,
        member.load.prefix_hits,
    )


def _mean_headers_s(old: _EndpointMark, new: _EndpointMark) -> float | None:
    return _ratio(
        new.response_headers_s - old.response_headers_s,
        new.responses - old.responses,
        at_least=_MIN_RESPONSES,
    )


def _hit_ratio(old: _EndpointMark, new: _EndpointMark) -> float | None:
    counts = (old.prefix_queries, new.prefix_queries, old.prefix_hits, new.prefix_hits)
    if None in counts:
        return None
    queries_before, queries, hits_before, hits = (count or 0.0 for count in counts)
    return _ratio(hits - hits_before, queries - queries_before, at_least=1)


def _ratio(part: float, total: float, *, at_least: float) -> float | None:
    """Ratio of two increases; None where the second is too small, or a counter began anew."""
    return part / total if total >= at_least and part >= 0.0 else None


def quantile(bounds: Sequence[float], counts: Iterable[int], share: float) -> float | None:
    """Quantile of a histogram, linear within a bucket; None without values.

    Args:
        bounds: Ascending upper bounds.
        counts: Values by bucket, not cumulative; those beyond the last bound count as equal to it.
    """
    counts = list(counts)
    rank, lower, below = share * sum(counts), 0.0, 0.0
    if not any(counts):
        return None
    for upper, count in zip((*bounds, math.inf), counts, strict=False):
        if count and below + count >= rank:
            return lower if upper == math.inf else lower + (upper - lower) * (rank - below) / count
        lower, below = upper, below + count
    return lower


def _quantile_of_values(ascending: Sequence[float], share: float) -> float | None:
    """Quantile of sorted values, linear between two of them, as PromQL computes it."""
    if not ascending:
        return None
    rank = share * (len(ascending) - 1)
    at = int(rank)
    following = ascending[min(at + 1, len(ascending) - 1)]
    return ascending[at] + (following - ascending[at]) * (rank - at)
