import itertools
import random

import pytest

from extproc.simulator.fleet.client import Client, Sender
from extproc.simulator.fleet.event_queue import EventQueue
from extproc.simulator.fleet.sim_request import RequestSpec, SimRequest, SimSession


class Service:
    """Answers every request after a fixed time, and counts."""

    def __init__(self, sessions, *, takes=1.0, adapters=0, fails=(), **client):
        self.timeline = EventQueue()
        self.takes, self.fails = takes, fails
        self.sent, self.ended = [], []
        self.open = self.most = 0
        self.sender = Sender(
            Client(**client),
            iter(sessions),
            adapters=adapters,
            timeline=self.timeline,
            rng=random.Random(5),
            send=self.send,
        )

    def send(self, work):
        sim_request = SimRequest(f"r{len(self.sent)}", work, self.timeline.now)
        self.sent.append(sim_request)
        self.open += 1
        self.most = max(self.most, self.open)
        if sim_request.id in self.fails:
            sim_request.failure = "gone"
        self.timeline.after(self.takes, lambda: self.end(sim_request))
        return sim_request

    def end(self, sim_request):
        self.open -= 1
        self.ended.append((sim_request, self.timeline.now))
        self.sender.finished(sim_request)

    def run(self):
        self.sender.start()
        while not self.sender.is_done and self.timeline.step():
            pass
        assert self.sender.is_done
        return self


def talks(count, turns=1, *, think=0.0, at=None):
    """Sessions of equal turns; the opening says whose turn it is."""
    for n in range(count):
        works = [RequestSpec(16, 1, (1,), opening=f"{n}.{turn}") for turn in range(turns)]
        yield SimSession(works, [think] * (turns - 1), at=None if at is None else at[n])


def test_a_closed_loop_never_exceeds_its_users():
    """Three users have at most three requests open, and ask for everything."""
    service = Service(talks(20, 3), users=3).run()
    assert service.most == 3
    assert len(service.sent) == 60


def test_more_users_than_sessions_are_no_trouble():
    """Users without a session are done at once."""
    assert len(Service(talks(2), users=10).run().sent) == 2


def test_users_begin_over_the_ramp():
    """The last of four users begins at three quarters of it."""
    service = Service(talks(4), users=4, ramp_s=8.0, takes=9.0).run()
    assert [sim_request.sent_at for sim_request in service.sent] == [0.0, 2.0, 4.0, 6.0]


def test_turns_wait_for_the_answer_before():
    """A turn is sent when the last answer came, after turnaround and thought."""
    service = Service(talks(1, 3, think=4.0), users=1, turnaround_s=0.5).run()
    assert [sim_request.sent_at for sim_request in service.sent] == [0.0, 5.5, 11.0]
    assert [sim_request.work.opening for sim_request in service.sent] == ["0.0", "0.1", "0.2"]


def test_poisson_arrivals_come_at_their_rate():
    """5,000 arrivals at 20 per second take about 250 seconds, with random gaps."""
    service = Service(talks(5000), rate_per_s=20.0).run()
    times = [sim_request.sent_at for sim_request in service.sent]
    assert times[-1] == pytest.approx(250, rel=0.05)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(mean, rel=0.05)  # an exponential's deviation is its mean


def test_the_concurrency_limit_holds_and_loses_nobody():
    """At most 5 are open at any moment; the others wait in order and all are sent."""
    service = Service(talks(200), rate_per_s=50.0, concurrency=5).run()
    assert service.most == 5
    assert [sim_request.work.opening for sim_request in service.sent] == [
        f"{n}.0" for n in range(200)
    ]


def test_a_request_that_waited_in_the_client_is_sent_when_it_left():
    """The clock of latency starts when a request leaves the client."""
    service = Service(talks(3, at=[0.0, 0.0, 0.0]), concurrency=1, takes=2.0).run()
    assert [sim_request.sent_at for sim_request in service.sent] == [0.0, 2.0, 4.0]
    assert [sim_request.held_s for sim_request in service.sent] == [0.0, 2.0, 4.0]


def test_sessions_with_times_come_at_those():
    """A trace says when."""
    service = Service(talks(3, at=[0.0, 1.5, 1.75])).run()
    assert [sim_request.sent_at for sim_request in service.sent] == [0.0, 1.5, 1.75]


def test_after_a_failure_a_session_goes_on_later():
    """A user of a dead fleet does not spin."""
    service = Service(talks(1, 2), users=1, fails={"r0"}, retry_after_s=3.0).run()
    assert [sim_request.sent_at for sim_request in service.sent] == [0.0, 4.0]


def test_adapters_go_round_the_users():
    """User n asks for adapter n modulo their number, in every session."""
    service = Service(talks(12), users=3, adapters=2).run()
    assert {sim_request.work.adapter for sim_request in service.sent} == {"adapter-0", "adapter-1"}
    first = [sim_request.work.adapter for sim_request in service.sent[:3]]
    assert first == ["adapter-0", "adapter-1", "adapter-0"]
