"""What answers say of endpoints, and what is taken back when a request never ran."""

from __future__ import annotations

import json

import pytest

from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.pool.endpoint_health import HealthState
from extproc.pool.inflight import Reservation
from extproc.pool.snapshot import EndpointSnapshot
from extproc.request import HttpRequest
from tests.support.pool_fixture import PoolFixture

FIRST, SECOND = "10.0.0.1:8000", "10.0.0.2:8000"


def chat(words: int = 400, first: str = "hello") -> HttpRequest:
    """A prompt of some blocks."""
    content = f"{first} " + "word " * words
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    headers = {":path": "/v1/chat/completions", ":method": "POST"}
    return HttpRequest(headers, json.dumps(body).encode())


class Sent:
    """One request that was committed in a house."""

    def __init__(self, house: PoolFixture, raw: HttpRequest | None = None) -> None:
        self.pool_fixture = house
        decision = house.decide(raw or chat())
        assert isinstance(decision, Decision)
        self.decision = decision
        self.ticket: Reservation = house.director.reserve(decision, house.now)

    @property
    def address(self) -> str:
        return self.decision.endpoints[0].address

    def respond(self, status: str, served: str = "") -> None:
        self.pool_fixture.director.on_response_headers(
            self.ticket, status, self.pool_fixture.now, served=served
        )

    def complete(self, *, answered: bool = True) -> None:
        self.pool_fixture.director.release(self.ticket, self.pool_fixture.now, answered=answered)


def member(house: PoolFixture, address: str) -> EndpointSnapshot:
    snapshot = house.store.pool.find(address)
    assert snapshot is not None
    return snapshot


@pytest.mark.parametrize("status", ["503", "500", "429", "400"])
def test_a_refused_prompt_is_not_predicted_as_cached(status: str):
    """What one refused request made us believe is taken back, to the last block."""
    house = PoolFixture({FIRST: None})
    sent = Sent(house)
    assert house.index.blocks_total > 0
    sent.respond(status)
    assert house.index.blocks_total == 0
    sent.complete()
    account = member(house, FIRST).account
    assert (account.in_flight, account.queued(house.now), account.answered) == (0, 0.0, 0)


@pytest.mark.parametrize("status", ["200", ""])
def test_a_served_prompt_is_predicted_as_cached(status: str):
    """An answer that began confirms it; a client that left says nothing against it."""
    house = PoolFixture({FIRST: None})
    sent = Sent(house)
    before = house.index.blocks_total
    if status:
        sent.respond(status)
    sent.complete(answered=bool(status))
    assert house.index.blocks_total == before


def test_earlier_predictions_stay():
    """Only what is behind the believed prefix is taken back."""
    house = PoolFixture({FIRST: None})
    first = Sent(house, chat(400))
    first.respond("200")
    held = house.index.blocks_total
    second = Sent(house, chat(800))
    assert second.decision.matched_tokens > 0
    assert house.index.blocks_total > held
    second.respond("503")
    assert house.index.blocks_total == held


def test_three_failures_eject_an_endpoint():
    """The next requests go elsewhere, and the decision says who was left out."""
    house = PoolFixture({FIRST: None, SECOND: None}, profile="least-request")
    for _ in range(3):
        # One failure is doubted for a second.
        house.now += 2.0
        sents = [Sent(house) for _ in range(2)]
        for sent in sents:
            sent.respond("503" if sent.address == FIRST else "200")
            sent.complete()
    assert member(house, FIRST).condition.state is HealthState.EJECTED
    outcome = house.decide(chat())
    assert isinstance(outcome, Decision)
    assert [candidate.endpoint.address for candidate in outcome.candidates] == [SECOND]
    ((why, left),) = outcome.excluded_by_health
    assert (why, [endpoint.address for endpoint in left]) == ("failing", [FIRST])


def test_the_serving_endpoint_is_charged():
    """Where another endpoint answered, it has the request, and the belief, and the good word."""
    house = PoolFixture({FIRST: None, SECOND: None}, fallbacks=1)
    sent = Sent(house)
    other = SECOND if sent.address == FIRST else FIRST
    blocks = sent.decision.block_hashes
    sent.respond("200", served=other)
    named, served = member(house, sent.address), member(house, other)
    assert (named.account.in_flight, served.account.in_flight) == (0, 1)
    assert named.condition.state is HealthState.SUSPECT
    assert sent.ticket.endpoint.address == other
    depths = house.index.match(blocks)
    held = {
        snapshot.endpoint.address: depths[
            house.index.slot((snapshot.endpoint.address, snapshot.endpoint.incarnation))
        ]
        for snapshot in (named, served)
    }
    assert held == {sent.address: 0, other: len(blocks)}
    sent.complete()
    assert house.in_flight == 0
    assert served.account.answered == 1


def test_an_unknown_serving_endpoint_is_ignored():
    """A name that is nobody's says nothing: the endpoint that was named keeps the request."""
    house = PoolFixture({FIRST: None, SECOND: None})
    sent = Sent(house)
    sent.respond("200", served="10.9.9.9:1")
    named = member(house, sent.address)
    assert (named.account.in_flight, named.condition.state) == (1, HealthState.HEALTHY)
    sent.complete()
    assert house.in_flight == 0


def test_outcomes_of_a_removed_endpoint_are_dropped():
    """Evidence about a former life of an address is dropped."""
    house = PoolFixture({FIRST: None, SECOND: None})
    sents = [Sent(house) for _ in range(6)]
    house.store.set_endpoints([], house.now)
    house.store.set_endpoints(
        [snapshot.endpoint for snapshot in PoolFixture({FIRST: None}).store.pool.members], house.now
    )
    for sent in sents:
        sent.respond("503")
        sent.complete()
    assert house.store.pool.unhealthy_or_doubtful == 0


def test_usage_calibrates_the_endpoint_that_served():
    """Whoever was chosen: all answers are of one endpoint, and the other one's belief stays."""
    house = PoolFixture({FIRST: None, SECOND: None}, profile="adaptive")
    first, second = (
        house.cache_model.state_of(member(house, name).endpoint) for name in (FIRST, SECOND)
    )
    chosen = set()
    for number in range(16):
        sent = Sent(house, chat(first=f"talk {number}"))
        chosen.add(sent.address)
        sent.respond("200", served=FIRST)
        served = sent.ticket.endpoint
        sent.complete()
        house.director.on_usage(sent.decision, {"prompt": 400, "cached": 360}, served=served)
    assert chosen == {FIRST, SECOND}
    assert first.calibration.error < -0.5
    assert (second.calibration.error, second.calibration.factor) == (0.0, 1.0)


@pytest.mark.parametrize("back", [False, True])
def test_late_usage_of_a_removed_endpoint_is_ignored(back: bool):  # noqa: FBT001
    """Usage that is read after its endpoint left leaves nothing behind, whoever has its address now."""
    house = PoolFixture({FIRST: None}, profile="adaptive")
    sent = Sent(house)
    endpoint = sent.ticket.endpoint
    known = house.cache_model.state_of(endpoint)
    assert known.requests == 1
    house.store.set_endpoints([Endpoint(FIRST, uid="another")] if back else [], house.now)
    sent.complete()
    for _ in range(8):
        house.director.on_usage(sent.decision, {"prompt": 400, "cached": 360}, served=endpoint)
    if back:
        assert house.cache_model.state_of(member(house, FIRST).endpoint).calibration.error == 0.0
    assert house.cache_model.state_of(endpoint).calibration.error == 0.0
