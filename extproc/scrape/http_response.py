"""Incremental parser of one HTTP/1.1 response to a GET (RFC 9112).

Pure: the client feeds it. It knows Content-Length, chunked and close-delimited bodies, and keeps no
more than the cap. Of an answer other than 200 only the status is read.
"""

from __future__ import annotations

import enum
import re

_HEAD_END = b"\r\n\r\n"
_HEAD_BYTES = 16_384
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)(?: [^\r\n]*)?\Z")
_CHUNK = re.compile(rb"[ \t]*([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\Z")
_CHUNK_LINE_BYTES = 256
_LENGTH = re.compile(rb"\d{1,12}\Z")


class _Phase(enum.Enum):
    """Part of the response that the next bytes belong to."""

    HEAD = enum.auto()
    COUNTED = enum.auto()
    TO_CLOSE = enum.auto()
    CHUNK_SIZE = enum.auto()
    CHUNK = enum.auto()
    CHUNK_END = enum.auto()
    TRAILER = enum.auto()


class HttpResponseParser:
    """Parses one response incrementally.

    Attributes:
        done: Nothing more is expected.
        failure: Why there is no page; empty while there is hope or when there is one.
        reusable: The connection may carry another request.
        started: A byte of the answer has come.
    """

    __slots__ = (
        "_body",
        "_buffer",
        "_cap",
        "_left",
        "_phase",
        "done",
        "failure",
        "reusable",
        "started",
    )

    def __init__(self, *, cap_bytes: int) -> None:
        self.done = False
        self.failure = ""
        self.reusable = False
        self.started = False
        self._cap = cap_bytes
        self._buffer = b""
        self._body: list[bytes] = []
        self._left = 0
        self._phase = _Phase.HEAD

    @property
    def body(self) -> bytes:
        """Response body; complete once `done` is set without `failure`."""
        return b"".join(self._body)

    def feed(self, received: bytes) -> None:
        """Parses the next bytes; bytes after the end make the connection not reusable."""
        self.started = True
        if self.done:
            self.reusable = False
            return
        self._read(received)

    def _read(self, received: bytes) -> None:
        # A phase rather than a bound method in a field: that would be a cycle, and a page would
        # live until the garbage collector came by.
        if self._phase is _Phase.HEAD:
            self._read_head(received)
        elif self._phase is _Phase.COUNTED:
            self._read_counted(received)
        elif self._phase is _Phase.TO_CLOSE:
            self._read_to_close(received)
        else:
            self._read_chunked(received)

    def end(self) -> None:
        """Handles end of stream, which ends a body without a declared length."""
        if self.done:
            self.reusable = False
        elif self._phase is _Phase.TO_CLOSE:
            self.done = True
        else:
            self._fail("closed")

    def _fail(self, reason: str) -> None:
        self.done, self.failure, self.reusable = True, reason, False
        self._body, self._buffer = [], b""

    def _read_head(self, received: bytes) -> None:
        self._buffer = self._buffer + received if self._buffer else received
        end = self._buffer.find(_HEAD_END)
        if end < 0:
            if len(self._buffer) > _HEAD_BYTES:
                self._fail("not HTTP")
            return
        head, rest = self._buffer[:end], self._buffer[end + len(_HEAD_END) :]
        self._buffer = b""
        first, _, fields = head.partition(b"\r\n")
        status = _STATUS.match(first)
        if status is None:
            self._fail("not HTTP")
        elif status[2].startswith(b"1"):
            self._read_head(rest)
        elif status[2] != b"200":
            self._fail(f"status {status[2].decode()}")
        else:
            self._open(_fields(fields), old=status[1] == b"0")
            if rest and not self.done:
                self._read(rest)
            elif rest:
                self.reusable = False

    def _open(self, fields: dict[bytes, bytes], *, old: bool) -> None:
        """Selects how the body ends (RFC 9112 6.3)."""
        if fields.get(b"content-encoding", b"identity").lower() != b"identity":
            self._fail("encoded")
            return
        connection = fields.get(b"connection", b"").lower()
        self.reusable = b"keep-alive" in connection if old else b"close" not in connection
        coding = fields.get(b"transfer-encoding", b"").lower()
        length = fields.get(b"content-length")
        if coding:
            if coding != b"chunked":
                self._fail("encoded")
            self._phase = _Phase.CHUNK_SIZE
        elif length is None:
            self.reusable = False
            self._left = self._cap
            self._phase = _Phase.TO_CLOSE
        elif not _LENGTH.match(length):
            self._fail("not HTTP")
        elif int(length) > self._cap:
            self._fail("too large")
        else:
            self._left = int(length)
            self.done = self._left == 0
            self._phase = _Phase.COUNTED

    def _read_counted(self, received: bytes) -> None:
        self._left -= len(received)
        if self._left > 0:
            self._body.append(received)
            return
        if self._left < 0:
            received, self.reusable = received[: self._left], False
        self._body.append(received)
        self.done = True

    def _read_to_close(self, received: bytes) -> None:
        self._left -= len(received)
        if self._left < 0:
            self._fail("too large")
            return
        self._body.append(received)

    def _read_chunked(self, received: bytes) -> None:
        buffer = self._buffer + received if self._buffer else received
        at = 0
        while not self.done:
            if self._phase is _Phase.CHUNK:
                piece = buffer[at : at + self._left]
                self._body.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._phase = _Phase.CHUNK_END
            line_end = buffer.find(b"\r\n", at)
            if line_end < 0:
                if len(buffer) - at > _CHUNK_LINE_BYTES:
                    self._fail("not HTTP")
                break
            line, at = buffer[at:line_end], line_end + 2
            self._chunk_line(line)
        if self.done:
            if at < len(buffer):
                self.reusable = False
            self._buffer = b""
        else:
            self._buffer = buffer[at:]

    def _chunk_line(self, line: bytes) -> None:
        """Parses the end of a chunk, a chunk size, or a trailer field after the last chunk."""
        if self._phase is _Phase.TRAILER:
            self.done = not line
        elif self._phase is _Phase.CHUNK_END:
            self._phase = _Phase.CHUNK_SIZE
            if line:
                self._fail("not HTTP")
        elif (size := _CHUNK.match(line)) is None:
            self._fail("not HTTP")
        else:
            self._left = int(size[1], 16)
            self._cap -= self._left
            self._phase = _Phase.CHUNK if self._left else _Phase.TRAILER
            if self._cap < 0:
                self._fail("too large")


def _fields(text: bytes) -> dict[bytes, bytes]:
    fields = {}
    for line in text.split(b"\r\n"):
        name, _, value = line.partition(b":")
        fields[name.lower()] = value.strip()
    return fields
