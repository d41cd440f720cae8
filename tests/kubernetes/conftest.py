"""One real API server for the whole suite, and a client of it for each module."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import kube, kube_server, programs

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Mark what needs an API server."""
    here = str(HERE) + os.sep
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.kubernetes)


@pytest.fixture(scope="session")
def cluster():
    """The API server; without one the tests are skipped, or fail where one is demanded."""
    try:
        with kube_server.cluster() as item:
            yield item
    except kube_server.MissingApiServer as missing:
        raise programs.missing(str(missing), "EXTPROC_REQUIRE_KUBERNETES") from missing


@pytest.fixture(scope="module")
def ours(cluster):
    """Skips what must not be done to a shared cluster: stopping it, or deleting definitions."""
    if not cluster.stoppable:
        pytest.skip("the API server is not ours to stop or to empty")


@pytest.fixture(scope="module")
def api(live, cluster):
    """The API as a user with all rights."""
    with live.holding(kube.api(cluster.admin)) as item:
        yield item
        if not cluster.stoppable:
            live.run(item.tidy())


@pytest.fixture(scope="session")
def definitions():
    """Our definitions of the inference objects."""
    return kube.definitions()


@pytest.fixture(scope="module")
def crds(live, api, definitions):
    """All of them, served."""
    live.run(api.define(definitions))
    return definitions


@pytest.fixture(scope="module")
def namespace(live, api):
    """A namespace of the module's own."""
    return live.run(api.namespace())


@pytest.fixture
def place(live, api, cluster):
    """A namespace of the test's own, and the kubeconfig of a picker that may look into it."""

    async def built():
        namespace = await api.namespace()
        access = await api.account(namespace, kube.picker_rules())
        return namespace, cluster.write_kubeconfig(namespace, access, namespace)

    return live.run(built())
