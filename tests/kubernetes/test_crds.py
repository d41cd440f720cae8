"""Our definitions accept what the official ones accept, with their defaults and rules."""

from __future__ import annotations

import pytest

from tests.support import kube

pytestmark = pytest.mark.usefixtures("crds")

SERVICE = {"name": "extproc", "port": {"number": 9002}}
TIME = "2026-01-01T00:00:00Z"


async def refused(api, item):
    """The reason for which the server refuses an object."""
    with pytest.raises(kube.Refused) as raised:
        await api.create(item)
    assert (raised.value.status, raised.value.reason) == (422, "Invalid")
    return str(raised.value)


def old_pool(name, namespace, **spec):
    chosen = {
        "selector": {"app": name},
        "targetPortNumber": 8000,
        "extensionRef": {"name": "extproc"},
        **spec,
    }
    metadata = {"name": name, "namespace": namespace}
    return {
        "apiVersion": kube.POOL_OLD,
        "kind": "InferencePool",
        "metadata": metadata,
        "spec": chosen,
    }


def condition(name):
    return {
        "type": name,
        "status": "True",
        "reason": name,
        "message": "",
        "observedGeneration": 1,
        "lastTransitionTime": TIME,
    }


# InferencePool v1


async def test_pool_with_every_field(api, namespace):
    """Every field of a pool comes back as it was sent."""
    item = kube.pool(
        "full",
        namespace,
        (3000, 3002, 3004),
        labels={"app": "full", "llm-d.ai/role": ""},
        picker={"group": "", "kind": "Service", "failureMode": "FailOpen", **SERVICE},
        appProtocol="kubernetes.io/h2c",
    )
    await api.create(item)
    assert (await api.get(item))["spec"] == item["spec"]


async def test_pool_defaults(api, namespace):
    """Omitted fields of a pool have defaults: protocol, and kind, group and failure mode."""
    item = kube.pool("defaults", namespace, picker=SERVICE)
    await api.create(item)
    spec = (await api.get(item))["spec"]
    assert spec["appProtocol"] == "http"
    filled = {"group": "", "kind": "Service", "failureMode": "FailClose", **SERVICE}
    assert spec["endpointPickerRef"] == filled


async def test_pool_without_a_picker(api, namespace):
    """Since v1.6.0 a pool need not name an endpoint picker."""
    item = kube.pool("alone", namespace)
    await api.create(item)
    assert "endpointPickerRef" not in (await api.get(item))["spec"]


async def test_picker_of_another_kind_needs_no_port(api, namespace):
    """The port is demanded of Services only."""
    picker = {"group": "example.com", "kind": "Picker", "name": "one"}
    await api.create(kube.pool("other-kind", namespace, picker=picker))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"targetPorts": []}, "spec.targetPorts"),
        ({"targetPorts": [{"number": n} for n in range(1, 10)]}, "must have at most 8 items"),
        ({"targetPorts": [{"number": 0}]}, "greater than or equal to 1"),
        ({"targetPorts": [{"number": 65536}]}, "less than or equal to 65535"),
        ({"targetPorts": [{"number": 1}, {"number": 1}]}, "port number must be unique"),
        ({"targetPorts": [{}]}, "targetPorts[0].number"),
        ({"selector": {}}, "spec.selector.matchLabels"),
        ({"selector": {"matchLabels": {}}}, "at least 1 properties"),
        ({"selector": {"matchLabels": {f"k{n}": "" for n in range(65)}}}, "at most 64"),
        ({"selector": {"matchLabels": {"app": "-"}}}, "spec.selector.matchLabels"),
        ({"selector": {"matchLabels": {"app": "x" * 64}}}, "63"),
        ({"appProtocol": "grpc"}, "spec.appProtocol"),
        ({"endpointPickerRef": {"name": "one"}}, "port is required when kind is 'Service'"),
        ({"endpointPickerRef": {"name": "one", "kind": "Service"}}, "port is required"),
        ({"endpointPickerRef": {"name": "one", "kind": ""}}, "spec.endpointPickerRef.kind"),
        ({"endpointPickerRef": {**SERVICE, "name": ""}}, "spec.endpointPickerRef.name"),
        ({"endpointPickerRef": {**SERVICE, "group": "A_B"}}, "spec.endpointPickerRef.group"),
        ({"endpointPickerRef": {**SERVICE, "failureMode": "Open"}}, "failureMode"),
    ],
)
async def test_pool_is_refused(api, namespace, changes, why):
    """Pools that the official definition refuses are refused, by field or message."""
    item = kube.pool("wrong", namespace)
    item["spec"] |= changes
    assert why in await refused(api, item)


async def test_pool_needs_a_spec(api, namespace):
    """A pool without a spec is none."""
    item = kube.pool("hollow", namespace)
    del item["spec"]
    assert "spec" in await refused(api, item)


async def test_pool_status_is_a_subresource(api, namespace):
    """Parents are written through the status, with a parent's group and kind filled in."""
    item = kube.pool("parents", namespace)
    item["status"] = {
        "parents": [
            {
                "parentRef": {"name": "gateway", "namespace": "infra"},
                "controllerName": "example.net/gateway-controller",
                "conditions": [condition(name) for name in ("Accepted", "ResolvedRefs")],
            }
        ]
    }
    await api.create(item)
    result = (await api.get(item))["status"]["parents"][0]
    assert result["parentRef"] == {
        "group": "gateway.networking.k8s.io",
        "kind": "Gateway",
        "name": "gateway",
        "namespace": "infra",
    }
    assert [entry["type"] for entry in result["conditions"]] == ["Accepted", "ResolvedRefs"]
    with pytest.raises(kube.Refused, match="controllerName"):
        await api.set_status(item | {"status": {"parents": [result | {"controllerName": "none"}]}})
    too_many = [{"parentRef": {"name": f"gateway-{n}"}} for n in range(33)]
    with pytest.raises(kube.Refused, match="at most 32"):
        await api.set_status(item | {"status": {"parents": too_many}})


