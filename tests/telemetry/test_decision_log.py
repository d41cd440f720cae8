from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from extproc.decision import Decision
from extproc.endpoint import Candidate, Endpoint
from extproc.request import InferenceRequest
from extproc.telemetry.decision_log import DecisionLog

SPOT = Endpoint("10.0.0.1:8000")


def decided(candidates=1):
    return Decision(
        request=InferenceRequest(api="chat"),
        endpoints=[SPOT],
        candidates=[Candidate(SPOT)] * candidates,
    )


def test_the_oldest_decisions_are_dropped_first():
    """The ring keeps the last ones, newest first in its list."""
    ring = DecisionLog(2)
    for name in "abc":
        ring.add(name, decided(), 0.0)
    assert [record.id for record in ring.latest(9)] == ["c", "b"]
    assert ring.find("a") is None
    assert ring.find("b").id == "b"


def test_the_last_decision_of_an_id_is_returned():
    """A request that is retried is decided again."""
    ring = DecisionLog(2)
    ring.add("a", decided(), 0.0)
    ring.add("a", decided(), 1.0)
    assert len(ring) == 1
    assert ring.find("a").at == 1.0


def test_a_long_id_is_cut():
    """A client cannot fill memory with its request id, and still finds its request."""
    ring = DecisionLog(2)
    assert len(ring.add("x" * 100_000, decided(), 0.0).id) == 256
    assert ring.find("x" * 100_000) is not None


def test_zero_capacity_records_nothing():
    """With room for none, adding still hands out an entry that may be written to."""
    ring = DecisionLog(0)
    assert ring.add("a", decided(), 0.0).id == "a"
    assert len(ring) == 0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9)), max_size=40))
def test_the_ring_never_exceeds_its_bounds(added):
    """At most so many decisions, and so many candidates unless the last one alone has more."""
    ring = DecisionLog(4, most_candidates=12)
    for name, candidates in added:
        ring.add(name, decided(candidates), 0.0)
        sizes = [len(record.decision.candidates) for record in ring.latest(9)]
        assert len(sizes) <= 4
        assert sum(sizes) <= 12 or len(sizes) == 1
        assert msgspec.structs.asdict(ring.find(name).decision)["block_hashes"] == ()
