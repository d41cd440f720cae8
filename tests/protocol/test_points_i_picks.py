from __future__ import annotations

import pytest

from tests.support import ext_proc_script, peer
from tests.support.pool_fixture import PoolFixture, load

ADDRESSES = ("192.168.1.1:8000", "192.168.1.2:8000", "192.168.1.3:8000")


@pytest.mark.parametrize(
    ("loads", "winner"),
    [
        ((load(3, 0.2), load(0, 0.1), load(10, 0.2)), 1),
        ((load(0, 0.2, "foo", "bar"), load(0, 0.1, "foo", "target"), load(10, 0.2)), 1),
        ((load(10, 0.2), load(10, 0.4, "target"), load(10, 0.3)), 1),
        ((load(6, 0.2, "target"), load(0, 0.85), load(10, 0.9)), 0),
    ],
    ids=["queue and kv", "active adapter", "adapter beats kv", "do not shed"],
)
def test_118_the_reference_picks(loads: tuple, winner: int):
    """The default profile picks what the reference picker's black-box tests expect."""
    pool_fixture = PoolFixture(dict(zip(ADDRESSES, loads, strict=True)))
    body = b'{"max_tokens":100,"model":"target","prompt":"test1","temperature":0}'
    queued = ext_proc_script.Talk(pool_fixture.decide)
    queued.hear(
        ext_proc_script.request_headers({**ext_proc_script.PLAIN, ":path": "/v1/completions"})
    )
    reply, _ = queued.hear(ext_proc_script.request_body(body, ends=True))
    assert reply.headers[peer.DESTINATION] == ADDRESSES[winner]
