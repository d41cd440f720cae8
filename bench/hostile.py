"""Measures time and memory that one hostile client, engine or file can take of a picker.

python -m bench.hostile [--kinds bodies,large,clients,pages,events,rendered,files,waiting]
                        [--requests 10000] [--seconds 5] [--size 1048576] [--only NAME] [--write]

All kinds take some twenty minutes. Each kind of input meets a picker of its own: a real process, real gRPC, and a real Envoy where requests
are sent. For each it shows the longest wait of /healthz beside that of harmless input of the same size,
CPU per request, memory before, at its peak and after, whether the process lives and whether its accounts
are zero afterwards. A kind ends after its requests or its seconds, whatever comes first; bodies of
32 MiB and edits of files come in fixed numbers. Ends with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from bench import hostile_engine, hostile_kv, hostile_requests, hostile_watch
from bench.hostile_watch import MIB, WatchedPicker
from bench.rig import ROOT, write
from extproc.demo import stack

#: The event loop is held for 50 ms at most, in CPU time. For a picker that does not count it, waits of
#: /healthz tell: 50 ms, or half as long again as with harmless input, as busy machines are late.
STALL_S, STALL_RATIO = 0.05, 1.5

#: Memory that may stay of a kind's last requests: what is flat, but for noise.
GROWTH_BYTES = 8 * MIB

#: Largest bodies of each kind that are sent first, while the picker is measured, and last (count).
LARGE_REQUESTS = 4

#: Edits of each kind (count), and seconds until the next: files are looked at every second. Memory
#: after an edit goes up and down by 10 MiB from one to the next, so there are two in each fifth.
EDITS, EDIT_S = 10, 2.0

#: CPU for each MiB of a body beyond what a harmless one takes, in seconds.
PARSING_S = 0.03

#: About the longest body that the picker takes (bytes): multiples of what a kind repeats, and its ends.
LARGEST_BYTES = 32 * MIB - 64 * 1024

#: Clients at a time.
CLIENTS = 8

HEAD = "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n"


class HostileRow(msgspec.Struct):
    """Effect of one kind of input.

    Attributes:
        kind: Its name.
        requests: Sent (count).
        answers: How often each status or end came.
        wait_s: Longest wait of /healthz.
        stall_s: Upper bound of the longest stall that the picker counted; None without the metric.
        cpu_s: CPU seconds for a request.
        before_bytes: Memory before the first request.
        peak_bytes: Memory at its peak.
        grown_bytes: Least memory in the last fifth of the requests, less that in the fifth before:
            what an allocator holds back comes and goes. Of the largest bodies, the least after one
            of the last four less the least after one of the first four.
        is_alive: Whether the process went on.
        accounts: Accounts that did not go back to zero.
        missed: Bars that were missed.
    """

    kind: str
    requests: int = 0
    answers: dict[str, int] = {}
    wait_s: float = 0.0
    stall_s: float | None = None
    cpu_s: float = 0.0
    before_bytes: int = 0
    peak_bytes: int = 0
    grown_bytes: int = 0
    is_alive: bool = True
    accounts: dict[str, float] = {}
    missed: list[str] = []


class Bounds(msgspec.Struct, frozen=True):
    """Amount of each kind: `requests` (count) or `seconds`, whatever comes first."""

    requests: int
    seconds: float
    size_bytes: int
    only: str


@contextlib.asynccontextmanager
async def picker(
    engines: Sequence[Sequence[str]], *arguments: str, with_envoy: bool = True
) -> AsyncIterator[WatchedPicker]:
    """A picker before engines that are started for it.

    Args:
        engines: The command of each, which prints a line that ends with `listening on ip:port`.
        arguments: Further words of `extproc serve`.
        with_envoy: Start an Envoy in front.
    """
    ports = stack.EnvoyPorts(*(stack.free_port() for _ in range(3)))
    pages = stack.free_port()
    async with stack.stack() as children:
        started = [await children.start("engine", argv, ready="listening on ") for argv in engines]
        addresses = [server.ready_line.rpartition(" ")[2] for server in started]
        listed = ["--endpoints", ",".join(addresses)] if addresses else []
        child = await children.extproc(
            *(*listed, "--host", "127.0.0.1", "--secure-serving=false", "--grpc-health-port", "0"),
            *("--grpc-port", str(ports.extproc), "--metrics-port", str(pages)),
            *("--drain-timeout", "0s", *arguments),
        )
        if with_envoy:
            template = ROOT / "envoy" / "original-dst.yaml"
            await children.envoy(stack.envoy_config(template, ports, plaintext=True))
        yield WatchedPicker(child, ports.listener if with_envoy else 0, pages)


def lean_engine() -> Sequence[str]:
    """An engine that answers at once and has no pages."""
    return [sys.executable, str(ROOT / "bench" / "wire_load.py"), "backend", "0"]


def lying_engine(kind: str) -> Sequence[str]:
    """An engine whose pages are of a kind; see bench.hostile_engine."""
    return [sys.executable, "-m", "bench.hostile_engine", kind]


#: Sends one request, or does one thing; returns what became of it.
Step = Callable[[], Awaitable[str]]


async def measured(
    kind: str,
    server: WatchedPicker,
    step: Step,
    bounds: Bounds,
    *,
    at_once: int = CLIENTS,
    first: int = 1,
) -> HostileRow:
    """Do one thing again and again, and look at the picker meanwhile.

    Args:
        kind: Its name.
        server: The picker.
        step: The thing.
        bounds: How often, and for how long.
        at_once: How many do it at a time in the last three fifths, in two of which memory is
            measured: in the first of the three it fits their number.
        first: How many do it at a time before, while waits are measured: several that are allowed
            50 ms each make others wait for their sum.
    """
    row = HostileRow(kind)
    answers: collections.Counter[str] = collections.Counter()
    counted = await server.metrics()
    row.before_bytes, used_s = server.memory_bytes(), server.cpu_s()
    server.reset_peak()
    loop = asyncio.get_running_loop()

    async def part(clients: int, share: float) -> int:
        """Do a share of it; the least memory after a step, as the allocator's stock comes and goes.

        Clients of a step end together, before the picker has noticed it: it is looked at once more.
        """
        ends = loop.time() + share * bounds.seconds
        held_bytes = []

        async def client() -> None:
            for _ in range(max(1, int(share * bounds.requests / clients))):
                if not server.is_alive or loop.time() > ends:
                    return
                answers[await step()] += 1
                held_bytes.append(server.memory_bytes())

        await asyncio.gather(*(client() for _ in range(clients)))
        if server.is_alive:
            await server.accounts()
            held_bytes.append(server.memory_bytes())
        return min(held_bytes, default=0)

    async with hostile_watch.Probe(server.pages) as probe:
        await part(first, 0.4)
        row.stall_s = hostile_watch.longest_stall_s(counted, await server.metrics())
    await part(at_once, 0.2)
    early_bytes, late_bytes = await part(at_once, 0.2), await part(at_once, 0.2)
    row.wait_s, row.peak_bytes = probe.longest_s, server.memory_bytes("VmHWM")
    row.is_alive = server.is_alive
    row.requests, row.answers = answers.total(), dict(answers)
    row.cpu_s = (server.cpu_s() - used_s) / max(1, row.requests)
    row.accounts = await server.accounts() if server.is_alive else {"ended": 1.0}
    row.grown_bytes = late_bytes - early_bytes
    return row


def judge(row: HostileRow, quiet: HostileRow, size_bytes: int) -> HostileRow:
    """Hold a row against the bars.

    Args:
        row: Is changed.
        quiet: What harmless input did.
        size_bytes: Of its bodies; 0 where it is not about bodies.
    """
    if row.stall_s is not None:
        is_held = row.stall_s > STALL_S
    else:
        is_held = row.wait_s > max(STALL_S, STALL_RATIO * quiet.wait_s)
    if is_held:
        row.missed.append("stall")
    if size_bytes and row.cpu_s > quiet.cpu_s + PARSING_S * size_bytes / MIB:
        row.missed.append("CPU")
    if row.grown_bytes > GROWTH_BYTES:
        row.missed.append("memory")
    if not row.is_alive:
        row.missed.append("ended")
    elif row.accounts:
        row.missed.append("accounts")
    return row


async def requests(bounds: Bounds) -> AsyncIterator[HostileRow]:
    """Bodies of every kind through Envoy, each kind at a picker that saw none before."""
    for name, request in hostile_requests.hostile(bounds.size_bytes).items():
        if bounds.only in name:
            async with picker([lean_engine()]) as server:
                await asyncio.gather(
                    *(hostile_requests.send(server.port, request) for _ in range(CLIENTS))
                )

                async def step(
                    request: hostile_requests.Request = request, port: int = server.port
                ) -> str:
                    return await hostile_requests.send(port, request)

                yield await measured(name, server, step, bounds)


async def large(bounds: Bounds) -> AsyncIterator[HostileRow]:
    """The same kinds as long as the picker takes them: the event loop is not held longer for it."""
    kinds = hostile_requests.hostile(LARGEST_BYTES) | {
        "harmless": hostile_requests.harmless(LARGEST_BYTES)
    }
    few = msgspec.structs.replace(bounds, requests=LARGE_REQUESTS, seconds=600.0)
    for name, request in kinds.items():
        # Some kinds are as short as ever.
        if bounds.only in f"large {name}" and len(request.body) > LARGEST_BYTES // 2:
            async with picker([lean_engine()]) as server:

                async def step(
                    request: hostile_requests.Request = request, port: int = server.port
                ) -> str:
                    return await hostile_requests.send(port, request)

                first_bytes = await least_memory_bytes(server, step)
                row = await measured(f"large {name}", server, step, few, at_once=1)
                row.grown_bytes = await least_memory_bytes(server, step) - first_bytes
                yield row


async def least_memory_bytes(server: WatchedPicker, step: Step) -> int:
    """Do one thing LARGE_REQUESTS times, one after another: the least memory after it is over."""
    held_bytes = []
    for _ in range(LARGE_REQUESTS):
        await step()
        await server.accounts()
        held_bytes.append(server.memory_bytes())
    return min(held_bytes)


async def clients(bounds: Bounds) -> AsyncIterator[HostileRow]:
    """Clients that stall, vanish and drip, and names that were never used before."""
    rng = random.Random(1)
    for name, client in hostile_requests.CLIENTS.items():
        if bounds.only in name:
            async with picker([lean_engine()]) as server:

                async def step(
                    client: hostile_requests.Client = client, port: int = server.port
                ) -> str:
                    return await client(port, rng)

                yield await measured(name, server, step, bounds, at_once=64, first=64)
    if bounds.only in "distinct names":
        async with picker([lean_engine()]) as server:
            fresh = hostile_requests.names()
            yield await measured(
                "distinct names",
                server,
                lambda: hostile_requests.send(server.port, next(fresh)),
                bounds,
            )


async def pages(bounds: Bounds) -> AsyncIterator[HostileRow]:
    """Pages of one engine of two, while requests come in."""
    request = hostile_requests.harmless(1000)
    quick = msgspec.structs.replace(bounds, requests=min(bounds.requests, 400))
    for kind in hostile_engine.PAGES:
        if bounds.only in f"page {kind}":
            async with picker([lying_engine(kind), lying_engine("half")]) as server:

                async def step(port: int = server.port) -> str:
                    await asyncio.sleep(0.02)
                    return await hostile_requests.send(port, request)

                yield await measured(f"page {kind}", server, step, quick)


async def events(bounds: Bounds) -> AsyncIterator[HostileRow]:
    """KV events of an engine, while requests for it come in."""
    async for row in _published("events", hostile_kv.EVENTS, bounds):
        yield row


async def rendered(bounds: Bounds) -> AsyncIterator[HostileRow]:
    """Prompts that an engine renders, each of which it sees for the first time."""
    async for row in _published("rendered", hostile_kv.RENDERED, bounds):
        yield row


async def _published(group: str, kinds: Iterable[str], bounds: Bounds) -> AsyncIterator[HostileRow]:
    quick = msgspec.structs.replace(bounds, requests=min(bounds.requests, 400))
    for kind in kinds:
        if bounds.only in f"{group} {kind}":
            ports = [stack.free_port(), stack.free_port()]
            engine = [sys.executable, "-m", "bench.hostile_kv", kind, *map(str, ports)]
            section = f"{{enabled: true, port: {ports[0]}, replay_port: {ports[1]}}}"
            async with picker([engine], "--config-text", f"{HEAD}kv_events: {section}") as server:
                fresh = hostile_requests.prompts()

                async def step(
                    fresh: Iterator[hostile_requests.Request] = fresh, port: int = server.port
                ) -> str:
                    await asyncio.sleep(0.02)
                    return await hostile_requests.send(port, next(fresh))

                yield await measured(f"{group} {kind}", server, step, quick)


async def files(bounds: Bounds) -> AsyncIterator[HostileRow]:
    """Edits of the configuration and of the file of endpoints, each mended after a while.

    All kinds at once, as they wait for most of the time.
    """
    many = "".join(f"  - 10.{at >> 16}.{at >> 8 & 255}.{at & 255}:8000\n" for at in range(100_000))
    edits = {
        "configuration with NUL": (0, HEAD + "log: {level: in\0fo}\n"),
        "configuration with !!int": (0, HEAD + 'seed: !!int ""\n'),
        "configuration with !!timestamp": (0, HEAD + 'seed: !!timestamp "x"\n'),
        "configuration of brackets": (0, HEAD + "log: " + "[" * 100_000),
        "configuration of wrong types": (0, HEAD + "scrape: [1]\npool: 7\n"),
        "endpoints with NUL": (1, "endpoints: [\0]\n"),
        "endpoints of 100,000 lines": (1, "endpoints:\n" + many),
        "endpoints that are none": (1, "endpoints: [a, 7, {}, '1.2.3.4:99999']\n"),
    }
    few = msgspec.structs.replace(bounds, requests=EDITS, seconds=600.0)
    chosen = [(name, *edit) for name, edit in edits.items() if bounds.only in name]
    for row in await asyncio.gather(*(_edited(*edit, few) for edit in chosen)):
        yield row


async def _edited(name: str, which: int, text: str, bounds: Bounds) -> HostileRow:
    """Edits of the configuration (`which` 0) or the file of endpoints (1) of one picker."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "extproc.yaml", Path(folder) / "endpoints.yaml"]
        good = [f"{HEAD}pool: {{endpoints_file: {paths[1]}}}\n", "endpoints: []\n"]
        for path, content in zip(paths, good, strict=True):
            path.write_text(content)
        async with picker([], "--config-file", str(paths[0]), with_envoy=False) as server:

            async def step() -> str:
                for content in (text, good[which]):
                    paths[which].write_text(content)
                    await asyncio.sleep(EDIT_S)
                return "edited"

            return await measured(name, server, step, bounds, at_once=1)


