"""Queued requests of a flow controller: endpoints, deadlines, priorities and limits."""

from __future__ import annotations

import asyncio
import math

import msgspec
import pytest

from extproc.config.settings import FlowControlSection
from extproc.decision import NO_ENDPOINTS, Decision, Rejection
from extproc.endpoint import Endpoint, ServedModels
from extproc.flow_control.rate_limit import RateLimit
from extproc.pool.endpoint_health import HealthState, RequestOutcome
from extproc.request import HttpRequest, RequestLabels
from extproc.scheduling.labels import DecodeFilter, PrefillFilter
from extproc.scheduling.pickers import RandomPicker
from extproc.scheduling.profile import HeaderProfiles, SchedulerProfile
from extproc.server.flow_control_shell import Admission, QueuedRequest, RateReservation
from tests.server.flow_control_fixture import A, B, FlowControlFixture, answered


async def test_a_request_waits_for_the_first_endpoint():
    """Held while there is none, sent on when one comes, charged to it."""
    fixture = FlowControlFixture()
    queued = fixture.ask()
    assert isinstance(queued, QueuedRequest)
    fixture.come(A)
    (granted,) = await answered(queued)
    assert isinstance(granted, Admission)
    assert granted.decision.endpoints[0].address == A
    assert fixture.pool_fixture.store.pool.members[0].account.in_flight == 1
    assert fixture.flow_controller.queue.count == 0
    assert fixture.flow_controller.outcomes == {"dispatched": 1}


async def test_a_decision_of_a_queued_request_names_its_pool():
    """As that of a request which did not wait, where there are several pools."""
    fixture = FlowControlFixture(pool="first")
    queued = fixture.ask()
    fixture.come(A)
    (granted,) = await answered(queued)
    assert isinstance(granted, Admission)
    assert granted.decision.pool == "first"


async def test_a_subset_hint_without_endpoints_is_not_queued():
    """A subset hint without a matching endpoint is 503 at once, as the protocol has it."""
    fixture = FlowControlFixture()
    body = b'{"model": "m", "prompt": "x"}'
    raw = HttpRequest({":method": "POST", ":path": "/v1/completions"}, body, subset=(A,))
    prepared = fixture.pool_fixture.director.preparer.prepare(raw)
    assert fixture.pool_fixture.director.decide(prepared, fixture.now) == NO_ENDPOINTS


async def test_queued_requests_are_spread_over_new_endpoints():
    """A new endpoint is not flooded: it gets what it can begin within the limit."""
    fixture = FlowControlFixture()
    # 100 us for each of 4000 tokens: two fill the half second of an endpoint.
    queued = [fixture.ask(tokens=3200) for _ in range(6)]
    fixture.come(A)
    await answered(*queued[:2])
    assert [request.admission.done() for request in queued] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    fixture.come(A, B)
    await answered(*queued[:4])
    accounts = [member.account.in_flight for member in fixture.pool_fixture.store.pool.members]
    assert accounts == [2, 2]
    fixture.pool_fixture.now += 10.0
    fixture.flow_controller.pump()
    await answered(*queued)
    fixture.flow_controller.close()


async def test_queued_requests_do_not_wait_for_an_endpoint_to_probe():
    """They are dispatched where there is capacity; once the ejected endpoint has it, it is probed."""
    fixture = FlowControlFixture(A, B)
    store = fixture.pool_fixture.store
    endpoint = store.pool.members[0].endpoint
    for _ in range(3):
        store.record_outcome(endpoint, RequestOutcome.FAILED, sent_at=fixture.now, now=fixture.now)
    fixture.pool_fixture.now += 20.0
    for address in (A, B):
        fixture.load(address, waiting=20, running=8, kv_usage=0.9)
    queued = fixture.ask()
    assert isinstance(queued, QueuedRequest)
    fixture.load(B, waiting=0, running=0, kv_usage=0.1)
    (granted,) = await answered(queued)
    assert isinstance(granted, Admission)
    assert granted.decision.endpoints[0].address == B
    fixture.load(B, waiting=20, running=8, kv_usage=0.9)
    queued = fixture.ask()
    fixture.load(A, waiting=0, running=0, kv_usage=0.1)
    (granted,) = await answered(queued)
    assert isinstance(granted, Admission)
    assert granted.decision.endpoints[0].address == A
    assert store.pool.members[0].condition.state is HealthState.PROBING
    fixture.flow_controller.close()


