"""Events that pickers exchange, with late, lost and duplicate ones."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.decision import Decision
from extproc.endpoint import Load
from extproc.prefix_cache.blocks import HASH_MASK
from extproc.request import HttpRequest
from extproc.routing import peer_sync
from extproc.server import http_peer_channel
from tests.support.pool_fixture import PoolFixture
from tests.support.seeded import examples

FIRST, SECOND = "10.0.0.1:8000", "10.0.0.2:8000"
SILENT_S = 5.0


class Side:
    """A picker with its outbox and its mirror; others' facts come by hand."""

    def __init__(self, name: str, *addresses: str) -> None:
        self.pool_fixture = PoolFixture(dict.fromkeys(addresses or (FIRST, SECOND)))
        self.outbox = peer_sync.PeerEventLog(name, lambda: None)
        peer_sync.connect([("", self.pool_fixture.director)], self.outbox)
        self.mirror = peer_sync.PeerReplica(
            name, lambda pool: None if pool else self.pool_fixture.director, silent_s=SILENT_S
        )

    def send(self, words: int = 400):
        """Commit one request."""
        body = b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}'
        headers = {":path": "/v1/chat/completions", ":method": "POST"}
        decision = self.pool_fixture.decide(HttpRequest(headers, body % (b"word " * words)))
        assert isinstance(decision, Decision)
        return self.pool_fixture.director.reserve(decision, self.pool_fixture.now)

    def end(self, ticket, status: str = "200", served: str = ""):
        """Let one request be answered and end."""
        self.pool_fixture.director.on_response_headers(
            ticket, status, self.pool_fixture.now, served=served
        )
        self.pool_fixture.director.release(ticket, self.pool_fixture.now)

    def take_message(self) -> peer_sync.PeerMessage:
        """All that waits, carried."""
        message = self.outbox.take()
        assert message is not None
        data = peer_sync.decode(peer_sync.encode(message))
        assert data is not None
        return data

    def account(self, address: str):
        return self.pool_fixture.store.pool.find(address).account

    @property
    def open(self) -> int:
        return sum(member.account.in_flight for member in self.pool_fixture.store.pool.members)

    @property
    def mirrored(self) -> int:
        return sum(member.account.from_peers for member in self.pool_fixture.store.pool.members)


def fact(number: int = 1, address: str = FIRST, pool: str = "") -> peer_sync.RequestStarted:
    return peer_sync.RequestStarted(number, pool, address, "m", 100, 400, (1, 2, 3))


def say(side: Side, *facts: peer_sync.Fact, picker: str = "b", now: float = 1.0) -> set[str]:
    return side.mirror.apply_message(peer_sync.PeerMessage(picker, facts), now)


def test_a_request_of_a_peer_is_charged_and_indexed():
    """Requests in flight, prompt tokens and prefix blocks of a peer are counted as at the peer."""
    sender, receiver = Side("a"), Side("b")
    reservation = sender.send()
    receiver.mirror.apply_message(sender.take_message(), 1.0)
    address = reservation.endpoint.address
    candidates, here = sender.account(address), receiver.account(address)
    assert (here.in_flight, here.from_peers, candidates.from_peers) == (1, 1, 0)
    assert (here.own, candidates.own) == (0, 1)
    assert (here.prompt_tokens, here.sent) == (candidates.prompt_tokens, candidates.sent)
    assert receiver.pool_fixture.index.blocks_total == sender.pool_fixture.index.blocks_total > 0
    sender.end(reservation)
    assert receiver.mirror.apply_message(sender.take_message(), 2.0) == {""}
    assert (here.in_flight, here.from_peers, here.answered) == (0, 0, 1)
    assert receiver.pool_fixture.index.blocks_total > 0


def test_every_replica_predicts_cached_tokens_itself():
    """One that was there from the beginning expects hits that one who came later does not."""
    sender, early, late = Side("a"), Side("b"), Side("c")
    addresses = []
    for _ in range(2):
        reservation = sender.send()
        addresses.append(reservation.endpoint.address)
        message = sender.take_message()
        early.mirror.apply_message(message, 1.0)
        sender.end(reservation)
        sender.take_message()
    late.mirror.apply_message(message, 1.0)
    assert addresses[0] == addresses[1], "it goes where its prefix is"
    sent = reservation.prompt_tokens
    work = [side.account(addresses[0]).sent for side in (sender, early, late)]
    assert work[0] == work[1] < 2 * sent
    assert work[2] == sent


def test_blocks_beyond_the_own_limit_are_dropped():
    """A picker with another schedule may tell of more blocks than there can be here."""
    side = Side("a")
    deepest = side.pool_fixture.director.max_blocks
    say(side, peer_sync.RequestStarted(1, "", FIRST, "m", 100, 400, list(range(deepest + 9))))
    assert (side.open, side.pool_fixture.index.blocks_total) == (1, deepest)


