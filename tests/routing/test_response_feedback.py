"""Effects of answers on endpoints, and the retraction of requests that never ran."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.pool.endpoint_health import HealthState
from extproc.pool.inflight import Reservation
from extproc.pool.snapshot import EndpointSnapshot
from extproc.request import HttpRequest
from extproc.scheduling.filter_tree import FilterTree, FilterTreeNode
from extproc.scheduling.pickers import MaxScorePicker
from extproc.scheduling.profile import SchedulerProfile
from extproc.scheduling.session_affinity import SessionAffinityFilter
from tests.support.pool_fixture import PoolFixture

FIRST, SECOND = "10.0.0.1:8000", "10.0.0.2:8000"


def chat(words: int = 400, first: str = "hello") -> HttpRequest:
    """A prompt of some blocks."""
    content = f"{first} " + "word " * words
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    headers = {":path": "/v1/chat/completions", ":method": "POST"}
    return HttpRequest(headers, json.dumps(body).encode())


class Sent:
    """One request that was sent to an endpoint of a pool."""

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
            self.ticket, status, self.pool_fixture.now, served=served, decision=self.decision
        )

    def complete(self, *, answered: bool = True) -> None:
        self.pool_fixture.director.release(self.ticket, self.pool_fixture.now, answered=answered)


def other_than(address: str) -> str:
    return SECOND if address == FIRST else FIRST


def blocks_at(house: PoolFixture, address: str, chain: Sequence[int]) -> int:
    endpoint = member(house, address).endpoint
    slot = house.index.slot((endpoint.address, endpoint.incarnation))
    return house.index.match(chain)[slot]


def member(house: PoolFixture, address: str) -> EndpointSnapshot:
    snapshot = house.store.pool.find(address)
    assert snapshot is not None
    return snapshot


@pytest.mark.parametrize("status", ["503", "500", "429", "400"])
def test_a_refused_prompt_is_not_predicted_as_cached(status: str):
    """Predictions of a refused request are retracted, to the last block."""
    pool_fixture = PoolFixture({FIRST: None})
    sent = Sent(pool_fixture)
    assert pool_fixture.index.blocks_total > 0
    sent.respond(status)
    assert pool_fixture.index.blocks_total == 0
    sent.complete()
    account = member(pool_fixture, FIRST).account
    assert (account.in_flight, account.queued(pool_fixture.now), account.answered) == (0, 0.0, 0)


@pytest.mark.parametrize(("status", "count"), [("404", 1), ("400", 0), ("200", 0)])
def test_models_that_are_not_found_are_counted(status: str, count: int):
    """They count for the endpoint that answered, which may be another than the first."""
    pool_fixture = PoolFixture({FIRST: None, SECOND: None})
    sent = Sent(pool_fixture)
    other = other_than(sent.address)
    sent.respond(status, served=other)
    assert member(pool_fixture, other).account.not_found == count
    assert member(pool_fixture, sent.address).account.not_found == 0


@pytest.mark.parametrize("status", ["200", ""])
def test_a_served_prompt_is_predicted_as_cached(status: str):
    """An answer that began confirms it; a client that left says nothing against it."""
    pool_fixture = PoolFixture({FIRST: None})
    sent = Sent(pool_fixture)
    before = pool_fixture.index.blocks_total
    if status:
        sent.respond(status)
    sent.complete(answered=bool(status))
    assert pool_fixture.index.blocks_total == before


def completion(prompt: str) -> HttpRequest:
    headers = {":path": "/v1/completions", ":method": "POST"}
    return HttpRequest(headers, json.dumps({"model": "m", "prompt": prompt}).encode())


@pytest.mark.parametrize("status", ["", "429"])
@pytest.mark.parametrize("size", [4096, 10_000])
def test_no_look_up_is_expected_of_a_request_that_did_not_run(status: str, size: int):
    """The predictions of such requests are not compared with the hits of others; 4096 is all cached."""
    pool_fixture = PoolFixture({FIRST: None}, profile="balanced")
    calibration = pool_fixture.cache_model.state_of(
        member(pool_fixture, FIRST).endpoint
    ).calibration

    def look_up(sent: Sent) -> float:
        sent.respond("200")
        sent.complete()
        calibration.observe_counters(sent.decision.request.prompt_tokens, 0.0)
        return calibration.predicted

    look_up(Sent(pool_fixture, completion("x" * size)))
    for _ in range(3):
        sent = Sent(pool_fixture, completion("x" * size))
        assert sent.decision.matched_tokens > 0
        if status:
            sent.respond(status)
        sent.complete(answered=bool(status))
    assert look_up(Sent(pool_fixture, completion("y" * size))) == 0


def test_earlier_predictions_stay():
    """Only what is behind the believed prefix is taken back."""
    pool_fixture = PoolFixture({FIRST: None})
    first = Sent(pool_fixture, chat(400))
    first.respond("200")
    queued = pool_fixture.index.blocks_total
    second = Sent(pool_fixture, chat(800))
    assert second.decision.matched_tokens > 0
    assert pool_fixture.index.blocks_total > queued
    second.respond("503")
    assert pool_fixture.index.blocks_total == queued


def test_three_failures_eject_an_endpoint():
    """The next requests go elsewhere, and the decision says who was left out."""
    pool_fixture = PoolFixture({FIRST: None, SECOND: None}, profile="least-request")
    for _ in range(3):
        # One failure is doubted for a second.
        pool_fixture.now += 2.0
        sents = [Sent(pool_fixture) for _ in range(2)]
        for sent in sents:
            sent.respond("503" if sent.address == FIRST else "200")
            sent.complete()
    assert member(pool_fixture, FIRST).condition.state is HealthState.EJECTED
    outcome = pool_fixture.decide(chat())
    assert isinstance(outcome, Decision)
    assert [candidate.endpoint.address for candidate in outcome.candidates] == [SECOND]
    ((why, left),) = outcome.excluded_by_health
    assert (why, [endpoint.address for endpoint in left]) == ("failing", [FIRST])


def test_the_serving_endpoint_is_charged():
    """If another endpoint answered, it gets the request, the prediction and the success."""
    pool_fixture = PoolFixture({FIRST: None, SECOND: None}, fallbacks=1)
    sent = Sent(pool_fixture)
    other = other_than(sent.address)
    blocks = sent.decision.block_hashes
    sent.respond("200", served=other)
    named, served = member(pool_fixture, sent.address), member(pool_fixture, other)
    assert (named.account.in_flight, served.account.in_flight) == (0, 1)
    assert named.condition.state is HealthState.SUSPECT
    assert sent.ticket.endpoint.address == other
    assert blocks_at(pool_fixture, sent.address, blocks) == 0
    assert blocks_at(pool_fixture, other, blocks) == len(blocks)
    sent.complete()
    assert pool_fixture.in_flight == 0
    assert served.account.answered == 1


@pytest.mark.parametrize("status", ["200", "503", "429"])
def test_a_fallback_keeps_what_was_cached_there_before(status: str):
    """A moved request counts as cached there what is; a refusal takes back only what it added."""
    pool_fixture = PoolFixture({FIRST: None, SECOND: None}, fallbacks=1)
    for _ in range(2):
        sent = Sent(pool_fixture)
        sent.respond("200", served=other_than(sent.address))
        sent.complete()
        pool_fixture.now += 2.0  # an endpoint that was passed over is doubted for a second
    chain = sent.decision.block_hashes
    sent = Sent(pool_fixture, chat(800))
    fallback = other_than(sent.address)
    held = blocks_at(pool_fixture, fallback, chain)
    assert held > 0
    sent.respond(status, served=fallback)
    ticket = sent.ticket
    assert 0 < ticket.cached_tokens == ticket.prompt_tokens - ticket.uncached_tokens
    assert blocks_at(pool_fixture, fallback, chain) == held
    longer = sent.decision.block_hashes
    assert (blocks_at(pool_fixture, fallback, longer) == len(longer)) is (status == "200")
    assert 0 < blocks_at(pool_fixture, sent.address, longer) < len(longer)
    known = pool_fixture.cache_model.state_of(ticket.endpoint).calibration
    known.observe_counters(2.0 * ticket.prompt_tokens, 0.0)
    assert known.predicted == (ticket.cached_tokens if status == "200" else 0.0)
    sent.complete()
    now = pool_fixture.now
    for account in (snapshot.account for snapshot in pool_fixture.store.pool.members):
        assert (account.in_flight, account.prompt_tokens, account.queued(now)) == (0, 0, 0.0)


def test_a_moved_request_takes_its_context_along():
    """Its blocks count as held by the endpoint that serves it until it ends."""
    pool_fixture = PoolFixture({FIRST: None, SECOND: None}, fallbacks=1, profile="adaptive")
    sent = Sent(pool_fixture)
    named, served = (
        member(pool_fixture, address).account
        for address in (sent.address, other_than(sent.address))
    )
    held = named.active_context_tokens
    assert held > 0.0
    sent.respond("200", served=served.endpoint.address)
    assert (named.active_context_tokens, served.active_context_tokens) == (0.0, held)
    assert served.count_open_blocks(sent.decision.block_hashes) == len(sent.decision.block_hashes)
    sent.complete()
    assert (named.active_context_tokens, served.active_context_tokens) == (0.0, 0.0)
    assert served.count_open_blocks(sent.decision.block_hashes) == 0


class Raising(SessionAffinityFilter, frozen=True):
    """A filter that raises where it is to follow a move."""

    kind = "raising"

    def on_moved(self, decision: Decision, served: Endpoint, now: float) -> None:
        raise KeyError(served.address)


def test_a_session_moves_with_its_request():
    """Its next turn goes to the endpoint that answered; an exception on the way is counted."""
    affinity = SessionAffinityFilter(strategy="session_id")
    tree = FilterTree(root=FilterTreeNode(filter=affinity))
    profile = SchedulerProfile("p", (Raising(), tree), (), MaxScorePicker())
    pool_fixture = PoolFixture({FIRST: None, SECOND: None}, fallbacks=1, profile=profile)
    raw = HttpRequest({**chat().headers, "x-session-id": "s"}, chat().body)
    sent = Sent(pool_fixture, raw)
    other = other_than(sent.address)
    sent.respond("200", served=other)
    sent.complete()
    pool_fixture.now += 2.0  # an endpoint that was passed over is doubted for a second
    assert Sent(pool_fixture, raw).address == other
    assert pool_fixture.counts.exceptions == {("observer", "raising"): 1}


def test_an_unknown_serving_endpoint_is_ignored():
    """An unknown address of the serving endpoint leaves the request with the chosen one."""
    pool_fixture = PoolFixture({FIRST: None, SECOND: None})
    sent = Sent(pool_fixture)
    sent.respond("200", served="10.9.9.9:1")
    named = member(pool_fixture, sent.address)
    assert (named.account.in_flight, named.condition.state) == (1, HealthState.HEALTHY)
    sent.complete()
    assert pool_fixture.in_flight == 0


@pytest.mark.parametrize("successor", [False, True])
@pytest.mark.parametrize("status", ["200", "503", "429"])
def test_a_fallback_that_left_gets_no_credit(status: str, successor: bool):  # noqa: FBT001
    """Neither the endpoint that was passed over nor another pod at its address is charged for it."""
    third = "10.0.0.3:8000"
    addresses = dict.fromkeys((FIRST, SECOND, third))
    pool_fixture = PoolFixture(addresses, fallbacks=1, profile="adaptive")
    sent = Sent(pool_fixture)
    left = sent.decision.endpoints[1]
    fallback = left.address
    listed = [Endpoint(address) for address in addresses if address != fallback]
    if successor:
        listed.append(Endpoint(fallback, uid="another"))
    pool_fixture.store.set_endpoints(listed, pool_fixture.now)
    sent.respond(status, served=fallback)
    named = member(pool_fixture, sent.address)
    assert named.condition.state is HealthState.SUSPECT
    assert blocks_at(pool_fixture, sent.address, sent.decision.block_hashes) == 0
    assert pool_fixture.in_flight == 0
    assert sent.ticket.endpoint == left
    sent.complete()
    accounts = [snapshot.account for snapshot in pool_fixture.store.pool.members]
    assert {account.answered for account in accounts} == {0}
    assert pool_fixture.index.blocks_total == 0
    cached_at = pool_fixture.index.keys()
    assert (left.address, left.incarnation) not in cached_at


def test_outcomes_of_a_removed_endpoint_are_dropped():
    """Evidence about a former life of an address is dropped."""
    pool_fixture = PoolFixture({FIRST: None, SECOND: None})
    sents = [Sent(pool_fixture) for _ in range(6)]
    pool_fixture.store.set_endpoints([], pool_fixture.now)
    pool_fixture.store.set_endpoints(
        [snapshot.endpoint for snapshot in PoolFixture({FIRST: None}).store.pool.members],
        pool_fixture.now,
    )
    for sent in sents:
        sent.respond("503")
        sent.complete()
    assert pool_fixture.store.pool.unhealthy_or_doubtful == 0


def test_usage_calibrates_the_endpoint_that_served():
    """All answers count for one endpoint, and predictions of the other one stay."""
    pool_fixture = PoolFixture({FIRST: None, SECOND: None}, profile="adaptive")
    first, second = (
        pool_fixture.cache_model.state_of(member(pool_fixture, name).endpoint)
        for name in (FIRST, SECOND)
    )
    chosen = set()
    for number in range(16):
        sent = Sent(pool_fixture, chat(first=f"talk {number}"))
        chosen.add(sent.address)
        sent.respond("200", served=FIRST)
        served = sent.ticket.endpoint
        sent.complete()
        pool_fixture.director.on_usage(sent.decision, {"prompt": 400, "cached": 360}, served=served)
    assert chosen == {FIRST, SECOND}
    assert first.calibration.error < -0.5
    assert (second.calibration.error, second.calibration.factor) == (0.0, 1.0)


@pytest.mark.parametrize("back", [False, True])
def test_late_usage_of_a_removed_endpoint_is_ignored(back: bool):  # noqa: FBT001
    """Usage that is read after its endpoint left is not recorded for a successor at its address."""
    pool_fixture = PoolFixture({FIRST: None}, profile="adaptive")
    sent = Sent(pool_fixture)
    endpoint = sent.ticket.endpoint
    known = pool_fixture.cache_model.state_of(endpoint)
    assert known.requests == 1
    pool_fixture.store.set_endpoints(
        [Endpoint(FIRST, uid="another")] if back else [], pool_fixture.now
    )
    sent.complete()
    for _ in range(8):
        pool_fixture.director.on_usage(
            sent.decision, {"prompt": 400, "cached": 360}, served=endpoint
        )
    if back:
        assert (
            pool_fixture.cache_model.state_of(
                member(pool_fixture, FIRST).endpoint
            ).calibration.error
            == 0.0
        )
    assert pool_fixture.cache_model.state_of(endpoint).calibration.error == 0.0
