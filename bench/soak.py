"""Measures a picker's memory over many well-formed and hostile requests.

    python -m bench.soak [--requests 1000000] [--part core ...] [--trace] [--write]

Parts are `core`, `wire`, `envoy` and `hostile`. `core` drives the real stream core of a whole picker with
simulated time: messages are decoded, decided, answered and closed as the server does it, without
gRPC. `wire` drives a real `extproc serve` over real gRPC streams, a fifth of the requests, and
`envoy` one behind a real Envoy, a twentieth of them. All three send chats as honest clients do: every request has its own id, user and session, half of them go on
with a conversation, and there are more models than anything remembers. `hostile` sends 10,000
requests of every kind in `bench.soak_kinds` through the core, once honest ones have filled what is
remembered. Memory is what the process has resident; slopes are fits over the last half.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import json
import os
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from statistics import linear_regression
from typing import Any

import grpc

from bench import rig, soak_kinds, soak_messages
from extproc.config.decisions import DecisionsSection
from extproc.config.pool_sections import PoolSource
from extproc.config.settings import FlowControlSection, ServerSection, Settings
from extproc.demo import stack
from extproc.endpoint import EngineCounters, Load
from extproc.server import grpc_workarounds
from extproc.server.app import EndpointPickerProcess
from extproc.server.stream_handler import StreamHandler, open_stream
from extproc.wire import codec
from tests.e2e import http1

MIB = 1 << 20
PARTS = ("core", "wire", "envoy", "hostile")

#: Requests that are open at once, conversations that may go on, and models that are named.
OPEN = 64
TALKS = 2000
MODELS = 500

#: Simulated seconds between requests and between scrapes.
PAUSE_S = 0.005
SCRAPE_S = 0.2

#: Bar of `core`, once a million requests have filled what is remembered: MiB for each 100,000 over the
#: last half.
FLAT = 1.0


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Chats:
    """Honest traffic: the messages of one request after the other.

    Args:
        rng: All chance.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._system = self._text(2048)
        self._talks: deque[list[dict[str, str]]] = deque(maxlen=TALKS)
        self.number = 0

    def _text(self, length: int) -> str:
        return base64.b64encode(self._rng.randbytes(length)).decode()[:length]

    def chat(self) -> tuple[dict[str, str], bytes]:
        """Header fields and body of the next request."""
        rng, number = self._rng, self.number
        self.number += 1
        if self._talks and rng.random() < 0.5:
            talk = rng.choice(self._talks)
            talk.append({"role": "assistant", "content": self._text(rng.randrange(50, 800))})
        else:
            talk = [{"role": "system", "content": self._system}]
            self._talks.append(talk)
        talk.append({"role": "user", "content": self._text(rng.randrange(50, 2000))})
        if len(talk) > 12:
            self._talks.remove(talk)
        body = {
            "model": f"model-{rng.randrange(MODELS)}",
            "messages": talk,
            "user": f"user-{number}",
            "max_tokens": 64,
        }
        headers = {
            ":method": "POST",
            ":path": "/v1/chat/completions",
            "content-type": "application/json",
            "x-request-id": f"{rng.getrandbits(128):032x}",
            "x-session-id": f"session-{number}",
        }
        return headers, json.dumps(body).encode()

    def request(self) -> tuple[bytes, bytes]:
        """The headers and the body of the next request, as messages of Envoy."""
        headers, body = self.chat()
        return soak_messages.headers(headers), soak_messages.body(body)

    def answer(self, prompt_bytes: int) -> tuple[bytes, bytes]:
        """The headers and the body of an answer, with its usage."""
        prompt = prompt_bytes // 4
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": 64,
            "prompt_tokens_details": {"cached_tokens": prompt // 2},
        }
        body = {"choices": [{"message": {"content": "x" * 200}}], "usage": usage}
        headers = {":status": "200", "content-type": "application/json"}
        return (
            soak_messages.headers(headers, response=True),
            soak_messages.body(json.dumps(body).encode(), response=True),
        )


