"""Cuts the bytes of a client into frames and header blocks (RFC 9113, sections 3.4, 4 and 6.10)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from extproc.http2 import frames
from extproc.http2.frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    HEAD_BYTES,
    MAX_STREAM_ID,
    ErrorCode,
    Http2Error,
    unpack_head,
)
from extproc.http2.limits import Http2Limits
from extproc.http2.request_head import PartialHeaderBlock, strip_head_fields

#: Work of one call, in bytes of header blocks: some 5 ms if none of them was seen before.
_MAX_WORK: Final = 32 * 1024

#: What a frame and a message cost beside, in the same unit.
_FRAME_WORK: Final = 16
_MESSAGE_WORK: Final = 8

#: Bytes up to which a read is joined with the cut frame before it; a longer one is not copied for it.
_SHORT_READ_BYTES: Final = 4096


class FrameReader(ABC):
    """Reads frames, for a connection to inherit and handle.

    It checks what holds between frames: the preface, SETTINGS as the first frame, and that no
    other frame is inside of a header block. A call does a bounded amount of work, and leaves the
    rest of its bytes to the next: a peer can fill a read of 256 kB with header blocks.

    Attributes:
        has_settings: True once the peer began as HTTP/2 does.
        has_unread: True if complete frames wait for the next call, which needs no further bytes.
    """

    def __init__(self, limits: Http2Limits) -> None:
        self.has_unread = False
        self._limits = limits
        self._buffer = b""
        self._has_preface = self.has_settings = False
        self._is_plain = False  # settings came, and no header block is incomplete
        self._block: PartialHeaderBlock | None = None

    @property
    @abstractmethod
    def num_streams(self) -> int:
        """Open streams."""

    @abstractmethod
    def _on_data(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> int:
        """Handle a DATA frame, whose head is not checked; returns the number of its messages.

        Its payload is `data[start:end]`, which is not copied until it is known where it belongs.
        """

    @abstractmethod
    def _on_block(self, stream_id: int, block: bytes, *, is_end_of_stream: bool) -> None:
        """Handle a complete header block."""

    @abstractmethod
    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle a frame that is neither DATA nor part of a header block; its type may be unknown."""

    @abstractmethod
    def _on_stream_error(self, error: Http2Error) -> None:
        """Handle an error that ends one stream."""

    def _read(self, data: bytes) -> None:
        """Handle the frames that bytes complete, within the bound on work; raises to end all."""
        at = 0
        if self._buffer:
            data, at = self._complete_frame(data)
        end = len(data)
        if not self._has_preface:
            at = self._read_preface(data)
            if not at:
                self._buffer = data
                return
        work = _MAX_WORK
        while end - at >= HEAD_BYTES and work > 0:
            work -= _FRAME_WORK
            high, low, kind, flags, stream_id = unpack_head(data, at)
            start = at + HEAD_BYTES
            at = start + (high << 8 | low)
            if at - start > DEFAULT_FRAME_BYTES:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "frame too large")
            if at > end:
                at = start - HEAD_BYTES
                break
            stream_id &= MAX_STREAM_ID
            try:
                if kind == DATA and self._is_plain:
                    work -= _MESSAGE_WORK * self._on_data(flags, stream_id, data, start, at)
                else:
                    work -= at - start
                    work -= self._read_frame(kind, flags, stream_id, data[start:at])
            except Http2Error as error:
                if not error.stream_id:
                    raise
                self._on_stream_error(error)
        self._buffer = data[at:] if at < end else b""
        self.has_unread = work <= 0 and end - at >= HEAD_BYTES

    def _complete_frame(self, data: bytes) -> tuple[bytes, int]:
        """Handle the frame that the last read cut, or join it with the data.

        Returns the data that are to be read, and the offset at which that begins.
        """
        buffer = self._buffer
        if len(data) <= _SHORT_READ_BYTES or len(buffer) < HEAD_BYTES or not self._has_preface:
            return buffer + data, 0
        high, low, *_ = unpack_head(buffer, 0)
        missing_bytes = HEAD_BYTES + (high << 8 | low) - len(buffer)
        if not 0 < missing_bytes <= len(data):
            return buffer + data, 0
        self._buffer = b""
        self._read(buffer + data[:missing_bytes])
        return data, missing_bytes

    def _drop_unread(self) -> None:
        """Drop the bytes of frames that were not handled."""
        self._buffer = b""
        self.has_unread = False

    def _read_preface(self, data: bytes) -> int:
        """Check the preface; returns the offset of what follows it."""
        preface = frames.PREFACE
        if data[: len(preface)] != preface[: len(data)]:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "no preface of HTTP/2")
        if len(data) < len(preface):
            return 0
        self._has_preface = True
        return len(preface)

    def _read_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> int:
        """Check a frame against those before it, and handle it; returns its work beside its bytes."""
        if self._block is not None and (
            kind != frames.CONTINUATION or stream_id != self._block.stream_id
        ):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "frame inside of a header block")
        if not self.has_settings:
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "no settings after the preface")
            self.has_settings = self._is_plain = True
        if kind == frames.HEADERS:
            self._read_headers(flags, stream_id, payload)
        elif kind == frames.CONTINUATION:
            self._read_continuation(flags, stream_id, payload)
        else:
            self._on_frame(kind, flags, stream_id, payload)
            if kind == frames.SETTINGS:
                return self.num_streams  # the windows of all of them may change
        return 0

    def _read_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        frames.check_head(frames.HEADERS, stream_id, len(payload))
        fragment = strip_head_fields(payload, flags, stream_id)
        is_end_of_stream = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._on_block(stream_id, fragment, is_end_of_stream=is_end_of_stream)
        else:
            self._is_plain = False
            self._block = PartialHeaderBlock(stream_id, fragment, is_end_of_stream=is_end_of_stream)

    def _read_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        frames.check_head(frames.CONTINUATION, stream_id, len(payload))
        block = self._block
        if block is None:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        block.add(payload, self._limits)
        if flags & frames.END_HEADERS:
            self._block, self._is_plain = None, True
            self._on_block(block.stream_id, block.join(), is_end_of_stream=block.is_end_of_stream)
