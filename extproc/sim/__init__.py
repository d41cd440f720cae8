"""The simulated vLLM engine: one step-based core, and an OpenAI HTTP server around it.

Pure, driven by whoever owns the clock (the HTTP engine here, or an offline simulator):

- `profiles`: what a machine is: times per step, KV tokens, limits.
- `kv`, `lora`: KV blocks with the prefix LRU, and adapter slots.
- `core`: the engine: scheduling and the length of each step.
- `stats`: counters and histograms fed from what the core returns.
- `prompt`: text to tokens, block hashes and answers.
- `surfaces`: request and answer bodies of the HTTP APIs.

Shells, the only modules here that know asyncio, sockets and the clock: `http*`.

What must not live here: picking endpoints. The engine shares no code with the picker, so that a
test may hold one against the other; in particular it hashes prompts its own way.
"""
