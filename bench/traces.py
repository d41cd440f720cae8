"""Measures what traces cost: CPU per request without them, unsampled, at 1 % and of every request.

    python -m bench.traces [--transport native] [--rounds 12] [--seconds 10] [--write]

A picker over eight endpoints is loaded by streams, 1,000 a second, and changes from slice to slice the share
of requests that it traces, as `bench.slices` says; another one gets requests whose client has not sampled
its trace. Spans go to a receiver in this process, some seconds later: so slices are long, and begin when those
of the slice before were sent, and all takes an hour. Ratios are taken to the slice without traces. Traces
of 1 % of the requests have a bar.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import uvloop

import extproc.cli.main
from bench import agreement, rig, slices
from extproc.protocol.trace_context import TraceSampler
from extproc.server import transport
from extproc.server.stream_context import StreamContext
from extproc.server.transport import Transport
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="native")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=10.0)
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
    ratio = next(row["ratio"] for row in figures if row["name"] == BAR_ROW)
    print(f"{BAR_ROW}: bar {BAR_RATIO} {'met' if ratio <= BAR_RATIO else 'missed'}")
    if args.write:
        loads = {"load_before": load_before, "load_after": os.getloadavg()[0]}
        rig.write(
            "traces",
            f"python -m bench.traces --transport {args.transport} --rounds {args.rounds}",
            {"transport": args.transport, "rows": figures, **loads},
        )


if __name__ == "__main__":
    main()
