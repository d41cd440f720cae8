"""Compares the CPU of a request in slices of one picker process, which changes by signals what it does.

Two processes with the same settings differ by some percent from their start to their end, as their memory
lies. So one process is loaded by streams of `bench.stream_load`, changes from slice to slice, each round in
another order, and is started several times. Ratios are taken within a round.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bench import rig
from bench.stream_load import load_streams
from bench.transport import messages
from extproc.demo import stack

#: Connections of the load, each with one stream at a time.
CONNECTIONS = 16

#: Streams per second (1/s), and rounds of it before those that count.
RATE, WARM_UP_ROUNDS = 1000.0, 2

#: Starts of the process that the rounds are shared among.
STARTS = 6


class SlicedPicker(msgspec.Struct, frozen=True):
    """A picker whose slices are compared.

    Attributes:
        arguments: Of the interpreter, up to flags of `serve`.
        signals: Signal by row.
        endpoints: Addresses of endpoints, which need not be there.
        headers: Headers of requests, besides those of the load.
        change_s: Seconds of load after a change, before those that count: the interpreter adapts its
            instructions to what they meet, and what waits of the slice before is to be done.
    """

    arguments: Sequence[str]
    signals: Mapping[str, int]
    endpoints: Sequence[str] = tuple(f"127.0.0.{at}:9" for at in range(2, 10))
    headers: Mapping[str, str] = {}
    change_s: float = 0.15


def number_signals(rows: Sequence[str]) -> dict[str, int]:
    """A signal for each row; ignored until the process handles it."""
    return {row: signal.SIGRTMIN + at for at, row in enumerate(rows)}


def ignore_signals(signals: Mapping[str, int]) -> None:
    """Keep signals from ending this process before it handles them."""
    for number in signals.values():
        signal.signal(number, signal.SIG_IGN)


async def compare_starts(
    picker: SlicedPicker, rounds: int, seconds: float, transport: str, *, rate_per_s: float = RATE
) -> Mapping[str, Sequence[float]]:
    """CPU of a request (us) by round, by row, over several starts of the process."""
    parts = [
        await _compare(picker, math.ceil(rounds / STARTS), seconds, transport, rate_per_s)
        for _ in range(STARTS)
    ]
    return {row: [*itertools.chain(*(part[row] for part in parts))] for row in picker.signals}


async def _compare(
    picker: SlicedPicker, rounds: int, seconds: float, transport: str, rate_per_s: float
) -> Mapping[str, Sequence[float]]:
    """The same of one start."""
    rows = tuple(picker.signals)
    used: dict[str, list[float]] = {row: [] for row in rows}
    async with stack.stack() as children:
        child, port = await start(picker, children, transport)
        slices = [
            row
            for rng in [random.Random(1)]
            for _ in range(WARM_UP_ROUNDS + rounds)
            for row in rng.sample(rows, len(rows))
        ]
        times: list[float] = []
        body = rig.chat(2_000)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                load_streams(
                    port,
                    *messages(body, dict(picker.headers)),
                    body_bytes=len(body),
                    connections=CONNECTIONS,
                    seconds=1.05 * len(slices) * (picker.change_s + seconds) + 1.0,
                    rate_per_s=rate_per_s,
                    times=times,
                )
            )
            for number, row in enumerate(slices):
                os.kill(child.process.pid, picker.signals[row])
                await asyncio.sleep(picker.change_s)
                cpu_s, requests = threads_cpu_s(child.process.pid), len(times)
                await asyncio.sleep(seconds)
                cpu_s = threads_cpu_s(child.process.pid) - cpu_s
                if number >= WARM_UP_ROUNDS * len(rows):
                    used[row].append(cpu_s / (len(times) - requests) * 1e6)
    return used


async def start(
    picker: SlicedPicker, children: stack.Stack, transport: str
) -> tuple[stack.Child, int]:
    """Start the process; returns it and its port."""
    port = stack.free_port()
    child = await children.start(
        "extproc",
        [
            *(sys.executable, *picker.arguments),
            *("--host", "127.0.0.1", "--secure-serving=false"),
            *("--endpoints", ",".join(picker.endpoints)),
            *("--transport", transport, "--grpc-port", str(port), "--metrics-port", "0"),
            *("--grpc-health-port", "0", "--drain-timeout", "0s"),
        ],
        ready="extproc is listening",
    )
    return child, port


def threads_cpu_s(pid: int) -> float:
    """CPU seconds of the threads that a process has, to the nanosecond."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def confidence(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of its confidence interval of 95 %, by bootstrap."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2_000))
    return statistics.median(values), medians[50], medians[-51]


def ratios(used: Mapping[str, Sequence[float]], row: str, base: str) -> list[float]:
    """CPU of a row over that of another one, by round."""
    return [value / less for value, less in zip(used[row], used[base], strict=True)]
