"""Simulated vLLM engines: a step-based core, an OpenAI HTTP server, fleets in virtual time.

Pure, driven by the owner of the clock (the HTTP engine or an offline simulator):

- `profiles`: what a machine is: times per step, KV tokens, limits.
- `engine_request`: what goes into an engine and comes out.
- `core`: the engine: scheduling and the length of each step. Its parts: `batch` (sequences, the
  plan in progress, who decodes), `kv` (blocks and the prefix LRU), `lora` (adapter slots).
- `stats`, `vllm_metric_families`: counters and histograms fed from what the core returns, and their names.
- `prompt`: text to tokens, block hashes and answers.
- `api_requests`, `api_responses`: request and answer bodies of the HTTP APIs.
- `faults`: what can go wrong on demand.

- `fleet`: fleets of them with the production director in virtual time.

- `replay`: recorded requests on simulated fleets, with `replay_traffic` and `replay_traces` (what is
  read), `replay_agreement` (decisions made again), `replay_tuning` and `fleet_plan`.

Commands: `engine_command` (`extproc engine`) and `simulate_command` (`extproc simulate`) with
`simulation_runs` (scenario files, worker processes), `report_plots` and `plot_style`;
`replay_command`, `tune_command` and `plan_command`.

Shells, the only modules here that know asyncio, sockets, processes and the clock: `http` and the
commands.

Picking endpoints does not belong here. The engine shares no code with the core of extproc, so that a
test may hold one against the other; in particular it hashes prompts its own way. Only `fleet`
knows both.
"""
