"""Counts of requests by model, tenant and priority, in a table of bounded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from extproc.request import UNNAMED, RequestLabels
from extproc.telemetry.histogram import (
    DURATION_BOUNDS_S,
    GAP_BOUNDS_S,
    RATIO_BOUNDS,
    TOKEN_BOUNDS,
    TPOT_BOUNDS_S,
    TTFT_BOUNDS_S,
    MetricHistogram,
)

#: Label value of everything beyond the bound of the table, and of models that no engine is known
#: to serve: clients can name any number of them.
OTHER: Final = "other"

#: Statuses of requests without one: the stream ended before response headers, and requests whose
#: responses are not watched.
NO_STATUS: Final = "none"
UNOBSERVED_STATUS: Final = "unobserved"

#: Statuses of one combination of labels (count); further ones are `OTHER`.
_MAX_STATUSES: Final = 24

#: Combinations of labels in one pool (count), some 4 kB each. The EPP of llm-d bounds each of its
#: labels by as much.
MAX_SERIES: Final = 1000

#: Combinations for what does not fit (count).
_MAX_OVERFLOW: Final = 100

#: Labels of a request that is refused before it is parsed, and of all that does not fit.
UNPARSED: Final = RequestLabels(UNNAMED, UNNAMED, UNNAMED, 0)
_ALL_OTHER: Final = RequestLabels(OTHER, OTHER, OTHER, 0)


class RequestSeries:
    """Counts of the requests with the same labels.

    Attributes:
        labels: Model, tenant and priority.
        requests: Requests by HTTP status, refused ones included.
        running: Requests that were routed and whose stream is open.
        duration_s: Time from the first message to the end of the stream of routed requests, by
            status.
        ttft_s: Time from the first message to the first token, by whether the response is a
            stream.
        tpot_s: Time per output token after the first, of streams whose chunks are shown.
        gap_s: Time between two chunks of these streams.
        predicted_ttft_s: Predicted time from the choice of the endpoint to the first token.
        ttft_ratio: Actual over predicted.
        tokens: Tokens that a response reported, by kind.
    """

    __slots__ = (
        "duration_s",
        "gap_s",
        "labels",
        "predicted_ttft_s",
        "requests",
        "running",
        "tokens",
        "tpot_s",
        "ttft_ratio",
        "ttft_s",
    )

    def __init__(self, labels: RequestLabels) -> None:
        self.labels = labels
        self.requests: Counter[str] = Counter()
        self.running = 0
        self.duration_s: dict[str, MetricHistogram] = {}
        self.ttft_s: dict[bool, MetricHistogram] = {}
        self.tpot_s = MetricHistogram(TPOT_BOUNDS_S)
        self.gap_s = MetricHistogram(GAP_BOUNDS_S)
        self.predicted_ttft_s = MetricHistogram(TTFT_BOUNDS_S)
        self.ttft_ratio = MetricHistogram(RATIO_BOUNDS)
        self.tokens: dict[str, MetricHistogram] = {}

    def record_routed(self) -> None:
        """Counts the start of a routed request."""
        self.running += 1

    def record_ended(self) -> None:
        """Counts the end of the stream of a routed request."""
        self.running -= 1

    def record_status(self, status: str) -> str:
        """Counts a request, and returns the label value of its status."""
        requests = self.requests
        if status not in requests and len(requests) >= _MAX_STATUSES:
            status = OTHER
        requests[status] += 1
        return status

    def record_duration(self, status: str, duration_s: float, trace_id: str) -> None:
        """Counts the duration of a routed request by a status of `record_status`."""
        histogram = self.duration_s.get(status)
        if histogram is None:
            histogram = self.duration_s[status] = MetricHistogram(DURATION_BOUNDS_S)
        histogram.add(duration_s, trace_id)

    def record_ttft(self, ttft_s: float, trace_id: str, *, is_stream: bool) -> None:
        """Counts the time to the first token."""
        histogram = self.ttft_s.get(is_stream)
        if histogram is None:
            histogram = self.ttft_s[is_stream] = MetricHistogram(TTFT_BOUNDS_S)
        histogram.add(ttft_s, trace_id)

    def record_prediction(self, predicted_s: float, actual_s: float) -> None:
        """Counts a predicted time to the first token, and how far it was off."""
        self.predicted_ttft_s.add(predicted_s)
        if predicted_s > 0.0:
            self.ttft_ratio.add(actual_s / predicted_s)

    def record_usage(self, usage: Mapping[str, int]) -> None:
        """Counts the tokens that a response reported, by kind."""
        for kind, tokens in usage.items():
            histogram = self.tokens.get(kind)
            if histogram is None:
                histogram = self.tokens[kind] = MetricHistogram(TOKEN_BOUNDS)
            histogram.add(tokens)


class RequestSeriesTable:
    """Series of the requests of one pool, by labels; their number is bounded.

    A model has series of its own once an engine is known to serve it; others count as `other`.
    Where the table is full, new tenants of a model in it do, and then everything else.
    """

    def __init__(self) -> None:
        self._by_labels: dict[RequestLabels, RequestSeries] = {}
        self._overflow: dict[RequestLabels, RequestSeries] = {}
        self._models = {UNNAMED}

    def __iter__(self) -> Iterator[RequestSeries]:
        yield from self._by_labels.values()
        yield from self._overflow.values()

    def find(self, labels: RequestLabels, *, is_served: bool) -> RequestSeries:
        """The series of a request, created where there is room.

        Args:
            labels: Labels of the request.
            is_served: Whether an engine is known to serve its model.
        """
        by_labels = self._by_labels
        series = by_labels.get(labels)
        if series is not None:
            return series
        model = labels.target_model
        if len(by_labels) < MAX_SERIES and (is_served or model in self._models):
            self._models.add(model)
            series = by_labels[labels] = RequestSeries(labels)
            return series
        return self._find_overflow(labels)

    def _find_overflow(self, labels: RequestLabels) -> RequestSeries:
        """The series of requests that have no series of their own."""
        overflow, merged = self._overflow, _ALL_OTHER
        if labels.target_model in self._models:
            merged = RequestLabels(labels.target_model, labels.target_model, OTHER, labels.priority)
            if merged not in overflow and len(overflow) >= _MAX_OVERFLOW:
                merged = _ALL_OTHER
        series = overflow.get(merged)
        if series is None:
            series = overflow[merged] = RequestSeries(merged)
        return series
