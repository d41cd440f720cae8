"""Health of endpoints that do stages of requests, by the responses to these."""

from __future__ import annotations

from extproc.pool.endpoint_health import HealthState
from tests.routing.test_disaggregation import DECODE, PREFILL, build, chat, decide, fail, native


class RoleFixture:
    """A pool with endpoints for prefill and decode, where prefill is always elsewhere."""

    def __init__(self, **roles):
        self.parts = build(native(), {PREFILL: "prefill", DECODE: "decode", **roles})
        self.store, self.director = self.parts.store, self.parts.director

    def send(self, status, now):
        """A request with a response of this status; the addresses for decode and prefill."""
        decision, stages = decide(self.parts, chat(), now)
        reservation = self.director.reserve(decision, now)
        self.director.on_response_headers(reservation, status, now, decision=decision)
        self.director.release(reservation, now)
        prefill = stages.prefill
        return decision.endpoints[0].address, prefill and prefill.endpoints[0].address

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
    for _ in range(3):
        fail(fixture.parts, fixture.store.pool.find(PREFILL).endpoint, 10.0)
    assert fixture.state(PREFILL) > HealthState.SUSPECT
    again = fixture.store.pool.find(PREFILL).condition.until
    assert fixture.send("200", again - 0.1) == (DECODE, None)
    assert fixture.send("200", again) == (DECODE, PREFILL)
    assert fixture.state(PREFILL) is HealthState.HEALTHY


def test_a_request_without_response_says_nothing_of_prefill():
    """The client may have left; the endpoint is no longer charged."""
    fixture = RoleFixture()
    decision, _ = decide(fixture.parts, chat(), 10.0)
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
    decision, _ = decide(fixture.parts, chat(), 10.0)
    reservation = fixture.director.reserve(decision, 10.0)
    served = next(a for a in others if a != decision.endpoints[0].address)
    fixture.director.on_response_headers(reservation, "503", 10.0, served=served)
    states = {
        member.endpoint.address: member.condition.state for member in fixture.store.pool.members
    }
    assert states[served] is HealthState.HEALTHY
    assert states[PREFILL] is not HealthState.HEALTHY
