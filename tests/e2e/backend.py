"""A backend that notes what it was sent, byte for byte, and answers as a test tells it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Awaitable, Callable

import msgspec

from tests.e2e import http1


class ReceivedRequest(msgspec.Struct, frozen=True):
    """One request as it arrived."""

    head: http1.Head
    size: int
    sha256: str
    body: bytes
    trailers: http1.Pairs = ()

    @property
    def path(self) -> str:
        return self.head.line.split()[1]


class HttpPeer:
    """The other end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def say(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def gone(self) -> None:
        """Wait until the peer hangs up."""
        await self._reader.read()

    def cut(self) -> None:
        """Reset the connection."""
        self._writer.transport.abort()


#: Answers a request; what it leaves unsaid is the test's affair.
Play = Callable[[ReceivedRequest, HttpPeer], Awaitable[None]]

EVENTS_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)

#: Bodies up to this size are kept as they are; of larger ones only the hash.
_KEPT_BYTES = 1 << 20


class Backend:
    """Listens on one loopback address.

    Attributes:
        address: `ip:port`.
        asks: Everything that arrived, in order of its end.
        plays: What to do by path; elsewhere a JSON answer that names the backend and the body.
    """

    def __init__(self) -> None:
        self.address = ""
        self.asks: list[ReceivedRequest] = []
        self.plays: dict[str, Play] = {}
        self._expected: list[asyncio.Future[None]] = []
        self._peers: set[HttpPeer] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        peer = HttpPeer(reader, writer)
        self._peers.add(peer)
        try:
            while (head := await http1.read_head(reader)) is not None:
                ask = await _read(head, http1.Body(reader, head))
                self.asks.append(ask)
                for future in self._expected:
                    future.set_result(None)
                self._expected.clear()
                await self.plays.get(ask.path, self._name)(ask, peer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._peers.discard(peer)
            writer.close()

    def arrival(self) -> asyncio.Future[None]:
        """Done when the next request has arrived; ask before it is sent."""
        future = asyncio.get_running_loop().create_future()
        self._expected.append(future)
        return future

    def cut(self) -> None:
        """Reset every connection."""
        for peer in self._peers:
            peer.cut()

    async def _name(self, ask: ReceivedRequest, peer: HttpPeer) -> None:
        body = json.dumps({"by": self.address, "bytes": ask.size, "sha256": ask.sha256}).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        quiet = ask.head.line.startswith("HEAD ")
        await peer.say(head.encode() + b"\r\n\r\n" + (b"" if quiet else body))


async def _read(head: http1.Head, body: http1.Body) -> ReceivedRequest:
    digest, size, stored = hashlib.sha256(), 0, []
    while piece := await body.piece():
        digest.update(piece)
        size += len(piece)
        if size <= _KEPT_BYTES:
            stored.append(piece)
    return ReceivedRequest(head, size, digest.hexdigest(), b"".join(stored), body.trailers)


def framed(piece: bytes) -> bytes:
    """One chunk of a chunked body; the empty one ends it."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


async def first_event(_: ReceivedRequest, peer: HttpPeer) -> None:
    """Send the first event of a stream, and nothing until the peer hangs up."""
    await peer.say(EVENTS_HEAD + framed(b"data: 1\n\n"))
    await peer.gone()


def two_events(observed: asyncio.Event) -> Play:
    """A stream whose second event exists only after the first one was observed."""

    async def play(_: ReceivedRequest, peer: HttpPeer) -> None:
        await peer.say(EVENTS_HEAD + framed(b"data: 1\n\n"))
        await observed.wait()
        await peer.say(framed(b"data: 2\n\n") + framed(b""))

    return play


def saying(*pieces: bytes, status: str = "200 OK", headers: http1.Pairs = ()) -> Play:
    """A play that answers in chunks."""
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers)]
    head = "\r\n".join([*lines, "transfer-encoding: chunked", "", ""]).encode()

    async def play(_: ReceivedRequest, peer: HttpPeer) -> None:
        await peer.say(b"".join([head, *map(framed, pieces), framed(b"")]))

    return play


@contextlib.asynccontextmanager
async def backend(host: str = "127.0.0.1", port: int = 0):
    """A backend on a free port, gone with its connections when the block ends."""
    served = Backend()
    server = await asyncio.start_server(served.serve, host, port, backlog=1024)
    served.address = "{}:{}".format(*server.sockets[0].getsockname()[:2])
    try:
        yield served
    finally:
        server.close()
        served.cut()
        await server.wait_closed()
