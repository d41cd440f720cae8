"""`make bench`: every bar, one after the other; results go to bench/results.

    python -m bench.run [--only NAME ...]

Prints one line per bar: what was wanted, what was measured. Takes under ten minutes; `agreement`,
`capacity`, `cluster` (needs `make envtest`) and `simulator_large`, which take minutes each, are only
run when they are named. The figures are of this machine and this hour: compare ratios, not microseconds.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from bench import rig
from bench.replay_agreement import is_replay_met, replay_ratios


def command(*words: str) -> str:
    """Run a bench and return what it printed."""
    print("+ python", *words, flush=True)
    done = subprocess.run(
        [sys.executable, *words], cwd=rig.ROOT, text=True, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise SystemExit(f"python {' '.join(words)} ended with {done.returncode}\n{done.stdout}")
    return done.stdout


def read(name: str) -> dict:
    """A result as it was written."""
    return json.loads((rig.RESULTS / f"{name}.json").read_text())


def demo() -> dict:
    """The demo workload by both strategies."""
    began = time.monotonic()
    page = command("-m", "extproc", "demo")
    took = time.monotonic() - began
    ratios = [float(x) for x in re.findall(r"([\d.]+)%", _row(page, "prefix cache hit ratio"))]
    p50 = [int(x) for x in _row(page, "TTFT p50, ms").split()[-2:]]
    p95 = [int(x) for x in _row(page, "TTFT p95, ms").split()[-2:]]
    figures = {
        "seconds": round(took, 1),
        "hit_ratio_round_robin": ratios[0] / 100,
        "hit_ratio_default": ratios[1] / 100,
        "hit_gain": round(ratios[1] / ratios[0], 2),
        "ttft_p50_ms": p50,
        "ttft_p95_ms": p95,
    }
    rig.write("demo", "python -m extproc demo", figures)
    return figures


def _row(page: str, name: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(name))


def scrape() -> dict:
    """Scraping 100 endpoints."""
    words = ("bench/scrape.py", "--seconds", "10", "--json")
    figures = json.loads(command(*words).splitlines()[-1])
    del figures["machine"], figures["python"]  # the record says both
    rig.write("scrape", f"python {' '.join(words)}", figures)
    return figures


def written(name: str, *arguments: str) -> Callable[[], dict]:
    """A bench that writes its result itself; the result has its name, however it is called."""

    def bench() -> dict:
        command("-m", *(arguments or (f"bench.{name}",)), "--write")
        return read(name)

    return bench


def _seconds(result: Mapping) -> str:
    """CPU, and what the clock showed on a machine that others may have used."""
    return f"{result['cpu_s']} (clock {result['wall_s']}, load average {result['load_average']})"


def _first_sync(result: Mapping) -> str:
    """From the start of the process, and how much of that a picker without a cluster takes."""
    sync = result["first_sync"]
    load = result["load_average"]
    return f"{sync['ready_s']} (of which start {sync['of_which_start_s']}, load average {load})"


#: Who is measured with waiting requests: least-request, the default strategy, and gRPC alone.
_WAITED = {"": "least-request", "default_": "adaptive", "floor_": "gRPC alone"}


def _grown(record: Mapping, name: str, *, when: str) -> float:
    """Megabytes above the start."""
    return (record[f"{name}{when}_mib"] - record[f"{name}before_mib"]) * 1.048576


def _kb_each(record: Mapping, name: str) -> float:
    """Memory of a waiting request (thousand bytes)."""
    return _grown(record, name, when="holding") * 1000 / record["requests"]


def _waited(describe: Callable[[str], str]) -> str:
    return ", ".join(f"{describe(key)} {name}" for key, name in _WAITED.items())


def _over(result: Mapping) -> str:
    """Times the floor as gRPC comes, and the floor run as extproc runs gRPC, which is cheaper."""
    plain, alike = result["cpu_ratio_median"], result["cpu_ratio_alike_median"]
    return f"{plain:.2f} (floor with our gRPC settings {alike:.2f})"


def _outage(result: Mapping) -> str:
    """Refused of all, and when changes were in force again."""
    away = result["outage"]
    return f"{away['refused']} of {away['picks']}, exact {away['exact_after_s']} s after"


#: Bar, bench, what was wanted, the figure, and whether it is met.
BARS: Sequence[tuple[str, str, str, Callable[[Mapping], object], Callable[[Mapping], bool]]] = (
    ("1", "demo", "hit ratio >= 1.5 x round robin", lambda r: r["hit_gain"], lambda r: r["hit_gain"] >= 1.5),
    ("2", "overhead", "FDS: CPU <= 1.35 x floor", lambda r: _over(r["fds"]), lambda r: r["fds"]["cpu_ratio_alike_median"] <= 1.35),
    ("2", "overhead", "buffered: CPU <= 1.35 x floor", lambda r: _over(r["buffered"]), lambda r: r["buffered"]["cpu_ratio_alike_median"] <= 1.35),
    ("2", "overhead", "FDS: added p50 <= 1.5 ms", lambda r: r["fds"]["added_p50_ms"], lambda r: r["fds"]["added_p50_ms"] <= 1.5),
    ("2", "overhead", "buffered: added p50 <= 1.5 ms", lambda r: r["buffered"]["added_p50_ms"], lambda r: r["buffered"]["added_p50_ms"] <= 1.5),
    ("3", "large", "400 kB prompt <= 4 ms CPU", lambda r: r["prompts_400kB"]["cpu_ms"], lambda r: r["prompts_400kB"]["cpu_ms"] <= 4),
    ("3", "large", "peak memory <= 3 x body", lambda r: r["memory"]["peak_ratio"], lambda r: r["memory"]["peak_ratio"] <= 3),
    ("3", "large", "1,000 chunks <= 1.1 x 10 chunks", lambda r: r["chunks"]["ratio_median"], lambda r: r["chunks"]["ratio_median"] <= 1.1),
    ("4", "scrape", "100 endpoints/s <= 8 % of a core", lambda r: r["cpu_share_percent"], lambda r: r["cpu_share_percent"] <= 8),
    ("4", "scrape", "one page <= 150 us", lambda r: r["parse_us_p50"], lambda r: r["parse_us_p50"] <= 150),
    ("5", "route", "route() <= 500 us median", lambda r: r["route_us_p50"], lambda r: r["route_us_p50"] <= 500),
    ("5", "index", "index, full and churning: <= 100 bytes a block", lambda r: ", ".join(f"{row['bytes_per_block']} ({row['own_blocks']} own blocks a chain)" for row in r["churn"]), lambda r: all(row["bytes_per_block"] <= 100 for row in r["churn"])),
    ("-", "agreement", "real / simulated within 10 %", lambda r: r["worst_deviation"], lambda r: r["worst_deviation"] <= 0.1),
    ("-", "replay", "replay of recorded decisions / real mean TTFT within 15 %, decisions alike >= 99 %", replay_ratios, is_replay_met),
    ("6", "simulator", "8,000 requests, 8 engines <= 3 s of CPU", _seconds, lambda r: r["cpu_s"] <= 3),
    ("6", "simulator_large", "100,000, 1,000 engines <= 300 s of CPU", _seconds, lambda r: r["cpu_s"] <= 300),
    ("-", "cluster", "500 pods, 20 pools: first sync <= 3 s", _first_sync, lambda r: r["first_sync"]["ready_s"] <= 3),
    ("-", "cluster", "not ready: out of picks <= 100 ms after the event", lambda r: r["reaction"]["last_pick_after_event_ms_max"], lambda r: r["reaction"]["last_pick_after_event_ms_max"] <= 100),
    ("-", "cluster", "1,000 pod updates/s <= 20 % of a core", lambda r: r["updates_replayed"]["cpu_share_percent"], lambda r: r["updates_replayed"]["cpu_share_percent"] <= 20),
    ("-", "cluster", "API server away for 60 s: picks refused", _outage, lambda r: not r["outage"]["refused"]),
    ("-", "capacity", "a tenant beside one with 10 x: p95 TTFT <= 1.5 x alone", lambda r: r["tenants"]["ratios"]["ttft_p95_s"], lambda r: r["tenants"]["ratios"]["ttft_p95_s"] <= 1.5),
    ("-", "capacity", "3 x overload: goodput >= 95 % of capacity", lambda r: r["overload"]["ratios"]["output_tokens_per_s"], lambda r: r["overload"]["ratios"]["output_tokens_per_s"] >= 0.95),
    ("-", "capacity", "3 x overload: priority p99 TTFT <= 1.2 x alone", lambda r: r["overload"]["ratios"]["ttft_p99_s"], lambda r: r["overload"]["ratios"]["ttft_p99_s"] <= 1.2),
    ("-", "holding", "10,000 waiting requests: <= 12 kB each", lambda r: _waited(lambda name: f"{_kb_each(r, name):.1f}"), lambda r: max(_kb_each(r, name) for name in ("", "default_")) <= 12),
    ("-", "holding", "10 s after they left: <= 40 MB above the start", lambda r: _waited(lambda name: f"{_grown(r, name, when='after'):.0f}"), lambda r: max(_grown(r, name, when="after") for name in ("", "default_")) <= 40),
    ("-", "holding", "10,000 waiting requests are sent on within 1 s", lambda r: _waited(lambda name: f"{r[f'{name}release_s']:.2f}"), lambda r: max(r["release_s"], r["default_release_s"]) <= 1),
    ("-", "pauses", "64 MiB bodies: peak memory <= 1.5 x body", lambda r: r["bodies"]["peak_ratio"], lambda r: r["bodies"]["peak_ratio"] <= 1.5),
    ("-", "pauses", "64 MiB bodies: no stall over 20 ms of CPU", lambda r: f"{r['bodies']['stall_max_ms']} ms", lambda r: r["bodies"]["stall_max_ms"] <= 20),
)  # fmt: skip

BENCHES: Mapping[str, Callable[[], dict]] = {
    "route": written("route", "bench.route", "--strategy", "balanced"),
    "index": written("index"),
    "scrape": scrape,
    "large": written("large"),
    "overhead": written("overhead"),
    "demo": demo,
    "agreement": written("agreement"),
    "cluster": written("cluster"),
    "capacity": written("capacity", "bench.capacity", "--only", "tenants", "overload"),
    "holding": written("holding"),
    "pauses": written("pauses"),
    "simulator": written("simulator"),
    "simulator_large": written("simulator_large", "bench.simulator", "--large"),
}

#: Only run when they are named: minutes each.
LONG = frozenset({"agreement", "capacity", "cluster", "simulator_large"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="*", choices=sorted(BENCHES), default=sorted(BENCHES.keys() - LONG)
    )
    args = parser.parse_args()
    results = {name: bench() for name, bench in BENCHES.items() if name in args.only}
    print(f"\n{'bar':4}{'wanted':36}{'measured':>12}")
    for number, name, wanted, figure, met in BARS:
        if name in results:
            verdict = "met" if met(results[name]) else "MISSED"
            print(f"{number:4}{wanted:36}{figure(results[name])!s:>12}  {verdict}")


if __name__ == "__main__":
    main()
