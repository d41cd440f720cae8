"""Exclusion for health, probes of excluded endpoints, and slow start of new ones."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
import pytest

from extproc.decision import Decision, Rejection
from extproc.endpoint import Endpoint, ServedModels
from extproc.pool.endpoint_health import HealthState, OutlierDetectionSettings, RequestOutcome
from extproc.pool.snapshot import EndpointSnapshot
from extproc.pool.store import PoolStore
from extproc.request import InferenceRequest
from extproc.routing import eligibility

ADDRESSES = [f"10.0.0.{n}:8000" for n in range(1, 5)]
FIRST, SECOND, THIRD, FOURTH = ADDRESSES


class EligibilityFixture:
    """Four endpoints, a clock by hand, and what is found."""

    def __init__(self, settings: OutlierDetectionSettings = OutlierDetectionSettings()) -> None:  # noqa: B008 - a frozen value
        self.store = PoolStore(on_gone=lambda _: None)
        self.store.outlier_detector.reconfigure(settings)
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
    assert addresses(eligible.members) == [FIRST]
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


def test_an_endpoint_due_for_a_probe_becomes_the_only_candidate():
    """After the back-off an endpoint is eligible; unchosen for `base_s`, it gets the next request."""
    fixture = EligibilityFixture()
    fixture.fail(FIRST)
    due = fixture.member(FIRST).condition.until
    fixture.now = due
    assert fixture.eligible_addresses() == ADDRESSES
    fixture.now = due + 5.0
    eligible = fixture.find()
    assert addresses(eligible.members) == [FIRST]
    assert aside(eligible) == {"probe": [SECOND, THIRD, FOURTH]}
    assert fixture.eligible_addresses(SECOND) == [SECOND]
    fixture.store.record_sent(fixture.member(FIRST).endpoint, fixture.now)
    assert fixture.member(FIRST).condition.state is HealthState.PROBING
    assert fixture.eligible_addresses() == [SECOND, THIRD, FOURTH]


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
        msgspec.structs.replace(fixture.store.outlier_detector.settings, slow_start_s=0.0)
    )
    assert fixture.eligible_addresses() == ADDRESSES
