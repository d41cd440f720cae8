"""Connections that we open to engines: real sockets on loopback, and peers of any kind."""

import asyncio
import contextlib
import random

import pytest

from extproc.scrape import kv_event_connection
from extproc.scrape.kv_event_connection import EngineConnection, EngineConnector
from extproc.supervision import Supervisor
from tests.scrape.kv_event_engines import HOST
from tests.support.waiting import until

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"

#: What no publisher sends.
BROKEN = [
    b"GET / HTTP/1.1\r\n\r\n",
    GREETING.replace(b"NULL", b"CURV") + READY,
    GREETING.replace(b"\x7f\x03", b"\x7f\x01") + READY,
    GREETING + READY.replace(b"PUB", b"SUB"),
    GREETING + b"\x00\x01a",
    GREETING + READY + b"\x01\x01a" * 9,
    GREETING + READY + b"\x02" + (1 << 40).to_bytes(8),
    GREETING + READY + b"\x04\x09\x05ERROR\x00\x00\x00",
    GREETING + READY + b"\x04\x01\x00" * 100,
    GREETING + READY + b"\x06" + (2000).to_bytes(8) + bytes(2000),
    GREETING + READY + b"\x01\x01a" + b"\x04\x01\x00",
]


class PublisherPeer:
    """A server that sends the same to each connection, and a connector to it."""

    def __init__(self, sent, *, closes=False):
        self.sent = sent
        self.closes = closes
        self.num_accepted = 0
        self.num_opened = 0
        self.lost = []

    @contextlib.asynccontextmanager
    async def running(self, *, now=0.0, wait_s=0.0):
        self.now = now
        server = await asyncio.start_server(self.serve, HOST, 0)
        self.connector = EngineConnector(
            server.sockets[0].getsockname(),
            b"SUB",
            clock=lambda: self.now,
            rng=random.Random(1),
            supervisor=Supervisor(),
            wait_s=wait_s,
            on_open=self.on_open,
            on_readable=self.read,
            on_lost=self.lost.append,
        )
        try:
            yield self
        finally:
            self.connector.close()
            server.close()

    async def serve(self, reader, writer):
        self.num_accepted += 1
        writer.write(self.sent)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            while not self.closes and await reader.read(4096):
                pass
        writer.close()

    def on_open(self, _):
        self.num_opened += 1

    def read(self):
        while self.connector.receive() is not None:
            pass


class SentBytes:
    """A transport whose peer reads nothing."""

    def __init__(self):
        self.is_aborted = False
        self.num_waiting = 0

    def get_extra_info(self, _):
        return self

    def setsockopt(self, *_):
        pass

    def get_write_buffer_size(self):
        return self.num_waiting

    def write(self, _):
        pass

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    def abort(self):
        self.is_aborted = True


class RecordingOwner:
    """An owner that does nothing."""

    def on_made(self, _):
        pass

    def on_readable(self, _):
        pass

    def on_closed(self, *_):
        pass


@pytest.mark.parametrize("sent", BROKEN)
async def test_a_peer_that_does_not_keep_to_the_protocol_is_connected_to_again(sent, monkeypatch):
    """The connection is closed by us, whatever came."""
    monkeypatch.setattr(kv_event_connection, "_RECONNECT_S", 0.001)
    async with PublisherPeer(sent).running() as peer:
        await until(lambda: peer.num_accepted >= 3)
        assert len(peer.lost) == peer.num_opened - (peer.num_opened > len(peer.lost))
        assert not any(why == "the connection is gone" for why in peer.lost)


async def test_attempts_are_further_and_further_apart(monkeypatch):
    """The wait doubles up to a bound, with a part by chance."""
    waits, sleep = [], asyncio.sleep

    async def note(seconds):
        waits.append(seconds)
        await sleep(0.001)

    async with PublisherPeer(GREETING + READY, closes=True).running() as peer:
        monkeypatch.setattr(kv_event_connection.asyncio, "sleep", note)
        async with asyncio.timeout(300):
            while len(waits) < 9:
                await sleep(0.001)
        assert set(peer.lost) == {"the connection is gone"}
    bounds = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    for bound, wait in zip(bounds, waits, strict=False):
        assert 0.5 * bound <= wait <= bound
    assert len(set(waits)) == len(waits)


