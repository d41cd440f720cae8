"""Incremental parser of one HTTP/1.1 response to a GET: llhttp with bounds.

Pure: the client feeds it. Bodies may have a Content-Length, be chunked, or end with the connection,
and are kept up to a cap. Of an answer other than 200 only the status is read.
"""

from __future__ import annotations

import httptools

#: Longest status line and header fields (bytes).
_HEAD_BYTES = 16_384

#: Bytes of a response in which chunk sizes, extensions and trailers may exceed the body.
_FRAMING_BYTES = 65_536


class HttpResponseParser:
    """Parses one response incrementally.

    Attributes:
        done: Nothing more is expected.
        failure: Reason why there is no page; empty while it may come, and when it is complete.
        reusable: The connection may carry another request.
        started: A byte of the answer has come.
    """

    __slots__ = (
        "_body",
        "_headers",
        "_in_body",
        "_left",
        "_max_bytes",
        "_parser",
        "_received_bytes",
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
        self._body: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}
        self._in_body = False
        self._left = cap_bytes
        self._max_bytes = 2 * cap_bytes + _FRAMING_BYTES
        self._received_bytes = 0
        # Dropped at the end: it refers to this object, and in a cycle a page would live until the
        # garbage collector came by.
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    @property
    def body(self) -> bytes:
        """Response body; complete once `done` is set without `failure`."""
        return b"".join(self._body)

    @property
    def date(self) -> str:
        """Header `date` of the response; empty where there is none."""
        return self._headers.get(b"date", b"").decode("latin-1")

    def feed(self, received: bytes) -> None:
        """Parses the next bytes; bytes after the end make the connection not reusable."""
        self.started = True
        if self._parser is None:
            self.reusable = False
            return
        self._received_bytes += len(received)
        try:
            self._parser.feed_data(received)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self.done:
                self._fail("not HTTP")
            self.reusable = False
        if not self.done:
            self._check_size()
        if self.done:
            self._parser = None

    def end(self) -> None:
        """Handles end of stream, which ends a body without a declared length."""
        self._parser = None
        if self.done:
            self.reusable = False
        elif self._in_body and not self._headers.keys() & {b"content-length", b"transfer-encoding"}:
            self.done = True
        else:
            self._fail("closed")

    def on_message_begin(self) -> None:
        """Called by the parser: bytes after the end of the response."""
        if self.done:
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser for every header field, and for trailers, which are not kept."""
        if not self._in_body:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Called by the parser: decides whether the body is wanted."""
        if self._parser is None or self.done:
            return
        status, headers = self._parser.get_status_code(), self._headers
        if status < 200:
            return
        self._in_body = True
        if status != 200:
            self._fail(f"status {status}")
        elif (
            headers.get(b"content-encoding", b"identity").lower() != b"identity"
            or headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked"
        ):
            self._fail("encoded")
        elif int(headers.get(b"content-length", b"0")) > self._left:
            self._fail("too large")

    def on_body(self, body: bytes) -> None:
        """Called by the parser for every piece of the body."""
        self._left -= len(body)
        if self.done:
            return
        if self._left < 0:
            self._fail("too large")
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Called by the parser at the end of a response; an interim one (1xx) precedes another."""
        if not self._in_body:
            self._headers.clear()
        elif not self.done and self._parser is not None:
            self.done = True
            self.reusable = self._parser.should_keep_alive()

    def _check_size(self) -> None:
        """Fails where head or framing are endless; the parser itself bounds neither."""
        if not self._in_body and self._received_bytes > _HEAD_BYTES:
            self._fail("not HTTP")
        elif self._received_bytes > self._max_bytes:
            self._fail("too large")

    def _fail(self, reason: str) -> None:
        self.done, self.failure, self.reusable = True, reason, False
        self._body = []
