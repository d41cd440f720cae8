"""Explanations as text tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from extproc.telemetry.explanation import Json

#: States of endpoints that are tried only where no other is left.
_FAILING = frozenset({"ejected", "probing", "down"})

#: Meaning of columns.
_LEGEND = {
    "CANDIDATE": "endpoint that could be chosen, ip:port",
    "HEALTH": "ok, or suspect, ejected, probing, down: for how long and why",
    "AGE s": "seconds since its metrics were read",
    "WAITING": "requests in the engine's queue",
    "RUNNING": "requests in the engine's batch",
    "KV": "share of its KV cache blocks in use, 0 to 1",
    "IN FLIGHT": "requests in flight there from this EPP process, and from peers that share theirs",
    "REQUESTS": "all requests there: scraped ones, and ours sent since",
    "CACHED": "predicted prefix cache hit of this request, in prompt tokens",
    "QUEUED": "prompt tokens sent there and not yet computed",
    "ADAPTERS": "LoRA adapters in its batch; - is none, ? is unknown",
    "FILTER": "step that drops endpoints; LEFT is how many remain",
    "SCORE": "finalist; a column for each scorer, x its weight: raw score = weighted score",
    "COST": "finalist; a column for each part of the estimated cost",
    "TOTAL": "sum of the weighted scores or of the costs: the highest score or the lowest cost is best",
    "ORDER": "1 is the chosen endpoint, 2 the first fallback; empty is not named",
    "chosen by": "picker; rendezvous decides among near totals by a hash of the conversation",
    "runner-up": "endpoint with the best total but that of the chosen one",
}

#: Meaning of the lines of stages.
_STAGE_LEGEND = {
    "prefill": "endpoint that computes the prompt before the chosen one, or why the chosen one does",
    "encode": "endpoints that encode images, videos and audio before, or why none does",
}

#: Meaning of the terms of the cost `estimated-time`; those after `batch` are delays of other requests,
#: and of later tokens.
_COST_TERMS = {
    "queue": "wait for the prompt tokens that are queued there",
    "prefill": "computation of the uncached tokens of this prompt",
    "iteration": "rest of the running iteration, and that of the first token",
    "adapter": "load of the LoRA adapter, and the wait for a slot",
    "memory": "wait until responses end that fill the KV cache",
    "batch": "wait for a place in the batch of the engine",
    "slowdown": "slower tokens of this response and of those beside it",
    "waiting": "delay of requests that wait for their first token there",
    "waste": "work that another endpoint has done: its cached tokens and loaded adapter",
    "crowding": "later cache misses of conversations that this one displaces",
}


def render_legend(explanation: Json) -> str:
    """Renders the meaning of all columns, and of the last line, one per line."""
    stages = _find_stages(explanation)
    meanings = {}
    for name, text in _LEGEND.items():
        meanings[name] = text
        if name == "COST":
            costs = [choice.get("cost") or {} for choice in (explanation, *stages.values())]
            shown = [term for cost in costs for term in cost.get("terms", ())]
            meanings |= {term: _COST_TERMS[term] for term in shown if term in _COST_TERMS}
    meanings |= {name: _STAGE_LEGEND[name] for name in stages}
    width = max(map(len, meanings))
    return "".join(f"{name:<{width}}  {text}\n" for name, text in meanings.items())


def render_table(explanation: Json) -> str:
    """Renders an explanation as text."""
    if explanation["outcome"] in {"rejection", "deferral"}:
        return _refused(explanation)
    health = explanation.get("health")
    sections = [_request_line(explanation), _in_play(explanation["candidates"], health)]
    is_failing = health and all(condition["state"] in _FAILING for condition in health.values())
    if is_failing or "least-bad" in explanation["excluded_by_health"]:
        sections.append("all endpoints are failing; the least bad is tried")
    sections += [*_tables(explanation), _chosen(explanation)]
    for name, stage in _find_stages(explanation).items():
        sections += _stage(name, stage)
    if explanation.get("kv_cache_source"):
        sections.append(f"cached tokens can be pulled from {explanation['kv_cache_source']}")
    return "\n\n".join(sections) + "\n"


def _tables(choice: Json) -> list[str]:
    """Filters, scores and costs of a choice, where it has them."""
    tables = []
    if choice["filters"]:
        tables.append(_steps(choice["filters"]))
    if choice["scorers"]:
        tables.append(_scores(choice))
    if choice.get("cost"):
        tables.append(_costs(choice))
    return tables


def _find_stages(explanation: Json) -> dict[str, Json]:
    """Stages that other endpoints may do, by name."""
    stages = explanation.get("disaggregation") or {}
    return {name: stages[name] for name in _STAGE_LEGEND if stages.get(name)}


def _stage(name: str, stage: Json) -> list[str]:
    """The other endpoints for a stage and the tables of their choice, or why there are none."""
    if not stage["endpoints"]:
        return [f"{name}: the chosen endpoint itself ({stage['reason']})"]
    line = f"{name}: {', '.join(stage['endpoints'])}"
    line += f", chosen by {stage['picker']} of profile {stage['profile']}"
    if stage["runner_up"]:
        line += f"; runner-up: {stage['runner_up']}"
    if stage["degraded"]:
        line += f"\ndegraded: {stage['degraded']}"
    return [line, *_tables(stage)]


def render_past(record: Json) -> str:
    """Renders a recorded request as text."""
    if record["outcome"] == "rejection":
        asked_for = f", model {record['model']}" if record["model"] else ""
        line = f"request {record['id']}: {record['seconds_ago']:.1f} s ago{asked_for}"
        line += _format_same_id(record)
        return f"{line}\ncause: {record['cause']}\n{render_table(record)}"
    came = "still open" if record["seconds"] is None else f"took {record['seconds']:.3f} s"
    status = f"status {record['status']}" if record["status"] else "no answer seen"
    used = _format_usage(record)
    line = f"request {record['id']}: {record['seconds_ago']:.1f} s ago, {status}, {came}"
    line += _format_first_token(record)
    if used:
        line += f"; tokens reported: {used}"
    return f"{line}{_format_same_id(record)}\n{render_table(record)}"


def _format_first_token(record: Json) -> str:
    """Time to the first token, with what was predicted; empty where it was not observed."""
    actual_s, predicted_s = record["first_token_s"], record["predicted_first_token_s"]
    if actual_s is None:
        return ""
    predicted = "" if predicted_s is None else f" (predicted {1e3 * predicted_s:.0f} ms)"
    return f", first token {1e3 * actual_s:.0f} ms{predicted}"


def _format_usage(record: Json) -> str:
    """Tokens that the engine reported, the cached ones with what was predicted."""
    chosen = record["endpoints"][0]
    hits = [it["matched_tokens"] for it in record["candidates"] if it["endpoint"] == chosen]
    predicted = {"cached": f" (predicted {max(hits, default=0)})"}
    return ", ".join(
        f"{tokens} {kind}{predicted.get(kind, '')}"
        for kind, tokens in sorted(record["usage"].items())
    )


def _format_same_id(record: Json) -> str:
    """Line that says how many requests have the id of a record; empty where it is the only one."""
    count, others = record["num_same_id"], record["same_id_sequences"]
    if count == 1:
        return ""
    shown = [str(sequence) for sequence in others if sequence != record["sequence"]]
    more = ", ..." if count > len(others) else ""
    return (
        f"\n{count} requests have this id, and this is --sequence {record['sequence']}; "
        f"others: {', '.join(shown)}{more}"
    )


def _refused(explanation: Json) -> str:
    lines = [f"refused with {explanation['status']}: {explanation['message']}"]
    if explanation["outcome"] == "deferral":
        awaited = explanation["preferred_endpoint"] or "an endpoint"
        lines[0] = f"waits for {awaited}, or is {lines[0]}"
    if explanation["reason"]:
        lines.append(f"reason: {explanation['reason']}")
    if explanation["retry_after_s"] is not None:
        lines.append(f"retry after: {explanation['retry_after_s']} s")
    return "\n".join(lines) + "\n"


def _request_line(explanation: Json) -> str:
    request = explanation["request"]
    facts = [request["api"], f"model {request['model'] or '-'}"]
    if request["adapter"]:
        facts.append(f"adapter {request['adapter']}")
    facts.append(f"about {request['prompt_tokens']} prompt tokens")
    if request.get("objective"):
        facts.append(f"priority {request['priority']} by objective {request['objective']}")
    if request["stream"]:
        facts.append("streamed")
    if request["subset"] is not None:
        facts.append(f"limited to {', '.join(request['subset']) or 'none'}")
    lines = [f"request: {', '.join(facts)}"]
    rewrite = explanation.get("model_rewrite")
    if rewrite:
        how = "in the body" if rewrite["editable"] else "but the body cannot be edited"
        client = f" in place of {rewrite['client']}" if rewrite.get("client") else ""
        lines.append(f"rewrite: the engine is asked for {rewrite['name']}{client}, {how}")
    if explanation.get("model_unlisted"):
        lines.append("model:   no endpoint lists it; routed as if all served it")
    if explanation.get("pool"):
        lines.append(f"pool:    {explanation['pool']}")
    return "\n".join([*lines, f"profile: {explanation['profile']}"])


def _in_play(candidates: Sequence[Json], health: Json | None) -> str:
    """Candidates, and endpoints excluded from them by known health."""
    head: tuple[str, ...] = (
        *("CANDIDATE", "AGE s", "WAITING", "RUNNING", "KV", "IN FLIGHT", "REQUESTS", "CACHED"),
        *("QUEUED", "ADAPTERS"),
    )
    rows: list[tuple[str, ...]] = [
        (
            candidate["endpoint"],
            _number(candidate["age_s"], 2),
            _number(candidate["waiting"], 0),
            _number(candidate["running"], 0),
            _number(candidate["kv_usage"], 2),
            str(candidate["in_flight"]),
            _number(candidate["requests"], 0),
            str(candidate["matched_tokens"]),
            str(candidate["queued_tokens"]),
            _names(candidate["adapters"]),
        )
        for candidate in candidates
    ]
    if any(candidate.get("extra") for candidate in candidates):
        head = (*head, "EXTRA")
        rows = [
            (*row, _metrics(candidate.get("extra")))
            for row, candidate in zip(rows, candidates, strict=True)
        ]
    if health:
        shown = {candidate["endpoint"] for candidate in candidates}
        rows += [
            (address, *("-" for _ in head[1:]))
            for address, condition in health.items()
            if address not in shown and condition["state"] != "healthy"
        ]
        head = (head[0], "HEALTH", *head[1:])
        rows = [(row[0], _condition(health.get(row[0])), *row[1:]) for row in rows]
    return _aligned(head, rows)


def _metrics(extra: Mapping[str, float] | None) -> str:
    """Extra metrics of an endpoint, as text."""
    return ",".join(f"{name}={value:g}" for name, value in (extra or {}).items()) or "-"


def _condition(health: Json | None) -> str:
    """Health of an endpoint with its cause and duration, as text."""
    if health is None:
        return "?"
    if health["state"] == "healthy":
        return "ok"
    since = "" if health["for_s"] is None else f" for {health['for_s']:.0f} s"
    return f"{health['state']}{since}{': ' if health['cause'] else ''}{health['cause']}"


def _steps(filters: Sequence[Json]) -> str:
    head = ("FILTER", "LEFT", "DROPPED")
    rows = []
    for step in filters:
        rows.append(
            (step["name"], str(len(step["survivors"])), ", ".join(step["dropped"]) or "none")
        )
        rows += [_branch(branch) for branch in step.get("branches", ())]
    return _aligned(head, rows)


def _branch(branch: Json) -> tuple[str, str, str]:
    """One filter of a filter tree and the branch taken after it."""
    left = branch["survivors"]
    dropped = (", ".join(branch["dropped"]) or "none") if left else "all"
    fault = f", raised {branch['error_type']}" if branch["error_type"] else ""
    way = f"then {branch['branch']}" if branch["branch"] else "the end"
    return f"  {branch['name']}", str(len(left)), f"{dropped}{fault}; {way}"


def _sorted_finalists(explanation: Json, key: Callable[[Json], float]) -> list[Json]:
    """Finalists, the best first; of equal ones, those that were named come first."""
    return sorted(
        explanation["scored_candidates"],
        key=lambda finalist: (key(finalist), finalist["rank"] or math.inf),
    )


def _scores(explanation: Json) -> str:
    scorers = explanation["scorers"]
    head = (
        "SCORE",
        *(f"{scorer['name']} x{scorer['weight']:g}" for scorer in scorers),
        "TOTAL",
        "ORDER",
    )
    ordered = _sorted_finalists(explanation, lambda finalist: -finalist["total"])
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


def _costs(explanation: Json) -> str:
    cost = explanation["cost"]
    unit = f" {cost['unit']}" if cost["unit"] else ""
    head = (f"COST{unit}", *cost["terms"], "TOTAL", "ORDER")
    ordered = _sorted_finalists(explanation, lambda finalist: finalist["cost"])
    rows = [
        (
            finalist["endpoint"],
            *(f"{term:.1f}" for term in finalist["terms"]),
            f"{finalist['cost']:.1f}",
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
    if explanation.get("runner_up"):
        line += f"; runner-up: {explanation['runner_up']}"
    if explanation["degraded"]:
        line += f"\ndegraded: {explanation['degraded']}"
    if explanation.get("match_source", "estimate") != "estimate":
        line += f"\ncached tokens by KV events: {explanation['match_source']}"
    return line


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}"


def _names(names: Sequence[str] | None) -> str:
    if names is None:
        return "?"
    return ", ".join(names) or "-"


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligns columns two spaces apart: first flush left, last free, numbers flush right."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if at in (0, len(head) - 1) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
