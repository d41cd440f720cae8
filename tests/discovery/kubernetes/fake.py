"""An API server in memory that speaks real HTTP: lists, pages, watches, and what goes wrong.

It keeps objects with resource versions and a history, as the real one does; `break_next` and the
like make it misbehave.
"""

import asyncio
import collections
import json
import socket

from aiohttp import web

from tests.support.canary import CANARY

PLURALS = {
    "Pod": "pods",
    "InferencePool": "inferencepools",
    "InferenceObjective": "inferenceobjectives",
    "InferenceModelRewrite": "inferencemodelrewrites",
    "EndpointSlice": "endpointslices",
}


def key_of(value):
    group = value["apiVersion"].rpartition("/")[0]
    return group, PLURALS[value["kind"]]


class FakeApiServer:
    def __init__(self):
        self.version = 100
        self.oldest = 0
        self.objects = {}
        self.history = []
        self.absent = set()
        self.forbidden = set()
        self.token = ""
        self.answers = collections.deque()
        self.requests = []
        self.watchers = {}
        self.moved = asyncio.Condition()
        self._runner = None
        self._listener = None
        # Holds the port while the server is down, lest another process take it.
        self._place = socket.socket()
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._place.bind(("127.0.0.1", 0))
        self.port = self._place.getsockname()[1]

    async def start(self):
        application = web.Application()
        application.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.05)
        await self._runner.setup()
        self._listener = await asyncio.get_running_loop().create_server(
            self._runner.server, "127.0.0.1", self.port, reuse_port=True
        )
        return self

    async def stop(self):
        self.drop()
        for listening in self._listener.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        # From the accepted socket to the connection it takes asyncio some turns. If the listener is
        # closed in the first one, asyncio loses the socket without closing it; a connection that is
        # made once aiohttp has stopped is never answered.
        for _ in range(10):
            await asyncio.sleep(0)
        self._listener.close()
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    async def close(self):
        await self.stop()
        self._place.close()

    def kubeconfig(self, folder):
        (folder / "token").write_text(self.token or CANARY)
        path = folder / "kubeconfig"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                    "clusters": [
                        {"name": "k", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
                    ],
                    "users": [{"name": "u", "user": {"tokenFile": str(folder / "token")}}],
                }
            )
        )
        return str(path)

    def put(self, *values):
        for value in values:
            about = value["metadata"]
            known = self.objects.setdefault(key_of(value), {})
            name = (about["namespace"], about["name"])
            self._log("MODIFIED" if name in known else "ADDED", value)
            known[name] = self.history[-1][2]
        self._wake()

    def delete(self, *values):
        for value in values:
            about = value["metadata"]
            known = self.objects.get(key_of(value), {})
            gone = known.pop((about["namespace"], about["name"]), None)
            if gone is not None:
                self._log("DELETED", gone)
        self._wake()

    def _log(self, kind, value):
        self.version += 1
        value = json.loads(json.dumps(value))
        value["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, value))

    def compact(self):
        """Forget the history, so that every resumption is 410 Gone; open watches miss nothing."""
        self.version += 1
        self.oldest = self.version

    def drop(self, *, last=b""):
        """End all watches without a word, or with some bytes of a last one."""
        for event, deliveries in self.watchers.items():
            deliveries.append(("DROP", last))
            event.set()
        self.watchers = {}

    def send(self, text):
        """The same bytes on every watch."""
        for event, deliveries in self.watchers.items():
            deliveries.append(("SEND", text))
            event.set()

    def _wake(self):
        for event in self.watchers:
            event.set()

    async def _answer(self, request):
        self.requests.append((request.path, dict(request.query)))
        async with self.moved:
            self.moved.notify_all()
        if self.answers:
            return await self.answers.popleft()(request)
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return refuse(401, "Unauthorized")
        group, plural, namespace = where(request.path)
        if (group, plural) in self.absent:
            return web.Response(status=404, text="404 page not found")
        if (group, plural) in self.forbidden:
            return refuse(403, f'{plural}.{group} is forbidden: User "x" cannot list')
        matching = Matching(group, plural, namespace, request.query)
        if request.query.get("watch"):
            return await self._watch(request, matching)
        return self.list_objects(request, matching)

    def list_objects(self, request, matching):
        values = [
            value
            for _, value in sorted(self.objects.get(matching.path, {}).items())
            if matching(value)
        ]
        token = request.query.get("continue", "")
        if token and int(token.partition(":")[2]) < self.oldest:
            return refuse(410, "The provided continue parameter is too old")
        at = int(token.partition(":")[0]) if token else 0
        limit = int(request.query.get("limit", "500"))
        version = token.partition(":")[2] or str(self.version)
        more = f"{at + limit}:{version}" if at + limit < len(values) else ""
        about = {"resourceVersion": version, "continue": more}
        return web.json_response({"metadata": about, "items": values[at : at + limit]})

    async def _watch(self, request, matching):
        after = int(request.query["resourceVersion"])
        if after < self.oldest:
            return refuse(410, f"too old resource version: {after} ({self.oldest})")
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        event, deliveries = asyncio.Event(), collections.deque()
        self.watchers[event] = deliveries
        async with self.moved:
            self.moved.notify_all()
        try:
            while True:
                event.clear()
                while deliveries:
                    kind, text = deliveries.popleft()
                    if text:
                        await response.write(text)
                    if kind == "DROP":
                        if text:
                            request.transport.abort()
                        return response
                for version, kind, value in [entry for entry in self.history if entry[0] > after]:
                    after = version
                    line = b"" if matching.path != key_of(value) else matching.line(kind, value)
                    if line:
                        await response.write(line)
                await event.wait()
        finally:
            self.watchers.pop(event, None)

    async def until_watched(self, count=6, timeout_s=300.0):
        """Waits for so many watches: 6 are those of one InferencePool."""
        async with asyncio.timeout(timeout_s), self.moved:
            await self.moved.wait_for(lambda: len(self.watchers) >= count)

    async def until(self, true, timeout_s=300.0):
        """Waits for something to be true of the requests seen."""
        async with asyncio.timeout(timeout_s), self.moved:
            await self.moved.wait_for(lambda: true(self.requests))


class Matching:
    """Selects the objects of a collection."""

    def __init__(self, group, plural, namespace, query):
        self.path, self.namespace = (group, plural), namespace
        pairs = query.get("labelSelector", "")
        self.labels = dict(pair.split("=") for pair in pairs.split(",")) if pairs else {}
        self.name = query.get("fieldSelector", "").removeprefix("metadata.name=")

    def __call__(self, value):
        about = value["metadata"]
        labels = about.get("labels")
        labels = labels if isinstance(labels, dict) else {}
        return (
            self.namespace in {"", about["namespace"]}
            and self.name in {"", about["name"]}
            and self.labels.items() <= labels.items()
        )

    def line(self, kind, value):
        """An event as a watch shows it; with a selector, an object that stops matching is deleted."""
        about = value["metadata"]
        if not self(value):
            if not self.labels or self.namespace not in {"", about["namespace"]}:
                return b""
            kind = "DELETED"
        return json.dumps({"type": kind, "object": value}).encode() + b"\n"


def where(path):
    parts = path.strip("/").split("/")
    group = parts[1] if parts[0] == "apis" else ""
    rest = parts[3:] if parts[0] == "apis" else parts[2:]
    namespace = rest[1] if rest[0] == "namespaces" else ""
    return group, rest[-1], namespace


def refuse(code, message, **headers):
    body = {"kind": "Status", "status": "Failure", "code": code, "message": message}
    return web.json_response(body, status=code, headers=headers)
