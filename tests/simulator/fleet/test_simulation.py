import textwrap

import msgspec
import pytest

from extproc.simulator import fleet
from extproc.simulator.fleet import client, scenario, simulation, workloads
from tests.simulator.fleet.builders import (
    a_scenario,
    a_simulation,
    conversations,
    exactly,
    independent,
    settings,
    spread_out,
    summary,
)

FLEET = [scenario.EngineGroup(count=3, profile="demo")]


def lively(**facts):
    """Conversations of varying length on three engines."""
    workload = conversations(40, prompt=spread_out(150), output=spread_out(40))
    return a_scenario(workload, **{"fleet": FLEET, "client": client.Client(users=12)} | facts)


@pytest.mark.parametrize("strategy", ["adaptive", "random", "prefix-hash", "clairvoyant"])
def test_the_same_seed_gives_the_same_numbers(strategy):
    """All chance comes from the seed."""
    assert summary(lively(), strategy, seed=3) == summary(lively(), strategy, seed=3)
    assert summary(lively(), strategy, seed=3) != summary(lively(), strategy, seed=4)


def test_every_strategy_meets_the_same_requests():
    """Requests do not depend on the endpoints that are picked."""
    requests = []
    for strategy in ("random", "round-robin", "clairvoyant"):
        sim_requests = a_simulation(lively(), strategy, seed=5).run().requests
        requests.append(sorted((t.work.opening, t.work.prompt_tokens) for t in sim_requests))
    assert requests[0] == requests[1] == requests[2]
    assert len(requests[0]) == 160


def lost_nothing(run):
    """Run a world; everything sent has ended, and no account is open."""
    metrics = run.run()
    done = [sim_request for sim_request in metrics.requests if not sim_request.failure]
    failed = [sim_request for sim_request in metrics.requests if sim_request.failure]
    assert len({sim_request.id for sim_request in metrics.requests}) == len(metrics.requests)
    assert len(done) + len(failed) == run.num_served
    for picker in run.pickers:
        for member in picker.parts.store.pool.members:
            assert member.account.in_flight == 0
            assert member.account.prompt_tokens == 0
    return metrics


def test_several_pickers_share_the_requests():
    """Each gets its part, none knows of the others, and all accounts end at zero."""
    definition = lively(picking=scenario.Picking(replicas=3))
    run = a_simulation(definition)
    lost_nothing(run)
    opened = [
        sum(member.account.opened for member in picker.parts.store.pool.members)
        for picker in run.pickers
    ]
    assert sum(opened) == 160
    assert min(opened) > 30


@pytest.mark.parametrize("noticed_s", [1.0, None])
@pytest.mark.parametrize("back_s", [4.0, None])
def test_outages_lose_nothing(noticed_s, back_s):
    """Requests in flight fail, later ones go elsewhere, and all of them end."""
    outage = scenario.Outage(engine=1, at_s=2.0, noticed_s=noticed_s, back_s=back_s)
    metrics = lost_nothing(a_simulation(lively(outages=[outage])))
    failures = metrics.summary().failed
    assert failures["engine died"] >= 1
    assert set(failures) <= {"engine died", "connection refused"}


def test_an_outage_is_of_an_engine_with_all_its_ranks():
    """Engines are counted, not ranks; those of another engine go on."""
    outage = scenario.Outage(engine=1, at_s=2.0)
    fleet = [scenario.EngineGroup(count=2, ranks=3, profile="demo")]
    run = a_simulation(lively(fleet=fleet, outages=[outage]))
    metrics = lost_nothing(run)
    assert [node.up for node in run.nodes] == [True] * 3 + [False] * 3
    assert {request.node for request in metrics.requests if request.failure} <= {3, 4, 5}
    assert {request.node for request in metrics.requests if request.sent_at > 3.1} == {0, 1, 2}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (scenario.Outage(engine=1, at_s=1.0, how="slows", back_s=4.0), "dies"),
        (scenario.Outage(engine=1, at_s=1.0, how="hangs", back_s=4.0), "dies"),
        (scenario.Outage(engine=1, at_s=1.0, how="slows", back_s=4.0), "errors"),
    ],
)
def test_the_end_of_an_outage_ends_no_other(first, second):
    """An engine with two outages serves nothing until both are over."""
    later = scenario.Outage(engine=1, at_s=3.0, how=second, back_s=7.0)
    offered = client.Client(users=12, timeout_s=20.0)
    run = a_simulation(lively(outages=[first, later], client=offered), "round-robin")
    metrics = lost_nothing(run)
    sent = [request for request in metrics.requests if request.node == 1]
    assert not [request for request in sent if 4.1 < request.sent_at < 10.0]
    assert [request for request in sent if request.sent_at > 10.0 and not request.failure]


