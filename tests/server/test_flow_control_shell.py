"""Requests that wait at a gate: for endpoints, deadlines, priorities and limits."""

from __future__ import annotations

import asyncio
import math

import pytest

from extproc.config.settings import FlowControlSection
from extproc.decision import Decision, Rejection, no_endpoints
from extproc.flow_control.rate_limit import RateLimit
from extproc.request import HttpRequest
from extproc.server.flow_control_shell import Admission, QueuedRequest, RateReservation
from tests.server.flow_control_fixture import A, B, FlowControlFixture, answered


async def test_a_request_waits_for_the_first_endpoint():
    """Held while there is none, sent on when one comes, charged to it."""
    place = FlowControlFixture()
    held = place.ask()
    assert isinstance(held, QueuedRequest)
    place.come(A)
    (granted,) = await answered(held)
    assert isinstance(granted, Admission)
    assert granted.decision.endpoints[0].address == A
    assert place.pool_fixture.store.pool.members[0].account.in_flight == 1
    assert place.flow_controller.queue.count == 0
    assert place.flow_controller.outcomes == {"dispatched": 1}


async def test_a_subset_hint_without_endpoints_is_not_queued():
    """A subset hint that nobody fits is 503 at once, as the protocol has it."""
    place = FlowControlFixture()
    body = b'{"model": "m", "prompt": "x"}'
    raw = HttpRequest({":method": "POST", ":path": "/v1/completions"}, body, subset=(A,))
    prepared = place.pool_fixture.director.prepare(raw)
    assert place.pool_fixture.director.decide(prepared, place.now) == no_endpoints()


async def test_queued_requests_are_spread_over_new_endpoints():
    """A new endpoint is not flooded: it gets what it can begin within the limit."""
    place = FlowControlFixture()
    # 100 us for each of 4000 tokens: two fill the half second of an endpoint.
    held = [place.ask(tokens=3200) for _ in range(6)]
    place.come(A)
    await answered(*held[:2])
    assert [request.admission.done() for request in held] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    place.come(A, B)
    await answered(*held[:4])
    accounts = [member.account.in_flight for member in place.pool_fixture.store.pool.members]
    assert accounts == [2, 2]
    place.pool_fixture.now += 10.0
    place.flow_controller.pump()
    await answered(*held)
    place.flow_controller.close()


async def test_a_request_waits_for_a_busy_endpoint():
    """An engine with requests in front is busy until a scrape says otherwise."""
    place = FlowControlFixture(A)
    place.load(A, waiting=20, running=8, kv_usage=0.9)
    held = place.ask()
    assert isinstance(held, QueuedRequest)
    again = place.pool_fixture.director.decide(held.prepared, place.now)
    assert again.rejection.status == 429
    place.load(A, waiting=0, running=4, kv_usage=0.5)
    (granted,) = await answered(held)
    assert isinstance(granted, Admission)


async def test_without_a_scrape_no_endpoint_is_busy():
    """A late scrape never turns into an outage."""
    place = FlowControlFixture(A)
    place.load(A, waiting=20, running=8)
    place.pool_fixture.now += 120.0
    assert isinstance(place.ask(), Decision)


async def test_queued_requests_are_rejected_at_their_deadline():
    """503 while there is no endpoint, 429 while all are busy; the header may ask for less."""
    place = FlowControlFixture(empty_timeout_s=5, timeout_s=3)
    empty, short = place.ask(), place.ask(x_extproc_queue_timeout_ms="1000")
    place.pool_fixture.now += 1.5
    place.flow_controller.pump()
    (rejection,) = await answered(short)
    assert (rejection.status, rejection.reason) == (503, "rejected-no-endpoints")
    assert not empty.admission.done()
    place.pool_fixture.now += 4.0
    place.flow_controller.pump()
    assert (await answered(empty))[0].status == 503
    busy = FlowControlFixture(A, timeout_s=3)
    busy.load(A, waiting=20, running=8)
    held = busy.ask()
    busy.pool_fixture.now += 3.0
    busy.flow_controller.pump()
    (rejection,) = await answered(held)
    assert (rejection.status, rejection.reason) == (429, "rejected-ttl-expired")
    assert rejection.retry_after_s >= 1
    assert place.flow_controller.outcomes["expired"] == 2


async def test_a_zero_timeout_is_not_queued():
    """A timeout of nothing answers at once."""
    rejection = FlowControlFixture(empty_timeout_s=0).ask()
    assert isinstance(rejection, Rejection)
    assert rejection.status == 503


async def test_a_disconnected_client_leaves_the_queue_at_once():
    """Waiting or just granted: nothing stays charged or kept."""
    place = FlowControlFixture()
    first, second = place.ask(), place.ask()
    place.flow_controller.cancel(first, place.now)
    assert place.flow_controller.queue.count == 1
    place.come(A)
    await answered(second)
    place.flow_controller.cancel(second, place.now)
    assert place.pool_fixture.store.pool.members[0].account.in_flight == 0
    assert place.flow_controller.outcomes == {"cancelled": 1, "dispatched": 1}


async def test_priorities_displace_and_overtake():
    """A full queue makes room for more important requests."""
    place = FlowControlFixture(max_requests=2)
    first, last = place.ask(), place.ask()
    vip = place.ask(priority=3)
    (rejection,) = await answered(last)
    assert (rejection.status, rejection.reason) == (429, "evicted-priority")
    refused = place.ask()
    assert isinstance(refused, Rejection)
    place.come(A)
    order = []
    for name, held in (("first", first), ("vip", vip)):
        held.admission.add_done_callback(lambda _, name=name: order.append(name))
    await answered(first, vip)
    await asyncio.sleep(0)
    assert order == ["vip", "first"]


