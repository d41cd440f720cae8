from __future__ import annotations

import pytest

from extproc.decision import Rejection
from extproc.endpoint import EngineCounters, Load
from extproc.request import HttpRequest
from extproc.telemetry.request_series import UNPARSED
from tests.autoscaling.runtime.test_control_loop import ControlLoopFixture


async def test_counters_report_arrivals_and_queued_requests():
    """Requests that wait, are refused or went on count once each, and totals never go down."""
    fixture = ControlLoopFixture(spec=1)
    fixture.come()
    queued = fixture.ask()
    counters = fixture.counters
    first = counters.read()
    assert (first.held, first.in_flight, first.arrived) == (1, 0, 1.0)
    assert first.prompt_tokens >= 1.0
    fixture.come("127.0.0.1:1")
    granted = await queued.admission
    second = counters.read()
    assert (second.held, second.in_flight, second.arrived) == (0, 1, 1.0)
    process_counters = fixture.pool_counters
    process_counters.record_routed([granted.decision])
    process_counters.record_finished([("127.0.0.1:1", "200")], num_reported=1)
    series = process_counters.series.find(UNPARSED)
    series.record("prompt", [3])
    series.record("completion", [40])
    third = counters.read()
    assert (third.arrived, third.answered, third.answer_tokens) == (1.0, 1.0, 40.0)
    # A streamed answer says nothing of its length: the engines' mean stands for it.
    process_counters.record_finished([("127.0.0.1:1", "200")])
    assert counters.read().answer_tokens > 40.0


async def test_requests_whose_clients_leave_the_queue_have_arrived():
    """Those that come after them add to the totals, as after a cold start that took too long."""
    fixture = ControlLoopFixture()
    fixture.come()
    reads = []
    for _ in range(3):
        queued = [fixture.ask() for _ in range(5)]
        read = fixture.counters.read()
        reads.append((read.held, read.arrived, read.prompt_tokens / read.arrived))
        for request in queued:
            fixture.runtime.flow_controller.cancel(request, 0.0)
    assert reads == [(5, 5.0, 1.0), (5, 10.0, 1.0), (5, 15.0, 1.0)]


async def test_a_single_request_counts_before_others_follow():
    """Requests are counted together, and at low rates none may come for long."""
    fixture = ControlLoopFixture(spec=1)
    fixture.come("127.0.0.1:1")
    headers = {":method": "POST", ":path": "/v1/completions"}
    raw = HttpRequest(headers, b'{"model": "m", "prompt": "x"}')
    recorder = fixture.recorder.observe_request("")
    recorder.on_routed(
        fixture.runtime.parts.director.route(raw, 0.0),
        request_id="r",
        labels=UNPARSED,
        trace_id="",
        now=0.0,
        duration_s=0.0,
    )
    read = fixture.counters.read()
    assert (read.arrived, read.answered) == (1.0, 0.0)
    assert read.prompt_tokens >= 1.0
    recorder.on_finished(endpoint="127.0.0.1:1", status="200", duration_s=1.0)
    assert fixture.counters.read().answered == 1.0


@pytest.mark.parametrize(("cause", "arrived"), [("queue-full", 1.0), ("rate-limited", 0.0)])
def test_requests_over_the_limit_of_their_tenant_want_no_replica(cause, arrived):
    """More replicas would refuse them, too."""
    fixture = ControlLoopFixture(spec=1)
    rejection = Rejection(429, "refused", reason="rejected-saturated", cause=cause)
    fixture.pool_counters.record_rejection(rejection)
    assert fixture.counters.read().arrived == arrived


def test_ranks_are_counted_as_engines_of_their_replica():
    """Also while a replica that has just come shows none yet, or does not answer."""
    fixture = ControlLoopFixture(spec=2)
    fixture.come("10.0.0.1:8000", "10.0.0.2:8000")
    assert fixture.counters.observe_target(2, 0.0).engines == 0
    store = fixture.runtime.parts.store
    store.set_ranks(store.pool.ranks_at("10.0.0.1:8000")[0].endpoint, (0, 1, 2, 3), 0.0)
    for member in store.pool.ranks_at("10.0.0.1:8000"):
        store.observe(store.begin_scrape(member.endpoint), Load(at=0.0, running=20.0), 0.0)
    observation = fixture.counters.observe_target(2, 0.0)
    assert (observation.available, observation.running, observation.engines) == (2, 80.0, 4)


def test_step_times_are_observed_once_an_engine_has_shown_some():
    """Until then those that were learned of earlier engines stay; an engine without any adds none."""
    fixture = ControlLoopFixture(spec=2)
    fixture.come("10.0.0.1:8000", "10.0.0.2:8000")
    store = fixture.runtime.parts.store
    assert fixture.counters.observe_target(2, 0.0).rates is None
    for tick in range(10):
        steps = 20.0 * tick
        counters = EngineCounters(steps=steps, step_tokens=steps, generated_tokens=steps)
        page = Load(at=float(tick), running=1.0, counters=counters)
        store.observe(store.begin_scrape(store.pool.members[0].endpoint), page, float(tick))
    assert store.pool.members[0].rates.evidence
    rates = fixture.counters.observe_target(2, 9.0).rates
    assert rates.step_s == pytest.approx(store.pool.members[0].rates.step_s)
