"""Tables of the chaos, hostile-input and soak benches for docs/benchmarks/robustness.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.hostile_watch import MIB


def describe_run(result: Mapping[str, Any]) -> str:
    """Return command, machine, commit and date of a recorded run."""
    machine = result["machine"]
    return (
        f"`{result['command']}`, {result['date']}, commit {result['commit']}, {machine['cores']} cores "
        f"of {machine['cpu']}, {machine['memory_gib']} GiB, Python {machine['python']}."
    )


#: Counters that a chaos run sums up, by what they are called there.
CHAOS_COUNTS: Mapping[str, str] = {
    "extproc_http2_limits_total": "connections ended for floods of HTTP/2 frames",
    "extproc_kv_event_batches_total": "batches of KV events",
    "extproc_mapped_prompts_total": "prompts to render",
    "extproc_peer_sync_failures_total": "connections between replicas that failed or ended",
}


def chaos_table(result: Mapping[str, Any]) -> str:
    """Return the bars of a chaos run, and what happened in it."""
    rows = ["| bar | wanted | measured | |", "|---|---|---|---|"]
    rows += [
        f"| {bar['name']} | {bar['wanted']} | {bar['measured']} | "
        f"{'met' if bar['is_met'] else '**missed**'} |"
        for bar in result["bars"]
    ]
    names = {
        "kill": "engines killed",
        "hang": "engines hung",
        "entries": "foreign entries in Redis",
        "edits": "edits of files",
    }
    counts = dict(result["engines"])
    for name, count in result["other"].items():
        if 'result="lost"' in name:
            continue  # as many as hostile engines say that they published
        metric = CHAOS_COUNTS.get(name.partition("{")[0], name)
        counts[metric] = counts.get(metric, 0) + count
    events = ", ".join(f"{names.get(name, name)} {count}" for name, count in counts.items())
    hostile = sum(result["hostile_answers"].values())
    return "\n".join(
        [
            *rows,
            "",
            (
                f"Events: {events}, hostile requests {hostile}. Median latency {result['quiet_p50_s'] * 1e3:.0f} ms "
                f"before and {result['p50_s'] * 1e3:.0f} ms beside chaos."
            ),
            "",
            describe_run(result),
        ]
    )


def hostile_table(result: Mapping[str, Any]) -> str:
    """Return one row for each kind of hostile input."""
    rows = [
        "| kind | requests | longest hold of the event loop | CPU for a request | memory, peak | growth |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        missed = f" **missed: {', '.join(row['missed'])}**" if row["missed"] else ""
        rows.append(
            f"| {row['kind']} | {row['requests']} | {row['stall_s'] * 1e3:.0f} ms | "
            f"{row['cpu_s'] * 1e3:.1f} ms | {row['peak_bytes'] / MIB:.0f} MiB | "
            f"{row['grown_bytes'] / MIB:+.1f} MiB{missed} |"
        )
    return "\n".join([*rows, "", describe_run(result)])


def soak_table(result: Mapping[str, Any]) -> str:
    """Return the memory after shares of the requests, one row for each part that was measured."""
    rows = [
        "| part | requests | MiB at 10 % | 25 % | 50 % | 75 % | 100 % | MiB for 100,000 requests, last half |",
        "|---|---|---|---|---|---|---|---|",
    ]
    runs = []
    for part in ("core", "wire", "envoy"):
        if part not in result:
            continue
        run = result[part]
        sizes = sorted((int(count), size) for count, size in run["mib"].items())
        shown = [
            str(min(sizes, key=lambda point: abs(point[0] - share * run["requests"]))[1])
            for share in (0.1, 0.25, 0.5, 0.75, 1.0)
        ]
        rows.append(
            f"| {part} | {run['requests']:,} | {' | '.join(shown)} | {run['mib_per_100k']} |"
        )
        runs.append(describe_run({**result, **run}))
    if "hostile" in result:
        run = result["hostile"]
        rows += [
            "",
            f"| after {run['requests_of_each']:,} hostile requests of a kind | MiB |",
            "|---|---|",
        ]
        rows += [f"| {kind} | {grown:+.1f} |" for kind, grown in run["grown_mib"].items()]
        runs.append(describe_run({**result, **run}))
    return "\n".join([*rows, "", *dict.fromkeys(runs)])
