"""A scripted HTTP server on loopback, as the fixture `http`, and the event loop of async tests."""

import asyncio
import contextlib
import sys

import pytest
import uvloop

from tests.support.child_process import Live

PAGE = b"vllm:num_requests_waiting 3.0\nvllm:num_requests_running 2.0\n"


def answer(body=PAGE, *, status="200 OK", fields=()):
    """The bytes of one answer."""
    head = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *fields]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@pytest.fixture
def live():
    """An event loop for each async test, which is that of `extproc serve`."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield Live(runner)


class ScriptedServer:
    """Answers each request with the next entry of a script, then with its last one.

    An entry is the bytes to send; None hangs. `close_after` closes after each answer.
    """

    def __init__(self, *script, close_after=False):
        self.script = list(script) or [answer()]
        self.close_after = close_after
        self.requests = []
        self.connections = 0
        self.writers = []
        self.port = 0

    async def handle(self, reader, writer):
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
                if entry is None:
                    await reader.read()
                    break
                writer.write(entry)
                await writer.drain()
                if self.close_after:
                    break
        writer.close()


@contextlib.asynccontextmanager
async def serving(server, host="127.0.0.1", port=0):
    """The server, listening; `server.port` says where."""
    listener = await asyncio.start_server(server.handle, host, port)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for writer in server.writers:
            writer.transport.abort()
        await listener.wait_closed()
        # One turn for the aborted handlers to end.
        await asyncio.sleep(0)


@pytest.fixture
def http():
    """This module: `http.ScriptedServer`, `http.serving`, `http.answer`, `http.PAGE`."""
    return sys.modules[__name__]
