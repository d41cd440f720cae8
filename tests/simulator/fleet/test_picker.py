import msgspec
import pytest

from extproc.config.settings import ScrapeSection
from extproc.endpoint import ServedModels
from extproc.scrape import schedule
from extproc.simulator import profiles
from extproc.simulator.fleet.engine_node import EngineNode
from extproc.simulator.fleet.event_queue import EventQueue
from extproc.simulator.fleet.picker import ExtprocPicker
from tests.simulator.fleet.builders import advance, settings, sim_request


class RecordingEngineNode(EngineNode):
    """An engine that notes when its page is read."""

    def page(self, now):
        self.read.append(now)
        return super().page(now)


class PickerFixture:
    """One picker over engines that answer by themselves."""

    def __init__(self, count=2, *, delay_s=0.005, strategy="adaptive", parse_bodies=True, **scrape):
        self.timeline = EventQueue()
        self.nodes = []
        for _ in range(count):
            node = RecordingEngineNode(
                self.timeline,
                profiles.find("demo"),
                finished=self.ended,
                gaps=lambda *_: None,
            )
            node.read = []
            node.start()
            self.nodes.append(node)
        self.picker = ExtprocPicker(
            msgspec.structs.replace(
                settings(strategy),
                seed=1,
                scrape=ScrapeSection(**scrape),
                parse_bodies=parse_bodies,
            ),
            self.nodes,
            timeline=self.timeline,
            delay_s=delay_s,
            models=ServedModels(frozenset({"base"}), frozenset({"adapter-0"})),
        )
        self.picker.listed(range(count))

    def ended(self, request):
        self.picker.ended(request)

    def send(self, request):
        request.node = self.picker.pick(request)
        if request.node >= 0:
            self.nodes[request.node].submit(request)
        return request

    def until(self, when):
        advance(self.timeline, when - self.timeline.now)

    def load(self, n):
        return self.picker.parts.store.pool.members[n].load


def test_idle_endpoints_are_scraped_at_the_slow_beat():
    """About one page every two seconds, spread by a tenth."""
    fixture = PickerFixture(busy_interval_s=0.2, idle_interval_s=2.0)
    fixture.until(schedule.REST_AFTER_S)
    for node in fixture.nodes:
        assert len(node.read) == pytest.approx(15, abs=2)


def test_a_request_ends_the_rest_of_all_endpoints():
    """After half a minute without requests endpoints are scraped half as often, until one comes."""
    fixture = PickerFixture(busy_interval_s=0.2, idle_interval_s=2.0)
    fixture.until(100.0)
    for node in fixture.nodes:
        resting = [at for at in node.read if at > 40.0]
        assert len(resting) == pytest.approx(15, abs=2)
    busy = fixture.send(sim_request(output=700)).node
    fixture.until(102.5)
    assert fixture.nodes[1 - busy].read[-1] > 100.0
    assert len([at for at in fixture.nodes[busy].read if at > 100.0]) >= 8


def test_busy_endpoints_are_scraped_at_the_fast_beat():
    """The engine a long answer comes from is asked every 0.2 s, the other one is not."""
    fixture = PickerFixture(busy_interval_s=0.2, idle_interval_s=2.0)
    fixture.until(1.0)
    busy = fixture.send(sim_request(output=700)).node
    before = len(fixture.nodes[busy].read)
    fixture.until(4.0)
    assert len(fixture.nodes[busy].read) - before >= 10
    assert len(fixture.nodes[1 - busy].read) <= 4


def test_a_page_is_as_old_as_its_delay():
    """A load is stamped with the moment it was true, and known only later."""
    fixture = PickerFixture(count=1, delay_s=0.5)
    while not fixture.nodes[0].read:
        fixture.timeline.step()
    first = fixture.nodes[0].read[0]
    assert fixture.load(0).running is None
    fixture.until(first + 0.5)
    assert fixture.load(0).at == first


