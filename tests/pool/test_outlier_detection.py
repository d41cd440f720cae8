from __future__ import annotations

import contextlib
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.pool import endpoint_health
from extproc.pool.endpoint_health import HealthState, OutlierDetectionSettings, RequestOutcome
from extproc.pool.outlier_detection import OutlierDetector

ERRORS = OutlierDetectionSettings(base_s=5.0, cap_s=60.0, window_s=10.0)


class DetectorFixture:
    """Endpoints 1 to n and short words for what happens to them."""

    def __init__(self, size: int = 4, settings: OutlierDetectionSettings = ERRORS) -> None:
        self.health = OutlierDetector(settings, random.Random(1))
        self.now = 0.0
        for incarnation in range(1, size + 1):
            self.health.on_endpoint_added(incarnation, 0.0, late=False)

    def record_outcome(
        self,
        incarnation: int,
        verdict: RequestOutcome,
        sent_at: float | None = None,
        **more: object,
    ) -> None:
        at = self.now if sent_at is None else sent_at
        self.health.record_outcome(incarnation, verdict, sent_at=at, now=self.now, **more)  # type: ignore[arg-type]

    def fail(self, incarnation: int, times: int = 3) -> None:
        for _ in range(times):
            self.record_outcome(incarnation, RequestOutcome.FAILED)

    def serve(self, incarnation: int, times: int = 1) -> None:
        for _ in range(times):
            self.record_outcome(incarnation, RequestOutcome.SERVED)

    def miss(self, incarnation: int, times: int = 2, *, refused: bool = False) -> None:
        for _ in range(times):
            self.health.record_scrape_failure(
                incarnation, self.now, connected=False, refused=refused
            )

    def reach(self, incarnation: int, **facts: bool | None) -> None:
        text: dict[str, bool | None] = {"restarted": False, "moved": None, "idle": True, **facts}
        self.health.record_scrape(incarnation, self.now, **text)  # type: ignore[arg-type]

    def state(self, incarnation: int) -> HealthState:
        return self.health.condition(incarnation).state

    @property
    def out(self) -> set[int]:
        ejected = set()
        for incarnation in range(1, 9):
            with contextlib.suppress(KeyError):  # it left
                if self.state(incarnation) > HealthState.SUSPECT:
                    ejected.add(incarnation)
        return ejected


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ("", RequestOutcome.NO_RESPONSE),
        ("200", RequestOutcome.SERVED),
        ("304", RequestOutcome.SERVED),
        ("400", RequestOutcome.CLIENT_ERROR),
        ("429", RequestOutcome.CLIENT_ERROR),
        ("500", RequestOutcome.FAILED),
        ("501", RequestOutcome.CLIENT_ERROR),
        ("503", RequestOutcome.FAILED),
        ("504", RequestOutcome.FAILED),
    ],
)
def test_statuses_are_classified(status: str, text: RequestOutcome):
    """5xx is a failure, save what tells of the request; 4xx, a full queue among them, is not."""
    assert endpoint_health.classify_status(status) is text


def test_failures_in_a_row_eject():
    """The third failed request in a row ejects; a served one between begins the row again."""
    detector = DetectorFixture()
    detector.fail(1, 2)
    detector.serve(1)
    detector.fail(1, 2)
    assert not detector.out
    detector.fail(1, 1)
    known = detector.health.condition(1)
    assert (known.state, known.cause, known.times) == (HealthState.EJECTED, "errors", 1)
    assert 4.0 <= known.until <= 5.0
    assert detector.health.ejections == {"errors": 1}


def test_a_share_of_failures_ejects_with_the_answer_that_reaches_it():
    """Without any row of failures: of every two requests, one is served."""
    detector = DetectorFixture()
    while not (ejections := detector.health.ejections):
        detector.serve(1)
        detector.fail(1, 1)
    assert (ejections, detector.state(1)) == ({"errors": 1}, HealthState.EJECTED)


def test_a_single_failure_makes_an_endpoint_suspect():
    """Others come first for a second, until the next request is served, or one is sent after it."""
    detector = DetectorFixture()
    detector.fail(1, 1)
    known = detector.health.condition(1)
    assert (known.state, known.until) == (HealthState.SUSPECT, 1.0)
    detector.record_outcome(1, RequestOutcome.SERVED, sent_at=-1.0)
    assert detector.state(1) is HealthState.HEALTHY
    detector.fail(1, 1)
    detector.now = 1.5
    detector.health.record_sent(1, 1.5)
    assert detector.state(1) is HealthState.HEALTHY
    assert detector.health.ejections == {}


def test_suspects_stay_within_the_ejection_share():
    """While half of the pool is out or doubted, a further failure changes nothing."""
    detector = DetectorFixture()
    for incarnation in (1, 2, 3, 4):
        detector.fail(incarnation, 1)
    assert [detector.state(incarnation) for incarnation in (1, 2, 3, 4)] == [
        *(HealthState.SUSPECT, HealthState.SUSPECT),
        *(HealthState.HEALTHY, HealthState.HEALTHY),
    ]


