"""Measures what traces cost: CPU per request without them, unsampled, at 1 % and of every request.

    python -m bench.traces [--transport native] [--rounds 12] [--seconds 10] [--write]
    python -m bench.traces --parts [--seconds 30]

A picker over eight endpoints is loaded by streams, 1,000 a second, and changes from slice to slice the share
of requests that it traces, as `bench.slices` says; another one gets requests whose client has not sampled
its trace. Spans go to a receiver in this process, some seconds later: so slices are long, and begin when those
of the slice before were sent, and all takes an hour. Ratios are taken to the slice without traces. Traces
of 1 % of the requests have a bar.

`--parts` shows where the time of traces of 1 % goes, which is less than whole requests vary by: in the
draw for each request, in the messages of sampled requests, in building spans and in sending them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvloop

import extproc.cli.main
from bench import agreement, rig, slices
from bench.stream_load import load_streams
from bench.transport import messages
from extproc.demo import stack
from extproc.protocol.trace_context import TraceContext, TraceSampler
from extproc.server import transport
from extproc.server.native_ext_proc import ExtProcCall
from extproc.server.stream_context import StreamContext
from extproc.server.transport import Transport
from extproc.telemetry.otlp import OtlpTracer
from tests.support import otlp_receiver

#: Two scorers over endpoints that are not scraped.
CONFIG = (
    "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, scrape: {enabled: false}, scheduling: "
    "{profile: {name: bench, scorers: [{kind: in-flight, weight: 4}, "
    "{kind: prefix-cache-scorer, weight: 3}], picker: {kind: max-score-picker}}}}"
)

#: Headers of a client whose trace is not sampled.
UNSAMPLED = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}

#: Row with a bar, and its largest ratio to no traces.
BAR_ROW, BAR_RATIO = "on, 1 % by chance", 1.02

#: Share of the requests that are sampled, by row; None traces none.
OFF, CLIENT = "off", "on, the client's trace is not sampled"
RATIOS: Mapping[str, float | None] = {
    OFF: None,
    "on, no trace, none by chance": 0.0,
    BAR_ROW: 0.01,
    "on, 10 % by chance": 0.1,
    "on, every request": 1.0,
    CLIENT: 1.0,
}
SIGNALS = slices.number_signals(tuple(RATIOS))

#: Rows that one process has in turn: few spans wait where many would.
GROUPS: Sequence[tuple[Sequence[str], Mapping[str, str]]] = (
    ((OFF, "on, no trace, none by chance", BAR_ROW), {}),
    ((OFF, "on, 10 % by chance", "on, every request"), {}),
    ((OFF, CLIENT), UNSAMPLED),
)

#: Seconds until the spans of a slice are sent: they wait 2 s for others, and up to 5 s in the SDK.
SENT_S = 7.5


def serve(arguments: Sequence[str]) -> int:
    """A picker that samples as the last of `SIGNALS` says; a setting holds until the next start."""
    rng = random.Random()
    samplers = {
        SIGNALS[row]: None if ratio is None else TraceSampler(ratio, is_parent_based=True, rng=rng)
        for row, ratio in RATIOS.items()
    }
    build = transport.build_transport

    def build_switched(settings: Any, shared: StreamContext, *others: Any) -> Transport:
        def switch(number: int, _: FrameType | None) -> None:
            shared.trace_sampler = samplers[number]

        for number in samplers:
            signal.signal(number, switch)
        return build(settings, shared, *others)

    slices.ignore_signals(SIGNALS)
    transport.build_transport = build_switched  # type: ignore[assignment]
    return extproc.cli.main.main(["serve", *arguments])


class TraceParts:
    """Times of what traces do in this process (ns)."""

    def __init__(self) -> None:
        self.draws: list[int] = []
        self.requests: dict[bool, list[int]] = {True: [], False: []}
        self.build_ns = self.num_built = 0
        self._open: Counter[int] = Counter()
        self._sampled: set[int] = set()
        self._is_sampled = False

    def install(self) -> None:
        """Time them from now on."""
        draw, add = TraceSampler.start, OtlpTracer.add
        turns = {name: getattr(ExtProcCall, name) for name in ("on_message", "on_half_close")}

        def timed_draw(sampler: TraceSampler, *arguments: Any) -> TraceContext | None:
            began = time.perf_counter_ns()
            trace = draw(sampler, *arguments)
            self.draws.append(time.perf_counter_ns() - began)
            self._is_sampled = trace is not None
            return trace

        def timed_add(tracer: OtlpTracer, *arguments: Any) -> None:
            began = time.thread_time_ns()
            add(tracer, *arguments)
            self.build_ns += time.thread_time_ns() - began
            self.num_built += 1

        def timed_turn(call: ExtProcCall, name: str, *arguments: Any) -> None:
            self._is_sampled = False
            began = time.perf_counter_ns()
            turns[name](call, *arguments)
            self._open[id(call)] += time.perf_counter_ns() - began
            if self._is_sampled:
                self._sampled.add(id(call))
            if name == "on_half_close":
                is_sampled = id(call) in self._sampled
                self._sampled.discard(id(call))
                self.requests[is_sampled].append(self._open.pop(id(call)))

        for owner, name, timed in (
            (TraceSampler, "start", timed_draw),
            (OtlpTracer, "add", timed_add),
            *((ExtProcCall, it, functools.partialmethod(timed_turn, it)) for it in turns),
        ):
            setattr(owner, name, timed)

    def describe(self) -> dict[str, float]:
        """Medians, and means of what was built and sent (us)."""
        (sender,) = [it for it in threading.enumerate() if it.name.startswith("Otel")]
        schedule = Path(f"/proc/self/task/{sender.native_id}/schedstat").read_text()
        sampled, others = map(statistics.median, (self.requests[True], self.requests[False]))
        figures = {
            "draw, each request": statistics.median(self.draws),
            "messages, a sampled request": sampled - others,
            "build, a sampled request": self.build_ns / self.num_built,
            "send, a sampled request": int(schedule.split()[0]) / self.num_built,
        }
        return {name: round(value / 1e3, 1) for name, value in figures.items()} | {
            "sampled": len(self.requests[True]),
            "requests": sum(map(len, self.requests.values())),
        }


def serve_parts(file: str, arguments: Sequence[str]) -> int:
    """A picker that writes its `TraceParts` into a file at a signal."""
    parts = TraceParts()
    parts.install()
    signal.signal(
        signal.SIGUSR2, lambda *_: Path(file).write_text(json.dumps(parts.describe()), "utf-8")
    )
    return serve(arguments)


async def measure_parts(seconds: float) -> dict[str, float]:
    """Times of what traces of 1 % of the requests do (us), and the CPU of a request besides."""
    body, times = rig.chat(2_000), list[float]()
    async with contextlib.AsyncExitStack() as stays:
        receiver = stays.enter_context(otlp_receiver.receiving())
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{receiver.grpc_port}"
        file = Path(stays.enter_context(tempfile.TemporaryDirectory())) / "parts.json"
        children = await stays.enter_async_context(stack.stack())
        command = ["-m", "bench.traces", "--serve-parts", str(file), "--config-text", CONFIG]
        picker = slices.SlicedPicker(command, SIGNALS)
        child, port = await slices.start(picker, children, "native")
        os.kill(child.process.pid, SIGNALS[BAR_ROW])
        used = slices.threads_cpu_s(child.process.pid)
        await load_streams(
            port,
            *messages(body, {}),
            body_bytes=len(body),
            connections=slices.CONNECTIONS,
            seconds=seconds,
            rate_per_s=slices.RATE,
            times=times,
        )
        used = slices.threads_cpu_s(child.process.pid) - used
        await asyncio.sleep(SENT_S)
        os.kill(child.process.pid, signal.SIGUSR2)
        while not file.exists() or not file.read_text():
            await asyncio.sleep(0.05)
        figures: dict[str, float] = json.loads(file.read_text())
    return figures | {"CPU of a request": round(used / len(times) * 1e6, 1)}


async def compare(kind: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A row for each way to trace: CPU of a request (us), and its ratio to that without traces."""
    arguments = ["-m", "bench.traces", "--serve", "--config-text", CONFIG]
    rows = []
    with otlp_receiver.receiving() as receiver:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{receiver.grpc_port}"
        for names, headers in GROUPS:
            signals = {row: SIGNALS[row] for row in names}
            picker = slices.SlicedPicker(arguments, signals, headers=headers, change_s=SENT_S)
            used = await slices.compare_starts(picker, rounds, seconds, kind)
            for name in picker.signals:
                ratio, *interval = slices.confidence(slices.ratios(used, name, OFF))
                rows.append(
                    {
                        "name": name,
                        "cpu_us": round(statistics.median(used[name]), 1),
                        "ratio": round(ratio, 3),
                        "ratio_95": [round(it, 3) for it in interval],
                    }
                )
    return rows


