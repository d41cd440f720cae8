"""Header blocks and frames of gRPC responses, encoded without a table of fields.

gRPC over HTTP/2 (grpc/grpc, doc/PROTOCOL-HTTP2.md); RFC 7541, section 6.2.2.
"""

from __future__ import annotations

import enum
import urllib.parse
from functools import lru_cache
from typing import Final

from extproc.http2.frames import END_HEADERS, END_STREAM, HEADERS, build_frame

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
