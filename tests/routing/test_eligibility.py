"""Exclusion for health, probes of excluded endpoints, and slow start of new ones."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
import pytest

from extproc.decision import Decision, Outcome, Rejection
from extproc.endpoint import DataParallelRank, Endpoint, Load, ServedModels
from extproc.pool.endpoint_health import HealthState, OutlierDetectionSettings, RequestOutcome
from extproc.pool.inference_policy import InferencePolicy
from extproc.pool.snapshot import EndpointSnapshot
from extproc.pool.store import PoolStore
from extproc.request import HttpRequest, InferenceRequest
from extproc.routing import eligibility
from extproc.routing.routing_config import RoutingConfig, RoutingSettings
from extproc.scheduling import registry
from extproc.scheduling.load_bounds import MaxWaiting
from extproc.scheduling.pickers import RandomPicker
from extproc.scheduling.profile import SchedulerProfile
from tests.support.pool_fixture import PoolFixture

ADDRESSES = [f"10.0.0.{n}:8000" for n in range(1, 5)]
FIRST, SECOND, THIRD, FOURTH = ADDRESSES


class EligibilityFixture:
    """Four endpoints, a clock by hand, and what is found."""

    def __init__(self, settings: OutlierDetectionSettings = OutlierDetectionSettings()) -> None:  # noqa: B008 - a frozen value
        self.store = PoolStore(on_gone=lambda _: None)
        self.store.outlier_detector.reconfigure(settings, 0.0)
        self.store.set_endpoints([Endpoint(address) for address in ADDRESSES], 0.0)
        self.now = 10.0
        self.rng = random.Random(7)

    def member(self, address: str) -> EndpointSnapshot:
        snapshot = self.store.pool.find(address)
        assert snapshot is not None
        return snapshot

    def fail(self, address: str, times: int = 3) -> None:
        for _ in range(times):
            self.store.record_outcome(
                self.member(address).endpoint, RequestOutcome.FAILED, sent_at=self.now, now=self.now
            )

    def find(self, *subset: str, model: str = "") -> eligibility.EligibleEndpoints:
        eligible = eligibility.find_eligible(
            self.store.pool,
            InferenceRequest(api="x", model=model, subset=subset or None),
            respect_subset=True,
            reject_unlisted=False,
            may_defer=False,
            health=self.store.outlier_detector.settings,
            now=self.now,
            rng=self.rng,
        )
        assert not isinstance(eligible, Rejection)
        return eligible

    def eligible_addresses(self, *subset: str) -> list[str]:
        return addresses(self.find(*subset).members)


def addresses(members: Sequence[EndpointSnapshot]) -> list[str]:
    return [member.endpoint.address for member in members]


def aside(eligible: eligibility.EligibleEndpoints) -> dict[str, list[str]]:
    return {
        why: [endpoint.address for endpoint in left] for why, left in eligible.excluded_by_health
    }


def test_members_are_not_copied_while_all_are_healthy():
    """The members are those of the pool, and a decision is not copied either."""
    fixture = EligibilityFixture()
    eligible = fixture.find()
    assert eligible.members is fixture.store.pool.members
    decision = Decision(request=InferenceRequest(api="x"), endpoints=[])
    assert eligible.with_exclusions(decision) is decision


def test_failing_endpoints_are_excluded():
    """One that is out, or doubted, is not in play, and stands with the reason."""
    fixture = EligibilityFixture()
    fixture.fail(FIRST)
    fixture.fail(SECOND, 1)
    eligible = fixture.find()
    assert addresses(eligible.members) == [THIRD, FOURTH]
    assert aside(eligible) == {"failing": [FIRST, SECOND]}
    fixture.now += 1.0
    assert fixture.eligible_addresses() == [SECOND, THIRD, FOURTH]


def test_endpoints_stay_the_same_until_they_need_not():
    """Before the time that is named nothing else is found, and at it a doubt has ended."""
    fixture = EligibilityFixture()
    assert fixture.find().valid_until == math.inf
    fixture.fail(FIRST)
    fixture.fail(SECOND, 1)
    eligible = fixture.find()
    assert fixture.now < eligible.valid_until < math.inf
    fixture.now = math.nextafter(eligible.valid_until, 0.0)
    assert fixture.find() == eligible
    fixture.now = eligible.valid_until
    assert fixture.find() != eligible


def test_a_probe_holds_for_a_single_request():
    """The request after a probe has other endpoints."""
    fixture = EligibilityFixture()
    fixture.fail(FIRST)
    fixture.now += 60.0
    eligible = fixture.find()
    assert addresses(eligible.overdue) == [FIRST]
    assert eligible.valid_until < fixture.now


def test_the_healthiest_endpoints_remain_where_all_fail():
    """Inside a hint or a model: first those doubted, then those ejected, then those out of reach."""
    fixture = EligibilityFixture()
    fixture.fail(FIRST)
    for _ in range(2):
        mark = fixture.store.begin_scrape(fixture.member(SECOND).endpoint)
        fixture.store.scrape_failed(mark, "refused", fixture.now)
    assert fixture.member(SECOND).condition.state is HealthState.DOWN
    assert fixture.eligible_addresses(FIRST, SECOND) == [FIRST]
    assert fixture.eligible_addresses(SECOND) == [SECOND]
    assert aside(fixture.find(FIRST, SECOND)) == {"failing": [SECOND], "least-bad": []}
    for address, model in ((FIRST, "a"), (SECOND, "b"), (THIRD, "b"), (FOURTH, "b")):
        listed = ServedModels(frozenset({model}), frozenset())
        fixture.store.observe_models(fixture.member(address).endpoint, listed)
    eligible = fixture.find(model="a")
    assert addresses(eligible.members) == [FIRST]
    assert len(eligible.excluded_by_model) == 3


def test_an_endpoint_due_for_a_probe_is_to_be_tried_first():
    """After the back-off an endpoint is eligible; unchosen for `base_s`, it is tried before others."""
    fixture = EligibilityFixture()
    fixture.fail(FIRST)
    fixture.fail(SECOND)
    due = fixture.member(FIRST).condition.until
    fixture.now = due
    eligible = fixture.find(FIRST, THIRD, FOURTH)
    assert addresses(eligible.members) == [FIRST, THIRD, FOURTH]
    assert not eligible.overdue
    fixture.now = due + 5.0
    eligible = fixture.find(FIRST, THIRD, FOURTH)
    assert addresses(eligible.members) == [FIRST, THIRD, FOURTH]
    assert addresses(eligible.overdue) == [FIRST]
    assert not fixture.find(THIRD).overdue
    assert not fixture.find(FIRST).overdue, "there is no other"
    fixture.store.record_sent(fixture.member(FIRST).endpoint, fixture.now)
    assert fixture.member(FIRST).condition.state is HealthState.PROBING
    assert fixture.eligible_addresses(FIRST, THIRD, FOURTH) == [THIRD, FOURTH]


IDLE = Load(at=0.0, engine="vllm", waiting=0.0, running=0.0, kv_usage=0.1)
BUSY = Load(at=0.0, engine="vllm", waiting=60.0, running=16.0, kv_usage=0.99)


class ProbeFixture:
    """Endpoints some of which were ejected long ago, and the decision on the next request.

    Args:
        loads: Load of each endpoint by address.
        ejected: Endpoints for which a probe is overdue.
    """

    def __init__(
        self,
        loads: dict[str, Load],
        *,
        ejected: Sequence[str] = (FIRST,),
        profile: SchedulerProfile | None = None,
        busy_s: float | None = None,
        fallbacks: int = 0,
    ) -> None:
        self.pool_fixture = fixture = PoolFixture(dict.fromkeys(loads))
        fixture.director.reconfigure(
            RoutingConfig(
                profile or registry.profiles()["balanced"],
                {},
                RoutingSettings(stale_after_s=60.0, busy_s=busy_s, fallbacks=fallbacks),
                policy=InferencePolicy(priorities={"batch": -1}),
            )
        )
        store = fixture.store
        for address in ejected:
            for _ in range(3):
                store.record_outcome(
                    self.member(address).endpoint,
                    RequestOutcome.FAILED,
                    sent_at=fixture.now,
                    now=fixture.now,
                )
            assert self.member(address).is_ejected
        fixture.now += 20.0
        for address, load in loads.items():
            load = msgspec.structs.replace(load, at=fixture.now)  # noqa: PLW2901
            store.observe(store.begin_scrape(self.member(address).endpoint), load, fixture.now)

    def member(self, address: str) -> EndpointSnapshot:
        member = self.pool_fixture.store.pool.find(address)
        assert member is not None
        return member

    def decide(self, objective: str = "") -> Outcome:
        headers = {":method": "POST", ":path": "/v1/completions"}
        if objective:
            headers["x-llm-d-inference-objective"] = objective
        return self.pool_fixture.decide(HttpRequest(headers, b'{"model": "m", "prompt": "x"}'))

    def decided_addresses(self, objective: str = "") -> list[str]:
        outcome = self.decide(objective)
        assert isinstance(outcome, Decision), outcome
        return [endpoint.address for endpoint in outcome.endpoints]


MAX_WAITING = SchedulerProfile("p", (MaxWaiting(),), (), RandomPicker())


@pytest.mark.parametrize(
    ("profile", "busy_s", "objective"),
    [(None, 0.1, ""), (None, None, "batch"), (MAX_WAITING, None, "")],
    ids=["flow control", "sheddable", "filter"],
)
def test_an_overdue_probe_without_capacity_holds_up_no_request(profile, busy_s, objective):
    """Others serve until the ejected endpoint has capacity; then it gets the next request."""
    loads = {FIRST: BUSY, SECOND: IDLE}
    fixture = ProbeFixture(loads, profile=profile, busy_s=busy_s)
    for _ in range(5):
        assert fixture.decided_addresses(objective) == [SECOND]
    fixture = ProbeFixture({FIRST: IDLE, SECOND: IDLE}, profile=profile, busy_s=busy_s)
    outcome = fixture.decide(objective)
    assert isinstance(outcome, Decision)
    assert outcome.endpoints[0].address == FIRST
    assert [(why, [e.address for e in left]) for why, left in outcome.excluded_by_health] == [
        ("probe", [SECOND])
    ]
    fixture.pool_fixture.director.reserve(outcome, fixture.pool_fixture.now)
    assert fixture.member(FIRST).condition.state is HealthState.PROBING
    assert fixture.decided_addresses(objective) == [SECOND]


def test_a_busy_endpoint_delays_the_probe_of_no_other_endpoint():
    """Of two that are overdue, the one with capacity is probed."""
    loads = {FIRST: BUSY, SECOND: IDLE, THIRD: IDLE, FOURTH: IDLE}
    fixture = ProbeFixture(loads, ejected=(FIRST, SECOND), busy_s=0.1)
    assert fixture.decided_addresses() == [SECOND]


@pytest.mark.parametrize("busy_s", [None, 0.1])
def test_a_probe_has_fallback_endpoints(busy_s):
    """The endpoint that is probed comes first, then the choice among healthy ones, busy ones too."""
    loads = {FIRST: IDLE, SECOND: BUSY, THIRD: IDLE, FOURTH: IDLE}
    fixture = ProbeFixture(loads, ejected=(FIRST, FOURTH), busy_s=busy_s, fallbacks=2)
    chosen, *fallbacks = fixture.decided_addresses()
    assert chosen in {FIRST, FOURTH}
    assert fallbacks == [THIRD, SECOND]
    picker = RandomPicker(max_num_of_endpoints=3)
    profile = SchedulerProfile("p", (), (), picker)
    fixture = ProbeFixture(loads, profile=profile, busy_s=busy_s)
    chosen, *fallbacks = fixture.decided_addresses()
    assert chosen == FIRST
    assert len(fallbacks) == 2
    assert FIRST not in fallbacks


def test_fallbacks_of_a_probe_have_its_rank():
    """A data plane that falls back sends the rank of the first endpoint along."""
    fixture = ProbeFixture({FIRST: IDLE, SECOND: IDLE}, fallbacks=3)
    store, now = fixture.pool_fixture.store, fixture.pool_fixture.now
    ranks = [
        Endpoint(f"{engine}@{index}", rank=DataParallelRank(index, 2, index))
        for engine in (THIRD, FOURTH)
        for index in range(2)
    ]
    store.set_endpoints(ranks, now)
    for _ in range(3):
        endpoint = store.pool.members[1].endpoint
        store.record_outcome(endpoint, RequestOutcome.FAILED, sent_at=now, now=now)
    fixture.pool_fixture.now += 20.0
    assert fixture.decided_addresses() == [f"{THIRD}@1", f"{FOURTH}@1"]


@pytest.mark.parametrize("seed", range(8))
def test_a_healthy_idle_endpoint_always_serves(seed: int):
    """In random pools: a probe goes where there is capacity, and never keeps a request from others."""
    rng = random.Random(seed)
    for _ in range(40):
        loads = {address: rng.choice([IDLE, BUSY]) for address in ADDRESSES}
        ejected = rng.sample(ADDRESSES, rng.randrange(3))
        busy_s, objective = rng.choice([(0.1, ""), (0.1, "batch"), (None, "batch")])
        fixture = ProbeFixture(loads, ejected=ejected, busy_s=busy_s, fallbacks=rng.randrange(3))
        idle = [address for address, load in loads.items() if load is IDLE]
        outcome = fixture.decide(objective)
        assert isinstance(outcome, Decision) is bool(idle), (loads, ejected)
        if isinstance(outcome, Decision):
            free = [address for address in idle if address in ejected] or idle
            assert outcome.endpoints[0].address in free
            named = {endpoint.address for endpoint in outcome.endpoints}
            assert len(named) == len(outcome.endpoints)


@pytest.mark.parametrize(("age", "share"), [(0.0, 0.1), (5.0, 0.55), (9.99, 1.0), (10.0, 1.0)])
def test_slow_start(age: float, share: float):
    """A newcomer is a candidate with probability f + (1 - f) t / T, here 0.1 + 0.9 t / 10."""
    fixture = EligibilityFixture(OutlierDetectionSettings(slow_start_s=10.0))
    newcomer = "10.0.0.9:8000"
    fixture.store.set_endpoints([Endpoint(address) for address in (*ADDRESSES, newcomer)], 100.0)
    fixture.now = 100.0 + age
    tries = 2000
    num_admitted = 0
    for _ in range(tries):
        eligible = fixture.find()
        is_in = newcomer in addresses(eligible.members)
        assert aside(eligible) == ({} if is_in else {"warming": [newcomer]})
        assert len(eligible.members) >= 4
        num_admitted += is_in
    assert num_admitted / tries == pytest.approx(share, abs=0.05)


def test_slow_start_never_excludes_all_endpoints():
    """The only choice is never lost, and those that were there from the start are not eased in."""
    fixture = EligibilityFixture(OutlierDetectionSettings(slow_start_s=10.0, slow_start_floor=0.0))
    newcomer = "10.0.0.9:8000"
    fixture.store.set_endpoints([Endpoint(address) for address in (*ADDRESSES, newcomer)], 100.0)
    fixture.now = 100.0
    for _ in range(50):
        assert fixture.eligible_addresses(newcomer) == [newcomer]
        assert fixture.eligible_addresses() == ADDRESSES


def test_slow_start_leaves_more_than_endpoints_to_probe():
    """A request that cannot be the probe has an endpoint to go to."""
    fixture = EligibilityFixture(OutlierDetectionSettings(slow_start_s=10.0, slow_start_floor=0.0))
    newcomer = "10.0.0.9:8000"
    fixture.fail(FIRST)
    fixture.store.set_endpoints([Endpoint(address) for address in (*ADDRESSES, newcomer)], 100.0)
    fixture.now = 100.0
    eligible = fixture.find(FIRST, newcomer)
    assert addresses(eligible.overdue) == [FIRST]
    assert addresses(eligible.members) == [FIRST, newcomer]


def test_a_readmitted_endpoint_has_slow_start():
    """After an ejection as after coming."""
    fixture = EligibilityFixture(OutlierDetectionSettings(slow_start_s=10.0, slow_start_floor=0.0))
    fixture.fail(FIRST)
    fixture.now = fixture.member(FIRST).condition.until
    endpoint = fixture.member(FIRST).endpoint
    fixture.store.record_sent(endpoint, fixture.now)
    fixture.store.record_outcome(
        endpoint,
        RequestOutcome.SERVED,
        sent_at=fixture.now,
        now=fixture.now,
    )
    assert not fixture.member(FIRST).is_ejected
    assert fixture.eligible_addresses() == [SECOND, THIRD, FOURTH]
    fixture.store.outlier_detector.reconfigure(
        msgspec.structs.replace(fixture.store.outlier_detector.settings, slow_start_s=0.0),
        fixture.now,
    )
    assert fixture.eligible_addresses() == ADDRESSES
