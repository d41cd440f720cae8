"""Pickers in simulations that know what engines publish."""

import msgspec
import pytest

from extproc.scrape.kv_event_subscriber import KvEventsSection
from extproc.simulator.fleet import client, scenario, simulation
from tests.simulator.fleet.builders import a_scenario, conversations, settings, spread_out


def a_run(*, is_exact, **facts):
    """Conversations on three engines with small caches."""
    workload = conversations(60, prompt=spread_out(400), output=spread_out(60))
    small = {"kv_tokens": 8192, "max_model_len": 8192}
    groups = [scenario.EngineGroup(count=3, profile="demo", set=small)]
    definition = a_scenario(workload, fleet=groups, client=client.Client(users=6), **facts)
    chosen = msgspec.structs.replace(
        settings("adaptive"), kv_events=KvEventsSection(enabled=is_exact)
    )
    run = simulation.Simulation(definition, chosen, seed=1)
    run.run()
    return run


def error(run):
    """Share of the prompts' tokens by which predictions and hits differ."""
    requests = [sim_request for sim_request in run.metrics.requests if not sim_request.failure]
    wrong = sum(abs(request.predicted_tokens - request.cached_tokens) for request in requests)
    return wrong / sum(request.work.prompt_tokens for request in requests)


def test_predictions_by_events_are_nearer_to_what_engines_find():
    """An estimate does not know of answers, nor of what is evicted."""
    estimated, exact = error(a_run(is_exact=False)), error(a_run(is_exact=True))
    assert exact < 0.5 * estimated


def test_index_has_what_every_engine_holds():
    """Blocks of all engines, and nothing else."""
    run = a_run(is_exact=True)
    exact = run.pickers[0].parts.exact
    while exact.index.sweep(1_000_000):
        pass
    for member, node in zip(run.pickers[0].parts.store.pool.members, run.nodes, strict=True):
        (engine,) = exact.engines((member.endpoint.address, member.endpoint.incarnation))
        assert sorted(engine.keys) == sorted(node.engine.pool.keys)
        assert engine.is_exact


@pytest.mark.parametrize("noticed_s", [1.0, None])
def test_an_engine_that_dies_is_known_to_be_empty_when_it_is_back(noticed_s):
    """Noticed by discovery, or not."""
    outage = scenario.Outage(engine=1, at_s=5.0, noticed_s=noticed_s, back_s=2.0)
    run = a_run(is_exact=True, outages=[outage])
    exact = run.pickers[0].parts.exact
    for member, node in zip(run.pickers[0].parts.store.pool.members, run.nodes, strict=True):
        (engine,) = exact.engines((member.endpoint.address, member.endpoint.incarnation))
        assert sorted(engine.keys) == sorted(node.engine.pool.keys)
