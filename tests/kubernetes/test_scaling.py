"""A picker that patches `scale` of a real API server, and a test that plays controller and kubelet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import time

import aiohttp
import pytest

from extproc.autoscaling.runtime import scale_subresource
from extproc.config.autoscaling import ScaleTarget
from extproc.demo import stack
from extproc.discovery.kubernetes.settings import KubernetesSettings
from tests.support import ext_proc_script, kube, kube_picker, peer, serving

#: A policy that looks often and forgets fast: a test does not wait for minutes.
POLICY = {
    "policy": "queue-depth",
    "params": {"window_s": 1.0, "interval_s": 0.2, "up": 1.5, "down": 0.5},
    "min": 0,
    "max": 3,
}

HEADERS = {":method": "POST", ":path": "/v1/completions", "x-request-id": "r"}


def rights():
    """Rights that the component of the manifests adds."""
    path = kube.MANIFESTS / "components" / "engine-autoscaling" / "rbac.yaml"
    (role,) = (
        document for document in kube.documents(path.read_text()) if document["kind"] == "Role"
    )
    return role["rules"]


def deployment(namespace, replicas=0):
    """Engines, as a user wrote them down."""
    labels = {"app": "vllm"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vllm", "namespace": namespace},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "engine", "image": "engine"}]},
            },
        },
    }


class Kubelet:
    """Controller, scheduler and kubelet of one Deployment: pods are simulated engines.

    Each pod has an address 127.0.0.x of its own and one port of all.

    Attributes:
        asked: Replicas that were asked for, whenever that changed, with the time.
    """

    def __init__(self, api, namespace, children):
        self.scalings = []
        self._api = api
        self._namespace = namespace
        self._children = children
        self._port = stack.free_port("127.0.0.1")
        self._pods = []
        self._numbers = 0

    @property
    def port(self):
        return self._port

    @property
    def pods(self):
        return [f"{address}:{self._port}" for _, address, _ in self._pods]

    async def run(self):
        """Make it so, until cancelled; a look is a list, as there is no watch in the test client."""
        while True:
            spec = (await self._api.get(deployment(self._namespace)))["spec"]
            replicas = spec.get("replicas", 0)
            if not self.scalings or self.scalings[-1][1] != replicas:
                self.scalings.append((time.monotonic(), replicas))
            while len(self._pods) < replicas:
                await self._start()
            while len(self._pods) > replicas:
                await self._end()
            await asyncio.sleep(0.02)

    async def _start(self):
        self._numbers += 1
        name, address = f"vllm-{self._numbers}", f"127.0.3.{self._numbers}"
        pod = kube.pod(name, self._namespace, address, labels={"app": "vllm"}, ready=False)
        await self._api.create(pod)
        engine = ("--port", str(self._port), "--host", address, "--speed", "4")
        argv = [sys.executable, "-m", "extproc", "engine", *engine]
        child = await self._children.start("engine", argv, ready="listening on ")
        self._pods.append((pod, address, child))
        await self._api.set_status(pod | {"status": kube.status(address)})

    async def _end(self):
        pod, _, child = self._pods.pop()
        await self._api.delete(pod)
        await child.stop()


@contextlib.asynccontextmanager
async def playing(api, namespace):
    """A kubelet for as long as the block runs."""
    async with stack.stack() as children:
        kubelet = Kubelet(api, namespace, children)
        task = asyncio.ensure_future(kubelet.run())
        try:
            yield kubelet
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def place(api, cluster, *, extra=(), replicas=0):
    """A namespace with a Deployment and a pool, and a picker's kubeconfig for it."""
    namespace = await api.namespace("scaling")
    await api.create(deployment(namespace, replicas))
    lease = [
        rule
        for rule in kube.picker_rules("components/leader-election")
        if "leases" in rule["resources"]
    ]
    rules = [*kube.picker_rules(), *lease, *rights(), *extra]
    access = await api.account(namespace, rules)
    yield namespace, cluster.write_kubeconfig(namespace, access, namespace)


