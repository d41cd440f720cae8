"""Runs a well-behaved client for minutes beside everything that can go wrong at once.

python -m bench.chaos [--minutes 10] [--rate 8] [--seed 1] [--transport native] [--exchange direct]
    [--write]

A real picker, a real Envoy, 8 engines (2 of them with hostile pages, KV events and rendered prompts) and a
Kubernetes API server where there is one. A quarter of the time is quiet, but for the client; then hostile
clients of every kind come, floods of HTTP/2 frames on the port of ext_proc, engines are killed and hung,
files are broken and mended, the API server goes away and comes back. The picker exchanges its requests with
another replica, which is killed, stopped and started again (`bench.chaos_peers`), or with `--exchange
redis` over a Redis, which goes away and holds what no replica wrote. It prints a table of bars and ends with
1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from bench import chaos_peers, chaos_site, hostile_requests, rig, robustness, steady_client
from bench.chaos_site import ChaosBar, ChaosEngine, ChaosSite
from bench.hostile_watch import MIB
from extproc.routing import peer_sync
from extproc.server import native_ext_proc
from tests.support.http2_floods import build_floods

#: The 99th percentile may be so many times the quiet one.
MOST_P99_RATIO = 2.0

#: Memory that may stay over what the picker had after a third of the chaos.
MOST_GROWTH_BYTES = 16 * MIB

#: Hostile clients that stand beside each other, at most.
MOST_CLIENTS = 24

#: Seconds an engine hangs, or is gone.
TROUBLE_S = 4.0

#: Seconds between two floods of frames.
FLOOD_S = 2.0

#: Seconds after the chaos until accounts must be zero.
CALM_S = 10.0

#: What the native transport ended, by limit, and what came of KV events and of prompts to render.
_COUNTED = tuple(robustness.CHAOS_COUNTS)

_BROKEN = (
    "pools: [{name: \0}]",
    'seed: !!int ""',
    'seed: !!timestamp "x"',
    "pools: " + "[" * 50_000,
    "pools: 7",
    "",
)
_BROKEN_LISTS = ("endpoints: [\0]", "endpoints: [7, a, {}]", "endpoints: {", "- " * 10_000)

_ANNOTATIONS = (
    "apps/v1%2Fnamespaces%2Fkube-system%2Fdeployments%2Fcoredns%2Fscale?x=/deployments/vllm",
    "\n\r/../../x",
    "9" * 1000,
)


class Event(msgspec.Struct, frozen=True):
    """Event on an engine: `kill` or `hang`, at a moment of the monotonic clock."""

    what: str
    address: str
    at: float


class Chaos:
    """Everything hostile, until it is stopped.

    Args:
        site: What it is done to.
        rng: Of all choices.
        seconds: How long it goes on.

    Attributes:
        events: What was done to engines.
        answers: What hostile clients got, by kind and status.
        counts: How often other things were done.
        peers: What was done to the other replica; None without one.
    """

    def __init__(self, site: ChaosSite, rng: random.Random, seconds: float) -> None:
        self.site = site
        self.events: list[Event] = []
        self.answers: collections.Counter[str] = collections.Counter()
        self.counts: collections.Counter[str] = collections.Counter()
        self.peers = chaos_peers.ChaosPeers(site.picker, site.peer) if site.peer else None
        self._rng = rng
        self._seconds = seconds
        self._end = 0.0
        self._bodies = [hostile_requests.hostile(size) for size in (1_000, 64_000, 1_000_000)]
        self._room = asyncio.Semaphore(MOST_CLIENTS)

    async def run(self) -> None:
        """Do everything at once, and return once it is over and mended."""
        self._end = time.monotonic() + self._seconds
        parts: list[Callable[[], Awaitable[None]]] = [
            self._requests,
            self._names,
            self._clients,
            self._floods,
            self._engines,
            self._files,
        ]
        parts += [self._redis, self._entries] if self.site.redis else []
        parts += [self._peer, self._slow_readers] if self.peers else []
        parts += [self._cluster] if self.site.cluster else []
        async with asyncio.TaskGroup() as tasks:
            for part in parts:
                tasks.create_task(part(), name=part.__name__)

    async def _until(self, pause_s: float) -> bool:
        """Wait; False once the chaos is over."""
        left = self._end - time.monotonic()
        await asyncio.sleep(max(0.0, min(pause_s, left)))
        return left > pause_s

    async def _requests(self) -> None:
        while await self._until(0.25):
            name, request = self._rng.choice([*self._rng.choice(self._bodies).items()])
            status = await hostile_requests.send(self.site.picker.port, request)
            self.answers[f"{name}: {status}"] += 1

    async def _names(self) -> None:
        for request in hostile_requests.names():
            if not await self._until(0.2):
                return
            self.answers[
                f"new name: {await hostile_requests.send(self.site.picker.port, request)}"
            ] += 1

    async def _clients(self) -> None:
        async def run_client(name: str) -> None:
            async with self._room:
                end = await hostile_requests.CLIENTS[name](self.site.picker.port, self._rng)
            self.answers[f"{name}: {end}"] += 1

        async with asyncio.TaskGroup() as tasks:
            while await self._until(0.25):
                tasks.create_task(run_client(self._rng.choice([*hostile_requests.CLIENTS])))

    async def _floods(self) -> None:
        """Flood the port of ext_proc with frames of every kind in turn, beside Envoy."""
        for limit, frames in itertools.cycle(build_floods(native_ext_proc.PATH).items()):
            if not await self._until(FLOOD_S):
                return
            end = await hostile_requests.flood(self.site.picker.ext_proc, frames)
            self.answers[f"{limit}: {end}"] += 1

    async def _engines(self) -> None:
        """Kill and hang engines in turn, one at a time."""
        period_s = max(3 * TROUBLE_S, self._seconds / 20)
        for what in itertools.cycle(("kill", "hang")):
            if not await self._until(period_s - TROUBLE_S):
                return
            engine = self._rng.choice(self.site.engines)
            number = signal.SIGKILL if what == "kill" else signal.SIGSTOP
            self.events.append(Event(what, engine.address, time.monotonic()))
            engine.send(number)
            await asyncio.sleep(TROUBLE_S)
            await _mend(engine, what)

    async def _files(self) -> None:
        """Break the configuration or the list of endpoints, and mend it."""
        good = {path: path.read_text() for path in (self.site.config, self.site.listed)}
        broken = {self.site.config: _BROKEN, self.site.listed: _BROKEN_LISTS}
        while await self._until(3.0):
            path = self._rng.choice([*good])
            head = good[path].split("pools:")[0] if path == self.site.config else ""
            path.write_text(head + self._rng.choice(broken[path]))
            await asyncio.sleep(3.0)
            # An edit that is right, so that reload is at work as well.
            more = f"seed: {self._rng.randint(1, 9)}\n" if path == self.site.config else ""
            path.write_text(good[path] + more)
            self.counts["edits"] += 1
        for path, text in good.items():
            path.write_text(text)

    async def _peer(self) -> None:
        """Kill and stop the other replica in turn."""
        assert self.peers is not None
        period_s = max(3 * chaos_peers.TROUBLE_S, self._seconds / 16)
        for outage in itertools.cycle((self.peers.kill, self.peers.stop)):
            if not await self._until(period_s - chaos_peers.TROUBLE_S):
                return
            await outage()
            self.counts[self.peers.outages[-1].what] += 1

    async def _slow_readers(self) -> None:
        assert self.peers is not None
        while await self._until(chaos_peers.TROUBLE_S):
            await self.peers.read_slowly()
            self.counts["slow readers of requests"] += 1

    async def _redis(self) -> None:
        redis = self.site.redis
        assert redis is not None
        while await self._until(max(10.0, self._seconds / 8)):
            await redis.stop()
            await asyncio.sleep(TROUBLE_S)
            await redis.start()
            self.counts["Redis away"] += 1

    async def _entries(self) -> None:
        """Write to the stream what no picker would."""
        from redis import RedisError  # noqa: PLC0415 - only where it is used
        from redis import asyncio as client  # noqa: PLC0415

        assert self.site.redis is not None
        open_ = peer_sync.OpenRequests(1 << 62, [1, 2], 1 << 62)
        facts = [peer_sync.encode(peer_sync.PeerMessage("x", [open_])), b"\x00", b"\x93junk"]
        facts += [b"\x92\xa2\xff\xfe\x90", self._rng.randbytes(2_000)]
        async with client.Redis.from_url(self.site.redis.url) as stream:
            while await self._until(0.5):
                with contextlib.suppress(RedisError, OSError):
                    await stream.xadd("extproc", {b"m": self._rng.choice(facts)})
                    self.counts["entries"] += 1

    async def _cluster(self) -> None:
        """Take the API server away for a while, and annotate the pool with what no operator would."""
        cluster = self.site.cluster
        assert cluster is not None
        while await self._until(max(15.0, self._seconds / 4)):
            value = {"extproc/scale-target": self._rng.choice(_ANNOTATIONS)}
            await cluster.api.patch(cluster.pool, {"metadata": {"annotations": value}})
            cluster.server.stop()
            await asyncio.sleep(2 * TROUBLE_S)
            await cluster.server.restart()
            self.counts["API server away"] += 1


async def _mend(engine: ChaosEngine, what: str) -> None:
    if what == "hang":
        engine.send(signal.SIGCONT)
    else:
        await engine.start()


def percentile(values: list[float], share: float) -> float:
    """The smallest value that so much of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def was_hit(outcome: steady_client.ClientOutcome, events: list[Event], *kinds: str) -> bool:
    """True if a request was in flight on an engine when that was killed or hung."""
    return any(
        event.what in kinds
        and outcome.begun <= event.at <= outcome.ended
        and (event.address in outcome.upstream or (event.what == "kill" and not outcome.upstream))
        for event in events
    )


