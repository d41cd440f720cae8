"""Fleet of a recording: engines with the step times that the picker learned of them.

What is learned in a short recording is some percent off, and differently so for each engine. Requests
that take turns over engines, or wait for each other's answers, queue up where an engine seems slower
than the others, though it is not. So engines that are alike within that error have their common mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from extproc.endpoint import StepTimeModel
from extproc.recording.reader import RecordedEndpoint
from extproc.simulator.fleet.scenario import EngineGroup

#: Machine whose limits hold where nothing else is known; times and cache are those learned.
_BASE_PROFILE: Final = "h100-8b-bf16"

#: Numbers of an engine that its metrics do not show, or not yet, as vLLM sets them for servers.
_UNKNOWN_LIMITS: Final[Mapping[str, float]] = {"token_budget": 8192, "max_num_seqs": 256}

#: Largest ratio of a step time to the median of the fleet at which an engine is like the others. Kinds
#: of machines differ by more, and what is learned of one engine in half a minute errs by less.
_ALIKE_RATIO: Final = 1.25

#: Sequences of an iteration by which engines are compared (count).
_COMPARED_SEQUENCES: Final = 8.0

#: Numbers that engines which are alike share.
_SHARED: Final = ("step_s", "prefill_s", "decode_s", "context_s")


def build_fleet(
    endpoints: Sequence[RecordedEndpoint], limits: Mapping[str, float]
) -> list[EngineGroup]:
    """Engines of endpoints, in their order.

    Args:
        endpoints: As of the end of the recording.
        limits: Numbers of an engine by field of its profile; they come before what was learned.
    """
    caches = [known.load.kv_tokens for known in endpoints if known.load.kv_tokens]
    usual_cache = statistics.median_low(caches) if caches else 0
    learned = [known.state.rates if known.state else StepTimeModel() for known in endpoints]
    return [
        _engine_of(known, rates, usual_cache, limits)
        for known, rates in zip(endpoints, share_step_times(learned), strict=True)
    ]


def share_step_times(learned: Sequence[StepTimeModel]) -> list[StepTimeModel]:
    """The step times with those that are alike replaced by their mean, by their evidence."""
    with_evidence = [rates for rates in learned if rates.evidence > 0.0]
    if not with_evidence:
        return list(learned)
    iteration_s = statistics.median(map(_iteration_s, with_evidence))
    prefill_s = statistics.median(rates.prefill_s for rates in with_evidence)
    alike = [
        rates
        for rates in with_evidence
        if _is_near(_iteration_s(rates), iteration_s) and _is_near(rates.prefill_s, prefill_s)
    ]
    weights = [rates.evidence for rates in alike]
    means = {
        name: statistics.fmean([getattr(rates, name) for rates in alike], weights)
        for name in _SHARED
        if alike
    }
    return [
        msgspec.structs.replace(rates, **means) if rates in alike else rates for rates in learned
    ]


def _iteration_s(rates: StepTimeModel) -> float:
    return rates.iteration_s(_COMPARED_SEQUENCES)


def _is_near(value: float, median: float) -> bool:
    return median <= value * _ALIKE_RATIO and value <= median * _ALIKE_RATIO


def _engine_of(
    known: RecordedEndpoint, rates: StepTimeModel, usual_cache: int, limits: Mapping[str, float]
) -> EngineGroup:
    numbers: dict[str, float] = {
        "base_s": rates.step_s,
        "prefill_s_per_token": rates.prefill_s,
        "decode_s_per_seq": rates.decode_s,
        "context_s_per_token": rates.context_s,
        "lora_load_s": rates.adapter_load_s,
        **_UNKNOWN_LIMITS,
    }
    cache = known.load.kv_tokens or usual_cache
    if cache:
        numbers["kv_tokens"] = cache
        numbers["max_model_len"] = cache
    if rates.max_num_seqs:
        numbers["max_num_seqs"] = int(rates.max_num_seqs)
    if known.load.adapter_slots:
        numbers["max_loras"] = known.load.adapter_slots
    return EngineGroup(
        count=1,
        profile=_BASE_PROFILE,
        set={**numbers, **limits},
        labels=known.endpoint.labels,
    )
