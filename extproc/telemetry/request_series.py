"""Request series: histograms and counts by model, tenant and priority, in bounded tables."""

from __future__ import annotations

import itertools
import math
import operator
import re
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec

from extproc.request import UNNAMED, RequestLabels

#: Bounds of durations and of times to first token, as the EPP of llm-d has them, so that both
#: names of a metric are served from the same counts.
DURATION_BOUNDS_S = (
    *(0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20),
    *(30, 45, 60, 120, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600),
)
TTFT_BOUNDS_S = DURATION_BOUNDS_S[:24]

#: Bounds of seconds per output token, and of the gaps between the chunks of a response.
TPOT_BOUNDS_S = (
    *(0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.6, 0.8, 1, 2),
)
GAP_BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2)

#: Bounds of tokens of a request, powers of two but for one, which the EPP of llm-d has so.
TOKEN_BOUNDS = (
    1,
    *(2**power for power in range(3, 15)),
    32778,
    *(2**power for power in range(16, 21)),
)

#: Bounds of bytes of a request and of its response, and of seconds over output tokens, as the EPP of
#: llm-d has them.
REQUEST_BOUNDS_BYTES = tuple(2**power for power in range(6, 31))
RESPONSE_BOUNDS_BYTES = TOKEN_BOUNDS[:15]
NTPOT_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)

#: Bounds of actual over predicted values.
RATIO_BOUNDS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)


#: Values up to which a step for each takes less time than to sort them (count).
_FEW_VALUES: Final = 8

#: Values of one kind that wait to be counted (count).
_MAX_WAITING: Final = 128

#: The last value of a sampled trace, and the id of that trace, by bucket.
Exemplars = dict[int, tuple[str, float]]


def count_buckets(bounds: Sequence[float], values: Sequence[float]) -> Iterable[tuple[int, int]]:
    """Buckets that values fall into, and how many do; of a few values, buckets may repeat."""
    if len(values) <= _FEW_VALUES:
        return [(bisect_left(bounds, value), 1) for value in values]
    return _count_sorted(bounds, sorted(values))


