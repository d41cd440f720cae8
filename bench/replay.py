"""A proxy of an API server that adds pod updates to its watches at any rate.

The real one, with etcd and the writers on the same two cores, does not come near 1,000 writes a
second. What a watch says is as large as what the real one says: every event holds a whole pod as
the real server lists it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import ssl
from collections.abc import Iterator
from pathlib import Path

from tests.support import kube, kube_server

#: Seconds between writes to the connection: the real server flushes about as finely.
_TICK_S = 0.01


class ReplayServer:
    """Listens as the real server does.

    Attributes:
        access: How to reach it.
        sent: Events so far.
        event_bytes: Mean size of one.
        rate: Events per second; 0 while it is quiet.
    """

    def __init__(self, api: kube.Api, namespace: str) -> None:
        self.access = api.access
        self.sent = 0
        self.event_bytes = 0
        self.rate = 0.0
        self._api = api
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._version = 0
        self._events: Iterator[bytes] = iter(())
        self._connections: dict[asyncio.Task, asyncio.StreamWriter] = {}

    async def prepare(self) -> None:
        """Take the pods as the real server lists them."""
        listed = await self._api.call("GET", self._pods)
        # Ahead of anything the real one gives out meanwhile.
        self._version = int(listed["metadata"]["resourceVersion"]) + 1_000_000
        pairs = [(_around(pod, ready=True), _around(pod, ready=False)) for pod in listed["items"]]
        sizes = [len(before) + len(after) for (before, after), _ in pairs]
        self.event_bytes = sum(sizes) // len(sizes)
        self._events = self._make(pairs)

    def _make(self, pairs) -> Iterator[bytes]:
        chance = random.Random(13)
        unready: set[int] = set()
        while True:
            at = chance.randrange(len(pairs))
            if chance.random() < 0.1:
                unready ^= {at}
            before, after = pairs[at][at in unready]
            self._version += 1
            yield before + str(self._version).encode() + after

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self._connections[asyncio.current_task()] = writer
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while head := await _head(reader):
                target = head.split(b" ", 2)[1].decode()
                if "watch=true" in target:
                    await self._watch(writer, events=target.startswith(self._pods))
                    return
                await self._hand_on(target, writer)

    async def close(self) -> None:
        """End every connection."""
        for writer in self._connections.values():
            writer.close()
        await asyncio.wait(self._connections)

    async def _hand_on(self, target: str, writer: asyncio.StreamWriter) -> None:
        try:
            status, answer = "200 OK", await self._api.call("GET", target)
        except kube.Refused as refused:
            status, answer = f"{refused.status} Refused", {"message": str(refused)}
        body = json.dumps(answer).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await writer.drain()

    async def _watch(self, writer: asyncio.StreamWriter, *, events: bool) -> None:
        head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked"
        writer.write(head.encode() + b"\r\n\r\n")
        clock = asyncio.get_running_loop().time
        last = clock()
        due = 0.0
        while not writer.is_closing():
            await asyncio.sleep(_TICK_S)
            now = clock()
            due += (now - last) * self.rate * events
            last = now
            for _ in range(int(due)):
                event = next(self._events)
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                self.sent += 1
            due -= int(due)
            await writer.drain()


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def _around(pod: kube.Object, *, ready: bool) -> tuple[bytes, bytes]:
    """An event's bytes before and behind the resource version."""
    mark = "the-version"
    metadata = pod["metadata"] | {"resourceVersion": mark}
    status = pod["status"] | {"conditions": kube.status("", ready=ready)["conditions"]}
    pod_object = {"kind": "Pod", "apiVersion": "v1", **pod, "metadata": metadata, "status": status}
    event = json.dumps({"type": "MODIFIED", "object": pod_object}, separators=(",", ":")) + "\n"
    before, _, after = event.encode().partition(mark.encode())
    return before, after


@contextlib.asynccontextmanager
async def replay(api: kube.Api, namespace: str, certificates: Path):
    """A replay of a namespace, for as long as the block runs.

    Args:
        api: Of the real server.
        namespace: Whose pods.
        certificates: Folder with the real server's own.
    """
    proxy = ReplayServer(api, namespace)
    await proxy.prepare()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, ssl=tls)
    host, port = server.sockets[0].getsockname()
    # The token is not checked.
    proxy.access = kube_server.Access(f"https://{host}:{port}", api.access.authority, token="any")
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