def scaler(namespace, kubeconfig, port, *, pages=0, autoscaling=None, **scaling):
    """A picker that scales the Deployment."""
    wanted = {**POLICY, "target": {"name": "vllm", "namespace": namespace}, **scaling}
    pods = {"selector": {"app": "vllm"}, "namespace": namespace, "ports": [port]}
    sections = {
        "pool": {"kubernetes": pods, "autoscaling": wanted},
        "flow_control": {"enabled": True},
        "autoscaling": autoscaling or {},
        "cluster": {"lease": {"namespace": namespace}},
    }
    text = json.dumps(sections)[1:-1]
    return kube_picker.picker(kubeconfig, config=text, pages=pages)


async def held(picker):
    """One request, which waits; the stream and when it was sent."""
    stream = serving.Stream(picker.channel)
    await stream.say(ext_proc_script.request_headers(HEADERS, ends=True))
    return stream


async def read_metric(picker, name):
    """A metric's value."""
    url = f"http://{serving.LOCAL}:{picker.pages}/metrics"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        result = re.search(rf"^{re.escape(name)} (\S+)$", await answer.text(), re.MULTILINE)
        return float(result[1]) if result else None


async def spec(api, namespace):
    return (await api.get(deployment(namespace)))["spec"].get("replicas", 0)


async def test_from_zero_to_some_and_back(api, cluster):
    """The first request is held, wakes an engine and is answered; load adds, silence takes all."""
    async with (
        place(api, cluster) as (namespace, kubeconfig),
        playing(api, namespace) as kubelet,
        scaler(namespace, kubeconfig, kubelet.port) as picker,
    ):
        await picker.until(lambda: read_metric(picker, "extproc_leader"), lambda item: item == 1.0)
        first = await held(picker)
        (text,) = await first.hear()
        assert dict(text.sets)[peer.DESTINATION] in kubelet.pods
        # It goes on: with others beside it more than 1.5 are there per replica.
        more = [await held(picker) for _ in range(4)]
        await picker.until(lambda: spec(api, namespace), lambda result: result >= 2)
        for entry in [first, *more]:
            entry.call.cancel()
        await picker.until(lambda: spec(api, namespace), lambda values: values == 0)
        assert (
            await read_metric(picker, 'extproc_scaling_changes_total{pool="",reason="wake"}') == 1.0
        )
        assert [count for _, count in kubelet.scalings][:3] == [0, 1, 2]
        events = await api.call("GET", f"/api/v1/namespaces/{namespace}/events")
        assert {event["reason"] for event in events["items"]} == {"Scaled"}
        state = f"/api/v1/namespaces/{namespace}/configmaps/extproc-autoscaling"
        stored = await api.call("GET", state)
        told_scaler = json.loads(stored["data"]["pools.json"])["pools"][""]["scaler"]
        assert told_scaler["kind"] == "queue-depth"


async def test_replicas_are_ready_while_another_leads(api, cluster):
    """The Lease says who scales, and not who serves: both replicas are ready."""
    async with (
        place(api, cluster) as (namespace, kubeconfig),
        scaler(namespace, kubeconfig, 8000) as item,
        scaler(namespace, kubeconfig, 8000) as other,
    ):
        for picker in (item, other):
            await picker.until(picker.ready, bool)

        async def leaders():
            return sorted([await read_metric(picker, "extproc_leader") for picker in (item, other)])

        await item.until(leaders, lambda result: result == [0.0, 1.0])


async def read_log(picker):
    """The latest output of the picker."""
    return "\n".join(picker.child.last_lines)


HPA = {
    "apiVersion": "autoscaling/v2",
    "kind": "HorizontalPodAutoscaler",
    "metadata": {"name": "theirs"},
    "spec": {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "vllm"},
        "maxReplicas": 3,
    },
}


