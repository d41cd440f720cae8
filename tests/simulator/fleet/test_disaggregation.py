"""Simulated requests whose prompt another engine computes than the one that decodes."""

from __future__ import annotations

import pytest

from extproc.config import loader
from extproc.simulator.fleet import client, scenario, simulation
from tests.simulator.fleet.builders import (
    a_scenario,
    advance,
    conversations,
    independent,
    spread_out,
)

CONFIG = """apiVersion: extproc/v1alpha1
kind: ExtProcConfig
scheduling:
  profile: &decode
    filters: [{kind: decode-filter}]
    cost: {kind: estimated-time}
    picker: {kind: rendezvous}
  disaggregation:
    prefill:
      profile: {filters: [{kind: prefill-filter}], cost: {kind: estimated-time}, picker: {kind: rendezvous}}
      decider: {kind: DECIDER}
"""
FLEET = [
    scenario.EngineGroup(count=2, profile="demo", labels={"llm-d.ai/role": role})
    for role in ("prefill", "decode")
]
PREFILL, DECODE = {0, 1}, {2, 3}


def build(decider="always-disagg-pd-decider", **facts):
    """A simulation of two engines for prefill and two that decode."""
    offered = {
        "workload": conversations(40, prompt=spread_out(300), output=spread_out(40)),
        "fleet": FLEET,
        "client": client.Client(users=12),
    }
    definition = a_scenario(**offered | facts)
    settings = loader.settings(loader.parse(CONFIG.replace("DECIDER", decider), where="x"))
    return simulation.Simulation(definition, settings, seed=1)


def run_to_the_end(run):
    """Everything sent has ended, once, and no account is open."""
    metrics = run.run()
    advance(run.timeline, 60.0)  # what clients left goes on, and pickers exchange the last ends
    assert len({request.id for request in metrics.requests}) == len(metrics.requests)
    assert len(metrics.requests) == run.num_served
    for picker in run.pickers:
        for member in picker.parts.store.pool.members:
            account = member.account
            assert (account.in_flight, account.prompt_tokens, account.adapters) == (0, 0, {})
    return metrics.requests


def test_prompts_are_computed_by_one_engine_and_decoded_by_another():
    """The decoding engines compute no more than the last block of a prompt."""
    run = build()
    requests = run_to_the_end(run)
    assert {(r.node in DECODE, r.prefill_node in PREFILL, r.failure) for r in requests} == {
        (True, True, "")
    }
    computed = [node.page(0.0).counters.prefill_tokens for node in run.nodes]
    prompts = sum(request.work.prompt_tokens for request in requests)
    assert sum(computed[2:]) <= 16 * len(requests)
    assert 0 < sum(computed[:2]) < prompts  # cached prefixes are not computed again
    generated = sum(node.page(0.0).counters.generated_tokens for node in run.nodes[2:])
    assert generated == sum(request.work.output_tokens for request in requests)


def test_the_transfer_takes_its_time():
    """First tokens wait for it."""
    slow = scenario.KvTransfer(latency_s=0.5)
    seconds = [
        min(request.first_s for request in run_to_the_end(build(**facts)))
        for facts in ({}, {"kv_transfer": slow})
    ]
    assert seconds[1] > 0.5 > seconds[0]


def test_a_prompt_is_computed_where_that_is_faster():
    """Idle engines decode and compute themselves; busy ones leave prompts to others."""
    workload = independent(60, prompt=spread_out(1500), output=spread_out(200))
    shares = []
    for users in (1, 40):
        run = build(
            "estimated-time-pd-decider", workload=workload, client=client.Client(users=users)
        )
        requests = run_to_the_end(run)
        shares.append(sum(r.prefill_node >= 0 for r in requests) / len(requests))
    assert shares[0] < 0.2
    assert shares[1] > 0.5


@pytest.mark.parametrize("how", ["dies", "errors"])
def test_where_prefill_fails_the_decoding_engine_computes_the_prompt(how):
    """As behind the sidecar; later prompts go to the other engine."""
    outage = scenario.Outage(engine=0, at_s=2.0, how=how)
    requests = run_to_the_end(build(outages=[outage]))
    assert not [request for request in requests if request.failure]
    assert {r.prefill_node for r in requests if r.sent_at > 3.1} == {1}
    assert [r for r in requests if r.prefill_node == 0 and not r.received_tokens]


@pytest.mark.parametrize("abandons", [False, True])
def test_clients_may_leave_in_every_stage(abandons):
    """Before, during and after the transfer."""
    transfer = scenario.KvTransfer(latency_s=0.3)
    for timeout_s in (0.02, 0.2, 0.5, 1.0):
        impatient = client.Client(users=12, timeout_s=timeout_s, abandons=abandons)
        requests = run_to_the_end(build(client=impatient, kv_transfer=transfer))
        assert {request.failure for request in requests} <= {"", "timeout"}


def test_several_pickers_exchange_both_parts():
    """All accounts end at zero in each of them."""
    picking = scenario.Picking(replicas=3, share_delay_s=0.01)
    requests = run_to_the_end(build(picking=picking))
    assert not [request for request in requests if request.failure]


def test_a_replica_that_computes_prompts_is_drained_before_it_goes():
    """It serves no request itself, and those it works for would wait for ever."""
    fleet = [
        scenario.EngineGroup(count=count, profile="demo", labels={"llm-d.ai/role": role})
        for count, role in ((3, "decode"), (1, "prefill"))
    ]
    run = build(
        fleet=fleet,
        workload=independent(40, prompt=spread_out(9000), output=spread_out(300)),
        client=client.Client(rate_per_s=2.0),
        autoscaling=scenario.ScenarioAutoscaling(cold_start_s=1.0, start=4, min=4),
        until_s=300.0,
    )
    replicas = run._replicas

    def take_one():
        assert run.nodes[3].requests
        replicas._spec = 3
        replicas._match()

    run.timeline.at(4.0, take_one)
    assert not [request for request in run_to_the_end(run) if request.failure]
