"""Replicas that come and go, and requests that wait for them."""

import math

import msgspec
import pytest

from extproc.errors import ConfigError
from extproc.simulator.fleet import client, report, scenario, simulation, tables
from extproc.simulator.fleet.scenario import HoldSpec, ScenarioAutoscaling
from tests.simulator.fleet.builders import (
    a_scenario,
    advance,
    exactly,
    independent,
    settings,
    summary,
)

#: Looks every five seconds, and takes the last replica 60 s after the last request.
QUICK = {"idle_s": 60.0}


def scaled(requests=20, *, every_s=1.0, count=2, offered=None, **facts):
    """Requests at equal distances for up to two engines, of which none is there."""
    facts = {"cold_start_s": 30.0, "params": QUICK} | facts
    offered = offered or client.Client(rate_per_s=1 / every_s, evenly=True)
    return a_scenario(
        independent(requests),
        fleet=[scenario.EngineGroup(count=count, profile="demo")],
        client=offered,
        autoscaling=ScenarioAutoscaling(**facts),
    )


def test_the_first_request_waits_for_the_first_replica():
    """It is held for the cold start and answered then."""
    run = summary(scaled(1))
    assert run.failed == {}
    assert run.ttft_s.mean == pytest.approx(30, abs=0.5)


def test_the_last_replica_goes():
    """After the cool-down, and its time is counted from when it was asked for."""
    run = summary(scaled(1))
    assert run.scaling.to_least_s == pytest.approx(60, abs=5)
    assert run.scaling.replica_s == pytest.approx(run.duration_s + run.scaling.to_least_s, abs=0.1)
    assert run.scaling.cold_starts == 1
    assert (run.scaling.spec[-1], run.scaling.available[-1]) == (0, 0)
    assert run.scaling.available[0] == 0


def test_the_same_seed_gives_the_same_numbers():
    """Nothing but the seed is chance."""
    assert summary(scaled(), seed=3) == summary(scaled(), seed=3)


def test_a_hold_has_room_for_so_many():
    """The others are refused at once."""
    run = summary(scaled(20, hold=HoldSpec(requests=5)))
    assert run.failed == {"rejected 503": 15}
    assert run.requests == 5
    assert run.refusals.rejected == 15
    assert run.refusals.latest_s == 0.0


def test_refused_requests_are_told_when_to_try_again():
    """Within the budget, in the pace in which one engine that serves one at a time takes them."""
    budget_s = 60.0
    engine = scenario.EngineGroup(count=1, profile="demo", set={"max_num_seqs": 1})
    definition = scaled(
        60, every_s=0.5, hold=HoldSpec(per_replica=1, requests=6, budget_s=budget_s)
    )
    run = summary(msgspec.structs.replace(definition, fleet=[engine]))
    assert run.refusals.rejected == sum(run.failed.values()) > 0
    assert run.refusals.latest_s <= budget_s
    assert 1 <= run.refusals.retry_after_most_s <= budget_s


def test_a_hold_has_a_budget():
    """A request that has waited that long is refused, and none later than that."""
    run = summary(scaled(20, hold=HoldSpec(budget_s=25.1)))
    # Sent at 0 to 4 s, they would have been answered from 30 s on.
    assert run.failed == {"rejected 503": 5}
    assert max(run.ttft_quantiles_s) <= 25.5


def test_a_client_that_gives_up_waits_no_longer():
    """It leaves the queue; the request is never sent."""
    offered = client.Client(rate_per_s=1.0, evenly=True, timeout_s=10.4)
    run = summary(scaled(40, offered=offered, cold_start_s=30.5))
    # Those of 0 to 20 s.
    assert run.failed == {"timeout": 21}
    assert run.requests == 19


def test_an_abandoned_request_keeps_the_engine_busy():
    """An engine that does not learn of the disconnect computes an answer that is thrown away."""
    fleet = [scenario.EngineGroup(count=1, profile="demo", set={"max_num_seqs": 1})]
    finished = {}
    for abandons in (False, True):
        offered = client.Client(rate_per_s=1.0, evenly=True, timeout_s=4.0, abandons=abandons)
        definition = a_scenario(independent(20, output=exactly(160)), fleet=fleet, client=offered)
        sim_requests = (
            simulation.Simulation(definition, settings("least-request"), seed=1).run().requests
        )
        given_up = [sim_request for sim_request in sim_requests if sim_request.failure == "timeout"]
        finished[abandons] = [
            sim_request for sim_request in given_up if not math.isnan(sim_request.took_s)
        ]
    assert finished[True]
    assert not finished[False]


def test_requests_are_given_out_one_by_one():
    """One at a time for each replica: the first come is the first answered."""
    definition = scaled(10, every_s=0.1, hold=HoldSpec(per_replica=1), start=1)
    metrics = simulation.Simulation(definition, settings("least-request"), seed=1).run()
    ids = [sim_request.id for sim_request in metrics.requests]
    assert ids == [f"r{n}" for n in range(1, 11)]
    begun = [sim_request.sent_at + sim_request.first_s for sim_request in metrics.requests]
    ended = [sim_request.sent_at + sim_request.took_s for sim_request in metrics.requests]
    assert all(begin > end for begin, end in zip(begun[1:], ended, strict=False))


