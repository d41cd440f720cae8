"""Replicas that read each other's requests from real servers, without a store."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import time
import types
from collections import Counter

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.settings import PeerSyncSection
from extproc.demo import stack
from extproc.discovery.endpoint_list import DiscoveredPool
from extproc.discovery.static_discovery import DnsResolver
from extproc.endpoint import Endpoint
from extproc.routing import peer_sync
from extproc.server import (
    admin,
    admin_access,
    http_peer_channel,
    peer_channel,
    peer_stream,
)
from extproc.server.http_peer_channel import PATH, HttpPeerChannel
from extproc.server.peer_addresses import PeerAddresses
from extproc.server.peer_stream import PeerStream, encode_frame
from tests.routing.test_peer_sync import fact
from tests.server.peer_replica import Replica, talking
from tests.server.test_pool_registry import ask
from tests.support.waiting import until


class HttpReplica(Replica):
    """A replica with its admin port."""

    def __init__(
        self,
        port: int,
        *peers: str,
        token: str = "",
        resolver: DnsResolver | None = None,
        **more: float,
    ) -> None:
        self.port = port
        self.failures: Counter[str] = Counter()
        self.addresses = PeerAddresses(
            peers, where="peer_sync.peers", token=lambda: token, resolver=resolver
        )
        values = {"beat_s": 0.1, "silent_s": 5.0, **more}
        settings = PeerSyncSection(peers=peers, **values)
        super().__init__(
            lambda registry: HttpPeerChannel(
                settings,
                registry,
                time.monotonic,
                addresses=self.addresses,
                failures=self.failures,
            )
        )
        self._access = admin_access.AdminAccess(lambda: token, self.addresses.is_peer)

    @contextlib.asynccontextmanager
    async def serving(self, host: str = "127.0.0.1"):
        application = web.Application(middlewares=[self._access.middleware()])
        application.add_routes(self.line.routes())
        server = admin.AdminServer()
        await server.start(application, host=host, port=self.port)
        try:
            async with talking(self) as (task,):
                await until(lambda: self.director().has_listener)
                yield task
        finally:
            await server.close()


class Peer:
    """A server that answers with any bytes, and counts connections."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.connections = 0

    @contextlib.asynccontextmanager
    async def serving(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()

    async def _serve(self, reader, writer):
        self.connections += 1
        with contextlib.suppress(ConnectionError):
            writer.write(self.answer)
            await writer.drain()
            await reader.read()
        writer.close()


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@contextlib.asynccontextmanager
async def pickers(count: int, **more):
    """Replicas that all have the same list, with their own address among it."""
    ports = [stack.free_port() for _ in range(count)]
    peers = [f"127.0.0.1:{port}" for port in ports]
    replicas = [HttpReplica(port, *peers, **more) for port in ports]
    async with contextlib.AsyncExitStack() as serving:
        for replica in replicas:
            await serving.enter_async_context(replica.serving())
        yield replicas


def total(replica: Replica, pool: str = "a") -> int:
    return sum(replica.in_flight(pool).values())


@pytest.mark.parametrize("count", [2, 3])
async def test_replicas_exchange_requests_in_flight(count):
    """All accounts show all requests, per pool, and none once all ended; the own address is skipped."""
    async with pickers(count, token="secret") as replicas:
        await until(lambda: all(replica.heard == count - 1 for replica in replicas))
        first, second = replicas[:2]
        owners = [(first, "a"), (first, "a"), (first, "b"), (second, "a")]
        reservations = [owner.send(pool) for owner, pool in owners]
        await until(lambda: all(total(r) == 3 and total(r, "b") == 1 for r in replicas))
        assert all(r.in_flight() == first.in_flight() for r in replicas)
        gauges = {name: read() for name, read in second.line.gauges().items()}
        assert gauges == {
            "extproc_peer_sync_peers": count - 1.0,
            "extproc_peer_sync_inflight_requests": 3.0,
        }
        for reservation, (owner, pool) in zip(reservations, owners, strict=True):
            owner.director(pool).release(reservation, time.monotonic())
        await until(lambda: not any(total(r) + total(r, "b") for r in replicas))
        for replica in replicas:
            own = f"127.0.0.1:{replica.port}"
            await until(lambda own=own, r=replica: own not in r.line._followed)
            assert len(await replica.addresses.resolve()) == count - 1


async def test_the_first_request_of_a_discovered_pool_is_sent_to_peers():
    """A pool that discovery brings is connected at once, long before the next beat."""
    async with pickers(2, beat_s=300.0, silent_s=900.0) as (sender, receiver):
        await until(lambda: sender.heard and receiver.heard)
        for replica in (receiver, sender):
            brought = {"n/p": DiscoveredPool((Endpoint("127.0.0.20:9"),))}
            replica.registry.on_pools_changed(brought, ())
        assert sender.director("n/p").has_listener
        outcome = ask(sender.registry, host="n").outcome
        sender.director("n/p").reserve(outcome, time.monotonic())
        await until(lambda: receiver.in_flight("n/p") == {"127.0.0.20:9": 1})


async def test_a_new_replica_gets_the_requests_that_are_open(monkeypatch):
    """In full and in several messages, before it could have read them as events."""
    monkeypatch.setattr(peer_sync, "MAX_FACTS", 3)
    port = stack.free_port()
    first = HttpReplica(port, beat_s=3600.0)
    async with first.serving():
        for _ in range(10):
            first.send()
        second = HttpReplica(stack.free_port(), f"127.0.0.1:{port}")
        async with second.serving():
            await until(lambda: total(second) == 10)


async def test_a_replica_without_endpoints_does_not_read_yet():
    """Peers say once what is open, and only known endpoints can be charged."""
    port = stack.free_port()
    first = HttpReplica(port)
    second = HttpReplica(stack.free_port(), f"127.0.0.1:{port}")
    second.is_synced = False
    async with first.serving(), second.serving():
        first.send()
        beats = second.line.event_log._latest_list
        await until(lambda: second.line.event_log._latest_list > beats + 2)
        assert not first.line._readers
        second.is_synced = True
        await until(lambda: total(second) == 1)


async def test_a_replica_that_stops_is_removed_at_once():
    """It says so: its open requests leave the accounts of the others."""
    async with pickers(2, silent_s=3600.0) as (first, second):
        await until(lambda: first.heard == second.heard == 1)
        first.send()
        await until(lambda: total(second) == 1)
        await first.line.close()
        first.line.event_log.publish_left()
        await first.line.flush()
        await until(lambda: second.heard == 0)
        assert total(second) == 0


async def test_a_peer_that_restarts_is_read_again():
    """With the same address and another name, as soon as it connects; the former one has left."""
    ports = [stack.free_port() for _ in range(2)]
    peers = [f"127.0.0.1:{port}" for port in ports]
    second = HttpReplica(ports[1], *peers, silent_s=3600.0)
    async with second.serving():
        for _ in range(2):
            first = HttpReplica(ports[0], *peers)
            async with first.serving():
                await until(lambda first=first: first.heard == second.heard == 1)
                first.send()
                await until(lambda: total(second) == 1)
            await until(lambda: second.heard == 0 == total(second))
    assert not second.line._pickers


async def test_a_peer_that_starts_late_is_read_at_once():
    """When it reads, however long the pause between attempts has become."""
    ports = [stack.free_port() for _ in range(2)]
    first = HttpReplica(ports[0], f"127.0.0.1:{ports[1]}")
    # Chance makes the pause after the second attempt an hour.
    first.line._rng = types.SimpleNamespace(random=itertools.cycle([0.0, 36_000.0]).__next__)
    async with first.serving():
        await until(lambda: first.failures["refused"] == 2)
        async with HttpReplica(ports[1], f"127.0.0.1:{ports[0]}").serving():
            await until(lambda: first.heard == 1)


async def test_a_peer_that_dies_is_forgotten_after_a_silence():
    """Without a farewell its requests stay for `silent_s`, and it is looked for again and again."""
    message = peer_sync.PeerMessage("x", [fact(address="127.0.0.13:9", pool="b")])
    peer = Peer(HEAD + encode_frame(message))
    async with peer.serving() as port:
        second = HttpReplica(stack.free_port(), f"127.0.0.1:{port}", silent_s=0.5)
        async with second.serving():
            await until(lambda: total(second, "b") == 1)
            await until(lambda: second.heard == 0 == total(second, "b"))
            await until(lambda: peer.connections > 1)


async def test_requests_that_a_silence_dropped_are_read_again():
    """A replica that is heard again on the same connection is charged what it still has open."""
    async with pickers(2, silent_s=3600.0) as (first, second):
        await until(lambda: first.heard == second.heard == 1)
        first.send()
        await until(lambda: total(second) == 1)
        second.line.replica.drop_silent(time.monotonic() + 3600.0)
        assert total(second) == 0
        await until(lambda: total(second) == 1)
        assert second.failures["silent"] == 1


async def test_a_name_may_resolve_to_more_addresses_later(monkeypatch):
    """A peer that connects is looked for at once, long before the next regular look."""
    port = stack.free_port()
    answers = ["127.0.0.1"]

    async def look_up(_):
        return answers

    monkeypatch.setattr(http_peer_channel, "_RESOLVE_S", 3600.0)
    first = HttpReplica(port, f"peers:{port}", resolver=DnsResolver(look_up=look_up))
    async with first.serving():
        await until(lambda: not first.line._followed and first.addresses._own)
        answers.append("127.0.0.2")
        second = HttpReplica(port, f"peers:{port}", resolver=DnsResolver(look_up=look_up))
        async with second.serving("127.0.0.2"):
            await until(lambda: first.heard == second.heard == 1)


async def test_a_peer_with_two_addresses_is_read_once():
    """As one with IPv4 and IPv6; the other address is used when the first one fails."""
    port = stack.free_port()
    peer = HttpReplica(port)
    second = HttpReplica(
        stack.free_port(), f"127.0.0.1:{port}", f"127.0.0.2:{port}", silent_s=3600.0
    )
    async with peer.serving(""), second.serving():
        await until(lambda: second.heard == 1 and second.line._aliases)
        await until(lambda: len(second.line._followed) == 1 == len(peer.line._readers))
        assert not second.failures


async def test_strangers_are_refused():
    """Without the token no request is shown."""
    port = stack.free_port()
    first = HttpReplica(port, token="secret")
    second = HttpReplica(stack.free_port(), f"127.0.0.1:{port}")
    async with first.serving(), second.serving():
        await until(lambda: second.failures["status"])
        assert second.heard == 0
        assert not first.line._readers


async def test_readers_are_bounded(monkeypatch):
    """Another one is refused with 503, and tries again."""
    monkeypatch.setattr(http_peer_channel, "MAX_ADDRESSES", 1)
    port = stack.free_port()
    peer = HttpReplica(port)
    readers = [HttpReplica(stack.free_port(), f"127.0.0.1:{port}") for _ in range(2)]
    async with peer.serving(), readers[0].serving():
        await until(lambda: readers[0].heard)
        async with readers[1].serving():
            await until(lambda: readers[1].failures["status"])


async def test_a_reader_that_does_not_read_is_cut_off(monkeypatch):
    """Memory stays bounded, and other readers get everything."""
    monkeypatch.setattr(http_peer_channel, "MAX_UNSENT_BYTES", 10_000)
    port = stack.free_port()
    peer = HttpReplica(port)
    other = HttpReplica(stack.free_port(), f"127.0.0.1:{port}")
    async with peer.serving():
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(f"GET {PATH} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        await until(lambda: peer.line._readers)
        async with other.serving():
            await until(lambda: other.heard)
            unsent = 0
            while not peer.failures["slow"]:
                # A long list, in place of thousands of requests.
                peer.line.event_log._put(peer_sync.OpenRequests(10**9, list(range(5_000))))
                await peer.line.flush()
                sizes = [r.transport.get_write_buffer_size() for r in peer.line._readers]
                unsent = max(unsent, *sizes)
                await asyncio.sleep(0)
            assert unsent < 10_000 + 5 * 30_000
            peer.send()
            await until(lambda: total(other) == 1 == len(peer.line._readers))
        writer.close()
        del reader


STRANGE = peer_sync.PeerMessage("x", [fact()])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-x\r\n", "malformed"),
        (HEAD + b"\xff\xff\xff\xff", "malformed"),
        (HEAD + b"\x00\x00\x00\x01\xc1", "malformed"),
        (
            HEAD + encode_frame(STRANGE) + encode_frame(peer_sync.PeerMessage("y", [])),
            "malformed",
        ),
        (b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 100_000, "malformed"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"y" * 100_000, "malformed"),
        (b"HTTP/1.1 204 No\r\n\r\n", "status"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "closed"),
        (HEAD, "silent"),
    ],
)
async def test_garbage_ends_a_connection_and_is_tried_again_with_pauses(
    answer, reason, caplog, monkeypatch
):
    """It is counted and logged once, whatever it is."""
    monkeypatch.setattr(peer_channel, "_ROLLOUT_S", 0.0)
    peer = Peer(answer)
    async with peer.serving() as port:
        silent_s = 0.2 if reason == "silent" else 3600.0
        subject = HttpReplica(stack.free_port(), f"127.0.0.1:{port}", silent_s=silent_s)
        async with subject.serving():
            await until(lambda: subject.failures[reason] >= 3)
    assert set(subject.failures) == {reason}
    lines = [record.getMessage() for record in caplog.records]
    assert sum("cannot read" in line for line in lines) == 1 + sum("again" in li for li in lines)


