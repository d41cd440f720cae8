"""ZMTP 3.0, the protocol of ZeroMQ: the bytes of a publisher or a replay socket, and our answers.

Frames, greeting and commands are those of ZeroMQ RFC 23 (https://rfc.zeromq.org/spec/23/) with the
mechanism NULL; PING and PONG are of RFC 37 (https://rfc.zeromq.org/spec/37/). Unlike in libzmq, the
number of frames of a message is bounded, and a message is only parsed when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

#: Signature, version 3.0, the mechanism NULL, and a peer that is no server.
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)

_MORE, _LONG, _COMMAND = 1, 2, 4

#: Frames of a message at most (count), and commands in a row.
_MAX_FRAMES: Final = 8
_MAX_COMMANDS: Final = 64

#: Bytes of a command at most.
_MAX_COMMAND_BYTES: Final = 1024

#: Bytes that were read and are still kept.
_MAX_READ_BYTES: Final = 65_536

SocketType = Literal[b"SUB", b"DEALER"]

#: Types of sockets that the peer of each may have.
_PEERS: Final[Mapping[SocketType, frozenset[bytes]]] = {
    b"SUB": frozenset({b"PUB", b"XPUB"}),
    b"DEALER": frozenset({b"ROUTER", b"REP"}),
}


class ZmtpError(Exception):
    """A peer does not keep to the protocol."""


class ZmtpParser:
    """Parser of a connection with a publisher, or with a replay socket.

    Args:
        socket_type: Type of our own socket. As `SUB`, every topic is subscribed to.
        max_bytes: Bytes of a message at most.

    Attributes:
        output: Bytes to send; the owner clears them.
        is_open: True behind the handshake.
        has_heartbeats: True if the peer answers to PING.
    """

    def __init__(self, socket_type: SocketType, max_bytes: int) -> None:
        self._socket_type = socket_type
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._start = 0
        self._is_greeted = False
        self.output = bytearray(_GREETING)
        self.is_open = False
        self.has_heartbeats = False

    @property
    def num_buffered(self) -> int:
        """Bytes that came and were not yet asked for (count)."""
        return len(self._buffer) - self._start

    def feed(self, data: bytes | memoryview) -> None:
        """Take bytes of the peer."""
        self._buffer += data

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message, whose frames have 255 bytes at most."""
        for number, frame in enumerate(frames, 1):
            self.output += bytes((_MORE if number < len(frames) else 0, len(frame))) + frame

    def ping(self) -> None:
        """Send a PING without a time-to-live, which the peer answers by a PONG."""
        self.output += _command(b"PING", b"\0\0")

    def receive(self) -> list[bytes] | None:
        """Frames of the next message, None where none is complete; raises `ZmtpError`."""
        if not self._is_greeted and not self._read_greeting():
            return None
        for _ in range(_MAX_COMMANDS):
            frames, is_command = self._next()
            if frames is None or not is_command:
                return frames
            self._on_command(frames[0])
        raise ZmtpError("commands without a message")

    def _read_greeting(self) -> bool:
        greeting = bytes(self._buffer[:64])
        if greeting[:1] not in (b"", b"\xff") or greeting[9:10] not in (b"", b"\x7f"):
            raise ZmtpError("no greeting of ZMTP")
        if len(greeting) < 64:
            return False
        if greeting[10] < 3 or greeting[12:32].rstrip(b"\0") != b"NULL":
            raise ZmtpError("another version or mechanism than ZMTP 3 and NULL")
        self._start = 64
        self._is_greeted = True
        self.has_heartbeats = greeting[10:12] > b"\x03\x00"
        self.output += _command(b"READY", _property(b"Socket-Type", self._socket_type))
        return True

    def _next(self) -> tuple[list[bytes] | None, bool]:
        """Frames of the next message or command, and which it is."""
        buffer, position = self._buffer, self._start
        frames: list[tuple[int, int]] = []
        size = 0
        while position + 2 <= len(buffer):
            flags, length = buffer[position], buffer[position + 1]
            position += 2
            if flags & _LONG:
                if position + 7 > len(buffer):
                    break
                length = int.from_bytes(buffer[position - 1 : position + 7])
                position += 7
            is_command = bool(flags & _COMMAND)
            size += length
            if size > (_MAX_COMMAND_BYTES if is_command else self._max_bytes):
                raise ZmtpError(f"a message of more than {size - 1} bytes")
            if (is_command and (frames or flags & _MORE)) or len(frames) == _MAX_FRAMES:
                raise ZmtpError("a command within a message, or too many frames")
            if not (is_command or self.is_open):
                raise ZmtpError("a message before the handshake")
            if position + length > len(buffer):
                break
            frames.append((position, position + length))
            position += length
            if not flags & _MORE:
                with memoryview(buffer) as view:
                    message = [bytes(view[start:end]) for start, end in frames]
                self._start = position
                self._trim()
                return message, is_command
        return None, False

    def _trim(self) -> None:
        if self._start == len(self._buffer) or self._start > _MAX_READ_BYTES:
            del self._buffer[: self._start]
            self._start = 0

    def _on_command(self, body: bytes) -> None:
        name, rest = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if name == b"READY" and not self.is_open:
            if _properties(rest).get(b"socket-type") not in _PEERS[self._socket_type]:
                raise ZmtpError("a socket of another type")
            self.is_open = True
            if self._socket_type == b"SUB":
                # Every topic: as a message, which all versions take.
                self.send([b"\x01"])
        elif name == b"PING":
            self.output += _command(b"PONG", rest[2:18])
        elif name == b"ERROR":
            raise ZmtpError("the peer refuses the handshake")


def _command(name: bytes, data: bytes) -> bytes:
    body = bytes((len(name),)) + name + data
    return bytes((_COMMAND, len(body))) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4) + value


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Properties of a handshake by name, in lower case."""
    known = {}
    while data:
        name, data = data[1 : 1 + data[0]], data[1 + data[0] :]
        length = int.from_bytes(data[:4])
        known[name.lower()], data = data[4 : 4 + length], data[4 + length :]
    return known
