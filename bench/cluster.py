"""Measures a picker over 500 pods and 20 pools of a real Kubernetes API server.

    python -m bench.cluster [--pods 500] [--pools 20] [--rate 1000] [--seconds 10] [--outage 60]
                            [--write]

Needs `make envtest`. The API server, etcd, the writers and the picker share the machine; CPU is
that of the picker's process alone.

First sync: from the start of the picker's process until it says that it is ready, the least of five,
and the same for a picker with as many endpoints from a file, which reads no cluster. Reaction: from the moment an
independent watch of ours sees that a pod is not ready until the last pick of it was answered;
picks of that one pod are asked for back to back, so the figure holds one round trip. Updates:
writes to the status of random pods, every tenth one changing whether the pod is ready. The server
does not take 1,000 of them a second on two cores, so the same picker is also put under exactly that
rate by a server of ours (`bench/replay.py`) that says events as large as the real ones.

Outage: picks, one endpoint after the other, while the API server is away; then 20 pods are deleted
and 20 become not ready as soon as it is back, and the pool must come to be exactly what is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import ssl
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import yaml

from bench import replay, rig
from tests.support import kube, kube_picker, kube_server

PORT = 8000


class ClusterFleet:
    """Pools and pods in one namespace, and the picker's rights."""

    def __init__(self, api: kube.Api, namespace: str, pods: int, pools: int) -> None:
        self.api = api
        self.namespace = namespace
        self.pods = [self._pod(number, number % pools) for number in range(pods)]
        self.pools = [kube.pool(f"pool-{number}", namespace, (PORT,)) for number in range(pools)]
        self.kubeconfig = Path()

    def _pod(self, number: int, pool: int) -> kube.Object:
        """A pod as large as those of engines are: about 6 kB of JSON."""
        address = f"127.{64 + number // 62_500}.{number // 250 % 250}.{number % 250 + 1}"
        pod = kube.pod(f"pod-{number}", self.namespace, address, labels={"app": f"pool-{pool}"})
        environment = [{"name": f"SETTING_{n}", "value": f"value-{n}" * 4} for n in range(40)]
        probe = {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 5}
        pod["spec"]["containers"][0] |= {
            "env": environment,
            "ports": [{"containerPort": PORT, "name": "http"}],
            "args": [f"--flag-{n}={n}" for n in range(20)],
            "readinessProbe": probe,
            "livenessProbe": probe,
            "resources": {"limits": {"cpu": "8", "memory": "64Gi"}},
        }
        return pod

    def address(self, pod: kube.Object) -> str:
        return f"{pod['status']['podIP']}:{PORT}"

    def addresses(self) -> list[str]:
        return [self.address(pod) for pod in self.pods]

    async def create(self) -> None:
        for pool in self.pools:
            await self.api.create(pool)
        for batch in _batches(self.pods, 32):
            await asyncio.gather(*(self.api.create(pod) for pod in batch))

    def config(self, kubeconfig: Path | None = None) -> str:
        where = {
            "kubeconfig": str(kubeconfig or self.kubeconfig),
            "discover_pools": "namespace",
            "namespace": self.namespace,
        }
        return f"cluster: {json.dumps(where)}"


def _batches(items, size):
    return (items[at : at + size] for at in range(0, len(items), size))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# First sync


async def start(fleet: ClusterFleet, **how) -> dict:
    """Seconds until a picker is ready and complete, and what CPU it took until then."""
    began = time.monotonic()
    async with kube_picker.picker(None, *how.pop("arguments", ()), **how) as picker:
        took, used = time.monotonic() - began, cpu_s(picker.child.process.pid)
        addresses = await picker.pool()
        assert addresses == sorted(fleet.addresses()), (
            len(addresses),
            "endpoints at the first sync",
        )
    return {"ready_s": round(took, 2), "cpu_s": round(used, 2)}


