"""Sockets of ZeroMQ for KV events, on the event loop; the only module that loads pyzmq."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from extproc import distribution
from extproc.errors import ConfigError
from extproc.prefix_cache import kv_events

if TYPE_CHECKING:
    import zmq

#: Messages that wait in a socket (count); beyond, the engine holds them back. With `MAX_BATCH_BYTES`
#: it bounds the memory of a hostile one.
_MAX_QUEUED: Final = 64

#: Milliseconds between attempts to connect, at first and at most; libzmq adds jitter.
_RECONNECT_MS, _MAX_RECONNECT_MS = 100, 5000

#: Options of TCP keepalive (seconds, count): a peer that vanished is noticed after two seconds. Not the
#: heartbeats of libzmq 4.3, whose timer ends the process with an assertion (`stream_engine_base.cpp`,
#: `!_io_error`) when a connection breaks while messages wait for the reader.
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 1, 1, 1

#: Bytes that a connection may have received and nothing read: all messages that wait, and buffers. One
#: with more is closed, as a message may have parts without end, which libzmq keeps until the last one.
MAX_UNREAD_BYTES: Final = 2 * _MAX_QUEUED * kv_events.MAX_BATCH_BYTES

#: Place of `tcpi_bytes_received`, 64 bits, in `TCP_INFO` of Linux, and the size that reaches it.
_RECEIVED_AT, _INFO_BYTES = 128, 136

#: Sockets of a process at most (count): a subscription takes four.
_MAX_SOCKETS: Final = 16_384


def load_zmq() -> Any:
    """Load pyzmq.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import zmq  # noqa: PLC0415 - an extra, not for everybody
        import zmq.utils.monitor  # noqa: PLC0415 - the same
    except ImportError:
        raise ConfigError(
            "kv_events.enabled",
            wanted="the Python package pyzmq",
            got="it is not installed",
            fix=f"{distribution.install_command('kv-events')}, or set kv_events.enabled to false",
        ) from None
    return zmq


def open_context() -> zmq.Context[Any]:
    """Open a context, which has a thread of libzmq.

    Raises:
        ConfigError: pyzmq is not installed.
    """
    module = load_zmq()
    context = module.Context()
    context.set(module.MAX_SOCKETS, _MAX_SOCKETS)
    return context  # type: ignore[no-any-return] # of a module that is loaded late


def open_subscription(
    context: zmq.Context[Any], url: str, wake: Callable[[], None]
) -> tuple[SocketReader, SocketReader]:
    """Subscribe to an engine.

    Args:
        wake: Called when there may be messages.

    Returns:
        The subscription, and the monitor of its connection.
    """
    module = load_zmq()
    sub = context.socket(module.SUB)
    for option, value in (
        (module.LINGER, 0),
        (module.RCVHWM, _MAX_QUEUED),
        (module.MAXMSGSIZE, kv_events.MAX_BATCH_BYTES),
        (module.RECONNECT_IVL, _RECONNECT_MS),
        (module.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS),
        (module.TCP_KEEPALIVE, 1),
        (module.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S),
        (module.TCP_KEEPALIVE_INTVL, _KEEPALIVE_INTERVAL_S),
        (module.TCP_KEEPALIVE_CNT, _KEEPALIVE_PROBES),
        (module.IPV6, int("[" in url)),
    ):
        sub.setsockopt(option, value)
    # Topics are free text of the engine: it is known by the socket.
    sub.setsockopt(module.SUBSCRIBE, b"")
    events = module.EVENT_CONNECTED | module.EVENT_HANDSHAKE_SUCCEEDED | module.EVENT_DISCONNECTED
    monitor = SocketReader(sub.get_monitor_socket(events), wake, module)
    reader = SocketReader(sub, wake, module)
    sub.connect(url)
    return reader, monitor


def open_replay(
    context: zmq.Context[Any], url: str, start: int, wake: Callable[[], None]
) -> SocketReader:
    """Ask an engine for the batches from a number on.

    Args:
        url: Address of its replay socket.
        start: First number, 64 bits.
        wake: Called when there may be messages.
    """
    module = load_zmq()
    dealer = context.socket(module.DEALER)
    for option, value in (
        (module.LINGER, 0),
        (module.RCVHWM, _MAX_QUEUED),
        (module.MAXMSGSIZE, kv_events.MAX_BATCH_BYTES),
        (module.IPV6, int("[" in url)),
    ):
        dealer.setsockopt(option, value)
    dealer.connect(url)
    dealer.send_multipart((b"", start.to_bytes(8)), flags=module.NOBLOCK)
    return SocketReader(dealer, wake, module)


def parse_connection_event(frames: list[bytes]) -> tuple[bool | None, int]:
    """Parse what a monitor says of the connection of a subscription.

    Returns:
        (None, descriptor) before the handshake; (True, -1) once it is connected, and (False, -1) when
        it no longer is.
    """
    module = load_zmq()
    parsed = module.utils.monitor.parse_monitor_message(frames)
    if parsed["event"] == module.EVENT_CONNECTED:
        return None, int(parsed["value"])
    return bool(parsed["event"] == module.EVENT_HANDSHAKE_SUCCEEDED), -1


def received_bytes(descriptor: int, url: str) -> int:
    """Bytes that a connection has received; 0 where the system does not say, or it is another one.

    Args:
        descriptor: Of its socket, which libzmq may have closed.
        url: Address of the peer.
    """
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            host, port, *_ = connection.getpeername()
            if url != f"tcp://{f'[{host}]' if ':' in host else host}:{port}":
                return 0
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except (OSError, AttributeError, ValueError):
        return 0
    return int(struct.unpack_from("=Q", info, _RECEIVED_AT)[0]) if len(info) == _INFO_BYTES else 0


class SocketReader:
    """Socket of ZeroMQ on the event loop.

    Its file descriptor says only that something has changed, and goes on to say so until messages
    are read. So it is watched only while there is none.

    Args:
        socket: The socket; it is closed with the reader.
        wake: Called when there may be messages.

    Attributes:
        num_bytes: Bytes of all frames that were read.
    """

    def __init__(self, socket: zmq.Socket[Any], wake: Callable[[], None], zmq: Any) -> None:
        self.socket = socket
        self._wake = wake
        self._again = zmq.Again
        self._flags = zmq.NOBLOCK
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._is_ready = True
        self.num_bytes = 0

    def receive(self) -> list[bytes] | None:
        """Frames of the next message; None where there is none."""
        if not self._is_ready:
            return None
        try:
            frames = self.socket.recv_multipart(self._flags)
        except self._again:
            self._is_ready = False
            self._loop.add_reader(self._descriptor, self._on_readable)
            return None
        self.num_bytes += sum(map(len, frames))
        return frames

    def close(self) -> None:
        """Close the socket."""
        self._loop.remove_reader(self._descriptor)
        self.socket.disable_monitor()
        self.socket.close(linger=0)

    def _on_readable(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._is_ready = True
        self._wake()
