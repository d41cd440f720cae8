"""Shadow scheduling under virtual time: it sees what was routed, and changes nothing."""

from __future__ import annotations

import random

import msgspec
import pytest

from extproc.config import factory
from extproc.config.pool_sections import SchedulingRules, SchedulingSection, ShadowRules
from extproc.config.settings import Settings
from extproc.decision import Decision
from extproc.endpoint import Endpoint, Load
from extproc.request import HttpRequest
from extproc.scheduling import plugin_guard, registry, shadow
from extproc.scheduling.pickers import RoundRobin
from extproc.scheduling.profile import SchedulerProfile
from extproc.scheduling.session_affinity import SessionAffinityScorer

ENDPOINTS = [Endpoint(f"10.0.0.{n}:8000") for n in range(1, 6)]
STRATEGIES = sorted(registry.profiles())


def build(strategy="adaptive", *, second=None, ratio=1.0, seed=1, on_pending=lambda: None):
    """Parts of a picker with a shadow, and endpoints."""
    rules = None if second is None else ShadowRules(strategy=second, sample_ratio=ratio)
    settings = Settings(seed=seed, scheduling=SchedulingSection(strategy=strategy, shadow=rules))
    parts = factory.build(settings, on_shadow_pending=on_pending)
    parts.store.set_endpoints(ENDPOINTS, 0.0)
    return parts


def chat(rng):
    """A request that begins like some others, and has turns before it."""
    topic, turns = rng.randrange(4), rng.randrange(1, 4)
    messages = [
        {"role": ("user", "assistant")[turn % 2], "content": f"topic {topic} turn {turn} " * 100}
        for turn in range(2 * turns - 1)
    ]
    body = msgspec.json.encode({"model": "m", "messages": messages})
    return HttpRequest({":path": "/v1/chat/completions", ":method": "POST"}, body)


def run(parts, *, seed, num_requests=60, run_shadow=True):
    """Route requests while loads change and requests end; addresses in order."""
    rng = random.Random(seed)
    addresses, opened, now = [], [], 0.0
    for _ in range(num_requests):
        now += rng.expovariate(5.0)
        if rng.random() < 0.3:
            load = Load(
                at=now,
                engine="vllm",
                waiting=float(rng.randrange(6)),
                running=float(rng.randrange(9)),
                kv_usage=rng.random(),
                kv_blocks=1000,
                block_tokens=16,
            )
            store, address = parts.store, rng.choice(ENDPOINTS).address
            store.observe(store.begin_scrape(store.pool.find(address).endpoint), load, now)
            assert store.pool.find(address).load.at == now
        while opened and rng.random() < 0.4:
            parts.director.release(opened.pop(rng.randrange(len(opened))), now, answered=True)
        decision = parts.director.route(chat(rng), now)
        assert isinstance(decision, Decision)
        opened.append(parts.director.reserve(decision, now))
        addresses.append(decision.endpoints[0].address)
        second, is_turn = parts.director.routing.shadow, rng.random() < 0.2
        # Late and irregularly, as behind a busy event loop.
        if run_shadow and second is not None and is_turn:
            second.run_pending(1.0)
    if parts.director.routing.shadow is not None:
        parts.director.routing.shadow.run_pending(1.0)
    return addresses


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_shadow_changes_no_decision(strategy):
    """Every strategy routes with any shadow as it does without one."""
    for seed in range(3):
        alone = run(build(strategy, seed=seed), seed=seed)
        for second in ("adaptive", "balanced", "round-robin", "prefix-hash"):
            assert run(build(strategy, second=second, seed=seed), seed=seed) == alone
        # Nor does one that never comes to its turn.
        behind = build(strategy, second="adaptive", seed=seed)
        assert run(behind, seed=seed, run_shadow=False) == alone


@pytest.mark.parametrize("strategy", ["adaptive", "prefix-hash"])
@pytest.mark.parametrize("seed", range(5))
def test_a_shadow_equal_to_the_strategy_agrees(strategy, seed):
    """A strategy without chance makes the same choice later, from what it saw."""
    parts = build(strategy, second=strategy)
    run(parts, seed=seed, num_requests=200)
    assert parts.director.routing.shadow.counts.results == {"agreed": 200}
    assert not parts.director.routing.shadow.counts.differences


