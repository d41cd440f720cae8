"""HTTP/1.1 by hand, both ends: what libraries tidy up is what these tests look at.

Duplicate headers, chunk by chunk sending and reading, trailers, and connections cut at any point.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

import msgspec

from tests.support.canary import AUTHORIZATION

Pairs = Sequence[tuple[str, str]]

#: Bytes written between looks at the peer's flow control.
_PIECE_BYTES = 1 << 20


class Head(msgspec.Struct, frozen=True):
    """Start line and headers, names in lower case."""

    line: str
    headers: Pairs

    def all(self, name: str) -> list[str]:
        """Every value of a header, in order."""
        return [value for key, value in self.headers if key == name]

    def get(self, name: str) -> str:
        """The value of a header that is there once; empty when it is not there."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} is there {len(values)} times"
        return values[0] if values else ""


class HttpAnswer(msgspec.Struct, frozen=True):
    """A whole response."""

    head: Head
    body: bytes
    trailers: Pairs = ()

    @property
    def status(self) -> int:
        return int(self.head.line.split()[1])

    def json(self):
        return msgspec.json.decode(self.body)


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next head; None when the peer has nothing more to say."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    line, *rest = raw.decode("latin-1").split("\r\n")[:-2]
    return Head(line, _pairs(rest))


class Body:
    """A body as it arrives.

    Args:
        reader: Stands behind the head.
        head: Tells how the body is framed.
        bodiless: The head forbids a body whatever its headers say.
    """

    def __init__(self, reader: asyncio.StreamReader, head: Head, *, bodiless: bool = False) -> None:
        self._reader = reader
        self.chunked = "chunked" in head.get("transfer-encoding")
        self._left = 0 if bodiless else int(head.get("content-length") or 0)
        if bodiless:
            self.chunked = False
        self.trailers: Pairs = ()

    async def piece(self) -> bytes:
        """The next chunk, or what has come so far of a counted body; empty at the end."""
        if not self.chunked:
            if not self._left:
                return b""
            got = await self._reader.read(min(self._left, _PIECE_BYTES))
            if not got:
                raise asyncio.IncompleteReadError(b"", self._left)
            self._left -= len(got)
            return got
        size = int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16)
        if size:
            piece = await self._reader.readexactly(size)
            await self._reader.readexactly(2)
            return piece
        lines = []
        while (line := await self._reader.readuntil(b"\r\n")) != b"\r\n":
            lines.append(line.decode("latin-1").rstrip("\r\n"))
        self.chunked, self.trailers = False, _pairs(lines)
        return b""

    async def rest(self) -> bytes:
        """Everything to the end."""
        pieces = []
        while piece := await self.piece():
            pieces.append(piece)
        return b"".join(pieces)


class RawCall:
    """One request on a connection of its own, as slow and as odd as a test wants it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._method = ""
        self.head: Head | None = None
        self.body: Body | None = None

    async def start(
        self,
        method: str,
        path: str,
        headers: Iterable[tuple[str, str]] = (),
        *,
        chunked: bool = False,
        body: bytes = b"",
    ) -> None:
        """Send the head, and in the same write the body."""
        self._method = method
        lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines += ["transfer-encoding: chunked"] if chunked else []
        await self.send(("\r\n".join(lines) + "\r\n\r\n").encode() + body)

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        view = memoryview(data)
        for at in range(0, len(data), _PIECE_BYTES):
            self._writer.write(view[at : at + _PIECE_BYTES])
            await self._writer.drain()

    async def chunk(self, data: bytes) -> None:
        """Send one chunk of a chunked body."""
        await self.send(b"%x\r\n" % len(data) + data + b"\r\n")

    async def end(self, trailers: Iterable[tuple[str, str]] = ()) -> None:
        """End a chunked body."""
        lines = [f"{name}: {value}\r\n" for name, value in trailers]
        await self.send(("0\r\n" + "".join(lines) + "\r\n").encode())

    async def begun(self) -> HttpAnswer:
        """The head of the answer; its body stays to be read from `body`."""
        self.head = await read_head(self._reader)
        assert self.head is not None, "the connection ended without an answer"
        bodiless = self._method == "HEAD" or self.head.line.split()[1] in {"204", "304"}
        self.body = Body(self._reader, self.head, bodiless=bodiless)
        return HttpAnswer(self.head, b"")

    async def answer(self) -> HttpAnswer:
        """The whole answer."""
        if self.body is None:
            await self.begun()
        body = await self.body.rest()
        return HttpAnswer(self.head, body, self.body.trailers)

    async def ended(self) -> None:
        """Read to the end of the connection, whatever comes."""
        with contextlib.suppress(ConnectionError):
            await self._reader.read()

    def cut(self) -> None:
        """Reset the connection."""
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def calling(port: int):
    """A connection to a port on loopback."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield RawCall(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def ask(
    port: int,
    path: str,
    body: bytes | None = None,
    *,
    method: str = "",
    headers: Iterable[tuple[str, str]] = (),
    chunks: Sequence[bytes] | None = None,
    trailers: Iterable[tuple[str, str]] = (),
) -> HttpAnswer:
    """One request from start to end.

    Args:
        port: Where to.
        path: What for.
        body: Sent with its length; None sends none.
        method: POST with a body and GET without one, unless named.
        headers: Further headers; without `authorization` a secret is sent as well.
        chunks: A chunked body in these chunks, instead of `body`.
        trailers: After the chunks.
    """
    has_body = body is not None or chunks is not None
    named = list(headers)
    secret = [] if "authorization" in {name.lower() for name, _ in named} else [AUTHORIZATION]
    async with calling(port) as call:
        sized = [] if body is None else [("content-length", str(len(body)))]
        await call.start(
            method or ("POST" if has_body else "GET"),
            path,
            [*secret, *named, *sized],
            chunked=chunks is not None,
        )
        # A server may refuse before it has seen everything, and stop reading.
        with contextlib.suppress(ConnectionError):
            for chunk in chunks or ():
                await call.chunk(chunk)
            if chunks is not None:
                await call.end(trailers)
            if body is not None:
                await call.send(body)
        return await call.answer()


def _pairs(lines: Iterable[str]) -> Pairs:
    split = [line.partition(":") for line in lines]
    return [(name.strip().lower(), value.strip()) for name, _, value in split]
