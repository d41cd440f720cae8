"""Measures delay and CPU of peer synchronization, directly and over Redis.

    python -m bench.peer_channels [--requests N] [--write]

Two processes on loopback: one writes events of requests with 50 prompt blocks, the other applies them.
The delay is from the event to the account of the other process: of 200 requests that each follow a
pause, and of `--requests` at each of two rates. The CPU of both processes is that of the run at this
rate without that of an idle one of the same length.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from bench import chaos_site, rig
from extproc.config.settings import PeerSyncSection
from extproc.demo import stack
from extproc.pool.request_tokens import CachedTokens, PromptSize
from extproc.server import admin
from extproc.server.http_peer_channel import HttpPeerChannel
from extproc.server.peer_addresses import PeerAddresses
from extproc.server.redis_peer_channel import RedisPeerChannel
from tests.server.peer_replica import Replica, talking
from tests.support.waiting import until

#: Requests that each follow a pause, and its seconds.
SINGLE, PAUSE_S = 200, 0.02

BLOCKS = 50

#: Requests per second: below it each event has a message of its own, above it some share one.
RATES = (250, 1000)

#: Requests that are open at once.
OPEN = 50


def build(where: str) -> Replica:
    """A replica that reads from a peer (`host:port`), or over Redis; nothing to read from if empty."""
    if "://" in where:
        settings = PeerSyncSection(url=where)
        return Replica(lambda registry: RedisPeerChannel(settings, registry, time.monotonic))
    peers = (where,) if where else ()
    settings, addresses = (
        PeerSyncSection(peers=peers),
        PeerAddresses(peers, where="peer_sync.peers"),
    )
    return Replica(
        lambda registry: HttpPeerChannel(
            settings, registry, time.monotonic, addresses=addresses, failures=Counter()
        )
    )


async def receive(where: str) -> None:
    """Apply what is read; a line of input is answered with CPU seconds and times of requests."""
    replica, times = build(where), dict[int, float]()
    apply = replica.line.replica.apply_message

    def timed(message, now):
        freed = apply(message, now)
        at = time.monotonic()
        for fact in message.facts:
            number = getattr(fact, "number", None)
            if number is not None:
                times.setdefault(number, at)
        return freed

    replica.line.replica.apply_message = timed
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async with talking(replica):
        await until(lambda: replica.heard == 1)
        print("{}", flush=True)
        while await reader.readline():
            print(json.dumps({"cpu_s": time.process_time(), "times": times}), flush=True)
            times.clear()


class EventSender:
    """Writes events of requests, and asks the receiver."""

    def __init__(self, replica: Replica, receiver: asyncio.subprocess.Process) -> None:
        self._event_log = replica.line.event_log
        self._receiver = receiver
        self._number = 0
        rng = random.Random(1)
        self._blocks = [[rng.getrandbits(60) for _ in range(BLOCKS)] for _ in range(OPEN)]
        director = replica.director()
        self._reservations = [
            director.charge(
                director.pool.members[0],
                (),
                target="m",
                size=PromptSize(BLOCKS * 16, 0),
                cached_tokens=CachedTokens(0, 0),
                now=time.monotonic(),
            )
            for _ in range(OPEN)
        ]

    async def run(self, count: int, pause_s: float, *, idle: bool = False) -> dict[str, Any]:
        """Start and end requests with a pause between them; CPU seconds and delays in seconds."""
        own, other = time.process_time(), (await self._ask())["cpu_s"]
        began, started = time.monotonic(), dict[int, float]()
        for step in range(count):
            if not idle:
                slot = self._number % OPEN
                reservation = self._reservations[slot]
                self._event_log.request_ended(reservation, answered=True, ran=True)
                self._number += 1
                started[self._number] = time.monotonic()
                self._event_log.request_started("a", reservation, self._blocks[slot])
            await asyncio.sleep(max(0.0, began + (step + 1) * pause_s - time.monotonic()))
        own = time.process_time() - own
        answer = await self._ask()
        times = {int(number): at for number, at in answer["times"].items()}
        delays = [times[number] - at for number, at in started.items() if number in times]
        return {"own_s": own, "other_s": answer["cpu_s"] - other, "delays": delays}

    async def _ask(self) -> dict[str, Any]:
        assert self._receiver.stdin is not None
        assert self._receiver.stdout is not None
        self._receiver.stdin.write(b"\n")
        return json.loads(await self._receiver.stdout.readline())


@contextlib.asynccontextmanager
async def sending(url: str) -> AsyncIterator[EventSender]:
    """A replica that serves, or writes to a Redis, and a process that reads from it."""
    replica, server, port = build(url), admin.AdminServer(), stack.free_port()
    async with talking(replica):
        application = web.Application()
        application.add_routes(replica.line.routes())
        await server.start(application, host="127.0.0.1", port=port)
        receiver = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.peer_channels", "--receive", url or f"127.0.0.1:{port}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        try:
            assert receiver.stdout is not None
            await receiver.stdout.readline()
            yield EventSender(replica, receiver)
        finally:
            receiver.kill()
            await receiver.wait()
    await server.close()


def quantiles(delays: list[float]) -> dict[str, float]:
    """Median, p99 and count, in milliseconds."""
    ordered = sorted(delays)
    return {
        "median_ms": round(statistics.median(ordered) * 1e3, 2),
        "p99_ms": round(ordered[int(len(ordered) * 0.99) - 1] * 1e3, 2),
        "count": len(ordered),
    }


async def measured(url: str, *, requests: int) -> dict[str, Any]:
    """Figures of a channel."""
    async with sending(url) as sender:
        single = await sender.run(SINGLE, PAUSE_S)
        figures = {"after_a_pause": quantiles(single["delays"])}
        for rate in RATES:
            idle = await sender.run(requests, 1.0 / rate, idle=True)
            loaded = await sender.run(requests, 1.0 / rate)
            figures[f"{rate}_per_s"] = {
                **quantiles(loaded["delays"]),
                "sender_cpu_us": round((loaded["own_s"] - idle["own_s"]) / requests * 1e6, 1),
                "receiver_cpu_us": round((loaded["other_s"] - idle["other_s"]) / requests * 1e6, 1),
            }
    return figures


def block(result: Mapping[str, Any]) -> str:
    """Figures as `docs/benchmarks` shows them."""
    lines = [
        "| exchange | requests | delay, ms | p99, ms | CPU of the sender, µs | of the receiver, µs |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("direct", "redis"):
        for key, figures in result.get(name, {}).items():
            kind = f"{figures['count']}, " + key.replace("_per_s", " per second").replace("_", " ")
            cpu = [figures.get(f"{side}_cpu_us", "") for side in ("sender", "receiver")]
            delays = f"{figures['median_ms']:.2f} | {figures['p99_ms']:.2f}"
            lines.append(f"| {name} | {kind} | {delays} | {cpu[0]} | {cpu[1]} |")
    machine = f"{result['machine']['cores']} cores of {result['machine']['cpu']}"
    return "\n".join([*lines, "", f"`{result['command']}`, {machine}, {result['date']}."])


async def main(*, requests: int, write: bool) -> None:
    """Measure both channels; Redis where there is one."""
    figures = {"direct": await measured("", requests=requests)}
    if shutil.which("redis-server") is not None:
        with tempfile.TemporaryDirectory() as folder:
            async with stack.stack() as children:
                redis = chaos_site.Redis(children, Path(folder))
                await redis.start()
                figures["redis"] = await measured(redis.url, requests=requests)
    print(json.dumps(figures, indent=1))
    if write:
        rig.write("peer_channels", "python -m bench.peer_channels --write", figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--receive", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        uvloop.run(receive(args.receive))
    else:
        uvloop.run(main(requests=args.requests, write=args.write))
