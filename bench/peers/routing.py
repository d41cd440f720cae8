"""The same conversations through each picker, on fresh engines: hit ratio and time to first token.

Eight `extproc engine` with small caches; conversations of several turns, each turn sent after the
answer to the one before, a fixed number at once. The hit ratio is read from the engines' own
counters; TTFT is the client's, through Envoy.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.peers.pickers import (
    NAMES,
    SCRAPE_INTERVAL,
    BenchProcess,
    PickerPorts,
    envoy_config,
    extproc_argv,
    llmd_argv,
    server_ports,
)
from bench.robustness import describe_run
from extproc.demo import stack, traffic

#: Pickers in words that only this part compares.
ROUTING_NAMES: Final = {**NAMES, "round-robin": "extproc, round-robin"}

PICKERS: Final = ("go-equal", "native", "adaptive", "round-robin")

#: Tokens of an engine's cache: all conversations fit, or half of them.
KV_TOKENS: Final = (16_000, 8_000)

#: Engines and their conversations.
_NUM_ENGINES = 8
_CONVERSATIONS, _TURNS, _AT_ONCE, _SYSTEMS = 96, 5, 32, 8
_SYSTEM_CHARS, _FIRST_CHARS, _NEXT_CHARS = 3200, 2400, 800

#: Seconds after the start in which pickers learn of the engines.
_SETTLED_S = 3.0


class RoutingRun(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run.

    Attributes:
        kv_tokens: Tokens of an engine's cache.
        picker: Name of the picker.
        hit_ratio: Prompt tokens that engines found cached, of all.
        ttft_mean_ms: Time to first token, mean.
        ttft_p50_ms: Median.
        ttft_p95_ms: 95th percentile.
        follow_up_p50_ms: Median of turns behind the first.
        seconds: Until the last answer.
        cpu_s: CPU of the picker.
        busiest_ratio: Requests of the busiest engine over the mean.
    """

    kv_tokens: int
    picker: str
    hit_ratio: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    follow_up_p50_ms: float
    seconds: float
    cpu_s: float
    busiest_ratio: float


def conversations(seed: int) -> list[traffic.ChatConversation]:
    """Conversations of random words, several of which share a system prompt."""
    rng = random.Random(seed)

    def text(size: int) -> str:
        words: list[str] = []
        while sum(map(len, words)) + len(words) < size:
            words.append(f"w{rng.randrange(10_000):04d}")
        return " ".join(words)

    systems = [text(_SYSTEM_CHARS) for _ in range(_SYSTEMS)]
    sizes = [_FIRST_CHARS, *[_NEXT_CHARS] * (_TURNS - 1)]
    return [
        traffic.ChatConversation(
            model="demo",
            system=systems[number % _SYSTEMS],
            turns=tuple(text(size) for size in sizes),
        )
        for number in range(_CONVERSATIONS)
    ]


def picker_argv(picker: str, endpoints: Sequence[str], folder: Path, *, epp: str) -> list[str]:
    """Command line of a picker, without its ports."""
    if picker.startswith("go"):
        argv = llmd_argv(epp, endpoints, folder, name=picker)
        if picker == "go-equal":
            argv += ["--refresh-metrics-interval", SCRAPE_INTERVAL["plain"]]
        return argv
    strategy = {"native": "weighted"}.get(picker, picker)
    return extproc_argv(endpoints, "--strategy", strategy, "--transport", "native")


def run_once(picker: str, *, kv_tokens: int, number: int, epp: str) -> RoutingRun:
    """Hold all conversations through a picker, everything started anew."""
    processes: list[BenchProcess] = []
    with tempfile.TemporaryDirectory(prefix="routing-") as name:
        folder = Path(name)

        def start(name: str, argv: Sequence[str], port: int) -> BenchProcess:
            processes.append(BenchProcess(name, argv, folder))
            processes[-1].wait_until_listening(port)
            return processes[-1]

        try:
            ports = [stack.free_port() for _ in range(_NUM_ENGINES)]
            for port in ports:
                argv = extproc_argv(())[:3]
                argv += ["engine", "--port", str(port), "--kv-tokens", str(kv_tokens)]
                processes.append(
                    BenchProcess(f"engine-{port}", [*argv, "--max-loras", "0"], folder)
                )
            for process, port in zip(processes, ports, strict=True):
                process.wait_until_listening(port)
            endpoints = [f"127.0.0.1:{port}" for port in ports]
            at = PickerPorts(stack.free_port(), stack.free_port(), stack.free_port())
            argv = picker_argv(picker, endpoints, folder, epp=epp)
            argv += ["--secure-serving=false", *server_ports(at.grpc)]
            process = start(picker, argv, at.grpc)
            config = folder / "envoy.json"
            config.write_bytes(msgspec.json.encode(envoy_config({(picker, "plain"): at})))
            argv = [stack.find_envoy(), "-c", str(config), "--concurrency", "1"]
            start("envoy", [*argv, "--use-dynamic-base-id", "-l", "warning"], at.full)
            time.sleep(_SETTLED_S)
            cpu_s, begun = process.cpu_s(), time.monotonic()
            samples = asyncio.run(
                traffic.play(
                    f"http://127.0.0.1:{at.lean}",
                    conversations(100 + number),
                    at_once=_AT_ONCE,
                    on_answer=lambda _: None,
                )
            )
            seconds, cpu_s = time.monotonic() - begun, process.cpu_s() - cpu_s
            return _figures(
                samples,
                picker=picker,
                kv_tokens=kv_tokens,
                hit_ratio=_hit_ratio(ports),
                seconds=seconds,
                cpu_s=cpu_s,
            )
        finally:
            for process in reversed(processes):
                process.stop()


