"""Builders that name only the fact that matters."""

from __future__ import annotations

from extproc.simulator import core, engine_request, profiles

#: Powers of two, so that sums of step times are exact.
A, B, C, D = 2**-6, 2**-12, 2**-10, 2**-20


def profile(**facts) -> profiles.EngineProfile:
    """A small machine: 64 blocks of 4 tokens, 32 tokens per step, 8 sequences, 2 slots."""
    defaults = {
        "name": "test",
        "base_s": A,
        "prefill_s_per_token": B,
        "decode_s_per_seq": C,
        "context_s_per_token": D,
        "kv_tokens": 256,
        "block_tokens": 4,
        "token_budget": 32,
        "max_num_seqs": 8,
        "max_loras": 2,
    }
    return profiles.EngineProfile(**(defaults | facts))


def engine(**facts) -> core.SimulatedEngine:
    """An engine on that machine."""
    return core.SimulatedEngine(profile(**facts))


def a_job(name="r", prompt=8, output=1, *, base=None, adapter="") -> engine_request.EngineRequest:
    """A job; jobs with the same `base` share their hashes, and without one have none."""
    hashes = () if base is None else range(base, base + prompt // 4)
    return engine_request.EngineRequest(name, prompt, output, hashes, adapter)


def drain(the_engine: core.SimulatedEngine, now: float = 0.0) -> list[engine_request.StepResult]:
    """Run until nothing is left; returns every result."""
    results = []
    while (result := the_engine.step(now)) is not None:
        now = result.started_at + result.duration_s
        results.append(result)
    return results
