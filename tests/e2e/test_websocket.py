"""WebSockets through a real Envoy: the client sends nothing before the engine answered."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.e2e import http1, installation
from tests.support import serving

UPGRADE = (
    b"GET /v1/realtime HTTP/1.1\r\nhost: test\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"


@contextlib.asynccontextmanager
async def echoing():
    """An engine that switches protocols and sends back what it receives; yields its address."""

    async def serve(reader, writer):
        with contextlib.suppress(ConnectionError):
            if await http1.read_head(reader) is not None:
                writer.write(SWITCHING)
                while data := await reader.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def let_upgrade(config):
    """Let Envoy upgrade connections, as gateways do."""
    installation.manager(config)["upgrade_configs"] = [{"upgrade_type": "websocket"}]


@pytest.fixture(scope="module")
def place(live):
    with (
        live.holding(echoing()) as address,
        live.holding(installation.installed(address, change=let_upgrade)) as item,
    ):
        yield item


async def test_a_websocket_is_routed_by_its_headers(place):
    """Both directions pass, while the stream of ext_proc is open."""
    async with asyncio.timeout(serving.LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", place.ports.listener)
        writer.write(UPGRADE)
        head = await http1.read_head(reader)
        assert head.line.split()[1] == "101"
        for piece in (b"hello", bytes(100_000), b"bye"):
            writer.write(piece)
            assert await reader.readexactly(len(piece)) == piece
        writer.close()
