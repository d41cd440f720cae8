"""The installation of bench.chaos: a picker, an Envoy, 8 engines, Redis, an API server."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from bench import steady_client
from bench.hostile_watch import WatchedPicker
from bench.rig import ROOT
from extproc.demo import stack
from extproc.scrape import kv_event_subscriber
from tests.support import kube, kube_server

#: Engines, and those of them whose pages and KV events are hostile, and those that only the cluster names.
ENGINES, LIARS, PODS = 8, 2, 2

#: How much faster than its profile each simulated engine is.
SPEED = "4"


class ChaosEngine:
    """One engine, which may be killed, hung and started again on its address."""

    def __init__(self, children: stack.Stack, host: str, port: int) -> None:
        self.address = f"{host}:{port}"
        self.labels = kv_ports()
        self.child: stack.Child | None = None
        self._children = children
        events, replay = self.labels.values()
        kv_flags = ("--kv-events-port", events, "--kv-replay-port", replay)
        self._flags = ("--host", host, "--port", str(port), "--speed", SPEED, *kv_flags)

    async def start(self) -> None:
        """Start it, where it does not run."""
        argv = [sys.executable, "-m", "extproc", "engine", *self._flags]
        self.child = await self._children.start("engine", argv, ready="listening on ")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to its process."""
        assert self.child is not None
        self.child.process.send_signal(number)


def kv_ports() -> dict[str, str]:
    """Labels with free ports for KV events, and for what was sent before."""
    names = (kv_event_subscriber.PORT_LABEL, kv_event_subscriber.REPLAY_PORT_LABEL)
    return {name: str(stack.free_port()) for name in names}