def test_requests_of_peers_are_not_published_again():
    """Events of other pickers are not published again."""
    sender, receiver = Side("a"), Side("b")
    reservation = sender.send()
    receiver.mirror.apply_message(sender.take_message(), 1.0)
    sender.end(reservation)
    receiver.mirror.apply_message(sender.take_message(), 2.0)
    assert receiver.outbox.take() is None


def test_a_refused_request_is_retracted_on_all_replicas():
    """A 503 leaves no block behind, here and there."""
    sender, receiver = Side("a"), Side("b")
    reservation = sender.send()
    receiver.mirror.apply_message(sender.take_message(), 1.0)
    sender.end(reservation, "503")
    receiver.mirror.apply_message(sender.take_message(), 2.0)
    assert sender.pool_fixture.index.blocks_total == receiver.pool_fixture.index.blocks_total == 0


def test_a_withdrawn_request_is_retracted_on_all_replicas():
    """A request that never left is believed cached nowhere."""
    sender, receiver = Side("a"), Side("b")
    reservation = sender.send()
    receiver.mirror.apply_message(sender.take_message(), 1.0)
    sender.pool_fixture.director.unreserve(reservation, 2.0)
    receiver.mirror.apply_message(sender.take_message(), 2.0)
    assert receiver.open == receiver.pool_fixture.index.blocks_total == 0


def test_the_served_endpoint_is_charged_on_all_replicas():
    """If the data plane used another endpoint, that endpoint is charged."""
    sender, receiver = Side("a"), Side("b")
    reservation = sender.send()
    other = SECOND if reservation.endpoint.address == FIRST else FIRST
    receiver.mirror.apply_message(sender.take_message(), 1.0)
    sender.pool_fixture.director.on_response_headers(reservation, "200", 1.5, served=other)
    receiver.mirror.apply_message(sender.take_message(), 2.0)
    assert (receiver.account(other).in_flight, receiver.open) == (1, 1)
    sender.pool_fixture.director.release(reservation, 3.0)
    receiver.mirror.apply_message(sender.take_message(), 3.0)
    assert receiver.open == 0


@pytest.mark.parametrize("strange", [fact(address="10.9.9.9:1"), fact(pool="other")])
def test_unknown_pools_and_endpoints_are_ignored(strange: peer_sync.RequestStarted):
    """Endpoints and pools that this replica does not have are ignored without an error."""
    side = Side("a")
    say(side, strange, peer_sync.RequestEnded(1, answered=True))
    assert side.open == side.mirror.open == 0


def test_own_events_are_ignored():
    """A stream brings back what was put in."""
    side = Side("a")
    side.send()
    side.mirror.apply_message(side.take_message(), 1.0)
    assert (side.open, side.mirrored, side.mirror.pickers) == (1, 0, 0)


def test_an_end_before_its_start_leaves_nothing():
    """Ended before Sent, and once more after."""
    side = Side("a")
    say(side, peer_sync.RequestEnded(1, answered=True), fact(), fact())
    assert side.open == 0


def test_a_doubled_request_is_charged_once():
    """Twice the same number is one request."""
    side = Side("a")
    say(side, fact(), fact())
    assert side.open == side.mirrored == 1


def test_lists_of_open_requests_replace_lost_ends():
    """Requests that a list lacks are over; an older list changes nothing."""
    side = Side("a")
    say(side, fact(1), fact(2), fact(3))
    assert say(side, peer_sync.OpenRequests(2, [2])) == {""}
    assert side.open == 2
    say(side, peer_sync.OpenRequests(1, []), fact(1))
    assert side.open == 2


def test_an_older_list_of_open_requests_is_ignored():
    """A late list of a quiet picker does not reopen what a later one left out."""
    side = Side("a")
    say(side, fact(1), peer_sync.OpenRequests(1, [], 2), peer_sync.OpenRequests(1, [1], 1), fact(1))
    assert side.open == 0


def test_lists_are_numbered_in_the_order_they_are_written():
    """Two lists with nothing in between differ by their serial only."""
    event_log = peer_sync.PeerEventLog("a", lambda: None)
    event_log.publish_open()
    event_log.publish_open()
    assert event_log.take().facts == [
        peer_sync.OpenRequests(0, [], 1),
        peer_sync.OpenRequests(0, [], 2),
    ]


def test_a_list_without_serial_is_read_as_of_an_earlier_version():
    """Pickers of two versions talk while a rollout lasts."""
    data = msgspec.msgpack.encode(["a", [["o", 3, [2]]]])
    assert peer_sync.decode(data) == peer_sync.PeerMessage("a", [peer_sync.OpenRequests(3, [2], 0)])