def test_a_suspicion_that_is_over_leaves_room_for_another():
    """An idle endpoint that failed once long ago hides no other failure."""
    detector = DetectorFixture()
    detector.fail(1, 1)
    detector.fail(2, 1)
    detector.now = 3600.0
    detector.fail(3, 1)
    assert detector.state(3) is HealthState.SUSPECT


def test_client_errors_do_not_change_health():
    """4xx and 429 between failures change nothing."""
    detector = DetectorFixture()
    for _ in range(3):
        detector.record_outcome(1, RequestOutcome.CLIENT_ERROR)
        detector.fail(1, 1)
    assert detector.out == {1}


def test_a_failure_share_ejects_without_consecutive_failures():
    """Half of the requests failing is enough once there were eight; a tenth is not."""
    detector = DetectorFixture()
    for at in range(60):
        detector.now = at / 10
        (detector.fail if at % 10 == 0 else detector.serve)(2, 1)
        if not detector.out:
            (detector.fail if at % 2 == 0 else detector.serve)(1, 1)
    assert detector.out == {1}


def test_old_failures_decay():
    """Two failures a minute ago and many served requests since leave nothing to hold."""
    detector = DetectorFixture()
    for minute in range(20):
        detector.now = minute * 60.0
        detector.fail(1, 2)
        detector.serve(1)
    assert not detector.out


def test_a_served_probe_readmits():
    """After the back-off one request tries it; served, it takes part again from that moment."""
    detector = DetectorFixture()
    detector.fail(1)
    detector.now = detector.health.condition(1).until
    detector.health.record_sent(1, detector.now)
    assert detector.state(1) is HealthState.PROBING
    detector.now += 0.5
    detector.record_outcome(1, RequestOutcome.SERVED, sent_at=detector.now - 0.5)
    assert detector.state(1) is HealthState.HEALTHY
    assert detector.health.condition(1).since == detector.now
    assert detector.health.probes == {"ok": 1}
    detector.fail(1, 2)
    assert not detector.out


def test_ejection_time_doubles_up_to_a_bound():
    """5, 10, 20, 40, 60, 60 seconds, each up to a fifth shorter by chance."""
    detector = DetectorFixture()
    detector.fail(1)
    waits = []
    for _ in range(6):
        until = detector.health.condition(1).until
        waits.append(until - detector.now)
        detector.now = until
        detector.health.record_sent(1, until)
        detector.fail(1, 1)
    for wait, complete in zip(waits, (5, 10, 20, 40, 60, 60), strict=True):
        assert 0.8 * complete <= wait <= complete
    assert detector.health.probes == {"failed": 6}


def test_requests_sent_before_the_ejection_do_not_count():
    """Answers to earlier requests neither bring back nor put the next try off."""
    detector = DetectorFixture()
    detector.now = 1.0
    detector.fail(1)
    before = detector.health.condition(1)
    detector.now = 2.0
    detector.record_outcome(1, RequestOutcome.FAILED, sent_at=0.5)
    detector.record_outcome(1, RequestOutcome.SERVED, sent_at=0.5)
    assert detector.health.condition(1) == before


def test_requests_sent_before_it_came_back_do_not_count():
    """Requests to the process before it, or earlier probes, may fail late."""
    detector = DetectorFixture()
    detector.fail(1)
    detector.now = 1.0
    detector.reach(1, restarted=True)
    back = detector.health.condition(1)
    detector.now = 2.0
    for _ in range(3):
        detector.record_outcome(1, RequestOutcome.FAILED, sent_at=0.5)
    assert detector.health.condition(1) == back
    detector.fail(1)
    assert detector.out == {1}


def test_requests_to_the_process_before_a_restart_do_not_count():
    """Also of an endpoint that was not ejected."""
    detector = DetectorFixture()
    detector.now = 1.0
    detector.reach(1, restarted=True)
    detector.now = 2.0
    for _ in range(3):
        detector.record_outcome(1, RequestOutcome.FAILED, sent_at=0.5)
    assert detector.state(1) is HealthState.HEALTHY
    detector.fail(1)
    assert detector.out == {1}


@pytest.mark.parametrize("text", [RequestOutcome.CLIENT_ERROR, RequestOutcome.NO_RESPONSE])
def test_an_unanswered_probe_allows_another_probe(text: RequestOutcome):
    """A probe that is refused, or whose client leaves, is followed by another at once."""
    detector = DetectorFixture()
    detector.fail(1)
    detector.now = 10.0
    detector.health.record_sent(1, 10.0)
    detector.now = 11.0
    detector.record_outcome(1, text, sent_at=10.0)
    assert detector.health.condition(1).until == 11.0
    assert detector.health.probes == {"unclear": 1}


def test_ejections_stay_within_the_share():
    """Of four failing endpoints two are out; of two one; the only one never."""
    for size, most in ((4, 2), (3, 1), (2, 1), (1, 0)):
        detector = DetectorFixture(size)
        for incarnation in range(1, size + 1):
            detector.fail(incarnation, 3 * incarnation)
        assert len(detector.out) == most


