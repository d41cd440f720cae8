"""Decisions and rejections as JSON.

`explanation_text` renders the same as text. Prompts, bodies and header values have no place here: a
request is described by what the decision used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, assert_never

import msgspec

from extproc.decision import (
    CostResult,
    Decision,
    Deferral,
    Disaggregation,
    FilterTreeStep,
    Outcome,
    Rejection,
)
from extproc.endpoint import Candidate
from extproc.request import InferenceRequest
from extproc.scheduling.shadow import ShadowScheduler
from extproc.telemetry import pool_state
from extproc.telemetry.decision_log import DecisionRecord, RejectionRecord

#: What the choice by /v1/models is called among the filters, which it runs before.
SERVES_MODEL = "serves-model"

#: Keys of a decision that a stage has as well.
_STAGE_KEYS: Final = (
    *("profile", "picker", "degraded", "match_source", "endpoints", "runner_up", "candidates"),
    *("filters", "scorers", "cost", "scored_candidates"),
)

#: Records with the same id that an explanation names (count).
_MAX_SAME_ID: Final = 10

#: Plain JSON: mappings, lists, text, numbers, booleans, None.
Json = dict[str, Any]


def health(pool: pool_state.PoolState) -> Json:
    """Health of all endpoints by address: state, cause, and its duration in seconds."""
    return {
        endpoint.address: {
            "state": endpoint.health,
            "cause": endpoint.cause or endpoint.failure,
            "for_s": endpoint.out_s,
        }
        for endpoint in pool.endpoints
    }


def describe_shadow(shadow: ShadowScheduler, now: float) -> Json:
    """Comparison of a shadow with what was routed, as JSON.

    Returns:
        `agreement` is the share of compared requests with the same endpoint; `expected_saving_s`
        the mean seconds that a judge expects of the shadow's choices, negative for a loss. Both are
        absent while there is nothing to compare.
    """
    counts = shadow.counts
    compared = counts.results["agreed"] + counts.results["differed"] + counts.results["rejected"]
    description: Json = {
        "profile": shadow.profile.name,
        "sample_ratio": shadow.sample_ratio,
        "results": dict(counts.results),
        "expected_saving_s": {
            judge: (counts.seconds[judge, "routed"] - counts.seconds[judge, "preferred"]) / num
            for judge, num in counts.judged.items()
        },
        "seconds": counts.cpu_s,
        "differences": [
            {
                "age_s": now - difference.at,
                "model": difference.model,
                "routed": difference.routed,
                "preferred": difference.preferred,
                "saved_s": dict(difference.saved_s),
            }
            for difference in reversed(counts.differences)
        ],
    }
    if compared:
        description["agreement"] = counts.results["agreed"] / compared
    return description


def explain(outcome: Outcome, *, health: Json | None = None) -> Json:
    """An outcome as JSON, with its reasons.

    Args:
        health: Result of `health` at the time of the decision; None when unknown.

    Returns:
        For a decision the keys outcome, pool, health, request, profile, picker, degraded,
        match_source, endpoints, runner_up, candidates, excluded_by_model, excluded_by_health,
        model_unlisted, model_rewrite, filters, scorers, cost and scored_candidates, and
        disaggregation where other endpoints may do stages, and kv_cache_source where an endpoint is
        named to pull cached tokens from; for a rejection outcome, status, message,
        reason and retry_after_s; for a deferral the same of its rejection, and preferred_endpoint,
        which is None for any.
    """
    match outcome:
        case Decision():
            return _decision(outcome, health)
        case Deferral():
            return {
                "outcome": "deferral",
                **_rejection(outcome.rejection),
                "preferred_endpoint": outcome.preferred_endpoint or None,
            }
        case Rejection():
            return {"outcome": "rejection", **_rejection(outcome)}
        case _:
            assert_never(outcome)


def _rejection(rejection: Rejection) -> Json:
    return {
        "status": rejection.status,
        "message": rejection.message,
        "reason": rejection.reason,
        "retry_after_s": rejection.retry_after_s,
    }


def _decision(outcome: Decision, health: Json | None) -> Json:
    stages, source = outcome.disaggregation, outcome.kv_cache_source
    return {
        "outcome": "decision",
        "pool": outcome.pool,
        "health": health,
        "request": _request(outcome.request),
        "profile": outcome.profile,
        "picker": outcome.picker,
        "degraded": outcome.degraded,
        "match_source": outcome.match_source,
        "endpoints": [endpoint.address for endpoint in outcome.endpoints],
        "runner_up": _runner_up(outcome),
        "candidates": [_candidate(candidate) for candidate in outcome.candidates],
        "excluded_by_model": [endpoint.address for endpoint in outcome.excluded_by_model],
        "excluded_by_health": {
            why: [endpoint.address for endpoint in endpoints]
            for why, endpoints in outcome.excluded_by_health
        },
        "model_unlisted": outcome.model_unlisted,
        "model_rewrite": _rewrite(outcome),
        "filters": _filters(outcome),
        "scorers": [{"name": scored.name, "weight": scored.weight} for scored in outcome.scores],
        "cost": _cost(outcome.cost),
        "scored_candidates": _scored_candidates(outcome),
        **({} if stages is None else {"disaggregation": _stages(stages)}),
        **({} if source is None else {"kv_cache_source": source.address}),
    }


def _stages(stages: Disaggregation) -> Json:
    return {
        "decision_type": stages.decision_type,
        **{name: _stage(part, reason) for name, part, reason in stages.choices},
    }


def _stage(part: Decision | None, reason: str) -> Json | None:
    """A stage: the choice of other endpoints, or why there are none; None for no such stage."""
    if part is None:
        return {"endpoints": [], "reason": reason} if reason else None
    choice = _decision(part, None)
    return {"reason": reason, **{key: choice[key] for key in _STAGE_KEYS}}


def show_id(record: DecisionRecord | RejectionRecord) -> str:
    """Id of a record, whose header was read as latin-1, as UTF-8 where its bytes are that."""
    try:
        return record.id.encode("latin-1").decode()
    except UnicodeError:
        return record.id


def explain_record(
    record: DecisionRecord | RejectionRecord, now: float, *, same_id: Sequence[int] = ()
) -> Json:
    """A recorded request as JSON: a decision with its age and result, or a rejection.

    Args:
        same_id: Sequence numbers of all records with its id, newest first; empty for its own alone.
    """
    sequences = same_id or [record.sequence]
    names = {
        "id": show_id(record),
        "sequence": record.sequence,
        "num_same_id": len(sequences),
        "same_id_sequences": list(sequences[:_MAX_SAME_ID]),
    }
    if isinstance(record, RejectionRecord):
        return {
            **names,
            "seconds_ago": now - record.at,
            "trace_id": record.trace_id or None,
            "pool": record.pool,
            "model": record.model,
            "cause": record.rejection.cause,
            "result": record.result,
            **explain(record.rejection),
        }
    return {
        **names,
        "seconds_ago": now - record.at,
        "result": record.result,
        "status": record.status or None,
        "seconds": record.seconds,
        "headers_s": record.headers_s,
        "first_token_s": record.first_token_s,
        "predicted_first_token_s": record.decision.predicted_ttft_s,
        "usage": record.usage,
        "trace_id": record.trace_id or None,
        "answer_ids": record.answer_ids,
        **explain(record.decision),
    }


def summarize_record(record: DecisionRecord | RejectionRecord, now: float) -> Json:
    """A recorded request as one row of a list."""
    if isinstance(record, RejectionRecord):
        return {
            "id": show_id(record),
            "sequence": record.sequence,
            "seconds_ago": now - record.at,
            "pool": record.pool,
            "model": record.model,
            "endpoint": None,
            "why": f"refused: {record.rejection.cause}",
            "result": record.result,
            "status": str(record.rejection.status),
            "seconds": None,
            "headers_s": None,
            "first_token_s": None,
        }
    decision = record.decision
    return {
        "id": show_id(record),
        "sequence": record.sequence,
        "seconds_ago": now - record.at,
        "pool": decision.pool,
        "model": decision.request.target,
        "endpoint": decision.endpoints[0].address,
        "why": format_short(decision),
        "result": record.result,
        "status": record.status or None,
        "seconds": record.seconds,
        "headers_s": record.headers_s,
        "first_token_s": record.first_token_s,
    }


def format_short(decision: Decision) -> str:
    """A decision in one line of ASCII, fit for a header.

    `adaptive; chose=10.0.0.1:8000; cost=12.3ms; cached=1024/1500; next=10.0.0.2:8000; cost=80.1ms`

    Endpoints of stages are at the end, or why the chosen endpoint does them, and the source of the KV
    cache: `prefill=10.0.0.3:8000; encode=here:no-media; kv-cache=10.0.0.4:8000`
    """
    chosen, other = decision.find_chosen_and_runner_up()
    source = decision.kv_cache_source
    priced, value, following = decision.cost, "", ""
    values, factor, shown = decision.totals, 1.0, "; score=%.3f"
    if priced is not None:
        values, factor, shown = priced.costs, _factor(priced), f"; cost=%.1f{_unit(priced)}"
    if priced is not None or decision.scores:
        if chosen is not None:
            value = shown % (factor * values[chosen])
        if other is not None:
            following = shown % (factor * values[other])
    if other is not None:
        following = f"; next={decision.scored_candidates[other].endpoint.address}{following}"
    return (
        f"{decision.profile}; chose={decision.endpoints[0].address}{value}"
        f"; cached={decision.matched_tokens}/{decision.request.prompt_tokens}"
        f"{following}{'; degraded' if decision.degraded else ''}"
        f"{'' if decision.disaggregation is None else _format_stages(decision.disaggregation)}"
        f"{'' if source is None else f'; kv-cache={source.address}'}"
    )


def _format_stages(stages: Disaggregation) -> str:
    text = ""
    for name, part, reason in stages.choices:
        if part is not None:
            text += f"; {name}={','.join([endpoint.address for endpoint in part.endpoints])}"
        elif reason:
            text += f"; {name}=here:{reason}"
    return text


def _runner_up(decision: Decision) -> str | None:
    _, at = decision.find_chosen_and_runner_up()
    return None if at is None else decision.scored_candidates[at].endpoint.address


def _request(request: InferenceRequest) -> Json:
    return {
        "api": request.api,
        "model": request.model,
        "adapter": request.adapter,
        "prompt_bytes": len(request.prompt),
        "prompt_tokens": request.prompt_tokens,
        "objective": request.objective,
        "priority": request.priority,
        "stream": request.stream,
        "max_tokens": request.max_tokens,
        "session": bool(request.session),
        "subset": None if request.subset is None else list(request.subset),
    }


def _rewrite(decision: Decision) -> Json | None:
    """Model name sent to the engine, and the client's where its body has a model name.

    `editable` is true if the body has a model field.
    """
    if not decision.model_rewrite:
        return None
    return {
        "name": decision.model_rewrite,
        "client": decision.client_model,
        "editable": decision.body_edit is not None,
    }


def _candidate(candidate: Candidate) -> Json:
    load = candidate.load
    return {
        "endpoint": candidate.endpoint.address,
        "name": candidate.endpoint.name,
        "age_s": candidate.age_s if math.isfinite(candidate.age_s) else None,
        "imputed": candidate.is_imputed,
        "engine": load.engine,
        "waiting": load.waiting,
        "running": load.running,
        "kv_usage": load.kv_usage,
        "extra": dict(load.extra),
        "adapters": None if load.adapters is None else sorted(load.adapters),
        "waiting_adapters": (
            None if load.waiting_adapters is None else sorted(load.waiting_adapters)
        ),
        "adapter_slots": load.adapter_slots,
        "in_flight": candidate.in_flight,
        "requests": candidate.estimated_requests,
        "prompt_tokens": candidate.prompt_tokens,
        "matched_tokens": candidate.matched_tokens,
        "queued_tokens": round(candidate.queued_tokens),
        "unscraped_tokens": round(candidate.unscraped_tokens),
        "residency": candidate.residency.name.lower(),
        "rates": msgspec.structs.asdict(candidate.rates),
    }


def _filters(decision: Decision) -> list[Json]:
    steps = []
    before = _addresses(decision.candidates)
    if decision.excluded_by_model:
        dropped = [endpoint.address for endpoint in decision.excluded_by_model]
        others = [
            endpoint.address
            for _, by_reason in decision.excluded_by_health
            for endpoint in by_reason
        ]
        steps.append({"name": SERVES_MODEL, "survivors": before + others, "dropped": dropped})
    steps += _excluded_by_health(decision, before)
    for filtered in decision.filters:
        after = _addresses(filtered.survivors)
        remaining = set(after)
        dropped = [address for address in before if address not in remaining]
        step: Json = {"name": filtered.name, "survivors": after, "dropped": dropped}
        if filtered.branches:
            step["branches"] = _branches(filtered.branches, before)
        steps.append(step)
        before = after
    return steps


def _excluded_by_health(decision: Decision, candidates: list[str]) -> list[Json]:
    """Endpoints excluded by health, as filter steps; a later exclusion survives earlier steps."""
    steps: list[Json] = []
    survivors = candidates
    for why, endpoints in reversed(decision.excluded_by_health):
        if not endpoints:
            continue
        dropped = [endpoint.address for endpoint in endpoints]
        steps.insert(0, {"name": why, "survivors": survivors, "dropped": dropped})
        survivors = survivors + dropped
    return steps


def _branches(branches: Iterable[FilterTreeStep], before: list[str]) -> list[Json]:
    """Steps through a filter tree; a filter without survivors passes its input on."""
    steps = []
    for branch in branches:
        after = _addresses(branch.survivors)
        remaining = set(after)
        steps.append(
            {
                "name": branch.name,
                "survivors": after,
                "dropped": [address for address in before if address not in remaining],
                "branch": branch.branch,
                "error_type": branch.error_type,
            }
        )
        before = after or before
    return steps


def _scored_candidates(decision: Decision) -> list[Json]:
    ranks = {endpoint.address: rank for rank, endpoint in enumerate(decision.endpoints, 1)}
    priced = decision.cost
    factor = 1.0 if priced is None else _factor(priced)
    finalists = []
    for at, candidate in enumerate(decision.scored_candidates):
        address = candidate.endpoint.address
        finalist: Json = {
            "endpoint": address,
            "raw": [scored.scores[at] for scored in decision.scores],
            "weighted": [scored.weight * scored.scores[at] for scored in decision.scores],
            "total": decision.totals[at] if decision.totals else 0.0,
            "rank": ranks.get(address),
        }
        if priced is not None:
            finalist["cost"] = factor * priced.costs[at]
            finalist["terms"] = [factor * values[at] for _, values in priced.terms]
        finalists.append(finalist)
    return finalists


def _cost(priced: CostResult | None) -> Json | None:
    """Head of the cost columns; seconds are shown as milliseconds."""
    if priced is None:
        return None
    terms = [name for name, _ in priced.terms]
    return {"name": priced.name, "unit": _unit(priced), "terms": terms}


def _unit(priced: CostResult) -> str:
    return "ms" if priced.unit == "s" else priced.unit


def _factor(priced: CostResult) -> float:
    return 1000.0 if priced.unit == "s" else 1.0


def _addresses(candidates: Iterable[Candidate]) -> list[str]:
    return [candidate.endpoint.address for candidate in candidates]