def test_an_engine_that_is_not_up_has_no_outage():
    """One that comes up later does so at its own time, and stays."""
    fleet = [
        scenario.EngineGroup(count=2, profile="demo"),
        scenario.EngineGroup(count=1, profile="demo", ready_s=6.0),
    ]
    outage = scenario.Outage(engine=2, at_s=1.0, back_s=2.0)
    metrics = lost_nothing(a_simulation(lively(fleet=fleet, outages=[outage]), "round-robin"))
    assert not metrics.summary().failed
    assert min(request.sent_at for request in metrics.requests if request.node == 2) >= 6.0


def test_requests_that_are_open_at_the_end_failed():
    """An engine that hangs unnoticed answers none, and clients without a timeout wait on."""
    outage = scenario.Outage(engine=0, at_s=2.0, how="hangs", noticed_s=None)
    run = a_simulation(lively(outages=[outage], until_s=100.0), "round-robin")
    figures = run.run().summary()
    assert not run.is_complete
    assert figures.failed["unfinished"] >= 10
    assert figures.requests + figures.failed["unfinished"] == run.num_served


def test_an_engine_that_came_back_serves_again():
    """After it is back it gets requests, with an empty cache at first."""
    outage = scenario.Outage(engine=0, at_s=1.0, back_s=3.0)
    metrics = a_simulation(lively(outages=[outage]), "round-robin").run()
    later = [t for t in metrics.requests if t.node == 0 and t.sent_at > 4.1 and not t.failure]
    assert later


def test_a_fleet_that_is_gone_rejects():
    """Users go on trying, at their own pace, and every request is answered for."""
    outages = [scenario.Outage(engine=n, at_s=1.0, noticed_s=0.5) for n in range(3)]
    failures = lost_nothing(a_simulation(lively(outages=outages))).summary().failed
    assert failures["rejected 503"] > 50


def test_engines_come_up_when_they_are_ready():
    """A cold engine gets nothing before its time."""
    fleet = [
        scenario.EngineGroup(count=1, profile="demo"),
        scenario.EngineGroup(count=1, profile="demo", ready_s=5.0),
    ]
    definition = msgspec.structs.replace(lively(), fleet=fleet)
    sim_requests = a_simulation(definition, "round-robin").run().requests
    first = min(sim_request.sent_at for sim_request in sim_requests if sim_request.node == 1)
    assert 5.0 <= first < 6.0


def test_clients_give_up():
    """A request that takes too long is cancelled in the engine, and counted as failed."""
    definition = a_scenario(
        independent(20, output=exactly(500)), client=client.Client(users=2, timeout_s=1.0)
    )
    run = a_simulation(definition)
    assert lost_nothing(run).summary().failed == {"timeout": 20}
    assert all(node.engine.running == 0 for node in run.nodes)


def test_a_slower_engine_is_slower():
    """Speed divides every time."""
    alone = a_scenario(client=client.Client(users=1))
    fast, slow = (
        summary(
            msgspec.structs.replace(
                alone, fleet=[scenario.EngineGroup(count=1, profile="demo", speed=speed)]
            )
        )
        for speed in (1.0, 0.5)
    )
    assert slow.ttft_s.mean == pytest.approx(2 * fast.ttft_s.mean, rel=0.01)
    assert slow.tpot_s.mean == pytest.approx(2 * fast.tpot_s.mean, rel=0.01)


def test_what_was_sent_before_the_measurement_is_left_out():
    """Only the second half of the arrivals is counted."""
    busy = client.Client(rate_per_s=10.0)
    all_of_it = summary(a_scenario(independent(200), client=busy))
    half = summary(a_scenario(independent(200), client=busy, measure_from_s=10.0))
    assert all_of_it.requests == 200
    assert 70 < half.requests < 130


