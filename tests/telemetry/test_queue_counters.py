"""Counts of queued requests by labels, in tables that clients cannot fill without bound."""

from __future__ import annotations

import tracemalloc

import pytest

from extproc.request import RequestLabels
from extproc.telemetry.counters import PoolCounters
from extproc.telemetry.request_series import MAX_SERIES, MAX_UNANSWERED_MODELS


def labels_of(model, tenant="ann", priority=0, client_model=""):
    return RequestLabels(client_model or model, model, tenant, priority)


def leave(queue, labels, outcome="expired", wait_s=1.0):
    """A request that waits and leaves."""
    queue.record_departed(queue.record_queued(labels, 10), 10, outcome=outcome, wait_s=wait_s)


def count_waits(queue):
    """Departures by labels and outcome."""
    return {
        (labels, outcome): histogram.count
        for labels, by_outcome in queue.waits_s.items()
        for outcome, histogram in by_outcome.items()
    }


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
    leave(queue, labels_of("llama"))
    assert queue.queued[labels_of("llama")].requests == 0
    assert count_waits(queue) == {(labels_of("llama"), "expired"): 1}


@pytest.mark.parametrize("is_full", [False, True])
def test_requests_of_further_models_keep_their_priority(is_full):
    """It is no text of a client."""
    queue = PoolCounters().queue
    for number in range(MAX_UNANSWERED_MODELS):
        leave(queue, labels_of(f"m{number}"))
    if is_full:
        queue.record_refused(labels_of("further", priority=7), "full")
        outcome = "full"
    else:
        leave(queue, labels_of("further", priority=7))
        outcome = "expired"
    assert count_waits(queue)[RequestLabels("other", "other", "other", 7), outcome] == 1


def test_tenants_beyond_the_bound_keep_model_and_priority():
    """The waits of a model stay together, however many tenants ask for it."""
    queue = PoolCounters().queue
    for number in range(100):
        leave(queue, labels_of("llama", tenant=f"t{number}", priority=number % 2))
    waits = count_waits(queue)
    assert sum(waits.values()) == 100
    assert {labels.target_model for labels, _ in waits} == {"llama"}
    assert waits[RequestLabels("llama", "llama", "other", 1), "expired"] == 18


def test_names_of_clients_do_not_grow_the_tables():
    """100,000 models, tenants and priorities take no more than the first thousands."""
    queue = PoolCounters().queue

    def flood(numbers):
        for number in numbers:
            leave(queue, labels_of(f"m{number}", f"t{number}", number % 1000))
            leave(queue, labels_of("m1", f"t{number}", number % 1000))

    flood(range(4_000))
    before = len(queue.queued), len(queue.waits_s)
    assert before[1] <= 64 + 32 + 32 + 1
    assert before[0] <= before[1]
    flood(range(4_000, 98_000))
    tracemalloc.start()
    flood(range(98_000, 100_000))
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 2**14
    assert (len(queue.queued), len(queue.waits_s)) == before
    assert sum(count_waits(queue).values()) == 200_000


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
        queue.record_departed(labels, 1, outcome="dispatched", wait_s=0.5)
    assert not any(load.requests or load.bytes for load in queue.queued.values())
    for number in range(3_000):
        queue.record_queued(labels_of("m1", f"t{number}"), 1)
    assert len(queue.queued) <= MAX_SERIES + 100
