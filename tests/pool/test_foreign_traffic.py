"""Load of other pickers, as scrapes show it."""

import pytest

from extproc.pool.engine_counters import ForeignTraffic


def test_no_foreign_traffic():
    """If all requests are ours, foreign load is zero; so it is before the first scrape."""
    peers = ForeignTraffic()
    assert peers.share == 0.0
    peers.update(5, 0.0)
    assert peers.share == 0.0


def test_foreign_share_of_three_other_replicas():
    """A quarter of the requests is ours: three quarters are of others, also when some left."""
    peers = ForeignTraffic()
    for _ in range(300):
        peers.update(5, 15.0)
    assert peers.share == pytest.approx(0.75)
    for _ in range(300):
        peers.update(20, 0.0)
    assert peers.share < 0.01
