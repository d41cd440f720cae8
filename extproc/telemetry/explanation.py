"""An outcome told to people: as JSON for pages, as a table for terminals.

Both are readers of the one Decision. Prompts, bodies and header values have no place here; of a
request only what decided is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from extproc.decision import Decision, Outcome, Rejection
from extproc.endpoint import Candidate
from extproc.pool.snapshot import Pool
from extproc.request import Request
from extproc.telemetry import state

#: Plain JSON: mappings, lists, text, numbers, booleans, None.
Json = dict[str, Any]


def pool_state(pool: Pool, now: float) -> Json:
    """The pool for the page /debug/pool; `extproc explain --state` reads the same.

    What nobody knows is left out, and so is `matched_tokens`, which belongs to a request.

    Args:
        pool: The snapshot.
        now: Monotonic seconds.
    """
    told: Json = msgspec.json.decode(msgspec.json.encode(state.of_pool(pool, now)))
    told["endpoints"] = [
        {
            name: value
            for name, value in endpoint.items()
            if value is not None and name != "matched_tokens"
        }
        for endpoint in told["endpoints"]
    ]
    return told


def explain(outcome: Outcome) -> Json:
    """An outcome and its reasons.

    Returns:
        For a decision the keys outcome, request, profile, picker, degraded, endpoints, candidates,
        filters, scorers and finalists; for a rejection outcome, status, message, reason and
        retry_after_s.
    """
    if isinstance(outcome, Rejection):
        return {"outcome": "rejection", **msgspec.structs.asdict(outcome)}
    return {
        "outcome": "decision",
        "request": _request(outcome.request),
        "profile": outcome.profile,
        "picker": outcome.picker,
        "degraded": outcome.degraded,
        "endpoints": [endpoint.address for endpoint in outcome.endpoints],
        "candidates": [_candidate(candidate) for candidate in outcome.candidates],
        "filters": _filters(outcome),
        "scorers": [{"name": scored.name, "weight": scored.weight} for scored in outcome.scores],
        "finalists": _finalists(outcome),
    }


def _request(request: Request) -> Json:
    return {
        "api": request.api,
        "model": request.model,
        "adapter": request.adapter,
        "prompt_bytes": len(request.prompt),
        "prompt_tokens": request.prompt_tokens,
        "stream": request.stream,
        "max_tokens": request.max_tokens,
        "session": bool(request.session),
        "subset": None if request.subset is None else list(request.subset),
    }


def _candidate(candidate: Candidate) -> Json:
    load = candidate.load
    return {
        "endpoint": candidate.endpoint.address,
        "name": candidate.endpoint.name,
        "age_s": candidate.age_s if math.isfinite(candidate.age_s) else None,
        "engine": load.engine,
        "waiting": load.waiting,
        "running": load.running,
        "kv_usage": load.kv_usage,
        "adapters": None if load.adapters is None else sorted(load.adapters),
        "waiting_adapters": (
            None if load.waiting_adapters is None else sorted(load.waiting_adapters)
        ),
        "adapter_slots": load.adapter_slots,
        "in_flight": candidate.in_flight,
        "requests": candidate.requests,
        "prompt_tokens": candidate.prompt_tokens,
        "matched_tokens": candidate.matched_tokens,
    }


def _filters(decision: Decision) -> list[Json]:
    steps = []
    before = _addresses(decision.candidates)
    for filtered in decision.filters:
        after = _addresses(filtered.survivors)
        kept = set(after)
        dropped = [address for address in before if address not in kept]
        steps.append({"name": filtered.name, "survivors": after, "dropped": dropped})
        before = after
    return steps


def _finalists(decision: Decision) -> list[Json]:
    ranks = {endpoint.address: rank for rank, endpoint in enumerate(decision.endpoints, 1)}
    finalists = []
    for at, candidate in enumerate(decision.finalists):
        address = candidate.endpoint.address
        finalists.append(
            {
                "endpoint": address,
                "raw": [scored.scores[at] for scored in decision.scores],
                "weighted": [scored.weight * scored.scores[at] for scored in decision.scores],
                "total": decision.totals[at] if decision.totals else 0.0,
                "rank": ranks.get(address),
            }
        )
    return finalists


def _addresses(candidates: Iterable[Candidate]) -> list[str]:
    return [candidate.endpoint.address for candidate in candidates]


def render_table(explanation: Json) -> str:
    """An explanation for a terminal.

    Args:
        explanation: From `explain`, or its JSON from a server.
    """
    if explanation["outcome"] == "rejection":
        return _refused(explanation)
    sections = [_asked(explanation), _in_play(explanation["candidates"])]
    if explanation["filters"]:
        sections.append(_steps(explanation["filters"]))
    if explanation["scorers"]:
        sections.append(_scores(explanation))
    sections.append(_chosen(explanation))
    return "\n\n".join(sections) + "\n"


def _refused(explanation: Json) -> str:
    lines = [f"refused with {explanation['status']}: {explanation['message']}"]
    if explanation["reason"]:
        lines.append(f"reason: {explanation['reason']}")
    if explanation["retry_after_s"] is not None:
        lines.append(f"retry after: {explanation['retry_after_s']} s")
    return "\n".join(lines) + "\n"


def _asked(explanation: Json) -> str:
    request = explanation["request"]
    facts = [request["api"], f"model {request['model'] or '-'}"]
    if request["adapter"]:
        facts.append(f"adapter {request['adapter']}")
    facts.append(f"about {request['prompt_tokens']} prompt tokens")
    if request["stream"]:
        facts.append("streamed")
    if request["subset"] is not None:
        facts.append(f"limited to {', '.join(request['subset']) or 'nobody'}")
    return f"request: {', '.join(facts)}\nprofile: {explanation['profile']}"


def _in_play(candidates: Sequence[Json]) -> str:
    head = (
        *("CANDIDATE", "AGE s", "WAITING", "RUNNING", "KV", "IN FLIGHT", "REQUESTS", "CACHED"),
        "ADAPTERS",
    )
    rows = [
        (
            candidate["endpoint"],
            _number(candidate["age_s"], 2),
            _number(candidate["waiting"], 0),
            _number(candidate["running"], 0),
            _number(candidate["kv_usage"], 2),
            str(candidate["in_flight"]),
            _number(candidate["requests"], 0),
            str(candidate["matched_tokens"]),
            _names(candidate["adapters"]),
        )
        for candidate in candidates
    ]
    return _aligned(head, rows)


def _steps(filters: Sequence[Json]) -> str:
    head = ("FILTER", "LEFT", "DROPPED")
    rows = [
        (step["name"], str(len(step["survivors"])), ", ".join(step["dropped"]) or "nobody")
        for step in filters
    ]
    return _aligned(head, rows)


def _scores(explanation: Json) -> str:
    scorers = explanation["scorers"]
    head = ("SCORE", *(f"{one['name']} x{one['weight']:g}" for one in scorers), "TOTAL", "RANK")
    ordered = sorted(explanation["finalists"], key=lambda finalist: -finalist["total"])
    rows = [
        (
            finalist["endpoint"],
            *(
                f"{raw:.3f} = {weighted:.3f}"
                for raw, weighted in zip(finalist["raw"], finalist["weighted"], strict=True)
            ),
            f"{finalist['total']:.3f}",
            str(finalist["rank"] or ""),
        )
        for finalist in ordered
    ]
    return _aligned(head, rows)


def _chosen(explanation: Json) -> str:
    first, *others = explanation["endpoints"]
    line = f"chosen by {explanation['picker']}: {first}"
    if others:
        line += f", then {', '.join(others)}"
    if explanation["degraded"]:
        line += f"\ndegraded: {explanation['degraded']}"
    return line


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}"


def _names(names: Sequence[str] | None) -> str:
    if names is None:
        return "?"
    return ", ".join(names) or "-"


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart: the first one flush left, the last one free, numbers right."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if at in (0, len(head) - 1) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
