"""Messages of gRPC on a stream (length-prefixed, independent of frames), and headers of responses.

gRPC over HTTP/2 (grpc/grpc, doc/PROTOCOL-HTTP2.md). Header blocks are encoded without a table of fields
(RFC 7541, section 6.2.2).
"""

from __future__ import annotations

import enum
import struct
import urllib.parse
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, TypeAlias

from extproc.http2.frames import END_HEADERS, END_STREAM, HEADERS, build_frame
from extproc.http2.limits import ReceiveBudget

#: Bytes in front of a message: whether it is compressed, and its length.
PREFIX_BYTES: Final = 5

#: What a piece of a message, or one that waits, costs beside its bytes; a peer may send one byte.
_PIECE_OVERHEAD: Final = 64

#: What a call is ended with beyond the budget, and the name of that limit.
BUDGET_EXCEEDED: Final = "too many bytes of messages are on their way"
BUDGET_LIMIT: Final = "receive_budget"

_PREFIX = struct.Struct(">BI")
_pack_prefix = _PREFIX.pack
_unpack_prefix = _PREFIX.unpack_from


#: Bytes of pieces from which they are joined to a bytearray: its reader may cut off what surrounds a
#: body in place, where a slice would copy it.
LARGE_MESSAGE_BYTES: Final = 16 * 1024

#: A message as it arrived; a bytearray, which belongs to its reader, if it is large.
GrpcMessage: TypeAlias = "bytes | bytearray"


