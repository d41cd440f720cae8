from __future__ import annotations

import math

import pytest

from extproc.pool.endpoint_health import HealthState, RequestOutcome
from tests.pool.test_outlier_detection import DetectorFixture


def test_unreachable_endpoints_do_not_use_up_the_share():
    """Three of four whose ports are closed are out, and the last one stays."""
    detector = DetectorFixture()
    for incarnation in (1, 2, 3):
        detector.reach(incarnation)
        detector.miss(incarnation, refused=True)
    assert detector.out == {1, 2, 3}
    assert detector.health.condition(1).until == math.inf
    detector.fail(4, 9)
    assert detector.out == {1, 2, 3}


def test_scrape_timeouts_alone_make_endpoints_suspect():
    """Time-outs without a failed request leave out no more than the share."""
    detector = DetectorFixture()
    for incarnation in (1, 2, 3):
        detector.miss(incarnation)
    assert len(detector.out) == 2
    detector.fail(1, 1)
    detector.fail(2, 1)
    detector.fail(3, 1)
    assert detector.out == {1, 2, 3}


def test_served_requests_outweigh_scrapes():
    """If requests are served, scrapes that cannot connect mean a broken metrics port."""
    detector = DetectorFixture()
    detector.miss(1, 1, refused=True)
    detector.serve(1)
    detector.miss(1, 9, refused=True)
    assert not detector.out
    detector.reach(1)
    detector.miss(1, refused=True)
    assert detector.out == {1}


def test_a_scrape_readmits_an_unreachable_endpoint():
    """The first page of one that was out of reach ends it, and what requests held against it."""
    detector = DetectorFixture()
    detector.reach(1)
    detector.fail(1)
    detector.miss(1, refused=True)
    assert detector.state(1) is HealthState.DOWN
    detector.now = 30.0
    detector.reach(1)
    assert (detector.state(1), detector.health.condition(1).since) == (HealthState.HEALTHY, 30.0)


def test_a_response_readmits_an_unreachable_endpoint():
    """One that stood still answers what it got after the first silent scrape, before the next one."""
    detector = DetectorFixture()
    detector.reach(1)
    detector.miss(1, 1)
    detector.now = 1.0
    sent = detector.now
    detector.now = 2.0
    detector.miss(1, 1)
    assert detector.state(1) is HealthState.DOWN
    detector.now = 3.0
    detector.record_outcome(1, RequestOutcome.SERVED, sent_at=sent)
    assert detector.state(1) is HealthState.HEALTHY
    detector.reach(1)
    assert detector.state(1) is HealthState.HEALTHY


def test_a_never_scraped_endpoint_is_probed_by_requests():
    """If scrapes never connected, they may never do: requests find out."""
    detector = DetectorFixture()
    detector.miss(1)
    assert detector.state(1) is HealthState.DOWN
    detector.now = detector.health.condition(1).until
    assert detector.now < 10.0
    detector.health.record_sent(1, detector.now)
    detector.serve(1)
    assert not detector.out
    assert detector.health.probes == {"ok": 1}


@pytest.mark.parametrize("is_served_first", [True, False])
def test_endpoints_out_of_reach_are_probed_where_scrapes_prove_unreliable(*, is_served_first):
    """Scrapes that miss an endpoint that serves may miss others that would serve, too."""
    detector = DetectorFixture()
    for incarnation in (1, 2, 3, 4):
        detector.reach(incarnation)
    detector.miss(3, refused=True)
    detector.miss(1)
    assert detector.out == {1, 3}
    detector.miss(2, 1 if is_served_first else 2)
    assert detector.health.condition(1).until == math.inf
    detector.serve(2)
    if is_served_first:
        detector.miss(2, 1)
    assert detector.out == {1, 3}
    assert detector.health.condition(3).until == math.inf
    detector.now = detector.health.condition(1).until
    assert detector.now < 10.0
    detector.health.record_sent(1, detector.now)
    detector.fail(1, 1)
    assert detector.out == {1, 3}
    detector.now = detector.health.condition(1).until
    assert 10.0 < detector.now < 20.0
    detector.health.record_sent(1, detector.now)
    detector.serve(1)
    assert detector.out == {3}


def test_a_connected_scrape_readmits_a_refused_endpoint():
    """Failed requests to a closed port are forgotten once it is open."""
    detector = DetectorFixture()
    detector.fail(1)
    detector.miss(1, 1, refused=True)
    assert detector.out == {1}
    detector.now = 1.5
    detector.reach(1)
    assert not detector.out
    detector.fail(1)
    detector.reach(1)
    assert detector.out == {1}
