"""Load of other pickers, as scrapes show it."""

import pytest

from extproc.endpoint import NO_LOAD, Load
from extproc.pool.engine_counters import ForeignTraffic


def page(queries: float, hits: float) -> Load:
    """A page with the counters of the prefix cache."""
    return Load(at=0.0, engine="vllm", prefix_queries=queries, prefix_hits=hits)


def test_no_foreign_traffic():
    """If all requests are ours, foreign load is zero; so it is before the first scrape."""
    peers = ForeignTraffic()
    assert peers.share == 0.0
    peers.update(5, 0.0, before=NO_LOAD, after=NO_LOAD)
    assert peers.share == 0.0


def test_foreign_share_of_three_other_replicas():
    """A quarter of the requests is ours: three quarters are of others, also when some left."""
    peers = ForeignTraffic()
    for _ in range(300):
        peers.update(5, 15.0, before=NO_LOAD, after=NO_LOAD)
    assert peers.share == pytest.approx(0.75)
    for _ in range(300):
        peers.update(20, 0.0, before=NO_LOAD, after=NO_LOAD)
    assert peers.share < 0.01


def test_hit_ratio_begins_at_zero():
    """The hit ratio begins at nothing, and nears what pages show within some dozens of prompts."""
    peers = ForeignTraffic()
    assert peers.hit_ratio == 0.0
    for _ in range(20):
        peers.update(1, 0.0, before=page(1000, 500), after=page(2000, 1000))
    assert peers.hit_ratio == pytest.approx(0.25, abs=0.01)
    for _ in range(180):
        peers.update(1, 0.0, before=page(1000, 500), after=page(2000, 1000))
    assert peers.hit_ratio > 0.4


def test_hits_beyond_what_we_know_are_those_of_others():
    """Of tokens that we do not know to be cached, the share that engines find nevertheless."""
    peers = ForeignTraffic()
    assert peers.unknown_hit_ratio == 0.0
    for _ in range(5000):
        peers.update(1, 0.0, before=page(0, 0), after=page(1000, 700))
        peers.record_match(1000, 400)
    assert peers.unknown_hit_ratio == pytest.approx(0.5, abs=0.01)
    for _ in range(5000):
        peers.record_match(1000, 900)
    assert peers.unknown_hit_ratio == 0.0


def test_the_hit_ratio_follows_the_engine_counters():
    """The hit ratio follows the engines' counters, slowly, and not what is missing or went back."""
    peers = ForeignTraffic()
    for _ in range(5000):
        peers.update(1, 0.0, before=page(1000, 500), after=page(2000, 1400))
    assert peers.hit_ratio == pytest.approx(0.9, abs=0.01)
    for before, after in (
        (NO_LOAD, page(9, 9)),
        (page(9, 9), page(1, 1)),
        (page(5, 5), page(5, 5)),
    ):
        peers.update(1, 0.0, before=before, after=after)
    assert peers.hit_ratio == pytest.approx(0.9, abs=0.01)