def test_a_list_with_a_request_of_unknown_start_is_incomplete_until_its_start():
    """Requests whose end is known, or that cannot be charged here, are known."""
    side = Side("a")
    say(side, fact(1), fact(2, pool="other"), fact(3), peer_sync.RequestEnded(3, answered=True))
    say(side, peer_sync.OpenRequests(3, [1, 2], 1), picker="b")
    assert side.mirror.incomplete == []
    say(side, peer_sync.OpenRequests(4, [1, 2, 4], 2))
    assert side.mirror.incomplete == ["b"]
    say(side, fact(4))
    assert (side.mirror.incomplete, side.open) == ([], 2)
    say(side, peer_sync.OpenRequests(6, [1, 6], 3), peer_sync.RequestEnded(6, answered=True))
    assert side.mirror.incomplete == []


@pytest.mark.parametrize("leaves", [True, False])
def test_a_silent_or_stopped_peer_has_no_open_requests(leaves):
    """Its requests go; those of another stay."""
    side = Side("a")
    say(side, fact(1), fact(2), now=1.0)
    say(side, fact(1), picker="c", now=4.0)
    if leaves:
        say(side, peer_sync.PickerLeft(), now=4.0)
    assert side.mirror.drop_silent(1.0 + SILENT_S) == (set() if leaves else {""})
    assert (side.open, side.mirrored, side.mirror.pickers) == (1, 1, 1)


def test_a_new_incarnation_is_not_charged_for_the_former():
    """A mirrored request ends against the account it was charged to."""
    side = Side("a")
    say(side, fact())
    side.pool_fixture.store.set_endpoints([], 2.0)
    side.pool_fixture.store.set_endpoints(
        [m.endpoint for m in PoolFixture({FIRST: None}).store.pool.members], 3.0
    )
    say(side, peer_sync.RequestEnded(1, answered=True))
    assert side.open == side.mirrored == 0


def test_every_event_round_trips():
    """Encoding loses nothing, and a request of a hundred blocks takes about a kilobyte."""
    sent = peer_sync.RequestStarted(
        1, "p", FIRST, "m", 100, 400, [HASH_MASK - n for n in range(100)]
    )
    facts = [
        sent,
        peer_sync.RequestEnded(1, answered=True, ran=False),
        peer_sync.OpenRequests(2, [2], 3, ["b"]),
        peer_sync.PickerLeft(),
    ]
    message = peer_sync.PeerMessage("a", facts)
    assert peer_sync.decode(peer_sync.encode(message)) == message
    assert len(peer_sync.encode(message)) < 1_000


def test_bytes_that_do_not_decode_are_no_message():
    """Entries of another version, and foreign bytes, are ignored."""
    assert peer_sync.decode(b"\x93junk") is None


def test_messages_of_long_chains_are_cut():
    """As of small blocks: two messages may wait for a peer that is not slow, and none is lost."""
    side, log = Side("a"), peer_sync.PeerEventLog("b", lambda: None)
    chain = range(2**60 - 40_000, 2**60)
    account = side.pool_fixture.store.pool.members[0].account
    for _ in range(40):
        log.request_started("", account.open("m", 1, cached_tokens=0, now=0.0), chain)
    waiting = [*iter(lambda: log.take(peer_sync.MAX_FACTS), None)]
    for messages in (waiting, [*log.snapshot()]):
        encoded = [peer_sync.encode(message) for message in messages]
        assert max(map(len, encoded)) <= http_peer_channel.MAX_UNSENT_BYTES / 2
        decoded = [peer_sync.decode(data) for data in encoded]
        numbers = [
            fact.number
            for message in decoded
            for fact in message.facts
            if isinstance(fact, peer_sync.RequestStarted)
        ]
        assert numbers == [*range(1, 41)]


