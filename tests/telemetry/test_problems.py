"""Problems in words: each staged fault is named once, the worst first."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from extproc.decision import Rejection
from extproc.endpoint import Endpoint, StepTimeModel
from extproc.pool.endpoint_health import RequestOutcome
from extproc.pool.step_time_values import scaled
from extproc.telemetry import problems
from tests.telemetry.test_traffic_history import FIRST, FOURTH, HistoryFixture


class ProblemFixture(HistoryFixture):
    """The same pool, and the kinds of its problems."""

    def find(self):
        return problems.find_pool_problems("", self.view, self.history, self.now)

    def kinds(self):
        return [(problem.kind, problem.endpoint) for problem in self.find()]

    def fail(self, address):
        for _ in range(3):
            self.store.record_outcome(
                self.store.pool.find(address).endpoint,
                RequestOutcome.FAILED,
                sent_at=self.now,
                now=self.now,
            )


@pytest.fixture
def scene():
    return ProblemFixture()


def test_a_healthy_pool_has_no_problem(scene):
    """Nor has one without traffic."""
    scene.sample()
    scene.sample()
    assert scene.find() == []


def test_an_ejected_endpoint_is_named_with_its_cause(scene):
    """The title has address and cause."""
    scene.fail(FIRST)
    (problem,) = scene.find()
    assert (problem.kind, problem.severity, problem.endpoint) == (
        "endpoint-ejected",
        "critical",
        FIRST,
    )
    assert problem.title == f"{FIRST} is ejected: its requests fail (for 0 s)"


def respond(scene, served, failed, *, address=FIRST):
    """Let an endpoint answer within the last minute."""
    scene.sample()
    scene.pool.record_finished([(address, "200")] * served + [(address, "500")] * failed)
    scene.sample()


def test_an_endpoint_that_fails_some_requests_is_named(scene):
    """Too few to be ejected."""
    respond(scene, 7, 3)
    (problem,) = scene.find()
    assert (problem.kind, problem.severity, problem.endpoint) == (
        "endpoint-errors",
        "critical",
        FIRST,
    )
    assert problem.title == f"{FIRST} fails 3 of 10 requests in the last minute"


@pytest.mark.parametrize(("served", "failed"), [(0, 2), (95, 5)])
def test_few_failed_requests_are_no_problem(scene, served, failed):
    """Two may be chance, and so may be a share of 5 %."""
    respond(scene, served, failed)
    assert scene.find() == []


def test_an_ejected_endpoint_is_named_once(scene):
    """Its ejection is the problem."""
    respond(scene, 0, 5)
    scene.fail(FIRST)
    assert scene.kinds() == [("endpoint-ejected", FIRST)]


def test_a_pool_without_endpoints_is_named(scene):
    """It cannot serve at all."""
    scene.store.set_endpoints([], scene.now)
    assert scene.kinds() == [("no-endpoint", "")]
    for queue, what in ((None, "get 503"), ((3, 30), "wait for one, and get 503 in the end")):
        view = replace(scene.view, queue=queue)
        (problem,) = problems.find_pool_problems("", view, scene.history, scene.now)
        assert problem.advice.endswith(f"; requests {what}.")


def test_a_pool_at_zero_on_purpose_is_a_note(scene):
    """It is an error only while autoscaling wants an engine."""
    scene.store.set_endpoints([], scene.now)
    for desired, kind, severity in (
        (0.0, "scaled-to-zero", "info"),
        (1.0, "no-endpoint", "critical"),
        (None, "no-endpoint", "critical"),
    ):
        (problem,) = problems.find_pool_problems(
            "", scene.view, scene.history, scene.now, desired_replicas=desired
        )
        assert (problem.kind, problem.severity) == (kind, severity)


def test_many_alike_are_counted(scene):
    """A large pool that fails has five lines, not five hundred."""
    addresses = [f"10.1.0.{number}:8000" for number in range(20)]
    scene.cache.update(dict.fromkeys(addresses, (0.0, 0.0)))
    scene.store.set_endpoints([Endpoint(address) for address in addresses], scene.now)
    for address in addresses:
        scene.store.scrape_failed(
            scene.store.begin_scrape(scene.store.pool.find(address).endpoint), "refused", scene.now
        )
        scene.store.scrape_failed(
            scene.store.begin_scrape(scene.store.pool.find(address).endpoint), "refused", scene.now
        )
    first, *others = scene.find()
    assert first.kind == "all-ejected"
    assert len(others) == 5
    assert "15 more" in others[-1].title


def test_metrics_that_cannot_be_read_are_named(scene):
    """With the result of the scrape."""
    token = scene.store.begin_scrape(scene.store.pool.find(FIRST).endpoint)
    scene.store.scrape_failed(token, "http-500", scene.now)
    (problem,) = scene.find()
    assert problem.title == f"Metrics of {FIRST} cannot be used: http-500"


def test_a_slow_endpoint_is_named(scene):
    """Three times as slow as the quicker quarter, or more."""
    scene.sample()
    for address in scene.cache:
        scene.answer(address, 1.0 if address == FOURTH else 0.2)
    scene.sample()
    assert scene.kinds() == [("endpoint-slow", FOURTH)]


def test_an_endpoint_that_computes_slowly_is_named_without_any_traffic(scene):
    """Its learned step times say so where its answers are as early as those of the others."""
    rates = StepTimeModel(evidence=100.0)
    members = tuple(
        replace(member, rates=scaled(rates, 5.0 if member.endpoint.address == FOURTH else 1.0))
        for member in scene.store.pool.members
    )
    view = replace(scene.view, pool=replace(scene.store.pool, members=members))
    (problem,) = problems.find_pool_problems("", view, scene.history, scene.now)
    assert problem.title == f"{FOURTH} computes 5.0 times slower than others like it"


def test_a_cold_cache_is_named(scene):
    """The engine reports fewer cached tokens than half of those predicted."""
    scene.sample()
    scene.cache[FIRST] = (5000.0, 500.0)
    scene.sample()
    (problem,) = scene.find()
    assert problem.title == f"The cache of {FIRST} is cold: it holds 10% of the predicted tokens"


@pytest.mark.parametrize(
    ("cause", "kind", "severity"),
    [
        ("queue-full", "queue-full", "critical"),
        ("queue-timeout", "queue-full", "critical"),
        ("rate-limited", "requests-refused", "warning"),
    ],
)
def test_refusals_are_named_by_cause(scene, cause, kind, severity):
    """Those for lack of capacity are one problem."""
    scene.sample()
    scene.pool.record_rejection(Rejection(429, "no", cause=cause))
    scene.sample()
    assert [(problem.kind, problem.severity) for problem in scene.find()] == [(kind, severity)]


def test_bad_requests_are_no_problem_of_the_picker(scene):
    """A client that sends nonsense is answered, and that is all."""
    scene.sample()
    scene.pool.record_rejection(Rejection(400, "no JSON"))
    scene.sample()
    assert scene.find() == []


def test_problems_of_the_process_are_sorted():
    """Problems that make requests fail come first."""
    listed = problems.find_process_problems(
        is_ready=False,
        reload_error="f.yaml: expected a number",
        needs_restart=("server.host",),
        degraded=("scrape",),
        recording_error="the folder /d is missing or not writable",
    )
    ordered = problems.sort_problems(reversed(listed))
    assert {problem.kind for problem in ordered[:2]} == {"not-ready", "configuration-refused"}
    assert [problem.kind for problem in ordered[2:]] == [
        "recording-failing",
        "loop-failing",
        "restart-needed",
    ]
    nothing = problems.find_process_problems(
        is_ready=True, reload_error="", needs_restart=(), degraded=(), recording_error=""
    )
    assert nothing == []
