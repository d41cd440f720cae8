"""The installation of bench.chaos: replicas, each behind an Envoy, 8 engines, Redis, an API server."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
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


class ChaosBar(msgspec.Struct, frozen=True):
    """One line of the table."""

    name: str
    wanted: str
    measured: str
    is_met: bool


class ChaosProcess(abc.ABC):
    """A process that may be killed, stopped and started again."""

    def __init__(self, children: stack.Stack) -> None:
        self.child: stack.Child | None = None
        self._children = children

    @abc.abstractmethod
    async def start(self) -> None:
        """Start it, where it does not run."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to its process."""
        assert self.child is not None
        self.child.process.send_signal(number)


class ChaosEngine(ChaosProcess):
    """One engine, which may be killed, hung and started again on its address."""

    def __init__(self, children: stack.Stack, host: str, port: int) -> None:
        super().__init__(children)
        self.address = f"{host}:{port}"
        self.labels = kv_ports()
        events, replay = self.labels.values()
        kv_flags = ("--kv-events-port", events, "--kv-replay-port", replay)
        self._flags = ("--host", host, "--port", str(port), "--speed", SPEED, *kv_flags)

    async def start(self) -> None:
        """Start it, where it does not run."""
        argv = [sys.executable, "-m", "extproc", "engine", *self._flags]
        self.child = await self._children.start("engine", argv, ready="listening on ")


class ChaosReplica(ChaosProcess):
    """One replica of the picker, on ports that stay the same.

    Args:
        flags: Of `extproc serve`, without ports.
        pages: Port of its pages.
    """

    def __init__(self, children: stack.Stack, flags: Sequence[str], pages: int) -> None:
        super().__init__(children)
        self.ports = stack.EnvoyPorts(*(stack.free_port() for _ in range(3)))
        self._pages = pages
        self._flags = (
            *flags,
            *("--grpc-port", str(self.ports.extproc), "--metrics-port", str(pages)),
        )

    @property
    def watched(self) -> WatchedPicker:
        """The process that runs now."""
        assert self.child is not None
        return WatchedPicker(self.child, self.ports.listener, self._pages, self.ports.extproc)

    async def start(self) -> None:
        """Start it, where it does not run."""
        self.child = await self._children.extproc(*self._flags)


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
        peer: Another replica, behind an Envoy of its own; None without a direct exchange.
        engines: Simulated engines of both pools.
        config: The picker's configuration file.
        listed: Its file of endpoints.
        redis: None without redis-server, or with a direct exchange.
        cluster: None without an API server of our own.
        children: For further processes.
        missing: What is not there, a line for each.
    """

    picker: WatchedPicker
    peer: ChaosReplica | None
    engines: list[ChaosEngine]
    config: Path
    listed: Path
    redis: Redis | None
    cluster: ChaosCluster | None
    children: stack.Stack
    missing: list[str]


@contextlib.asynccontextmanager
async def site(transport: str, exchange: str) -> AsyncIterator[ChaosSite]:
    """Start everything; nothing is left when the block ends.

    Args:
        transport: Of the picker.
        exchange: `direct` with another replica, or `redis` with whatever writes to it.
    """
    missing: list[str] = []
    async with contextlib.AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        children = await held.enter_async_context(stack.stack())
        redis = None
        if exchange == "redis" and shutil.which("redis-server"):
            redis = Redis(children, folder)
            await redis.start()
        elif exchange == "redis":
            missing.append("redis-server is not on the PATH: nothing is shared")
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
        pages = [stack.free_port() for _ in range(2 if exchange == "direct" else 1)]
        sync: dict[str, Any] = {"url": redis.url} if redis else {}
        if exchange == "direct":
            sync = {"peers": [f"127.0.0.1:{number}" for number in pages]}
        config.write_text(yaml.safe_dump(_config(listed, sync, cluster)))
        every = [entry["address"] for entry in written]
        every += [engine.address for engine in engines if cluster]
        addresses = [*dict.fromkeys(every)]
        flags = (
            *("--config-file", str(config), "--host", "127.0.0.1", "--secure-serving=false"),
            *("--grpc-health-port", "0", "--drain-timeout", "0s", "--fallback-endpoints", "2"),
            *("--transport", transport),
            *(("--kubeconfig", str(cluster.kubeconfig)) if cluster else ()),
        )
        replicas = [ChaosReplica(children, flags, number) for number in pages]
        for replica in replicas:
            await replica.start()
            await _envoy(children, replica.ports, addresses)
        peer = replicas[1] if exchange == "direct" else None
        yield ChaosSite(
            replicas[0].watched, peer, engines, config, listed, redis, cluster, children, missing
        )


def _config(listed: Path, sync: dict[str, Any], cluster: ChaosCluster | None) -> dict[str, Any]:
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
        "peer_sync": sync,
    }


async def _envoy(children: stack.Stack, ports: stack.EnvoyPorts, addresses: Sequence[str]) -> None:
    template = ROOT / "envoy" / "override-host.yaml"
    envoy = stack.envoy_config(template, ports, engines=addresses, plaintext=True)
    chain = envoy["static_resources"]["listeners"][0]["filter_chains"][0]
    routes = chain["filters"][0]["typed_config"]["route_config"]
    header = {"key": steady_client.UPSTREAM, "value": "%UPSTREAM_REMOTE_ADDRESS%"}
    routes["response_headers_to_add"] = [{"header": header}]
    await children.envoy(envoy)


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
