"""Listener for engines that connect to publish KV events, instead of being connected to.

An engine is known by the address that it connects from, which discovery has to list; where several
endpoints share that address, by the topic of its first message. Anything else is closed before it is
read. Connections are accepted a few at a time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from extproc.scrape.kv_event_connection import EngineConnection
from extproc.scrape.kv_event_subscription import EngineSubscription

#: Connections that are accepted at a time (count), and seconds until the next ones.
_ACCEPTED, _ACCEPT_PAUSE_S = 16, 0.01

#: Connections from one address per endpoint there (count): a new one may come before the old one is
#: known to be lost.
_MAX_PER_ENDPOINT: Final = 3

#: Seconds that a connection counts beyond its end: a peer that connects time and again costs little.
_RELEASE_S: Final = 0.5


class KvEventListener:
    """Listens on a port for the engines of one rank.

    Args:
        host: IP address to listen on; empty for every one of IPv4, `::` for every one.
        port: TCP port; 0 picks a free one.
        find: Returns the subscriptions of endpoints at an IP address.
        clock: Monotonic seconds.

    Raises:
        OSError: The port is taken, or the address is not one of this machine.

    Attributes:
        port: TCP port.
        num_refused: Connections that were closed because no endpoint has their address, there were
            too many from it, or they did not keep to the protocol (count).
        connections: Connections, and the IP addresses that they come from.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        find: Callable[[str], Sequence[EngineSubscription]],
        clock: Callable[[], float],
    ) -> None:
        self.find = find
        self.clock = clock
        self.num_refused = 0
        self.connections: dict[EngineConnection, str] = {}
        #: Subscriptions that connections are for, once that is known.
        self._subscriptions: dict[EngineConnection, EngineSubscription] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_at: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server(
            (host, port), family=family, dualstack_ipv6=host == "::"
        )
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._loop.add_reader(self._socket, self._on_readable)

    def check(self, now: float) -> None:
        """Close connections that are silent."""
        for connection in list(self.connections):
            connection.check(now)

    def close(self, why: str) -> None:
        """Stop listening, close all connections, and give the reason to subscriptions that go on."""
        self._loop.remove_reader(self._socket)
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()
        for task in self._tasks:
            task.cancel()
        for connection in list(self.connections):
            subscription = self._subscriptions.get(connection)
            connection.close()
            if subscription is not None:
                subscription.detach(connection, why)

    def on_made(self, connection: EngineConnection) -> None:
        """There is a connection, before its handshake."""

    def on_readable(self, connection: EngineConnection) -> None:
        """Let the subscription work that a connection is for, once that is known."""
        subscription = self._subscriptions.get(connection) or self._find_subscription(connection)
        if subscription is not None:
            subscription.wake()

    def on_closed(self, connection: EngineConnection, why: str | None) -> None:
        """Forget a connection that is closed."""
        self._release_later(self.connections.pop(connection))
        self.num_refused += bool(why)
        subscription = self._subscriptions.pop(connection, None)
        if subscription is not None and why is not None:
            subscription.detach(connection, why)

    def _on_readable(self) -> None:
        self._loop.remove_reader(self._socket)
        for _ in range(_ACCEPTED):
            try:
                accepted, peer = self._socket.accept()
            except OSError:  # there is none, or too many files are open
                break
            ip = plain_ip(peer[0])
            allowed = _MAX_PER_ENDPOINT * len(self.find(ip))
            if self._num_at[ip] >= allowed:
                self.num_refused += 1
                self._release(ip, 0)
                accepted.close()
                continue
            self._num_at[ip] += 1
            task = self._loop.create_task(self._open(accepted, ip), name="KV event connection")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._timer = self._loop.call_later(_ACCEPT_PAUSE_S, self._watch)

    def _find_subscription(self, connection: EngineConnection) -> EngineSubscription | None:
        """Attach a connection to the subscription that it is for; None while that is not known."""
        known = self.find(self.connections[connection])
        if len(known) > 1:
            first = connection.peek()
            if first is None:
                return None
            topic = first[0][:256].decode(errors="replace").split("@")
            known = [subscription for subscription in known if _is_named(subscription, topic)]
        if len(known) != 1 or known[0].is_resting:
            self.num_refused += 1
            connection.close()
            return None
        self._subscriptions[connection] = known[0]
        known[0].attach(connection)
        return known[0]

    def _watch(self) -> None:
        self._loop.add_reader(self._socket, self._on_readable)

    async def _open(self, accepted: socket.socket, ip: str) -> None:
        connection = EngineConnection(self, b"SUB", self.clock)
        self.connections[connection] = ip
        try:
            await self._loop.connect_accepted_socket(lambda: connection, accepted)
        except BaseException as error:
            if self.connections.pop(connection, None) is not None:
                self._release_later(ip)
            accepted.close()
            if not isinstance(error, OSError):  # the peer may be gone already
                raise

    def _release_later(self, ip: str) -> None:
        self._loop.call_later(_RELEASE_S, self._release, ip)

    def _release(self, ip: str, count: int = 1) -> None:
        self._num_at[ip] -= count
        if self._num_at[ip] <= 0:
            del self._num_at[ip]


def _is_named(subscription: EngineSubscription, topic: Sequence[str]) -> bool:
    """True if a part of a topic, as in `kv@10.0.0.1:8000@model`, names its endpoint."""
    endpoint = subscription.endpoint
    return endpoint.host_port in topic or bool(endpoint.name and endpoint.name in topic)


def plain_ip(ip: str) -> str:
    """An IP address in its usual form, IPv4 without the IPv6 around it; another text as it is."""
    try:
        address = ipaddress.ip_address(ip.partition("%")[0])
    except ValueError:
        return ip
    return str(getattr(address, "ipv4_mapped", None) or address)
