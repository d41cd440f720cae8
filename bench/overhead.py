"""Measures CPU per request against a constant gRPC server, and added latency.

    python -m bench.overhead [--rounds 12] [--seconds 1.5] [--write]

The floor answers constants and parses nothing, on the same grpc.aio and uvloop, behind the same
Envoy, with the same messages. The pool has one endpoint, the default strategy, and scraping on.
There are two floors: gRPC as it comes, and gRPC run as extproc runs it (`extproc.server.grpc_workarounds`).
All are up at the same time and are loaded in turns; ratios are taken between neighbors.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path

import uvloop

from bench import rig
from bench.wire_load import load, post
from extproc.cli import serve

CONNECTIONS = 32
PROMPT_BYTES = 2000


async def slice_of(running: rig.Rig, request: bytes, seconds: float) -> dict[str, float]:
    """CPU microseconds per request of the server, and throughput, over one slice of time."""
    before = running.cpu_s()
    stats = await load(running.port, request, connections=CONNECTIONS, seconds=seconds)
    used = running.cpu_s() - before
    assert not stats["failed"], stats
    return {
        "cpu_us": used / stats["requests"] * 1e6,
        "rps": stats["requests"] / stats["seconds"],
        "p99_ms": stats["p99"] * 1e3,
    }


async def compare(
    mode: str, *, floor: Path, body: bytes, rounds: int, seconds: float
) -> dict[str, list[dict[str, float]]]:
    """Both floors and extproc side by side, loaded in turns: slices lie next to each other."""
    request = post("/v1/chat/completions", body)
    async with (
        rig.rig(mode, floor=floor) as plain,
        rig.rig(mode, floor=floor, experiments=serve.EXPERIMENTS) as alike,
        rig.rig(mode) as high,
    ):
        rigs = {"plain": plain, "alike": alike, "extproc": high}
        rounds_by_server: dict[str, list[dict[str, float]]] = {name: [] for name in rigs}
        for running in rigs.values():
            await load(running.port, request, connections=CONNECTIONS, seconds=1.5)
        for number in range(rounds):
            for name, running in rigs.items():
                rounds_by_server[name].append(await slice_of(running, request, seconds))
            cpu = {name: slices[-1]["cpu_us"] for name, slices in rounds_by_server.items()}
            print(
                f"{mode:9} round {number + 1}: floor {cpu['plain']:.0f} us, run alike "
                f"{cpu['alike']:.0f} us, extproc {cpu['extproc']:.0f} us, ratios "
                f"{cpu['extproc'] / cpu['plain']:.3f} and {cpu['extproc'] / cpu['alike']:.3f}, "
                f"{rounds_by_server['extproc'][-1]['rps']:.0f} req/s",
                flush=True,
            )
    return rounds_by_server


def ratios(rows: dict[str, list[dict[str, float]]], floor: str) -> list[float]:
    """CPU per request of extproc over that of a floor, by round."""
    pairs = zip(rows["extproc"], rows[floor], strict=True)
    return [round(ours["cpu_us"] / low["cpu_us"], 3) for ours, low in pairs]


async def latency(
    mode: str, body: bytes, seconds: float, *, floor: Path | None = None
) -> dict[str, float]:
    """Latency at one connection (ms)."""
    async with rig.rig(mode, floor=floor) as running:
        request = post("/v1/chat/completions", body)
        await load(running.port, request, connections=1, seconds=1)
        stats = await load(running.port, request, connections=1, seconds=seconds)
    return {"p50_ms": stats["p50"] * 1e3, "p99_ms": stats["p99"] * 1e3}


async def half_load(
    mode: str, body: bytes, saturation_rps: float, seconds: float
) -> dict[str, float]:
    """p99 at 50 % of saturation: open loop, evenly spaced."""
    async with rig.rig(mode) as running:
        request = post("/v1/chat/completions", body)
        await load(running.port, request, connections=4, seconds=1)
        return await paced(running.port, request, saturation_rps / 2, seconds)


async def paced(port: int, request: bytes, rps: float, seconds: float) -> dict[str, float]:
    """Send at a fixed rate over as many connections as are needed."""
    loop = asyncio.get_running_loop()
    times: list[float] = []
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send_one() -> None:
        began = loop.time()
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r")[0])
        await reader.readexactly(length)
        times.append(loop.time() - began)
        idle.append((reader, writer))

    count = int(rps * seconds)
    start = loop.time()
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            await asyncio.sleep(max(0.0, start + number / rps - loop.time()))
            tasks.create_task(send_one())
    for _, writer in idle:
        writer.close()
    times.sort()
    return {
        "offered_rps": rps,
        "achieved_rps": count / (loop.time() - start),
        "p50_ms": times[count // 2] * 1e3,
        "p99_ms": times[int(count * 0.99)] * 1e3,
    }


async def main(rounds: int, seconds: float, *, write: bool) -> None:
    body = rig.chat(PROMPT_BYTES)
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "body.json"
        file.write_bytes(body)
        direct = await latency("direct", body, 3)
        for mode in ("fds", "buffered"):
            rows = await compare(mode, floor=file, body=body, rounds=rounds, seconds=seconds)
            ours, floors, alike = rows["extproc"], rows["plain"], rows["alike"]
            alone = await latency(mode, body, 3)
            bare = await latency(mode, body, 3, floor=file)
            half = await half_load(mode, body, statistics.median(row["rps"] for row in ours), 4)
            figures[mode] = {
                "cpu_ratio_median": statistics.median(ratios(rows, "plain")),
                "cpu_ratio_alike_median": statistics.median(ratios(rows, "alike")),
                "cpu_ratios": ratios(rows, "plain"),
                "cpu_ratios_alike": ratios(rows, "alike"),
                "extproc_cpu_us": round(statistics.median(row["cpu_us"] for row in ours)),
                "floor_cpu_us": round(statistics.median(row["cpu_us"] for row in floors)),
                "floor_alike_cpu_us": round(statistics.median(row["cpu_us"] for row in alike)),
                "extproc_rps": round(statistics.median(row["rps"] for row in ours)),
                "floor_rps": round(statistics.median(row["rps"] for row in floors)),
                "added_p50_ms": round(alone["p50_ms"] - direct["p50_ms"], 3),
                "floor_added_p50_ms": round(bare["p50_ms"] - direct["p50_ms"], 3),
                "p50_ms": round(alone["p50_ms"], 3),
                "half_saturation": {key: round(value, 2) for key, value in half.items()},
            }
            print(mode, figures[mode], flush=True)
    if write:
        command = f"python -m bench.overhead --rounds {rounds} --seconds {seconds:g} --write"
        rig.write("overhead", command, {"direct": direct, **figures})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    uvloop.run(main(args.rounds, args.seconds, write=args.write))
