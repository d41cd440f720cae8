"""Connections to the metrics port: what reaches it may open some, and no more."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from aiohttp import web

from extproc.server import admin, admin_access
from tests.e2e import http1
from tests.support.virtual_loop import in_virtual_time

HOST = "127.0.0.1"
LIMIT_S = 300.0


@contextlib.asynccontextmanager
async def serving():
    """The port of a server with one page."""
    application = web.Application()

    async def page(_):
        return web.Response(text="ok")

    application.router.add_get("/healthz", page)
    server = admin.AdminServer()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield await server.start(application, host=HOST, port=0)
    finally:
        await server.close()


async def connect(port, address=HOST):
    return await asyncio.open_connection(HOST, port, local_addr=(address, 0))


async def is_closed(reader):
    """Wait for the end of a connection."""
    try:
        return not await reader.read()
    except ConnectionError:
        return True


async def answered(port):
    """Ask until the server answers: it sees the end of a connection a moment later."""
    while True:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            return (await http1.ask(port, "/healthz")).status
        await asyncio.sleep(0)


async def test_an_address_may_have_so_many_connections(monkeypatch, caplog):
    """Others are closed and logged once, and leave those of another address alone."""
    monkeypatch.setattr(admin_access, "MAX_PER_ADDRESS", 2)
    async with serving() as port:
        idle = [await connect(port) for _ in range(2)]
        for _ in range(5):
            reader, writer = await connect(port)
            assert await is_closed(reader)
            writer.close()
        reader, writer = await connect(port, "127.0.0.2")
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        idle[0][1].close()
        assert await answered(port) == 200
        for _, open_writer in (*idle, (reader, writer)):
            open_writer.close()
    assert len([text for text in caplog.messages if "closes connections" in text]) == 1


async def test_all_addresses_together_may_have_so_many_connections(monkeypatch):
    """However many addresses there are."""
    monkeypatch.setattr(admin_access, "MAX_CONNECTIONS", 2)
    async with serving() as port:
        idle = [await connect(port, f"127.0.0.{number}") for number in (2, 3)]
        reader, writer = await connect(port, "127.0.0.4")
        assert await is_closed(reader)
        for _, open_writer in (*idle, (reader, writer)):
            open_writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nhost: "])
async def test_a_connection_without_a_request_is_closed(monkeypatch, sent):
    """Nothing arrives, or half a request."""
    monkeypatch.setattr(admin_access, "FIRST_REQUEST_S", 0.01)
    async with serving() as port:
        reader, writer = await connect(port)
        writer.write(sent)
        assert await is_closed(reader)
        writer.close()


async def test_a_connection_with_a_request_stays(monkeypatch):
    """Prometheus asks again and again on one connection."""
    timers = []
    monkeypatch.setattr(admin_access, "FIRST_REQUEST_S", 1000.0)
    async with serving() as port:
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def noted(delay, *call):
            timer = call_later(delay, *call)
            if delay == 1000.0:
                timers.append(timer)
            return timer

        monkeypatch.setattr(loop, "call_later", noted)
        reader, writer = await connect(port)
        for _ in range(3):
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        assert [timer.cancelled() for timer in timers] == [True]
        writer.close()


@in_virtual_time()
async def test_a_request_that_does_not_end_delays_the_end_little():
    """A client that reads slowly is no reason to keep the process."""
    is_asked = asyncio.Event()

    async def page(_):
        is_asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    application = web.Application()
    application.router.add_get("/", page)
    server, loop = admin.AdminServer(), asyncio.get_running_loop()
    port = await server.start(application, host=HOST, port=0)
    reader, writer = await connect(port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await is_asked.wait()
    before = loop.time()
    await server.close()
    took_s = loop.time() - before
    assert await is_closed(reader)
    writer.close()
    assert 0.0 < took_s <= 2.0
