"""Floods over a real socket: each ends its connection, is counted, and leaves others alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import struct

import pytest

from extproc.http2.frames import ErrorCode
from extproc.server import http2_protocol, native_server, tls
from extproc.server.transport import Keepalive
from tests.support import http2_serving, serving
from tests.support.http2_client import Http2Client
from tests.support.http2_floods import START, build_floods, encode_call, open_call
from tests.support.http2_frames import (
    CALL,
    DATA,
    GOAWAY,
    HEADERS,
    PATH,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    message,
    number,
    setting,
)
from tests.support.waiting import until

#: Seconds an answer may take on a busy machine.
ANSWER_S = 300.0

FLOODS = build_floods()
CALL_FRAME = open_call(1, encode_call())


async def send_all(writer, data):
    """Send until the server closes the connection."""
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()


async def read_to_end(reader):
    """Everything until the connection is closed."""
    read = b""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            read += data
    return read


def kinds(data):
    """Types of the frames that begin in some bytes."""
    types = set()
    while len(data) >= 9:
        types.add(data[3])
        data = data[9 + int.from_bytes(data[:3], "big") :]
    return types


def last_error(data):
    """Error code of the last GOAWAY; None without any."""
    error, at = None, 0
    while at + 9 <= len(data):
        size, kind = int.from_bytes(data[at : at + 3], "big"), data[at + 3]
        if kind == GOAWAY and at + 17 <= len(data):
            (error,) = struct.unpack_from(">I", data, at + 13)
        at += 9 + size
    return error


async def open_raw(port, data):
    """Connect, send, and return reader and writer."""
    reader, writer = await asyncio.open_connection(http2_serving.LOCAL, port)
    await send_all(writer, data)
    return reader, writer


@pytest.mark.parametrize("limit", FLOODS)
async def test_a_flood_ends_its_connection_and_no_other(limit):
    async with (
        asyncio.timeout(ANSWER_S),
        http2_serving.serve_native({PATH: http2_serving.EchoCall}) as (server, port),
    ):
        client = await Http2Client.connect(port)
        stream_id = client.open(CALL)
        reader, writer = await open_raw(port, FLOODS[limit])
        answer = await read_to_end(reader)
        writer.close()
        assert server.counts[limit] == 1
        assert last_error(answer) == ErrorCode.ENHANCE_YOUR_CALM
        client.framing.send_data(stream_id, message(b"still here"), end_stream=True)
        client.flush()
        await client.until(lambda: client.answers[stream_id].is_over)
        assert client.answers[stream_id].messages == [b"still here"]
        await client.close()


async def test_windows_of_one_byte_end_the_connection():
    routes = {PATH: http2_serving.EchoCall}
    async with asyncio.timeout(ANSWER_S), http2_serving.serve_native(routes) as (server, port):
        narrow = frame(SETTINGS, 0, 0, setting(4, 0))
        data = frame(DATA, 0, 1, message(bytes(8000)))
        reader, writer = await open_raw(port, START + narrow + CALL_FRAME + data)
        while HEADERS not in kinds(await reader.read(1 << 16)):
            pass
        await send_all(writer, frame(WINDOW_UPDATE, 0, 1, number(1)) * 2500)
        assert last_error(await read_to_end(reader)) == ErrorCode.ENHANCE_YOUR_CALM
        assert server.counts == {"window_starvation": 1}
        writer.close()


async def test_a_peer_that_reads_nothing_is_closed(monkeypatch):
    """Its answers fill what the kernel and the process hold; then it is not read either."""
    monkeypatch.setattr(http2_protocol, "_WRITE_BUFFER_BYTES", 1000)
    # A ping that is not answered for so long ends a connection too, so no stall may take as long.
    keepalive = Keepalive(time_s=0.2, timeout_s=2.0)
    async with http2_serving.serve_native(
        {PATH: http2_serving.EchoCall}, keepalive=keepalive, max_message_bytes=1 << 20
    ) as (server, port):
        windows = frame(SETTINGS, 0, 0, setting(4, 0x7FFF_FFFF))
        windows += frame(WINDOW_UPDATE, 0, 0, number(0x7FFF_0000))
        data = message(bytes(16_000))
        pieces = b"".join(frame(DATA, 0, 1, data) for _ in range(2000))
        _, writer = await open_raw(port, START + windows + CALL_FRAME)
        writer.write(pieces)
        await until(lambda: server.counts["slow_reader"])
        await until(lambda: not server.connections)
        writer.transport.abort()


async def test_an_answer_without_a_window_is_reset(monkeypatch):
    monkeypatch.setattr(http2_protocol, "_STALL_S", 0.0)
    async with http2_serving.serve_native({PATH: http2_serving.EchoCall}) as (server, port):
        client = await Http2Client.connect(port)
        client.framing.update_settings({4: 0})
        stream_id = client.open(CALL)
        client.framing.send_data(stream_id, message(b"x"))
        client.flush()
        await client.until(lambda: client.answers[stream_id].http_status)
        (connection,) = server.connections
        connection._keep_alive()
        connection._keep_alive()
        await client.until(lambda: client.answers[stream_id].is_over)
        assert client.answers[stream_id].reset == ErrorCode.CANCEL
        assert server.counts == {"stalled_answer": 1}
        await client.close()


@pytest.mark.parametrize("start", [b"", PREFACE[:5], PREFACE + frame(SETTINGS)[:5]])
async def test_a_connection_that_does_not_begin_is_closed(start):
    keepalive = Keepalive(time_s=0.1, timeout_s=600.0)
    async with http2_serving.serve_native({}, keepalive=keepalive) as (server, port):
        reader, writer = await open_raw(port, start)
        await read_to_end(reader)
        assert server.counts == {"no_preface": 1}
        writer.close()


async def test_a_unary_call_without_its_message_ends(monkeypatch):
    monkeypatch.setattr(native_server.UnaryCall, "max_duration_s", 0.05)

    def unary(connection, stream_id):
        return native_server.UnaryCall(connection, stream_id, bytes)

    async with http2_serving.serve_native({PATH: unary}) as (server, port):
        client = await Http2Client.connect(port)
        stream_id = client.open(CALL)
        await client.until(lambda: client.answers[stream_id].is_over)
        assert client.answers[stream_id].grpc_status == "4"
        assert server.counts == {"stalled_call": 1}
        await client.close()


async def test_thousands_of_messages_in_one_read_let_others_in():
    """Another connection is answered before the last of them."""
    log: list[object] = []

    def logging(connection, stream_id):
        return http2_serving.EchoCall(connection, stream_id, log)

    routes = {PATH: logging}
    async with asyncio.timeout(ANSWER_S), http2_serving.serve_native(routes) as (server, port):
        _, writer = await open_raw(port, START + CALL_FRAME)
        await until(lambda: any(other.core.num_streams for other in server.connections))
        (connection,) = server.connections
        turns = []
        loop = asyncio.get_running_loop()

        def count_turns():
            turns.append(len(log))
            if len(log) < 20_000:
                loop.call_soon(count_turns)

        connection.data_received(
            b"".join(frame(DATA, 0, 1, message(b"") * 2000) for _ in range(10))
        )
        count_turns()
        await until(lambda: len(log) == 20_000)
        assert len(turns) > 10
        assert max(after - before for before, after in itertools.pairwise(turns)) <= 512
        writer.close()


async def test_both_ports_together_leave_open_files_for_engines(monkeypatch):
    """Five eighths are for ext_proc, and an eighth for health: 10 and 2 of 16."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    async with (
        asyncio.timeout(ANSWER_S),
        serving.running(serving.settings("10.0.0.1:1", transport="native")) as picker,
    ):
        for port, most in ((picker.ports.health, 2), (picker.ports.grpc, 10)):
            clients = [await Http2Client.connect(port) for _ in range(most)]
            for client in clients:
                await client.until(lambda client=client: client.has_settings)
            refused = await Http2Client.connect(port)
            await refused.until(lambda: False)
            assert refused.goaway == ErrorCode.NO_ERROR
            for client in (*clients, refused):
                await client.close()


