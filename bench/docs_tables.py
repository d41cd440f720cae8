"""Tables of measured results in `docs/benchmarks`, generated from `bench/results`.

    python -m bench.docs_tables     # rewrites the blocks between the markers

A test compares every block with the results, so that neither can be changed alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import bench.arena.report
import bench.kv_events
import bench.peers.report
import bench.peers.routing
from bench import (
    agreement,
    capacity,
    match_sources,
    peer_channels,
    ranks,
    replay_agreement,
    replicas,
    rig,
    robustness,
    run,
    scaling,
    summary,
)
from bench.real_vllm import kv_events, report, rounds


def block() -> str:
    """One row per bar that has a result."""
    rows = ["| bar | wanted | measured | | command |", "|---|---|---|---|---|"]
    notes = []
    for number, name, wanted, figure, met in run.BARS:
        if not (rig.RESULTS / f"{name}.json").exists():
            continue
        result = run.read(name)
        verdict = "met" if met(result) else "**missed**"
        rows.append(
            f"| {number} | {wanted} | {figure(result)} | {verdict} | `{result['command']}` |"
        )
        machine = result["machine"]
        notes.append(
            f"{result['date']}, {machine['cores']} cores of {machine['cpu']}, "
            f"{machine['memory_gib']} GiB, Python {machine['python']}"
        )
    where = "; ".join(sorted(set(notes)))
    summary = [f"Measured {where}." if where else "Nothing measured yet.", *_floor()]
    return "\n".join([*rows, "", " ".join(summary)])


def _floor() -> list[str]:
    """Costs of the gRPC runtime alone, beside those of extproc."""
    if not (rig.RESULTS / "overhead.json").exists():
        return []
    result = run.read("overhead")
    return [
        f"In {name}, extproc takes {row['extproc_cpu_us']} us of CPU per request and the constant "
        f"floor {row['floor_cpu_us']} us, {row['floor_alike_cpu_us']} us with gRPC run as extproc "
        f"runs it; at one connection the floor alone adds {row['floor_added_p50_ms']} ms; at half "
        f"of saturation the p99 is {row['half_saturation']['p99_ms']} ms."
        for name, row in (("FDS", result["fds"]), ("buffered", result["buffered"]))
    ]


def arena_block() -> str:
    """Adaptive beside published strategies on random scenarios."""
    if not (rig.RESULTS / "arena.json").exists():
        return "Nothing measured yet."
    return bench.arena.report.block(run.read("arena"))


def real_block() -> str:
    """Real engines beside simulated ones."""
    return report.block(run.read("real_vllm"))


def real_rounds_block() -> str:
    """Strategies on real engines with tight caches."""
    if not (rig.RESULTS / f"{rounds.RESULT}.json").exists():
        return "Nothing measured yet."
    return rounds.block(run.read(rounds.RESULT))


def real_events_block() -> str:
    """Predictions by KV events beside real engines."""
    names = (kv_events.RESULT, kv_events.IMAGES_RESULT)
    results = [run.read(name) for name in names if (rig.RESULTS / f"{name}.json").exists()]
    return kv_events.block(results) if results else "Nothing measured yet."


def agreement_block() -> str:
    """Real runs beside what the simulator says of them."""
    if not (rig.RESULTS / "agreement.json").exists():
        return "Nothing measured yet."
    return agreement.block(run.read("agreement"))


def replay_block() -> str:
    """Replays of recordings beside the runs that were recorded."""
    if not (rig.RESULTS / "replay.json").exists():
        return "Nothing measured yet."
    return replay_agreement.replay_block(run.read("replay"))


def sharing_block() -> str:
    """Several pickers behind a real Envoy, by themselves and with an exchange."""
    return replicas.real_block(run.read("replicas"))


def peer_channels_block() -> str:
    """Delay and CPU of the ways in which replicas exchange requests."""
    return peer_channels.block(run.read("peer_channels"))


def replicas_block() -> str:
    """Several pickers beside one."""
    if not (rig.RESULTS / "replicas.json").exists():
        return "Nothing measured yet."
    return replicas.block(run.read("replicas"))


def match_sources_block() -> str:
    """Kinds of knowledge of prefix caches beside each other."""
    return match_sources.block(run.read("match_sources"))


def kv_events_block() -> str:
    """Costs of KV events."""
    return bench.kv_events.block(run.read("kv_events"))


def ranks_block() -> str:
    """Data-parallel ranks beside engines."""
    return ranks.block(run.read("ranks"))


def capacity_block() -> str:
    """Tenants and priorities while requests wait."""
    if not (rig.RESULTS / "capacity.json").exists():
        return "Nothing measured yet."
    return capacity.block(run.read("capacity"))


def scaling_block() -> str:
    """Autoscaling policies beside each other."""
    if not (rig.RESULTS / "scaling.json").exists():
        return "Nothing measured yet."
    return scaling.block(run.read("scaling"))


def peers_block() -> str:
    """Cost beside llm-d's picker."""
    if not (rig.RESULTS / "peers.json").exists():
        return "Nothing measured yet."
    return bench.peers.report.block(run.read("peers"))


def peers_routing_block() -> str:
    """Hits and times beside llm-d's picker."""
    if not (rig.RESULTS / "peers_routing.json").exists():
        return "Nothing measured yet."
    return bench.peers.routing.block(run.read("peers_routing"))


