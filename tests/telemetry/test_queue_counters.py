"""Counts of queued requests by labels, in tables that clients cannot fill without bound."""

from __future__ import annotations

from extproc.request import RequestLabels
from extproc.telemetry.counters import PoolCounters
from extproc.telemetry.request_series import MAX_SERIES, MAX_UNANSWERED_MODELS


def labels_of(model, tenant="ann", priority=0, client_model=""):
    return RequestLabels(client_model or model, model, tenant, priority)


def test_a_model_that_no_engine_lists_has_a_name_in_the_queue():
    """A pool is scaled from zero by the queue of a model, which nothing lists then."""
    queue = PoolCounters().queue
    alias = labels_of("llama", client_model="chat", priority=5)
    assert queue.record_queued(alias, 10) == alias
    assert queue.record_queued(alias, 20) == alias
    load = queue.queued[alias]
    assert (load.requests, load.bytes) == (2, 30)


def test_an_empty_queue_stays_at_zero():
    """Autoscalers then read that nothing waits, where no sample would be unknown."""
    queue = PoolCounters().queue
    queue.record_departed(queue.record_queued(labels_of("llama"), 10), 10)
    assert queue.queued[labels_of("llama")].requests == 0


def test_waiting_names_are_bounded():
    """A queue full of tenants and models that clients made up has labels of the series alone."""
    queue = PoolCounters().queue
    waiting = [
        queue.record_queued(labels_of(f"m{number}", f"t{number % 7}"), 1)
        for number in range(10_000)
    ]
    assert len(queue.queued) <= MAX_UNANSWERED_MODELS + 1
    assert sum(load.requests for load in queue.queued.values()) == 10_000
    for labels in waiting:
        queue.record_departed(labels, 1)
    assert not any(load.requests or load.bytes for load in queue.queued.values())
    for number in range(3_000):
        queue.record_queued(labels_of("m1", f"t{number}"), 1)
    assert len(queue.queued) <= MAX_SERIES + 100