def test_a_replica_has_all_ranks_of_its_engine():
    """They come up together, each takes requests, and they count as a single replica."""
    engines = scenario.EngineGroup(count=2, ranks=3, profile="demo")
    definition = scaled(60, every_s=0.1, start=1)
    run = summary(msgspec.structs.replace(definition, fleet=[engines]), "least-request")
    assert run.failed == {}
    assert run.scaling.most == max(run.scaling.spec) == max(run.scaling.available) == 1
    assert all(rank.requests >= 10 for rank in run.endpoints[:3])
    assert [rank.requests for rank in run.endpoints[3:]] == [0, 0, 0]


def test_a_replica_whose_engine_failed_is_not_available():
    """Requests go to the other one, and to both again once it is back."""
    outage = scenario.Outage(engine=0, at_s=10.0, back_s=20.0)
    definition = scaled(120, every_s=0.5, start=2, min=2)
    definition = msgspec.structs.replace(definition, outages=[outage])
    metrics = simulation.Simulation(definition, settings("round-robin"), seed=1).run()
    nodes = {
        (since_s, request.node)
        for request in metrics.requests
        for since_s, until_s in ((0, 10), (11.1, 30), (31, 60))
        if since_s < request.sent_at < until_s
    }
    assert nodes == {(0, 0), (0, 1), (11.1, 1), (31, 0), (31, 1)}
    scaling = metrics.summary().scaling
    available = dict(zip(scaling.at_s, scaling.available, strict=True))
    assert (available[10.0], available[15.0], available[25.0], available[35.0]) == (2, 1, 1, 2)
    assert set(scaling.spec) == {2}


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_an_outage_starts_no_replica_that_is_not_requested(how):
    """Not one that never was, and not one that was taken away before the outage ended."""
    outages = [
        scenario.Outage(engine=n, at_s=at_s, how=how, noticed_s=None, back_s=200.0)
        for n, at_s in ((1, 1.0), (0, 40.0))
    ]
    definition = scaled(2)
    definition = msgspec.structs.replace(definition, outages=outages)
    run = simulation.Simulation(definition, settings("round-robin"), seed=1)
    metrics = run.run()
    advance(run.timeline, 300.0)
    assert len(metrics.requests) == 2
    assert metrics.summary().scaling.most == 1
    assert [node.up for node in run.nodes] == [False, False]


def test_a_replica_that_leaves_finishes_what_it_has():
    """With no end of patience nothing is lost; without any what runs is."""
    lost = {}
    for grace_s in (None, 0.0):
        definition = scaled(
            400,
            every_s=0.05,
            start=2,
            grace_s=grace_s,
            params={"idle_s": 60.0, "down_s": 0.0, "window_s": 5.0},
        )
        lost[grace_s] = summary(definition).failed.get("engine died", 0)
    assert lost[None] == 0
    assert lost[0.0] > 0


def test_at_least_so_many():
    """The least there may be are there in the end."""
    run = summary(scaled(5, min=1, start=1))
    assert run.ttft_s.mean < 1
    assert run.scaling.to_least_s == 0
    assert run.scaling.mean_available == pytest.approx(1)


def test_the_charts_are_those_of_the_published_page():
    """Depth now and over the window, requests per second over 3 minutes, replicas."""
    run = summary(scaled(300, params={"idle_s": 300.0}))
    charts = run.scaling
    sizes = {
        len(charts.at_s),
        len(charts.depth),
        len(charts.depth_mean),
        len(charts.queries_per_s),
        len(charts.available),
        len(charts.spec),
    }
    assert len(sizes) == 1
    at_250 = charts.at_s.index(250.0)
    assert charts.queries_per_s[at_250] == pytest.approx(1.0, abs=0.02)
    assert max(charts.depth) == pytest.approx(30, abs=2)
    assert max(charts.depth_mean) < max(charts.depth)


def test_results_say_what_replicas_cost():
    """Rows of the table where replicas come and go, and none where they do not."""
    definition = msgspec.structs.replace(scaled(5), strategies=["least-request"], seeds=[1])
    result = report.report(
        definition, [report.Run("least-request", 1, summary(definition, "least-request"))]
    )
    assert result.columns[0].figures["replica_s"].mean > 60
    assert "Replica seconds" in tables.text(result)
    still = a_scenario(strategies=["least-request"], seeds=[1])
    result = report.report(still, [report.Run("least-request", 1, summary(still, "least-request"))])
    assert math.isnan(result.columns[0].figures["replica_s"].mean)
    assert "Replica seconds" not in tables.text(result)


def test_a_variant_has_its_own_policy():
    """In place of the scenario's."""
    own = ScenarioAutoscaling(policy="kubeai", cold_start_s=30.0)
    run = simulation.run(scaled(1), settings("least-request"), seed=1, autoscaling=own)
    assert run.scaling.to_least_s > 600


def test_an_unknown_policy_is_refused():
    """Before anything runs, with the place in the file."""
    with pytest.raises(ConfigError, match="queue-depth"):
        scenario.check(scaled(policy="queue"), where="s.yaml")
    with pytest.raises(ConfigError, match="wait_s"):
        scenario.check(scaled(params={"wait": 1}), where="s.yaml")


def test_a_client_that_keeps_to_its_clock_skips():
    """Requests that find every connection busy are never sent."""
    offered = client.Client(rate_per_s=1.0, evenly=True, concurrency=3, skips=True)
    run = summary(scaled(20, offered=offered))
    assert run.failed == {}
    assert 3 <= run.requests < 20
