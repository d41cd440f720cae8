"""An explanation for a terminal: columns of text."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.telemetry.explanation import Json


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
    if explanation.get("cost"):
        sections.append(_costs(explanation))
    sections.append(_chosen(explanation))
    return "\n\n".join(sections) + "\n"


def render_past(told: Json) -> str:
    """A decision of the past for a terminal.

    Args:
        told: From `explanation.recorded`, or its JSON from a server.
    """
    came = "still open" if told["seconds"] is None else f"took {told['seconds']:.3f} s"
    status = f"status {told['status']}" if told["status"] else "no answer seen"
    used = ", ".join(f"{tokens} {kind}" for kind, tokens in sorted(told["usage"].items()))
    line = f"request {told['id']}: {told['seconds_ago']:.1f} s ago, {status}, {came}"
    if used:
        line += f"; tokens reported: {used}"
    return f"{line}\n{render_table(told)}"


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
    if request.get("objective"):
        facts.append(f"priority {request['priority']} by objective {request['objective']}")
    if request["stream"]:
        facts.append("streamed")
    if request["subset"] is not None:
        facts.append(f"limited to {', '.join(request['subset']) or 'nobody'}")
    lines = [f"request: {', '.join(facts)}"]
    rewrite = explanation.get("model_rewrite")
    if rewrite:
        how = "in the body" if rewrite["editable"] else "but the body cannot be edited"
        client = f" in place of {rewrite['client']}" if rewrite.get("client") else ""
        lines.append(f"rewrite: the engine is asked for {rewrite['name']}{client}, {how}")
    if explanation.get("unlisted"):
        lines.append("model:   no endpoint lists it; routed as if all served it")
    if explanation.get("pool"):
        lines.append(f"pool:    {explanation['pool']}")
    return "\n".join([*lines, f"profile: {explanation['profile']}"])


def _in_play(candidates: Sequence[Json]) -> str:
    head = (
        *("CANDIDATE", "AGE s", "WAITING", "RUNNING", "KV", "IN FLIGHT", "REQUESTS", "CACHED"),
        *("QUEUED", "ADAPTERS"),
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
            str(candidate["queued_tokens"]),
            _names(candidate["adapters"]),
        )
        for candidate in candidates
    ]
    return _aligned(head, rows)


def _steps(filters: Sequence[Json]) -> str:
    head = ("FILTER", "LEFT", "DROPPED")
    rows = []
    for step in filters:
        rows.append(
            (step["name"], str(len(step["survivors"])), ", ".join(step["dropped"]) or "nobody")
        )
        rows += [_branch(branch) for branch in step.get("branches", ())]
    return _aligned(head, rows)


def _branch(branch: Json) -> tuple[str, str, str]:
    """A filter on the way through a tree, and what followed it."""
    left = branch["survivors"]
    dropped = (", ".join(branch["dropped"]) or "nobody") if left else "everybody"
    fault = f", raised {branch['fault']}" if branch["fault"] else ""
    way = f"then {branch['way']}" if branch["way"] else "the end"
    return f"  {branch['name']}", str(len(left)), f"{dropped}{fault}; {way}"


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


def _costs(explanation: Json) -> str:
    cost = explanation["cost"]
    unit = f" {cost['unit']}" if cost["unit"] else ""
    head = (f"COST{unit}", *cost["terms"], "TOTAL", "RANK")
    ordered = sorted(explanation["finalists"], key=lambda finalist: finalist["cost"])
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
