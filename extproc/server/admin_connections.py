"""Bounds connections to the metrics port: whatever reaches it may connect, and send nothing."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
from collections import Counter
from typing import Any, Final

from aiohttp import web

_log = logging.getLogger("extproc.server")

#: Connections at most (count), and the share of the open files of the process.
MAX_CONNECTIONS: Final = 1024
_FILE_SHARE: Final = 1 / 8

#: Connections from one address at most (count): so no other takes those of probes and Prometheus.
MAX_PER_ADDRESS: Final = 128

#: Seconds in which closed connections are logged once.
_REPEAT_S: Final = 60.0

#: Seconds within which the head of a first request must arrive, and a connection may be unused then.
FIRST_REQUEST_S: Final = 30.0
KEEPALIVE_S: Final = 120.0


class ConnectionLimiter:
    """Closes connections beyond the bounds. Mutable; on the event loop only.

    Args:
        server: The server of aiohttp, before it listens.
    """

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._addresses: Counter[str] = Counter()
        self._waiting: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        self._known: dict[web.RequestHandler, str] = {}
        self._logged_at = -math.inf
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_connections = min(MAX_CONNECTIONS, max(1, int(files * _FILE_SHARE)))
        self._on_opened, self._on_closed = server.connection_made, server.connection_lost
        self._build_request = server.request_factory
        # aiohttp has no public hook for connections.
        server.connection_made = self._open  # type: ignore[method-assign]
        server.connection_lost = self._close  # type: ignore[method-assign]
        server.request_factory = self._begin

    def _open(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        self._on_opened(handler, transport)
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if peer else ""
        count, loop = self._addresses[address], asyncio.get_running_loop()
        if len(self._known) >= self._max_connections or count >= MAX_PER_ADDRESS:
            if loop.time() - self._logged_at >= _REPEAT_S:
                self._logged_at = loop.time()
                _log.warning(
                    "the metrics port closes connections: %d are open, %d of them from %s",
                    len(self._known),
                    count,
                    address,
                )
            # Not at once: aiohttp is about to start the task of the connection.
            loop.call_soon(transport.abort)
            return
        self._known[handler] = address
        self._addresses[address] += 1
        self._waiting[handler] = loop.call_later(FIRST_REQUEST_S, transport.abort)

    def _begin(self, message: Any, payload: Any, protocol: Any, *more: Any) -> Any:
        timer = self._waiting.pop(protocol, None)
        if timer is not None:
            timer.cancel()
        return self._build_request(message, payload, protocol, *more)

    def _close(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        self._on_closed(handler, exc)
        timer = self._waiting.pop(handler, None)
        if timer is not None:
            timer.cancel()
        address = self._known.pop(handler, None)
        if address is not None:
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]
