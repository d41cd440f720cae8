"""Objectives and rewrites of a real API server: both groups, and without their definitions."""

from __future__ import annotations

import pytest

from extproc.pool import inference_policy
from tests.support import kube, kube_follow

pytestmark = pytest.mark.usefixtures("crds")

A = "127.2.0.1"
LABELS = {"app": "vllm"}


@pytest.mark.usefixtures("ours")
async def test_087_policies_without_their_crds(api, place, crds):
    """Pools work without the definitions of objectives and rewrites, and take them once there."""
    namespace, _ = place
    key = f"{namespace}/vllm"
    policies = [crd for crd in crds if crd["spec"]["names"]["kind"] != "InferencePool"]
    await api.undefine(policies)
    try:
        await api.create(kube.pool("vllm", namespace, labels=LABELS))
        await api.create(kube.pod("a", namespace, A, labels=LABELS))
        async with kube_follow.pool(place) as result:
            await result.has(key, f"{A}:8000")
            assert result.pools[key].policy == inference_policy.EMPTY_POLICY
            await api.define(policies)
            await api.create(kube.objective("batch", namespace, "vllm", -1))
            await result.until(lambda: result.pools[key].policy.priorities == {"batch": -1})
    finally:
        await api.define(crds)


async def test_088_the_new_group_wins(api, place):
    """Objectives and rewrites of the older group are ignored where both are installed."""
    namespace, _ = place
    key = f"{namespace}/vllm"
    await api.create(kube.pool("vllm", namespace, labels=LABELS))
    rules = [{"matches": [{"model": {"value": "a"}}], "targets": [{"modelRewrite": "b"}]}]
    await api.create(kube.objective("old", namespace, "vllm", 5, version=kube.POOL_OLD))
    await api.create(kube.rewrite("old", namespace, "vllm", rules, version=kube.POOL_OLD))
    await api.create(kube.objective("new", namespace, "vllm", 3))
    async with kube_follow.pool(place) as result:
        await result.until(lambda: result.pools[key].policy.priorities == {"new": 3})
        assert result.pools[key].policy.rules == ()


@pytest.mark.usefixtures("ours")
async def test_088_the_older_group_alone(api, place, crds):
    """If only the older group is installed, its objectives and rewrites are read."""
    namespace, _ = place
    key = f"{namespace}/vllm"
    newer = [crd for crd in crds if crd["spec"]["group"] == "llm-d.ai"]
    await api.undefine(newer)
    try:
        await api.create(kube.pool("vllm", namespace, labels=LABELS))
        await api.create(kube.objective("old", namespace, "vllm", 5, version=kube.POOL_OLD))
        async with kube_follow.pool(place) as result:
            await result.until(lambda: result.pools[key].policy.priorities == {"old": 5})
    finally:
        await api.define(crds)


async def test_081_objectives(api, place):
    """Priorities of this pool's objectives alone (point 82), unset ones 0; changes followed."""
    namespace, _ = place
    key = f"{namespace}/vllm"
    await api.create(kube.pool("vllm", namespace, labels=LABELS))
    high = kube.objective("high", namespace, "vllm", 4)
    await api.create(high)
    await api.create(kube.objective("unset", namespace, "vllm", None))
    await api.create(kube.objective("foreign", namespace, "another", 9))
    async with kube_follow.pool(place) as result:
        await result.until(lambda: result.pools[key].policy.priorities == {"high": 4, "unset": 0})
        await api.patch(high, {"spec": {"priority": -2}})
        await result.until(lambda: result.pools[key].policy.priorities == {"high": -2, "unset": 0})
        await api.delete(high)
        await result.until(lambda: result.pools[key].policy.priorities == {"unset": 0})


async def test_083_rewrites(api, place):
    """Rules come in the order of age, and of the list within one object."""
    namespace, _ = place
    key = f"{namespace}/vllm"
    await api.create(kube.pool("vllm", namespace, labels=LABELS))
    first = [
        {"matches": [{"model": {"value": "a"}}], "targets": [{"modelRewrite": "b", "weight": 70}]},
        {"targets": [{"modelRewrite": "c"}]},
    ]
    second = [{"matches": [{"model": {"value": "d"}}], "targets": [{"modelRewrite": "e"}]}]
    async with kube_follow.pool(place) as result:
        # One second is the resolution of an age: names in order make the order certain.
        await api.create(kube.rewrite("one", namespace, "vllm", first))
        await api.create(kube.rewrite("two", namespace, "vllm", second))
        await api.create(kube.rewrite("three", namespace, "another", second))
        await result.until(lambda: len(result.pools[key].policy.rules) == 3)
        rules = result.pools[key].policy.rules
        assert [rule.models for rule in rules] == [("a",), (), ("d",)]
        assert rules[0].targets == (inference_policy.TargetModel("b", 70),)