class Core:
    """A whole picker under simulated time, without gRPC.

    Args:
        settings: Its configuration.
    """

    def __init__(self, settings: Settings) -> None:
        self.now = 1000.0
        self.picker = EndpointPickerProcess(settings, clock=lambda: self.now)
        self.shared = self.picker.servicer.shared
        self._scraped = self.now
        self._finished = 0
        self._tokens = 0

    @property
    def store(self) -> Any:
        """The only pool's endpoints."""
        (site,) = self.picker.pool_registry.by_name.values()
        return site.parts.store

    def say(self, stream: StreamHandler, *messages: bytes) -> None:
        """Let a stream take messages, and encode its answers."""
        for message in messages:
            for reply in stream.handle(codec.decode(message)):
                codec.encode(reply)

    def open(self, *messages: bytes) -> StreamHandler:
        """Begin a stream."""
        stream = open_stream(self.shared)
        self.say(stream, *messages)
        return stream

    def count(self, prompt_bytes: int) -> None:
        """An answer ended, as an engine counts it."""
        self._finished += 1
        self._tokens += prompt_bytes // 4

    def passes(self, seconds: float) -> None:
        """Let time pass, and scrapes be taken in."""
        self.now += seconds
        if self.now - self._scraped < SCRAPE_S:
            return
        self._scraped = self.now
        store = self.store
        share = len(store.pool.members)
        for member in store.pool.members:
            load = Load(
                at=self.now,
                engine="vllm",
                waiting=0.0,
                running=float(member.account.in_flight),
                kv_usage=0.5,
                prefix_queries=float(self._tokens // share),
                prefix_hits=float(self._tokens // share // 2),
                kv_blocks=30_000,
                block_tokens=16,
                counters=EngineCounters(
                    finished=float(self._finished // share),
                    finished_prompt_tokens=float(self._tokens // share),
                ),
            )
            store.observe(store.begin_scrape(member.endpoint), load, self.now)


def settings(*, engines: int = 8, holding: bool = True, decisions: int = 1000) -> Settings:
    """A picker over so many engines."""
    endpoints = tuple(f"10.0.0.{number}:8000" for number in range(engines))
    return Settings(
        server=ServerSection(
            host="127.0.0.1", secure_serving=False, grpc_port=0, grpc_health_port=0, metrics_port=0
        ),
        pool=PoolSource(endpoints=endpoints),
        flow_control=FlowControlSection(enabled=holding),
        decisions=DecisionsSection(decisions=decisions),
        seed=1,
    )


def chats(core: Core, rng: Random) -> Iterator[None]:
    """Honest requests, one a step; `OPEN` of them are open at once."""
    source = Chats(rng)
    running: deque[tuple[StreamHandler, int]] = deque()
    while True:
        headers, body = source.request()
        running.append((core.open(headers, body), len(body)))
        core.passes(PAUSE_S)
        if len(running) > OPEN:
            stream, size = running.popleft()
            if rng.random() < 0.98:
                core.say(stream, *source.answer(size))
                core.count(size)
            stream.finish()
        yield


async def core(requests: int, *, trace: bool, steps: int = 20) -> dict[str, Any]:
    """Honest chats through the stream core; nothing waits, because no time passes for it."""
    driven = Core(settings(holding=False))
    await driven.picker.sync()
    rounds = chats(driven, Random(1))
    trim = grpc_workarounds.trimmer()
    points = []
    before = None
    if trace:
        tracemalloc.start(12)
    began = time.process_time()
    for step in range(steps):
        for _ in range(requests // steps):
            next(rounds)
        trim()
        points.append(((step + 1) * (requests // steps), resident_bytes() / MIB))
        print(f"{points[-1][0]:>9} requests  {points[-1][1]:7.1f} MiB", flush=True)
        if trace and step == steps // 2:
            before = tracemalloc.take_snapshot()
    if before is not None:
        for line in tracemalloc.take_snapshot().compare_to(before, "lineno")[:25]:
            print(line)
    return {
        **judged(points),
        "cpu_us_per_request": round((time.process_time() - began) / requests * 1e6),
    }


async def wire(requests: int, *, steps: int = 20) -> dict[str, Any]:
    """Honest chats through a real picker over real gRPC; its engines are simulated, and only scraped."""
    async with stack.stack() as children:
        engines = [(await children.engine())[1] for _ in range(2)]
        port = stack.free_port()
        server = await children.extproc(
            *("--endpoints", ",".join(engines), "--host", "127.0.0.1", "--secure-serving=false"),
            *("--grpc-port", str(port), "--grpc-health-port", "0", "--metrics-port", "0"),
        )
        source = Chats(Random(1))
        points = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream(f"/{codec.SERVICE}/{codec.METHOD}")
            for step in range(steps):
                left = iter(range(requests // steps))
                await asyncio.gather(*(_client(call, source, left) for _ in range(OPEN)))
                mib = resident_bytes(server.process.pid) / MIB
                points.append(((step + 1) * (requests // steps), mib))
                print(f"{points[-1][0]:>9} requests  {mib:7.1f} MiB", flush=True)
    return judged(points)


async def _client(call: Any, source: Chats, left: Iterator[int]) -> None:
    """Send one request after the other while some are left, each to the end of its answer."""
    for _ in left:
        headers, body = source.request()
        stream = call()
        await stream.write(headers)
        await stream.write(body)
        await stream.read()
        for message in source.answer(len(body)):
            await stream.write(message)
        await stream.done_writing()
        while await stream.read() is not grpc.aio.EOF:
            pass


async def envoy(requests: int, *, steps: int = 20) -> dict[str, Any]:
    """Honest chats through a real Envoy and a real picker to an engine that answers at once."""
    source, points = Chats(Random(1)), []
    async with rig.rig("fds") as site:
        for step in range(steps):
            left = iter(range(requests // steps))
            await asyncio.gather(*(_http_client(site.port, source, left) for _ in range(OPEN)))
            points.append(((step + 1) * (requests // steps), site.memory_bytes() / MIB))
            print(f"{points[-1][0]:>9} requests  {points[-1][1]:7.1f} MiB", flush=True)
    return judged(points)


async def _http_client(port: int, source: Chats, left: Iterator[int]) -> None:
    """Send one request after the other while some are left."""
    for _ in left:
        fields, body = source.chat()
        further = [item for item in fields.items() if not item[0].startswith(":")]
        answer = await http1.ask(port, fields[":path"], body, headers=further)
        assert answer.status == 200, answer


async def hostile(requests: int, *, count: int = 10_000) -> dict[str, Any]:
    """Requests of every hostile kind, after honest ones filled what is remembered."""
    driven = Core(settings())
    await driven.picker.sync()
    rounds = chats(driven, Random(1))
    for _ in range(requests):
        next(rounds)
    trim = grpc_workarounds.trimmer()
    grown = {}
    for kind in soak_kinds.KINDS:
        trim()
        before = resident_bytes()
        attack(driven, kind, count)
        trim()
        grown[kind] = round((resident_bytes() - before) / MIB, 1)
        print(f"{kind:>24}  {grown[kind]:+7.1f} MiB", flush=True)
    return {"requests_before": requests, "requests_of_each": count, "grown_mib": grown}


def attack(driven: Core, kind: str, count: int, *, start: int = 0) -> None:
    """Send so many requests of a hostile kind, one after the other."""
    for _, case in zip(range(count), soak_kinds.numbers(kind, start), strict=False):
        stream = driven.open(*case.request)
        driven.passes(PAUSE_S)
        if stream.is_routed:
            driven.say(stream, *case.answer)
        stream.finish()


def judged(points: list[tuple[int, float]]) -> dict[str, Any]:
    """Memory along the way, and its slope over the last half."""
    late = points[len(points) // 2 :]
    slope = linear_regression([at for at, _ in late], [mib for _, mib in late]).slope
    return {
        "requests": points[-1][0],
        "mib": {str(at): round(mib, 1) for at, mib in points},
        "mib_per_100k": round(slope * 100_000, 2),
    }


def write(figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Record the parts that ran, with command and commit; other parts keep theirs."""
    command = " ".join(["python -m bench.soak", *sys.argv[1:]])
    path = rig.RESULTS / "soak.json"
    recorded = json.loads(path.read_text()) if path.exists() else {}
    former = {part: recorded[part] for part in PARTS if part in recorded}
    new = json.loads(rig.write("soak", command, {}).read_text())
    origin = {key: new[key] for key in ("command", "commit", "date")}
    parts = former | {part: {**run, **origin} for part, run in figures.items()}
    rig.write("soak", command, {part: parts[part] for part in PARTS if part in parts})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--trace", action="store_true", help="say what grows; five times slower")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    figures = {}
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # as the server does
    for part in args.part or PARTS:
        if part == "core":
            figures["core"] = asyncio.run(core(args.requests, trace=args.trace))
        if part == "wire":
            figures["wire"] = asyncio.run(wire(args.requests // 5))
        if part == "envoy":
            figures["envoy"] = asyncio.run(envoy(args.requests // 20))
        if part == "hostile":
            figures["hostile"] = asyncio.run(hostile(args.requests // 10))
    print(json.dumps(figures, indent=2))
    if args.write:
        write(figures)
    if figures.get("core", {}).get("mib_per_100k", 0.0) > FLAT:
        sys.exit(f"memory grows by more than {FLAT} MiB for each 100,000 requests")


if __name__ == "__main__":
    main()
