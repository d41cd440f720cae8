"""Cells of the comparison: a load on a picker, and what it costs the picker and the client."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import uvloop

from bench import rig
from bench.peers.pickers import PROGRAMS, PeerRig, Setting
from bench.stream_load import load_streams
from bench.transport import messages
from extproc.scrape.schedule import REST_AFTER_S

#: Connections of a load at a rate: more than ever wait.
_RATE_CONNECTIONS = 64

#: Seconds a picker has to scrape and to settle after a pause.
_RESUMED_S = 1.0

#: Seconds until an idle picker scrapes as seldom as it ever does, and slices that are measured then.
_REST_S = REST_AFTER_S + 5.0
_IDLE_S = 5.0
_IDLE_SLICES = 3

_ALL = ("direct", "go", "go-equal", "native", "adaptive", "grpcio")
_COMPARED = ("direct", "go-equal", "native", "adaptive", "grpcio")
_FLOORS = ("floor-go", "floor-python")


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A load, and the pickers that it is put on.

    Attributes:
        name: Name in results.
        setting: Setting of the pickers.
        body_bytes: Size of a request's body.
        connections: Connections of a closed loop; 0 for a rate.
        rate_per_s: Requests per second, Poisson arrivals; 0 for a closed loop.
        is_full: Whether the pickers are shown response bodies.
        is_streamed: Whether responses are streams of 50 events.
        without_envoy: Whether streams go to the picker itself, which has a core to itself.
        seconds: Duration, as a factor of the usual.
        pickers: Names of the pickers.
        max_ratio: Bar for the CPU of `native` over that of `go-equal`; None without a bar.
    """

    name: str
    setting: Setting = "plain"
    body_bytes: int = 2_000
    connections: int = 0
    rate_per_s: int = 0
    is_full: bool = False
    is_streamed: bool = False
    without_envoy: bool = False
    seconds: float = 1.0
    pickers: Sequence[str] = _COMPARED
    max_ratio: float | None = None


CELLS: Final = (
    Cell(name="c1 2 kB", connections=1, pickers=(*_ALL, *_FLOORS), max_ratio=0.6),
    Cell(name="300/s 2 kB", rate_per_s=300, pickers=_ALL, seconds=1.5, max_ratio=0.6),
    Cell(name="c32 2 kB", connections=32, pickers=(*_ALL, *_FLOORS), max_ratio=0.6),
    Cell(name="c1 40 kB", body_bytes=40_000, connections=1, max_ratio=0.25),
    Cell(name="c32 40 kB", body_bytes=40_000, connections=32, pickers=_ALL, max_ratio=0.25),
    Cell(name="c1 400 kB", body_bytes=400_000, connections=1, max_ratio=0.12),
    Cell(
        name="c32 400 kB",
        body_bytes=400_000,
        connections=32,
        pickers=_ALL,
        seconds=1.5,
        max_ratio=0.12,
    ),
    Cell(name="c32 2 kB, response bodies", connections=32, is_full=True, max_ratio=0.75),
    Cell(
        name="40/s 2 kB, streamed response bodies",
        rate_per_s=40,
        is_full=True,
        is_streamed=True,
        seconds=1.5,
        max_ratio=0.5,
    ),
    Cell(
        name="c32 2 kB, TLS",
        setting="tls",
        connections=32,
        pickers=("go-equal", "native", "adaptive"),
        max_ratio=0.8,
    ),
    Cell(
        name="c32 2 kB, 100 endpoints",
        setting="wide",
        connections=32,
        pickers=("go", "go-equal", "native", "adaptive"),
        max_ratio=0.4,
    ),
    Cell(
        name="one core, c32 2 kB, without Envoy",
        connections=32,
        without_envoy=True,
        pickers=("go-equal", "native", "adaptive", "grpcio"),
    ),
)

#: Nothing but scraping.
IDLE: Final = tuple(
    Cell(name=name, setting=setting, pickers=("go", "go-equal", "native", "adaptive"))
    for name, setting in (("idle", "plain"), ("idle, 100 endpoints", "wide"))
)


class CellMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a cell on a picker in a round.

    Attributes:
        cell: Name of the cell.
        picker: Name of the picker.
        round: Number of the round.
        requests: Requests answered (count).
        cpu_us: CPU of the picker for a request, its scraping included.
        cores: Cores the picker kept busy.
        p50_ms: Latency, median.
        p99_ms: Latency, 99th percentile.
        rps: Requests per second.
        scrapes_per_s: Scrapes of all engines.
        envoy_us: CPU of Envoy for a request.
        rss_mib: Resident memory of the picker.
        load: Load average of the machine.
    """

    cell: str
    picker: str
    round: int
    requests: int
    cpu_us: float
    cores: float
    p50_ms: float
    p99_ms: float
    rps: float
    scrapes_per_s: float
    envoy_us: float
    rss_mib: float
    load: float


def run_load(
    running: PeerRig, picker: str, cell: Cell, *, seconds: float, seed: int
) -> dict[str, Any]:
    """Put the load of a cell on a picker.

    Raises:
        RuntimeError: An answer was no 200.
    """
    ports = running.ports[picker, cell.setting]
    if cell.without_envoy:
        body = rig.chat(cell.body_bytes)
        request, response = messages(body)
        stats = uvloop.run(
            load_streams(
                ports.grpc,
                request,
                response,
                body_bytes=len(body),
                connections=cell.connections,
                seconds=seconds,
            )
        )
        return {
            "requests": stats["requests"],
            "rps": stats["requests"] / stats["seconds"],
            "p50_ms": stats["p50"] * 1e3,
            "p99_ms": stats["p99"] * 1e3,
        }
    listener = ports.full if cell.is_full else ports.lean
    argv = [
        *(str(PROGRAMS / "load"), "-address", f"127.0.0.1:{listener}", "-seed", str(seed)),
        *("-seconds", str(seconds), "-size", str(cell.body_bytes), f"-stream={cell.is_streamed}"),
        *("-connections", str(cell.connections or _RATE_CONNECTIONS)),
        *("-rate", str(cell.rate_per_s)),
    ]
    if picker == "direct":
        argv += ["-endpoint", running.endpoints("plain")[0]]
    done = subprocess.run(argv, capture_output=True, check=True, text=True)
    stats = json.loads(done.stdout)
    if set(stats["codes"]) - {"200"}:
        raise RuntimeError(f"{picker} answered {stats['codes']} in the cell {cell.name!r}")
    return stats


def measure_cell(
    running: PeerRig, picker: str, cell: Cell, *, number: int, seconds: float
) -> CellMeasurement:
    """Measure one slice of time; the picker is not paused."""
    process = running.pickers.get((picker, cell.setting))
    running.counts()
    before = process.cpu_s() if process else 0.0
    envoy_before, start = running.envoy.cpu_s(), time.monotonic()
    if cell.connections or cell.rate_per_s:
        stats = run_load(running, picker, cell, seconds=seconds * cell.seconds, seed=number + 1)
    else:
        time.sleep(seconds * cell.seconds)
        stats = {"requests": 0, "rps": 0.0, "p50_ms": 0.0, "p99_ms": 0.0}
    took = time.monotonic() - start
    used = process.cpu_s() - before if process else 0.0
    envoy_used = running.envoy.cpu_s() - envoy_before
    _, scrapes = running.counts()
    requests = max(1, stats["requests"])
    return CellMeasurement(
        cell=cell.name,
        picker=picker,
        round=number,
        requests=stats["requests"],
        cpu_us=used / requests * 1e6,
        cores=used / took,
        p50_ms=stats["p50_ms"],
        p99_ms=stats["p99_ms"],
        rps=stats["rps"],
        scrapes_per_s=scrapes / took,
        envoy_us=envoy_used / requests * 1e6,
        rss_mib=process.rss_mib() if process else 0.0,
        load=os.getloadavg()[0],
    )


def measure_idle(running: PeerRig, picker: str, cell: Cell) -> list[CellMeasurement]:
    """Measure a picker that had no request for a while."""
    process = running.pickers[picker, cell.setting]
    process.resume()
    time.sleep(_REST_S)
    figures = [
        measure_cell(running, picker, cell, number=number, seconds=_IDLE_S)
        for number in range(_IDLE_SLICES)
    ]
    process.pause()
    return figures


def measure_picker(
    running: PeerRig,
    picker: str,
    setting: Setting,
    cells: Sequence[Cell],
    *,
    number: int,
    seconds: float,
) -> list[CellMeasurement]:
    """Measure the turn of a picker in a round: all of its cells."""
    process = running.pickers.get((picker, setting))
    if process is not None:
        process.resume()
        time.sleep(_RESUMED_S)
    figures = []
    cores = os.sched_getaffinity(0)
    for cell in cells:
        warm = msgspec.structs.replace(cell, connections=cell.connections and 4)
        run_load(running, picker, warm, seconds=0.2 * seconds, seed=1000 + number)
        if cell.without_envoy and process is not None and len(cores) > 1:
            first = min(cores)
            process.pin({first})
            os.sched_setaffinity(0, cores - {first})
            running.engines.pin(cores - {first})
        figures.append(measure_cell(running, picker, cell, number=number, seconds=seconds))
        if cell.without_envoy and process is not None:
            for pinned in (process, running.engines):
                pinned.pin(cores)
            os.sched_setaffinity(0, cores)
    if process is not None:
        process.pause()
    return figures