async def test_a_target_of_another_autoscaler_is_left_alone(api, cluster):
    """An HPA of the same Deployment makes us stand down, with an Event on it."""
    async with place(api, cluster, replicas=1) as (namespace, kubeconfig):
        await api.create(HPA | {"metadata": {"name": "theirs", "namespace": namespace}})
        async with scaler(namespace, kubeconfig, 8000, min=2) as picker:
            events = f"/api/v1/namespaces/{namespace}/events"

            async def reasons():
                return {item["reason"] for item in (await api.call("GET", events))["items"]}

            await picker.until(
                lambda: read_metric(picker, "extproc_leader"), lambda entry: entry == 1.0
            )
            line = "HorizontalPodAutoscaler theirs scales Deployment"
            await picker.until(lambda: read_log(picker), lambda text: line in text)
            await picker.until(
                lambda: read_metric(picker, 'extproc_scaling_desired_replicas{pool=""}'),
                lambda result: result == 2.0,
            )
            assert await spec(api, namespace) == 1
            await picker.until(reasons, lambda values: "StandsDown" in values)


@pytest.mark.usefixtures("ours")
@pytest.mark.slow
async def test_an_outage_does_not_start_a_second_autoscaler(api, cluster):
    """Beside an HPA no look acts, while the API server is away, when it is back, and without rights."""
    async with place(api, cluster, replicas=2) as (namespace, kubeconfig):
        hpa = HPA | {"metadata": {"name": "theirs", "namespace": namespace}}
        await api.create(hpa)
        reaching = KubernetesSettings(sources=(), kubeconfig=str(kubeconfig))
        way = scale_subresource.ScaleClient(reaching, "me", 5.0)
        await way.open()
        try:
            target = ScaleTarget(name="vllm", namespace=namespace).filled
            scale = scale_subresource.ScaleSubresourceActuator(target, way, lambda: True)
            await scale.update_competing_autoscalers()
            assert not scale.can_scale
            cluster.stop()
            for _ in range(6):
                await scale.update_competing_autoscalers()
                assert not scale.can_scale
            restarting = asyncio.ensure_future(cluster.restart())
            while not restarting.done():
                await scale.update_competing_autoscalers()
                assert not scale.can_scale
                await asyncio.sleep(0.05)
            await restarting
            await api.delete(hpa)
            await scale.update_competing_autoscalers()
            assert scale.can_scale
        finally:
            await way.close()


async def test_missing_permissions_are_logged(api, cluster):
    """Without the right to patch nothing is scaled, and the log says what to grant."""
    namespace = await api.namespace("scaling")
    await api.create(deployment(namespace))
    rules = kube.picker_rules() + kube.picker_rules("components/leader-election")
    access = await api.account(namespace, rules)
    kubeconfig = cluster.write_kubeconfig(namespace, access, namespace)
    async with scaler(namespace, kubeconfig, 8000, min=1) as picker:
        granted = 'resources: ["deployments/scale"]'
        result = await picker.until(lambda: read_log(picker), lambda text: granted in text)
        assert 'verbs: ["get"]' in result


@pytest.mark.parametrize(
    ("kind", "group", "plural"),
    [
        ("Model", "kubeai.org", "models"),
        pytest.param("Fleet", "example.com", "fleets", marks=pytest.mark.slow),
    ],
)
async def test_custom_resources_are_scaled(api, cluster, kind, group, plural):
    """A known kind by its name, another one written out; also where it states no replicas."""
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "kind": kind, "singular": kind.lower()},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "x-kubernetes-preserve-unknown-fields": True,
                            "properties": {
                                "spec": {
                                    "type": "object",
                                    "properties": {"replicas": {"type": "integer"}},
                                }
                            },
                        }
                    },
                    "subresources": {
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                        }
                    },
                }
            ],
        },
    }
    await api.define([definition])
    extra = [{"apiGroups": [group], "resources": [f"{plural}/scale"], "verbs": ["get", "patch"]}]
    async with place(api, cluster, extra=extra) as (namespace, kubeconfig):
        item = {
            "apiVersion": f"{group}/v1",
            "kind": kind,
            "metadata": {"name": "vllm", "namespace": namespace},
            "spec": {},
        }
        await api.create(item)
        target = {"kind": kind, "name": "vllm", "namespace": namespace}
        if kind == "Fleet":
            target |= {"group": group, "version": "v1", "resource": plural}
        async with scaler(namespace, kubeconfig, 8000, target=target, min=2) as picker:

            async def replicas():
                return (await api.get(item))["spec"].get("replicas")

            await picker.until(replicas, lambda result: result == 2)


