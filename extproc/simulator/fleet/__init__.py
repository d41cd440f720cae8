"""Whole fleets under virtual time: the real director over simulated engines.

- `scenario`: the schema of scenario files. `workloads`, `traces`, `length_distributions`: requests.
- `sim_request`: one request on its way. `prompt_blocks`: what prompts share, as block keys.
- `event_queue`: the clock. `engine_node`: one engine on it. `picker`: one picker, built by the
  factory like the real one; `oracle_picker`: one that knows what no picker can.
- `client`: the times of requests. `simulation`: everything together.
- `flow_control`: the queue of requests that wait for capacity at one picker.
- `run_metrics`, `report`: results of one run and of many; `tables`: as text.

From Python:

    from extproc.config import settings
    from extproc.simulator.fleet import client, length_distributions, scenario, simulation, workloads

    asked = workloads.Independent(
        requests=1000, prompt=length_distributions.Lengths(mean=500), output=length_distributions.Lengths(mean=100)
    )
    whole = scenario.Scenario(workload=asked, client=client.Client(rate_per_s=20))
    summary = simulation.run(whole, settings.Settings(), seed=1)
    print(summary.ttft_s.mean, summary.requests_per_s)

`simulation.Simulation(whole, settings, seed=1)` is the same in steps: `run()` returns the tally, whose `requests`
are all requests with their times, and `nodes` and `pickers` can be looked at after. Settings of
None mean the oracle picker. `report.report(whole, runs)` puts several runs together.

Nothing here waits, reads a clock or opens a file: the same scenario, settings and seed give the same
numbers on every machine. Who drives it: `extproc simulate`, the benches and the tests.
"""
