"""Header blocks of requests: HPACK, the rules of HTTP/2 and those of gRPC.

RFC 7541; RFC 9113, section 8; gRPC over HTTP/2 (grpc/grpc, doc/PROTOCOL-HTTP2.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from extproc.http2 import frames
from extproc.http2.frames import ErrorCode, Http2Error
from extproc.http2.hpack_decoder import (
    FIELD_OVERHEAD,
    HeaderField,
    HeaderListError,
    HpackDecoder,
    HpackError,
)
from extproc.http2.limits import Http2Limits
from extproc.http2.messages import GrpcStatus

#: Header blocks whose meaning is remembered (count): data planes send the same few again and again.
_MAX_REMEMBERED: Final = 64

#: The largest block that is remembered (bytes), so that a connection keeps little.
_MAX_REMEMBERED_BYTES: Final = 1024

#: Bytes of stream dependency and weight in front of a header block.
_PRIORITY_BYTES: Final = 5

#: Names of fields (RFC 9113, section 8.2.1): lower case, no control character, no colon inside.
_NAME = re.compile(rb"[!-9;-@\[-~]+")

#: Values of fields: no NUL, CR or LF, no space at either end.
_VALUE = re.compile(rb"(?![ \t])[^\x00\r\n]*(?<![ \t])")

#: Fields of one connection of HTTP/1, which malform a request (RFC 9113, section 8.2.2).
_CONNECTION_FIELDS: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)

_PSEUDO_FIELDS: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_REQUIRED: Final = frozenset({b":method", b":scheme", b":path"})

_GRPC: Final = re.compile(rb"application/grpc([+;].*)?", re.IGNORECASE)
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNITS_S: Final[Mapping[bytes, float]] = {
    b"H": 3600.0,
    b"M": 60.0,
    b"S": 1.0,
    b"m": 1e-3,
    b"u": 1e-6,
    b"n": 1e-9,
}


class HeadRejection(msgspec.Struct, frozen=True):
    """Answer of the server to a request that it does not take.

    Attributes:
        http_status: HTTP status; 200 for an answer of gRPC.
        limit: Name of the limit that was exceeded; empty for a rule of gRPC.
    """

    http_status: int
    grpc_status: GrpcStatus
    message: str
    limit: str = ""


class RequestHead(msgspec.Struct, frozen=True):
    """Head of a gRPC request.

    Attributes:
        path: `/package.Service/Method`.
        timeout_s: Seconds that the client waits for the end; None for ever.
        content_bytes: Value of `content-length`; None where it is missing.
        traceparent: Value of `traceparent`; empty where it is missing.
        malformed: Rule of HTTP/2 that the request breaks; empty if none.
        rejection: Reason why the server does not take it; None if it does.
    """

    path: str = ""
    timeout_s: float | None = None
    content_bytes: int | None = None
    traceparent: str = ""
    malformed: str = ""
    rejection: HeadRejection | None = None


class PartialHeaderBlock:
    """Header block whose CONTINUATION frames are still to come."""

    __slots__ = ("_fragments", "_size", "is_end_of_stream", "stream_id")

    def __init__(self, stream_id: int, fragment: bytes, *, is_end_of_stream: bool) -> None:
        self.stream_id = stream_id
        self.is_end_of_stream = is_end_of_stream
        self._fragments = [fragment]
        self._size = len(fragment)

    def add(self, fragment: bytes, limits: Http2Limits) -> None:
        """Add the payload of a CONTINUATION frame; raises for a long block, or too many pieces."""
        self._fragments.append(fragment)
        self._size += len(fragment)
        if (
            len(self._fragments) > limits.max_continuations + 1
            or self._size > limits.max_header_block_bytes
        ):
            raise Http2Error(
                ErrorCode.ENHANCE_YOUR_CALM, "header block too long", limit="continuation_flood"
            )

    def join(self) -> bytes:
        """Return the complete block."""
        return b"".join(self._fragments)


def strip_head_fields(payload: bytes, flags: int, stream_id: int) -> bytes:
    """Return the header block of a HEADERS frame, without padding and priority, which it checks."""
    fragment = frames.without_padding(payload, flags)
    if flags & frames.HAS_PRIORITY:
        if len(fragment) < _PRIORITY_BYTES:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "priority cut short")
        frames.check_dependency(stream_id, fragment)
        return fragment[_PRIORITY_BYTES:]
    return fragment


class HeaderDecoder:
    """Decodes the header blocks of one connection.

    Once the peer keeps no table of fields, where settings announce none, a block always means the
    same, and those that came before are not decoded again.
    """

    def __init__(self, limits: Http2Limits) -> None:
        self._limits = limits
        self._hpack = HpackDecoder(limits.max_header_block_bytes)
        self._remembered: dict[bytes, RequestHead] = {}
        self._is_stateless = False

    def limit_table(self) -> None:
        """Hold the peer to the table of the limits; call once it acknowledged our settings."""
        self._hpack.limit_table(self._limits.header_table_bytes)
        self._is_stateless = not self._limits.header_table_bytes

    def read_request(self, block: bytes) -> RequestHead:
        """Decode the header block of a request; raises `Http2Error` where it cannot go on."""
        if not self._is_stateless:
            return self._read(block)
        head = self._remembered.get(block)
        if head is None:
            head = self._read(block)
            if len(block) > _MAX_REMEMBERED_BYTES:
                return head
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[block] = head
        return head

    def read_trailers(self, block: bytes) -> str:
        """Decode trailers as `read_request`; returns the rule that they break, or nothing."""
        fields = self._decode(block)
        return _find_malformed(fields) or (
            "pseudo field in trailers" if any(name[:1] == b":" for name, _ in fields) else ""
        )

    def _read(self, block: bytes) -> RequestHead:
        fields = self._decode(block)
        size = sum(len(name) + len(value) + FIELD_OVERHEAD for name, value in fields)
        if (
            size > self._limits.max_header_list_bytes
            or len(fields) > self._limits.max_header_fields
        ):
            return RequestHead(
                rejection=HeadRejection(
                    431,
                    GrpcStatus.RESOURCE_EXHAUSTED,
                    "the header list is too large",
                    limit="header_list",
                )
            )
        return _parse_request(fields)

    def _decode(self, block: bytes) -> list[HeaderField]:
        try:
            return self._hpack.decode(block)
        except HeaderListError as error:
            raise Http2Error(
                ErrorCode.ENHANCE_YOUR_CALM, "header list too large", limit="header_list"
            ) from error
        except HpackError as error:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, str(error)) from error


def _parse_request(fields: list[tuple[bytes, bytes]]) -> RequestHead:
    """Read the fields of a request and apply the rules of HTTP/2, then those of gRPC."""
    malformed = _find_malformed(fields) or _find_malformed_pseudo(fields)
    if malformed:
        return RequestHead(malformed=malformed)
    values = dict(fields)
    length = values.get(b"content-length")
    if length is not None and not (length.isdigit() and len(length) < 19):
        return RequestHead(malformed="content-length is no number")
    timeout = values.get(b"grpc-timeout")
    parsed = None if timeout is None else _TIMEOUT.fullmatch(timeout)
    return RequestHead(
        path=values[b":path"].decode("latin-1"),
        timeout_s=None if parsed is None else int(parsed[1]) * _UNITS_S[parsed[2]],
        content_bytes=None if length is None else int(length),
        traceparent=values.get(b"traceparent", b"").decode("latin-1"),
        rejection=_find_rejection(values, has_bad_timeout=timeout is not None and parsed is None),
    )


def _find_malformed(fields: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the rule of RFC 9113, section 8.2 that a list of fields breaks, or nothing."""
    for name, value in fields:
        plain = name[1:] if name[:1] == b":" else name
        if not _NAME.fullmatch(plain):
            return f"name of a field: {name[:64]!r}"
        if not _VALUE.fullmatch(value):
            return f"value of the field {name.decode('latin-1')}"
        if name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
            return f"field of one connection: {name.decode()}"
    return ""


