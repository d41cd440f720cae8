"""Whole fleets under virtual time: the real dispatcher over simulated engines.

- `scenario`: what is simulated, as a file says it. `workloads`, `traces`, `lengths`: what is asked.
- `trip`: one request on its way. `content`: what prompts share, as block keys.
- `timeline`: the clock. `site`: one engine on it. `picker`: one picker, built by the factory like
  the real one; `clairvoyant`: one that sees what no picker can.
- `client`: who sends when. `world`: everything together.
- `tally`, `report`: what came of it, one run and many.

Nothing here waits, reads a clock or opens a file: the same scenario, settings and seed give the same
numbers on every machine. Who drives it: `extproc simulate`, the benches and the tests.
"""