def pair(namespace, kubeconfig, port, **scaling):
    """Two replicas that know each other by their addresses."""
    pages = [stack.free_port(), stack.free_port()]
    peers = {"peers": [f"{serving.LOCAL}:{page}" for page in pages]}
    return [
        scaler(namespace, kubeconfig, port, pages=item, autoscaling=peers, **scaling)
        for item in pages
    ]


@pytest.mark.slow
async def test_any_replicas_requests_wake_an_engine(api, cluster):
    """A request that waits at a follower makes the leader act; both count all requests."""
    async with (
        place(api, cluster) as (namespace, kubeconfig),
        playing(api, namespace) as kubelet,
        contextlib.AsyncExitStack() as pickers,
    ):
        both = [
            await pickers.enter_async_context(item)
            for item in pair(namespace, kubeconfig, kubelet.port)
        ]

        async def leading():
            return [await read_metric(entry, "extproc_leader") for entry in both]

        result = await both[0].until(leading, lambda observed: 1.0 in observed)
        follower = both[result.index(0.0)]
        # Each has read the other at least once.
        await follower.until(
            lambda: read_metric(follower, 'extproc_scaling_counters_complete{pool=""}'),
            lambda records: records == 1.0,
        )
        first = await held(follower)
        (text,) = await first.hear()
        assert dict(text.sets)[peer.DESTINATION] in kubelet.pods
        depth = 'extproc_scaling_queue_depth{pool=""}'
        for single in both:
            await single.until(
                lambda picker=single: read_metric(picker, depth), lambda value: value == 1.0
            )
        first.call.cancel()


@pytest.mark.slow
async def test_a_restart_keeps_the_replicas(api, cluster):
    """Replicas stay while the picker is away and when it is back, until a window was watched."""
    slow = {**POLICY["params"], "window_s": 20.0}
    async with place(api, cluster, replicas=2) as (namespace, kubeconfig):
        async with scaler(namespace, kubeconfig, 8000, params=slow) as picker:
            await picker.until(
                lambda: read_metric(picker, "extproc_leader"), lambda item: item == 1.0
            )
            look = 'extproc_scaling_desired_replicas{pool=""}'
            assert await picker.until(lambda: read_metric(picker, look), bool) == 2.0
            await picker.child.stop()
        state = f"/api/v1/namespaces/{namespace}/configmaps/extproc-autoscaling"
        stored = json.loads((await api.call("GET", state))["data"]["pools.json"])["pools"][""]
        first = stored["scaler"]["memory"]["depths"]["begun"]
        async with scaler(namespace, kubeconfig, 8000, params=slow) as picker:
            await picker.until(
                lambda: read_metric(picker, "extproc_leader"), lambda entry: entry == 1.0
            )
            await picker.until(lambda: read_metric(picker, look), bool)
            assert await spec(api, namespace) == 2
            await picker.child.stop()
        stored = json.loads((await api.call("GET", state))["data"]["pools.json"])["pools"][""]
        # The second one goes on with the window of the first.
        assert stored["scaler"]["memory"]["depths"]["begun"] == pytest.approx(first, abs=0.5)
