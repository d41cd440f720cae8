"""Frames of HTTP/2: types, flags, lengths and error codes (RFC 9113, sections 4, 6 and 7)."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

#: First bytes of a client (RFC 9113, section 3.4).
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

#: Frame types.
DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

#: Flags.
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

#: Settings (RFC 9113, section 6.5.2).
HEADER_TABLE_SIZE: Final = 0x1
ENABLE_PUSH: Final = 0x2
MAX_CONCURRENT_STREAMS: Final = 0x3
INITIAL_WINDOW_SIZE: Final = 0x4
MAX_FRAME_SIZE: Final = 0x5
MAX_HEADER_LIST_SIZE: Final = 0x6

#: Frame payload and window that both sides may use before any settings (bytes).
DEFAULT_FRAME_BYTES: Final = 16_384
DEFAULT_WINDOW_BYTES: Final = 65_535

#: Largest flow-control window, and largest stream identifier.
MAX_WINDOW_BYTES: Final = 0x7FFF_FFFF
MAX_STREAM_ID: Final = 0x7FFF_FFFF

#: Largest value of MAX_FRAME_SIZE.
LARGEST_FRAME_BYTES: Final = 0xFF_FFFF

#: Bytes in front of every payload.
HEAD_BYTES: Final = 9

_HEAD = struct.Struct(">HBBBI")  # 24 bits of length as 16 + 8, type, flags, stream
_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")
_PAIR = struct.Struct(">II")

#: Length as (high 16 bits, low 8 bits), type, flags and stream identifier at an offset.
unpack_head = _HEAD.unpack_from

#: The same, to bytes.
pack_head = _HEAD.pack


class ErrorCode(enum.IntEnum):
    """Reason why a stream or a connection ends (RFC 9113, section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class Http2Error(Exception):
    """Violation of HTTP/2 by the peer, or of a limit.

    Args:
        detail: Violation in words, for the log of the peer and of this process.
        stream_id: Stream that ends; 0 ends the connection.
        limit: Name of the limit that was exceeded; empty for a violation.
    """

    def __init__(
        self, code: ErrorCode, detail: str, *, stream_id: int = 0, limit: str = ""
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.stream_id = stream_id
        self.limit = limit


class _FrameRule(NamedTuple):
    """Demands of a frame type on its head.

    Attributes:
        on_stream: True for a stream identifier, False for 0, None for either.
        size: Length of the payload; None where it varies.
        ends_stream: True if a wrong length ends the stream only.
    """

    on_stream: bool | None
    size: int | None = None
    ends_stream: bool = False


#: Settings of the peer: least and greatest value, and error outside of them.
_SETTING_RANGES: Final = {
    ENABLE_PUSH: (0, 1, ErrorCode.PROTOCOL_ERROR),
    INITIAL_WINDOW_SIZE: (0, MAX_WINDOW_BYTES, ErrorCode.FLOW_CONTROL_ERROR),
    MAX_FRAME_SIZE: (DEFAULT_FRAME_BYTES, LARGEST_FRAME_BYTES, ErrorCode.PROTOCOL_ERROR),
}

#: By frame type.
_RULES: Final[Sequence[_FrameRule]] = (
    _FrameRule(on_stream=True),  # DATA
    _FrameRule(on_stream=True),  # HEADERS
    _FrameRule(on_stream=True, size=5, ends_stream=True),  # PRIORITY
    _FrameRule(on_stream=True, size=4),  # RST_STREAM
    _FrameRule(on_stream=False),  # SETTINGS
    _FrameRule(on_stream=True),  # PUSH_PROMISE
    _FrameRule(on_stream=False, size=8),  # PING
    _FrameRule(on_stream=False),  # GOAWAY
    _FrameRule(on_stream=None, size=4),  # WINDOW_UPDATE
    _FrameRule(on_stream=True),  # CONTINUATION
)


def check_head(kind: int, stream_id: int, size: int) -> None:
    """Raise `Http2Error` where stream identifier or length break the rules of a frame type."""
    rule = _RULES[kind]
    if rule.on_stream is not None and rule.on_stream != bool(stream_id):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"frame of type {kind} on stream {stream_id}")
    if rule.size is not None and rule.size != size:
        raise Http2Error(
            ErrorCode.FRAME_SIZE_ERROR,
            f"frame of type {kind} with {size} bytes",
            stream_id=stream_id if rule.ends_stream else 0,
        )


def without_padding(payload: bytes, flags: int) -> bytes:
    """Return the payload of a DATA or HEADERS frame without padding, which must fit in it."""
    if not flags & PADDED:
        return payload
    if not payload:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "padded frame without a length of padding")
    end = len(payload) - payload[0]
    if end < 1:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1:end]


def check_dependency(stream_id: int, payload: bytes) -> None:
    """Raise `Http2Error` if a stream depends on itself."""
    if read_number(payload) & MAX_STREAM_ID == stream_id:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "stream depends on itself")


def read_number(payload: bytes) -> int:
    """Return the number of 32 bits that a payload begins with."""
    number: int = _NUMBER.unpack_from(payload)[0]
    return number


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return pairs of identifier and value; raises for a cut payload or a value out of range."""
    if len(payload) % _SETTING.size:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"settings of {len(payload)} bytes")
    settings = list(_SETTING.iter_unpack(payload))
    for name, value in settings:
        least, greatest, code = _SETTING_RANGES.get(name, (0, value, ErrorCode.NO_ERROR))
        if not least <= value <= greatest:
            raise Http2Error(code, f"setting {name} is {value}")
    return settings


def build_frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Build a frame."""
    size = len(payload)
    return pack_head(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def build_settings(settings: Sequence[tuple[int, int]]) -> bytes:
    """Build a SETTINGS frame from pairs of identifier and value."""
    return build_frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*setting) for setting in settings))


def build_window_update(stream_id: int, more_bytes: int) -> bytes:
    """Build a WINDOW_UPDATE frame; stream 0 is the connection."""
    return build_frame(WINDOW_UPDATE, 0, stream_id, _NUMBER.pack(more_bytes))


def build_rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """Build a RST_STREAM frame."""
    return build_frame(RST_STREAM, 0, stream_id, _NUMBER.pack(code))


def build_goaway(last_stream_id: int, code: ErrorCode, detail: str = "") -> bytes:
    """Build a GOAWAY frame."""
    return build_frame(GOAWAY, 0, 0, _PAIR.pack(last_stream_id, code) + detail.encode())