def _figures(
    samples: Sequence[traffic.AnswerSample],
    *,
    picker: str,
    kv_tokens: int,
    hit_ratio: float,
    seconds: float,
    cpu_s: float,
) -> RoutingRun:
    if any(sample.status != 200 for sample in samples):
        raise RuntimeError(f"{picker}: answers {Counter(it.status for it in samples)}")
    times = sorted(sample.ttft_s * 1e3 for sample in samples)
    engines = Counter(sample.engine for sample in samples)
    return RoutingRun(
        kv_tokens=kv_tokens,
        picker=picker,
        hit_ratio=hit_ratio,
        ttft_mean_ms=statistics.fmean(times),
        ttft_p50_ms=statistics.median(times),
        ttft_p95_ms=times[int(0.95 * (len(times) - 1))],
        follow_up_p50_ms=statistics.median(
            sample.ttft_s * 1e3 for sample in samples if not sample.first
        ),
        seconds=seconds,
        cpu_s=cpu_s,
        busiest_ratio=max(engines.values()) * _NUM_ENGINES / len(samples),
    )


def _hit_ratio(ports: Sequence[int]) -> float:
    totals: Counter[str] = Counter()
    for port in ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(
                    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
                ):
                    totals[line.partition("{")[0]] += float(line.rpartition(" ")[2])
    return totals["vllm:prefix_cache_hits_total"] / totals["vllm:prefix_cache_queries_total"]


def summarize(runs: Sequence[RoutingRun]) -> list[dict[str, Any]]:
    """Sum up: a row for each cache size and picker, `[median, least, greatest]` over the runs."""
    rows = []
    for kv_tokens, picker in dict.fromkeys((run.kv_tokens, run.picker) for run in runs):
        mine = [
            msgspec.structs.asdict(run)
            for run in runs
            if (run.kv_tokens, run.picker) == (kv_tokens, picker)
        ]
        row: dict[str, Any] = {"kv_tokens": kv_tokens, "picker": picker, "runs": len(mine)}
        for figure in RoutingRun.__struct_fields__[2:]:
            values = [run[figure] for run in mine]
            spread = (statistics.median(values), min(values), max(values))
            row[figure] = [float(f"{value:.4g}") for value in spread]
        rows.append(row)
    return rows


def block(result: Mapping[str, Any]) -> str:
    """Table of a recorded run for the documentation."""
    columns = {
        "hit_ratio": ("hit ratio", 3),
        "ttft_mean_ms": ("TTFT mean, ms", 0),
        "ttft_p50_ms": ("p50", 0),
        "ttft_p95_ms": ("p95", 0),
        "follow_up_p50_ms": ("p50 of later turns", 0),
        "seconds": ("seconds", 1),
        "cpu_s": ("CPU of the picker, s", 2),
        "busiest_ratio": ("busiest engine / mean", 2),
    }
    head = ["KV tokens", "picker", *(words for words, _ in columns.values())]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in sorted(result["rows"], key=lambda row: (-row["kv_tokens"], row["picker"])):
        cells = []
        for figure, (_, digits) in columns.items():
            median, least, most = (f"{value:.{digits}f}" for value in row[figure])
            cells.append(f"{median} [{least} to {most}]")
        name = ROUTING_NAMES[row["picker"]]
        lines.append(f"| {row['kv_tokens']:,} | {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{describe_run(result)} {result['peer']}."])


def compare(pickers: Sequence[str], *, rounds: int, epp: str) -> list[RoutingRun]:
    """Run all pickers at all cache sizes in every round, in an order that rotates."""
    runs = []
    for number in range(rounds):
        for kv_tokens in KV_TOKENS:
            turn = number % len(pickers)
            for picker in [*pickers[turn:], *pickers[:turn]]:
                runs.append(run_once(picker, kv_tokens=kv_tokens, number=number, epp=epp))
                print(msgspec.structs.asdict(runs[-1]), flush=True)
    return runs
