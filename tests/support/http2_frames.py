"""A raw HTTP/2 client of the core: frames in, frames and events out."""

from __future__ import annotations

import struct
from collections import Counter
from typing import NamedTuple

import hpack

from extproc.http2.connection import Http2Connection
from extproc.http2.frames import ErrorCode
from extproc.http2.limits import Http2Limits, ReceiveBudget
from extproc.http2.sender import SendBudget

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE = range(6)
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(6, 10)
END_STREAM = ACK = 1
END_HEADERS, PADDED, HAS_PRIORITY = 4, 8, 32

PATH = "/test.Service/Method"
CALL = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", PATH),
    (":authority", "a"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)


class Frame(NamedTuple):
    """One frame that the server sent."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def number(self) -> int:
        """The last number of 32 bits: an error code or a window."""
        return int(struct.unpack(">I", self.payload[-4:])[0])

    @property
    def error(self) -> int:
        """Error code of GOAWAY."""
        return int(struct.unpack(">I", self.payload[4:8])[0])


def frame(kind: int, flags: int = 0, stream_id: int = 0, payload: bytes = b"") -> bytes:
    """Build a frame."""
    return (
        struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload
    )


def number(value: int) -> bytes:
    """Encode 32 bits."""
    return struct.pack(">I", value)


def setting(name: int, value: int) -> bytes:
    """Encode a setting."""
    return struct.pack(">HI", name, value)


def message(data: bytes, flag: int = 0) -> bytes:
    """Prefix a gRPC message."""
    return bytes([flag]) + number(len(data)) + data


def parse(data: bytes) -> list[Frame]:
    """Cut bytes into frames."""
    frames = []
    while data:
        size = int.from_bytes(data[:3], "big")
        kind, flags, stream_id = struct.unpack(">BBI", data[3:9])
        frames.append(Frame(kind, flags, stream_id, data[9 : 9 + size]))
        data = data[9 + size :]
    return frames


class RawClient:
    """Client that sends what it likes.

    Attributes:
        core: The server.
        counts: Its counts of limits.
        events: All events so far.
        frames: All frames it sent so far.
        now: Time of the next bytes.
        send_budget: Limit on answers that wait.
    """

    def __init__(
        self,
        *,
        begin: bool = True,
        budget: int = 1 << 24,
        send_budget: SendBudget | None = None,
        **limits: int,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.budget = ReceiveBudget(budget)
        self.send_budget = send_budget or SendBudget(Http2Limits(**limits).max_total_unsent_bytes)
        self.core = Http2Connection(
            Http2Limits(**limits),
            self.budget,
            self.counts,
            now=0.0,
            send_budget=self.send_budget,
            holder=self,
        )
        self.events: list[object] = []
        self.frames: list[Frame] = []
        self.now = 0.0
        self.encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()
        if begin:
            self.encoder.header_table_size = 0
            self.send(PREFACE + frame(SETTINGS), frame(SETTINGS, ACK))

    def send(self, *data: bytes) -> list[Frame]:
        """Send bytes; returns the frames that answer them."""
        self.events += self.core.receive(b"".join(data), self.now)
        while self.core.has_unread:
            self.events += self.core.receive(b"", self.now)
        return self.read()

    def drop_answer(self, stream_id: int) -> None:
        """End a call whose answer the budget drops."""
        self.core.reset_call(stream_id, ErrorCode.CANCEL)

    def read(self) -> list[Frame]:
        """Frames that the server has to write."""
        frames = []
        while self.core.has_output:
            frames += parse(self.core.take_output())
        self.frames += frames
        return frames

    def call(
        self,
        stream_id: int = 1,
        *,
        flags: int = END_HEADERS,
        fields: object = CALL,
        data: bytes = b"",
    ) -> list[Frame]:
        """Begin a call."""
        block = self.encoder.encode(list(fields), huffman=True)  # type: ignore[call-overload]
        body = frame(DATA, 0, stream_id, data) if data else b""
        return self.send(frame(HEADERS, flags, stream_id, block), body)

    def fields(self, answer: Frame) -> dict[str, str]:
        """Decode a header block of the server."""
        return dict(self._decoder.decode(answer.payload))

    @property
    def ended_with(self) -> int | None:
        """Error code of the GOAWAY that ended the connection; None while it goes on."""
        if not self.core.is_terminated:
            return None
        return next(answer.error for answer in reversed(self.frames) if answer.kind == GOAWAY)