def test_endpoints_with_the_fewest_failures_stay():
    """When the share is used up, one that fails on takes the place of one that failed less."""
    detector = DetectorFixture(2)
    detector.fail(1)
    detector.fail(2, 6)
    assert detector.out == {2}


def test_responses_of_other_endpoints_do_not_clear_a_failure():
    """An answer that another endpoint may have given does not reset failures."""
    detector = DetectorFixture()
    detector.miss(1, 1, refused=True)
    detector.record_outcome(1, RequestOutcome.SERVED, sole=False)
    detector.miss(1, 1, refused=True)
    assert detector.out == {1}


def test_a_restart_ends_an_ejection():
    """Another process has done nothing wrong yet."""
    detector = DetectorFixture()
    detector.fail(1)
    detector.reach(1, restarted=True)
    assert not detector.out


def test_a_stalled_engine_is_ejected():
    """Work, no answers and still counters for 15 s eject; it stays so until it moves."""
    detector = DetectorFixture()
    for at in range(0, 40, 2):
        detector.now = float(at)
        detector.reach(1, moved=False, idle=False)
        assert bool(detector.out) == (at >= 15)
    assert detector.health.condition(1).cause == "hung"
    detector.now = 100.0
    detector.reach(1, moved=False, idle=False)
    assert detector.health.condition(1).until > 100.0
    detector.reach(1, moved=True, idle=False)
    assert not detector.out


def test_an_idle_or_answering_engine_is_not_stalled():
    """Standing still is no fault with nothing to do, nor while answers begin."""
    detector = DetectorFixture()
    for at in range(0, 100, 2):
        detector.now = float(at)
        detector.reach(1, moved=False, idle=True)
        detector.reach(2, moved=False, idle=False)
        detector.reach(3, moved=None, idle=False)
        detector.serve(2)
    assert not detector.out


def test_client_disconnects_count_only_after_a_long_silence():
    """Three clients that waited 30 s without a sign of life eject; three in a hurry do not."""
    detector = DetectorFixture()
    detector.now = 40.0
    for _ in range(3):
        detector.record_outcome(1, RequestOutcome.NO_RESPONSE, sent_at=39.0)
        detector.record_outcome(2, RequestOutcome.NO_RESPONSE, sent_at=5.0)
    assert detector.out == {2}


def test_disabled_detection_ejects_nothing():
    """With `failures: 0` requests and silence eject no endpoint; a closed port still does."""
    detector = DetectorFixture(settings=OutlierDetectionSettings(failures=0))
    detector.fail(1, 50)
    for at in range(0, 100, 2):
        detector.now = float(at)
        detector.reach(2, moved=False, idle=False)
    detector.miss(3, refused=True)
    assert detector.out == {3}


def test_settings_may_change():
    """New settings hold from the next evidence on."""
    detector = DetectorFixture()
    detector.fail(1, 2)
    detector.health.settings = msgspec.structs.replace(ERRORS, failures=2)
    detector.fail(2, 2)
    assert detector.out == {2}


events = st.lists(
    st.tuples(
        st.integers(1, 5),
        st.sampled_from(["fail", "serve", "left", "miss", "refuse", "reach", "send", "leave"]),
        st.floats(0.0, 20.0),
    ),
    max_size=60,
)


@given(events, st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_at_least_one_endpoint_stays(happened: list[tuple[int, str, float]], share: float):
    """Those out without being surely gone never exceed the share, and one of the rest stays.

    An endpoint that is down is out of reach, for nothing but a scrape or an answer would bring it back.
    """
    detector = DetectorFixture(5, msgspec.structs.replace(ERRORS, max_ejection_share=share))
    here = {1, 2, 3, 4, 5}
    for incarnation, what, seconds in happened:
        detector.now += seconds
        if incarnation not in here:
            continue
        match what:
            case "fail":
                detector.record_outcome(
                    incarnation, RequestOutcome.FAILED, sent_at=detector.now - seconds / 2
                )
            case "serve":
                detector.record_outcome(
                    incarnation, RequestOutcome.SERVED, sent_at=detector.now - seconds / 2
                )
            case "left":
                detector.record_outcome(
                    incarnation, RequestOutcome.NO_RESPONSE, sent_at=detector.now - 31.0
                )
            case "miss":
                detector.miss(incarnation, 1)
            case "refuse":
                detector.miss(incarnation, 1, refused=True)
            case "reach":
                detector.reach(incarnation, moved=seconds > 10.0, idle=seconds < 3.0)
            case "send":
                detector.health.record_sent(incarnation, detector.now)
            case _:
                detector.health.on_endpoint_removed(incarnation)
                detector.health.update_ejections(detector.now)
                here.discard(incarnation)
    records = detector.health._records
    certain = {incarnation for incarnation in here if records[incarnation].certain}
    doubtful = detector.out - certain
    rest = len(here) - len(certain)
    assert len(doubtful) <= max(0, min(int(share * rest), rest - 1))
    down = {incarnation for incarnation in here if detector.state(incarnation) is HealthState.DOWN}
    assert all(records[incarnation].unreachable for incarnation in down)
