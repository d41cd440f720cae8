"""Bars of flow control on the recorded results of `bench.capacity`."""

import json

import pytest

from bench import capacity, rig

WRITTEN = json.loads((rig.RESULTS / "capacity.json").read_text())


def test_every_part_is_there_with_its_seeds():
    """Parts are measured one by one; each says over how many seeds."""
    assert set(WRITTEN["seeds"]) == set(capacity.PARTS)
    assert set(capacity.PARTS) <= set(WRITTEN)


def test_a_small_tenant_beside_a_big_one():
    """Issue 6, bar 4: p95 at most 1.5 times alone."""
    assert WRITTEN["tenants"]["ratios"]["ttft_p95_s"] <= 1.5


def test_three_times_the_capacity():
    """Issue 6, bar 5: 95 % of it is served, and a priority's p99 is at most 1.2 times alone."""
    ratios = WRITTEN["overload"]["ratios"]
    assert ratios["output_tokens_per_s"] >= 0.95
    assert ratios["ttft_p99_s"] <= 1.2


def test_chats_are_served_all_the_same():
    """At most one half of the bar is missed."""
    assert WRITTEN["overload-chat"]["ratios"]["output_tokens_per_s"] >= 0.95


@pytest.mark.parametrize("name", capacity.BESIDE)
def test_where_nobody_asked_for_turns_little_is_lost(name):
    """Requests per second within a tenth of those without holding."""
    rows = WRITTEN["beside"][name]
    assert rows["holding"]["requests_per_s"] >= 0.9 * rows["adaptive"]["requests_per_s"]
    assert not rows["holding"]["failed"]