async def test_a_request_waits_for_a_busy_endpoint():
    """An engine with requests in front is busy until a scrape says otherwise."""
    fixture = FlowControlFixture(A)
    fixture.load(A, waiting=20, running=8, kv_usage=0.9)
    queued = fixture.ask()
    assert isinstance(queued, QueuedRequest)
    again = fixture.pool_fixture.director.decide(queued.prepared, fixture.now)
    assert again.rejection.status == 429
    fixture.load(A, waiting=0, running=4, kv_usage=0.5)
    (granted,) = await answered(queued)
    assert isinstance(granted, Admission)


async def test_without_a_scrape_no_endpoint_is_busy():
    """A late scrape never turns into an outage."""
    fixture = FlowControlFixture(A)
    fixture.load(A, waiting=20, running=8)
    fixture.pool_fixture.now += 120.0
    assert isinstance(fixture.ask(), Decision)


async def test_queued_requests_are_rejected_at_their_deadline():
    """503 while there is no endpoint, 429 while all are busy; the header may ask for less."""
    fixture = FlowControlFixture(empty_timeout_s=5, timeout_s=3)
    empty, short = fixture.ask(), fixture.ask(x_extproc_queue_timeout_ms="1000")
    fixture.pool_fixture.now += 1.5
    fixture.flow_controller.pump()
    (rejection,) = await answered(short)
    assert (rejection.status, rejection.reason) == (503, "rejected-no-endpoints")
    assert not empty.admission.done()
    fixture.pool_fixture.now += 4.0
    fixture.flow_controller.pump()
    assert (await answered(empty))[0].status == 503
    busy = FlowControlFixture(A, timeout_s=3)
    busy.load(A, waiting=20, running=8)
    queued = busy.ask()
    busy.pool_fixture.now += 3.0
    busy.flow_controller.pump()
    (rejection,) = await answered(queued)
    assert (rejection.status, rejection.reason) == (429, "rejected-ttl-expired")
    assert rejection.retry_after_s >= 1
    assert fixture.flow_controller.outcomes["expired"] == 2


def list_departures(fixture):
    """Outcome, labels and seconds of the requests that left the queue."""
    return {
        (outcome, labels.target_model, labels.tenant, labels.priority): histogram.total
        for labels, by_outcome in fixture.counters.queue.waits_s.items()
        for outcome, histogram in by_outcome.items()
    }


async def test_every_departure_is_counted_with_its_wait():
    """Also requests that expire, leave or make room, by model, tenant and priority."""
    fixture = FlowControlFixture(empty_timeout_s=5, timeout_s=9, max_requests=4)
    name = "x_llm_d_inference_fairness_id"
    fixture.ask("short", x_extproc_queue_timeout_ms="1000")
    gone, low = fixture.ask("gone", **{name: "ann"}), fixture.ask("low", priority=-1)
    stays = fixture.ask("stays", priority=3)
    (waiting,) = [
        load for labels, load in fixture.counters.queue.queued.items() if labels.tenant == "ann"
    ]
    assert (waiting.requests, waiting.bytes) == (1, gone.item.bytes)
    assert isinstance(fixture.ask("late", priority=-2), Rejection)
    fixture.ask("high", priority=7)
    await answered(low)
    fixture.pool_fixture.now += 1.5
    fixture.flow_controller.pump()
    fixture.flow_controller.cancel(gone, fixture.now)
    fixture.come(A)
    await answered(stays)
    assert list_departures(fixture) == {
        ("full-unserved", "late", "none", -2): 0.0,
        ("displaced", "low", "none", -1): 0.0,
        ("expired-unserved", "short", "none", 0): 1.5,
        ("cancelled", "gone", "ann", 0): 1.5,
        ("dispatched", "high", "none", 7): 1.5,
        ("dispatched", "stays", "none", 3): 1.5,
    }
    assert not any(load.requests or load.bytes for load in fixture.counters.queue.queued.values())


async def test_requests_without_an_endpoint_are_not_counted_as_those_of_busy_ones():
    """Alerts for pools that scale from zero look for the former."""
    fixture = FlowControlFixture(A, timeout_s=9, max_requests=1)
    fixture.load(A, waiting=20, running=8)
    fixture.ask("short")
    fixture.ask("late")
    fixture.ask("hasty", x_extproc_queue_timeout_ms="0")
    fixture.pool_fixture.now += 9.0
    fixture.flow_controller.pump()
    fixture.flow_controller.close()
    fixture.ask("last")
    assert list_departures(fixture) == {
        ("expired", "short", "none", 0): 9.0,
        ("full", "late", "none", 0): 0.0,
        ("refused", "hasty", "none", 0): 0.0,
        ("refused", "last", "none", 0): 0.0,
    }


