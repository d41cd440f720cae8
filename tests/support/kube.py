"""A plain client of the Kubernetes API, and the objects that tests put there.

It shares no code with the client that extproc watches through: what a test writes is what stands
in the test.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from tests.manifests import tools
from tests.support.kube_server import Access

#: An object as it stands in YAML.
Object = dict[str, Any]

POOL_V1 = "inference.networking.k8s.io/v1"
POOL_OLD = "inference.networking.x-k8s.io/v1alpha2"
LLM_D = "llm-d.ai/v1alpha2"

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"

_FIELD_MANAGER = "extproc-tests"

#: Seconds that something the server does by itself may take.
_LIMIT_S = 300.0

_numbers = itertools.count(1)


class Refused(Exception):  # noqa: N818 - an answer of the server
    """The server said no.

    Attributes:
        status: HTTP status.
        reason: Such as `Invalid` or `NotFound`.
    """

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(f"{status} {body.get('message') or body}")
        self.status = status
        self.reason = body.get("reason", "")


class Api:
    """The API as one user sees it; make it with `api`."""

    def __init__(self, session: aiohttp.ClientSession, access: Access) -> None:
        self.access = access
        self._session = session
        self._tls = access.tls()
        self._resources: dict[tuple[str, str], tuple[str, bool]] = {}
        self._wide: list[Object] = []

    async def call(
        self, method: str, path: str, body: Any = None, *, kind: str = "application/json"
    ) -> Object:
        """One request, as it is.

        Raises:
            Refused: Any status but 2xx.
        """
        headers = {"authorization": f"Bearer {self.access.token}"} if self.access.token else {}
        data = None if body is None else json.dumps(body)
        async with self._session.request(
            method,
            self.access.url + path,
            data=data,
            headers=headers | {"content-type": kind},
            ssl=self._tls,
        ) as answer:
            text = await answer.text()
            result = json.loads(text) if text[:1] == "{" else {"message": text}
            if answer.status >= 300:
                raise Refused(answer.status, result)
            return result

    async def path(self, item: Object, *, named: bool = True) -> str:
        """Path of an object; without `named` that of its collection.

        Raises:
            Refused: The server does not serve its kind.
        """
        version = item["apiVersion"]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        plural, namespaced = await self._resource(root, item["kind"])
        metadata = item["metadata"]
        inside = f"/namespaces/{metadata.get('namespace', 'default')}" if namespaced else ""
        return f"{root}{inside}/{plural}" + (f"/{metadata['name']}" if named else "")

    async def create(self, item: Object) -> Object:
        """Create an object, and its status as well where it has one."""
        built = await self.call("POST", await self.path(item, named=False), item)
        if item["kind"] in {"ClusterRole", "ClusterRoleBinding"}:
            self._wide.append(item)
        return await self.set_status(item) if item.get("status") else built

    async def set_status(self, item: Object) -> Object:
        """Write the status that an object holds."""
        return await self.patch(item, {"status": item["status"]}, part="/status")

    async def patch(self, item: Object, change: Any, *, part: str = "") -> Object:
        """Merge a change into an object or a subresource of it."""
        path = await self.path(item) + part
        return await self.call("PATCH", path, change, kind="application/merge-patch+json")

    async def apply(self, item: Object, *, dry_run: bool = False) -> Object:
        """Server-side apply, with every unknown or repeated field refused."""
        query = f"?fieldManager={_FIELD_MANAGER}&force=true&fieldValidation=Strict"
        query += "&dryRun=All" if dry_run else ""
        path = await self.path(item) + query
        return await self.call("PATCH", path, item, kind="application/apply-patch+yaml")

    async def get(self, item: Object) -> Object:
        """An object as the server has it."""
        return await self.call("GET", await self.path(item))

    async def delete(self, item: Object) -> None:
        """Delete an object without grace: no kubelet would end a pod of ours."""
        await self.call("DELETE", await self.path(item), {"gracePeriodSeconds": 0})

    async def define(self, definitions: Sequence[Object]) -> None:
        """Apply CustomResourceDefinitions and wait until they are served."""
        for definition in definitions:
            await self.apply(definition)
        async with asyncio.timeout(_LIMIT_S):
            for definition in definitions:
                while not await self._served(definition):
                    # The server establishes a definition in its own time.
                    await asyncio.sleep(0.1)

    async def undefine(self, definitions: Sequence[Object]) -> None:
        """Delete definitions with all their objects, and wait until they are gone."""
        for definition in definitions:
            with contextlib.suppress(Refused):
                await self.delete(definition)
        self._resources.clear()
        async with asyncio.timeout(_LIMIT_S):
            for definition in definitions:
                while await self._exists(definition):
                    await asyncio.sleep(0.1)

    async def namespace(self, prefix: str = "test") -> str:
        """Create a namespace of one's own; returns its name."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": f"{prefix}-"}}
        built = await self.call("POST", "/api/v1/namespaces", body)
        name = str(built["metadata"]["name"])
        self._wide.append(body | {"metadata": {"name": name}})
        return name

    async def tidy(self) -> None:
        """Delete every namespace and cluster role that was made here."""
        for item in self._wide:
            await self.delete(item)
        self._wide.clear()

    async def account(
        self, namespace: str, rules: Sequence[Object], *, everywhere: Sequence[Object] = ()
    ) -> Access:
        """A new ServiceAccount that may do this in its namespace and that everywhere.

        Args:
            namespace: Where it lives.
            rules: Of a Role.
            everywhere: Rules of a ClusterRole.
        """
        name = f"account-{next(_numbers)}-{namespace}"
        metadata = {"name": name, "namespace": namespace}
        core, rights = "v1", "rbac.authorization.k8s.io/v1"
        await self.create({"apiVersion": core, "kind": "ServiceAccount", "metadata": metadata})
        for kind, granted in (("Role", rules), ("ClusterRole", everywhere)):
            if not granted:
                continue
            role = {"apiVersion": rights, "kind": kind, "metadata": metadata, "rules": [*granted]}
            where = {"name": name} if kind == "ClusterRole" else metadata
            await self.create(role | {"metadata": where})
            await self.create(
                {
                    "apiVersion": rights,
                    "kind": f"{kind}Binding",
                    "metadata": where,
                    "roleRef": {
                        "apiGroup": "rbac.authorization.k8s.io",
                        "kind": kind,
                        "name": name,
                    },
                    "subjects": [{"kind": "ServiceAccount", **metadata}],
                }
            )
        return await self.token(namespace, name)

    async def token(self, namespace: str, name: str, *, seconds: int = 3600) -> Access:
        """A fresh token of a ServiceAccount that exists."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds},
        }
        built = await self.call("POST", path, request)
        return Access(self.access.url, self.access.authority, token=built["status"]["token"])

    async def _resource(self, root: str, kind: str) -> tuple[str, bool]:
        known = self._resources.get((root, kind))
        if known is None:
            for entry in (await self.call("GET", root))["resources"]:
                if "/" not in entry["name"]:
                    result = (entry["name"], entry["namespaced"])
                    self._resources[root, entry["kind"]] = result
            known = self._resources.get((root, kind))
        if known is None:
            raise Refused(404, {"reason": "NotFound", "message": f"no kind {kind} in {root}"})
        return known

    async def _served(self, definition: Object) -> bool:
        spec = definition["spec"]
        names = [version["name"] for version in spec["versions"]]
        for name in names:
            try:
                await self.call("GET", f"/apis/{spec['group']}/{name}/{spec['names']['plural']}")
            except Refused:
                return False
        return True

    async def _exists(self, item: Object) -> bool:
        try:
            await self.get(item)
        except Refused:
            return False
        return True


@contextlib.asynccontextmanager
async def api(access: Access):
    """A client for as long as the block runs."""
    connector = aiohttp.TCPConnector(limit=64)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Api(session, access)


def account_of(access: Access) -> str:
    """Name of the ServiceAccount that a token is for."""
    payload = access.token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return str(claims["sub"]).rpartition(":")[2]


def documents(text: str) -> list[Object]:
    """All objects of a YAML file."""
    return list(tools.documents(text))


def picker_rules(part: str = "base") -> list[Object]:
    """Rights of a picker from a part of our manifests, and no others."""
    result = documents((MANIFESTS / part / "rbac.yaml").read_text())
    (role,) = (item for item in result if item["kind"] in {"Role", "ClusterRole"})
    return role["rules"]


def definitions() -> list[Object]:
    """Our definitions of the inference objects."""
    files = sorted((MANIFESTS / "crds").glob("*.yaml"))
    result = [document for path in files for document in documents(path.read_text())]
    return [item for item in result if item["kind"] == "CustomResourceDefinition"]


# Objects


def pool(
    name: str,
    namespace: str,
    ports: Sequence[int] = (8000,),
    *,
    labels: Mapping[str, str] | None = None,
    picker: Mapping[str, Any] | None = None,
    **spec: Any,
) -> Object:
    """An InferencePool v1; its pods are labelled `app: name` by default."""
    chosen = {
        "selector": {"matchLabels": dict(labels or {"app": name})},
        "targetPorts": [{"number": number} for number in ports],
        **({"endpointPickerRef": dict(picker)} if picker else {}),
        **spec,
    }
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": POOL_V1, "kind": "InferencePool", "metadata": metadata, "spec": chosen}


def older_pool(namespace: str, labels: Mapping[str, str]) -> Object:
    """The InferencePool `vllm` of the older group, with port 8000."""
    return {
        "apiVersion": POOL_OLD,
        "kind": "InferencePool",
        "metadata": {"name": "vllm", "namespace": namespace},
        "spec": {
            "selector": dict(labels),
            "targetPortNumber": 8000,
            "extensionRef": {"name": "extproc"},
        },
    }


def pod(
    name: str,
    namespace: str,
    address: str,
    *,
    labels: Mapping[str, str],
    annotations: Mapping[str, str] | None = None,
    ready: bool = True,
) -> Object:
    """A pod that runs at an address; it is neither scheduled nor started."""
    metadata = {
        "name": name,
        "namespace": namespace,
        "labels": dict(labels),
        **({"annotations": dict(annotations)} if annotations else {}),
    }
    # A scheduler that does not exist, so that a real cluster leaves it alone as well.
    spec = {
        "schedulerName": "nobody",
        "automountServiceAccountToken": False,
        "containers": [{"name": "engine", "image": "engine"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": spec,
        "status": status(address, ready=ready),
    }


def status(address: str, *, ready: bool = True) -> Object:
    """The status of a pod that runs at an address."""
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
    }


def objective(
    name: str, namespace: str, pool_name: str, priority: int | None, *, version: str = LLM_D
) -> Object:
    """An InferenceObjective."""
    spec: Object = {"poolRef": {"name": pool_name}}
    if priority is not None:
        spec["priority"] = priority
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": version, "kind": "InferenceObjective", "metadata": metadata, "spec": spec}


def rewrite(
    name: str, namespace: str, pool_name: str, rules: Sequence[Object], *, version: str = LLM_D
) -> Object:
    """An InferenceModelRewrite."""
    spec = {"poolRef": {"name": pool_name}, "rules": list(rules)}
    metadata = {"name": name, "namespace": namespace}
    kind = "InferenceModelRewrite"
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
