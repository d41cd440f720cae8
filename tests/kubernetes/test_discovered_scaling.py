"""A picker of every InferencePool that scales them, against a real API server."""

from __future__ import annotations

import contextlib
import json
import re

import aiohttp
import pytest

from tests.kubernetes import test_scaling
from tests.support import kube, kube_picker, serving

pytestmark = pytest.mark.usefixtures("crds")

POLICY = {name: test_scaling.POLICY[name] for name in ("policy", "params")}
TARGET, MIN, MAX = "extproc/scale-target", "extproc/scale-min", "extproc/scale-max"


def engines(namespace, name):
    item = test_scaling.deployment(namespace)
    return item | {"metadata": {"name": name, "namespace": namespace}}


def pool(namespace, name, **text):
    item = kube.pool(name, namespace)
    item["metadata"]["annotations"] = text
    return item


@contextlib.asynccontextmanager
async def place(api, cluster):
    """A namespace with two Deployments, and a kubeconfig for pickers of every pool in it."""
    namespace = await api.namespace("found")
    for name in ("one", "two"):
        await api.create(engines(namespace, name))
    rules = [*kube.picker_rules(), *kube.picker_rules("components/leader-election")]
    access = await api.account(namespace, [*rules, *test_scaling.rights()])
    yield namespace, cluster.write_kubeconfig(namespace, access, namespace)


def picker(namespace, kubeconfig, *, every_pool="namespace", **rule):
    """One that scales what it finds."""
    only = {"namespace": namespace} if every_pool == "namespace" else {}
    sections = {
        "cluster": {
            "discover_pools": every_pool,
            **only,
            "lease": {"namespace": namespace},
        },
        "autoscaling": {"discovered_pools": [{**POLICY, "min": 1, "max": 3, **rule}]},
        "flow_control": {"enabled": True},
    }
    return kube_picker.picker(kubeconfig, config=json.dumps(sections)[1:-1])


async def replicas(api, namespace, name):
    return (await api.get(engines(namespace, name)))["spec"].get("replicas", 0)


async def scaled(running):
    """Names of the pools whose number is published."""
    url = f"http://{serving.LOCAL}:{running.pages}/metrics"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        name = r'^extproc_scaling_desired_replicas{pool="([^"]*)"}'
        return set(re.findall(name, await answer.text(), re.MULTILINE))


async def state(api, namespace):
    """Content of the ConfigMap, by pool."""
    path = f"/api/v1/namespaces/{namespace}/configmaps/extproc-autoscaling"
    with contextlib.suppress(kube.Refused):
        stored = await api.call("GET", path)
        return json.loads(stored["data"]["pools.json"])["pools"]
    return {}


async def test_pools_with_annotated_objects_come_and_go(api, cluster):
    """Each has what its annotations ask for; one that is gone is neither scaled nor remembered."""
    async with place(api, cluster) as (namespace, kubeconfig):
        await api.create(pool(namespace, "one", **{TARGET: "Deployment/one", MIN: "2"}))
        item, two = f"{namespace}/one", f"{namespace}/two"
        async with picker(namespace, kubeconfig) as running:
            await running.until(lambda: replicas(api, namespace, "one"), lambda result: result == 2)
            # A pool that comes while it runs, and says later what it wants.
            await api.create(pool(namespace, "two", **{TARGET: "none"}))
            await api.patch(
                pool(namespace, "two"),
                {
                    "metadata": {
                        "annotations": {TARGET: "apps/v1/Deployment/two", MAX: "9", MIN: "9"}
                    }
                },
            )
            # The rule says how many that may be.
            await running.until(lambda: replicas(api, namespace, "two"), lambda values: values == 3)
            assert await scaled(running) == {item, two}
            await running.until(
                lambda: state(api, namespace), lambda matches: matches.keys() == {item, two}
            )
            await api.delete(pool(namespace, "two"))
            await running.until(lambda: scaled(running), lambda result: result == {item})
            await running.until(
                lambda: state(api, namespace), lambda result: result.keys() == {item}
            )
            assert await replicas(api, namespace, "two") == 3


