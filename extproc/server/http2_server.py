"""The native gRPC server: its addresses and open connections."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections import Counter
from collections.abc import Mapping

from extproc.http2.limits import Http2Limits, ReceiveBudget
from extproc.http2.sender import SendBudget
from extproc.server import listeners
from extproc.server.http2_protocol import CallFactory, Http2Protocol
from extproc.server.listeners import Keepalive

_log = logging.getLogger("extproc.server")

#: Seconds of a TLS handshake, after which its connection is closed.
_HANDSHAKE_S = 10.0

#: Seconds between two log lines about connections that are refused.
_LOG_S = 60.0


class Http2Server:
    """Native gRPC server on any number of addresses.

    Args:
        routes: Handlers by path of the method.
        limits: Limits of each connection.
        budget: Limit on incomplete messages.
        counts: Calls and connections that ended by a limit or a violation; updated here.
        keepalive: When silent connections are pinged and closed.
        max_connections: Open connections above which further ones are refused (count).

    Attributes:
        send_budget: Limit on the answers that wait on all of them.
        is_stopping: True once `stop` was called.
    """

    def __init__(
        self,
        routes: Mapping[str, CallFactory],
        *,
        limits: Http2Limits,
        budget: ReceiveBudget,
        counts: Counter[str],
        keepalive: Keepalive,
        max_connections: int,
    ) -> None:
        self.routes = routes
        self.limits = limits
        self.budget = budget
        self.counts = counts
        self.keepalive = keepalive
        self.connections: set[Http2Protocol] = set()
        self.send_budget = SendBudget(limits.max_total_unsent_bytes)
        self.is_stopping = False
        self._max_connections = max_connections
        self._logged_at = -math.inf
        self._sockets: list[tuple[socket.socket, ssl.SSLContext | None]] = []
        self._listeners: list[asyncio.Server] = []
        self._gone: asyncio.Event = asyncio.Event()

    def bind(self, address: str, tls: ssl.SSLContext | None) -> int:
        """Bind to a further address; returns the port.

        Args:
            address: `host:port` or `[host]:port`; `[::]` is every address of both families.
            tls: None serves plaintext.

        Raises:
            OSError: The address cannot be bound.
        """
        host, _, port = address.rpartition(":")
        bound = listeners.bind_socket(host.strip("[]"), int(port))
        self._sockets.append((bound, tls))
        return int(bound.getsockname()[1])

    async def start(self) -> None:
        """Accept connections."""
        for bound, tls in self._sockets:
            self._listeners.append(
                await asyncio.get_running_loop().create_server(
                    lambda: Http2Protocol(self),
                    sock=bound,
                    ssl=tls,
                    ssl_handshake_timeout=None if tls is None else _HANDSHAKE_S,
                    backlog=listeners.BACKLOG,
                )
            )
        self._sockets = []

    def release_sockets(self) -> None:
        """Close the sockets of a server that was not started."""
        for bound, _ in self._sockets:
            bound.close()
        self._sockets = []

    async def stop(self, grace_s: float | None) -> None:
        """Stop accepting, announce the end, and close connections that are open after `grace_s`.

        Peers close their connections once their streams ended: closing them from here could cut
        what they have not read.

        Args:
            grace_s: None closes them at once.
        """
        self.is_stopping = True
        self.release_sockets()
        for listener in self._listeners:
            listener.close()
        for connection in self.connections:
            connection.start_drain()
        if self.connections:
            try:
                await asyncio.wait_for(self._gone.wait(), grace_s or 0.0)
            except TimeoutError:
                for connection in list(self.connections):
                    connection.close()

    def on_connected(self, connection: Http2Protocol) -> bool:
        """Take a connection; False if it is to be closed, because there are too many."""
        if len(self.connections) < self._max_connections:
            self.connections.add(connection)
            return True
        self.counts["connections"] += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= _LOG_S:
            self._logged_at = now
            _log.warning(
                "a connection is refused: wanted fewer than %d, the most that the limit of open "
                "files allows; raise it (ulimit -n), or look who holds them",
                self._max_connections,
            )
        return False

    def on_lost(self, connection: Http2Protocol) -> None:
        """Forget a connection."""
        self.connections.discard(connection)
        if self.is_stopping and not self.connections:
            self._gone.set()
