from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.endpoint import AdapterResidency, Endpoint, Load, StepTimeModel
from extproc.pool.candidate_builder import adapter_residency
from extproc.pool.inflight import InflightLoad
from extproc.pool.store import PoolStore

SPOT = Endpoint("10.0.0.1:8000")


def account(tokens_per_s=1000.0):
    inflight = InflightLoad(SPOT)
    inflight.tokens_per_s = tokens_per_s
    return inflight


def send(inflight, tokens, now, cached=0):
    return inflight.open("m", tokens, cached_tokens=cached, now=now)


def scrape(inflight, now, *, at=None, waiting=0.0, running=None, free_tokens=1e6):
    inflight.record_scrape(
        sent=inflight.sent,
        written=inflight.kv_tokens_sent,
        waiting=waiting,
        running=running,
        free_tokens=free_tokens,
        at=now if at is None else at,
        now=now,
    )


def test_queued_work_is_uncached_and_drains():
    """900 of 1000 tokens cached leave 100, which are gone after a tenth of a second."""
    inflight = account()
    send(inflight, 1000, 5.0, cached=900)
    assert inflight.queued(5.0) == 100
    assert inflight.queued(5.05) == pytest.approx(50)
    assert inflight.queued(9.0) == 0


def test_a_finished_request_completes_earlier_work():
    """Engines serve first come first served."""
    inflight = account()
    for tokens in (4000, 3000):
        send(inflight, tokens, 0.0)
    second = send(inflight, 2000, 0.0)
    send(inflight, 1000, 0.0)
    second.close(1.0)
    assert inflight.queued(1.0) == 1000


def test_an_unanswered_request_removes_only_its_own_work():
    """Nothing is known of what was sent before it."""
    inflight = account()
    send(inflight, 4000, 0.0)
    second = send(inflight, 2000, 0.0)
    second.close(0.0, answered=False)
    assert inflight.queued(0.0) == 4000


def test_a_scrape_shows_which_requests_are_queued():
    """With two waiting, the last two of three have not begun, however fast we thought it was."""
    inflight = account(tokens_per_s=1e9)
    for tokens in (4000, 3000, 2000):
        send(inflight, tokens, 0.0)
    assert inflight.queued(1.0) == 0
    scrape(inflight, now=1.0, waiting=2.0)
    assert inflight.queued(1.0) == 5000


def test_an_engine_computes_on_after_its_page_was_true():
    """Of 5000 tokens that wait on a page, an engine has computed 1000 when it comes a second later."""
    inflight = account()
    for tokens in (4000, 3000, 2000):
        send(inflight, tokens, 0.0)
    scrape(inflight, now=5.0, at=4.0, waiting=2.0)
    assert inflight.queued(5.0) == 4000
    scrape(inflight, now=6.0, at=-60.0, waiting=2.0)
    assert inflight.queued(6.0) == 0


def test_an_engine_without_memory_computes_nothing_while_its_page_is_on_its_way():
    """Its waiting requests may all wait for blocks; where none waits it computes."""
    for waiting, left in ((2.0, 5000), (0.0, 3000)):
        inflight = account()
        for tokens in (4000, 3000, 2000):
            send(inflight, tokens, 0.0)
        scrape(inflight, now=5.0, at=4.0, waiting=waiting, free_tokens=7999.0)
        assert inflight.queued(5.0) == left


@pytest.mark.parametrize(("running", "queued"), [(0.0, 9000), (1.0, 5000), (3.0, 0)])
def test_requests_that_an_engine_neither_runs_nor_queues_wait_before_it(running, queued):
    """It reads and tokenizes them first; of three that are open, it runs the first ones."""
    inflight = account(tokens_per_s=1e9)
    for tokens in (4000, 3000, 2000):
        send(inflight, tokens, 0.0)
    scrape(inflight, now=1.0, running=running)
    assert inflight.queued(1.0) == queued