def _count_sorted(bounds: Sequence[float], ordered: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Buckets of many ascending values: a step for each bucket, not value."""
    at, end = 0, len(ordered)
    while at < end:
        bucket = bisect_left(bounds, ordered[at])
        following = bisect_right(ordered, bounds[bucket], at) if bucket < len(bounds) else end
        yield bucket, following - at
        at = following


class MetricHistogram(msgspec.Struct, eq=False, gc=False):
    """A histogram with fixed upper bounds.

    Attributes:
        bounds: Ascending upper bounds, in the unit of what is added.
        counts: Values by bucket, not cumulative, up to the last bucket that has one.
        total: Sum of the values.
        exemplars: Exemplars; None without any.
    """

    bounds: tuple[float, ...]
    counts: list[int] = []
    total: float = 0.0
    exemplars: Exemplars | None = None

    def add(self, value: float) -> None:
        """Counts one value."""
        self.add_all([value])

    def add_all(self, values: Sequence[float]) -> None:
        """Counts values."""
        counts = self.counts
        for bucket, count in count_buckets(self.bounds, values):
            if bucket >= len(counts):
                counts += [0] * (bucket + 1 - len(counts))
            counts[bucket] += count
        self.total += sum(values)

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @property
    def cumulative(self) -> list[int]:
        """Values up to each bound, and all of them."""
        counts = list(itertools.accumulate(self.counts))
        return counts + [counts[-1] if counts else 0] * (len(self.bounds) + 1 - len(counts))


def merge(histograms: Iterable[MetricHistogram | None]) -> MetricHistogram | None:
    """The sum of histograms with the same bounds; None of none or of empty ones."""
    same = [histogram for histogram in histograms if histogram is not None and histogram.counts]
    if len(same) < 2:
        return same[0] if same else None
    merged = MetricHistogram(same[0].bounds)
    for histogram in same:
        pairs = itertools.zip_longest(merged.counts, histogram.counts, fillvalue=0)
        merged.counts = [count + more for count, more in pairs]
        merged.total += histogram.total
        if histogram.exemplars is not None:
            merged.exemplars = {**(merged.exemplars or {}), **histogram.exemplars}
    return merged


def rebucket(
    histogram: MetricHistogram | None, bounds: tuple[float, ...]
) -> MetricHistogram | None:
    """The same values by some of the bounds; None of None."""
    if histogram is None:
        return None
    cumulative = dict(zip((*histogram.bounds, math.inf), histogram.cumulative, strict=True))
    below = [cumulative[bound] for bound in (*bounds, math.inf)]
    counts = [count - less for count, less in zip(below, [0, *below], strict=False)]
    return MetricHistogram(bounds, counts, histogram.total)


#: Label value of everything beyond the bounds of the table: clients can name any number of models.
OTHER: Final = "other"

#: Statuses of requests without one: the stream ended before response headers, and requests whose
#: responses are not watched.
NO_STATUS: Final = "none"
UNOBSERVED_STATUS: Final = "unobserved"

_STATUS: Final = re.compile(f"[1-9][0-9][0-9]|{NO_STATUS}|{UNOBSERVED_STATUS}")

#: Histograms of requests besides those of durations, whose names are statuses. Times to the first
#: token are of streams and of complete responses; tokens are those that responses report.
Timing = Literal["stream_ttft", "complete_ttft", "tpot", "itl", "predicted_ttft", "ttft_ratio"]

#: Histograms of requests that are counted only where metrics have the names of llm-d.
LlmdValue = Literal["request_bytes", "response_bytes", "ntpot"]

#: Kinds of tokens, whose histograms have their names.
TOKEN_KINDS: Final = ("prompt", "cached", "completion")

_BOUNDS: Final[Mapping[str, tuple[float, ...]]] = {
    "stream_ttft": TTFT_BOUNDS_S,
    "complete_ttft": TTFT_BOUNDS_S,
    "tpot": TPOT_BOUNDS_S,
    "itl": GAP_BOUNDS_S,
    "predicted_ttft": DURATION_BOUNDS_S,
    "ttft_ratio": RATIO_BOUNDS,
    "request_bytes": REQUEST_BOUNDS_BYTES,
    "response_bytes": RESPONSE_BOUNDS_BYTES,
    "ntpot": NTPOT_BOUNDS_S,
    **dict.fromkeys(TOKEN_KINDS, TOKEN_BOUNDS),
}

#: Statuses of one combination of labels (count); further ones are `OTHER`.
_MAX_STATUSES: Final = 24

#: Models of a pool that have histograms, the first ones; those of all others are added up (count).
#: Names may have 512 bytes, and the histograms of a model take 50 lines of the page.
MAX_HISTOGRAM_MODELS: Final = 64

#: Combinations of labels in one pool that have histograms of their own, the first ones; all others
#: share those of their model (count). Each takes 1 to 2 kB, and with the names of llm-d up to 300
#: lines of the page.
MAX_HISTOGRAMS: Final = 64

#: Combinations of labels in one pool (count), some 0.5 kB each. The EPP of llm-d bounds each of its
#: labels by as much.
MAX_SERIES: Final = 1000

#: Models in one pool that have series before an engine listed them or answered, besides those of
#: the configuration (count). Where no engine lists its models, as there is none, clients can name
#: any, and a long name is on some 80 lines of the page.
MAX_UNANSWERED_MODELS: Final = 32

#: Combinations for what does not fit (count), and those of them that are left to priorities.
_MAX_OVERFLOW: Final = 100
_MIN_PRIORITIES: Final = 16

#: Labels of a request that is refused before it is parsed, and of all that does not fit.
UNPARSED: Final = RequestLabels(UNNAMED, UNNAMED, UNNAMED, 0)
_ALL_OTHER: Final = RequestLabels(OTHER, OTHER, OTHER, 0)


class HistogramSet(msgspec.Struct, eq=False, gc=False):
    """Histograms of the requests of one series, or of all later series of a model.

    Attributes:
        model: Model by which they are on the page; `OTHER` for those of later models.
        is_shared: Whether they are of several series.
    """

    model: str
    is_shared: bool
    #: Sum of the values and values by bucket, up to the last one that has any, by name: durations
    #: of routed requests have their status as name.
    _values: dict[str, list[float]] = {}
    #: Exemplars of histograms, by name.
    _exemplars: dict[str, Exemplars] | None = None

    def name_status(self, status: str) -> str:
        """Name of the histogram of the durations of routed requests with a status.

        Args:
            status: HTTP status of the response, `NO_STATUS` or `UNOBSERVED_STATUS`.
        """
        known = self._values
        if status in known:
            return status
        is_valid = _STATUS.fullmatch(status) is not None
        fits = len(known) < len(_BOUNDS) + _MAX_STATUSES
        return sys.intern(status) if is_valid and fits else OTHER

    def record(self, name: str, values: Sequence[float]) -> None:
        """Counts values in the histogram of that name."""
        counted = self._values.get(name, [0])
        for bucket, count in count_buckets(_BOUNDS.get(name, DURATION_BOUNDS_S), values):
            if bucket + 1 >= len(counted):
                # A new list is as long as it need be.
                counted = [*counted, *[0] * (bucket + 2 - len(counted))]
            counted[bucket + 1] += count
        self._values[name] = counted
        counted[0] += sum(values)

    def set_exemplar(self, name: str, value: float, trace_id: str) -> None:
        """Note a value of a sampled trace that is counted in the histogram of that name."""
        if self._exemplars is None:
            self._exemplars = {}
        bucket = bisect_left(_BOUNDS.get(name, DURATION_BOUNDS_S), value)
        self._exemplars.setdefault(name, {})[bucket] = (trace_id, value)

    @property
    def statuses(self) -> Sequence[str]:
        """Statuses of the routed requests that ended: names of the histograms of durations."""
        return [name for name in self._values if name not in _BOUNDS]

    def add_to(self, counts: list[float], name: str) -> Exemplars | None:
        """Add the sum and the counts of a histogram to others, and return its exemplars."""
        values = self._values.get(name)
        if values is not None:
            counts[: len(values)] = map(operator.add, counts, values)
        return None if self._exemplars is None else self._exemplars.get(name)


class RequestSeries(msgspec.Struct, eq=False, gc=False):
    """Counts of the requests with the same labels, in little memory: a client can fill the table.

    Attributes:
        histograms: Histograms that they are counted in.
        running: Requests that were routed and whose stream is open.
        requests: Requests that ended, by status (count).
        refused: Those of them that were refused.
        tokens: Tokens that responses reported, by `TOKEN_KINDS`; absent before there were any.
    """

    labels: RequestLabels
    histograms: HistogramSet
    running: int = 0
    requests: dict[str, int] = {}
    refused: dict[str, int] = {}
    tokens: dict[str, float] = {}

    def record_refused(self, status: int) -> None:
        """Counts a refused request."""
        text = str(status)
        for counts in (self.requests, self.refused):
            counts[text] = counts.get(text, 0) + 1

    def record(self, name: str, values: Sequence[float]) -> None:
        """Counts values in the histogram of that name; those of durations count as ended requests."""
        self.histograms.record(name, values)
        if name in TOKEN_KINDS:
            self.tokens[name] = self.tokens.get(name, 0.0) + sum(values)
        elif name not in _BOUNDS:
            self.requests[name] = self.requests.get(name, 0) + len(values)

    def change_running(self, change: int) -> None:
        """Counts requests that were routed, or less those whose streams ended."""
        self.running += change


def name_statuses(sets: Iterable[HistogramSet]) -> Collection[str]:
    """Statuses of routed requests that ended, over sets."""
    return dict.fromkeys(itertools.chain.from_iterable(some.statuses for some in sets))


def merge_histogram(sets: Iterable[HistogramSet], *names: str) -> MetricHistogram | None:
    """The sum of histograms of the same bounds over sets; None where all are empty."""
    if not names:
        return None
    bounds = _BOUNDS.get(names[0], DURATION_BOUNDS_S)
    merged: list[float] = [0] * (len(bounds) + 2)
    exemplars: Exemplars = {}
    for some in sets:
        for name in names:
            traced = some.add_to(merged, name)
            if traced is not None:
                exemplars.update(traced)
    total, *counts = merged
    if not any(counts):
        return None
    return MetricHistogram(bounds, list(map(int, counts)), float(total), exemplars or None)


class RequestSeriesTable:
    """Series of the requests of one pool, by labels; their number is bounded.

    A model has series of its own once an engine listed it or answered a request for it, or if the
    configuration names it. A few have from their first request on if an engine may serve them, or
    if no engine lists any when it is refused; others count as `other`, by priority.
    Where the table is full, new tenants of a model in it do, and then everything else.
    """

    def __init__(self) -> None:
        self._read_listed: Callable[[], Collection[str]] = frozenset
        self._read_configured: Callable[[], Collection[str]] = frozenset
        self._by_labels: dict[RequestLabels, RequestSeries] = {}
        self._overflow: dict[RequestLabels, RequestSeries] = {}
        # Sets of histograms in the order of their first series, and the shared ones by their model.
        self._histograms: list[HistogramSet] = []
        self._shared: dict[str, HistogramSet] = {}
        self._early_models: set[str] = set()
        self._models = {UNNAMED}
        self._num_unanswered = 0

    def __iter__(self) -> Iterator[RequestSeries]:
        yield from self._by_labels.values()
        yield from self._overflow.values()

    @property
    def histograms(self) -> Sequence[HistogramSet]:
        """Histograms of all series."""
        return self._histograms

    def read_known_models(
        self,
        *,
        listed: Callable[[], Collection[str]],
        configured: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        """Read names of models where a request has no series.

        Args:
            listed: Names that engines of the pool list.
            configured: Names in the configuration, which need no engine.
        """
        self._read_listed, self._read_configured = listed, configured

    def find_refused(self, labels: RequestLabels) -> RequestSeries:
        """The series of a refused request; any model may be one of engines that are not there."""
        return self.find(labels, may_be_served=not self._read_listed())

    def find(
        self, labels: RequestLabels, *, is_served: bool = False, may_be_served: bool = False
    ) -> RequestSeries:
        """The series of a request, created where there is room.

        Args:
            is_served: Whether an engine answered a request for its model.
            may_be_served: Whether an engine may serve it, as some list none.
        """
        by_labels = self._by_labels
        series = by_labels.get(labels)
        if series is not None:
            return series
        model = labels.target_model
        is_known = (
            is_served
            or model in self._models
            or model in self._read_listed()
            or model in self._read_configured()
        )
        if not is_known and may_be_served and self._num_unanswered < MAX_UNANSWERED_MODELS:
            self._num_unanswered += 1
            is_known = True
        if is_known and len(by_labels) < MAX_SERIES:
            self._models.add(model)
            series = by_labels[labels] = self._create_series(labels)
            return series
        return self._find_overflow(labels)

    def _find_overflow(self, labels: RequestLabels) -> RequestSeries:
        """The series of requests that have no series of their own."""
        overflow, model, priority = self._overflow, labels.target_model, labels.priority
        tenant = UNNAMED if labels.tenant == UNNAMED else OTHER
        merged, room = RequestLabels(OTHER, OTHER, tenant, priority), _MAX_OVERFLOW - 1
        if model in self._models:
            of_model = RequestLabels(model, model, tenant, priority)
            if of_model in overflow or len(overflow) < room - _MIN_PRIORITIES:
                merged = of_model
        if merged not in overflow and len(overflow) >= room:
            merged = _ALL_OTHER
        series = overflow.get(merged)
        if series is None:
            series = overflow[merged] = self._create_series(merged)
        return series

    def _create_series(self, labels: RequestLabels) -> RequestSeries:
        """A series without requests; the first ones have histograms of their own."""
        model, early = labels.target_model, self._early_models
        if model != OTHER and len(early) < MAX_HISTOGRAM_MODELS:
            early.add(model)
        model = model if model in early else OTHER
        if len(self._by_labels) + len(self._overflow) < MAX_HISTOGRAMS:
            histograms = HistogramSet(model, is_shared=False)
            self._histograms.append(histograms)
        elif model in self._shared:
            histograms = self._shared[model]
        else:
            histograms = self._shared[model] = HistogramSet(model, is_shared=True)
            self._histograms.append(histograms)
        return RequestSeries(labels, histograms)


class WaitingValues:
    """Values for histograms of series, which are counted together."""

    def __init__(self) -> None:
        self._values: defaultdict[tuple[RequestSeries, str], list[float]] = defaultdict(list)

    def add(self, series: RequestSeries, name: str, value: float, trace_id: str = "") -> None:
        """Count a value; of a sampled trace, where it has an id."""
        values = self._values[series, name]
        values.append(value)
        if len(values) >= _MAX_WAITING:
            series.record(name, values)
            values.clear()
        if trace_id:
            series.histograms.set_exemplar(name, value, trace_id)

    def settle(self) -> None:
        """Count what waits."""
        for (series, name), values in self._values.items():
            series.record(name, values)
        self._values.clear()
