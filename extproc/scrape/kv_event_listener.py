"""Listener for engines that connect to publish KV events, instead of being connected to.

An engine is known by the address that it connects from, which discovery has to list; where several
endpoints share that address, by the topic of its first message. Anything else is closed before it is
read. Connections are accepted a few at a time, and what one of them sends waits in its socket until it
is worked off, so that a peer takes neither memory nor the event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from extproc.prefix_cache import kv_events
from extproc.scrape.kv_event_subscription import EngineSubscription
from extproc.scrape.zmtp import ZmtpError, ZmtpSubscriber

#: Connections that are accepted at a time (count), and seconds until the next ones.
_ACCEPTED, _ACCEPT_PAUSE_S = 16, 0.01

#: Connections from one address per endpoint there (count): a new one may come before the old one is
#: known to be lost.
_MAX_PER_ENDPOINT: Final = 3

#: Bytes that a connection may have read and not worked off; more than the longest message.
_MAX_BUFFERED: Final = kv_events.MAX_BATCH_BYTES + 65_536

#: Seconds between looks for signs of life, and of them without any until a connection is lost (count).
_HEARTBEAT_S, _MAX_SILENT = 0.5, 3

#: Seconds within which the handshake has to be over.
_HANDSHAKE_S: Final = 5.0


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
        self.connections: dict[EngineConnection, None] = {}
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

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._loop.remove_reader(self._socket)
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()
        for task in self._tasks:
            task.cancel()
        for connection in list(self.connections):
            connection.close()

    def on_lost(self, connection: EngineConnection) -> None:
        """Forget a connection that is closed."""
        if connection in self.connections:
            del self.connections[connection]
            self._release(connection.ip)

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

    def _watch(self) -> None:
        self._loop.add_reader(self._socket, self._on_readable)

    async def _open(self, accepted: socket.socket, ip: str) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: EngineConnection(self, ip, self.clock()), accepted
            )
        except BaseException as error:
            self._release(ip)
            accepted.close()
            if not isinstance(error, OSError):  # the peer may be gone already
                raise

    def _release(self, ip: str, count: int = 1) -> None:
        self._num_at[ip] -= count
        if self._num_at[ip] <= 0:
            del self._num_at[ip]


class EngineConnection(asyncio.Protocol):
    """Connection of a publisher, and the source of messages of the subscription that it is for.

    Args:
        owner: Where it was accepted.
        ip: Address of the peer.
        now: Monotonic seconds.
    """

    def __init__(self, owner: KvEventListener, ip: str, now: float) -> None:
        self.ip = ip
        self._owner = owner
        self._parser = ZmtpSubscriber(kv_events.MAX_BATCH_BYTES)
        self._transport: asyncio.Transport | None = None
        self._subscription: EngineSubscription | None = None
        #: Message that showed which endpoint it is of, until it is taken.
        self._first: list[bytes] | None = None
        self._until = now + _HANDSHAKE_S
        self._ping_at = now + _HEARTBEAT_S
        self._num_silent = 0
        self._is_paused = False

    @property
    def num_buffered(self) -> int:
        """Bytes that were read and not worked off (count)."""
        return self._parser.num_buffered

    def is_answered(self) -> bool:
        """True if the peer sent something since the last look for signs of life."""
        return not self._num_silent

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the peer."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - for the type
        self._transport = transport
        self._owner.connections[self] = None
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Keep what came until it is asked for."""
        if self._transport is None:
            return
        self._num_silent = 0
        self._parser.feed(data)
        if self._parser.num_buffered >= _MAX_BUFFERED and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        if self._subscription is None:
            self._find_subscription()
        if self._subscription is not None:
            self._subscription.wake()

    def connection_lost(self, _: Exception | None) -> None:
        """The peer has gone."""
        self._detach()

    def receive(self) -> list[bytes] | None:
        """Frames of the next message; None where there is none."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._transport is None:
            return None
        try:
            frames = self._parser.receive()
        except ZmtpError:
            self._refuse()
            return None
        self._flush()
        if self._is_paused and self._parser.num_buffered < _MAX_BUFFERED // 2:
            self._is_paused = False
            self._transport.resume_reading()
        return frames

    def check(self, now: float) -> None:
        """Close it if the peer is silent, else ask for a sign of life."""
        if not self._parser.is_open:
            if now >= self._until:
                self._refuse()
        elif now >= self._ping_at and not self._is_paused:
            # By looks, not by time: a late event loop is no silent peer.
            self._ping_at = now + _HEARTBEAT_S
            self._num_silent += 1
            if self._num_silent > _MAX_SILENT:
                self._detach()
            else:
                self._parser.ping()
                self._flush()

    def close(self) -> None:
        """Close the connection, without a word to its subscription."""
        transport, self._transport = self._transport, None
        self._subscription = None
        if transport is not None:
            transport.abort()
        self._owner.on_lost(self)

    def _find_subscription(self) -> None:
        """Attach it to the subscription that it is for, once that is known."""
        frames = self.receive()
        if self._transport is None or not self._parser.is_open:
            return
        known = self._owner.find(self.ip)
        if len(known) > 1:
            if frames is None:
                return
            topic = frames[0][:256].decode(errors="replace").split("@")
            known = [subscription for subscription in known if _is_named(subscription, topic)]
        if len(known) != 1 or known[0].is_resting:
            self._refuse()
            return
        self._first = frames
        self._subscription = known[0]
        known[0].attach(self)

    def _flush(self) -> None:
        if self._parser.output and self._transport is not None:
            self._transport.write(bytes(self._parser.output))
            self._parser.output.clear()
            if self._transport.get_write_buffer_size() > _MAX_BUFFERED:
                self._refuse()  # it pings, and does not read

    def _refuse(self) -> None:
        self._owner.num_refused += 1
        self._detach()

    def _detach(self) -> None:
        subscription = self._subscription
        self.close()
        if subscription is not None:
            subscription.detach(self)


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