async def first_sync(fleet: ClusterFleet, times: int) -> dict:
    """Starts with the cluster and, for comparison, with a file of the same endpoints."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as endpoints:
        yaml.safe_dump({"endpoints": fleet.addresses()}, endpoints)
        endpoints.flush()
        runs = [
            (
                await start(fleet, config=fleet.config()),
                await start(fleet, arguments=("--endpoints-file", endpoints.name)),
            )
            for _ in range(times)
        ]
    best = min((row for row, _ in runs), key=lambda row: row["ready_s"])
    fixed = min((row for _, row in runs), key=lambda row: row["ready_s"])
    return {
        **best,
        "all_ready_s": sorted(row["ready_s"] for row, _ in runs),
        "of_which_start_s": fixed["ready_s"],
        "of_which_start_cpu_s": fixed["cpu_s"],
    }


# Reaction


class PodWatch:
    """When an independent watch saw that pods changed their readiness."""

    def __init__(self) -> None:
        self.events: dict[str, asyncio.Future[float]] = {}

    async def run(self, fleet: ClusterFleet, started: asyncio.Event) -> None:
        access = fleet.api.access
        host, _, port = access.url.removeprefix("https://").partition(":")
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=access.tls(), limit=1 << 22
        )
        path = f"/api/v1/namespaces/{fleet.namespace}/pods?watch=1"
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        started.set()
        with contextlib.closing(writer):
            while (line := await reader.readuntil(b"\r\n")) != b"":
                size = int(line, 16)
                piece = await reader.readexactly(size)
                await reader.readexactly(2)
                now = time.monotonic()
                for raw in piece.splitlines():
                    if b'"status":"False"' in raw:
                        name = json.loads(raw)["object"]["metadata"]["name"]
                        if (future := self.events.pop(name, None)) is not None:
                            future.set_result(now)


async def reaction(fleet: ClusterFleet, picker: kube_picker.PodPicker, times: int) -> dict:
    """Measure picks of a pod after the event that says it is not ready."""
    watch, started = PodWatch(), asyncio.Event()
    chance = random.Random(7)
    late_ms = []
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch.run(fleet, started))
        await started.wait()
        for pod in chance.sample(fleet.pods, times):
            address = fleet.address(pod)
            assert await picker.pick(address) == address
            event = watch.events[pod["metadata"]["name"]] = (
                asyncio.get_running_loop().create_future()
            )
            host = pod["status"]["podIP"]
            change = tasks.create_task(
                fleet.api.set_status(pod | {"status": kube.status(host, ready=False)})
            )
            last = time.monotonic()
            while await picker.pick(address):
                last = time.monotonic()
            delay_s = await event
            await change
            late_ms.append(max(0.0, (last - delay_s) * 1000))
            await fleet.api.set_status(pod)
            while not await picker.pick(address):
                pass
        watching.cancel()
    late_ms.sort()
    return {
        "times": times,
        "last_pick_after_event_ms_p50": round(late_ms[len(late_ms) // 2], 1),
        "last_pick_after_event_ms_max": round(late_ms[-1], 1),
    }


# Updates


class Writer:
    """A connection that writes statuses, with as little work as possible."""

    def __init__(self, access: kube_server.Access, tls: ssl.SSLContext) -> None:
        self._access = access
        self._tls = tls

    async def open(self) -> None:
        host, _, port = self._access.url.removeprefix("https://").partition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port), ssl=self._tls)

    def close(self) -> None:
        self._writer.close()

    async def patch(self, path: str, body: bytes) -> None:
        head = (
            f"PATCH {path} HTTP/1.1\r\nhost: api\r\ncontent-type: application/merge-patch+json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        lower = answer.lower()
        if b"content-length:" in lower:
            size = int(lower.partition(b"content-length:")[2].partition(b"\r\n")[0])
            await self._reader.readexactly(size)
            return
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            await self._reader.readexactly(size + 2)
        await self._reader.readexactly(2)


async def updates(fleet: ClusterFleet, pid: int, rate: float, seconds: float) -> dict:
    """Write statuses at a rate; what the picker's process took."""
    access, tls = fleet.api.access, fleet.api.access.tls()
    writers = [Writer(access, tls) for _ in range(24)]
    for writer in writers:
        await writer.open()
    chance = random.Random(11)
    count = 0
    began, cpu = time.monotonic(), cpu_s(pid)

    async def write(writer: Writer) -> None:
        nonlocal count
        while (now := time.monotonic()) < began + seconds:
            due = began + count / rate
            if due > now:
                await asyncio.sleep(due - now)
                continue
            count += 1
            pod = fleet.pods[chance.randrange(len(fleet.pods))]
            path = f"/api/v1/namespaces/{fleet.namespace}/pods/{pod['metadata']['name']}/status"
            status: kube.Object = {"message": f"write {count}"}
            if count % 10 == 0:
                status["conditions"] = kube.status("", ready=count % 20 == 0)["conditions"]
            await writer.patch(path, json.dumps({"status": status}).encode())

    await asyncio.gather(*(write(writer) for writer in writers))
    wall, used = time.monotonic() - began, cpu_s(pid) - cpu
    for writer in writers:
        writer.close()
    for batch in _batches(fleet.pods, 24):
        await asyncio.gather(*(fleet.api.set_status(pod) for pod in batch))
    return {
        "updates_per_s": round(count / wall),
        "cpu_share_percent": round(100 * used / wall, 1),
        "cpu_us_per_update": round(used / count * 1e6),
    }


