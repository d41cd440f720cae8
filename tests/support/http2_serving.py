"""The native gRPC server on a loopback port, and handlers for calls of tests."""

from __future__ import annotations

import contextlib
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

from extproc.http2.limits import Http2Limits, ReceiveBudget
from extproc.http2.messages import GrpcStatus
from extproc.server import tls
from extproc.server.http2_protocol import CallFactory, Http2Protocol, ServerCall
from extproc.server.native_server import Http2Server
from extproc.server.transport import Keepalive

LOCAL = "127.0.0.1"

#: A peer that is starved of processor time is no vanished peer.
PATIENT = Keepalive(time_s=600.0, timeout_s=600.0)


class EchoCall(ServerCall):
    """Sends every message back, and ends when the client is done.

    Args:
        connection: Its connection.
        stream_id: Its stream.
        log: Takes what the call receives, and how it ends.
    """

    def __init__(
        self, connection: Http2Protocol, stream_id: int, log: list[object] | None = None
    ) -> None:
        super().__init__(connection, stream_id)
        self._log: list[object] = [] if log is None else log

    def on_message(self, message: bytes) -> None:
        """Send it back."""
        self._log.append(message)
        self.send((message,))

    def on_half_close(self) -> None:
        """End."""
        self._log.append("half_close")
        self.end(GrpcStatus.OK)

    def on_terminated(self) -> None:
        """Log it."""
        self._log.append("terminated")


@contextlib.asynccontextmanager
async def serve_native(
    routes: Mapping[str, CallFactory],
    *,
    pair: tuple[bytes, bytes] | None = None,
    keepalive: Keepalive = PATIENT,
    budget: int = 1 << 28,
    max_connections: int = 100,
    **limits: Any,
) -> AsyncIterator[tuple[Http2Server, int]]:
    """Serve on a free port; yields the server and the port.

    Args:
        routes: Handlers by path.
        pair: Key and certificate; None serves plaintext.
        keepalive: When silent connections are closed.
        budget: Bytes of incomplete messages.
        max_connections: Beyond them, connections are refused.
        limits: Fields of `Http2Limits`.
    """
    server = Http2Server(
        routes,
        limits=Http2Limits(**limits),
        budget=ReceiveBudget(budget),
        counts=Counter(),
        keepalive=keepalive,
        max_connections=max_connections,
    )
    context = None if pair is None else tls.build_context(pair)
    port = server.bind(f"{LOCAL}:0", None if context is None else lambda: context)
    await server.start()
    try:
        yield server, port
    finally:
        await server.stop(0.0)
        for connection in list(server.connections):
            connection.abort()


def client_context() -> ssl.SSLContext:
    """TLS of a client that verifies nothing and speaks HTTP/2."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context
