"""Counts of queued requests by model, tenant and priority, in bounded tables."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from extproc.request import RequestLabels


class QueuedLoad(msgspec.Struct):
    """Requests that wait with the same labels.

    Attributes:
        requests: Requests (count).
        bytes: Bytes of their bodies.
    """

    requests: int = 0
    bytes: int = 0


class QueueCounters:
    """Requests in the queue of one pool, by labels.

    Args:
        bound_labels: The labels of the series of a request, whose number is bounded.

    Attributes:
        queued: Requests that wait, by labels; 0 stays.
    """

    def __init__(self, bound_labels: Callable[[RequestLabels], RequestLabels]) -> None:
        self._bound_labels = bound_labels
        self.queued: dict[RequestLabels, QueuedLoad] = {}

    def record_queued(self, labels: RequestLabels, size_bytes: int) -> RequestLabels:
        """Count a request that joins the queue; returns the labels it is counted under."""
        labels = self._bound_labels(labels)
        load = self.queued.get(labels)
        if load is None:
            load = self.queued[labels] = QueuedLoad()
        load.requests += 1
        load.bytes += size_bytes
        return labels

    def record_departed(self, labels: RequestLabels, size_bytes: int) -> None:
        """Count a request that leaves the queue.

        Args:
            labels: Result of `record_queued`.
        """
        load = self.queued[labels]
        load.requests -= 1
        load.bytes -= size_bytes