def test_a_run_ends_at_its_bound():
    """A scenario that would go on is cut off."""
    run = a_simulation(a_scenario(independent(10_000), until_s=2.0))
    run.run()
    assert run.timeline.now == pytest.approx(2.0, abs=0.5)


def test_adapters_are_loaded_and_shared():
    """Requests name adapters, and engines have them resident."""
    definition = a_scenario(independent(60, adapters=3), client=client.Client(users=6))
    run = a_simulation(definition)
    sim_requests = run.run().requests
    assert {sim_request.work.adapter for sim_request in sim_requests} == {
        f"adapter-{n}" for n in range(3)
    }
    assert {name for node in run.nodes for name in node.engine.slots.resident} == {
        f"adapter-{n}" for n in range(3)
    }


def test_a_trace_is_run_at_its_times():
    """Arrivals are the trace's."""
    rows = [
        f'{{"timestamp": {500 * n}, "input_length": 600, "output_length": 5, "hash_ids": [1, {n}]}}'
        for n in range(2, 8)
    ]
    definition = a_scenario(
        workloads.TraceWorkload(format="mooncake", file="t", rate_scale=0.5), client=client.Client()
    )
    sim_requests = a_simulation(definition, rows=rows).run().requests
    assert sorted(sim_request.sent_at for sim_request in sim_requests) == [
        0.0,
        1.0,
        2.0,
        3.0,
        4.0,
        5.0,
    ]


def test_the_scenario_says_how_often_engines_are_scraped():
    """A fixed interval is not stretched by the number of engines, and loads do not go stale."""
    definition = a_scenario(picking=scenario.Picking(scrape_s=5.0))
    adjusted = simulation.adjusted(settings(), definition, seed=1).scrape
    assert (adjusted.busy_interval_s, adjusted.idle_interval_s) == (5.0, 5.0)
    assert adjusted.stale_after_s >= 15.0
    assert adjusted.max_scrapes_per_s >= 1e6


def test_run_is_a_simulation_run_to_its_end():
    """The short form gives the same numbers."""
    assert simulation.run(lively(), settings(), seed=1) == summary(lively())


def test_the_example_of_the_package_runs(capsys):
    """The example of the package's docstring runs."""
    text = fleet.__doc__.partition("From Python:\n")[2].partition("`simulation.Simulation")[0]
    exec(textwrap.dedent(text), {})
    assert len(capsys.readouterr().out.split()) == 2


@pytest.mark.parametrize("how", ["errors", "hangs"])
def test_engines_that_fail_otherwise(how):
    """Failing fast or hanging, an engine is left out, comes back, and all requests end."""
    outage = scenario.Outage(engine=0, at_s=1.0, how=how, noticed_s=None, back_s=30.0)
    run = a_simulation(lively(outages=[outage]), "least-request")
    metrics = lost_nothing(run)
    health = run.pickers[0].parts.store.outlier_detector
    failed = metrics.summary().failed
    if how == "errors":
        assert health.ejections["errors"] >= 1
        assert failed["answered 503"] <= 3 + sum(health.probes.values()) + 8
    else:
        assert health.ejections == {"hung": 1}
        assert set(failed) <= {"engine died"}


def test_an_engine_that_was_slow_gets_requests_again():
    """While it is slow hardly any; once it is as quick as the others, its share, as before."""
    outage = scenario.Outage(engine=1, at_s=40.0, how="slows", back_s=60.0)
    four = [scenario.EngineGroup(count=4, profile="l4-8b-fp8")]
    workload = independent(1400, prompt=spread_out(400), output=spread_out(60))
    definition = a_scenario(
        workload, fleet=four, client=client.Client(rate_per_s=4), outages=[outage]
    )
    sent = lost_nothing(a_simulation(definition)).requests

    def share(since_s, until_s):
        nodes = [request.node for request in sent if since_s <= request.sent_at < until_s]
        return nodes.count(1) / len(nodes)

    assert share(0.0, 40.0) > 0.15
    assert share(60.0, 100.0) < 0.08
    assert share(250.0, 350.0) > 0.15


