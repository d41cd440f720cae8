import pytest

from extproc.simulator.fleet.engine_node import EngineNode
from extproc.simulator.fleet.event_queue import EventQueue
from tests.simulator import builders
from tests.simulator.fleet.builders import advance, sim_request


class Yard:
    """One engine, and what came of its requests."""

    def __init__(self, **facts):
        self.timeline = EventQueue()
        self.ended, self.gaps = [], []
        defaults = {"block_tokens": 16, "kv_tokens": 1024, "token_budget": 256}
        self.site = EngineNode(
            self.timeline,
            builders.profile(**(defaults | facts)),
            finished=self.ended.append,
            gaps=lambda seconds, count: self.gaps.append((seconds, count)),
        )
        self.site.start()

    def run(self):
        while self.timeline.step():
            pass


def test_a_trip_takes_what_the_machine_takes():
    """First token after one prefill step, the others after decode steps."""
    yard = Yard()
    one = sim_request(prompt=64, output=3)
    yard.site.submit(one)
    yard.run()
    a, b, c, d = builders.A, builders.B, builders.C, builders.D
    assert one.first_s == pytest.approx(a + 64 * b, rel=0.01)
    assert one.took_s == pytest.approx(one.first_s + 2 * (a + c + 65 * d), rel=0.01)
    assert yard.ended == [one]
    assert not one.failure


def test_gaps_are_told_for_every_token_after_the_first():
    """Three tokens have two gaps."""
    yard = Yard()
    yard.site.submit(sim_request(output=3))
    yard.run()
    assert sum(count for _, count in yard.gaps) == 2


def test_a_repeated_prompt_is_found_in_the_cache():
    """All full blocks but the last one's token are cached."""
    yard = Yard()
    for name in ("r1", "r2"):
        yard.site.submit(sim_request(name, prompt=64))
        yard.run()
    assert [one.cached_tokens for one in yard.ended] == [0, 48]


def test_a_restart_empties_the_cache():
    """A new process has computed nothing, and its counters begin again."""
    yard = Yard()
    yard.site.submit(sim_request("r1", prompt=64))
    yard.run()
    assert yard.site.page(yard.timeline.now).counters.finished == 1
    yard.site.stop()
    yard.site.start()
    assert yard.site.page(yard.timeline.now).counters.finished == 0
    yard.site.submit(sim_request("r2", prompt=64))
    yard.run()
    assert yard.ended[-1].cached_tokens == 0


def test_a_dying_engine_fails_everything_in_flight():
    """Each request fails once, and nothing of the dead process happens after."""
    yard = Yard()
    sim_requests = [sim_request(f"r{n}", base=100 * n, output=50) for n in range(12)]
    for one in sim_requests:
        yard.site.submit(one)
    advance(yard.timeline, 0.2)
    yard.site.stop()
    assert sorted(one.id for one in yard.ended) == sorted(one.id for one in sim_requests)
    assert {one.failure for one in sim_requests} == {"engine died"}
    yard.run()
    assert len(yard.ended) == len(sim_requests)
    assert not yard.site.up


def test_a_dead_engine_refuses():
    """A request to a dead engine fails on the next event, not at once."""
    yard = Yard()
    yard.site.stop()
    one = sim_request()
    yard.site.submit(one)
    assert not yard.ended
    yard.run()
    assert yard.ended == [one]
    assert one.failure == "connection refused"


def test_what_never_fits_is_refused():
    """The engine's refusal is the request's failure."""
    yard = Yard()
    one = sim_request(prompt=4096)
    yard.site.submit(one)
    yard.run()
    assert one.failure == "too long"


def test_a_client_that_leaves_makes_room():
    """A cancelled request ends once, and the others go on."""
    yard = Yard()
    one, two = sim_request("r1", base=1, output=400), sim_request("r2", base=100, output=5)
    yard.site.submit(one)
    yard.site.submit(two)
    advance(yard.timeline, 0.03)
    yard.site.cancel(one, "timeout")
    yard.site.cancel(one, "timeout")
    yard.run()
    assert yard.ended == [one, two]
    assert (one.failure, two.failure) == ("timeout", "")
    assert yard.site.engine.running == 0


def test_the_page_says_what_runs():
    """Gauges are of this moment; counters only grow."""
    yard = Yard(max_num_seqs=2)
    for n in range(3):
        yard.site.submit(sim_request(f"r{n}", base=100 * n, output=50))
    advance(yard.timeline, 0.1)
    page = yard.site.page(yard.timeline.now)
    assert (page.running, page.waiting) == (2.0, 1.0)
    assert page.kv_usage > 0
    before = page.counters
    yard.run()
    after = yard.site.page(yard.timeline.now)
    assert (after.running, after.waiting, after.counters.finished) == (0.0, 0.0, 3.0)
    assert after.counters.generated_tokens == 150.0
    assert after.counters.steps > before.steps
