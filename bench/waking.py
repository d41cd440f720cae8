"""Measures the time from a waiting request to the replica that is started for it.

    python -m bench.waking [--rounds N] [--write]

A picker without endpoints over a real API server (kube-apiserver and etcd of `make envtest`), and a
client that speaks ext_proc to it over loopback. Timed from before the request is sent until a watch
of the Deployment shows one replica, so that it holds more than the bar asks for: the way to the
picker, the API server's own work with etcd, and the watch. KEDA's push is timed until the client that
plays KEDA hears it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import ssl
import statistics
import tempfile
import time
from pathlib import Path

import aiohttp
import grpc

from bench import rig
from extproc.demo import stack
from extproc.wire.pb import keda_pb2
from tests.kubernetes import test_scaling
from tests.support import kube, kube_picker, kube_server

#: A window that is soon over, so that rounds begin at zero.
POLICY = {
    "policy": "queue-depth",
    "params": {"window_s": 1.0, "interval_s": 0.2, "up": 100.0, "down": 1.0},
    "max": 1,
}
ACTIVE = "/externalscaler.ExternalScaler/StreamIsActive"


async def patched(rounds: int) -> list[tuple[float, float]]:
    """Seconds until one replica is asked for."""
    with kube_server.cluster() as cluster:
        tls = cluster.admin.tls()
        async with (
            kube.api(cluster.admin) as api,
            test_scaling.place(api, cluster) as (namespace, kubeconfig),
            test_scaling.scaler(namespace, kubeconfig, 8000, **POLICY) as picker,
            watching(cluster.admin.url, tls, namespace) as watch,
        ):
            leader = "extproc_leader"
            await picker.until(
                lambda: test_scaling.read_metric(picker, leader), lambda value: value == 1.0
            )
            return [await one_round(picker, watch.until) for _ in range(rounds)]


async def one_round(picker, heard) -> tuple[float, float]:
    """Begin at zero, ask once, and wait until it was heard; what we and the picker saw."""
    await picker.connected()
    await heard(0)
    look = 'extproc_scaling_replicas{pool="",state="spec"}'
    await picker.until(lambda: test_scaling.read_metric(picker, look), lambda value: value == 0.0)
    began = time.perf_counter()
    stream = await test_scaling.held(picker)
    await heard(1)
    took = time.perf_counter() - began
    stream.call.cancel()
    # The API server may tell us before it tells the picker.
    wakes = 'extproc_scaling_changes_total{pool="",reason="wake"}'
    before = picker.__dict__.setdefault("wakes", 0.0)
    picker.wakes = await picker.until(
        lambda: test_scaling.read_metric(picker, wakes), lambda value: (value or 0.0) > before
    )
    return took, await test_scaling.read_metric(
        picker, 'extproc_scaling_from_zero_seconds{pool=""}'
    )


class ReplicaWatch:
    """Replicas of the Deployment, as they change."""

    def __init__(self) -> None:
        self.replicas = -1
        self.changed = asyncio.Event()

    async def follow(self, server: str, tls: ssl.SSLContext, namespace: str) -> None:
        url = f"{server}/apis/apps/v1/namespaces/{namespace}/deployments?watch=true"
        limit = aiohttp.ClientTimeout(600)
        async with (
            aiohttp.ClientSession() as http,
            http.get(url, ssl=tls, timeout=limit) as answer,
        ):
            async for line in answer.content:
                self.replicas = json.loads(line)["object"]["spec"].get("replicas", 0)
                self.changed.set()

    async def until(self, replicas: int) -> None:
        while self.replicas != replicas:
            self.changed.clear()
            await self.changed.wait()


@contextlib.asynccontextmanager
async def watching(server, tls, namespace):
    watch = ReplicaWatch()
    task = asyncio.ensure_future(watch.follow(server, tls, namespace))
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def pushed(rounds: int, folder: Path) -> list[tuple[float, float]]:
    """Seconds until KEDA hears of it."""
    port = stack.free_port()
    endpoints_path = folder / "endpoints.yaml"
    endpoints_path.write_text("endpoints: []\n")
    sections = {
        "pool": {"endpoints_file": str(endpoints_path), "autoscaling": POLICY},
        "flow_control": {"enabled": True},
        "autoscaling": {"keda": {"enabled": True, "port": port}},
    }
    async with (
        kube_picker.picker(None, config=json.dumps(sections)[1:-1]) as picker,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stream = channel.unary_stream(
            ACTIVE, response_deserializer=keda_pb2.IsActiveResponse.FromString
        )(b"")
        state = -1

        async def heard(replicas: int) -> None:
            nonlocal state
            while state != replicas:
                state = int((await stream.read()).result)

        return [await one_round(picker, heard) for _ in range(rounds)]


def shown(times: list[tuple[float, float]]) -> dict[str, dict[str, float]]:
    return {
        "until_heard": quantiles([heard for heard, _ in times]),
        "in_the_picker": quantiles([own for _, own in times]),
    }


def quantiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(1e3 * time_s for time_s in times)
    return {
        "rounds": len(ordered),
        "p50_ms": round(statistics.median(ordered), 1),
        "p90_ms": round(ordered[int(0.9 * (len(ordered) - 1))], 1),
        "most_ms": round(ordered[-1], 1),
    }


async def main(*, rounds: int, write: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keda = await pushed(rounds, Path(folder))
    figures = {"patch": shown(await patched(rounds)), "keda": shown(keda)}
    print(figures)
    if write:
        rig.write("waking", "python -m bench.waking --write", figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    asyncio.run(main(rounds=args.rounds, write=args.write))