async def test_shutdown_rejects_queued_requests():
    """503 with the reason, for who waits and who comes."""
    place = FlowControlFixture()
    held = place.ask()
    place.flow_controller.close()
    (rejection,) = await answered(held)
    assert (rejection.status, rejection.reason) == (503, "rejected-shutting-down")
    assert place.ask().reason == "rejected-shutting-down"


async def test_tenants_are_limited():
    """Over the limit is 429; what an answer did not use is given back."""
    place = FlowControlFixture(A, limit=RateLimit(tokens_per_s=10.0, burst_s=10.0))
    body = b'{"model": "m", "prompt": "abcd", "max_tokens": 90}'
    headers = {":method": "POST", ":path": "/v1/completions", "x-llm-d-inference-fairness-id": "t"}
    prepared = place.pool_fixture.director.prepare(HttpRequest(headers, body))
    assert place.flow_controller.tenant(prepared) == "t"
    reserved = place.flow_controller.reserve(prepared, place.now)
    assert place.flow_controller.reserve(prepared, place.now).status == 429
    place.flow_controller.record_usage(reserved, {"prompt": 1, "completion": 5}, place.now)
    assert isinstance(place.flow_controller.reserve(prepared, place.now), RateReservation)
    assert place.flow_controller.queue.fair_share.attained("t", place.now) == pytest.approx(10.0)


async def test_a_header_that_is_no_number_counts_as_absent():
    """Bad input of a client changes nothing."""
    held = FlowControlFixture(empty_timeout_s=7).ask(
        x_extproc_queue_timeout_ms="-5", x_llm_d_slo_ttft_ms="soon"
    )
    assert held.item.deadline == held.item.arrived + 7
    assert held.item.slo_s == math.inf


async def test_pending_load_ends_with_the_wait():
    """What a request that waits will hold counts while it waits, however that ends."""
    place = FlowControlFixture(A, B, profile="adaptive", timeout_s=5)
    for address in (A, B):
        place.load(address, waiting=20, running=8, kv_usage=0.5)
    accounts = [member.account for member in place.pool_fixture.store.pool.members]
    held = [place.ask(tokens=400) for _ in range(3)]
    assert sum(account.active_context_tokens for account in accounts) > 1000
    place.flow_controller.cancel(held[0], place.now)
    place.load(A, waiting=0, running=4, kv_usage=0.5)
    await answered(held[1])
    place.flow_controller.pump()
    place.pool_fixture.now += 6.0
    place.flow_controller.pump()
    await answered(*held[1:])
    for request in held[1:]:
        if isinstance(request.admission.result(), Admission):
            request.admission.result().reservation.close(place.now)
    assert [account.active_context_tokens for account in accounts] == [0.0, 0.0]


async def test_pending_load_ends_with_a_rejection():
    """A request that waited too long holds nothing of the endpoint it waited for."""
    place = FlowControlFixture(A, B, profile="adaptive", timeout_s=5)
    for address in (A, B):
        place.load(address, waiting=20, running=8, kv_usage=0.5)
    accounts = [member.account for member in place.pool_fixture.store.pool.members]
    held = [place.ask(tokens=400) for _ in range(3)]
    assert sum(account.active_context_tokens for account in accounts) > 1000
    place.pool_fixture.now += 6.0
    place.flow_controller.pump()
    assert all(rejection.status == 429 for rejection in await answered(*held))
    assert [account.active_context_tokens for account in accounts] == [0.0, 0.0]


async def test_new_settings_apply_to_queued_requests():
    """Limits that stay keep what was taken; headers and half-life are the new ones."""
    limited = {"limit": RateLimit(requests_per_s=0.1, burst_s=10.0)}
    place = FlowControlFixture(A, **limited)
    headers = {":method": "POST", ":path": "/v1/completions", "x-team": "t"}
    raw = HttpRequest(headers, b'{"model": "m", "prompt": "x"}')
    prepared = place.pool_fixture.director.prepare(raw)
    assert isinstance(place.flow_controller.reserve(prepared, place.now), RateReservation)
    place.flow_controller.reconfigure(FlowControlSection(enabled=True, half_life_s=1.0, **limited))
    assert place.flow_controller.reserve(prepared, place.now).status == 429
    place.flow_controller.queue.fair_share.charge("t", 64.0, place.now)
    assert place.flow_controller.queue.fair_share.attained("t", place.now + 2.0) == pytest.approx(
        16.0
    )
    place.flow_controller.reconfigure(
        FlowControlSection(enabled=True, tenant_header="X-Team", **limited)
    )
    assert place.flow_controller.tenant(prepared) == "t"
    place.flow_controller.reconfigure(FlowControlSection(enabled=True))
    assert place.flow_controller.reserve(prepared, place.now).charge is None


async def test_usage_replaces_the_estimate():
    """Turns follow the difference, so that the prompt counts once."""
    place = FlowControlFixture(A)
    body = b'{"model": "m", "prompt": "' + b"x" * 4000 + b'"}'
    raw = HttpRequest({":method": "POST", ":path": "/v1/completions"}, body)
    reserved = place.flow_controller.reserve(place.pool_fixture.director.prepare(raw), place.now)
    assert reserved.prompt_tokens == 1000
    place.flow_controller.record_usage(reserved, {"prompt": 1010, "completion": 5}, place.now)
    assert place.flow_controller.queue.fair_share.attained("", place.now) == pytest.approx(20.0)