def collectors_block() -> str:
    """Thresholds of the garbage collector beside each other."""
    if not (rig.RESULTS / "pauses.json").exists():
        return "Nothing measured yet."
    result = run.read("pauses")
    machine = result["machine"]
    columns = {
        "cpu_us": "CPU of a request, µs",
        "paused_us": "of it collector",
        "pause_max_ms": "longest pause, ms",
        "collections_per_1000": "collections of 1,000 requests",
        "full_collections": "full ones",
        "memory_mib": "MiB",
    }
    rows = [
        f"| {setting} | {' | '.join(str(figures[name]) for name in columns)} |"
        for setting, figures in result["collectors"].items()
    ]
    return "\n".join(
        [
            f"| thresholds | {' | '.join(columns.values())} |",
            f"|---|{'---|' * len(columns)}",
            *rows,
            "",
            (
                f"`{result['command']}`, {result['date']}, {machine['cores']} cores of {machine['cpu']}, "
                f"{machine['memory_gib']} GiB, Python {machine['python']}. Load average {result['load']}."
            ),
        ]
    )


def sizing_block() -> str:
    """Needs of a replica, from the results of several benches."""
    overhead, route = run.read("overhead"), run.read("route")
    scrape, cluster, holding = run.read("scrape"), run.read("cluster"), run.read("holding")
    waiting = holding["default_holding_mib"] - holding["default_before_mib"]
    rows = [
        (
            "CPU of a request, FULL_DUPLEX_STREAMED",
            f"{overhead['fds']['extproc_cpu_us']} µs",
            overhead,
        ),
        (
            "CPU of a request, buffered profile",
            f"{overhead['buffered']['extproc_cpu_us']} µs",
            overhead,
        ),
        (
            (
                f"a decision among {route['endpoints']} endpoints, prompt of {route['prompt_bytes']:,} bytes, "
                "`balanced`, median and p99"
            ),
            f"{route['route_us_p50']:.0f} and {route['route_us_p99']:.0f} µs",
            route,
        ),
        (
            f"scraping {scrape['endpoints']} endpoints every second",
            f"{scrape['cpu_share_percent']:.0f} % of a core",
            scrape,
        ),
        (
            f"{cluster['updates_replayed']['updates_per_s']:,} changes of pods per second",
            f"{cluster['updates_replayed']['cpu_share_percent']:.0f} % of a core",
            cluster,
        ),
        (f"{holding['requests']:,} waiting requests", f"{waiting:.0f} MiB of memory", holding),
    ]
    return "\n".join(
        [
            "| quantity | measured | command | date |",
            "|---|---|---|---|",
            *(
                f"| {name} | {figure} | `{result['command']}` | {result['date']} |"
                for name, figure, result in rows
            ),
        ]
    )


@dataclass(frozen=True)
class GeneratedBlock:
    """One generated block: the page it belongs to, relative to `docs/`, and its text."""

    page: str
    text: Callable[[], str]


#: Generated blocks by the name of their markers.
BLOCKS: Mapping[str, GeneratedBlock] = {
    "summary": GeneratedBlock("benchmarks/index.md", summary.block),
    "results": GeneratedBlock("benchmarks/overhead.md", block),
    "arena": GeneratedBlock("benchmarks/arena.md", arena_block),
    "collectors": GeneratedBlock("benchmarks/overhead.md", collectors_block),
    "real vllm": GeneratedBlock("benchmarks/real-engines.md", real_block),
    "real rounds": GeneratedBlock("benchmarks/real-engines.md", real_rounds_block),
    "real events": GeneratedBlock("benchmarks/real-engines.md", real_events_block),
    "agreement": GeneratedBlock("benchmarks/real-engines.md", agreement_block),
    "replay": GeneratedBlock("benchmarks/real-engines.md", replay_block),
    "replicas": GeneratedBlock("benchmarks/replicas.md", replicas_block),
    "peer_channels": GeneratedBlock("benchmarks/replicas.md", peer_channels_block),
    "peer_sync": GeneratedBlock("benchmarks/replicas.md", sharing_block),
    "capacity": GeneratedBlock("benchmarks/capacity.md", capacity_block),
    "scaling": GeneratedBlock("benchmarks/autoscaling.md", scaling_block),
    "sizing": GeneratedBlock("operations/sizing.md", sizing_block),
    "chaos": GeneratedBlock(
        "benchmarks/robustness.md", lambda: robustness.chaos_table(run.read("chaos"))
    ),
    "chaos redis": GeneratedBlock(
        "benchmarks/robustness.md", lambda: robustness.chaos_table(run.read("chaos_redis"))
    ),
    "hostile": GeneratedBlock(
        "benchmarks/robustness.md", lambda: robustness.hostile_table(run.read("hostile"))
    ),
    "hostile events": GeneratedBlock(
        "benchmarks/robustness.md",
        lambda: robustness.hostile_table(run.read("hostile_events_rendered")),
    ),
    "soak": GeneratedBlock(
        "benchmarks/robustness.md", lambda: robustness.soak_table(run.read("soak"))
    ),
    "match sources": GeneratedBlock("benchmarks/kv-events.md", match_sources_block),
    "kv events": GeneratedBlock("benchmarks/kv-events.md", kv_events_block),
    "ranks": GeneratedBlock("benchmarks/kv-events.md", ranks_block),
    "peers": GeneratedBlock("benchmarks/peers.md", peers_block),
    "peers routing": GeneratedBlock("benchmarks/peers.md", peers_routing_block),
}


def render(name: str) -> str:
    """A block with its markers, as it must stand in its page."""
    return f"<!-- {name} -->\n{BLOCKS[name].text()}\n<!-- /{name} -->"


def main() -> None:
    for name, entry in BLOCKS.items():
        path = rig.ROOT / "docs" / entry.page
        head, start, rest = path.read_text().partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition(f"<!-- /{name} -->")
        if not start or not end:
            sys.exit(f"{path}: wanted <!-- {name} --> and <!-- /{name} --> on lines of their own")
        path.write_text(head + render(name) + tail)


if __name__ == "__main__":
    main()