class Redis:
    """A Redis on a socket in a folder, without persistence."""

    def __init__(self, children: stack.Stack, folder: Path) -> None:
        self.socket = folder / "redis"
        self.url = f"unix://{self.socket}"
        self.child: stack.Child | None = None
        self._children = children

    async def start(self) -> None:
        """Start it, where it does not run."""
        argv = ["redis-server", "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        self.child = await self._children.start("redis", argv, ready="eady to accept connections")

    async def stop(self) -> None:
        """Kill it."""
        if self.child is not None:
            await self.child.stop(signal.SIGKILL)


class ChaosCluster(msgspec.Struct, frozen=True):
    """A Kubernetes API server with one InferencePool.

    Attributes:
        server: To stop and start.
        api: As a user with all rights.
        namespace: Of the pool.
        kubeconfig: Of the picker.
    """

    server: kube_server.ApiServer
    api: kube.Api
    namespace: str
    kubeconfig: Path

    @property
    def pool(self) -> kube.Object:
        """The pool, as it was created."""
        return kube.pool("vllm", self.namespace)


class ChaosSite(msgspec.Struct, frozen=True):
    """Everything that runs.

    Attributes:
        picker: The picker, behind Envoy.
        engines: Simulated engines of both pools.
        config: The picker's configuration file.
        listed: Its file of endpoints.
        redis: None without redis-server.
        cluster: None without an API server of our own.
        children: For further processes.
        missing: What is not there, a line for each.
    """

    picker: WatchedPicker
    engines: list[ChaosEngine]
    config: Path
    listed: Path
    redis: Redis | None
    cluster: ChaosCluster | None
    children: stack.Stack
    missing: list[str]


@contextlib.asynccontextmanager
async def site(transport: str) -> AsyncIterator[ChaosSite]:
    """Start everything, with a transport of the picker; nothing is left when the block ends."""
    missing: list[str] = []
    async with contextlib.AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        children = await held.enter_async_context(stack.stack())
        redis = Redis(children, folder) if shutil.which("redis-server") else None
        if redis is None:
            missing.append("redis-server is not on the PATH: nothing is shared")
        else:
            await redis.start()
        port = stack.free_port()
        pods = [f"127.1.0.{at}" for at in range(1, PODS + 1)]
        cluster = await _cluster(held, pods, port, missing)
        here = ENGINES - LIARS - (PODS if cluster else 0)
        engines = [ChaosEngine(children, "127.0.0.1", stack.free_port()) for _ in range(here)]
        written = [{"address": engine.address, "labels": engine.labels} for engine in engines]
        engines += [ChaosEngine(children, pod, port) for pod in pods if cluster]
        for engine in engines:
            await engine.start()
        for _ in range(LIARS):
            labels = kv_ports()
            argv = [sys.executable, "-m", "bench.hostile_kv", "all", *labels.values()]
            liar = await children.start("liar", argv, ready="listening on ")
            address = liar.ready_line.rpartition(" ")[2]
            written.append({"address": address, "labels": labels})
        config, listed = folder / "extproc.yaml", folder / "endpoints.yaml"
        listed.write_text(yaml.safe_dump({"endpoints": written}))
        config.write_text(yaml.safe_dump(_config(listed, redis, cluster)))
        every = [entry["address"] for entry in written]
        every += [engine.address for engine in engines if cluster]
        addresses = [*dict.fromkeys(every)]
        picker = await _picker(children, config, cluster, addresses, transport=transport)
        yield ChaosSite(picker, engines, config, listed, redis, cluster, children, missing)


def _config(listed: Path, redis: Redis | None, cluster: ChaosCluster | None) -> dict[str, Any]:
    pools: list[dict[str, Any]] = []
    if cluster is not None:
        where = {"inference_pool": "vllm", "namespace": cluster.namespace}
        pools.append(
            {"name": "kube", "kubernetes": where, "match": {"headers": {"x-pool": "kube"}}}
        )
    pools.append({"name": "file", "endpoints_file": str(listed)})
    return {
        "apiVersion": "extproc/v1alpha1",
        "kind": "ExtProcConfig",
        "pools": pools,
        "flow_control": {"enabled": True},
        # The labels of listed endpoints name both ports; those of the cluster publish elsewhere.
        # So few blocks that hostile engines reach the bound within the run.
        "kv_events": {"enabled": True, "replay_port": 5558, "max_blocks": 20_000},
        **({"peer_sync": {"url": redis.url}} if redis else {}),
    }


async def _picker(
    children: stack.Stack,
    config: Path,
    cluster: ChaosCluster | None,
    addresses: list[str],
    *,
    transport: str,
) -> WatchedPicker:
    ports = stack.EnvoyPorts(*(stack.free_port() for _ in range(3)))
    pages = stack.free_port()
    child = await children.extproc(
        *("--config-file", str(config), "--host", "127.0.0.1", "--secure-serving=false"),
        *("--grpc-port", str(ports.extproc), "--metrics-port", str(pages)),
        *("--grpc-health-port", "0", "--drain-timeout", "0s", "--fallback-endpoints", "2"),
        *("--transport", transport),
        *(("--kubeconfig", str(cluster.kubeconfig)) if cluster else ()),
    )
    template = ROOT / "envoy" / "override-host.yaml"
    envoy = stack.envoy_config(template, ports, engines=addresses, plaintext=True)
    chain = envoy["static_resources"]["listeners"][0]["filter_chains"][0]
    routes = chain["filters"][0]["typed_config"]["route_config"]
    header = {"key": steady_client.UPSTREAM, "value": "%UPSTREAM_REMOTE_ADDRESS%"}
    routes["response_headers_to_add"] = [{"header": header}]
    await children.envoy(envoy)
    return WatchedPicker(child, ports.listener, pages, ports.extproc)


async def _cluster(
    held: contextlib.AsyncExitStack, pods: list[str], port: int, missing: list[str]
) -> ChaosCluster | None:
    """An API server with a pool and pods; None where none can be started."""
    if kube_server.assets() is None:
        missing.append("kube-apiserver is not built (make envtest): no cluster")
        return None
    server = held.enter_context(kube_server.cluster())
    api = await held.enter_async_context(kube.api(server.admin))
    await api.define(kube.definitions())
    namespace = await api.namespace("chaos")
    access = await api.account(namespace, kube.picker_rules())
    kubeconfig = server.write_kubeconfig(namespace, access, namespace)
    await api.create(kube.pool("vllm", namespace, (port,)))
    for at, address in enumerate(pods):
        await api.create(kube.pod(f"vllm-{at}", namespace, address, labels={"app": "vllm"}))
    await asyncio.sleep(0)
    return ChaosCluster(server, api, namespace, kubeconfig)
