from __future__ import annotations

import weakref

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.decision import NO_ENDPOINTS, Decision, Disaggregation
from extproc.endpoint import Candidate, Endpoint, Load
from extproc.request import HttpRequest, InferenceRequest
from extproc.telemetry import explanation
from extproc.telemetry.decision_log import DecisionLog, DecisionRecord, RejectionRecord
from tests.support.pool_fixture import PoolFixture

SPOT = Endpoint("10.0.0.1:8000")


def decided(candidates=1):
    return Decision(
        request=InferenceRequest(api="chat"),
        endpoints=[SPOT],
        candidates=[Candidate(SPOT)] * candidates,
    )


def refused(name, at):
    return RejectionRecord(name, at, "demo", "m", NO_ENDPOINTS)


def test_the_oldest_decisions_are_dropped_first():
    """The ring keeps the last ones, newest first in its list."""
    ring = DecisionLog(2)
    for name in "abc":
        ring.add(name, decided(), 0.0)
    assert [record.id for record in ring.latest(9)] == ["c", "b"]
    assert ring.find("a") is None
    assert ring.find("b").id == "b"


def test_all_records_of_an_id_are_kept():
    """A lookup returns the newest of them, and each has a sequence number of its own."""
    ring = DecisionLog(3)
    ring.add("a", decided(), 0.0)
    ring.add("b", decided(), 1.0)
    ring.add_rejection(refused("a", 2.0))
    ring.add("a", decided(), 3.0)
    assert [(record.id, record.sequence) for record in ring.latest()] == [
        ("a", 4),
        ("a", 3),
        ("b", 2),
        ("a", 1),
    ]
    newest = ring.find("a")
    assert (newest.at, ring.list_same_id(newest)) == (3.0, [4, 3, 1])
    assert ring.find("a", sequence=1).at == 0.0
    assert ring.find(None, sequence=3).result == "refused"
    assert ring.find("b", sequence=1) is None
    ring.add("a", decided(), 4.0)
    assert ring.list_same_id(newest) == [5, 4, 3]


def test_a_long_id_is_cut():
    """A client cannot fill memory with its request id, and still finds its request."""
    ring = DecisionLog(2)
    assert len(ring.add("x" * 100_000, decided(), 0.0).id) == 256
    assert ring.find("x" * 100_000) is not None


def test_an_id_is_found_by_its_utf8():
    """Headers are bytes, which are kept as latin-1."""
    ring = DecisionLog(2)
    record = ring.add("zürich".encode().decode("latin-1"), decided(), 0.0)
    assert ring.find("zürich") is record
    assert ring.find("chatcmpl-zürich") is record


def test_refused_requests_are_listed_among_decisions():
    """Newest first; a flood of refused requests drops no decision."""
    ring = DecisionLog(2)
    ring.add("a", decided(), 1.0)
    for at in range(2, 9):
        ring.add_rejection(refused(str(at), float(at)))
    ring.add("b", decided(), 7.5)
    assert [record.id for record in ring.latest(9)] == ["8", "b", "7", "a"]
    assert ring.find("chatcmpl-8").rejection.cause == "no-endpoints"
    assert ring.find("6") is None


def test_the_latest_record_of_an_id_is_returned():
    """A client may send a refused request again under its id."""
    ring = DecisionLog(2)
    ring.add_rejection(refused("a", 0.0))
    assert isinstance(ring.find("a"), RejectionRecord)
    ring.add("a", decided(), 1.0)
    assert isinstance(ring.find("a"), DecisionRecord)
    ring.add_rejection(refused("a", 2.0))
    assert ring.find("a").at == 2.0


def test_zero_capacity_records_nothing():
    """With room for none, adding still hands out an entry that may be written to."""
    ring = DecisionLog(0)
    assert ring.add("a", decided(), 0.0).id == "a"
    ring.add_rejection(refused("b", 0.0))
    assert len(ring) == 0
    assert not list(ring.latest(9))


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


class WatchedRecord(DecisionRecord):
    """Record of which a test sees when it is freed."""

    __slots__ = ("__weakref__",)


@pytest.mark.parametrize(
    ("capacity", "candidates", "count", "waiting"),
    [(12, 0, 15, 3), (12, 0, 16, 0), (100, 1, 15, 3), (100, 2, 8, 0)],
)
def test_dropped_decisions_are_freed_by_the_requests_to_come(capacity, candidates, count, waiting):
    """One by each, as the next decision takes its memory; many are freed at once."""
    ring = DecisionLog(capacity, most_candidates=12)
    records = [WatchedRecord(str(number), 0.0, decided(candidates)) for number in range(count)]
    alive = weakref.WeakSet(records)
    ring.extend(records)
    del records
    for left in range(waiting, -1, -1):
        assert len(alive) == len(ring) + left
        ring.free_dropped()
    assert len(alive) == len(ring)


def test_candidates_of_stages_count_against_the_bound():
    """Their filters and scores take memory of their own."""
    ring = DecisionLog(4, most_candidates=12)
    part = decided(4)
    split = msgspec.structs.replace(
        decided(4), disaggregation=Disaggregation(prefill=part, encode_reason="no-media")
    )
    for number in range(3):
        ring.add(str(number), split, float(number))
    assert [record.id for record in ring.latest()] == ["2"]


@pytest.mark.parametrize("strategy", ["adaptive", "weighted", "least-request", "lmetric"])
def test_open_requests_that_the_log_dropped_keep_two_candidates(strategy):
    """Candidates of many endpoints are large, and answers run for minutes."""
    pool = PoolFixture(
        {f"10.0.0.{n}:1": Load(at=100.0, engine="vllm", running=float(n)) for n in range(1, 21)},
        profile=strategy,
    )
    log = DecisionLog(2)

    def route(number):
        body = b'{"model": "m", "prompt": "%d %s"}' % (number, b"x" * 500)
        raw = HttpRequest({":method": "POST", ":path": "/v1/completions"}, body)
        return log.add(str(number), pool.director.route(raw, pool.now), pool.now)

    kept_open, ended = route(1), route(2)
    ended.seconds = 1.0
    texts = [explanation.format_short(record.decision) for record in (kept_open, ended)]
    predicted_s, chosen = kept_open.decision.predicted_ttft_s, kept_open.decision.endpoints
    assert len(kept_open.decision.candidates) == 20
    route(3)
    route(4)
    assert len(log) == 2
    slim = kept_open.decision
    assert len(slim.candidates) == len(slim.scored_candidates) == 2
    assert (slim.endpoints, slim.predicted_ttft_s) == (chosen, predicted_s)
    assert explanation.format_short(slim) == texts[0]
    assert len(ended.decision.candidates) == 20
    assert explanation.format_short(ended.decision) == texts[1]


def test_a_smaller_log_drops_older_decisions_at_once():
    """A log that is turned off shows none of before."""
    log = DecisionLog(4)
    for number in range(4):
        log.add(f"d{number}", decided(), float(number))
        log.add_rejection(refused(f"r{number}", float(number)))
    log.resize(1)
    assert {record.id for record in log.latest()} == {"d3", "r3"}
    log.resize(0)
    assert not list(log.latest())
    log.resize(4)
    log.add("new", decided(), 9.0)
    assert [record.id for record in log.latest()] == ["new"]