def main() -> None:
    """Run from the command line."""
    if sys.argv[1:2] == ["--serve"]:
        sys.exit(serve(sys.argv[2:]))
    if sys.argv[1:2] == ["--serve-parts"]:
        sys.exit(serve_parts(sys.argv[2], sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="native")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--write", action="store_true", help="write bench/results/traces.json")
    parser.add_argument("--parts", action="store_true", help="show where the time goes, in us")
    args = parser.parse_args()
    if args.parts:
        with agreement.has_priority():
            figures = uvloop.run(measure_parts(args.seconds))
        share = figures["draw, each request"] + 0.01 * sum(
            value for name, value in figures.items() if name.endswith("a sampled request")
        )
        print(*(f"{name:28} {value}" for name, value in figures.items()), sep="\n")
        print(f"of all CPU                   {share / figures['CPU of a request']:.2%}")
        return
    load_before = os.getloadavg()[0]
    with agreement.has_priority():
        rows = uvloop.run(compare(args.transport, args.rounds, args.seconds))
    for row in rows:
        least, most = row["ratio_95"]
        print(
            f"{row['cpu_us']:7.1f} us  {row['ratio']:.3f} [{least:.3f} to {most:.3f}]  {row['name']}"
        )
    ratio = next(row["ratio"] for row in rows if row["name"] == BAR_ROW)
    print(f"{BAR_ROW}: bar {BAR_RATIO} {'met' if ratio <= BAR_RATIO else 'missed'}")
    if args.write:
        loads = {"load_before": load_before, "load_after": os.getloadavg()[0]}
        rig.write(
            "traces",
            f"python -m bench.traces --transport {args.transport} --rounds {args.rounds}",
            {"transport": args.transport, "rows": rows, **loads},
        )


if __name__ == "__main__":
    main()
