"""Measures what metrics cost: CPU of a request in the core, and the page of 500 endpoints.

    python -m bench.metrics [--rounds 40] [--endpoints 500]

Requests pass the core, without gRPC, with nothing recorded, with metrics and the ring of decisions
as always, with `log.requests: all` besides (each line written to /dev/null on its own), with a
recording of decisions besides, and with both; in turns, so that a busy machine is the same for all.
Pages are rendered under the names of extproc alone, with those of llm-d, and with the table of
series full; they are rendered in pieces, between which requests are routed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from bench import soak
from extproc.config.settings import LogSection
from extproc.decision import Decision
from extproc.endpoint import Endpoint, Load
from extproc.request import InferenceRequest, RequestLabels
from extproc.telemetry import log_format
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.exposition import Exposition
from extproc.telemetry.pool_metrics import PoolView, PrefixCacheStats
from extproc.telemetry.request_recorder import DecisionLog, StreamRecorder
from tests.support.pool_fixture import PoolFixture

#: Requests of a round (count).
REQUESTS = 50


class NoObserver:
    """Observer of streams and of requests that records nothing."""

    def observe_request(self, _: str) -> NoObserver:
        return self

    def on_routed(self, decision: Decision, **_: object) -> Decision:
        return decision

    def __getattr__(self, _: str) -> Callable[..., None]:
        return _ignore


def _ignore(*_: object, **__: object) -> None:
    """Nothing."""


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
    cores["nothing"].shared.observer = NoObserver()
    rounds = {}
    for name, core in cores.items():
        await core.picker.sync()
        rounds[name] = _round_of(core, is_recorded=name.endswith("record"))
    return rounds


def _round_of(core: soak.Core, *, is_recorded: bool) -> Callable[[], float]:
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
        while recording is not None and recording.take(32):
            pass
        used = time.process_time() - used
        core.passes(1.0)
        return used / REQUESTS * 1e6

    return run


def exposition(endpoints: int, *, series: int, has_llmd_names: bool) -> Exposition:
    """A page of so many endpoints in use, and of so many combinations of labels."""
    addresses = [f"10.0.{number // 250}.{number % 250}:8000" for number in range(endpoints)]
    load = Load(at=1.0, waiting=1.0, running=2.0, kv_usage=0.5)
    pool = PoolFixture(dict.fromkeys(addresses, load)).store.pool
    counters = ProcessCounters()
    counts = counters.for_pool("pool")
    recorder = StreamRecorder(counters, DecisionLog(0), lambda: 0.0)
    for number in range(max(endpoints, series)):
        address = addresses[number % endpoints]
        labels = RequestLabels("model", "model", f"tenant {number % series}", 0)
        request = recorder.observe_request("pool")
        decision = Decision(InferenceRequest("chat", "model"), [Endpoint(address)])
        request.on_routed(
            decision, request_id="", labels=labels, trace_id="", now=0.0, duration_s=0.001
        )
        request.on_response_headers(
            0.2, elapsed_s=0.3, status="200", is_stream=True, is_shown=False
        )
        request.on_usage({"prompt": 1000, "cached": 500, "completion": 100})
        request.on_finished(endpoint=address, status="200", duration_s=2.0)
        for scrapes in (counts.scrapes, counts.model_list_polls):
            scrapes[address, "ok"] += 1
    view = PoolView(pool, lambda _: PrefixCacheStats(5.0, 4.0, 100))
    return Exposition(
        counters,
        lambda: {"pool": view},
        clock=lambda: 2.0,
        gauges={},
        about={"pool": "pool", "profile": "adaptive"},
        has_llmd_names=has_llmd_names,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--endpoints", type=int, default=500)
    args = parser.parse_args()
    runs = asyncio.run(drivers())
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            took[name].append(run())
    base = took["nothing"]
    for name, costs in took.items():
        added = statistics.median(cost - less for cost, less in zip(costs, base, strict=True))
        print(
            f"{name:10} least {min(costs):.1f} us, median {statistics.median(costs):.1f} us, "
            f"added {min(costs) - min(base):.1f} us by the least, {added:.1f} us by the median"
        )
    figures: dict[str, Any] = {
        "extproc": exposition(args.endpoints, series=10, has_llmd_names=False),
        "and llm-d": exposition(args.endpoints, series=10, has_llmd_names=True),
        "1000 series": exposition(args.endpoints, series=1000, has_llmd_names=False),
        "1000 series and llm-d": exposition(args.endpoints, series=1000, has_llmd_names=True),
    }
    for name, page in figures.items():
        print(name, page_ms(page, args.rounds))


if __name__ == "__main__":
    main()