async def sampled(site: ChaosSite, samples: list[tuple[float, int]]) -> None:
    """Note the picker's memory every second, until cancelled."""
    while True:
        samples.append((time.monotonic(), site.picker.memory_bytes()))
        await asyncio.sleep(1.0)


async def run(
    minutes: float, rate_per_s: float, seed: int, transport: str, exchange: str
) -> tuple[list[ChaosBar], dict]:
    """Everything, from start to end."""
    seconds = 60.0 * minutes
    quiet_s = seconds / 4
    async with chaos_site.site(transport, exchange) as site:
        for line in site.missing:
            print(line, flush=True)
        chaos = Chaos(site, random.Random(seed), seconds - quiet_s)
        samples: list[tuple[float, int]] = []
        async with asyncio.TaskGroup() as clients:
            client = clients.create_task(_client(site, site.picker.port, rate_per_s, seconds))
            # Its requests are answered slowly, so that some are open whenever it is killed.
            port, rate = (site.peer.ports.listener, chaos_peers.RATE_PER_S) if site.peer else (0, 0)
            peer_client = clients.create_task(
                _client(site, port, rate, seconds, tokens=chaos_peers.TOKENS)
            )
            sampling = asyncio.ensure_future(sampled(site, samples))
            await asyncio.sleep(quiet_s)
            began = time.monotonic()
            await chaos.run()
            ended = time.monotonic()
        await asyncio.sleep(CALM_S)
        accounts = await site.picker.accounts()
        if site.peer is not None:
            left = await site.peer.watched.accounts()
            accounts |= {f"other replica: {name}": value for name, value in left.items()}
        metrics = await site.picker.metrics()
        chaos.counts |= {
            name: int(value) for name, value in metrics.items() if name.startswith(_COUNTED)
        }
        sampling.cancel()
        bars, figures = judged(
            site, chaos, client.result(), samples, accounts, began=began, ended=ended
        )
        if chaos.peers is not None:
            rows, more = _judge_peers(chaos, chaos.peers, peer_client.result())
            bars += rows
            figures |= more
        return bars, figures | {"bars": [msgspec.to_builtins(bar) for bar in bars]}