async def replayed(fleet: ClusterFleet, cluster, rate: float, seconds: float) -> dict:
    """A picker under exactly so many updates per second, said by a server that only replays."""
    async with replay.replay(fleet.api, fleet.namespace, cluster.folder) as source:
        kubeconfig = cluster.write_kubeconfig("replay", source.access, fleet.namespace)
        async with kube_picker.picker(None, config=fleet.config(kubeconfig)) as picker:
            await picker.knows(fleet.addresses())
            pid = picker.child.process.pid
            source.rate = rate
            await asyncio.sleep(1)
            began, cpu, sent = time.monotonic(), cpu_s(pid), source.sent
            await asyncio.sleep(seconds)
            wall, used, count = time.monotonic() - began, cpu_s(pid) - cpu, source.sent - sent
            source.rate = 0
    return {
        "updates_per_s": round(count / wall),
        "event_bytes": source.event_bytes,
        "cpu_share_percent": round(100 * used / wall, 1),
        "cpu_us_per_update": round(used / count * 1e6),
    }


# Outage


async def outage(
    fleet: ClusterFleet, picker: kube_picker.PodPicker, cluster, seconds: float
) -> dict:
    """Picks while the API server is away, and how soon the pool is exact afterwards."""
    cluster.stop()
    began = time.monotonic()
    picks: Counter[str] = Counter()
    addresses = itertools.cycle(fleet.addresses())
    while time.monotonic() < began + seconds:
        picks[await picker.pick(next(addresses))] += 1
        await asyncio.sleep(0.01)
    refused = picks.pop("", 0)
    await cluster.restart()
    back = time.monotonic()
    gone, rest = fleet.pods[:20], fleet.pods[20:]
    for pod in gone:
        await fleet.api.delete(pod)
    for pod in rest[:20]:
        await fleet.api.set_status(
            pod | {"status": kube.status(pod["status"]["podIP"], ready=False)}
        )
    await picker.knows([fleet.address(pod) for pod in rest[20:]])
    exact = time.monotonic() - back
    for pod in gone:
        await fleet.api.create(pod)
    for pod in rest[:20]:
        await fleet.api.set_status(pod)
    await picker.knows(fleet.addresses())
    return {
        "seconds": seconds,
        "picks": picks.total(),
        "refused": refused,
        "endpoints_picked": len(picks),
        "exact_after_s": round(exact, 2),
    }


async def measure(args: argparse.Namespace) -> dict:
    with kube_server.cluster() as cluster:
        async with kube.api(cluster.admin) as api:
            await api.define(kube.definitions())
            fleet = ClusterFleet(api, await api.namespace("bench"), args.pods, args.pools)
            await fleet.create()
            access = await api.account(fleet.namespace, kube.picker_rules())
            fleet.kubeconfig = cluster.write_kubeconfig("bench", access, fleet.namespace)
            load = round(os.getloadavg()[0], 1)
            figures: dict = {"pods": args.pods, "pools": args.pools, "load_average": load}
            figures["first_sync"] = await first_sync(fleet, 5)
            async with kube_picker.picker(None, config=fleet.config()) as picker:
                await picker.knows(fleet.addresses())
                pid = picker.child.process.pid
                figures["reaction"] = await reaction(fleet, picker, 40)
                await picker.knows(fleet.addresses())
                figures["updates"] = await updates(fleet, pid, args.rate, args.seconds)
                await picker.knows(fleet.addresses())
                if args.outage:
                    figures["outage"] = await outage(fleet, picker, cluster, args.outage)
                figures["memory_mib"] = _memory_mib(pid)
            figures["updates_replayed"] = await replayed(fleet, cluster, args.rate, args.seconds)
            return figures


def _memory_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pods", type=int, default=500)
    parser.add_argument("--pools", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--outage", type=float, default=60, help="seconds; 0 for none")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    figures = asyncio.run(measure(args))
    print(json.dumps(figures, indent=2))
    if args.write:
        rig.write("cluster", " ".join(["python -m bench.cluster", *sys.argv[1:]]), figures)


if __name__ == "__main__":
    main()
