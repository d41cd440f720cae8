"""A picker of every InferencePool that scales them, against a real API server."""

from __future__ import annotations

import contextlib
import json
import re

import aiohttp
import pytest

from tests.kubernetes import test_scaling as scaling
from tests.support import kube, kube_picker, serving

POLICY = {name: scaling.POLICY[name] for name in ("policy", "params")}
TARGET, MIN, MAX = "extproc/scale-target", "extproc/scale-min", "extproc/scale-max"


@pytest.fixture(scope="module", autouse=True)
def served(crds):
    return crds


def engines(namespace, name):
    one = scaling.deployment(namespace)
    return one | {"metadata": {"name": name, "namespace": namespace}}


def pool(namespace, name, **said):
    one = kube.pool(name, namespace)
    one["metadata"]["annotations"] = said
    return one


@contextlib.asynccontextmanager
async def place(api, cluster):
    """A namespace with two Deployments, and a kubeconfig for pickers of every pool in it."""
    namespace = await api.namespace("found")
    for name in ("one", "two"):
        await api.create(engines(namespace, name))
    rules = [*kube.picker_rules(), *kube.picker_rules("components/leader-election")]
    access = await api.account(namespace, [*rules, *scaling.rights()])
    yield namespace, cluster.write_kubeconfig(namespace, access, namespace)


def picker(namespace, kubeconfig, **rule):
    """One that scales what it finds."""
    sections = {
        "cluster": {
            "every_pool": "namespace",
            "namespace": namespace,
            "lease": {"namespace": namespace},
        },
        "autoscaling": {"found": [{**POLICY, "min": 1, "max": 3, **rule}]},
        "holding": {"enabled": True},
    }
    return kube_picker.picker(kubeconfig, config=json.dumps(sections)[1:-1])


async def replicas(api, namespace, name):
    return (await api.get(engines(namespace, name)))["spec"].get("replicas", 0)


async def scaled(running):
    """Names of the pools whose number is told."""
    url = f"http://{serving.LOCAL}:{running.pages}/metrics"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        name = r'^extproc_scaling_desired_replicas{pool="([^"]*)"}'
        return set(re.findall(name, await answer.text(), re.MULTILINE))


async def state(api, namespace):
    """What stands in the ConfigMap, by pool."""
    path = f"/api/v1/namespaces/{namespace}/configmaps/extproc-autoscaling"
    with contextlib.suppress(kube.Refused):
        kept = await api.call("GET", path)
        return json.loads(kept["data"]["pools.json"])["pools"]
    return {}


async def test_pools_come_name_their_objects_and_go(api, cluster):
    """Each has what its annotations ask for; one that is gone is neither scaled nor remembered."""
    async with place(api, cluster) as (namespace, kubeconfig):
        await api.create(pool(namespace, "one", **{TARGET: "Deployment/one", MIN: "2"}))
        one, two = f"{namespace}/one", f"{namespace}/two"
        async with picker(namespace, kubeconfig) as running:
            await running.until(lambda: replicas(api, namespace, "one"), lambda found: found == 2)
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
            await running.until(lambda: replicas(api, namespace, "two"), lambda found: found == 3)
            assert await scaled(running) == {one, two}
            await running.until(
                lambda: state(api, namespace), lambda found: found.keys() == {one, two}
            )
            await api.delete(pool(namespace, "two"))
            await running.until(lambda: scaled(running), lambda found: found == {one})
            await running.until(lambda: state(api, namespace), lambda found: found.keys() == {one})
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
                lambda name=name: replicas(api, namespace, name), lambda found: found == 1
            )