def test_a_scrape_without_a_queue_leaves_one_prefill_at_most():
    """With no request waiting everything is admitted; the largest may be in the middle of it."""
    inflight = account(tokens_per_s=1e-9)
    for tokens in (4000, 3000, 2000):
        send(inflight, tokens, 0.0)
    sent, written = inflight.sent, inflight.kv_tokens_sent
    send(inflight, 500, 0.1)
    inflight.record_scrape(sent=sent, written=written, waiting=0.0, at=0.2, now=0.2)
    assert inflight.queued(0.2) == pytest.approx(4500)
    assert inflight.kv_tokens_sent - inflight.kv_tokens_scraped == 500


def test_decodes_slow_the_drain_of_the_queue():
    """2048 tokens of prefill pay for one step with all its decodes."""
    inflight = account()
    inflight.set_drain_rate(
        StepTimeModel(step_s=0.02, prefill_s=1e-4, decode_s=1e-3, context_s=0.0), 100
    )
    assert inflight.tokens_per_s == pytest.approx(1 / (1e-4 + 0.12 / 2048))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("open", "close", "cancel", "scrape")),
            st.integers(0, 5000),
            st.floats(0, 2),
        ),
        max_size=60,
    )
)
def test_the_queue_is_never_negative_nor_more_than_was_sent(acts):
    """Whatever happens, 0 <= queued <= sent, and nothing open means nothing queued."""
    inflight, reservations, now = account(), [], 0.0
    for act, number, passed in acts:
        now += passed
        if act == "open":
            reservations.append(send(inflight, number, now, cached=number // 2))
        elif act == "scrape":
            inflight.record_scrape(
                sent=inflight.sent,
                written=inflight.kv_tokens_sent,
                waiting=float(number % 7),
                running=float(number % 5),
                at=now - passed,
                now=now,
            )
        elif reservations:
            reservations.pop(number % len(reservations)).close(now, answered=act == "close")
        assert 0 <= inflight.queued(now) <= inflight.sent
    for reservation in reservations:
        reservation.close(now)
    assert (inflight.in_flight, inflight.prompt_tokens, inflight.adapters) == (0, 0, {})


def test_foreign_queued_requests_count_with_typical_work():
    """Three foreign requests wait; of ours those in the middle had 700."""
    store = PoolStore(on_gone=lambda _: None)
    store.set_endpoints([SPOT], 0.0)
    (member,) = store.pool.members
    for tokens in (400, 700, 9000):
        send(member.account, tokens, 0.0).close(0.0)
    mark = store.begin_scrape(member.endpoint)
    store.observe(mark, Load(at=1.0, running=5.0, waiting=3.0), 1.0)
    assert store.pool.members[0].foreign == 8
    assert store.pool.members[0].foreign_tokens == 2100


KNOWN = frozenset({"a", "b", "c", "d"})


@pytest.mark.parametrize(
    ("opened", "closed", "load", "expected"),
    [
        (["a"], [], Load(at=0.0, adapter_slots=2), AdapterResidency.RESIDENT),
        ([], [], Load(at=0.0, adapter_slots=2, adapters=frozenset("a")), AdapterResidency.RESIDENT),
        (["a"], ["a"], Load(at=0.0, adapter_slots=2), AdapterResidency.IDLE),
        ([], [], Load(at=0.0), AdapterResidency.UNKNOWN),
        (["b"], [], Load(at=0.0, adapter_slots=2), AdapterResidency.ROOM),
        (["b", "c"], [], Load(at=0.0, adapter_slots=2), AdapterResidency.FULL),
        (["b", "c"], ["b"], Load(at=0.0, adapter_slots=2), AdapterResidency.EVICTABLE),
        (
            ["a", "b", "c"],
            ["a", "b", "c"],
            Load(at=0.0, adapter_slots=2),
            AdapterResidency.EVICTABLE,
        ),
        (["base", "b"], [], Load(at=0.0, adapter_slots=2), AdapterResidency.ROOM),
    ],
)
def test_adapter_residency_is_classified(opened, closed, load, expected):
    """In use here or there, lately used, room, evictable, full, or unknown."""
    inflight = InflightLoad(SPOT)
    reservations = {name: inflight.open(name, 1, cached_tokens=0, now=0.0) for name in opened}
    for name in closed:
        reservations[name].close(0.0)
    assert adapter_residency("a", inflight, load, KNOWN) is expected
