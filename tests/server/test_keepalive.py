"""Connections whose peer vanished, and those whose peer only says nothing."""

from __future__ import annotations

import asyncio
import contextlib

from extproc.server import health, transport
from tests.support import serving

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1
LOCAL = "127.0.0.1"


def frame(kind, flags, payload=b""):
    """An HTTP/2 frame of the connection (RFC 9113 section 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags, 0, 0, 0, 0]) + payload


class PingPeer:
    """An HTTP/2 client that answers pings only where it is to."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer

    async def read(self):
        """The next frame: its kind, its flags and its payload."""
        head = await self.reader.readexactly(9)
        payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        return head[3], head[4], payload

    async def ping(self):
        """The payload of the server's next ping."""
        while True:
            kind, flags, payload = await self.read()
            if kind == PING and not flags & ACK:
                return payload


@contextlib.asynccontextmanager
async def connected(keepalive):
    """A client of a listener, and nothing said but the preface."""
    readiness = health.Readiness(lambda: True)
    async with serving.serving_health(readiness, keepalive) as port:
        reader, writer = await asyncio.open_connection(LOCAL, port)
        writer.write(PREFACE + frame(SETTINGS, 0))
        try:
            yield PingPeer(reader, writer)
        finally:
            writer.close()


async def test_listener_ends_the_connection_of_a_lost_peer():
    """A peer that answers no ping is disconnected, also where it has no stream."""
    async with connected(transport.Keepalive(0.05, 0.05)) as peer:
        await peer.ping()
        with contextlib.suppress(ConnectionError):
            await peer.reader.read()


async def test_listener_pings_a_silent_peer_again_and_again():
    """A peer that answers its pings stays connected however long it says nothing else."""
    async with connected(transport.Keepalive(0.05, 600.0)) as peer:
        for _ in range(10):
            peer.writer.write(frame(PING, ACK, await peer.ping()))


async def test_listener_accepts_frequent_pings():
    """Envoy may ask whether a connection lives while nothing else is said on it."""
    async with connected(transport.Keepalive()) as peer:
        for _ in range(2):
            peer.writer.write(frame(PING, 0, b"8 bytes."))
            while True:
                kind, flags, payload = await peer.read()
                assert kind != GOAWAY
                if kind == PING and flags & ACK:
                    assert payload == b"8 bytes."
                    break


def test_keepalive_notices_a_lost_node_within_half_a_minute():
    """Requests on a lost node are released within that time."""
    keepalive = transport.Keepalive()
    assert keepalive.time_s + keepalive.timeout_s <= 30.0


def test_keepalive_waits_for_a_starved_peer():
    """A peer that gets no processor time for seconds keeps its connection and its requests."""
    assert transport.Keepalive().timeout_s >= 20.0