async def test_a_rewritten_request_waits_under_both_names():
    """That of the client, which dashboards know, and that of the engines, which is scaled."""
    fixture = FlowControlFixture()
    body = b'{"model": "chat", "prompt": "x"}'
    raw = HttpRequest({":method": "POST", ":path": "/v1/completions"}, body)
    prepared = fixture.pool_fixture.director.preparer.prepare(raw)
    request = msgspec.structs.replace(prepared.request, model="llama")
    rewritten = msgspec.structs.replace(prepared, request=request, upstream_model="llama")
    outcome = fixture.pool_fixture.director.decide(rewritten, fixture.now)
    fixture.flow_controller.enqueue(rewritten, outcome, fixture.now)
    assert list(fixture.counters.queue.queued) == [RequestLabels("chat", "llama", "none", 0)]


async def test_requests_of_a_closed_queue_leave_its_counts():
    """None seems to wait after the end of a pool."""
    fixture = FlowControlFixture()
    queued = fixture.ask()
    fixture.flow_controller.close()
    await answered(queued)
    assert list_departures(fixture) == {("shutdown", "m", "none", 0): 0.0}
    assert [load.requests for load in fixture.counters.queue.queued.values()] == [0]


async def test_a_request_that_does_not_wait_is_not_counted_in_the_queue():
    """Its path has no further work."""
    fixture = FlowControlFixture(A)
    assert isinstance(fixture.ask(), Decision)
    assert not fixture.counters.queue.queued
    assert not fixture.counters.queue.waits_s


async def test_a_zero_timeout_is_not_queued():
    """A timeout of nothing answers at once."""
    rejection = FlowControlFixture(empty_timeout_s=0).ask()
    assert isinstance(rejection, Rejection)
    assert rejection.status == 503


async def test_a_disconnected_client_leaves_the_queue_at_once():
    """Waiting or just granted: nothing stays charged or kept."""
    fixture = FlowControlFixture()
    first, second = fixture.ask(), fixture.ask()
    fixture.flow_controller.cancel(first, fixture.now)
    assert fixture.flow_controller.queue.count == 1
    fixture.come(A)
    await answered(second)
    fixture.flow_controller.cancel(second, fixture.now)
    assert fixture.pool_fixture.store.pool.members[0].account.in_flight == 0
    assert fixture.flow_controller.outcomes == {"cancelled": 1, "dispatched": 1}


async def test_priorities_displace_and_overtake():
    """A full queue makes room for more important requests."""
    fixture = FlowControlFixture(max_requests=2)
    first, last = fixture.ask(), fixture.ask()
    vip = fixture.ask(priority=3)
    (rejection,) = await answered(last)
    assert (rejection.status, rejection.reason) == (429, "evicted-priority")
    refused = fixture.ask()
    assert isinstance(refused, Rejection)
    fixture.come(A)
    order = []
    for name, queued in (("first", first), ("vip", vip)):
        queued.admission.add_done_callback(lambda _, name=name: order.append(name))
    await answered(first, vip)
    await asyncio.sleep(0)
    assert order == ["vip", "first"]


async def test_shutdown_rejects_queued_requests():
    """503 with the reason, for who waits and who comes."""
    fixture = FlowControlFixture()
    queued = fixture.ask()
    fixture.flow_controller.close()
    (rejection,) = await answered(queued)
    assert (rejection.status, rejection.reason) == (503, "rejected-shutting-down")
    assert fixture.ask().reason == "rejected-shutting-down"


async def test_tenants_are_limited():
    """Over the limit is 429; what an answer did not use is given back."""
    fixture = FlowControlFixture(A, limit=RateLimit(tokens_per_s=10.0, burst_s=10.0))
    body = b'{"model": "m", "prompt": "abcd", "max_tokens": 90}'
    headers = {":method": "POST", ":path": "/v1/completions", "x-llm-d-inference-fairness-id": "t"}
    prepared = fixture.pool_fixture.director.preparer.prepare(HttpRequest(headers, body))
    assert fixture.flow_controller.tenant(prepared) == "t"
    reserved = fixture.flow_controller.reserve(prepared, fixture.now)
    assert fixture.flow_controller.reserve(prepared, fixture.now).status == 429
    fixture.flow_controller.record_usage(reserved, {"prompt": 1, "completion": 5}, fixture.now)
    assert isinstance(fixture.flow_controller.reserve(prepared, fixture.now), RateReservation)
    assert fixture.flow_controller.queue.fair_share.attained("t", fixture.now) == pytest.approx(
        10.0
    )