async def test_connections_above_the_most_are_refused(caplog):
    """Each is counted, and one of them logged; those that are open go on."""
    routes = {PATH: http2_serving.EchoCall}
    async with (
        asyncio.timeout(ANSWER_S),
        http2_serving.serve_native(routes, max_connections=1) as (server, port),
    ):
        client = await Http2Client.connect(port)
        await client.until(lambda: client.has_settings)
        for _ in range(2):
            refused = await Http2Client.connect(port)
            await refused.until(lambda: False)
            assert refused.goaway == ErrorCode.NO_ERROR
            await refused.close()
        assert server.counts == {"connections": 2}
        assert len(server.connections) == 1
        assert sum("a connection is refused" in line for line in caplog.messages) == 1
        stream_id = client.open(CALL)
        client.framing.send_data(stream_id, message(b"x"), end_stream=True)
        client.flush()
        await client.until(lambda: client.answers[stream_id].is_over)
        assert client.answers[stream_id].messages == [b"x"]
        await client.close()
        await until(lambda: not server.connections)
        again = await Http2Client.connect(port)
        await again.until(lambda: again.has_settings)
        await again.close()


async def test_connections_in_a_tls_handshake_count_to_the_most(caplog):
    """Peers that send no byte of it cannot take more open files than others."""
    routes = {PATH: http2_serving.EchoCall}
    async with (
        asyncio.timeout(ANSWER_S),
        http2_serving.serve_native(routes, pair=tls.self_signed_pair(), max_connections=2) as (
            server,
            port,
        ),
    ):
        silent = [await asyncio.open_connection(serving.LOCAL, port) for _ in range(4)]
        for reader, _ in silent[2:]:
            assert await read_to_end(reader) == b""
        assert server.counts == {"connections": 2}
        assert sum("a connection is refused" in line for line in caplog.messages) == 1
        for _, writer in silent:
            writer.close()
        client = None
        while client is None:
            with contextlib.suppress(OSError):  # their ends are not noticed yet
                client = await Http2Client.connect(port, with_tls=True)
        await client.until(lambda: client.has_settings)
        await client.close()
        await server.stop(None)  # as a drain does, and then the end


