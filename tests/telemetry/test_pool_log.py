"""The log of a pool: what happens to endpoints, scrapes and refused requests, once for each event."""

from __future__ import annotations

import logging

import pytest

from extproc.decision import NO_ENDPOINTS, all_busy, bad_request
from extproc.endpoint import Endpoint, Load
from extproc.pool.endpoint_health import RequestOutcome
from extproc.pool.store import PoolStore
from extproc.telemetry import pool_log
from extproc.telemetry.counters import ProcessCounters

FIRST, SECOND, THIRD = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"


class PoolLogFixture:
    """A pool with its log, at one moment."""

    def __init__(self, caplog):
        caplog.set_level(logging.INFO, "extproc.pool")
        self._caplog = caplog
        self.now = 0.0
        self.log = pool_log.PoolLog("demo", lambda: self.now)
        self.store = PoolStore(lambda _: None, on_changed=self.log.on_changed)

    def set_endpoints(self, *addresses):
        self.store.set_endpoints([Endpoint(address) for address in addresses], self.now)

    def fail(self, address, times=3):
        member = self.store.pool.find(address)
        for _ in range(times):
            self.store.record_outcome(
                member.endpoint, RequestOutcome.FAILED, sent_at=self.now, now=self.now
            )

    def scrape(self, address):
        token = self.store.begin_scrape(self.store.pool.find(address).endpoint)
        self.store.observe(token, Load(at=self.now), self.now)

    def refuse(self, address):
        token = self.store.begin_scrape(self.store.pool.find(address).endpoint)
        self.store.scrape_failed(token, "refused", self.now)

    def take(self):
        """Messages and fields of all lines so far."""
        lines = [(record.message, record.fields) for record in self._caplog.records]
        assert all(fields.pop("pool") == "demo" for _, fields in lines)
        self._caplog.clear()
        return lines


@pytest.fixture
def scene(caplog):
    return PoolLogFixture(caplog)


def test_log_names_endpoints_that_come_and_go(scene):
    """A line for each change, with what is there now; a label that changes is none."""
    scene.set_endpoints(FIRST, SECOND)
    scene.set_endpoints(SECOND, FIRST)
    scene.store.set_endpoints([Endpoint(FIRST, labels={"a": "b"}), Endpoint(THIRD, "pod-3")], 0.0)
    assert scene.take() == [
        ("endpoints added", {"count": 2, "endpoints": f"{FIRST},{SECOND}", "total": 2}),
        ("endpoints removed", {"count": 1, "endpoints": SECOND, "total": 2}),
        ("endpoints added", {"count": 1, "endpoints": f"{THIRD}/pod-3", "total": 2}),
    ]


def test_log_names_ten_endpoints_at_most(scene):
    """A pool of five hundred makes one line, which can be read."""
    scene.set_endpoints(*(f"10.0.{at}.1:8000" for at in range(200)))
    ((_, fields),) = scene.take()
    assert fields["count"] == 200
    assert fields["endpoints"].count(",") == 10
    assert fields["endpoints"].endswith(",...")


def test_log_says_how_long_a_pool_was_empty(scene):
    """Empty from the start, or because the last endpoint left."""
    scene.set_endpoints()
    scene.set_endpoints()
    scene.now = 12.5
    scene.set_endpoints(FIRST)
    assert scene.take()[::2] == [
        ("pool is empty", {}),
        ("pool has endpoints again", {"after_s": 12.5}),
    ]
    scene.set_endpoints()
    assert [message for message, _ in scene.take()] == ["endpoints removed", "pool is empty"]


def test_log_says_why_an_endpoint_is_ejected_and_when_it_is_back(scene):
    """Two lines for an ejection, however many requests fail and probes are sent."""
    scene.set_endpoints(FIRST, SECOND, THIRD)
    scene.take()
    scene.fail(FIRST)
    scene.now = 2.0
    scene.fail(FIRST)
    ((message, fields),) = scene.take()
    assert message == "endpoint ejected"
    assert 4.0 <= fields.pop("retry_in_s") <= 5.0
    assert fields == {"endpoint": FIRST, "cause": "errors"}
    scene.now = 7.0
    endpoint = scene.store.pool.find(FIRST).endpoint
    scene.store.record_sent(endpoint, scene.now)
    scene.store.record_outcome(endpoint, RequestOutcome.SERVED, sent_at=7.0, now=8.0)
    assert scene.take() == [
        ("endpoint is back", {"endpoint": FIRST, "cause": "errors", "after_s": 7.0})
    ]


