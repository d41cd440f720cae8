"""Simulated fleets in virtual time: the production director over simulated engines.

- `scenario`: the schema of scenario files. `workloads`, `traces`: requests.
- `sim_request`: requests, their sessions, and block keys, equal where prompts share a prefix.
- `event_queue`: the clock. `engine_node`: one engine on it. `picker`: one picker, built by the
  factory like the real one; `oracle_picker`: perfect knowledge.
- `client`: the times of requests. `simulation`: one run of a scenario.
- `flow_control`: the queue of requests that wait for capacity at one picker.
- `run_metrics`, `report`: results of one run and of many; `tables`: as text.

From Python:

    from extproc.config import settings
    from extproc.simulator.fleet import client, scenario, simulation, workloads

    workload = workloads.Independent(
        requests=1000, prompt=workloads.Lengths(mean=500), output=workloads.Lengths(mean=100)
    )
    scene = scenario.Scenario(workload=workload, client=client.Client(rate_per_s=20))
    summary = simulation.run(scene, settings.Settings(), seed=1)
    print(summary.ttft_s.mean, summary.requests_per_s)

`simulation.Simulation(scene, settings, seed=1)` is the same in steps: `run()` returns the metrics, whose `requests`
holds all requests with their times, and `nodes` and `pickers` can be looked at after. Settings of
None mean the oracle picker. `report.report(scene, runs)` aggregates several runs.

Nothing here waits, reads a clock or opens a file: the same scenario, settings and seed give the same
numbers on every machine. `extproc simulate`, the benches and the tests drive it.
"""