async def test_a_rule_names_objects_after_their_pools(api, cluster):
    """Without a word on the pools themselves."""
    async with (
        place(api, cluster) as (namespace, kubeconfig),
        picker(namespace, kubeconfig, target={"name": "{name}"}, annotations=False) as running,
    ):
        for name in ("one", "two"):
            await api.create(pool(namespace, name, **{MIN: "3"}))
        for name in ("one", "two"):
            await running.until(
                lambda name=name: replicas(api, namespace, name), lambda result: result == 1
            )


def wide_rights(part):
    """Rights that a component of the manifests grants everywhere, and in its own namespace."""
    result = kube.documents((kube.MANIFESTS / "components" / part / "rbac.yaml").read_text())
    return [
        [rule for item in result if item["kind"] == kind for rule in item["rules"]]
        for kind in ("ClusterRole", "Role")
    ]


def attacks(namespace, name):
    """Annotations that name an object of another namespace in every way we know."""
    candidates = f"namespaces%2F{namespace}%2Fdeployments%2F{name}%2Fscale"
    return [
        f"apps/v1%2F{candidates}?x=/deployments/Deployment/one",
        f"apps/v1%2F{candidates}%3Fx=/deployments/Deployment/one",
        f"apps/v1/deployments%2Fone%2F..%2F..%2F..%2F{candidates}?/Deployment/one",
        f"apps/v1/Deployment/..%2F..%2F..%2F{candidates}?",
        f"apps%2Fv1%2F{candidates}%23/v1/deployments/Deployment/one",
        f"apps/v1%252F{candidates}?x=/deployments/Deployment/one",
        f"apps/../{namespace}/deployments/Deployment",
    ]


async def test_a_tenant_scales_nothing_of_another_namespace(api, cluster):
    """With rights over the whole cluster, and whatever the annotation of its pool says."""
    system = await api.namespace("system")
    theirs = engines(system, "coredns")
    theirs["spec"]["replicas"] = 2
    before = (await api.create(theirs))["metadata"]["resourceVersion"]
    async with place(api, cluster) as (namespace, _):
        all_, own = wide_rights("cluster-wide-engine-autoscaling")
        all_ += wide_rights("cluster-wide")[0]
        access = await api.account(namespace, own, everywhere=all_)
        kubeconfig = cluster.write_kubeconfig(f"{namespace}-wide", access, namespace)
        groups = {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"]}
        verbs = {"verbs": ["create", "get", "patch", "delete"]}
        tenant = await api.account(namespace, [groups | verbs])
        wanted = {"pools": [f"{namespace}/*"], "max": 4}
        async with (
            kube.api(tenant) as writer,
            picker(namespace, kubeconfig, every_pool="cluster", **wanted) as running,
        ):
            with pytest.raises(kube.Refused, match="403 "):
                await writer.patch(theirs, {"spec": {"replicas": 0}}, part="/scale")
            texts = attacks(system, "coredns")
            for number, text in enumerate(texts):
                message = {TARGET: text, MIN: "4", MAX: "4"}
                await writer.create(pool(namespace, f"pool-{number}", **message))
            honest = {TARGET: "apps/v1/Deployment/one", MIN: "2"}
            await writer.create(pool(namespace, "honest", **honest))
            await running.until(
                lambda: replicas(api, namespace, "one"), lambda observed: observed == 2
            )
            await running.until(
                lambda: refused(running),
                lambda records: (
                    records == {f"{namespace}/pool-{item}" for item in range(len(texts))}
                ),
            )
            assert await scaled(running) == {f"{namespace}/honest"}
            events = f"/api/v1/namespaces/{namespace}/events"

            async def warned():
                items = (await api.call("GET", events))["items"]
                return {
                    entry["involvedObject"]["name"] for entry in items if entry["type"] == "Warning"
                }

            await running.until(warned, lambda lines: len(lines) == len(texts))
    assert (await api.get(theirs))["metadata"]["resourceVersion"] == before


async def refused(running):
    """Names of the pools whose annotations were refused."""
    url = f"http://{serving.LOCAL}:{running.pages}/metrics"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        name = r'^extproc_scaling_invalid_annotations_total{pool="([^"]*)"} 1.0'
        return set(re.findall(name, await answer.text(), re.MULTILINE))