async def test_a_header_that_is_no_number_counts_as_absent():
    """Bad input of a client changes nothing."""
    queued = FlowControlFixture(empty_timeout_s=7).ask(
        x_extproc_queue_timeout_ms="-5", x_llm_d_slo_ttft_ms="soon"
    )
    assert queued.item.deadline == queued.item.arrived + 7
    assert queued.item.slo_s == math.inf


async def test_pending_load_ends_with_the_wait():
    """The load of a queued request counts while it is queued, however that ends."""
    fixture = FlowControlFixture(A, B, profile="adaptive", timeout_s=5)
    for address in (A, B):
        fixture.load(address, waiting=20, running=8, kv_usage=0.5)
    accounts = [member.account for member in fixture.pool_fixture.store.pool.members]
    queued = [fixture.ask(tokens=400) for _ in range(3)]
    assert sum(account.active_context_tokens for account in accounts) > 1000
    fixture.flow_controller.cancel(queued[0], fixture.now)
    fixture.load(A, waiting=0, running=4, kv_usage=0.5)
    await answered(queued[1])
    fixture.flow_controller.pump()
    fixture.pool_fixture.now += 6.0
    fixture.flow_controller.pump()
    await answered(*queued[1:])
    for request in queued[1:]:
        if isinstance(request.admission.result(), Admission):
            request.admission.result().reservation.close(fixture.now)
    assert [account.active_context_tokens for account in accounts] == [0.0, 0.0]


async def test_pending_load_ends_with_a_rejection():
    """A request that waited too long holds nothing of the endpoint it waited for."""
    fixture = FlowControlFixture(A, B, profile="adaptive", timeout_s=5)
    for address in (A, B):
        fixture.load(address, waiting=20, running=8, kv_usage=0.5)
    accounts = [member.account for member in fixture.pool_fixture.store.pool.members]
    queued = [fixture.ask(tokens=400) for _ in range(3)]
    assert sum(account.active_context_tokens for account in accounts) > 1000
    fixture.pool_fixture.now += 6.0
    fixture.flow_controller.pump()
    assert all(rejection.status == 429 for rejection in await answered(*queued))
    assert [account.active_context_tokens for account in accounts] == [0.0, 0.0]


async def test_new_settings_apply_to_queued_requests():
    """Limits that stay keep what was taken; headers and half-life are the new ones."""
    limited = {"limit": RateLimit(requests_per_s=0.1, burst_s=10.0)}
    fixture = FlowControlFixture(A, **limited)
    headers = {":method": "POST", ":path": "/v1/completions", "x-team": "t"}
    raw = HttpRequest(headers, b'{"model": "m", "prompt": "x"}')
    prepared = fixture.pool_fixture.director.preparer.prepare(raw)
    assert isinstance(fixture.flow_controller.reserve(prepared, fixture.now), RateReservation)
    fixture.flow_controller.reconfigure(
        FlowControlSection(enabled=True, half_life_s=1.0, **limited)
    )
    assert fixture.flow_controller.reserve(prepared, fixture.now).status == 429
    fixture.flow_controller.queue.fair_share.charge("t", 64.0, fixture.now)
    assert fixture.flow_controller.queue.fair_share.attained(
        "t", fixture.now + 2.0
    ) == pytest.approx(16.0)
    fixture.flow_controller.reconfigure(
        FlowControlSection(enabled=True, tenant_header="X-Team", **limited)
    )
    assert fixture.flow_controller.tenant(prepared) == "t"
    fixture.flow_controller.reconfigure(FlowControlSection(enabled=True))
    assert fixture.flow_controller.reserve(prepared, fixture.now).charge is None


async def test_usage_replaces_the_estimate():
    """Turns follow the difference, so that the prompt counts once."""
    fixture = FlowControlFixture(A)
    body = b'{"model": "m", "prompt": "' + b"x" * 4000 + b'"}'
    raw = HttpRequest({":method": "POST", ":path": "/v1/completions"}, body)
    reserved = fixture.flow_controller.reserve(
        fixture.pool_fixture.director.preparer.prepare(raw), fixture.now
    )
    assert reserved.prompt_tokens == 1000
    fixture.flow_controller.record_usage(reserved, {"prompt": 1010, "completion": 5}, fixture.now)
    assert fixture.flow_controller.queue.fair_share.attained("", fixture.now) == pytest.approx(20.0)