def test_log_says_when_every_endpoint_is_ejected(scene):
    """Once when the last one goes, and once when one of them is back."""
    scene.set_endpoints(FIRST, SECOND)
    scene.take()
    for address in (FIRST, SECOND):
        scene.refuse(address)
        scene.refuse(address)
    assert [message for message, _ in scene.take()] == [
        "endpoint ejected",
        "endpoint ejected",
        "every endpoint is ejected; the least bad serves",
    ]
    scene.now = 4.0
    scene.scrape(FIRST)
    assert scene.take() == [
        ("endpoint is back", {"endpoint": FIRST, "cause": "unreachable", "after_s": 4.0}),
        ("not every endpoint is ejected any more", {"after_s": 4.0, "ejected": 1, "total": 2}),
    ]


def test_log_says_when_ejected_endpoints_are_replaced(scene):
    """The line comes with the new endpoints, and the next outage has one of its own."""
    scene.set_endpoints(FIRST)
    scene.refuse(FIRST)
    scene.refuse(FIRST)
    scene.now = 30.0
    scene.set_endpoints(SECOND)
    end = {"after_s": 30.0, "ejected": 0, "total": 1}
    assert scene.take()[-1] == ("not every endpoint is ejected any more", end)
    scene.refuse(SECOND)
    scene.refuse(SECOND)
    assert scene.take()[-1] == ("every endpoint is ejected; the least bad serves", {"total": 1})


def test_log_does_not_call_an_empty_pool_served(scene):
    """The line comes with the endpoints that replace the ejected ones."""
    scene.set_endpoints(FIRST)
    scene.refuse(FIRST)
    scene.refuse(FIRST)
    scene.set_endpoints()
    assert scene.take()[-1] == ("pool is empty", {})
    scene.now = 30.0
    scene.set_endpoints(SECOND)
    end = {"after_s": 30.0, "ejected": 0, "total": 1}
    assert scene.take()[-1] == ("not every endpoint is ejected any more", end)


def test_log_names_another_cause_of_the_same_ejection(scene):
    """Requests failed, and now nothing listens any more."""
    scene.set_endpoints(FIRST, SECOND, THIRD)
    scene.fail(FIRST)
    scene.take()
    scene.now = 1.0
    scene.refuse(FIRST)
    scene.refuse(FIRST)
    assert scene.take() == [
        (
            "endpoint still ejected",
            {"endpoint": FIRST, "cause": "unreachable", "after_s": 1.0},
        )
    ]


def test_log_forgets_endpoints_that_left(scene):
    """One that comes again begins anew."""
    scene.set_endpoints(FIRST, SECOND, THIRD)
    scene.fail(FIRST)
    scene.log.on_scrape(FIRST, "refused", is_model_list=False)
    scene.set_endpoints(SECOND, THIRD)
    scene.set_endpoints(FIRST, SECOND, THIRD)
    scene.take()
    scene.log.on_scrape(FIRST, "ok", is_model_list=False)
    scene.scrape(FIRST)
    assert not scene.take()


def test_log_counts_failed_scrapes_after_the_first(scene):
    """A line at once, one each minute while it goes on, and one at the end."""
    for scene.now in range(0, 130, 10):
        scene.log.on_scrape(FIRST, "refused" if scene.now < 100 else "timeout", is_model_list=False)
    scene.now = 130.0
    scene.log.on_scrape(FIRST, "ok", is_model_list=False)
    scene.log.on_scrape(FIRST, "ok", is_model_list=False)
    named = {"endpoint": FIRST, "page": "metrics"}
    assert scene.take() == [
        ("scrape failed", {**named, "outcome": "refused", "failures": 1, "for_s": 0}),
        ("scrape failed", {**named, "outcome": "refused", "failures": 7, "for_s": 60}),
        ("scrape failed", {**named, "outcome": "timeout", "failures": 13, "for_s": 120}),
        ("scrape works again", {**named, "outcome": "ok", "failures": 13, "for_s": 130.0}),
    ]


def test_log_tells_pages_of_an_endpoint_apart(scene):
    """A model list that cannot be read is no metrics page that cannot."""
    scene.log.on_scrape(FIRST, "status 404", is_model_list=True)
    scene.log.on_scrape(FIRST, "ok", is_model_list=False)
    assert [(message, fields["page"]) for message, fields in scene.take()] == [
        ("scrape failed", "models")
    ]


def test_log_has_twenty_lines_of_an_event_in_ten_seconds(scene):
    """The last of them says so, and the first one after that how many there were."""
    scene.set_endpoints(*(f"10.0.0.{at}:8000" for at in range(30)))
    scene.take()
    for at in range(30):
        scene.log.on_scrape(f"10.0.0.{at}:8000", "refused", is_model_list=False)
        scene.now += 0.1
    lines = scene.take()
    assert len(lines) == 20
    assert [fields.get("silent_s") for _, fields in lines[-2:]] == [None, pytest.approx(8.1)]
    scene.now = 10.0
    scene.log.on_scrape("10.0.0.9:8000", "refused", is_model_list=True)
    ((event, fields),) = scene.take()
    assert (event, fields["unlogged"]) == ("scrape failed", 10)