async def test_answers_that_nobody_takes_are_bounded_over_all_connections():
    """The call whose answer waits for the longest time ends, on whichever connection it is."""
    log: list[object] = []

    def logging(connection, stream_id):
        return http2_serving.EchoCall(connection, stream_id, log)

    async with (
        asyncio.timeout(ANSWER_S),
        http2_serving.serve_native({PATH: logging}, max_total_unsent_bytes=50_000) as (
            server,
            port,
        ),
    ):
        clients = [await Http2Client.connect(port) for _ in range(3)]
        for client in clients:
            client.framing.update_settings({4: 0})
            stream_id = client.open(CALL)
            client.framing.send_data(stream_id, message(bytes(16_000)))
            client.flush()
            await client.until(lambda client=client: client.answers[1].http_status)
        await until(lambda: server.send_budget.held_bytes > 40_000)
        last = clients[2].open(CALL)
        clients[2].framing.send_data(last, message(bytes(16_000)))
        clients[2].flush()
        await clients[0].until(lambda: clients[0].answers[1].is_over)
        assert clients[0].answers[1].reset == ErrorCode.CANCEL
        assert server.counts == {"unsent_answers": 1}
        assert log.count("terminated") == 1
        assert server.send_budget.held_bytes == 48_015
        for client in clients:
            await client.close()
