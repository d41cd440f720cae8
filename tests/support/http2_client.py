"""A client of any HTTP/2 server, framed by `h2`: sends what a script says, and collects answers."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Sequence

import h2.config
import h2.connection
import h2.events
import msgspec

from tests.support import http2_serving

#: Seconds an answer may take on a busy machine.
ANSWER_S = 300.0


class CallAnswer(msgspec.Struct):
    """Answer of a server to one call.

    Attributes:
        http_status: HTTP status; empty before one came.
        grpc_status: gRPC status; empty without trailers.
        grpc_message: Its text, as sent.
        messages: Messages, in order.
        reset: Error code of a reset; None without one.
        is_over: True once the server ended the stream.
    """

    http_status: str = ""
    grpc_status: str = ""
    grpc_message: str = ""
    messages: list[bytes] = []
    reset: int | None = None
    is_over: bool = False

    @property
    def outcome(self) -> tuple[str, str]:
        """HTTP status and gRPC status."""
        return self.http_status, self.grpc_status


def cut_messages(data: bytes) -> tuple[list[bytes], bytes]:
    """Cut length-prefixed messages; returns them and the incomplete rest."""
    messages = []
    while len(data) >= 5:
        (size,) = struct.unpack_from(">I", data, 1)
        if len(data) < 5 + size:
            break
        messages.append(data[5 : 5 + size])
        data = data[5 + size :]
    return messages, data


class Http2Client:
    """One connection.

    Args:
        reader: Of the connection.
        writer: Of the connection.

    Attributes:
        framing: `h2`, to send whatever it allows.
        answers: By stream.
        goaway: Error code of the last GOAWAY; None before one came.
        is_closed: True once the server closed the connection.
        has_settings: True once its settings came.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.framing = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=True, validate_outbound_headers=False, normalize_outbound_headers=False
            )
        )
        self.answers: dict[int, CallAnswer] = {}
        self.goaway: int | None = None
        self.is_closed = False
        self.has_settings = False
        self._rests: dict[int, bytes] = {}
        self.framing.initiate_connection()
        self.flush()

    @classmethod
    async def connect(cls, port: int, *, with_tls: bool = False) -> Http2Client:
        """Connect to a server on loopback."""
        context = http2_serving.client_context() if with_tls else None
        return cls(*await asyncio.open_connection(http2_serving.LOCAL, port, ssl=context))

    def flush(self) -> None:
        """Write what `framing` has to send."""
        self._writer.write(self.framing.data_to_send())

    def open(self, fields: Sequence[tuple[str, str]], *, ends: bool = False) -> int:
        """Begin a call; returns its stream."""
        stream_id = self.framing.get_next_available_stream_id()
        self.framing.send_headers(stream_id, list(fields), end_stream=ends)
        self.answers[stream_id] = CallAnswer()
        self._rests[stream_id] = b""
        self.flush()
        return stream_id

    async def until(self, is_met: Callable[[], bool]) -> None:
        """Read until a condition holds, or the server closes the connection."""
        async with asyncio.timeout(ANSWER_S):
            while not is_met() and not self.is_closed:
                try:
                    data = await self._reader.read(1 << 16)
                except ConnectionError:
                    data = b""
                if not data:
                    self.is_closed = True
                    break
                for event in self.framing.receive_data(data):
                    self._take(event)
                self.flush()

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        with contextlib.suppress(OSError):  # of TLS too, where the server still sends
            await self._writer.wait_closed()

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RemoteSettingsChanged):
            self.has_settings = True
        if isinstance(event, h2.events.ConnectionTerminated):
            self.goaway = int(event.error_code or 0)
            return
        answer = self.answers.get(getattr(event, "stream_id", 0) or 0)
        if answer is None:
            return
        if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            fields = {name.decode(): value.decode() for name, value in event.headers}
            answer.http_status = fields.get(":status", answer.http_status)
            answer.grpc_status = fields.get("grpc-status", answer.grpc_status)
            answer.grpc_message = fields.get("grpc-message", answer.grpc_message)
        elif isinstance(event, h2.events.DataReceived):
            rest = self._rests[event.stream_id] + event.data
            messages, self._rests[event.stream_id] = cut_messages(rest)
            answer.messages += messages
            self.framing.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            answer.reset = int(event.error_code)
            answer.is_over = True
        elif isinstance(event, h2.events.StreamEnded):
            answer.is_over = True