async def test_an_answer_counts_no_more_than_a_context():
    """A huge `max_tokens` blocks its tenant no longer than an answer of the engines can."""
    fixture = FlowControlFixture(A, B, limit=RateLimit(tokens_per_s=10.0, burst_s=10.0))
    store = fixture.pool_fixture.store
    body = b'{"model": "m", "prompt": "abcd", "max_tokens": 9999999999}'
    raw = HttpRequest({":method": "POST", ":path": "/v1/completions"}, body)
    prepared = fixture.pool_fixture.director.preparer.prepare(raw)

    def charged():
        fixture.pool_fixture.now += 1_000_000.0
        return fixture.flow_controller.reserve(prepared, fixture.now).charge.tokens

    assert charged() == 1 + 2**20
    for member, length in zip(store.pool.members, (4096, 8192), strict=True):
        assert charged() == 1 + 2**20
        models = ServedModels(frozenset({"m"}), max_model_len=length)
        store.observe_models(member.endpoint, models)
    assert charged() == 1 + 8192


async def test_an_answer_without_usage_counts_with_its_maximum():
    """As of a stream without `include_usage`: the allowance is not given back."""
    fixture = FlowControlFixture(A, limit=RateLimit(tokens_per_s=10.0, burst_s=10.0))
    body = b'{"model": "m", "prompt": "abcd", "max_tokens": 90}'
    raw = HttpRequest({":method": "POST", ":path": "/v1/completions"}, body)
    prepared = fixture.pool_fixture.director.preparer.prepare(raw)
    reserved = fixture.flow_controller.reserve(prepared, fixture.now)
    fixture.flow_controller.record_usage(reserved, {}, fixture.now)
    assert reserved.charge.tokens == 91
    fixture.flow_controller.record_usage(reserved, {"prompt": 1}, fixture.now)
    assert reserved.charge.tokens == 91
    fixture.flow_controller.record_usage(reserved, {"prompt": 1, "completion": 5}, fixture.now)
    assert reserved.charge.tokens == 6


async def test_the_prompt_of_a_request_that_did_not_wait_counts():
    """Its tenant has received it when others queue."""
    fixture = FlowControlFixture(A)
    body = b'{"model": "m", "prompt": "' + b"x" * 4000 + b'"}'
    raw = HttpRequest({":method": "POST", ":path": "/v1/completions"}, body)
    prepared = fixture.pool_fixture.director.preparer.prepare(raw)
    outcome = fixture.pool_fixture.director.decide(prepared, fixture.now)
    assert fixture.flow_controller.admit(prepared, outcome, fixture.now, tenant="t") is None
    attained = fixture.flow_controller.queue.fair_share.attained("t", fixture.now)
    assert attained == pytest.approx(1000.0)


async def test_a_profile_without_capacity_holds_up_no_other_profile():
    """While the engine for decoding is busy, prefill goes on behind a request that waits for it."""
    fixture = FlowControlFixture()
    director, store = fixture.pool_fixture.director, fixture.pool_fixture.store
    profiles = {
        name: SchedulerProfile(name, (role_filter,), (), RandomPicker())
        for name, role_filter in (("prefill", PrefillFilter()), ("decode", DecodeFilter()))
    }
    routing = msgspec.structs.replace(
        director.routing, by_header=HeaderProfiles("epp-profile", profiles)
    )
    director.reconfigure(routing)
    roles = {A: "prefill", B: "decode"}
    store.set_endpoints([Endpoint(at, labels={"llm-d.ai/role": roles[at]}) for at in roles], 0.0)
    for address in roles:
        fixture.load(address, waiting=20, running=8)
    decoding, prefilling = (fixture.ask(epp_profile=name) for name in ("decode", "prefill"))
    fixture.load(A, waiting=0, running=0)
    (granted,) = await answered(prefilling)
    assert granted.decision.profile == "prefill"
    assert granted.decision.endpoints[0].address == A
    assert not decoding.admission.done()
    fixture.load(B, waiting=0, running=0)
    assert (await answered(decoding))[0].decision.profile == "decode"
