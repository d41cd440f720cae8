"""Health of endpoints that do stages of requests, by the responses to these."""

from __future__ import annotations

import msgspec

from extproc.config import factory
from extproc.config.pool_sections import SchedulingSection
from extproc.config.settings import Settings
from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.pool.endpoint_health import HealthState, RequestOutcome
from extproc.request import HttpRequest

PREFILL, DECODE = "10.0.0.1:8000", "10.0.0.2:8000"
CHAT = HttpRequest(
    {":path": "/v1/chat/completions", ":method": "POST"},
    b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % (b"hello " * 100),
)


def profile(role):
    return {"name": role, "filters": [{"kind": f"{role}-filter"}]}


class RoleFixture:
    """A pool with endpoints for prefill and decode, where prefill is always elsewhere."""

    def __init__(self, **roles):
        scheduling = {
            "profile": profile("decode"),
            "disaggregation": {
                "prefill": {
                    "profile": profile("prefill"),
                    "decider": {"kind": "always-disagg-pd-decider"},
                }
            },
        }
        self.parts = factory.build(
            Settings(seed=1, scheduling=msgspec.convert(scheduling, SchedulingSection))
        )
        self.store, self.director = self.parts.store, self.parts.director
        endpoints = {PREFILL: "prefill", DECODE: "decode", **roles}
        self.store.set_endpoints(
            [
                Endpoint(address, labels={"llm-d.ai/role": role})
                for address, role in endpoints.items()
            ],
            0.0,
        )

    def send(self, status, now):
        """A request with a response of this status; the addresses for decode and prefill."""
        decision = self.director.route(CHAT, now)
        assert isinstance(decision, Decision)
        reservation = self.director.reserve(decision, now)
        self.director.on_response_headers(reservation, status, now, decision=decision)
        self.director.release(reservation, now)
        prefill = decision.disaggregation.prefill
        return decision.endpoints[0].address, prefill and prefill.endpoints[0].address

    def fail(self, address, times, now):
        for _ in range(times):
            endpoint = self.store.pool.find(address).endpoint
            self.store.record_outcome(endpoint, RequestOutcome.FAILED, sent_at=now, now=now)

    def state(self, address):
        return self.store.pool.find(address).condition.state


def test_a_failed_request_counts_against_the_endpoint_of_prefill():
    """The sidecar of the serving endpoint passes its error on; decode then serves alone."""
    fixture = RoleFixture()
    assert fixture.send("503", 10.0) == (DECODE, PREFILL)
    assert fixture.state(PREFILL) is HealthState.SUSPECT
    assert fixture.state(DECODE) is HealthState.HEALTHY
    assert fixture.send("200", 10.1) == (DECODE, None)
    for _ in range(3):
        assert fixture.send("503", 10.2) == (DECODE, None)
    assert fixture.state(DECODE) > HealthState.SUSPECT


def test_an_ejected_endpoint_of_prefill_comes_back():
    """The next request after its time is its probe, and the response ends it."""
    fixture = RoleFixture()
    fixture.fail(PREFILL, 3, 10.0)
    assert fixture.state(PREFILL) > HealthState.SUSPECT
    again = fixture.store.pool.find(PREFILL).condition.until
    assert fixture.send("200", again - 0.1) == (DECODE, None)
    assert fixture.send("200", again) == (DECODE, PREFILL)
    assert fixture.state(PREFILL) is HealthState.HEALTHY


def test_a_request_without_response_says_nothing_of_prefill():
    """The client may have left; the endpoint is no longer charged."""
    fixture = RoleFixture()
    decision = fixture.director.route(CHAT, 10.0)
    reservation = fixture.director.reserve(decision, 10.0)
    account = fixture.store.pool.find(PREFILL).account
    assert account.in_flight == 1
    fixture.director.release(reservation, 10.1, answered=False)
    assert account.in_flight == 0
    assert fixture.state(PREFILL) is HealthState.HEALTHY


def test_a_failure_of_a_fallback_counts_against_prefill():
    """The endpoint that answered passed it on."""
    others = [f"10.0.0.{number}:8000" for number in (3, 4, 5)]  # half of a pool is ejected at most
    fixture = RoleFixture(**dict.fromkeys(others, "decode"))
    decision = fixture.director.route(CHAT, 10.0)
    reservation = fixture.director.reserve(decision, 10.0)
    served = next(a for a in others if a != decision.endpoints[0].address)
    fixture.director.on_response_headers(reservation, "503", 10.0, served=served)
    states = {
        member.endpoint.address: member.condition.state for member in fixture.store.pool.members
    }
    assert states[served] is HealthState.HEALTHY
    assert states[PREFILL] is not HealthState.HEALTHY
