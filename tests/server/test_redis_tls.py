"""TLS between a replica and a store: a loopback server that ends connections after the handshake."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import time

import pytest
from redis.exceptions import RedisError

from extproc.config.settings import PeerSyncSection
from extproc.server import redis_peer_channel
from tests.server.peer_replica import sites
from tests.support.certificates import write_certificate


class TlsServer:
    """Counts the connections whose handshake succeeded."""

    def __init__(self, path) -> None:
        self.num_connected = 0
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(path, path.with_suffix(".key"))

    async def answer(self, _, writer):
        self.num_connected += 1
        writer.close()


@contextlib.asynccontextmanager
async def channel_to(server: TlsServer, authority):
    """A channel that trusts a file."""
    async with await asyncio.start_server(server.answer, "127.0.0.1", ssl=server.context) as bound:
        port = bound.sockets[0].getsockname()[1]
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority}"
        settings = PeerSyncSection(url=url)
        channel = redis_peer_channel.RedisPeerChannel(settings, sites(), time.monotonic)
        yield channel
        await channel.close()


async def test_an_untrusted_certificate_is_named_in_the_log(tmp_path, caplog):
    """The class of the client's error is the same for all that can be wrong with TLS."""
    wanted = iter([True, False])
    other = write_certificate(tmp_path, "other")
    async with channel_to(TlsServer(write_certificate(tmp_path, "server")), other) as channel:
        channel.publish_open()
        await channel.repeat("publish", channel.flush, is_wanted=lambda: next(wanted))
    (line,) = caplog.messages
    assert line.startswith("peer sync: cannot publish: ConnectionError self")


async def test_changed_files_of_tls_are_read_by_the_next_connection(tmp_path):
    """A running replica trusts a new authority after the connection that failed for it."""
    authority = tmp_path / "authority.crt"
    shutil.copy(write_certificate(tmp_path, "other"), authority)
    path = write_certificate(tmp_path, "server")
    server = TlsServer(path)
    async with channel_to(server, authority) as channel:
        for num_connected in (0, 1):
            channel.publish_open()
            with pytest.raises(RedisError):
                await channel.flush()
            assert server.num_connected == num_connected
            shutil.copy(path, authority)
