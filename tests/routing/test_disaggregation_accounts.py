"""Accounts of requests whose stages several endpoints compute, here and at other replicas."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from extproc.endpoint import EngineCounters
from extproc.pool import plausibility
from extproc.pool.endpoint_health import HealthState
from extproc.routing import peer_sync
from tests.routing.test_disaggregation import (
    DECODE,
    ENCODE,
    ENCODE_TOO,
    EXTERNAL,
    NATIVE,
    PREFILL,
    ROLES,
    account,
    build,
    chat,
    decide,
    endpoints,
    native,
    scrape,
)
from tests.support.seeded import examples

DECODE_TOO = "10.0.0.6:8000"
ALL = {**ROLES, DECODE_TOO: "decode"}
FALLBACKS = NATIVE + "  fallbacks: 1\n"


class Unreliable:
    """A listener that raises once where the endpoint of a stage is charged."""

    def __init__(self, log):
        self.log, self.stage = log, ""

    def on_reserved(self, reservation, decision):
        if self.stage and reservation.stage == self.stage:
            self.stage = ""
            raise OSError
        self.log.on_reserved(reservation, decision)

    def on_moved(self, reservation, blocks):
        self.log.on_moved(reservation, blocks)

    def on_released(self, reservation, *, answered, ran):
        self.log.on_released(reservation, answered=answered, ran=ran)


class Stages(RuleBasedStateMachine):
    """Requests in any order, endpoints that come and go, and a replica that mirrors it all."""

    sent = Bundle("sent")
    answered = Bundle("answered")

    def __init__(self):
        super().__init__()
        self.here, self.there = (build(native(text=FALLBACKS), ALL) for _ in range(2))
        self.log = peer_sync.PeerEventLog("a", lambda: None)
        self.listener = Unreliable(self.log.pool_log(""))
        self.here.director.set_event_listener(self.listener)
        self.mirror = peer_sync.PeerReplica("b", lambda _: self.there.director, silent_s=9.0)
        self.now = 1.0
        self.open = {}
        self.accounts = {}

    @rule(roles=st.sets(st.sampled_from(sorted(ALL)), min_size=1))
    def change_endpoints(self, roles):
        known = {address: ALL[address] for address in ALL if address in roles}
        for parts in (self.here, self.there):
            parts.store.set_endpoints(endpoints(known), self.now)

    @rule(seconds=st.sampled_from([0.0, 0.1, 5.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(
        target=sent,
        words=st.sampled_from([1, 500, 501]),
        images=st.integers(0, 1),
        failing=st.sampled_from(["", "", "", "prefill", "encode"]),
    )
    def send(self, words, images, failing):
        outcome = self.here.director.route(chat(words, images=images), self.now)
        if not hasattr(outcome, "endpoints"):
            return None
        self.listener.stage = failing
        try:
            reservation = self.here.director.reserve(outcome, self.now)
        except OSError:
            return None
        finally:
            self.listener.stage = ""
        self.open[reservation] = reservation.parts
        return reservation, outcome

    @rule(
        target=answered,
        ticket=consumes(sent),
        status=st.sampled_from(["200", "400", "404", "503"]),
        served=st.sampled_from(["", "", DECODE, DECODE_TOO]),
    )
    def answer(self, ticket, status, served):
        if ticket is not None:
            self.here.director.on_response_headers(
                ticket[0], status, self.now, served=served, decision=ticket[1]
            )
            assert ticket[0].parts == ()
        return ticket

    @rule(ticket=consumes(answered))
    def end(self, ticket):
        self.release(ticket, is_answered=True)

    @rule(ticket=consumes(sent))
    def leave(self, ticket):
        self.release(ticket, is_answered=False)

    def release(self, ticket, *, is_answered):
        if ticket is not None:
            del self.open[ticket[0]]
            self.here.director.release(ticket[0], self.now, answered=is_answered)

    @rule(ticket=consumes(sent))
    def take_back(self, ticket):
        if ticket is not None:
            del self.open[ticket[0]]
            self.here.director.unreserve(ticket[0], self.now)

    @rule()
    def carry(self):
        message = self.log.take()
        if message is not None:
            self.mirror.apply_message(peer_sync.decode(peer_sync.encode(message)), self.now)

    @invariant()
    def accounts_hold_what_is_open(self):
        """Each request once on the endpoint that serves, and once for each part."""
        for parts in (self.here, self.there):
            for member in parts.store.pool.members:
                self.accounts[id(member.account)] = member.account
        legs = [*self.open, *(part for held in self.open for part in held.parts)]
        assert all(leg.is_open for leg in legs)
        ours = [a for a in self.accounts.values() if not a.from_peers]
        num_ours = sum(a.own for a in self.accounts.values())
        assert num_ours == len(legs)
        assert all(a.prompt_tokens >= 0 and a.queued(self.now) >= 0 for a in ours)

    def teardown(self):
        """When every request has ended, every account of every life is zero, here and there."""
        for reservation, first in list(self.open.items()):
            self.here.director.release(reservation, self.now, answered=False)
            assert not any(part.is_open for part in first)
        self.carry()
        assert self.mirror.open == 0
        for known in self.accounts.values():
            assert (known.in_flight, known.from_peers, known.prompt_tokens) == (0, 0, 0)
            assert (known.adapters, known.queued(self.now + 1e6)) == ({}, 0.0)
            assert list(known.open_work(self.now)) == []


Stages.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=30)
test_accounts_return_to_zero = Stages.TestCase


def send(parts, words=1000, *, images=0, now=1.0):
    decision, _ = decide(parts, chat(words, images=images), now)
    return decision, parts.director.reserve(decision, now)


def test_both_endpoints_are_charged_for_their_stage():
    """Decode takes the memory of the prompt and none of its work; prefill takes the work."""
    parts = build(native())
    decision, reservation = send(parts, images=1)
    tokens = decision.request.prompt_tokens
    decode, prefill = account(parts, DECODE), account(parts, PREFILL)
    assert (decode.in_flight, decode.queued(1.0), decode.kv_tokens_sent) == (1, 1.0, tokens)
    assert (prefill.in_flight, prefill.queued(1.0), prefill.kv_tokens_sent) == (1, tokens, tokens)
    assert [part.stage for part in reservation.parts] == ["prefill", "encode", "encode"]
    assert account(parts, ENCODE).prompt_tokens == 0
    parts.director.on_response_headers(reservation, "200", 2.0)
    assert (decode.in_flight, prefill.in_flight, account(parts, ENCODE).in_flight) == (1, 0, 0)
    parts.director.release(reservation, 3.0)
    assert decode.in_flight == 0


def test_plugins_of_a_stage_with_several_endpoints_learn_of_it_once(tmp_path):
    """Its endpoints are charged singly, and its decision is one."""
    (tmp_path / "mine.py").write_text(EXTERNAL)
    picker = "{kind: last, params: {max_num_of_endpoints: 2}}"
    text = NATIVE.replace("{kind: max-score-picker, params: {maxNumOfEndpoints: 2}}", picker)
    parts = build(native(text=f"{text}  plugin_files: ['{tmp_path}/mine.py']\n"))
    _, reservation = send(parts, images=1)
    charged = [part.endpoint.address for part in reservation.parts if part.stage == "encode"]
    assert charged == [ENCODE_TOO, ENCODE]
    plugin = parts.profiles.stages.encode.profile.picker.plugin
    assert plugin.notes == [("encode", ENCODE_TOO)]


@pytest.mark.parametrize("status", ["400", "503"])
def test_a_refusal_retracts_what_was_expected_of_prefill(status):
    """Nothing of the prompt ran for all that is known, at either endpoint."""
    parts = build(native())
    _, reservation = send(parts)
    assert parts.index.blocks_total > 0
    parts.director.on_response_headers(reservation, status, 2.0)
    parts.director.release(reservation, 2.0)
    assert parts.index.blocks_total == 0


def test_a_request_that_is_taken_back_is_retracted_everywhere():
    """It was never sent."""
    parts = build(native())
    _, reservation = send(parts)
    parts.director.unreserve(reservation, 1.0)
    assert parts.index.blocks_total == 0


def test_a_request_whose_media_are_encoded_elsewhere_computes_its_prompt():
    """Its duration says nothing of the endpoint that answers."""
    parts = build(native(), {DECODE: "", ENCODE: "encode"})
    decision, reservation = send(parts, images=1)
    decode = account(parts, DECODE)
    assert reservation.stage == "prefill-decode"
    assert decode.queued(1.0) == decision.request.prompt_tokens
    parts.director.on_response_headers(reservation, "200", 60.0)
    parts.director.release(reservation, 61.0)
    assert (decode.answered, decode.served, decode.queued(61.0)) == (0, 1, 0.0)


def test_a_moved_request_is_still_one_that_decodes():
    """The endpoint that answers in the place of the first one computes no prompt either."""
    parts = build(native(text=FALLBACKS), ALL)
    decision, reservation = send(parts)
    first, second = decision.endpoints
    parts.director.on_response_headers(
        reservation, "200", 2.0, served=second.host_port, decision=decision
    )
    moved = account(parts, second.address)
    assert (reservation.stage, moved.in_flight) == ("decode", 1)
    assert moved.queued(2.0) == 1.0
    assert account(parts, first.address).in_flight == 0
    parts.director.release(reservation, 3.0)
    assert moved.in_flight == 0


def test_work_and_answers_are_learned_from_the_stage_that_shows_them():
    """Prompts from prefill, answers from decode without the time of prefill."""
    parts = build(native())
    decision, reservation = send(parts)
    decode, prefill = account(parts, DECODE), account(parts, PREFILL)
    before = decode.typical_work.typical
    parts.director.on_response_headers(reservation, "200", 60.0)
    parts.director.release(reservation, 61.0)
    assert prefill.typical_work.typical != before
    assert (decode.answered, prefill.answered) == (0, 0)
    assert decode.answers.mean < 60.0 / decode.iteration_s
    assert decision.request.prompt_tokens > 1000
    assert (decode.texts, prefill.texts) == ({}, {})


def test_pages_are_not_held_against_requests_that_may_be_elsewhere():
    """Those at prefill are not in the engine that decodes, and may have left prefill long ago."""
    parts = build(native())
    sent = [send(parts, images=1)[1] for _ in range(9)]
    addresses = (DECODE, PREFILL, ENCODE)
    for at in range(2, 60, 4):
        for address in addresses:
            scrape(parts, address, float(at), counters=EngineCounters(steps=1.0))
    for address in addresses:
        member = parts.store.pool.find(address)
        assert not member.flaws & (plausibility.TOO_LITTLE | plausibility.VOID)
        assert member.condition.state is HealthState.HEALTHY
    for reservation in sent:
        parts.director.on_response_headers(reservation, "200", 60.0)
    scrape(parts, DECODE, 70.0, counters=EngineCounters(steps=2.0))
    assert parts.store.pool.find(DECODE).flaws & plausibility.TOO_LITTLE
    for reservation in sent:
        parts.director.release(reservation, 71.0)
    # The sidecar may have had the prompts computed where they are decoded.
    for at in (72.0, 80.0):
        scrape(parts, PREFILL, at, counters=EngineCounters(steps=1.0))
    assert not parts.store.pool.find(PREFILL).flaws & plausibility.VOID


def test_prompts_that_left_prefill_are_no_queue_there():
    """Their requests wait for a place where they are decoded, and are open for as long."""
    parts = build(native())
    sent = [send(parts)[1] for _ in range(4)]
    prefill = account(parts, PREFILL)
    assert prefill.queued(1.0) > 1000
    scrape(parts, PREFILL, 1.1)
    assert prefill.in_flight == 4  # the engine may read them still
    drained_s = 1.0 + 2.0 * prefill.queued(1.0) / prefill.tokens_per_s
    scrape(parts, PREFILL, drained_s, waiting=1.0)
    assert prefill.in_flight == 1
    assert prefill.queued(drained_s) > 0.0
    scrape(parts, PREFILL, drained_s + 1.0)
    assert (prefill.in_flight, prefill.queued(drained_s + 1.0)) == (0, 0.0)
    for reservation in sent:
        parts.director.on_response_headers(reservation, "200", drained_s + 2.0)
        parts.director.release(reservation, drained_s + 3.0)
    assert (prefill.in_flight, account(parts, DECODE).in_flight) == (0, 0)


def test_an_answer_overtakes_prompts_that_wait():
    """That of a request whose prompt was computed elsewhere says nothing of their order."""
    parts = build(native())
    decode = account(parts, DECODE)
    decode.open("m", 50_000, cached_tokens=0, now=1.0)
    _, reservation = send(parts)
    parts.director.on_response_headers(reservation, "200", 1.0)
    parts.director.release(reservation, 1.0)
    assert decode.queued(1.0) == 50_000


def test_silence_of_prefill_is_not_that_of_the_endpoint_that_decodes():
    """Its client leaves after a minute without an answer, and nothing was scraped."""
    parts = build(native(text=NATIVE + "scrape: {enabled: false}\n"))
    detector = parts.store.outlier_detector
    incarnation = parts.store.pool.find(DECODE).endpoint.incarnation
    for at in range(1, 9):
        _, reservation = send(parts, now=float(at))
        parts.director.release(reservation, at + 600.0, answered=False)
    assert detector.condition(incarnation).state is HealthState.HEALTHY


def test_a_prompt_that_waits_for_encode_is_not_settled():
    """Pages of prefill do not show it yet."""
    parts = build(native())
    send(parts, images=1)
    scrape(parts, PREFILL, 9.0)
    assert account(parts, PREFILL).in_flight == 1


def test_a_request_in_stages_counts_once():
    """Its parts are no demand of their own."""
    parts = build(native())
    _, reservation = send(parts, images=1)
    members = parts.store.pool.members
    assert sum(member.account.in_flight for member in members) == 1 + len(reservation.parts) > 2
    assert sum(m.account.own - m.account.count_parts(own=True) for m in members) == 1