# The older InferencePool


async def test_old_pool(api, namespace):
    """The older group has one port, a flat selector and a parent until a controller comes."""
    item = old_pool("old", namespace)
    await api.create(item)
    result = await api.get(item)
    picker = {"group": "", "kind": "Service", "name": "extproc", "failureMode": "FailClose"}
    assert result["spec"] == item["spec"] | {"extensionRef": picker}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"targetPortNumber": 0}, "spec.targetPortNumber"),
        ({"targetPortNumber": None}, "spec.targetPortNumber"),
        ({"selector": None}, "spec.selector"),
        ({"extensionRef": {}}, "spec.extensionRef.name"),
        ({"extensionRef": {"name": "a", "failureMode": "Never"}}, "failureMode"),
    ],
)
async def test_old_pool_is_refused(api, namespace, changes, why):
    """Its ports, selector and reference are checked as well."""
    assert why in await refused(api, old_pool("wrong", namespace, **changes))


# InferencePoolImport


async def test_import(api, namespace):
    """An import has no spec; its controllers differ by name."""
    metadata = {"name": "one", "namespace": namespace}
    item = {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha1",
        "kind": "InferencePoolImport",
        "metadata": metadata,
    }
    await api.create(item)
    controller = {
        "name": "example.net/import",
        "exportingClusters": [{"name": "east"}],
        "parents": [{"parentRef": {"name": "gateway"}}],
        "conditions": [condition("Accepted")],
    }
    await api.set_status(item | {"status": {"controllers": [controller]}})
    result = (await api.get(item))["status"]["controllers"][0]
    assert result["parents"][0]["parentRef"]["kind"] == "Gateway"
    for status in ({"controllers": [controller, controller]}, {"controllers": [{"name": "x"}]}):
        with pytest.raises(kube.Refused, match="controllers"):
            await api.set_status(item | {"status": status})


# InferenceObjective and InferenceModelRewrite, both groups

GROUPS = pytest.mark.parametrize("version", [kube.LLM_D, kube.POOL_OLD])


@GROUPS
@pytest.mark.parametrize("priority", [None, 0, -1, 2147483647])
async def test_objective(api, namespace, version, priority):
    """A priority is any int32 or nothing; the reference is to an InferencePool."""
    name = f"objective-{priority}".replace("--", "-minus-").lower()
    item = kube.objective(name, namespace, "pool", priority, version=version)
    await api.create(item)
    spec = (await api.get(item))["spec"]
    assert spec.get("priority") == priority
    assert spec["poolRef"] == {
        "group": "inference.networking.k8s.io",
        "kind": "InferencePool",
        "name": "pool",
    }


@GROUPS
@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({}, "spec.poolRef"),
        ({"poolRef": {}}, "spec.poolRef.name"),
        ({"poolRef": {"name": "a"}, "priority": "high"}, "spec.priority"),
    ],
)
async def test_objective_is_refused(api, namespace, version, spec, why):
    """An objective without a pool, or with a priority that is no integer, is refused."""
    item = kube.objective("wrong", namespace, "pool", None, version=version)
    assert why in await refused(api, item | {"spec": spec})


@GROUPS
async def test_rewrite(api, namespace, version):
    """Rules match exactly by default; targets keep their weights; no matches is a generic rule."""
    rules = [
        {
            "matches": [{"model": {"value": "a"}}, {"model": {"type": "Exact", "value": "b"}}],
            "targets": [{"modelRewrite": "c", "weight": 70}, {"modelRewrite": "d", "weight": 30}],
        },
        {"targets": [{"modelRewrite": "e"}]},
    ]
    item = kube.rewrite("split", namespace, "pool", rules, version=version)
    await api.create(item)
    result = (await api.get(item))["spec"]["rules"]
    assert result[0]["matches"][0]["model"] == {"type": "Exact", "value": "a"}
    assert result[0]["targets"] == rules[0]["targets"]
    assert result[1] == rules[1]


@GROUPS
@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ({"targets": []}, "targets"),
        ({"targets": [{"weight": 1}]}, "modelRewrite"),
        ({"targets": [{"modelRewrite": "a", "weight": 0}]}, "weight"),
        ({"targets": [{"modelRewrite": "a", "weight": 1_000_001}]}, "weight"),
        ({"matches": [{"model": {"value": ""}}]}, "value"),
        ({"matches": [{"model": {"value": "a", "type": "Prefix"}}]}, "type"),
        ({"matches": [{}]}, "model"),
    ],
)
async def test_rewrite_is_refused(api, namespace, version, rule, why):
    """No target, a weight out of range, or another way of matching is refused."""
    item = kube.rewrite("wrong", namespace, "pool", [rule], version=version)
    assert why in await refused(api, item)


@pytest.mark.parametrize("kind", ["pool", "objective"])
async def test_unknown_fields_are_dropped(api, namespace, kind):
    """A field that the definitions do not know is dropped, and refused when applied strictly."""
    item = (
        kube.pool("surplus", namespace)
        if kind == "pool"
        else kube.objective("surplus", namespace, "pool", 1)
    )
    item["spec"]["surplus"] = True
    await api.create(item)
    assert "surplus" not in (await api.get(item))["spec"]
    with pytest.raises(kube.Refused, match="surplus"):
        await api.apply(item)
