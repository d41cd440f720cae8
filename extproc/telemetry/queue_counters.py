"""Counts of queued requests by model, tenant, priority and outcome, in bounded tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from extproc.request import RequestLabels
from extproc.telemetry.request_series import OTHER, MetricHistogram

#: Bounds of waits, as the EPP of llm-d has them.
_WAIT_BOUNDS_S: Final = (
    *(1e-4, 5e-4, 1e-3, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)

#: Labels with histograms of their own, models and priorities of the tenants beyond, and priorities
#: of all others (counts); each outcome of each takes 19 lines of the page.
_MAX_LABELS: Final = 64
_MAX_MODELS: Final = 32
_MAX_PRIORITIES: Final = 32


class QueuedLoad(msgspec.Struct):
    """Requests that wait with the same labels.

    Attributes:
        requests: Requests (count).
        bytes: Bytes of their bodies.
    """

    requests: int = 0
    bytes: int = 0


class QueueCounters:
    """Requests in the queue of one pool and their departures, by labels.

    Args:
        bound_labels: The labels of the series of a request, whose number is bounded.

    Attributes:
        queued: Requests that wait, by labels; 0 stays for labels that have histograms.
        waits_s: Waits of requests that left, by labels and outcome. Outcomes are those of
            `FlowController`, `full` for requests that found no room, and `refused` for others that
            did not join. `full-unserved` and `expired-unserved` are of requests without an endpoint.
    """

    def __init__(self, bound_labels: Callable[[RequestLabels], RequestLabels]) -> None:
        self._bound_labels = bound_labels
        self.queued: dict[RequestLabels, QueuedLoad] = {}
        self.waits_s: dict[RequestLabels, dict[str, MetricHistogram]] = {}
        self._num_merged = 0

    def record_queued(self, labels: RequestLabels, size_bytes: int) -> RequestLabels:
        """Count a request that joins the queue; returns the labels it is counted under."""
        labels = self._find_labels(labels)
        load = self.queued.get(labels)
        if load is None:
            load = self.queued[labels] = QueuedLoad()
        load.requests += 1
        load.bytes += size_bytes
        return labels

    def record_departed(
        self, labels: RequestLabels, size_bytes: int, *, outcome: str, wait_s: float
    ) -> None:
        """Count a request that leaves the queue.

        Args:
            labels: Result of `record_queued`.
        """
        self._record_wait(labels, outcome, wait_s)
        load = self.queued[labels]
        load.requests -= 1
        load.bytes -= size_bytes
        if not load.requests and labels not in self.waits_s:
            del self.queued[labels]

    def record_refused(self, labels: RequestLabels, outcome: str) -> None:
        """Count a request that did not join the queue."""
        self._record_wait(self._find_labels(labels), outcome, 0.0)

    def _find_labels(self, labels: RequestLabels) -> RequestLabels:
        """The bounded labels of a request, with its own priority."""
        bounded = self._bound_labels(labels)
        if bounded.priority != labels.priority:
            bounded = msgspec.structs.replace(bounded, priority=labels.priority)
        return bounded

    def _record_wait(self, labels: RequestLabels, outcome: str, wait_s: float) -> None:
        by_outcome = self.waits_s.get(labels)
        if by_outcome is None:
            by_outcome = self._add_histograms(labels)
        histogram = by_outcome.get(outcome)
        if histogram is None:
            histogram = by_outcome[outcome] = MetricHistogram(_WAIT_BOUNDS_S)
        histogram.add(wait_s)

    def _add_histograms(self, labels: RequestLabels) -> dict[str, MetricHistogram]:
        """Histograms for new labels, which are those of others where there is no room."""
        waits_s = self.waits_s
        if len(waits_s) - self._num_merged >= _MAX_LABELS:
            labels = self._merge(labels)
            self._num_merged += labels not in waits_s
        return waits_s.setdefault(labels, {})

    def _merge(self, labels: RequestLabels) -> RequestLabels:
        """Labels that a request shares with others: its model and priority, where there is room."""
        model, priority = labels.target_model, labels.priority
        by_model = RequestLabels(model, model, OTHER, priority)
        by_priority = RequestLabels(OTHER, OTHER, OTHER, priority)
        for merged, most in ((by_model, _MAX_MODELS), (by_priority, _MAX_MODELS + _MAX_PRIORITIES)):
            if merged in self.waits_s or self._num_merged < most:
                return merged
        return msgspec.structs.replace(by_priority, priority=0)
