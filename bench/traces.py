"""Measures what traces cost: CPU per request without them, unsampled, at 1 % and of every request.

    python -m bench.traces [--transport native] [--rounds 12] [--seconds 1.0] [--write]

A picker process for each row is loaded in turns by streams of `bench.stream_load`, 1,000 a second, each
round in another order, and spans go to a receiver in this process. The pickers are started several times,
as those of `bench.metrics` are. Ratios are taken to the picker without traces, within a round: the machine
may be busy. Traces of 1 % of the requests have a bar.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import uvloop

from bench import agreement, metrics, rig
from bench.stream_load import load_streams
from bench.transport import messages
from extproc.demo import stack
from tests.support import otlp_receiver

ENDPOINTS = ",".join(f"127.0.0.{at}:9" for at in range(2, 10))

#: Two scorers over eight endpoints, which need not be there: they are not scraped.
CONFIG = (
    "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, scrape: {enabled: false}, scheduling: "
    "{profile: {name: bench, scorers: [{kind: in-flight, weight: 4}, "
    "{kind: prefix-cache-scorer, weight: 3}], picker: {kind: max-score-picker}}}}"
)
TRACE = "0af7651916cd43dd8448eb211c80319c"
CONNECTIONS = 16

#: Row with a bar, and its largest ratio to no traces.
BAR_ROW, BAR_RATIO = "on, 1 % by chance", 1.02

#: Environment of a picker, and flags of the client's trace; none sends no `traceparent`.
ROWS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "off": ({}, ""),
    "on, the client's trace is not sampled": ({"OTEL_TRACES_SAMPLER_ARG": "1"}, "00"),
    "on, no trace, none by chance": ({"OTEL_TRACES_SAMPLER_ARG": "0"}, ""),
    BAR_ROW: ({"OTEL_TRACES_SAMPLER_ARG": "0.01"}, ""),
    "on, 10 % by chance": ({"OTEL_TRACES_SAMPLER_ARG": "0.1"}, ""),
    "on, every request": ({"OTEL_TRACES_SAMPLER_ARG": "1"}, ""),
}


async def measure_processes(
    transport: str, rounds: int, seconds: float
) -> Mapping[str, Sequence[float]]:
    """CPU of a request (µs) by round, for each way to trace, of one start of the pickers."""
    used: dict[str, list[float]] = {name: [] for name in ROWS}
    with otlp_receiver.receiving() as receiver:
        endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{receiver.grpc_port}"}
        async with stack.stack() as children:
            running = {}
            for name, (environment, _) in ROWS.items():
                os.environ.pop("OTEL_EXPORTER_OTLP_ENDPOINT", None)
                os.environ.update({**endpoint, **environment} if environment else {})
                port = stack.free_port()
                child = await children.extproc(
                    *("--endpoints", ENDPOINTS, "--host", "127.0.0.1", "--secure-serving=false"),
                    *("--transport", transport, "--grpc-port", str(port), "--metrics-port", "0"),
                    *("--grpc-health-port", "0", "--drain-timeout", "0s", "--config-text", CONFIG),
                )
                running[name] = rig.Rig(port, 0, child.process.pid, children)
            rng = random.Random(1)
            for number in range(-metrics.WARM_UP_ROUNDS, rounds):
                for name in rng.sample(list(ROWS), len(ROWS)):
                    cpu_us = await _load(running[name], ROWS[name][1], seconds)
                    if number >= 0:
                        used[name].append(cpu_us)
    return used


async def compare(transport: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A row for each way to trace: CPU of a request (µs), and its ratio to that without traces."""
    rounds_per_start = math.ceil(rounds / metrics.STARTS)
    parts = [
        await measure_processes(transport, rounds_per_start, seconds) for _ in range(metrics.STARTS)
    ]
    used = {name: [*itertools.chain(*(part[name] for part in parts))] for name in ROWS}
    rows = []
    for name, values in used.items():
        ratios = [value / plain for value, plain in zip(values, used["off"], strict=True)]
        ratio, *interval = metrics.confidence(ratios)
        rows.append(
            {
                "name": name,
                "cpu_us": round(statistics.median(values), 1),
                "ratio": round(ratio, 3),
                "ratio_95": [round(it, 3) for it in interval],
            }
        )
    return rows


async def _load(picker: rig.Rig, flags: str, seconds: float) -> float:
    """CPU of a request (µs) in a slice of time."""
    body = rig.chat(2_000)
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-{flags}"} if flags else {}
    request, response = messages(body, headers)
    before = metrics.threads_cpu_s(picker.pid)
    stats = await load_streams(
        picker.port,
        request,
        response,
        body_bytes=len(body),
        connections=CONNECTIONS,
        seconds=seconds,
        rate_per_s=metrics.RATE,
    )
    return (metrics.threads_cpu_s(picker.pid) - before) / stats["requests"] * 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="native")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--write", action="store_true", help="write bench/results/traces.json")
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    with agreement.has_priority():
        figures = uvloop.run(compare(args.transport, args.rounds, args.seconds))
    for row in figures:
        least, most = row["ratio_95"]
        print(
            f"{row['cpu_us']:7.1f} us  {row['ratio']:.3f} [{least:.3f} to {most:.3f}]  {row['name']}"
        )
    by_name = {row["name"]: row for row in figures}
    verdict = "met" if by_name[BAR_ROW]["ratio"] <= BAR_RATIO else "missed"
    print(f"{BAR_ROW}: bar {BAR_RATIO} {verdict}")
    if args.write:
        loads = {"load_before": load_before, "load_after": os.getloadavg()[0]}
        rig.write(
            "traces",
            f"python -m bench.traces --transport {args.transport} --rounds {args.rounds}",
            {"transport": args.transport, "rows": figures, **loads},
        )
