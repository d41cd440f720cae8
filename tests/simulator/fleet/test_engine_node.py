import pytest

from extproc.simulator.fleet.engine_node import EngineNode
from extproc.simulator.fleet.event_queue import EventQueue
from tests.simulator import builders
from tests.simulator.fleet.builders import advance, sim_request


class EngineNodeFixture:
    """One engine, and what came of its requests."""

    def __init__(self, **facts):
        self.timeline = EventQueue()
        self.ended, self.gaps = [], []
        defaults = {"block_tokens": 16, "kv_tokens": 1024, "token_budget": 256}
        self.node = EngineNode(
            self.timeline,
            builders.profile(**(defaults | facts)),
            finished=self.ended.append,
            gaps=lambda seconds, count: self.gaps.append((seconds, count)),
        )
        self.node.start()

    def run(self):
        while self.timeline.step():
            pass


def test_a_request_takes_what_the_machine_takes():
    """First token after one prefill step, the others after decode steps."""
    fixture = EngineNodeFixture()
    first = sim_request(prompt=64, output=3)
    fixture.node.submit(first)
    fixture.run()
    a, b, c, d = builders.A, builders.B, builders.C, builders.D
    assert first.first_s == pytest.approx(a + 64 * b, rel=0.01)
    assert first.took_s == pytest.approx(first.first_s + 2 * (a + c + 65 * d), rel=0.01)
    assert fixture.ended == [first]
    assert not first.failure


def test_gaps_are_told_for_every_token_after_the_first():
    """Three tokens have two gaps."""
    fixture = EngineNodeFixture()
    fixture.node.submit(sim_request(output=3))
    fixture.run()
    assert sum(count for _, count in fixture.gaps) == 2


def test_a_repeated_prompt_is_found_in_the_cache():
    """All full blocks but the last one's token are cached."""
    fixture = EngineNodeFixture()
    for name in ("r1", "r2"):
        fixture.node.submit(sim_request(name, prompt=64))
        fixture.run()
    assert [request.cached_tokens for request in fixture.ended] == [0, 48]


def test_a_restart_empties_the_cache():
    """A new process has computed nothing, and its counters begin again."""
    fixture = EngineNodeFixture()
    fixture.node.submit(sim_request("r1", prompt=64))
    fixture.run()
    assert fixture.node.page(fixture.timeline.now).counters.finished == 1
    fixture.node.stop()
    fixture.node.start()
    assert fixture.node.page(fixture.timeline.now).counters.finished == 0
    fixture.node.submit(sim_request("r2", prompt=64))
    fixture.run()
    assert fixture.ended[-1].cached_tokens == 0


def test_a_dying_engine_fails_everything_in_flight():
    """Each request fails once, and nothing of the dead process happens after."""
    fixture = EngineNodeFixture()
    sim_requests = [sim_request(f"r{n}", base=100 * n, output=50) for n in range(12)]
    for request in sim_requests:
        fixture.node.submit(request)
    advance(fixture.timeline, 0.2)
    fixture.node.stop()
    assert sorted(request.id for request in fixture.ended) == sorted(
        request.id for request in sim_requests
    )
    assert {request.failure for request in sim_requests} == {"engine died"}
    fixture.run()
    assert len(fixture.ended) == len(sim_requests)
    assert not fixture.node.up


def test_a_dead_engine_refuses():
    """A request to a dead engine fails on the next event, not at once."""
    fixture = EngineNodeFixture()
    fixture.node.stop()
    first = sim_request()
    fixture.node.submit(first)
    assert not fixture.ended
    fixture.run()
    assert fixture.ended == [first]
    assert first.failure == "connection refused"


def test_what_never_fits_is_refused():
    """The engine's refusal is the request's failure."""
    fixture = EngineNodeFixture()
    first = sim_request(prompt=4096)
    fixture.node.submit(first)
    fixture.run()
    assert first.failure == "too long"


def test_a_client_that_leaves_makes_room():
    """A cancelled request ends once, and the others go on."""
    fixture = EngineNodeFixture()
    first, second = sim_request("r1", base=1, output=400), sim_request("r2", base=100, output=5)
    fixture.node.submit(first)
    fixture.node.submit(second)
    advance(fixture.timeline, 0.03)
    fixture.node.cancel(first, "timeout")
    fixture.node.cancel(first, "timeout")
    fixture.run()
    assert fixture.ended == [first, second]
    assert (first.failure, second.failure) == ("timeout", "")
    assert fixture.node.engine.running == 0


def test_the_page_says_what_runs():
    """Gauges are of this moment; counters only grow."""
    fixture = EngineNodeFixture(max_num_seqs=2)
    for n in range(3):
        fixture.node.submit(sim_request(f"r{n}", base=100 * n, output=50))
    advance(fixture.timeline, 0.1)
    page = fixture.node.page(fixture.timeline.now)
    assert (page.running, page.waiting) == (2.0, 1.0)
    assert page.kv_usage > 0
    before = page.counters
    fixture.run()
    after = fixture.node.page(fixture.timeline.now)
    assert (after.running, after.waiting, after.counters.finished) == (0.0, 0.0, 3.0)
    assert after.counters.generated_tokens == 150.0
    assert after.counters.steps > before.steps
