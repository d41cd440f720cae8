"""Messages of gRPC on a stream: length-prefixed, cut over frames anyhow.

gRPC over HTTP/2 (grpc/grpc, doc/PROTOCOL-HTTP2.md), section "Length-Prefixed-Message".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, TypeAlias

from extproc.http2.limits import ReceiveBudget
from extproc.http2.responses import GrpcStatus

#: Bytes in front of a message: whether it is compressed, and its length.
PREFIX_BYTES: Final = 5

#: What a piece of a message costs beside its bytes; a peer may send pieces of one byte.
_PIECE_OVERHEAD: Final = 64

_PREFIX = struct.Struct(">BI")
_pack_prefix = _PREFIX.pack
_unpack_prefix = _PREFIX.unpack_from


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


#: Bytes of one message, in order.
MessagePieces: TypeAlias = "Sequence[bytes | memoryview]"


def frame_pieces(pieces: MessagePieces) -> bytes:
    """Prefix a message with its length, and join it."""
    return b"".join((_pack_prefix(0, sum(map(len, pieces))), *pieces))


def frame_messages(messages: Sequence[bytes]) -> bytes:
    """Prefix messages with their lengths, and join them."""
    if len(messages) == 1:
        return _pack_prefix(0, len(messages[0])) + messages[0]
    return b"".join(
        [part for message in messages for part in (_pack_prefix(0, len(message)), message)]
    )


class MessageAssembler:
    """Joins the payloads of DATA frames of a stream to messages."""

    __slots__ = ("_budget", "_held_bytes", "_max_bytes", "_missing_bytes", "_pieces", "_prefix")

    def __init__(self, max_bytes: int, budget: ReceiveBudget) -> None:
        self._max_bytes = max_bytes
        self._budget = budget
        self._prefix = b""
        self._pieces: list[bytes] | None = None  # thousands of streams wait with nothing incomplete
        self._missing_bytes = 0
        self._held_bytes = 0

    @property
    def is_between_messages(self) -> bool:
        """True if no message is incomplete."""
        return not self._missing_bytes and not self._prefix

    def feed(self, data: bytes, at: int, end: int) -> list[bytes]:
        """Add the payload `data[at:end]`, and return the messages that it completes.

        Raises:
            MessageError: A message is too large, or compressed, or the budget is used up.
        """
        messages: list[bytes] = []
        if self._missing_bytes:
            start = at
            at += self._missing_bytes
            if at > end:
                self._hold(data[start:end])
                self._missing_bytes = at - end
                return messages
            self._missing_bytes = 0
            messages.append(b"".join([*(self._pieces or ()), data[start:at]]))
            self.release()
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

    def hold(self, size: int) -> None:
        """Count bytes of complete messages that wait for their stream.

        Raises:
            MessageError: The budget is used up.
        """
        self._held_bytes += size
        self._budget.held_bytes += size
        if self._budget.held_bytes > self._budget.limit_bytes:
            raise MessageError(
                GrpcStatus.RESOURCE_EXHAUSTED,
                "too many bytes of messages are on their way",
                limit="receive_budget",
            )

    def release(self) -> None:
        """Drop what is incomplete, and return what it holds of the budget; idempotent."""
        self._pieces = None
        self._budget.held_bytes -= self._held_bytes
        self._held_bytes = 0

    def _hold(self, piece: bytes) -> None:
        if piece:
            if self._pieces is None:
                self._pieces = []
            self._pieces.append(piece)
            self.hold(len(piece) + _PIECE_OVERHEAD)

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
