"""Everything under manifests/ is taken by a real API server, in a dry run of server-side apply."""

from __future__ import annotations

import pytest

from tests.manifests import tools
from tests.support import kube

#: Kinds of other projects, whose definitions are not ours to install: their documents are checked
#: offline only (tests/manifests).
FOREIGN = frozenset(
    {
        "DestinationRule",
        "GCPBackendPolicy",
        "Gateway",
        "HTTPRoute",
        "HealthCheckPolicy",
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


@pytest.fixture(scope="module", autouse=True)
def served(crds):
    return crds


async def apply_all(api, namespace, documents):
    """Apply them to one namespace; returns the kinds that were."""
    applied = set()
    for one in documents:
        if one["kind"] in FOREIGN:
            continue
        one["metadata"]["namespace"] = namespace
        if one["kind"] in {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}:
            del one["metadata"]["namespace"]
        try:
            await api.apply(one, dry_run=True)
        except kube.Refused as refused:
            raise AssertionError(f"{one['kind']} {one['metadata']['name']}: {refused}") from None
        applied.add(one["kind"])
    return applied


def copied(documents):
    """They are cached, and tests put them into a namespace."""
    return [one | {"metadata": dict(one["metadata"])} for one in documents]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
async def test_kustomizations(api, namespace, folder):
    """What kustomize makes of a folder is taken without a warning about any field."""
    applied = await apply_all(api, namespace, copied(tools.kustomized(folder)))
    assert applied


def test_kinds_of_others_are_those_there_are():
    """The list of what is not applied names nothing that the manifests do not hold."""
    found = {one["kind"] for folder in FOLDERS for one in tools.kustomized(folder)}
    assert found >= FOREIGN


@pytest.mark.parametrize("values", ["", "all_on.yaml"], ids=["defaults", "all on"])
async def test_the_chart(api, namespace, values):
    """What the chart renders is taken, with its defaults and with everything turned on."""
    words = ["--values", str(tools.ROOT / "tests/manifests" / values)] if values else []
    assert await apply_all(api, namespace, copied(tools.charted(*words)))


@pytest.mark.parametrize("path", LOOSE, ids=lambda path: path.name)
async def test_single_files(api, namespace, path):
    """A file that is applied by itself is taken as it is."""
    assert await apply_all(api, namespace, kube.documents(path.read_text()))
