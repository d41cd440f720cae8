"""The suite's cluster: pods, pools, a picker for each pool, and two gateways in one Envoy."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from extproc.demo import stack
from tests.kubernetes.conformance import gateway
from tests.support import kube, kube_echo

SELECTION = "test-epp-endpoint-selection"
SERVED = "x-conformance-test-served-endpoint"
BODY = b'{"model":"conformance-fake-model","prompt":"Write as if you were a critic: San Francisco"}'

#: Echo servers have no metrics page unless a test gives them one.
UNSCRAPED = "scrape: {enabled: false}"
SCRAPED = "scrape: {idle_interval_s: 0.2, models: false}"

#: Seconds a change may take to be seen by a gateway or a picker.
_SEEN_S = 300.0


class GatewayAnswer(msgspec.Struct, frozen=True):
    """The answer that a client received.

    Attributes:
        status: Of HTTP.
        headers: Names in lower case.
        said: What the pod said, if one did.
    """

    status: int
    headers: Mapping[str, str]
    content: Mapping[str, Any]

    @property
    def pod(self) -> str:
        return str(self.content.get("pod", ""))


class PickerDeployment(msgspec.Struct):
    """A Deployment of one endpoint picker.

    Attributes:
        name: Of its pool.
        child: Its process.
        port: Of ext_proc.
        health: Of the health service.
    """

    name: str
    child: stack.Child | None
    port: int
    health: int


class Stand:
    """All of it; make one with `stand`.

    Attributes:
        api: Of the cluster.
        namespace: Where the pods and pools are.
        pods: By pool, in order.
        gateways: Port by name.
    """

    def __init__(self, api: kube.Api, namespace: str, folder: Path) -> None:
        self.api = api
        self.namespace = namespace
        self.pods: dict[str, list[kube_echo.Echo]] = {}
        self.pickers: dict[str, PickerDeployment] = {}
        self.pools: list[gateway.GatewayPool] = []
        self.gateways: dict[str, int] = {}
        self.lines: list[str] = []
        self.children = stack.Stack(log=self.lines.append)
        self._folder = folder
        self._session: aiohttp.ClientSession | None = None
        self._context = contextlib.AsyncExitStack()
        self._network = f"127.{random.randint(16, 250)}.{random.randint(1, 250)}"  # noqa: TID251
        self._hosts = 0
        self._kubeconfig: Path | None = None

    async def open(self) -> None:
        """Ask for nothing more than what a picker may do."""
        self._session = await self._context.enter_async_context(aiohttp.ClientSession())
        access = await self.api.account(self.namespace, kube.picker_rules())
        self._kubeconfig = self._folder / "picker.kubeconfig"
        self._kubeconfig.write_text(access.kubeconfig(self.namespace))

    async def close(self) -> None:
        """End every process and pod."""
        await self.children.stop()
        await self._context.aclose()

    # Pods and pools

    def host(self) -> str:
        """A loopback address of its own."""
        self._hosts += 1
        return f"{self._network}.{self._hosts}"

    async def deploy(self, name: str, ports: Sequence[int], *, replicas: int = 3) -> None:
        """Start echo servers, and the pods that they are."""
        labels = {"app": name}
        for number in range(replicas):
            host = self.host()
            pod = f"{name}-{number}"
            item = await self._context.enter_async_context(
                kube_echo.echo(pod, self.namespace, host, ports)
            )
            await self.api.create(kube.pod(pod, self.namespace, host, labels=labels))
            self.pods.setdefault(name, []).append(item)

    async def pool(
        self, name: str, ports: Sequence[int], *, deployment: str, named: bool = True, **spec: Any
    ) -> gateway.GatewayPool:
        """Create an InferencePool over a deployment; returns what a gateway makes of it."""
        port = stack.free_port()
        picker = {"name": f"{name}-epp", "port": {"number": 9002}}
        picker |= {"failureMode": spec.pop("failureMode", "FailClose")}
        item = kube.pool(
            name,
            self.namespace,
            ports,
            labels={"app": deployment},
            picker=picker if named else None,
            **spec,
        )
        await self.api.create(item)
        built = gateway.GatewayPool(
            name,
            self.addresses(deployment, ports),
            port,
            fail_open=picker["failureMode"] == "FailOpen",
            http2=spec.get("appProtocol") == "kubernetes.io/h2c",
        )
        self.pools.append(built)
        return built

    def addresses(self, deployment: str, ports: Sequence[int]) -> list[str]:
        """`ip:port` of every pod and port."""
        return [f"{pod.host}:{port}" for pod in self.pods[deployment] for port in ports]

    # Pickers

    async def start_picker(
        self, name: str, port: int = 0, *, config: str = "", scrape: str = UNSCRAPED
    ) -> PickerDeployment:
        """Start the picker of a pool with the arguments of the suite's Deployment.

        Args:
            name: Of the pool; with a configuration, what to call the picker.
            port: Of ext_proc; the one it had before, if any, or a free one.
            config: Says in YAML's flow style what it is for, in place of the pool's name.
            scrape: How metrics are read.
        """
        fields = ["apiVersion: extproc/v1alpha1", "kind: ExtProcConfig", scrape]
        fields += ["scheduling: {strategy: least-request}", *([config] if config else [])]
        picker = self.pickers.setdefault(
            name, PickerDeployment(name, None, port or stack.free_port(), stack.free_port())
        )
        words = () if config else ("--pool-name", name, "--pool-namespace", self.namespace)
        picker.child = await self.children.extproc(
            *words,
            *("--zap-encoder", "json", "--grpc-port", str(picker.port)),
            *("--grpc-health-port", str(picker.health), "--metrics-port", "0"),
            *("--kubeconfig", str(self._kubeconfig), "--host", "127.0.0.1"),
            *("--config-text", "{" + ", ".join(fields) + "}"),
            *("--conformance-testing", "--drain-timeout", "0s"),
        )
        return picker

    async def stop_picker(self, name: str) -> None:
        """Kill it, as a node that dies does."""
        child = self.pickers[name].child
        assert child is not None
        child.process.kill()
        await child.process.wait()

    # Gateways

    async def start_gateways(self, rules: Mapping[str, Sequence[gateway.Rule]]) -> None:
        """Start Envoy with a listener for each gateway."""
        self.gateways = {name: stack.free_port() for name in rules}
        for name, wanted in rules.items():
            gateway.routes(self._folder, name, wanted)
        admin = stack.free_port()
        config = gateway.configuration(admin, self.gateways, self.pools, self._folder)
        await self.children.envoy(config)

    def route(self, name: str, rules: Sequence[gateway.Rule]) -> None:
        """Change the routes of a gateway."""
        gateway.routes(self._folder, name, rules)

    # Clients

    async def ask(
        self,
        host: str,
        path: str,
        *,
        selection: str = "",
        body: bytes | None = BODY,
        through: str = "primary",
        more: Mapping[str, str] | None = None,
        arrives: bytes | None = None,
    ) -> GatewayAnswer:
        """One request; a GET without a body where there is none.

        What came back must be what was sent, as the suite's own assertions have it.

        Args:
            host: Of the request.
            path: Of the request.
            selection: Endpoints that the picker may choose from, as tests say it.
            body: Of a POST.
            through: Name of the gateway.
            more: Further headers.
            arrives: The body that the pod gets where it is another; empty for any.
        """
        assert self._session is not None
        headers = {"host": host, **(more or {}), **({SELECTION: selection} if selection else {})}
        method = "GET" if body is None else "POST"
        url = f"http://127.0.0.1:{self.gateways[through]}{path}"
        async with self._session.request(method, url, data=body, headers=headers) as answer:
            result = {name.lower(): value for name, value in answer.headers.items()}
            if answer.status != 200:
                return GatewayAnswer(answer.status, result, {})
            text = await answer.json()
        assert (text["method"], text["path"], text["host"]) == (method, path, host)
        assert text["namespace"] == self.namespace
        for name, value in (more or {}).items():
            # What is said to the picker stays with it.
            control = name.startswith(("x-gateway-inference-", "x-gateway-model-", "x-llm-d-"))
            assert text["headers"].get(name) == (None if control else [value])
        wanted = body if arrives is None else arrives
        assert arrives == b"" or text["body"] == (wanted or b"").decode()
        return GatewayAnswer(answer.status, result, text)

    async def many(
        self, count: int, at_once: int, *arguments: Any, **how: Any
    ) -> list[GatewayAnswer]:
        """So many equal requests, so many at a time; all must be answered with 200."""
        places = asyncio.Semaphore(at_once)

        async def item() -> GatewayAnswer:
            async with places:
                answer = await self.ask(*arguments, **how)
            assert answer.status == 200, answer
            return answer

        return list(await asyncio.gather(*(item() for _ in range(count))))

    async def until(
        self, holds: Callable[[GatewayAnswer], bool], *arguments: Any, **how: Any
    ) -> GatewayAnswer:
        """Ask until the answer is as wanted: what changed is seen sooner or later."""
        observed: Counter[int] = Counter()
        try:
            async with asyncio.timeout(_SEEN_S):
                while not holds(answer := await self.ask(*arguments, **how)):
                    observed[answer.status] += 1
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"not within {_SEEN_S} s; statuses: {dict(observed)}") from None
        return answer


@contextlib.asynccontextmanager
async def stand(api: kube.Api):
    """An empty cluster of the suite; what a test puts there ends with the block."""
    with tempfile.TemporaryDirectory(prefix="extproc-gateway-") as folder:
        item = Stand(api, await api.namespace("inference-conformance-app-backend"), Path(folder))
        try:
            await item.open()
            yield item
        finally:
            await item.close()
