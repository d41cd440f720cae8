"""HTTP client for pages of engines: one keep-alive connection per endpoint.

A shell around an incremental parser of a response to a GET or POST: llhttp with bounds. It exists because
a full HTTP client costs more per scrape than the reading of the page, and bounds neither interim answers
nor the framing of chunks. Bodies may have a Content-Length, be chunked, or end with the connection, and
are kept up to a cap. Of an answer other than 200 only the status is read.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Final, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from extproc.endpoint import join_host_port
from extproc.errors import describe_connection_error

#: Longest status line and header fields (bytes).
_HEAD_BYTES = 16_384

#: Bytes of a response in which chunk sizes, extensions and trailers may exceed the body.
_FRAMING_BYTES = 65_536

#: Reason of a failure: a body, or what frames it, is above its bound.
TOO_LARGE: Final = "too large"

#: Pieces of a body at most (count): a chunk of a byte costs as much as one of a page, and the event loop
#: may read megabytes of them in one turn.
_MAX_PIECES = 16_384


#: A TLS context, or the source of one for each connection.
TlsSource = ssl.SSLContext | Callable[[], ssl.SSLContext]


def build_tls(authorities: str = "") -> ssl.SSLContext:
    """Build the TLS context of a client, which verifies certificates as Envoy and clients in Go do.

    By default Python 3.13 refuses authorities without extensions that RFC 5280 requires and that many
    private ones lack, such as those of `openssl req -x509` and of older clusters.

    Args:
        authorities: File with authorities (PEM); empty for those of the system.
    """
    context = ssl.create_default_context(cafile=authorities or None)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


class HttpResponseParser:
    """Parses one response incrementally.

    Attributes:
        done: Nothing more is expected.
        failure: Reason why there is no page; empty while it may come, and when it is complete.
        reusable: The connection may carry another request.
        started: A byte of the answer has come.
    """

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
            self._fail(TOO_LARGE)

    def on_body(self, body: bytes) -> None:
        """Called by the parser for every piece of the body."""
        self._left -= len(body)
        if self.done:
            return
        if self._left < 0 or len(self._body) >= _MAX_PIECES:
            self._fail(TOO_LARGE)
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
            self._fail(TOO_LARGE)

    def _fail(self, reason: str) -> None:
        self.done, self.failure, self.reusable = True, reason, False
        self._body = []


class ScrapeTarget(msgspec.Struct, frozen=True):
    """Address of a page to scrape, with its HTTP request already encoded.

    Attributes:
        host: IP literal without brackets.
        request: Encoded request, from request line to blank line.
        server_name: Name that the certificate is for (TLS); empty for that of `host`.
    """

    host: str
    port: int
    request: bytes
    server_name: str = ""


class FetchedPage(msgspec.Struct, frozen=True):
    """A page with what else its response says.

    Attributes:
        body: The page; empty after a failure.
        failure: Reason of a `FetchFailed`; empty for none.
        date: Header `date`; empty where there is none.
    """

    body: bytes = b""
    failure: str = ""
    date: str = ""


class FetchFailed(msgspec.Struct, frozen=True):
    """A fetch that returned no page.

    Attributes:
        reason: `timeout`, `refused`, `unreachable`, `too many open files`, `tls`, `closed`,
            `too large`, `encoded`, `not HTTP` or `status NNN`; few enough to label a metric with.
    """

    reason: str

    @property
    def status(self) -> int:
        """The HTTP status, if that is the reason; else 0."""
        return int(self.reason[7:]) if self.reason.startswith("status ") else 0


#: The Prometheus text format, which every engine's metrics page has.
PROMETHEUS = "text/plain;version=0.0.4"


def target(
    host: str,
    port: int,
    *,
    path: str,
    method: str = "GET",
    accept: str = PROMETHEUS,
    more: str = "",
) -> ScrapeTarget:
    """Builds the target of one page; no compression, which costs more than the LAN it saves."""
    return ScrapeTarget(
        host,
        port,
        (
            f"{method} {path} HTTP/1.1\r\nhost: {join_host_port(host, port)}\r\nuser-agent: extproc\r\n"
            f"accept: {accept}\r\naccept-encoding: identity\r\n{more}\r\n"
        ).encode(),
    )


def post_target(url: str) -> ScrapeTarget:
    """Builds the target of a POST of JSON; raises ValueError without a host, or with a user."""
    parts = urlsplit(url)
    host = parts.hostname
    if not host or "@" in parts.netloc:
        raise ValueError("a URL with a host and without a user is expected")
    host.encode("idna")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    accept, more = "application/json", "content-type: application/json\r\n"
    return target(host, port, path=parts.path, method="POST", accept=accept, more=more)


class _Connection(asyncio.Protocol):
    """One TCP connection, which carries one request at a time."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._reply: HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def request(self, request: bytes, *, cap_bytes: int) -> HttpResponseParser:
        answer = self._reply = HttpResponseParser(cap_bytes=cap_bytes)
        if self._transport is None or self.closed:
            answer.end()
            return answer
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._waiter
        # Not kept until the next request: 50 kB for each of many idle connections.
        self._reply = self._waiter = None
        return answer

    def drop(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio.Transport, so there is nothing to check.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._reply is None or self._reply.done:
            # Unsolicited bytes: what follows could be taken for a response.
            self.drop()
            return
        self._reply.feed(data)
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.closed = True
        if self._reply is not None:
            self._reply.end()
            self._wake()

    def _wake(self) -> None:
        if self._reply and self._reply.done and self._waiter and not self._waiter.done():
            self._waiter.set_result(None)


class ScrapeClient:
    """Fetches pages over keep-alive connections.

    Args:
        timeout_s: Time limit for connecting, sending and reading together (seconds).
        cap_bytes: Longest body taken.
        idle_s: A connection unused for longer is not used again: what lies between may have
            forgotten it. Engines close theirs after 5 s (uvicorn's default), which is noticed; a
            request that crosses the close is sent again.
        tls: Context for https, or its source; None for http.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        cap_bytes: int,
        idle_s: float = 30.0,
        tls: TlsSource | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._cap_bytes = cap_bytes
        self._idle_s = idle_s
        self._tls = tls
        self._idle_connections: dict[tuple[str, int], _Connection] = {}

    async def get(self, where: ScrapeTarget) -> bytes | FetchFailed:
        """Fetches one page.

        When the server closed a kept connection before a byte of the answer came, the request is
        sent once more at once on a fresh one.
        """
        return _body_of(await self.get_page(where))

    async def post(self, where: ScrapeTarget, body: bytes) -> bytes | FetchFailed:
        """Sends a body, and returns that of the answer; fails and tries again as `get` does."""
        head = where.request.removesuffix(b"\r\n")
        request = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
        return _body_of(await self.get_page(msgspec.structs.replace(where, request=request)))

    async def get_page(self, where: ScrapeTarget) -> FetchedPage:
        """Fetches a page as `get` does, with the date of its response."""
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._get(where)
        except TimeoutError:
            return FetchedPage(failure="timeout")
        except ConnectionRefusedError:
            return FetchedPage(failure="refused")
        except ssl.SSLError:
            return FetchedPage(failure="tls")
        except (ConnectionResetError, ConnectionAbortedError) as error:
            # Connecting does not end so: a server of TLS 1.2 that wants a client certificate.
            return FetchedPage(failure="tls" if self._tls else describe_connection_error(error))
        except OSError as error:
            return FetchedPage(failure=describe_connection_error(error))
        return FetchedPage(answer.body, answer.failure, answer.date)

    def forget(self, where: ScrapeTarget) -> None:
        """Closes the connection to a removed target."""
        idle = self._idle_connections.pop((where.host, where.port), None)
        if idle is not None:
            idle.drop()

    def close(self) -> None:
        """Closes every connection."""
        while self._idle_connections:
            self._idle_connections.popitem()[1].drop()

    async def _get(self, where: ScrapeTarget) -> HttpResponseParser:
        idle = self._idle_connections.pop((where.host, where.port), None)
        if idle is not None:
            answer = await self._ask(idle, where)
            if answer.started or answer.failure != "closed":
                return answer
        return await self._ask(await self._connect(where), where)

    async def _ask(self, connection: _Connection, where: ScrapeTarget) -> HttpResponseParser:
        loop = asyncio.get_running_loop()
        if connection.idle_since and loop.time() - connection.idle_since > self._idle_s:
            connection.drop()
        keep = False
        try:
            answer = await connection.request(where.request, cap_bytes=self._cap_bytes)
            keep = answer.reusable and not connection.closed
        finally:
            # Also on time-out and cancellation: a late answer must not meet the next request.
            if not keep:
                connection.drop()
        if keep:
            connection.idle_since = loop.time()
            # The one of another call that ended first is closed.
            self.forget(where)
            self._idle_connections[where.host, where.port] = connection
            self._close_unused(connection.idle_since)
        return answer

    def _close_unused(self, now: float) -> None:
        """Closes connections that are too old to be used, which are the first ones."""
        idle = self._idle_connections
        while idle and now - next(iter(idle.values())).idle_since > self._idle_s:
            idle.pop(next(iter(idle))).drop()

    async def _connect(self, where: ScrapeTarget) -> _Connection:
        create = asyncio.get_running_loop().create_connection
        tls = self._tls() if callable(self._tls) else self._tls
        name = (where.server_name or None) if tls else None
        _, connection = await create(
            _Connection, where.host, where.port, ssl=tls, server_hostname=name
        )
        return connection


def _body_of(page: FetchedPage) -> bytes | FetchFailed:
    return FetchFailed(page.failure) if page.failure else page.body
