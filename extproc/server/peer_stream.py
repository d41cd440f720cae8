"""Stream of messages between replicas: an HTTP response whose body is messages behind their lengths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from extproc.routing import peer_sync

#: Bytes of a response besides its body in a row: the parser bounds no head, chunk size or trailer.
_MAX_UNFRAMED_BYTES = 65_536

_LENGTH_BYTES = 4


class PeerStream(asyncio.Protocol):
    """Connection to a peer: the request, and the messages of its response.

    Applied in the callback of the socket: a stream reader would cost a task switch per message.

    Args:
        on_message: Called with each message; returns the reason to end the stream, or None.
    """

    def __init__(self, request: bytes, on_message: Callable[[bytes], str | None]) -> None:
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._is_silent = True
        self._request = request
        self._on_message = on_message
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._buffer = bytearray()
        self._unframed_bytes = 0

    async def wait_ended(self, *, silent_s: float) -> str:
        """Wait for the end; returns its reason, empty where there is nothing to log.

        Args:
            silent_s: Seconds without a message after which it is ended.
        """
        while not self._ended.done():
            self._is_silent = True
            await asyncio.wait([self._ended], timeout=silent_s)
            if self._is_silent:
                self.end("silent")
        return self._ended.result()

    def end(self, reason: str) -> None:
        """Close the connection; the first reason counts."""
        if not self._ended.done():
            self._ended.set_result(reason)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        # uvloop's transports are no subclass of asyncio.Transport, so there is nothing to check.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Parse the next bytes; whatever they are, the result is messages or the end."""
        if self._parser is None:
            return
        self._unframed_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.end("malformed")
        if self._unframed_bytes > _MAX_UNFRAMED_BYTES:
            self.end("malformed")

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        del exc
        self.end("closed")
        # It refers to this object, and in a cycle both would live until the garbage collector came by.
        self._parser = None

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        status = 0 if self._parser is None else self._parser.get_status_code()
        if status != 200:
            self.end(f"status {status}")

    def on_body(self, body: bytes) -> None:
        """Called by the parser for every piece of the body."""
        self._unframed_bytes = 0
        buffer = self._buffer
        buffer += body
        while not self._ended.done() and len(buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(buffer[:_LENGTH_BYTES])
            if end - _LENGTH_BYTES > peer_sync.MAX_MESSAGE_BYTES:
                self.end("malformed")
            elif len(buffer) < end:
                break
            else:
                self._is_silent = False
                reason = self._on_message(bytes(buffer[_LENGTH_BYTES:end]))
                del buffer[:end]
                if reason is not None:
                    self.end(reason)

    def on_message_complete(self) -> None:
        """Called by the parser at the end of the response."""
        self.end("closed")


def encode_frame(message: peer_sync.PeerMessage) -> bytes:
    """Encode a message behind its length, in four bytes."""
    data = peer_sync.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES) + data
