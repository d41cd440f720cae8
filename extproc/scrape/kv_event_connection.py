"""Connections with engines for KV events: ZMTP over TCP, accepted or opened by us.

What a peer sends waits in its own socket until it is worked off, so that it takes neither memory nor
the event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, cast

from extproc.prefix_cache import kv_events
from extproc.scrape.zmtp import SocketType, ZmtpError, ZmtpParser
from extproc.supervision import Supervisor

if TYPE_CHECKING:
    from extproc.scrape.kv_event_subscription import EngineSubscription

#: Bytes that a connection may have read and not worked off; more than the longest message.
_MAX_BUFFERED: Final = kv_events.MAX_BATCH_BYTES + 65_536

#: Seconds between looks for signs of life, and of them without any until a connection is lost (count).
#: At the second one in a row, and after, the peer is asked.
_HEARTBEAT_S, _MAX_SILENT = 0.5, 3

#: Seconds within which the handshake has to be over.
_HANDSHAKE_S: Final = 5.0

#: Seconds within which a connection is made, and until the next attempt, at first and at most.
_CONNECT_S: Final = 5.0
_RECONNECT_S, _MAX_RECONNECT_S = 0.1, 5.0

#: Options of TCP by which the system notices within two seconds that a peer has vanished, where it
#: has them (seconds, count): for peers without heartbeats.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 1}


#: What is read from a connection at a time.
_BUFFER: Final = bytearray(65_536)


#: Connections that are accepted at a time (count), and seconds until the next ones.
_ACCEPTED, _ACCEPT_PAUSE_S = 16, 0.01

#: Connections from one address per endpoint there (count): a new one may come before the old one is
#: known to be lost.
_MAX_PER_ENDPOINT: Final = 3

#: Seconds that a connection counts beyond its end: a peer that connects time and again costs little.
_RELEASE_S: Final = 0.5


class ConnectionOwner(Protocol):
    """Receives the events of a connection that it opened or accepted."""

    def on_made(self, connection: EngineConnection) -> None:
        """There is a connection, before its handshake."""

    def on_readable(self, connection: EngineConnection) -> None:
        """Bytes have come behind the handshake, or its last ones."""

    def on_closed(self, connection: EngineConnection, why: str | None) -> None:
        """It is closed: by us (None), by a peer that has gone (empty) or broke a rule (which)."""


class EngineConnection(asyncio.BufferedProtocol):
    """Connection in ZMTP, whose messages are parsed once they are asked for.

    Args:
        socket_type: Type of our socket.
        clock: Monotonic seconds.
    """

    def __init__(
        self, owner: ConnectionOwner, socket_type: SocketType, clock: Callable[[], float]
    ) -> None:
        self._owner = owner
        self._parser = ZmtpParser(socket_type, kv_events.MAX_BATCH_BYTES)
        self._transport: asyncio.Transport | None = None
        #: Message that was looked at, until it is taken.
        self._first: list[bytes] | None = None
        now = clock()
        self._until = now + _HANDSHAKE_S
        self._ping_at = now + _HEARTBEAT_S
        self._num_silent = 0
        self._is_paused = False

    @property
    def is_open(self) -> bool:
        """True from the end of the handshake until it is closed."""
        return self._parser.is_open and self._transport is not None

    @property
    def num_buffered(self) -> int:
        """Bytes that were read and not worked off (count)."""
        return self._parser.num_buffered

    def is_answered(self) -> bool:
        """True if the peer sent something since the last look for signs of life."""
        return not self._num_silent

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the peer."""
        self._transport = cast("asyncio.Transport", transport)
        _keep_alive(transport.get_extra_info("socket"))
        self._owner.on_made(self)
        self._flush()

    def get_buffer(self, _: int) -> bytearray:
        """One buffer for all connections: what is read is taken from it at once."""
        return _BUFFER

    def buffer_updated(self, num_bytes: int) -> None:
        """Keep what came until it is asked for."""
        if self._transport is None:
            return
        self._num_silent = 0
        with memoryview(_BUFFER) as view:
            self._parser.feed(view[:num_bytes])
        if self._parser.num_buffered >= _MAX_BUFFERED and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        if not self._parser.is_open:
            self.peek()
        if self.is_open:
            self._owner.on_readable(self)

    def connection_lost(self, _: Exception | None) -> None:
        """The peer has gone."""
        self._close("")

    def peek(self) -> list[bytes] | None:
        """Frames of the next message, which stays the next one; None where there is none."""
        if self._first is None:
            self._first = self.receive()
        return self._first

    def receive(self) -> list[bytes] | None:
        """Frames of the next message; None where there is none."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._transport is None:
            return None
        try:
            frames = self._parser.receive()
        except ZmtpError as error:
            self._close(str(error))
            return None
        if self._is_paused and self._parser.num_buffered < _MAX_BUFFERED // 2:
            self._is_paused = False
            self._transport.resume_reading()
        self._flush()
        return frames

    def send(self, *frames: bytes) -> None:
        """Send a message, whose frames have 255 bytes at most."""
        self._parser.send(frames)
        self._flush()

    def check(self, now: float) -> None:
        """Close it if the peer is silent, else send a PING."""
        if not self._parser.is_open:
            if now >= self._until:
                self._close("no handshake")
        elif now >= self._ping_at and self._parser.has_heartbeats and not self._is_paused:
            # By looks, not by time: a late event loop is no silent peer.
            self._ping_at = now + _HEARTBEAT_S
            self._num_silent += 1
            if self._num_silent > _MAX_SILENT:
                self._close("")
            elif self._num_silent > 1:
                self._parser.ping()
                self._flush()

    def close(self) -> None:
        """Close it."""
        self._close(None)

    def _flush(self) -> None:
        if self._parser.output and self._transport is not None:
            self._transport.write(bytes(self._parser.output))
            self._parser.output.clear()
            if self._transport.get_write_buffer_size() > _MAX_BUFFERED:
                self._close("it asks for answers, and does not read them")

    def _close(self, why: str | None) -> None:
        transport, self._transport = self._transport, None
        self._first = None
        if transport is not None:
            transport.abort()
            self._owner.on_closed(self, why)


class EngineConnector:
    """Connects to an engine, and again where that fails or the connection is lost, with back-off.

    Args:
        address: IP address or name, and TCP port.
        wait_s: Seconds until the first attempt.
        on_open: Called with each connection behind its handshake.
        on_readable: Called when there may be messages.
        on_lost: Called with the reason when a connection is lost that was open.
    """

    def __init__(  # noqa: PLR0913 - three of them are callbacks
        self,
        address: tuple[str, int],
        socket_type: SocketType,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        supervisor: Supervisor,
        wait_s: float = 0.0,
        on_open: Callable[[EngineConnection], None],
        on_readable: Callable[[], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._address = address
        self._socket_type: SocketType = socket_type
        self._clock = clock
        self._rng = rng
        self._on_open = on_open
        self._on_readable = on_readable
        self._on_lost = on_lost
        self._connection: EngineConnection | None = None
        self._is_open = False
        self._closed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(
            supervisor.keep("kv_events", partial(self._run, wait_s), instance=str(address)),
            name="KV event connection",
        )

    def receive(self) -> list[bytes] | None:
        """Frames of the next message; None where there is none."""
        return None if self._connection is None else self._connection.receive()

    def check(self, now: float) -> None:
        """Close a connection that is silent."""
        if self._connection is not None:
            self._connection.check(now)

    def close(self) -> None:
        """Close the connection, and make no other."""
        self._task.cancel()
        if self._connection is not None:
            self._connection.close()

    def on_made(self, connection: EngineConnection) -> None:
        """There is a connection, before its handshake."""
        self._connection = connection

    def on_readable(self, connection: EngineConnection) -> None:
        """Bytes have come behind the handshake, or its last ones."""
        if not self._is_open:
            self._is_open = True
            self._on_open(connection)
        self._on_readable()

    def on_closed(self, _: EngineConnection, why: str | None) -> None:
        """A connection is closed: another one is made after a while."""
        was_open, self._is_open = self._is_open, False
        self._connection = None
        self._closed.set()
        if was_open and why is not None:
            self._on_lost(why or "the connection is gone")

    async def _run(self, first_wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        wait_s = _RECONNECT_S
        if first_wait_s:
            await asyncio.sleep(first_wait_s)
        while True:
            self._closed.clear()
            try:
                async with asyncio.timeout(_CONNECT_S):
                    await loop.create_connection(
                        lambda: EngineConnection(self, self._socket_type, self._clock),
                        *self._address,
                    )
            except (OSError, ValueError, OverflowError):  # or no such name, or no such port
                if self._connection is not None:
                    # Its time ran out as it was made: the loop closes it and reports no end of it.
                    self._connection.close()
            else:
                began = loop.time()
                await self._closed.wait()
                if loop.time() - began > _MAX_RECONNECT_S:
                    wait_s = _RECONNECT_S
            await asyncio.sleep(wait_s * self._rng.uniform(0.5, 1.0))
            wait_s = min(_MAX_RECONNECT_S, 2.0 * wait_s)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class KvEventListener:
    """Listens on a port for the engines of one rank that connect to publish, instead of being connected to.

    An engine is known by the address that it connects from, which discovery has to list; where several
    endpoints share that address, by the topic of its first message. Anything else is closed before it is
    read. Connections are accepted a few at a time.

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
        self._forget(connection)
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
            task.add_done_callback(partial(self._on_opened, accepted=accepted))
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
            # asyncio reports the end of a transport later, and uvloop does not.
            self._forget(connection)
            accepted.close()
            if not isinstance(error, OSError):  # the peer may be gone already
                raise

    def _on_opened(self, task: asyncio.Task[None], *, accepted: socket.socket) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # perhaps before it began
            accepted.close()

    def _forget(self, connection: EngineConnection) -> None:
        ip = self.connections.pop(connection, None)
        if ip is not None:
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
