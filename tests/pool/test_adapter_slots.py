from __future__ import annotations

from extproc.endpoint import Load
from extproc.pool.engine_counters import AdapterSlotTracker


def count_loads(slots, *running, ran=(), size=2):
    before = slots.loads
    slots.update(Load(adapters=frozenset(running), adapter_slots=size), ran)
    return slots.loads - before


def test_a_new_running_adapter_counts_as_loaded():
    """An adapter that ran before the first scrape is no load, nor is one that stays idle in a slot."""
    slots = AdapterSlotTracker()
    assert count_loads(slots, "a") == 0
    assert count_loads(slots, "a", "b") == 1
    assert count_loads(slots) == 0
    assert count_loads(slots, "a") == 0
    assert count_loads(slots, "b") == 0


def test_the_least_recently_used_adapter_is_evicted():
    """Of two slots with a and then b, c takes that of a."""
    slots = AdapterSlotTracker()
    count_loads(slots)
    assert count_loads(slots, "a") == 1
    assert count_loads(slots, "b") == 1
    assert count_loads(slots, "c") == 1
    assert count_loads(slots, "b", "c") == 0
    assert count_loads(slots, "a") == 1


def test_requests_that_ended_between_scrapes_count():
    """An adapter that came and went within a scrape interval was loaded."""
    slots = AdapterSlotTracker()
    count_loads(slots)
    assert count_loads(slots, ran={"a"}) == 1
    assert count_loads(slots, "a", ran={"a"}) == 0
    assert count_loads(slots, "b", ran={"a", "c"}) == 2


def test_engines_without_slots_report_no_loads():
    """No labels, no loads."""
    slots = AdapterSlotTracker()
    for _ in range(3):
        slots.update(Load(adapters=frozenset("ab")), {"c"})
        slots.update(Load(adapter_slots=2), {"c"})
    assert slots.loads == 0