class MessageError(Exception):
    """Message that the server does not take.

    Args:
        limit: Name of the limit that was exceeded; empty for a violation.
    """

    def __init__(self, status: GrpcStatus, message: str, *, limit: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.limit = limit


#: Bytes of one message, in order; the first is short.
MessagePieces: TypeAlias = "Sequence[bytes | memoryview]"


def frame_pieces(pieces: MessagePieces) -> MessagePieces:
    """Prefix a message with its length."""
    return _pack_prefix(0, sum(map(len, pieces))) + pieces[0], *pieces[1:]


def frame_messages(messages: Sequence[bytes]) -> bytes:
    """Prefix messages with their lengths, and join them."""
    if len(messages) == 1:
        return _pack_prefix(0, len(messages[0])) + messages[0]
    if len(messages) == 2:  # headers and a body: an answer to most requests
        first, second = messages
        prefix = _pack_prefix
        return b"".join((prefix(0, len(first)), first, prefix(0, len(second)), second))
    return b"".join(
        [part for message in messages for part in (_pack_prefix(0, len(message)), message)]
    )


class MessageAssembler:
    """Joins the payloads of DATA frames of a stream to messages."""

    __slots__ = (
        "_budget",
        "_max_bytes",
        "_missing_bytes",
        "_piece_bytes",
        "_pieces",
        "_prefix",
        "_waiting_bytes",
    )

    def __init__(self, max_bytes: int, budget: ReceiveBudget) -> None:
        self._max_bytes = max_bytes
        self._budget = budget
        self._prefix = b""
        self._pieces: list[bytes] | None = None  # thousands of streams wait with nothing incomplete
        self._missing_bytes = 0
        # Held of the budget: by an incomplete message, and by complete ones that wait.
        self._piece_bytes = self._waiting_bytes = 0

    @property
    def is_between_messages(self) -> bool:
        """True if no message is incomplete."""
        return not self._missing_bytes and not self._prefix

    def feed(self, data: bytes, at: int, end: int) -> Sequence[GrpcMessage]:
        """Add the payload `data[at:end]`, and return the messages that it completes.

        Raises:
            MessageError: A message is too large, or compressed, or the budget is used up.
        """
        messages: list[GrpcMessage] = []
        if self._missing_bytes:
            start = at
            at += self._missing_bytes
            if at > end:
                self._missing_bytes = at - end
                self._hold(data[start:end])
                return ()
            self._missing_bytes = 0
            messages.append(self._join(data[start:at]))
        elif self._prefix:
            data = self._prefix + data[at:end]
            self._prefix, at, end = b"", 0, len(data)
        while at < end:
            start = at + PREFIX_BYTES
            if start > end:
                self._prefix = data[at:end]
                break
            flag, size = _unpack_prefix(data, at)
            if flag or size > self._max_bytes:
                raise self._rejection(flag, size)
            at = start + size
            if at > end:
                self._hold(data[start:end])
                self._missing_bytes = at - end
                break
            messages.append(data[start:at])
        return messages

    def hold(self, message: GrpcMessage) -> bool:
        """Count a complete message that waits for its stream; False beyond the budget."""
        size = len(message) + _PIECE_OVERHEAD
        self._waiting_bytes += size
        return self._budget.hold(size)

    def release_waiting(self) -> None:
        """Return what complete messages hold of the budget; idempotent."""
        self._budget.held_bytes -= self._waiting_bytes
        self._waiting_bytes = 0

    def release(self) -> None:
        """Drop what is incomplete, and return all that is held of the budget; idempotent."""
        self._release_pieces()
        self.release_waiting()

    def _release_pieces(self) -> None:
        self._pieces = None
        self._budget.held_bytes -= self._piece_bytes
        self._piece_bytes = 0

    def _join(self, last: bytes) -> GrpcMessage:
        """Complete a message."""
        pieces = [*(self._pieces or ()), last]
        self._release_pieces()
        is_large = sum(map(len, pieces)) >= LARGE_MESSAGE_BYTES
        return bytearray().join(pieces) if is_large else b"".join(pieces)

    def _hold(self, piece: bytes) -> None:
        if not piece:
            return
        if self._pieces is None:
            self._pieces = [piece]
        else:
            self._pieces.append(piece)
        size = len(piece) + _PIECE_OVERHEAD
        self._piece_bytes += size
        if not self._budget.hold(size):
            raise MessageError(GrpcStatus.RESOURCE_EXHAUSTED, BUDGET_EXCEEDED, limit=BUDGET_LIMIT)

    def _rejection(self, flag: int, size: int) -> MessageError:
        if flag:
            return MessageError(
                GrpcStatus.INTERNAL, "the message is compressed, but grpc-encoding is identity"
            )
        return MessageError(
            GrpcStatus.RESOURCE_EXHAUSTED,
            f"received message larger than max ({size} vs. {self._max_bytes})",
            limit="message_bytes",
        )


#: Longest text in `grpc-message` (bytes after encoding): the block fits in a frame.
_MAX_MESSAGE_BYTES: Final = 4096

#: Begins the first block on a connection: our table is empty from here on, so that no setting of
#: the peer can demand a smaller one.
EMPTY_TABLE: Final = b"\x20"

#: Characters of `grpc-message` that are sent as they are, beside letters, digits and `_.-~`.
_PLAIN: Final = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"


class GrpcStatus(enum.IntEnum):
    """Status codes of gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


def _encode_length(size: int) -> bytes:
    """Encode the length of a string (RFC 7541, section 5.1, prefix of 7 bits)."""
    if size < 0x7F:
        return bytes((size,))
    encoded, size = bytearray((0x7F,)), size - 0x7F
    while size > 0x7F:
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    encoded.append(size)
    return bytes(encoded)


def _encode_field(name: str, value: str) -> bytes:
    """Encode a field as a literal without indexing."""
    text = value.encode("latin-1")
    return b"\x00" + _encode_length(len(name)) + name.encode() + _encode_length(len(text)) + text


_STATUS_200: Final = b"\x88"  # static index 8
_HEAD: Final = _STATUS_200 + _encode_field("content-type", "application/grpc")

#: Only identity is accepted; a client that asked for more learns it with the refusal.
_IDENTITY: Final = _encode_field("grpc-accept-encoding", "identity")


def build_head(stream_id: int, *, is_first: bool) -> bytes:
    """Build the frame that begins a response; `is_first` on its connection."""
    block = EMPTY_TABLE + _HEAD if is_first else _HEAD
    return build_frame(HEADERS, END_HEADERS, stream_id, block)


def build_trailers(stream_id: int, status: GrpcStatus, message: str = "") -> bytes:
    """Build the frame that ends a response."""
    return build_frame(
        HEADERS, END_HEADERS | END_STREAM, stream_id, _encode_trailers(status, message)
    )


def build_trailers_only(
    stream_id: int, status: GrpcStatus, message: str, *, http_status: int = 200, is_first: bool
) -> bytes:
    """Build the frame of a response without messages."""
    head = _HEAD if http_status == 200 else _encode_field(":status", str(http_status))
    if status == GrpcStatus.UNIMPLEMENTED:
        head += _IDENTITY
    block = (EMPTY_TABLE if is_first else b"") + head + _encode_trailers(status, message)
    return build_frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block)


@lru_cache(256)
def _encode_trailers(status: GrpcStatus, message: str) -> bytes:
    block = _encode_field("grpc-status", str(int(status)))
    if message:
        text = urllib.parse.quote(message, safe=_PLAIN)
        block += _encode_field("grpc-message", _cut(text))
    return block


def _cut(text: str) -> str:
    """Cut an encoded text to its limit, not inside of an escape."""
    if len(text) <= _MAX_MESSAGE_BYTES:
        return text
    text = text[:_MAX_MESSAGE_BYTES]
    escape = text.rfind("%", -2)
    return text if escape < 0 else text[:escape]