@pytest.mark.parametrize(("parse_bodies", "predicted_tokens"), [(True, 1024), (False, 0)])
def test_an_unparsed_prompt_has_no_cached_prefix(parse_bodies, predicted_tokens):
    """As in the server, where requests are known by their headers then."""
    fixture = PickerFixture(count=1, parse_bodies=parse_bodies)
    fixture.until(1.0)
    fixture.send(sim_request("first", prompt=1024))
    fixture.until(5.0)
    again = fixture.send(sim_request("again", prompt=1024, adapter="adapter-0"))
    same = fixture.send(sim_request("same", prompt=1024))
    assert (again.node, same.node) == (0, 0)
    assert same.predicted_tokens == predicted_tokens


def test_a_dead_engine_is_found_out_by_scraping():
    """Refused scrapes mark an endpoint as down, and picks avoid it."""
    fixture = PickerFixture(strategy="round-robin")
    fixture.until(1.0)
    fixture.nodes[0].stop()
    fixture.until(20.0)
    assert fixture.picker.parts.store.pool.down == 1
    assert {fixture.send(sim_request(f"r{n}")).node for n in range(6)} == {1}


@pytest.mark.parametrize("gone_s", [5.0, 60.0])
@pytest.mark.parametrize("strategy", ["round-robin", "adaptive"])
def test_an_engine_that_comes_back_has_traffic_within_two_seconds(gone_s, strategy):
    """However long a scraper was refused, and whatever failed meanwhile."""
    fixture = PickerFixture(strategy=strategy)
    fixture.until(1.0)
    fixture.nodes[0].stop()
    for n in range(6):
        fixture.send(sim_request(f"lost {n}"))
    fixture.until(1.0 + gone_s)
    fixture.nodes[0].start()
    fixture.until(3.1 + gone_s)
    assert 0 in {fixture.send(sim_request(f"r{n}")).node for n in range(12)}


def test_listing_again_does_not_scrape_twice():
    """An endpoint that left and came back has one scrape loop."""
    fixture = PickerFixture(busy_interval_s=0.2, idle_interval_s=2.0)
    fixture.until(1.0)
    for _ in range(10):
        fixture.picker.listed([1])
        fixture.picker.listed([0, 1])
    began = len(fixture.nodes[0].read)
    fixture.until(21.0)
    assert len(fixture.nodes[0].read) - began <= 13


def test_nobody_listed_is_a_rejection():
    """Without endpoints a request is refused, and leaves nothing behind."""
    fixture = PickerFixture()
    fixture.picker.listed([])
    request = fixture.send(sim_request())
    assert (request.node, request.failure) == (-1, "rejected 503")


def test_what_was_routed_is_believed_cached():
    """A repeated prompt is foreseen where it went before, and goes there again."""
    fixture = PickerFixture(count=4)
    fixture.until(1.0)
    first = fixture.send(sim_request("r1", prompt=1600))
    fixture.until(3.0)
    second = fixture.send(sim_request("r2", prompt=1600))
    assert second.node == first.node
    assert 1000 <= second.predicted_tokens <= 1600


def test_accounts_end_at_zero():
    """Every ticket is closed when its request ends."""
    fixture = PickerFixture()
    for n in range(20):
        fixture.send(sim_request(f"r{n}", base=1000 * n))
    members = fixture.picker.parts.store.pool.members
    assert sum(member.account.in_flight for member in members) == 20
    fixture.until(30.0)
    members = fixture.picker.parts.store.pool.members
    assert sum(member.account.in_flight for member in members) == 0


def test_engines_list_their_models_once_they_were_read():
    """The names are known after the first page of an engine, and asked for where settings say so."""
    asking, silent = PickerFixture(), PickerFixture(models=False)
    for fixture in (asking, silent):
        assert {member.models for member in fixture.picker.parts.store.pool.members} == {None}
        fixture.until(1.0)
    listed = ServedModels(frozenset({"base"}), frozenset({"adapter-0"}))
    assert {member.models for member in asking.picker.parts.store.pool.members} == {listed}
    assert asking.picker.parts.store.pool.adapters == {"adapter-0"}
    assert {member.models for member in silent.picker.parts.store.pool.members} == {None}
