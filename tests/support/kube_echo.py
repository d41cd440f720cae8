"""A server in place of the one the gateway suite deploys: it says what it was asked, and who it is.

HTTP/1.1, or HTTP/2 without TLS where the client begins with its preface.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded

from tests.e2e import http1


class Echo:
    """One pod.

    Attributes:
        name: Of the pod.
        namespace: Of the pod.
        host: Its address.
        ports: Where it listens.
        pages: What to say to a GET of HTTP/1.1 by path, in place of the echo.
    """

    def __init__(self, name: str, namespace: str, host: str, ports: Sequence[int]) -> None:
        self.name = name
        self.namespace = namespace
        self.host = host
        self.ports = tuple(ports)
        self.pages: dict[str, str] = {}
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self._writers.add(writer)
        port = writer.get_extra_info("sockname")[1]
        try:
            # No HTTP/1.1 method that is sent here begins like the preface.
            first = await reader.read(1)
            if first == b"P" and (second := await reader.read(1)) == b"R":
                await self._http2(first + second, reader, writer, port)
            elif first:
                begun = first + second if first == b"P" else first
                await self._http1(begun, reader, writer, port)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def _http1(self, begun, reader, writer, port) -> None:
        while True:
            raw = await reader.readuntil(b"\r\n\r\n") if begun else b""
            head = _head(begun + raw) if begun else await http1.read_head(reader)
            begun = b""
            if head is None:
                return
            sent = await http1.Body(reader, head).rest()
            method, path, _ = head.line.split()
            page = self.pages.get(path)
            body = (
                self._says("HTTP/1.1", port, method, path, head.headers, sent)
                if page is None
                else page.encode()
            )
            kind = "application/json" if page is None else "text/plain; version=0.0.4"
            lines = ["HTTP/1.1 200 OK", f"content-type: {kind}"]
            lines += [f"content-length: {len(body)}", "", ""]
            writer.write("\r\n".join(lines).encode() + body)
            await writer.drain()

    async def _http2(self, begun, reader, writer, port) -> None:
        wire = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        wire.initiate_connection()
        requested = {}
        data = begun
        while data:
            for event in wire.receive_data(data):
                match event:
                    case RequestReceived():
                        requested[event.stream_id] = list(event.headers), []
                    case DataReceived():
                        requested[event.stream_id][1].append(event.data)
                        length = event.flow_controlled_length
                        wire.acknowledge_received_data(length, event.stream_id)
                    case StreamEnded():
                        self._answer2(wire, event.stream_id, *requested.pop(event.stream_id), port)
            writer.write(wire.data_to_send())
            await writer.drain()
            data = await reader.read(65_536)

    def _answer2(self, wire, stream, headers, pieces, port) -> None:
        result = dict(headers)
        plain = [(name, value) for name, value in headers if not name.startswith(":")]
        plain.append(("host", result[":authority"]))
        sent = b"".join(pieces)
        body = self._says("HTTP/2.0", port, result[":method"], result[":path"], plain, sent)
        wire.send_headers(stream, [(":status", "200"), ("content-type", "application/json")])
        wire.send_data(stream, body, end_stream=True)

    def _says(self, protocol, port, method, path, headers, sent) -> bytes:
        text: dict[str, list[str]] = {}
        for name, value in headers:
            text.setdefault(name.lower(), []).append(value)
        return json.dumps(
            {
                "method": method,
                "path": path,
                "host": text.get("host", [""])[0],
                "headers": text,
                "body": sent.decode(),
                "protocol": protocol,
                "pod": self.name,
                "namespace": self.namespace,
                "httpPort": port,
            }
        ).encode()


def _head(raw: bytes) -> http1.Head:
    line, *rest = raw.decode("latin-1").split("\r\n")[:-2]
    pairs = [entry.partition(":") for entry in rest]
    return http1.Head(line, [(name.lower(), value.strip()) for name, _, value in pairs])


@contextlib.asynccontextmanager
async def echo(name: str, namespace: str, host: str, ports: Sequence[int]):
    """A pod that listens on all its ports for as long as the block runs."""
    item = Echo(name, namespace, host, ports)
    async with contextlib.AsyncExitStack() as servers:
        servers.callback(item.cut)
        for port in item.ports:
            server = await asyncio.start_server(item.serve, host, port, backlog=1024)
            servers.callback(server.close)
        yield item
