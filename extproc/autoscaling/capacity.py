"""Engine time that a request takes, and the concurrency an engine should run at."""

from __future__ import annotations

import math

from extproc.endpoint import StepTimeModel


def concurrency(rates: StepTimeModel, *, slowdown: float, most: float = math.inf) -> float:
    """Number of concurrent requests at which tokens come `slowdown` times slower than alone.

    From `step_s + k B = slowdown (step_s + k)` with `k = decode_s + context_s context_tokens`:
    `B = slowdown + (slowdown - 1) step_s / k`.

    Args:
        rates: How fast the engine is.
        slowdown: At least 1.
        most: Largest number of concurrent requests.
    """
    each_s = rates.decode_s + rates.context_s * rates.context_tokens
    if each_s <= 0:
        return max(1.0, most)
    return max(1.0, min(most, slowdown + (slowdown - 1) * rates.step_s / each_s))


def work(
    prompt_tokens: float, output_tokens: float, rates: StepTimeModel, *, at_once: float
) -> float:
    """Token seconds of a request: `prefill_s P + O iteration_s(B) / B`.

    Prefill has an iteration's time for itself; of an iteration that decodes, each of B sequences
    takes its share.

    Args:
        prompt_tokens: P, the uncached ones.
        output_tokens: O.
        rates: How fast the engine is.
        at_once: B, requests the engine has.
    """
    shared_s = rates.iteration_s(at_once) / at_once
    return prompt_tokens * rates.prefill_s + output_tokens * shared_s