async def test_the_first_attempt_may_wait(monkeypatch):
    """It begins once the seconds are over."""
    waits, sleep = [], asyncio.sleep

    async def note(seconds):
        waits.append(seconds)
        await sleep(0.001)

    monkeypatch.setattr(kv_event_connection.asyncio, "sleep", note)
    async with PublisherPeer(GREETING + READY).running(wait_s=0.3) as peer:
        async with asyncio.timeout(300):
            while not peer.num_opened:
                await sleep(0.001)
        assert waits == [0.3]


async def test_a_silent_peer_that_knows_no_heartbeats_is_left_to_the_system():
    """ZMTP 3.0 has none: it may have nothing to publish."""
    async with PublisherPeer(GREETING + READY).running() as peer:
        await until(lambda: peer.num_opened)
        for _ in range(20):
            peer.now += 1.0
            peer.connector.check(peer.now)
        assert not peer.lost


async def test_a_silent_peer_with_heartbeats_is_lost():
    """ZMTP 3.1 answers to pings."""
    sent = GREETING.replace(b"\x7f\x03\x00", b"\x7f\x03\x01") + READY
    async with PublisherPeer(sent).running() as peer:
        await until(lambda: peer.num_opened)
        for _ in range(4):
            peer.now += 1.0
            peer.connector.check(peer.now)
        assert peer.lost == ["the connection is gone"]


async def test_a_peer_that_never_greets_is_given_up():
    """It is no publisher."""
    async with PublisherPeer(b"").running() as peer:

        def is_connected_again():
            # The peer may have accepted a connection before there is one here.
            peer.now += 6.0
            peer.connector.check(peer.now)
            return peer.num_accepted >= 2

        await until(is_connected_again)
        assert not peer.lost


async def test_a_connection_whose_time_runs_out_as_it_is_made_is_closed(monkeypatch):
    """The loop closes its transport without a word to it."""
    transport = SentBytes()

    async def make(factory, *_):
        factory().connection_made(transport)
        raise TimeoutError

    async with PublisherPeer(b"").running() as peer:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", make)
        await until(lambda: transport.is_aborted)
        assert peer.connector.receive() is None
        assert not peer.lost


def test_a_connection_may_be_closed_while_it_goes_on_reading(monkeypatch):
    """Its peer sent more than may wait, and then reads none of our answers."""
    monkeypatch.setattr(kv_event_connection, "_MAX_BUFFERED", 1000)
    transport = SentBytes()
    connection = EngineConnection(RecordingOwner(), b"SUB", lambda: 0.0)
    connection.connection_made(transport)
    ping, message = b"\x04\x07\x04PING\x00\x00", b"\x02" + (990).to_bytes(8) + bytes(990)
    for sent in (GREETING + READY, ping + message):
        connection.get_buffer(-1)[: len(sent)] = sent
        connection.buffer_updated(len(sent))
    transport.num_waiting = 1001
    assert connection.receive() == [bytes(990)]
    assert transport.is_aborted


@pytest.mark.parametrize(("host", "port"), [(HOST, 70_000), ("a..b", 5557), (HOST, 9)])
async def test_an_address_that_cannot_be_connected_to_is_tried_again(host, port, monkeypatch):
    """A rank's port may be beyond the last one, and a name no name."""
    monkeypatch.setattr(kv_event_connection, "_RECONNECT_S", 0.001)
    rng = random.Random(1)
    before = rng.getstate()
    nothing = lambda *_: None  # noqa: E731
    connector = EngineConnector(
        (host, port),
        b"SUB",
        clock=lambda: 0.0,
        rng=rng,
        supervisor=Supervisor(),
        on_open=nothing,
        on_readable=nothing,
        on_lost=nothing,
    )
    async with asyncio.timeout(300):
        while rng.getstate() == before:
            await asyncio.sleep(0.001)
    assert connector.receive() is None
    connector.close()