async def _client(
    site: ChaosSite, port: int, rate_per_s: float, seconds: float, *, tokens: int = 16
) -> list[steady_client.ClientOutcome]:
    """Run a well-behaved client to its end."""
    if not port:
        return []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.json"
        words = [str(port), str(rate_per_s), str(seconds), str(tokens), str(file)]
        argv = [sys.executable, "-m", "bench.steady_client", *words]
        client = await site.children.start("steady", argv, ready="is ready")
        await client.line("is done")
        return msgspec.json.decode(file.read_bytes(), type=list[steady_client.ClientOutcome])


def _judge_peers(
    chaos: Chaos, peers: chaos_peers.ChaosPeers, outcomes: list[steady_client.ClientOutcome]
) -> tuple[list[ChaosBar], dict]:
    excused = sum(
        outcome.status != 200
        and not peers.is_excused(outcome)
        and was_hit(outcome, chaos.events, "kill")
        for outcome in outcomes
    )
    figures = {
        "peer_requests": len(outcomes),
        "peer_gone_s": peers.gone_s,
        "peer_agreement_s": peers.agreement_s,
    }
    return chaos_peers.judge(peers, outcomes, excused), figures


def judged(
    site: ChaosSite,
    chaos: Chaos,
    outcomes: list[steady_client.ClientOutcome],
    samples: list[tuple[float, int]],
    accounts: dict[str, float],
    *,
    began: float,
    ended: float,
) -> tuple[list[ChaosBar], dict]:
    """Hold what was measured against the bars."""
    quiet = [
        outcome.ended - outcome.begun
        for outcome in outcomes
        if outcome.ended < began and outcome.status == 200
    ]
    troubled = [outcome for outcome in outcomes if outcome.ended >= began]
    failed = [outcome for outcome in outcomes if outcome.status != 200]
    excused = [outcome for outcome in failed if was_hit(outcome, chaos.events, "kill")]
    counted = [
        outcome for outcome in troubled if not was_hit(outcome, chaos.events, "kill", "hang")
    ]
    quiet_p99 = percentile(quiet, 0.99)
    p99 = percentile([outcome.ended - outcome.begun for outcome in counted], 0.99)
    third = began + (ended - began) / 3
    early = [size for at, size in samples if third - 5.0 <= at <= third + 5.0]
    memory = samples[-1][1] - int(statistics.median(early or [samples[0][1]]))
    bars = [
        ChaosBar(
            "requests of the well-behaved client that failed, but for those on a killed engine",
            f"0 of {len(outcomes)}",
            f"{len(failed) - len(excused)} (and {len(excused)} on killed engines)",
            len(failed) == len(excused),
        ),
        ChaosBar(
            "its p99, but for requests on an engine that was hung or killed under them",
            f"<= {MOST_P99_RATIO:g} x {1000 * quiet_p99:.0f} ms",
            f"{1000 * p99:.0f} ms = {p99 / max(quiet_p99, 1e-9):.2f} x",
            p99 <= MOST_P99_RATIO * quiet_p99,
        ),
        ChaosBar(
            "memory at the end, over that after a third of the chaos",
            f"<= {MOST_GROWTH_BYTES / MIB:.0f} MiB",
            f"{memory / MIB:+.1f} MiB, at {samples[-1][1] / MIB:.0f} MiB",
            memory <= MOST_GROWTH_BYTES,
        ),
        ChaosBar(
            "accounts at the end", "all zero", str(accounts) if accounts else "zero", not accounts
        ),
        ChaosBar("the picker's process", "never ended", *_alive(site)),
    ]
    figures = {
        "requests": len(outcomes),
        "failed": [msgspec.to_builtins(outcome) for outcome in failed],
        "quiet_p50_s": percentile(quiet, 0.5),
        "quiet_p99_s": quiet_p99,
        "p50_s": percentile([outcome.ended - outcome.begun for outcome in counted], 0.5),
        "p99_s": p99,
        "p99_of_all_s": percentile([outcome.ended - outcome.begun for outcome in troubled], 0.99),
        "memory_bytes": [size for _, size in samples],
        "engines": dict(collections.Counter(event.what for event in chaos.events)),
        "other": dict(chaos.counts),
        "hostile_answers": dict(sorted(chaos.answers.items())),
        "missing": site.missing,
        "last_lines": [] if site.picker.is_alive else [*site.picker.child.last_lines],
    }
    return bars, figures


def _alive(site: ChaosSite) -> tuple[str, bool]:
    if site.picker.is_alive:
        return "runs", True
    return f"ended with {site.picker.child.process.returncode}", False


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=("native", "grpcio"), default="native")
    parser.add_argument("--exchange", choices=("direct", "redis"), default="direct")
    parser.add_argument(
        "--write", action="store_true", help="write bench/results/chaos.json or chaos_redis.json"
    )
    wanted = parser.parse_args()
    async with asyncio.timeout(60.0 * wanted.minutes + 600.0):
        bars, figures = await run(
            wanted.minutes, wanted.rate, wanted.seed, wanted.transport, wanted.exchange
        )
    for name in ("engines", "other"):
        print(f"{name}: {figures[name]}")
    for line in figures["last_lines"]:
        print(f"last line of the picker: {line}")
    for bar in bars:
        met = "met   " if bar.is_met else "MISSED"
        print(f"{met} {bar.name}: wanted {bar.wanted}, measured {bar.measured}")
    if wanted.write:
        name = "chaos" if wanted.exchange == "direct" else "chaos_redis"
        rig.write(name, "python -m bench.chaos " + " ".join(sys.argv[1:]), figures)
    return 0 if all(bar.is_met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