def test_round_robin_follows_what_was_routed():
    """Its first place is chance; then it goes on from the endpoint that served."""
    parts = build("round-robin", second="round-robin")
    run(parts, seed=1, num_requests=100)
    assert parts.director.routing.shadow.counts.results["agreed"] >= 99


def test_prefixes_are_recorded_once_where_they_were_routed():
    """The index is the one of a picker that routes as the strategy does, and reads prefixes."""
    plain, with_shadow = build("balanced"), build("balanced", second="adaptive")
    run(plain, seed=1)
    run(with_shadow, seed=1)
    assert with_shadow.index.blocks_total == plain.index.blocks_total > 0
    accounts = [
        [
            (member.account.in_flight, member.account.prompt_tokens)
            for member in parts.store.pool.members
        ]
        for parts in (plain, with_shadow)
    ]
    assert accounts[0] == accounts[1]


def test_a_shadow_reads_prefixes_that_the_strategy_does_not():
    """Prompts are hashed for it, and no account changes."""
    parts = build("least-request", second="balanced")
    run(parts, seed=1)
    assert parts.index.blocks_total > 0
    assert build("least-request").director.routing.hashes_prompts is False


def test_expected_seconds_are_compared():
    """The judge expects its own choice to be no slower; a strategy without a cost is no judge."""
    parts = build("random", second="adaptive")
    run(parts, seed=1)
    counts = parts.director.routing.shadow.counts
    assert counts.results["differed"] > 0
    assert set(counts.judged) == {"shadow"}
    assert counts.seconds["shadow", "routed"] > counts.seconds["shadow", "preferred"] > 0.0
    difference = counts.differences[-1]
    assert difference.routed != difference.preferred
    assert difference.model == "m"


def test_the_queue_is_bounded():
    """Requests beyond the bound are dropped and counted; the owner is notified once."""
    calls = []
    parts = build(second="adaptive", on_pending=lambda: calls.append(None))
    run(parts, seed=1, num_requests=shadow.MAX_PENDING + 10, run_shadow=False)
    counts = parts.director.routing.shadow.counts
    assert counts.results["dropped"] == 10
    assert counts.results["agreed"] + counts.results["differed"] == shadow.MAX_PENDING
    assert len(calls) == 1


def test_long_prompts_fill_the_queue(monkeypatch):
    """Bytes are bounded as well."""
    monkeypatch.setattr(shadow, "MAX_PENDING_BYTES", 10_000)
    parts = build(second="adaptive")
    run(parts, seed=1, num_requests=20, run_shadow=False)
    assert parts.director.routing.shadow.counts.results["dropped"] > 0


def test_a_turn_ends_in_time():
    """Requests that are left wait for the next turn."""
    ticks = iter(range(1000))
    guards = plugin_guard.GuardFactory(lambda: next(ticks) * 0.001, plugin_guard.PluginCounters())
    section = SchedulingSection(shadow=ShadowRules(sample_ratio=1.0))
    parts = factory.build(Settings(seed=1, scheduling=section), guards=guards)
    parts.store.set_endpoints(ENDPOINTS, 0.0)
    second = parts.director.routing.shadow
    for _ in range(5):
        parts.director.reserve(parts.director.route(chat(random.Random(1)), 1.0), 1.0)
    assert second.run_pending(0.0025)
    assert second.counts.results["agreed"] == 2
    assert not second.run_pending(1.0)
    assert second.counts.cpu_s > 0.0


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_a_sample_is_looked_at(ratio):
    """Its chance is not that of routing."""
    parts = build(second="adaptive", ratio=ratio)
    run(parts, seed=1, num_requests=400)
    num = sum(parts.director.routing.shadow.counts.results.values())
    assert ratio * 400 * 0.5 <= num <= ratio * 400 * 1.6


def test_dry_runs_are_not_looked_at():
    """Nor is what was rejected: the shadow follows what was routed."""
    parts = build(second="adaptive")
    parts.director.route(chat(random.Random(1)), 1.0)
    assert not parts.director.routing.shadow.run_pending(1.0)
    assert not parts.director.routing.shadow.counts.results


