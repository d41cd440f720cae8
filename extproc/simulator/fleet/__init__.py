"""Whole fleets under virtual time: the real dispatcher over simulated engines.

- `scenario`: what is simulated, as a file says it. `workloads`, `traces`, `lengths`: what is asked.
- `trip`: one request on its way. `content`: what prompts share, as block keys.
- `timeline`: the clock. `site`: one engine on it. `picker`: one picker, built by the factory like
  the real one; `clairvoyant`: one that sees what no picker can.
- `client`: who sends when. `world`: everything together.
- `waiting`: where requests of one picker wait for capacity.
- `tally`, `report`: what came of it, one run and many; `tables`: as text.

From Python:

    from extproc.config import settings
    from extproc.simulator.fleet import client, lengths, scenario, workloads, world

    asked = workloads.Independent(
        requests=1000, prompt=lengths.Lengths(mean=500), output=lengths.Lengths(mean=100)
    )
    whole = scenario.Scenario(workload=asked, client=client.Client(rate_per_s=20))
    summary = world.run(whole, settings.Settings(), seed=1)
    print(summary.ttft_s.mean, summary.requests_per_s)

`world.World(whole, settings, seed=1)` is the same in steps: `run()` returns the tally, whose `trips`
are all requests with their times, and `sites` and `pickers` can be looked at after. Settings of
None mean the clairvoyant picker. `report.report(whole, runs)` puts several runs together.

Nothing here waits, reads a clock or opens a file: the same scenario, settings and seed give the same
numbers on every machine. Who drives it: `extproc simulate`, the benches and the tests.
"""