@given(st.binary(max_size=200), st.integers(1, 50))
def test_any_bytes_are_messages_or_the_end(data, size):
    """Whatever arrives, in whatever pieces, nothing is raised."""

    async def read() -> None:
        messages = []

        def on_message(body: bytes) -> str | None:
            messages.append(peer_sync.decode(body))
            return None

        stream = PeerStream(b"", on_message)
        for piece in [HEAD, *(data[at : at + size] for at in range(0, len(data), size))]:
            stream.data_received(piece)
        assert len(stream._buffer) < peer_stream._LENGTH_BYTES + peer_sync.MAX_MESSAGE_BYTES
        stream.connection_lost(None)
        assert await stream.wait_ended(silent_s=3600.0)

    asyncio.run(read())


async def test_a_peer_that_is_away_for_a_moment_is_counted_and_not_logged(caplog):
    """A rollout writes no warnings: a replica that starts is listed before it listens."""
    subject = HttpReplica(stack.free_port(), f"127.0.0.1:{stack.free_port()}")
    async with subject.serving():
        await until(lambda: subject.failures["refused"] >= 3)
    assert "cannot read" not in caplog.text


async def test_a_lack_of_files_is_no_unreachable_peer(caplog, monkeypatch):
    """It is the fault of this process, and is named at once."""

    async def fail(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    subject = HttpReplica(stack.free_port(), f"127.0.0.1:{stack.free_port()}")
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", fail)
    async with subject.serving():
        await until(lambda: subject.failures["too many open files"])
        await until(lambda: "too many open files" in caplog.text)
    assert not subject.failures["unreachable"]


async def test_a_peer_whose_name_does_not_resolve_is_logged_once(caplog):
    """The rest goes on."""
    subject = HttpReplica(stack.free_port(), "no-such-name.invalid:9090")
    async with subject.serving():
        await until(lambda: "cannot be resolved" in caplog.text)
        subject.send()
        assert total(subject) == 1