def count_by_engine(definition, *, since_s):
    """Requests of each engine that were sent from a time on."""
    sent = lost_nothing(a_simulation(definition)).requests
    nodes = [request.node for request in sent if request.sent_at >= since_s]
    return [nodes.count(n) for n in range(sum(group.count for group in definition.fleet))]


def test_a_slow_engine_that_shows_nothing_gets_few_requests():
    """Without a page, how long its answers take says that it has a quarter of the others' speed."""
    fleet = [
        scenario.EngineGroup(count=2, profile="l4-8b-fp8"),
        scenario.EngineGroup(count=1, profile="l4-8b-fp8", speed=0.25, has_metrics=False),
    ]
    workload = independent(300, prompt=spread_out(300), output=spread_out(60))
    definition = a_scenario(workload, fleet=fleet, client=client.Client(rate_per_s=1.0))
    *_, slow = counts = count_by_engine(definition, since_s=60.0)
    assert slow < 0.05 * sum(counts)


def test_equal_engines_share_the_requests_of_one_prompt():
    """A prefix that all requests begin with is copied, also where no engine has much to do."""
    workload = conversations(1600, turns=exactly(1), prompt=spread_out(400), output=spread_out(60))
    four = [scenario.EngineGroup(count=4, profile="l4-8b-fp8")]
    definition = a_scenario(workload, fleet=four, client=client.Client(rate_per_s=4.0))
    counts = count_by_engine(definition, since_s=200.0)
    assert min(counts) > 0.2 * sum(counts)


@pytest.mark.parametrize("delay_s", [None, 0.0, 0.005])
def test_pickers_that_talk_know_of_each_other_and_forget_what_ended(delay_s):
    """Requests of others are in the accounts while they are open, and only where pickers talk."""
    talking = scenario.Picking(replicas=2, share_delay_s=delay_s)
    run = a_simulation(lively(picking=talking), "adaptive")
    accounts, most = [], 0

    def look():
        nonlocal most
        accounts[:] = [m.account for p in run.pickers for m in p.parts.store.pool.members]
        assert all(0 <= account.from_peers <= account.in_flight for account in accounts)
        most = max(most, sum(account.from_peers for account in accounts))
        if not run.is_complete:
            run.timeline.after(0.05, look)

    run.timeline.after(0.05, look)
    run.run()
    synced_s = run.timeline.now + 0.1
    while run.timeline.now < synced_s and run.timeline.step():
        pass
    assert (most > 0) == (delay_s is not None)
    assert sum(account.in_flight for account in accounts) == 0


def test_engines_without_a_metrics_page_are_served_all_the_same():
    """No page is no outage: requests go to such engines, and nothing is known of their load."""
    fleet = [scenario.EngineGroup(count=2, profile="demo", has_metrics=False)]
    run = a_simulation(a_scenario(independent(40), fleet=fleet))
    figures = run.run().summary()
    assert figures.requests == 40
    assert min(endpoint.requests for endpoint in figures.endpoints) >= 10
    members = run.pickers[0].parts.store.pool.members
    assert [member.load.running for member in members] == [None, None]
    assert not any(member.failures for member in members)


def test_pickers_that_restart_know_engines_by_their_pages():
    """New ones lose nothing, and know from what vLLM sums which engine is slow before they ask it."""
    fleet_ = [scenario.EngineGroup(count=1, profile=name) for name in ("l4-8b-fp8", "h100-8b-bf16")]
    scene = a_scenario(
        conversations(30, output=spread_out(60)),
        fleet=fleet_,
        client=client.Client(users=12),  # so many that the slow one gets some
        picking=scenario.Picking(replicas=2, restarts_s=[10.0]),
    )
    run = a_simulation(scene, "adaptive", seed=1)
    before, shown = list(run.pickers), []

    def look():
        shown.extend(
            [member.rates.step_s for member in picker.parts.store.pool.members]
            for picker in run.pickers
            if all(member.rates.evidence for member in picker.parts.store.pool.members)
        )

    run.timeline.at(10.5, look)
    lost_nothing(run)
    assert not set(map(id, before)) & set(map(id, run.pickers))
    assert len(shown) == 2
    assert all(slow > 3 * fast for slow, fast in shown)