def test_queued_events_are_bounded(monkeypatch):
    """The oldest go; what is open is said later."""
    monkeypatch.setattr(peer_sync, "MAX_WAITING", 10)
    woken = []
    event_log = peer_sync.PeerEventLog("a", lambda: woken.append(1))
    for _ in range(100):
        event_log.publish_open()
    assert len(event_log.take().facts) <= 10
    assert woken == [1]


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.2, 0.7]),
    doubles=st.sampled_from([0.0, 0.5]),
    far=st.integers(0, 12),
)
def test_any_loss_and_order_end_without_open_requests(seed, loss, doubles, far):
    """Counters are never below zero, and all is closed once the last list of open requests came."""
    rng = random.Random(seed)
    side, data = Side("a"), []
    open_now: list[int] = []
    lists = 0
    for number in range(1, 40):
        data.append(fact(number, rng.choice([FIRST, SECOND, "10.9.9.9:1"])))
        open_now.append(number)
        while open_now and rng.random() < 0.5:
            ended = open_now.pop(rng.randrange(len(open_now)))
            data.append(
                peer_sync.RequestEnded(ended, answered=rng.random() < 0.7, ran=rng.random() < 0.7)
            )
        if rng.random() < 0.2:
            lists += 1
            data.append(peer_sync.OpenRequests(number, list(open_now), lists))
    data += [peer_sync.RequestEnded(number, answered=True) for number in open_now]
    data = [event for event in data if rng.random() >= loss]
    data += [event for event in data if rng.random() < doubles]
    order = sorted(range(len(data)), key=lambda at: at + rng.uniform(0, far))
    for at in order:
        say(side, data[at])
        assert side.open == side.mirrored == side.mirror.open >= 0
    say(side, peer_sync.OpenRequests(39, [], lists + 1))
    for event in rng.sample(data, min(5, len(data))):
        say(side, event)
    assert side.open == side.mirrored == side.mirror.open == 0
    assert all(m.account.prompt_tokens == 0 for m in side.pool_fixture.store.pool.members)


_WILD = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.none(),
    st.booleans(),
    st.just("x" * 5000),
    st.lists(st.integers(-5, 2**64 - 1), max_size=4),
)
_WILD_FACTS = st.tuples(st.sampled_from("seol?"), *[_WILD] * 7).map(list)


@given(st.lists(_WILD_FACTS, max_size=4), _WILD)
def test_any_values_in_a_message_are_handled(facts, picker):
    """Wild numbers, names and types are ignored, or leave accounts that are still in range."""
    side = Side("me")
    message = peer_sync.decode(msgspec.msgpack.encode([picker, facts]))
    if message is not None:
        side.mirror.apply_message(message, 1.0)
    side.mirror.drop_silent(100.0)
    assert side.mirror.open == 0


@pytest.mark.parametrize(
    "data",
    [
        b"\x92\xa1\xff\x90",
        b"\x91" * 100_000,
        peer_sync.encode(
            peer_sync.PeerMessage("o", [peer_sync.RequestStarted(1, "", FIRST, "m", 1, 4, [5, -6])])
        ),
        peer_sync.encode(
            peer_sync.PeerMessage("o", [peer_sync.RequestStarted(1, "", FIRST, "m", -5, 4, [])])
        ),
        peer_sync.encode(
            peer_sync.PeerMessage("o", [peer_sync.RequestStarted(1, "", FIRST, "m", 2**63, 4, [])])
        ),
        peer_sync.encode(
            peer_sync.PeerMessage(
                "o", [peer_sync.RequestStarted(1, "", FIRST, "m" * 513, 1, 4, [])]
            )
        ),
        peer_sync.encode(peer_sync.PeerMessage("o" * 257, [])),
        peer_sync.encode(peer_sync.PeerMessage("o", [peer_sync.OpenRequests(2**64 - 1, [1])])),
        b"\xc1" * (peer_sync.MAX_MESSAGE_BYTES + 1),
    ],
)
def test_a_message_out_of_range_is_ignored(data):
    """Invalid UTF-8, endless nesting, numbers and names beyond their ranges, and sheer length."""
    assert peer_sync.decode(data) is None


@pytest.mark.parametrize("stage", [None, "", "decode", "prefill", "verify"])
def test_stages_of_other_versions_are_readable(stage):
    """Without the stage, and with one of a later version, the endpoint counts as computing all."""
    side = Side("a")
    started = ["s", 1, "", FIRST, "m", 100, 400, [1, 2, 3], False]
    if stage is not None:
        started.append(stage)
    message = peer_sync.decode(msgspec.msgpack.encode(["b", [started]]))
    assert message is not None
    side.mirror.apply_message(message, 1.0)
    account = side.account(FIRST)
    assert (account.in_flight, account.sent) == (1, 1 if stage == "decode" else 100)
    say(side, peer_sync.RequestEnded(1, True))
    assert (account.in_flight, account.queued(9.0)) == (0, 0.0)


def test_a_prefill_that_pages_show_as_done_is_retracted_all_the_same():
    """Its request failed, though the engine no longer has it."""
    side = Side("a")
    say(side, peer_sync.RequestStarted(1, "", FIRST, "m", 100, 400, (1, 2, 3), False, "prefill"))
    store = side.pool_fixture.store
    member = store.pool.find(FIRST)
    page = Load(at=9.0, engine="vllm", waiting=0.0, running=0.0)
    store.observe(store.begin_scrape(member.endpoint), page, 9.0)
    assert side.account(FIRST).in_flight == 0
    assert side.pool_fixture.index.blocks_total
    say(side, peer_sync.RequestEnded(1, False, False), now=10.0)
    assert side.pool_fixture.index.blocks_total == 0
    assert side.mirror.open == 0
