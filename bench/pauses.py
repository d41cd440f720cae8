"""Measures what holds the event loop of a picker: the garbage collector, and bodies of 64 MiB.

    python -m bench.pauses [--rounds 4] [--seconds 5] [--connections 32] [--only NAME] [--write]

For the collector, each setting of its thresholds runs once in every round, in turns, behind one Envoy
each: requests of 2 kB in a closed loop. Bodies are sent one after the other, beside requests of 2 kB of
another process at one connection. Both are counted by the picker itself: pauses of the collector by
`gc.callbacks`, stalls by a timer that looks every millisecond, and of a stall only what the thread of the
event loop computed, as everything runs on the same cores. Latencies are those of a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import runpy
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import uvloop

from bench import rig
from bench.wire_load import load, post
from extproc.server import health

#: Thresholds of the collector, and whether what lives after the start is frozen; the picker's last.
COLLECTORS: Mapping[str, tuple[tuple[int, int, int], bool]] = {
    "Python's own": ((700, 10, 10), False),
    "700, 10, 10, frozen": ((700, 10, 10), True),
    "100,000, 20, 50, frozen": ((100_000, 20, 50), True),
    "20,000, 20, 50, frozen": ((20_000, 20, 50), True),
}

#: Bytes of a large body, how many are sent, and seconds for which small requests are timed.
BODY_BYTES = 64 * 2**20
BODIES = 8
PROBE_S = 12.0

#: Seconds between two looks for a stall.
LOOK_S = 0.001


class PauseLog(health.StallMeter):
    """Seconds of pauses by generation, and of stalls, written to a file at SIGUSR1 and begun anew."""

    path: Path
    _pauses_s: ClassVar[list[list[float]]] = [[], [], []]
    _stalls_s: ClassVar[list[float]] = []
    _began_s = 0.0

    @classmethod
    def on_phase(cls, phase: str, info: Mapping[str, int]) -> None:
        """Called by the collector when it starts and stops."""
        now = time.perf_counter()
        if phase == "start":
            cls._began_s = now
        else:
            cls._pauses_s[info["generation"]].append(now - cls._began_s)

    @classmethod
    def write(cls, *_: object) -> None:
        """Write what there was since the last call."""
        pauses_s, stalls_s = cls._pauses_s, cls._stalls_s
        cls._pauses_s, cls._stalls_s = [[], [], []], []
        temporary = cls.path.with_suffix(".new")
        temporary.write_text(json.dumps({"pauses_s": pauses_s, "stalls_s": stalls_s}))
        temporary.rename(cls.path)

    def measure(self) -> None:
        """Note a stall, besides what every picker notes."""
        late_s = time.monotonic() - self._due
        computed_s = time.thread_time() - self._computed_s
        if min(late_s, computed_s) > LOOK_S:
            self._stalls_s.append(min(late_s, computed_s))
        super().measure()


def serve(setting: str, path: Path, arguments: list[str]) -> None:
    """Run a picker with these thresholds in place of its own, and a `PauseLog`."""
    (thresholds, freezes), set_threshold = COLLECTORS[setting], gc.set_threshold
    gc.set_threshold = lambda *_: set_threshold(*thresholds)
    if not freezes:
        gc.freeze = lambda: None
    PauseLog.path = path
    gc.callbacks.append(PauseLog.on_phase)
    signal.signal(signal.SIGUSR1, PauseLog.write)
    health.StallMeter = PauseLog
    health.BUSY_S = LOOK_S
    sys.argv = ["extproc", *arguments]
    runpy.run_module("extproc", run_name="__main__")


async def read(pid: int, path: Path) -> dict[str, Any]:
    """Read what a picker noted since the last call."""
    path.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    while not path.exists():
        await asyncio.sleep(0.01)
    return json.loads(path.read_text())


async def collect(setting: str, *, connections: int, seconds: float) -> dict[str, float]:
    """CPU of a picker, and pauses by its collector, under load."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pauses.json"
        module = ("bench.pauses", "--serve", setting, str(path), "serve")
        async with rig.rig("fds", module=module) as running:
            request = post("/v1/chat/completions", rig.chat(2000))
            await load(running.port, request, connections=connections, seconds=1)
            await read(running.pid, path)
            before = running.cpu_s()
            stats = await load(running.port, request, connections=connections, seconds=seconds)
            used = running.cpu_s() - before
            pauses_s = (await read(running.pid, path))["pauses_s"]
            memory = running.memory_bytes()
    assert not stats["failed"], stats
    paused = [pause for generation in pauses_s for pause in generation]
    return {
        "cpu_us": 1e6 * used / stats["requests"],
        "paused_us": 1e6 * sum(paused) / stats["requests"],
        "pause_max_ms": 1e3 * max(paused, default=0.0),
        "collections_per_1000": 1e3 * len(paused) / stats["requests"],
        "full_collections": float(len(pauses_s[2])),
        "memory_mib": memory / 2**20,
    }


