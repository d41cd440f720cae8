"""Queues with many waiting requests, and what an operation on them costs."""

from __future__ import annotations

import sys

from extproc.flow_control.flow_queue import QueuedItem
from extproc.flow_control.queue import EnqueueResult, FlowControlSettings, Queue


def operations(work):
    """Calls of functions that some work takes."""
    count = 0

    def profile(_frame, event, _arg):
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def crowd(size, *, tenants=1, targets=1, settings=None):
    """A queue in which so many wait."""
    queue = Queue(settings or FlowControlSettings())
    for at in range(size):
        item = QueuedItem(
            arrived=at,
            deadline=1e9 - at,
            tenant=f"t{at % tenants}",
            target=at % targets,
            size=1,
            tokens=1,
        )
        assert isinstance(queue.join(item, 0.0), EnqueueResult)
    return queue
