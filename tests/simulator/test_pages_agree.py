from __future__ import annotations

import msgspec
import pytest

from extproc.endpoint import EngineCounters
from extproc.scrape import metrics_page
from extproc.simulator import core, engine_request, stats
from extproc.simulator.fleet import engine_node, event_queue, sim_request
from extproc.simulator.http import exposition
from tests.simulator.builders import profile

#: Of the counters, what an engine of the virtual world shows; speed is learned from these.
COUNTED = (
    *("steps", "step_tokens", "generated_tokens", "finished"),
    *("reloaded_tokens", "reload_s", "gaps", "gaps_s", "prefill_s", "prefill_tokens"),
    "first_tokens",
)


def works():
    """Prompts that share beginnings, more than fit at once, of two adapters and the base."""
    return [
        sim_request.RequestSpec(
            20 + 7 * (n % 4),
            5 + n % 9,
            range(100 * (n % 3), 100 * (n % 3) + 12),
            adapter=("", "a", "b")[n % 3],
        )
        for n in range(14)
    ]


def served(machine, *, until):
    """The load that a scraper reads from the page of an engine that serves them by HTTP."""
    engine = core.SimulatedEngine(machine)
    counts = stats.Stats(engine)
    for n, work in enumerate(works()):
        new = engine_request.EngineRequest(
            f"r{n}", work.prompt_tokens, work.output_tokens, work.keys, work.adapter
        )
        assert engine.submit(new, 0.0) is None
        if not n:
            engine.begin(0.0)
    while (due := engine.due) is not None and due <= until:
        result = engine.commit(due)
        counts.observe(result, 1e9 + due)
        for _ in result.finished:
            counts.ended("length")
        engine.begin(due)
    shown = exposition.ExpositionPage(
        [counts], exposition.HttpCounts(1e9), model="base", profile=machine, created=1e9
    )
    return metrics_page.read(shown.render(), until)


def simulated(machine, *, until):
    """The load of an engine of the virtual world that serves the same."""
    clock = event_queue.EventQueue()
    node = engine_node.EngineNode(clock, machine, finished=lambda _: None, gaps=lambda *_: None)
    node.start()
    for n, work in enumerate(works()):
        node.submit(sim_request.SimRequest(f"r{n}", work, 0.0))
    clock.at(until, lambda: None)
    while clock.now < until and clock.step():
        pass
    return node.page(until)


@pytest.mark.parametrize("host_kv_tokens", [0, 320])
@pytest.mark.parametrize("until", [0.05, 0.2, 0.6, 100.0])
def test_the_virtual_engine_shows_what_the_served_one_shows(until, host_kv_tokens):
    """In the middle of a load and at its end: the same gauges, counters, adapters and sizes."""
    machine = profile(
        kv_tokens=160, lora_load_s=2**-5, host_kv_tokens=host_kv_tokens, reload_s_per_token=2**-14
    )
    real, virtual = served(machine, until=until), simulated(machine, until=until)
    counted = msgspec.structs.asdict(real.counters)
    counted = EngineCounters(**{name: counted[name] for name in COUNTED})
    assert virtual == msgspec.structs.replace(real, counters=counted, started_at=None)
