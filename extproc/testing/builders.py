"""Builders of scheduling contexts and candidates for tests of plugins."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from random import Random
from typing import Any

import msgspec

from extproc.endpoint import NO_LOAD, AdapterResidency, Candidate, Endpoint, Load, StepTimeModel
from extproc.request import InferenceRequest
from extproc.scheduling.framework import SchedulingContext

#: `now` of every context, in seconds; scrapes are a second old.
NOW = 100.0

_CONTEXT_FIELDS = frozenset(SchedulingContext.__struct_fields__) - {
    "request",
    "rng",
    "adapter",
    "first_user_message_reader",
}
_CANDIDATE_FIELDS = frozenset(Candidate.__struct_fields__) - {"endpoint", "load"}
_LOAD_FIELDS = frozenset(Load.__struct_fields__) - {"at"}
_RESIDENCIES = tuple(AdapterResidency)
_SETS = ("adapters", "waiting_adapters")


def context(seed: int = 1, *, first_user_message: str = "", **fields: Any) -> SchedulingContext:
    """Build the scheduling context of a chat request.

    Args:
        first_user_message: Beginning of the first user message.
        **fields: Fields of `SchedulingContext` (`headers`, `blocks`, `now`) and of
            `InferenceRequest`; `adapter` sets both.
    """
    context_fields = {name: fields.pop(name) for name in _CONTEXT_FIELDS & fields.keys()}
    request = InferenceRequest(**{"api": "chat", **fields})
    context_fields["adapter"] = request.adapter
    if first_user_message:
        context_fields["first_user_message_reader"] = lambda _: first_user_message
    return SchedulingContext(
        **{"request": request, "now": NOW, "rng": Random(seed), **context_fields}
    )


def candidate(name: str, **fields: Any) -> Candidate:
    """Build a candidate at `NAME:8000`.

    Args:
        name: Name and host of the endpoint.
        **fields: Fields of `Candidate` and of `Load`, and `labels`. Sets may be lists, `residency`
            the name of an `AdapterResidency`, `rates` a mapping. Without a field of `Load` the
            endpoint was never scraped. `estimated_requests` defaults to the larger of `in_flight`
            and running plus waiting.

    Raises:
        TypeError: No field has that name.
    """
    unknown = fields.keys() - _CANDIDATE_FIELDS - _LOAD_FIELDS - {"labels"}
    if unknown:
        valid = sorted({*_CANDIDATE_FIELDS, *_LOAD_FIELDS, "labels"})
        raise TypeError(f"expected some of {', '.join(valid)}, got {', '.join(sorted(unknown))}")
    endpoint = Endpoint(f"{name}:8000", name=name, labels=fields.pop("labels", {}))
    candidate_fields = {key: fields.pop(key) for key in _CANDIDATE_FIELDS & fields.keys()}
    if isinstance(candidate_fields.get("residency"), str):
        candidate_fields["residency"] = AdapterResidency[candidate_fields["residency"].upper()]
    if isinstance(candidate_fields.get("rates"), Mapping):
        candidate_fields["rates"] = StepTimeModel(**candidate_fields["rates"])
    fields |= {key: frozenset(fields[key]) for key in _SETS if fields.get(key) is not None}
    age_s = candidate_fields.pop("age_s", 1.0 if fields else math.inf)
    load = Load(at=NOW - age_s, **fields) if fields else NO_LOAD
    scraped = (load.waiting or 0) + (load.running or 0)
    candidate_fields["estimated_requests"] = float(
        candidate_fields.get(
            "estimated_requests", max(candidate_fields.get("in_flight", 0), scraped)
        )
    )
    return Candidate(endpoint=endpoint, load=load, age_s=age_s, **candidate_fields)


def candidates(endpoints: Mapping[str, Mapping[str, Any] | None]) -> list[Candidate]:
    """Build candidates from their fields by name; None for an endpoint that was never scraped."""
    return [candidate(name, **(fields or {})) for name, fields in endpoints.items()]


def names(chosen: Iterable[Candidate | Endpoint]) -> list[str]:
    """Return the names of candidates or endpoints."""
    return [item.endpoint.name if isinstance(item, Candidate) else item.name for item in chosen]


def loaded_candidates(
    size: int, *, scraped: bool = True, seed: int = 7, extra_metrics: Collection[str] = ()
) -> list[Candidate]:
    """Build candidates with varied loads, of which every fifth, or all, was never scraped."""
    rng = Random(seed)
    loaded = []
    for i in range(size):
        fields: dict[str, Any] = {
            "in_flight": rng.randrange(20),
            "prompt_tokens": rng.randrange(20_000),
            "matched_tokens": rng.choice((0, 0, 64, 900)),
            "queued_tokens": rng.choice((0.0, 512.0, 9000.0)),
            "unscraped_tokens": rng.choice((0.0, 4096.0)),
            "residency": rng.choice(_RESIDENCIES),
            "labels": rng.choice(({}, {"zone": "a"}, {"zone": "b", "hardware": "h100"})),
        }
        if i % 3:
            fields["rates"] = StepTimeModel(prefill_s=rng.uniform(2e-5, 3e-4), evidence=1000.0)
        if scraped and i % 5:
            fields |= with_load(rng, extra_metrics)
        loaded.append(candidate(f"10.0.{i // 250}.{i % 250}", **fields))
    return loaded


def identical_candidates(
    size: int, *, scraped: bool = True, seed: int = 7, extra_metrics: Collection[str] = ()
) -> list[Candidate]:
    """Build candidates that differ in scraped values only; every fifth, or all, have none."""
    rng = Random(seed)
    identical = [
        candidate(f"10.0.{i // 250}.{i % 250}", **(with_load(rng, extra_metrics) if i % 5 else {}))
        for i in range(size)
    ]
    same: dict[str, Any] = (
        {"estimated_requests": 4.0} if scraped else {"estimated_requests": 4.0, "load": NO_LOAD}
    )
    return [msgspec.structs.replace(item, **same) for item in identical]


def with_load(rng: Random, extra_metrics: Collection[str] = ()) -> dict[str, Any]:
    """Return random scraped values of an endpoint, with shares as extra metrics."""
    return {
        "engine": "vllm",
        "waiting": rng.randrange(60),
        "running": rng.randrange(100),
        "kv_usage": rng.random(),
        "adapters": rng.choice(([], ["lora"], ["x", "y"], None)),
        "waiting_adapters": rng.choice(([], ["lora"], None)),
        "adapter_slots": rng.choice((2, 4, None)),
        "kv_blocks": rng.choice((2000, 20_000, None)),
        "block_tokens": 16,
        "extra": {name: rng.random() for name in sorted(extra_metrics)},
    }