async def waiting(bounds: Bounds) -> AsyncIterator[HostileRow]:
    """2,000 requests that wait, each for a model of its own, at two engines that are busy."""
    if bounds.only not in "waiting models":
        return
    text = HEAD + "flow_control: {enabled: true, timeout_s: 5, busy_s: 0.001}\n"
    async with picker([lying_engine("half")] * 2, "--config-text", text) as server:
        fresh = hostile_requests.names()
        once = msgspec.structs.replace(bounds, requests=4_000)
        yield await measured(
            "waiting models",
            server,
            lambda: hostile_requests.send(server.port, next(fresh)),
            once,
            at_once=2_000,
            first=2_000,
        )


GROUPS = {
    "bodies": requests,
    "large": large,
    "clients": clients,
    "pages": pages,
    "events": events,
    "rendered": rendered,
    "files": files,
    "waiting": waiting,
}


def line(row: HostileRow, quiet: HostileRow) -> str:
    """One line of the table."""
    common = ", ".join(f"{name} {count}" for name, count in sorted(row.answers.items()))
    stall = "" if row.stall_s is None else f" stall <= {1000 * row.stall_s:.0f} ms,"
    return (
        f"{row.kind:32} {row.requests:6} requests ({common}); wait {1000 * row.wait_s:7.1f} ms"
        f" ({row.wait_s / max(quiet.wait_s, 1e-9):5.1f} x harmless),{stall}"
        f" CPU {1000 * row.cpu_s:7.2f} ms; memory {row.before_bytes / MIB:.0f},"
        f" peak {row.peak_bytes / MIB:.0f}, grown {row.grown_bytes / MIB:+.1f} MiB;"
        f" {'MISSED ' + ', '.join(row.missed) if row.missed else 'met'}"
        f"{f' {row.accounts}' if row.accounts else ''}"
    )


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hostile")
    parser.add_argument("--kinds", default=",".join(GROUPS))
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--size", type=int, default=MIB)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true", help="write bench/results/hostile*.json")
    wanted = parser.parse_args()
    bounds = Bounds(wanted.requests, wanted.seconds, wanted.size, wanted.only)
    harmless = hostile_requests.harmless(bounds.size_bytes)
    async with picker([lean_engine()]) as server:
        quiet = await measured(
            "harmless", server, lambda: hostile_requests.send(server.port, harmless), bounds
        )
    rows = [quiet]
    print(line(quiet, quiet), flush=True)
    groups = wanted.kinds.split(",")
    for group in groups:
        async for row in GROUPS[group](bounds):
            size_bytes = bounds.size_bytes if group == "bodies" else 0
            rows.append(judge(row, quiet, size_bytes))
            print(line(row, quiet), flush=True)
    if wanted.write:
        figures = {"rows": [json.loads(msgspec.json.encode(row)) for row in rows]}
        name = "hostile" if groups == [*GROUPS] else "_".join(["hostile", *groups])
        write(name, "python -m bench.hostile " + " ".join(sys.argv[1:]), figures)
    return 1 if any(row.missed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