def test_models_with_rules_of_their_own_are_not_looked_at():
    """The shadow is compared with one strategy."""
    section = SchedulingSection(
        models={"m": SchedulingRules(strategy="random")}, shadow=ShadowRules(sample_ratio=1.0)
    )
    parts = factory.build(Settings(seed=1, scheduling=section))
    parts.store.set_endpoints(ENDPOINTS, 0.0)
    parts.director.reserve(parts.director.route(chat(random.Random(1)), 1.0), 1.0)
    assert not parts.director.routing.shadow.run_pending(1.0)
    assert not parts.director.routing.shadow.counts.results


class BrokenPicker:
    """A picker that observes, and raises."""

    kind = "broken"
    needs = frozenset()

    def pick(self, context, candidates, totals, *, count):
        return [0]

    def on_committed(self, decision, now):
        raise KeyError


def put_shadow(parts, profile):
    """Let a shadow with this profile look at every request; returns it."""
    second = shadow.ShadowScheduler(
        profile,
        sample_ratio=1.0,
        rng=random.Random(1),
        stopwatch=lambda: 0.0,
        on_pending=lambda: None,
    )
    parts.director.reconfigure(msgspec.structs.replace(parts.director.routing, shadow=second))
    return second


def test_an_exception_of_a_shadow_is_counted():
    """It is sent to no peer."""
    profile = msgspec.structs.replace(registry.profiles()["adaptive"], picker=BrokenPicker())
    parts = build()
    second = put_shadow(parts, profile)
    parts.director.reserve(parts.director.route(chat(random.Random(1)), 1.0), 1.0)
    second.run_pending(1.0)
    assert second.counts.results == {"failed": 1}


class Unwilling:
    """A filter that leaves no candidate."""

    kind = "unwilling"
    needs = frozenset()

    def filter(self, context, candidates):
        return []


def test_plugins_of_a_shadow_follow_what_it_rejects():
    """A session stays with the endpoint that was routed to, though the shadow would reject it."""
    affinity = SessionAffinityScorer(strategy="session_id")
    profile = SchedulerProfile("p", (Unwilling(),), ((affinity, 1.0),), RoundRobin())
    parts = build("round-robin")
    second = put_shadow(parts, profile)
    raw = chat(random.Random(1))
    headers = {**raw.headers, "x-session-id": "s"}
    decision = parts.director.route(HttpRequest(headers, raw.body), 1.0)
    parts.director.reserve(decision, 1.0)
    second.run_pending(1.0)
    assert second.counts.results == {"rejected": 1}
    assert affinity.memory.find("s", 1.0) == decision.endpoints[0].address


def test_a_request_does_not_depend_on_the_shadow():
    """An exception where it is to wait for the shadow is counted, and its accounts are closed."""
    calls = []

    def schedule():
        calls.append(None)
        if len(calls) == 1:
            raise RuntimeError

    parts = build(second="adaptive", on_pending=schedule)
    run(parts, seed=1, num_requests=1)
    counts = parts.director.routing.shadow.counts
    assert counts.results == {"failed": 1}
    decision = parts.director.route(chat(random.Random(1)), 1.0)
    reservation = parts.director.reserve(decision, 1.0)
    account = parts.store.pool.find(decision.endpoints[0].address).account
    before = account.in_flight
    parts.director.release(reservation, 2.0)
    assert account.in_flight == before - 1
    assert not parts.director.routing.shadow.run_pending(1.0)
    assert counts.results["agreed"] == 1
    assert len(calls) == 2


def reload(parts, section, running):
    settings = msgspec.structs.replace(parts.settings, scheduling=section)
    return factory.rebuild_routing(
        settings, guards=parts.guards, before=parts.profiles, running=running
    )[0]


def test_a_reload_keeps_turns_on_and_promotes():
    """Counts go on while neither side of the comparison changes, and begin anew otherwise."""
    parts = build("balanced", second="adaptive")
    section = parts.settings.scheduling
    first = parts.director.routing.shadow
    reloaded = reload(parts, msgspec.structs.replace(section, fallbacks=1), first)
    assert reloaded.shadow is first
    other = reload(parts, msgspec.structs.replace(section, strategy="lmetric"), first)
    assert other.shadow is not first
    more = msgspec.structs.replace(section, shadow=ShadowRules(sample_ratio=0.5))
    assert reload(parts, more, first).shadow is not first
    promoted = reload(parts, SchedulingSection(strategy="adaptive"), first)
    assert promoted.shadow is None
    assert promoted.profile.name == "adaptive"
