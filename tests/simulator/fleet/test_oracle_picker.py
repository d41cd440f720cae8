import msgspec
import pytest

from extproc.simulator import profiles
from extproc.simulator.fleet import client, scenario
from extproc.simulator.fleet.engine_node import EngineNode
from extproc.simulator.fleet.event_queue import EventQueue
from extproc.simulator.fleet.oracle_picker import OraclePicker
from tests.simulator.fleet.builders import (
    a_scenario,
    advance,
    conversations,
    sim_request,
    spread_out,
    summary,
)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_knowing_everything_is_never_worse_than_chance(seed):
    """On conversations over three engines it answers sooner than random does."""
    definition = a_scenario(
        conversations(60, prompt=spread_out(200), output=spread_out(40)),
        fleet=[scenario.EngineGroup(count=3, profile="demo")],
        client=client.Client(users=20),
    )
    knows, random = (summary(definition, name, seed=seed) for name in ("clairvoyant", "random"))
    assert knows.ttft_s.mean < random.ttft_s.mean
    assert knows.e2e_s.mean < random.e2e_s.mean
    assert knows.hit_ratio > random.hit_ratio


def test_its_predictions_are_the_truth():
    """The tokens that it predicts are those that the engine finds, with no request in between."""
    definition = a_scenario(conversations(20), client=client.Client(users=1))
    result = summary(definition, "clairvoyant")
    assert result.predicted_ratio == pytest.approx(result.hit_ratio, abs=0.001)


def test_it_uses_the_faster_engine():
    """Alone with two engines of different speed, it takes the fast one for new work."""
    fleet = [
        scenario.EngineGroup(count=1, profile="demo", speed=0.25),
        scenario.EngineGroup(count=1, profile="demo"),
    ]
    result = summary(a_scenario(fleet=fleet, client=client.Client(users=1)), "clairvoyant")
    assert [endpoint.requests for endpoint in result.endpoints] == [0, 40]


def test_it_does_not_send_to_the_dead():
    """It sees at once that an engine is gone, listed or not."""
    outage = scenario.Outage(engine=0, at_s=1.0, noticed_s=None)
    definition = a_scenario(conversations(30), outages=[outage], client=client.Client(users=6))
    assert "connection refused" not in summary(definition, "clairvoyant").failed


def test_it_does_not_send_to_an_engine_that_refuses():
    """It sees that as well; adaptive learns it by the answers."""
    outage = scenario.Outage(engine=0, at_s=1.0, how="errors", noticed_s=None)
    definition = a_scenario(conversations(30), outages=[outage], client=client.Client(users=6))
    assert not summary(definition, "clairvoyant").failed


def test_it_waits_for_adapters_as_little_as_it_must():
    """With more adapters than slots on one engine it keeps each adapter at home."""
    fleet = [
        scenario.EngineGroup(count=2, profile="demo", set={"max_loras": 1, "lora_load_s": 0.5})
    ]
    definition = a_scenario(
        conversations(30, adapters=2), fleet=fleet, client=client.Client(users=6)
    )
    knows, random = (summary(definition, name) for name in ("clairvoyant", "random"))
    assert knows.ttft_s.mean < 0.5 * random.ttft_s.mean


def test_it_counts_no_block_as_room_that_the_request_finds():
    """A prompt of twelve blocks, eight of them cached, has to wait where eleven are free or evictable."""
    timeline = EventQueue()
    machine = msgspec.structs.replace(profiles.find("demo"), kv_tokens=256, max_model_len=256)
    engines = [
        EngineNode(timeline, machine, finished=lambda _: None, gaps=lambda *_: None)
        for _ in range(2)
    ]
    for engine in engines:
        engine.start()
    engines[0].submit(sim_request("first", prompt=128, output=1))
    advance(timeline, 1.0)
    engines[0].submit(sim_request("long", prompt=64, output=100, base=100))
    advance(timeline, 0.05)
    pool = engines[0].engine.pool
    assert (pool.cached, pool.available) == (8, 11)
    picker = OraclePicker(engines)
    picker.listed([0, 1])
    assert picker.pick(sim_request("again", prompt=160, output=1)) == 0
    assert picker.pick(sim_request("more", prompt=192, output=1)) == 1