def test_rejection_log_writes_the_first_and_a_count_each_minute(caplog):
    """For each pool, status and cause."""
    caplog.set_level(logging.INFO, "extproc.pool")
    counters = ProcessCounters()
    log = pool_log.RejectionLog(lambda: counters.pools)
    pool = counters.for_pool("demo")
    log.step(0.0)
    pool.record_rejection(NO_ENDPOINTS)
    log.step(1.0)
    for _ in range(5):
        pool.record_rejection(NO_ENDPOINTS)
    pool.record_rejection(bad_request("prompt of a client"))
    pool.record_rejection(all_busy(1.0).rejection)
    log.step(2.0)
    log.step(60.0)
    log.step(61.0)
    log.step(200.0)
    assert [
        (record.levelname, record.message, *record.fields.values()) for record in caplog.records
    ] == [
        ("WARNING", "requests refused", "demo", 503, "no-endpoints", 1, 1),
        ("INFO", "requests refused", "demo", 400, "bad-request", 1, 1),
        ("WARNING", "requests refused", "demo", 429, "busy", 1, 1),
        ("WARNING", "requests refused", "demo", 503, "no-endpoints", 5, 6),
    ]


def test_rejection_log_follows_pools_that_come_again(caplog):
    """A pool of the same name counts from 0."""
    caplog.set_level(logging.INFO, "extproc.pool")
    counters = ProcessCounters()
    log = pool_log.RejectionLog(lambda: counters.pools)
    for at in (0.0, 1.0, 2.0):
        counters.pools.clear()
        log.step(at)
        counters.for_pool("demo").record_rejection(NO_ENDPOINTS)
        log.step(at)
    assert [record.fields["count"] for record in caplog.records] == [1, 1, 1]


class ResponseLogFixture:
    """The log of failed responses of a pool, at one moment."""

    def __init__(self, caplog):
        caplog.set_level(logging.INFO, "extproc.pool")
        self._caplog = caplog
        self.counters = ProcessCounters()
        self.pool = self.counters.for_pool("demo")
        self.log = pool_log.ResponseFailureLog(lambda: self.counters.pools)

    def answer(self, *statuses, address=FIRST):
        self.pool.record_finished([(address, status) for status in statuses])

    def step(self, now, **last):
        """Levels, messages and fields of the lines at a moment."""
        self._caplog.clear()
        self.log.step(now, **last)
        return [(line.levelname, line.message, line.fields) for line in self._caplog.records]


@pytest.fixture
def answers(caplog):
    return ResponseLogFixture(caplog)


def failing(count, total, *, status="500", endpoint=FIRST):
    fields = {"endpoint": endpoint, "status": status, "count": count, "total": total}
    return ("WARNING", "requests fail", {"pool": "demo", **fields})


def test_log_counts_failed_responses_of_an_endpoint(answers):
    """A line at the first, one each minute while it goes on, and what is left at the end."""
    answers.answer("200", "404", "429", "501", "")
    assert not answers.step(0.0)
    answers.answer("200", "500")
    assert answers.step(1.0) == [failing(1, 1)]
    answers.answer("503", "503", "500", "200")
    assert not answers.step(2.0)
    assert not answers.step(60.0)
    assert answers.step(61.0) == [failing(3, 4, status="503")]
    answers.answer("504")
    assert not answers.step(62.0)
    assert answers.step(63.0, is_last=True) == [failing(1, 5, status="504")]


def test_log_says_when_requests_work_again(answers):
    """After a minute in which the endpoint served and failed none."""
    answers.answer("500")
    answers.step(0.0)
    answers.answer("500", "200")
    answers.step(30.0)
    assert answers.step(61.0) == [failing(1, 2)]
    assert not answers.step(95.0)  # nothing was served since
    answers.answer("200")
    fields = {"pool": "demo", "endpoint": FIRST, "failures": 2, "for_s": 30.0}
    assert answers.step(96.0) == [("INFO", "requests work again", fields)]
    assert not answers.step(200.0)
    answers.answer("500")
    assert answers.step(201.0) == [failing(1, 3)]


def test_log_follows_failing_endpoints_that_leave(answers):
    """One that comes again begins anew, and the end of a removed one has no line."""
    answers.answer("500", "500")
    answers.answer("500", address="left")
    assert answers.step(0.0) == [failing(2, 2)]
    answers.pool.forget(FIRST)
    answers.answer("500")
    assert answers.step(1.0) == [failing(1, 1)]
    answers.pool.forget(FIRST)
    assert not answers.step(2.0)
    answers.answer("500")
    assert answers.step(3.0) == [failing(1, 1)]


def test_log_of_failures_has_twenty_lines_in_ten_seconds(answers):
    """In a large pool, all engines may fail at once."""
    for number in range(30):
        answers.answer("500", address=f"10.0.0.{number}:8000")
    assert len(answers.step(0.0)) == 20