def _find_malformed_pseudo(fields: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the rule of RFC 9113, section 8.3 that the fields of a request break, or nothing."""
    pseudo: dict[bytes, bytes] = {}
    has_plain = False
    for name, value in fields:
        if name[:1] != b":":
            has_plain = True
        elif has_plain:
            return "pseudo field after a field"
        elif name not in _PSEUDO_FIELDS:
            return f"unknown pseudo field {name[:64]!r}"
        elif name in pseudo:
            return f"pseudo field {name.decode()} twice"
        else:
            pseudo[name] = value
    if pseudo.get(b":method") == b"CONNECT":
        return "CONNECT is not served"
    missing = _REQUIRED - pseudo.keys()
    if missing:
        return f"no {min(missing).decode()}"
    return "" if pseudo[b":path"] else "empty :path"


def _find_rejection(
    values: Mapping[bytes, bytes], *, has_bad_timeout: bool
) -> HeadRejection | None:
    """Return the answer to a request that gRPC does not allow; None where it does."""
    if not _GRPC.fullmatch(values.get(b"content-type", b"")):
        return HeadRejection(415, GrpcStatus.UNKNOWN, "content-type is not application/grpc")
    if values[b":method"] != b"POST":
        return HeadRejection(405, GrpcStatus.INTERNAL, "gRPC calls are sent with POST")
    encoding = values.get(b"grpc-encoding", b"identity")
    if encoding != b"identity":
        text = encoding[:64].decode("latin-1")
        return HeadRejection(
            200, GrpcStatus.UNIMPLEMENTED, f"grpc-encoding {text} is not supported"
        )
    if has_bad_timeout:
        return HeadRejection(200, GrpcStatus.INTERNAL, "malformed grpc-timeout")
    return None
