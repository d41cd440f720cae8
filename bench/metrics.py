"""Measures what metrics, log lines and recordings cost: CPU of a request, and pages of 500 endpoints.

    python -m bench.metrics [--parts processes core pages] [--rounds 60] [--seconds 0.5] [--rate 1000]

`processes`: a picker with the default strategy, and another one with two scorers, which choose in the least
time, each over 8 and over 20 endpoints whose metrics are scraped, are loaded by streams of
`bench.stream_load`, 1,000 a second. A picker changes what it observes from slice to slice, each round in
another order: nothing, metrics and the ring of decisions as always, `log.requests: all` besides, and a
recording of decisions besides, as `bench.slices` says. All processes have priority over other work where
root runs them. Ratios are taken to the slice without anything; the last one, over 8 endpoints, has the bar.
`core`: requests pass the core alone, without gRPC, 1,000 in a second of simulated time, with the body and
the usage of an answer. `pages`: pages are rendered under the names of extproc alone, with those of llm-d,
and with the table of series full; they are rendered in pieces, between which requests are routed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import uvloop

import extproc.cli.main
from bench import agreement, engine_pages, slices, soak
from extproc.config.settings import LogSection
from extproc.decision import Decision
from extproc.demo import stack
from extproc.endpoint import Endpoint, Load
from extproc.request import InferenceRequest, RequestLabels
from extproc.server.decision_recording import DecisionRecorder
from extproc.telemetry import log_format
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.exposition import Exposition
from extproc.telemetry.pool_state import PoolView, PrefixCacheStats
from extproc.telemetry.request_recorder import RequestRecorder
from extproc.telemetry.stream_recorder import StreamRecorder
from tests.support.pool_fixture import PoolFixture

#: Share of the CPU of a request that metrics, log and recording may cost together.
BAR_RATIO = 1.08

#: How pickers choose, and among how many endpoints; the first number has the bar.
SCHEDULING: Mapping[str, Mapping[str, Any]] = {
    "adaptive": {"strategy": "adaptive"},
    "two scorers": {
        "profile": {
            "name": "bench",
            "scorers": [
                {"kind": "in-flight", "weight": 4},
                {"kind": "prefix-cache-scorer", "weight": 3},
            ],
            "picker": {"kind": "max-score-picker"},
        }
    },
}
POOL_SIZES = (8, 20)

#: Requests of a round of the core (count).
REQUESTS = 50


def _ignore(*_: object, **__: object) -> None:
    """Nothing."""


class NoObserver:
    """Observer of a request that records nothing."""

    on_pool_selected = on_direct_response = on_rejected = on_abandoned = staticmethod(_ignore)
    on_traced = on_dequeued = on_model_rewritten = on_response_headers = staticmethod(_ignore)
    on_response_chunk = on_finished = on_usage = on_answer_ids = staticmethod(_ignore)
    on_described = staticmethod(_ignore)
    #: Decision of the request, which others charge its usage by.
    decision: Decision | None = None

    def on_routed(self, decision: Decision, **_: object) -> None:
        """Keep the decision until the next one."""
        self.decision = decision


#: What the pickers record, by name: a row each, the first without any.
OFF, METRICS, LOG, RECORDING = "off", "metrics", "+ log", "+ recording"


#: Signals that make a served picker observe what a row has.
SIGNALS = slices.number_signals((OFF, METRICS, LOG, RECORDING))


def _config(strategy: str, file: Path) -> str:
    """Configuration of a picker, with everything that it may record."""
    config: dict[str, Any] = {
        "apiVersion": "extproc/v1alpha1",
        "kind": "ExtProcConfig",
        "scheduling": SCHEDULING[strategy],
        "log": {"requests": "all"},
        "decisions": {"record": {"file": str(file), "max_files": 2}},
    }
    return json.dumps(config)


def serve(arguments: Sequence[str]) -> int:
    """A picker that observes of requests what the last of `SIGNALS` says; there is no such setting."""
    nothing, record = NoObserver(), DecisionRecorder.run

    def observe_unlogged(streams: StreamRecorder, pool: str) -> RequestRecorder:
        streams.decisions.free_dropped()
        return RequestRecorder(streams, streams.counters.open_pools[pool])

    observers: dict[str, Callable[[StreamRecorder, str], Any]] = {
        OFF: lambda *_: nothing,
        METRICS: observe_unlogged,
        LOG: StreamRecorder.observe_request,
        RECORDING: StreamRecorder.observe_request,
    }

    row = OFF

    def observe(streams: StreamRecorder, pool: str) -> Any:
        """The observer of a request."""
        return observers[row](streams, pool)

    async def follow_signals(recorder: DecisionRecorder) -> None:
        """Record while it is to be recorded."""
        nonlocal row
        loop = asyncio.get_running_loop()
        rows: asyncio.Queue[str] = asyncio.Queue()
        for name, number in SIGNALS.items():
            loop.add_signal_handler(number, rows.put_nowait, name)
        while True:
            row = await rows.get()
            if row == RECORDING:
                recording = loop.create_task(record(recorder))
                following = await rows.get()
                rows.put_nowait(following)
                recording.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await recording

    # The same all the time: of a class that changes, the interpreter forgets where its attributes are.
    StreamRecorder.observe_request = observe  # type: ignore[method-assign]
    slices.ignore_signals(SIGNALS)
    DecisionRecorder.run = follow_signals  # type: ignore[method-assign]
    return extproc.cli.main.main(["serve", *arguments])


async def compare_processes(
    strategy: str, size: int, rounds: int, seconds: float, transport: str, *, rate_per_s: float
) -> Mapping[str, Sequence[float]]:
    """CPU of a request (us) by round, by what is recorded, of a process with `size` endpoints."""
    with tempfile.TemporaryDirectory() as folder:
        config = _config(strategy, Path(folder) / "decisions.jsonl")
        port = stack.free_port()
        engines = await engine_pages.serve(port)
        picker = slices.SlicedPicker(
            ["-m", "bench.metrics", "--serve", "--config-text", config],
            SIGNALS,
            engine_pages.addresses(size, port),
        )
        try:
            return await slices.compare_starts(
                picker, rounds, seconds, transport, rate_per_s=rate_per_s
            )
        finally:
            await engines.cleanup()


def print_processes(strategy: str, size: int, used: Mapping[str, Sequence[float]]) -> None:
    """The table of pickers with `size` endpoints, and the verdict."""
    print(f"{strategy}, {size} endpoints")
    print("                CPU us  least us  added us  ratio to off [95 %]")
    for name, values in used.items():
        ratio, least, most = slices.confidence(slices.ratios(used, name, OFF))
        added, *_ = slices.confidence(
            [value - less for value, less in zip(values, used[OFF], strict=True)]
        )
        print(
            f"{name:13} {statistics.median(values):8.1f}  {min(values):8.1f}  {added:8.1f}  "
            f"{ratio:.3f} [{least:.3f} to {most:.3f}]"
        )
    if size == POOL_SIZES[0]:
        print(f"bar {BAR_RATIO}: {'met' if ratio <= BAR_RATIO else 'missed'}")


async def drivers() -> dict[str, Callable[[], float]]:
    """Rounds of requests by what is recorded; each returns its CPU per request (us)."""
    sink = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the end of the process
    handler = log_format.LogHandler(sink)
    handler.setFormatter(log_format.build_formatter("text"))
    logging.getLogger(log_format.REQUESTS).addHandler(handler)
    logging.getLogger(log_format.REQUESTS).propagate = False
    plain = soak.settings(holding=False)
    logged = msgspec.structs.replace(plain, log=LogSection(requests="all"))
    cores = {
        "nothing": soak.Core(plain),
        "metrics": soak.Core(plain),
        "log": soak.Core(logged),
        "record": soak.Core(plain),
        "log+record": soak.Core(logged),
    }
    nothing = NoObserver()
    cores["nothing"].shared.observer.observe_request = lambda _: nothing
    rounds = {}
    for name, core in cores.items():
        await core.picker.sync()
        rounds[name] = _round_of(core, handler, is_recorded=name.endswith("record"))
    return rounds


def _round_of(
    core: soak.Core, handler: logging.Handler, *, is_recorded: bool
) -> Callable[[], float]:
    source = soak.Chats(Random(1))
    recording = core.picker.decision_recorder.recordings.start() if is_recorded else None

    def run() -> float:
        cases = [source.request() for _ in range(REQUESTS)]
        answers = [source.answer(len(body)) for _, body in cases]
        used = time.process_time()
        for request, answer in zip(cases, answers, strict=True):
            stream = core.open(*request)
            core.say(stream, *answer)
            stream.finish()
            core.passes(1.0 / slices.RATE)
        if recording is not None:
            core.picker.counters.settle()
            while recording.take(128):
                pass
        handler.flush()  # which an event loop does at the end of a turn
        used = time.process_time() - used
        return used / REQUESTS * 1e6

    return run


def exposition(endpoints: int, *, series: int, has_llmd_names: bool) -> Exposition:
    """A page of so many endpoints in use, and of so many combinations of labels."""
    addresses = [f"10.0.{number // 250}.{number % 250}:8000" for number in range(endpoints)]
    load = Load(at=1.0, waiting=1.0, running=2.0, kv_usage=0.5)
    pool = PoolFixture(dict.fromkeys(addresses, load)).store.pool
    counters = ProcessCounters(has_llmd_names=has_llmd_names)
    counts = counters.for_pool("pool")
    recorder = StreamRecorder(counters, DecisionLog(0), lambda: 0.0)
    for number in range(max(endpoints, series)):
        address = addresses[number % endpoints]
        labels = RequestLabels("model", "model", f"tenant {number % series}", 0)
        request = recorder.observe_request("pool")
        decision = Decision(InferenceRequest("chat", "model"), [Endpoint(address)])
        request.on_routed(
            decision,
            request_id="",
            labels=labels,
            trace_id="",
            now=0.0,
            duration_s=0.001,
            body_bytes=4000,
        )
        request.on_response_headers(
            0.2, elapsed_s=0.3, status="200", is_stream=True, is_shown=False
        )
        request.on_usage({"prompt": 1000, "cached": 500, "completion": 100}, 50000)
        request.on_finished(endpoint=address, status="200", duration_s=2.0)
        for scrapes in (counts.scrapes, counts.model_list_polls):
            scrapes[address, "ok"] += 1
    view = PoolView(pool, lambda _: PrefixCacheStats(5.0, 4.0, 100))
    return Exposition(
        counters,
        lambda: {"pool": view},
        clock=lambda: 2.0,
        gauges={},
        about=lambda: {"pool": "pool", "profile": "adaptive"},
    )


def page_ms(page: Exposition, rounds: int) -> dict[str, float]:
    """CPU of a page (ms), its lines and its longest piece (ms)."""
    took, pieces = [], []
    for _ in range(rounds):
        used = [time.process_time()]
        lines = 0
        for piece in page.pieces(is_openmetrics=True):
            lines += piece.count("\n")
            used.append(time.process_time())
        took.append(used[-1] - used[0])
        pieces.append(max(after - before for before, after in itertools.pairwise(used)))
    return {
        "lines": lines,
        "least_ms": round(min(took) * 1e3, 2),
        "median_ms": round(statistics.median(took) * 1e3, 2),
        "piece_ms": round(min(pieces) * 1e3, 2),
    }


async def compare_core(rounds: int) -> None:
    """Print what requests cost in the core."""
    runs = await drivers()
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            took[name].append(run())
            await asyncio.sleep(0)
    base = took["nothing"]
    for name, costs in took.items():
        added = statistics.median(cost - less for cost, less in zip(costs, base, strict=True))
        print(
            f"{name:10} least {min(costs):.1f} us, median {statistics.median(costs):.1f} us, "
            f"added {min(costs) - min(base):.1f} us by the least, {added:.1f} us by the median"
        )


def print_pages(endpoints: int, rounds: int) -> None:
    """Print what pages cost."""
    figures: dict[str, Any] = {
        "extproc": exposition(endpoints, series=10, has_llmd_names=False),
        "and llm-d": exposition(endpoints, series=10, has_llmd_names=True),
        "1000 series": exposition(endpoints, series=1000, has_llmd_names=False),
        "1000 series and llm-d": exposition(endpoints, series=1000, has_llmd_names=True),
    }
    for name, page in figures.items():
        print(name, page_ms(page, rounds))


def main() -> None:
    """Run from the command line."""
    if sys.argv[1:2] == ["--serve"]:
        sys.exit(serve(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = ("processes", "core", "pages")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument(
        "--rate", type=float, default=slices.RATE, help="0 for as many as the pickers take"
    )
    parser.add_argument("--transport", default="native")
    parser.add_argument("--core-rounds", type=int, default=40)
    parser.add_argument("--endpoints", type=int, default=500)
    args = parser.parse_args()
    if "processes" in args.parts:
        for strategy, size in itertools.product(SCHEDULING, POOL_SIZES):
            with agreement.has_priority():
                used = uvloop.run(
                    compare_processes(
                        *(strategy, size, args.rounds, args.seconds, args.transport),
                        rate_per_s=args.rate,
                    )
                )
            print_processes(strategy, size, used)
    if "core" in args.parts:
        asyncio.run(compare_core(args.core_rounds))
    if "pages" in args.parts:
        print_pages(args.endpoints, args.core_rounds)


if __name__ == "__main__":
    main()