async def collectors(
    *, rounds: int, connections: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Medians of every setting."""
    runs: dict[str, list[dict[str, float]]] = {setting: [] for setting in COLLECTORS}
    for number in range(rounds):
        order = list(COLLECTORS)
        for setting in order[number % len(order) :] + order[: number % len(order)]:
            runs[setting].append(await collect(setting, connections=connections, seconds=seconds))
    return {
        setting: {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}
        for setting, rows in runs.items()
    }


async def bodies() -> dict[str, float]:
    """Bodies of 64 MiB, and what other requests feel of them."""
    limits = f"{{max_body_bytes: {BODY_BYTES}}}"
    config = f"{{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, limits: {limits}}}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pauses.json"
        module = ("bench.pauses", "--serve", [*COLLECTORS][-1], str(path), "serve")
        async with rig.rig("fds", module=module, arguments=("--config-text", config)) as running:
            body = rig.chat(BODY_BYTES - 200)
            request = post("/v1/chat/completions", body)
            alone = await _probe(running.port, PROBE_S / 4)
            await _send(running.port, request)
            await asyncio.sleep(1)
            await read(running.pid, path)
            before = running.memory_bytes()
            running.reset_peak()
            probing = asyncio.ensure_future(_probe(running.port, PROBE_S))
            for _ in range(BODIES):
                await _send(running.port, request)
            beside = await probing
            stalls_s = (await read(running.pid, path))["stalls_s"]
            peak = running.memory_bytes("VmHWM")
    return {
        "bodies": BODIES,
        "body_bytes": len(body),
        "peak_ratio": round((peak - before) / len(body), 2),
        "stall_max_ms": round(1e3 * max(stalls_s, default=0.0), 1),
        "stalls_over_10_ms": len([stall for stall in stalls_s if stall > 0.01]),
        "stalls_over_20_ms": len([stall for stall in stalls_s if stall > 0.02]),
        **{f"alone_{name}": value for name, value in alone.items()},
        **{f"beside_{name}": value for name, value in beside.items()},
    }


async def _send(port: int, request: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for at in range(0, len(request), 2**20):
        writer.write(request[at : at + 2**20])
        await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    writer.close()


async def _probe(port: int, seconds: float) -> dict[str, float]:
    """Latencies of small requests of another process."""
    command = [sys.executable, "-m", "bench.pauses", "--probe", str(port), str(seconds)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return json.loads(output)


async def probe(port: int, seconds: float) -> None:
    """Print latencies of small requests."""
    request = post("/v1/chat/completions", rig.chat(2000))
    stats = await load(port, request, connections=1, seconds=seconds)
    assert not stats["failed"], stats
    names = ("p50", "p99", "max")
    print(json.dumps({f"{name}_ms": round(1e3 * stats[name], 2) for name in names}))


async def main(args: argparse.Namespace) -> None:
    figures: dict[str, Any] = {}
    if args.only != "bodies":
        figures["collectors"] = await collectors(
            rounds=args.rounds, connections=args.connections, seconds=args.seconds
        )
    if args.only != "collectors":
        figures["bodies"] = await bodies()
    for name, figure in figures.items():
        print(name, json.dumps(figure, indent=1), flush=True)
    if args.write:
        load_average = round(os.getloadavg()[0], 1)
        rig.write("pauses", "python -m bench.pauses --write", {**figures, "load": load_average})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--only", choices=("collectors", "bodies"), default="")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--probe", nargs=2, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.probe:
        uvloop.run(probe(int(parsed.probe[0]), float(parsed.probe[1])))
    else:
        uvloop.run(main(parsed))
