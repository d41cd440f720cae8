"""Pickers in simulations that know what engines publish."""

import msgspec
import pytest

from extproc.scrape.kv_event_subscriber import KvEventsSection
from extproc.simulator.fleet import client, scenario, simulation
from tests.simulator.fleet.builders import a_scenario, conversations, settings, spread_out

#: Machines that evict what comes again, without a host that holds it, and with one.
SMALL = {"kv_tokens": 4096, "max_model_len": 4000}
HOST = {**SMALL, "host_kv_tokens": 24_576, "reload_s_per_token": 30e-6}


def a_run(*, is_exact, strategy="adaptive", machine=None, users=6, **facts):
    """Conversations on three engines with small caches."""
    workload = conversations(60, prompt=spread_out(400), output=spread_out(60))
    small = {"kv_tokens": 8192, "max_model_len": 8192, **(machine or {})}
    groups = [scenario.EngineGroup(count=3, profile="demo", set=small)]
    definition = a_scenario(workload, fleet=groups, client=client.Client(users=users), **facts)
    chosen = None
    if strategy != scenario.CLAIRVOYANT:
        events = KvEventsSection(enabled=is_exact)
        chosen = msgspec.structs.replace(settings(strategy), kv_events=events)
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


def test_what_hosts_hold_is_known_with_the_time_to_load_it():
    """By events of another medium, and counters of the page: a fifth of the time to compute it."""
    run = a_run(is_exact=True, machine=HOST, users=16)
    exact = run.pickers[0].parts.exact
    while exact.index.sweep(1_000_000):
        pass
    for member, node in zip(run.pickers[0].parts.store.pool.members, run.nodes, strict=True):
        (engine,) = exact.engines((member.endpoint.address, member.endpoint.incarnation))
        assert sorted(engine.keys) == sorted(node.engine.pool.keys)
        assert sorted(engine.lower_keys) == sorted(node.engine.pool.host.keys)
        assert node.engine.reloaded_tokens > 2000
        learned = 1.0 - HOST["reload_s_per_token"] / member.rates.prefill_s
        assert engine.lower_weights[0] == pytest.approx(learned)
        assert engine.lower_weights[0] == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("strategy", ["adaptive", scenario.CLAIRVOYANT])
def test_a_host_that_holds_what_is_evicted_spares_computing_it(strategy):
    """More is found than without it, by the strategy and by the picker that knows everything."""
    without, with_host = (
        a_run(is_exact=True, machine=machine, strategy=strategy, users=12).metrics.summary()
        for machine in (SMALL, HOST)
    )
    assert with_host.hit_ratio > 1.2 * without.hit_ratio
    assert with_host.ttft_s.mean < without.ttft_s.mean
