"""Everything under manifests/ is taken by a real API server, in a dry run of server-side apply."""

from __future__ import annotations

import asyncio

import pytest

from tests.manifests import test_overlays, tools
from tests.support import kube

pytestmark = pytest.mark.usefixtures("crds")

#: Kinds of other projects, whose definitions are not ours to install: their documents are checked
#: offline only (tests/manifests).
FOREIGN = frozenset(
    {
        "AgentgatewayPolicy",
        "BackendTrafficPolicy",
        "ClientTrafficPolicy",
        "DestinationRule",
        "EnvoyFilter",
        "EnvoyPatchPolicy",
        "EnvoyProxy",
        "GCPBackendPolicy",
        "Gateway",
        "HTTPListenerPolicy",
        "HTTPRoute",
        "HealthCheckPolicy",
        "PrometheusRule",
        "ServiceMonitor",
    }
)

FOLDERS = [
    tools.MANIFESTS / "base",
    tools.MANIFESTS / "crds",
    *sorted(path.parent for path in tools.MANIFESTS.glob("overlays/*/kustomization.yaml")),
    tools.ROOT / "tests/manifests/everything",
    tools.ROOT / "tests/manifests/shared_scalers",
]

#: Documents that kubectl would read, outside of any kustomization.
LOOSE = [tools.MANIFESTS / "plain.yaml"]


async def apply_all(api, namespace, documents):
    """Apply them to one namespace; returns the kinds that were."""
    applied = set()
    for document in documents:
        if document["kind"] in FOREIGN:
            continue
        document["metadata"]["namespace"] = namespace
        if document["kind"] in {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}:
            del document["metadata"]["namespace"]
        try:
            await api.apply(document, dry_run=True)
        except kube.Refused as refused:
            raise AssertionError(
                f"{document['kind']} {document['metadata']['name']}: {refused}"
            ) from None
        applied.add(document["kind"])
    return applied


def copied(documents):
    """They are cached, and tests put them into a namespace."""
    return [document | {"metadata": dict(document["metadata"])} for document in documents]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
async def test_kustomizations(api, namespace, folder):
    """The server accepts the output of kustomize without a warning about a field."""
    applied = await apply_all(api, namespace, copied(tools.kustomized(folder)))
    assert applied


def test_foreign_kinds_exist_in_the_manifests():
    """The list of what is not applied names nothing that the manifests do not hold."""
    result = {item["kind"] for folder in FOLDERS for item in tools.kustomized(folder)}
    assert result >= FOREIGN


@pytest.mark.parametrize("values", ["", "all_on.yaml"], ids=["defaults", "all on"])
async def test_the_chart(api, namespace, values):
    """The server accepts the rendered chart, with its defaults and with everything turned on."""
    words = ["--values", str(tools.ROOT / "tests/manifests" / values)] if values else []
    assert await apply_all(api, namespace, copied(tools.charted(*words)))


@pytest.mark.parametrize("path", LOOSE, ids=lambda path: path.name)
async def test_single_files(api, namespace, path):
    """A file that is applied by itself is taken as it is."""
    assert await apply_all(api, namespace, kube.documents(path.read_text()))


async def may_list_pods(api, namespace):
    """True if the account of an installation may list the pods of all namespaces."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{namespace}:extproc",
            "resourceAttributes": {"verb": "list", "resource": "pods"},
        },
    }
    answer = await api.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return answer["status"]["allowed"]


async def test_a_second_installation_keeps_the_permissions_of_the_first(api, tmp_path):
    """Both accounts may read the whole cluster, and go on to when one installation is deleted."""
    namespaces = [await api.namespace("wide") for _ in range(2)]
    installed = []
    for namespace in namespaces:
        folder = test_overlays.place(
            tmp_path / namespace, *test_overlays.CLUSTER_WIDE, namespace=namespace
        )
        kinds = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding"}
        installed.append([item for item in tools.kustomized(folder) if item["kind"] in kinds])
        for entry in installed[-1]:
            await api.apply(entry)
    for namespace in namespaces:
        await until_allowed(api, namespace)
    for entry in installed[1]:
        await api.delete(entry)
    assert await may_list_pods(api, namespaces[0])
    for entry in installed[0]:
        await api.delete(entry)


async def until_allowed(api, namespace):
    """The server takes a moment to know a new binding."""
    async with asyncio.timeout(300):
        while not await may_list_pods(api, namespace):
            await asyncio.sleep(0.1)
