"""The Lease client over real HTTP, against a fake API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest
from aiohttp import web

from extproc import election
from extproc.config import kubernetes_plan
from extproc.demo import stack
from extproc.discovery.kubernetes import settings
from extproc.election import ElectionSettings
from extproc.errors import ConfigError
from extproc.server import leader_elector

FIRST = election.LeaseWrite("me", 15, 0, acquired=True, version="")
NAME, PLACE = "l", "n"
ALL = f"/apis/coordination.k8s.io/v1/namespaces/{PLACE}/leases"


class LeaseApi:
    """One Lease behind HTTP: creates, reads, and replaces where the version fits."""

    def __init__(self, folder):
        self.token = "right"
        self.lease = None
        self.requests = []
        self.next = None
        self._version = 0
        self._folder = folder
        self.port = stack.free_port()

    def kubeconfig(self, token="right"):
        (self._folder / "token").write_text(token)
        user = {"tokenFile": str(self._folder / "token")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "u", "user": user}],
        }
        path = self._folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return str(path)

    async def answer(self, request):
        self.requests.append((request.method, request.path))
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return refused(401, "Unauthorized")
        if self.next is not None:
            return self.next
        if request.method == "GET":
            return web.json_response(self.lease) if self.lease else refused(404, "not found")
        sent = await request.json()
        stored = self.lease["metadata"]["resourceVersion"] if self.lease else ""
        if request.method == "PUT" and not self.lease:
            return refused(404, "not found")
        if sent["metadata"].get("resourceVersion", "") != stored:
            return refused(409, "the object has been modified")
        self._version += 1
        sent["metadata"]["resourceVersion"] = str(self._version)
        self.lease = sent
        return web.json_response(sent, status=201 if request.method == "POST" else 200)

    @contextlib.asynccontextmanager
    async def serving(self):
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(application, shutdown_timeout=0.05)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield
        finally:
            await runner.cleanup()


def refused(status, message):
    return web.json_response({"kind": "Status", "code": status, "message": message}, status=status)


@contextlib.asynccontextmanager
async def opened(kubeconfig, **times):
    wanted = ElectionSettings(name=NAME, namespace=PLACE, **times)
    reaching = settings.KubernetesSettings(sources=(), kubeconfig=kubeconfig)
    client = leader_elector.LeaseClient(kubernetes_plan.ElectionPlan(wanted, reaching))
    await client.open()
    try:
        yield client
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def lease_fixture(folder, **times):
    """A server, and a way to its Lease."""
    api = LeaseApi(folder)
    async with api.serving(), opened(api.kubeconfig(), **times) as client:
        yield api, client


async def test_lease_is_created_renewed_and_read(tmp_path):
    """A create, a replacement and a read agree on version, holder and transitions."""
    async with lease_fixture(tmp_path) as (api, client):
        assert await client.read() is None
        created = await client.write(FIRST)
        assert created == election.LeaseRecord("me", 15, 0, "1")
        renewed = await client.write(election.LeaseWrite("me", 15, 0, acquired=False, version="1"))
        assert renewed.version == "2"
        assert await client.read() == renewed
        path = f"{ALL}/{NAME}"
        assert api.requests == [("GET", path), ("POST", ALL), ("PUT", path), ("GET", path)]
        spec = api.lease["spec"]
        assert spec["acquireTime"] < spec["renewTime"]


async def test_foreign_labels_are_kept(tmp_path):
    """Foreign fields of the Lease are written back."""
    async with lease_fixture(tmp_path) as (api, client):
        await client.write(FIRST)
        api.lease["metadata"]["labels"] = {"team": "a"}
        await client.read()
        await client.write(election.LeaseWrite("me", 15, 0, acquired=False, version="1"))
        assert api.lease["metadata"]["labels"] == {"team": "a"}


async def test_a_lost_race_is_a_conflict(tmp_path):
    """A write that comes second is refused, which is no failure; so is one to a deleted Lease."""
    async with lease_fixture(tmp_path) as (api, client):
        await client.write(FIRST)
        late = await client.write(FIRST)
        assert (late.conflict, "409" in late.message) == (True, True)
        api.lease = None
        gone = await client.write(election.LeaseWrite("me", 15, 0, acquired=False, version="1"))
        assert gone.conflict


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((403, "leases is forbidden"), ["403", 'verbs: ["get", "create", "update"]']),
        ((404, "namespaces not found"), ["404", "Lease n/l"]),
        ((500, "etcd is away"), ["500", "etcd is away"]),
    ],
)
async def test_refusals_are_reported(tmp_path, answer, words):
    """With the Lease, the status, the server's words and, where rights are missing, which."""
    async with lease_fixture(tmp_path) as (api, client):
        api.next = refused(*answer)
        failed = await client.write(FIRST)
        assert isinstance(failed, leader_elector.LeaseRequestFailed)
        assert not failed.conflict
        assert all(word in failed.message for word in words), failed.message


async def test_an_invalid_answer_is_a_failure(tmp_path):
    """Is a failure, not an error."""
    async with lease_fixture(tmp_path) as (api, client):
        api.next = web.Response(text="<html>")
        assert isinstance(await client.read(), leader_elector.LeaseRequestFailed)


async def test_a_server_without_an_answer_times_out(tmp_path):
    """Every call ends within half of what a leader has."""
    api = LeaseApi(tmp_path)
    with socket.create_server(("127.0.0.1", api.port)):
        async with opened(api.kubeconfig(), renew_s=0.2, retry_s=0.1) as client:
            async with asyncio.timeout(300):
                failed = await client.read()
    assert "no answer" in failed.message


async def test_a_rotated_token_is_used(tmp_path):
    """Refused once, it is read again for the next attempt."""
    async with lease_fixture(tmp_path) as (api, client):
        await client.write(FIRST)
        api.token = "new"
        api.kubeconfig("new")
        assert isinstance(await client.read(), leader_elector.LeaseRequestFailed)
        assert await client.read() == election.LeaseRecord("me", 15, 0, "1")


async def test_an_invalid_kubeconfig_is_refused(tmp_path):
    """Is an error at the start."""
    with pytest.raises(ConfigError, match="kubeconfig"):
        async with opened(str(tmp_path / "none")):
            pass


def test_identities_differ():
    """Two processes of one pod's name are two candidates."""
    first, second = (kubernetes_plan.process_identity({"POD_NAME": "a"}) for _ in range(2))
    assert first.startswith("a_")
    assert first != second
