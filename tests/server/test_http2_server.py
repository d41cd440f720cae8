"""The native server around the connection: deadlines, peers that do not read, and the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import hpack
import pytest

from extproc.config.settings import LimitsSection
from extproc.http2.limits import ReceiveBudget
from extproc.server import http2_protocol, native_server
from extproc.server.http2_protocol import ServerCall
from extproc.server.transport import Keepalive
from tests.support import http2_frames, serving
from tests.support.http2_frames import (
    ACK,
    CALL,
    DATA,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    PATH,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)

#: More than the kernel and the server buffer for a peer that reads nothing.
LARGE = bytes(32 << 20)

#: Settings and a window by which a peer takes everything.
WIDE = frame(SETTINGS, 0, 0, http2_frames.setting(4, 0x7FFF_FFFF)) + frame(
    WINDOW_UPDATE, 0, 0, http2_frames.number(0x7FFF_0000)
)

USUAL = Keepalive()


class RecordingCall(ServerCall):
    """A call that notes what it hears, and answers each message with what `answer` holds."""

    answer = b""

    def __init__(self, connection, stream_id):
        super().__init__(connection, stream_id)
        self.heard = []
        self.over = asyncio.Event()

    def on_message(self, message):
        self.heard.append(message)
        self.send((self.answer,))

    def on_half_close(self):
        self.end()

    def on_terminated(self):
        self.over.set()


class Http2Scene:
    """A server of one method, and raw clients of it."""

    def __init__(self, keepalive):
        self.calls = []
        self._is_called = asyncio.Event()
        self.writers = []
        self.counts = Counter()
        self.server = native_server.build_server(
            {PATH: self.open},
            LimitsSection(max_message_bytes=64 << 20),
            budget=ReceiveBudget(1 << 28),
            counts=self.counts,
            keepalive=keepalive,
        )
        self.port = native_server.bind(self.server, f"{serving.LOCAL}:0", flag="--grpc-port")
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()

    def open(self, connection, stream_id):
        self.calls.append(RecordingCall(connection, stream_id))
        self._is_called.set()
        return self.calls[-1]

    async def called(self, count=1):
        """Wait for so many calls."""
        async with asyncio.timeout(serving.LIMIT_S):
            while len(self.calls) < count:
                self._is_called.clear()
                await self._is_called.wait()

    async def connect(self):
        """A connection that sent its preface and settings."""
        reader, writer = await asyncio.open_connection(serving.LOCAL, self.port)
        writer.write(PREFACE + WIDE)
        self.writers.append(writer)
        return reader, writer

    def head(self, stream_id=1, *fields):
        """The frame that begins a call."""
        block = self.encoder.encode([*CALL, *fields])
        return frame(HEADERS, END_HEADERS, stream_id, block)

    async def read(self, reader, kind):
        """The next frame of a type: its flags and payload."""
        while True:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == kind:
                return head[4], payload


@contextlib.asynccontextmanager
async def serving_calls(keepalive=USUAL):
    """A started server."""
    scene = Http2Scene(keepalive)
    await scene.server.start()
    try:
        yield scene
    finally:
        for writer in scene.writers:
            writer.close()
        await scene.server.stop(None)


async def test_deadline_of_a_client_ends_its_call():
    """`grpc-timeout` holds on the server too, with the status of gRPC."""
    async with serving_calls() as scene:
        reader, writer = await scene.connect()
        writer.write(scene.head(1, ("grpc-timeout", "20m")))
        _, trailers = await scene.read(reader, HEADERS)
        fields = dict(scene.decoder.decode(trailers))
        assert fields["grpc-status"] == "4"
        assert scene.calls[0].over.is_set()


async def test_unknown_method_is_unimplemented():
    """Its call ends; the connection goes on."""
    async with serving_calls() as scene:
        reader, writer = await scene.connect()
        block = scene.encoder.encode([*CALL[:2], (":path", "/no.Such/Method"), *CALL[3:]])
        writer.write(frame(HEADERS, END_HEADERS, 1, block) + scene.head(3))
        _, trailers = await scene.read(reader, HEADERS)
        assert dict(scene.decoder.decode(trailers))["grpc-status"] == "12"
        writer.write(frame(DATA, 0, 3, http2_frames.message(b"x")))
        await scene.read(reader, DATA)
        assert scene.calls[0].heard == [b"x"]


async def test_peer_that_reads_nothing_is_not_read_and_loses_its_connection():
    """It cannot make the process hold its answers for ever."""
    async with serving_calls(Keepalive(0.05, 0.05)) as scene:
        RecordingCall.answer = LARGE
        _, writer = await scene.connect()
        writer.write(scene.head(1) + frame(DATA, 0, 1, http2_frames.message(b"x")))
        await scene.called()
        await scene.calls[0].over.wait()
        # A busy machine may not have filled what the kernel holds by then.
        assert scene.counts["slow_reader"] + scene.counts["keepalive"] == 1
        RecordingCall.answer = b""


class RecordingTransport(asyncio.Transport):
    """Transport that notes whether it reads, and what is written."""

    reads = True
    is_lost = False

    def __init__(self):
        super().__init__()
        self.written = []

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def write(self, data):
        self.written.append(data)

    def is_closing(self):
        return self.is_lost

    def pause_reading(self):
        self.reads = False

    def resume_reading(self):
        self.reads = True


async def test_a_connection_delivers_a_mebibyte_in_a_turn():
    """The rest of a large body waits until other connections had their turn."""
    async with serving_calls() as scene:
        connection, transport = http2_protocol.Http2Protocol(scene.server), RecordingTransport()
        connection.connection_made(transport)
        connection.data_received(PREFACE + WIDE + scene.head(1))
        message = http2_frames.message(bytes(2 << 20))
        frames = [frame(DATA, 0, 1, message[at : at + 16384]) for at in range(0, 2 << 20, 16384)]
        reads = [b"".join(frames[at : at + 16]) for at in range(0, len(frames), 16)]
        for data in reads[:3]:
            connection.data_received(data)
        assert transport.reads
        connection.data_received(reads[3])
        assert not transport.reads
        await asyncio.sleep(0)
        assert transport.reads
        for data in reads[4:]:
            connection.data_received(data)
        connection.data_received(frame(DATA, 0, 1, message[2 << 20 :]))
        assert [len(heard) for heard in scene.calls[0].heard] == [2 << 20]
        connection.connection_lost(None)


async def test_gathered_answers_leave_in_one_write():
    """Answers of three turns of the event loop are written together."""
    async with serving_calls() as scene:
        connection, transport = http2_protocol.Http2Protocol(scene.server), RecordingTransport()
        connection.connection_made(transport)
        connection.data_received(PREFACE + WIDE + scene.head(1) + scene.head(3) + scene.head(5))
        del transport.written[:]
        for call in scene.calls:
            call.gather_answers()
            call.send((b"answer",))
            assert not transport.written
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        (written,) = transport.written
        assert written.count(http2_frames.message(b"answer")) == 3
        connection.connection_lost(None)


async def test_a_read_takes_gathered_answers_along():
    """Received data is answered at once, with all waiting answers."""
    async with serving_calls() as scene:
        connection, transport = http2_protocol.Http2Protocol(scene.server), RecordingTransport()
        connection.connection_made(transport)
        connection.data_received(PREFACE + WIDE + scene.head(1))
        del transport.written[:]
        scene.calls[0].gather_answers()
        scene.calls[0].send((b"answer",))
        connection.data_received(frame(PING, 0, 0, bytes(8)))
        (written,) = transport.written
        assert http2_frames.message(b"answer") in written
        connection.connection_lost(None)


@pytest.mark.parametrize("is_gathered", [False, True])
async def test_an_answer_is_not_written_to_a_lost_connection(is_gathered):
    """A closed transport would raise in the event loop."""
    async with serving_calls() as scene:
        connection, transport = http2_protocol.Http2Protocol(scene.server), RecordingTransport()
        connection.connection_made(transport)
        connection.data_received(PREFACE + WIDE + scene.head(1))
        del transport.written[:]
        if is_gathered:
            scene.calls[0].gather_answers()
        scene.calls[0].send((b"answer",))
        transport.is_lost = True
        connection.connection_lost(None)
        for _ in range(4):
            await asyncio.sleep(0)
        assert not transport.written


async def test_lost_connection_ends_its_calls():
    """Each learns of it once."""
    async with serving_calls() as scene:
        _, writer = await scene.connect()
        writer.write(scene.head(1) + scene.head(3))
        await scene.called(2)
        writer.transport.abort()
        for call in scene.calls:
            await call.over.wait()
        assert not scene.server.connections


async def test_stop_announces_the_end_and_serves_what_is_open():
    """GOAWAY with every stream, then, once the peer confirmed it, with the last that is served."""
    async with serving_calls() as scene:
        reader, writer = await scene.connect()
        writer.write(scene.head(1))
        await scene.called()
        stopping = asyncio.ensure_future(scene.server.stop(300.0))
        _, goaway = await scene.read(reader, GOAWAY)
        assert goaway[:4] == b"\x7f\xff\xff\xff"
        _, ping = await scene.read(reader, PING)
        # Under way before the client knew.
        writer.write(scene.head(3) + frame(PING, ACK, 0, ping))
        _, goaway = await scene.read(reader, GOAWAY)
        assert goaway[:4] == http2_frames.number(3)
        for stream_id in (1, 3):
            writer.write(frame(DATA, 1, stream_id, http2_frames.message(b"x")))
            await scene.read(reader, DATA)
        assert not stopping.done()
        writer.close()
        await stopping


async def test_stop_closes_a_connection_that_stays():
    """The server stops after the grace period, whatever is open."""
    async with serving_calls() as scene:
        reader, _ = await scene.connect()
        await scene.read(reader, SETTINGS)
        await scene.server.stop(0.01)
        while await reader.read(1 << 16):
            pass
