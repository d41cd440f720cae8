"""Repair of what replicas lose of each other over a store, in virtual time and without a server."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from redis.exceptions import NoPermissionError, ReadOnlyError

from extproc.config.settings import PeerSyncSection
from extproc.routing import peer_sync
from extproc.server import redis_peer_channel
from tests.server.peer_replica import Replica, talking
from tests.support.virtual_loop import in_virtual_time

#: Defaults of the configuration: lists each second, silence after 5.
SETTINGS = PeerSyncSection(url="redis://x")

#: Seconds in which a loss is repaired: a list that shows it, one that names it, the longest back-off.
REPAIR_S = 3.0 + 7.5


class MemoryStream:
    """A stream of which entries may be lost."""

    def __init__(self) -> None:
        self.entries: list[tuple[bytes, dict[bytes, bytes]]] = []
        self.num_written = 0

    def started(self) -> int:
        """Number of starts of requests that were written, over all entries that are left."""
        messages = [peer_sync.decode(fields[b"m"]) for _, fields in self.entries]
        return sum(
            isinstance(fact, peer_sync.RequestStarted) for m in messages if m for fact in m.facts
        )


class MemoryStreamClient:
    """A connection to a store: while it is not up, its calls fail.

    Attributes:
        is_to_replica: It leads to a server that became a replica; a new one leads to the primary.
        may_read: Its user has the right to XREAD.
    """

    def __init__(self, store: MemoryStream) -> None:
        self._store = store
        self._commands: list[dict[bytes, bytes]] = []
        self.is_up = True
        self.is_to_replica = False
        self.may_read = True
        self.connection_pool = self

    def _call(self) -> None:
        if not self.is_up:
            raise ConnectionError

    def pipeline(self, *, transaction):
        assert not transaction
        self._commands = []
        return self

    def xadd(self, stream, fields, *, maxlen, approximate):
        self._commands.append(fields)

    async def execute(self):
        self._call()
        if self.is_to_replica:
            raise ReadOnlyError("You can't write against a read only replica.")
        for fields in self._commands:
            self._store.num_written += 1
            self._store.entries.append((b"1-%d" % self._store.num_written, fields))

    async def xrevrange(self, stream, *, count):
        self._call()
        return self._store.entries[-count:]

    async def xread(self, streams, *, count, block):
        if not self.may_read:
            raise NoPermissionError("this user has no permissions to run the 'xread' command")
        (last,) = (redis_peer_channel._entry_order(entry) for entry in streams.values())
        for _ in range(block // 10):
            self._call()
            entries = [
                entry
                for entry in self._store.entries
                if redis_peer_channel._entry_order(entry[0]) > last
            ]
            if entries:
                return [(b"", entries[:count])]
            await asyncio.sleep(0.01)
        return []

    async def aclose(self):
        self.is_to_replica = False

    def reset(self):
        pass


def build_replica(store: MemoryStream) -> Replica:
    replica = Replica(
        lambda registry: redis_peer_channel.RedisPeerChannel(
            SETTINGS, registry, asyncio.get_running_loop().time
        )
    )
    replica.line._writing, replica.line._reading = (
        MemoryStreamClient(store),
        MemoryStreamClient(store),
    )
    return replica


def total(replica: Replica) -> int:
    return sum(sum(replica.in_flight(pool).values()) for pool in "ab")


@contextlib.asynccontextmanager
async def two_replicas():
    """A store, and two replicas that know each other."""
    store = MemoryStream()
    first, second = build_replica(store), build_replica(store)
    async with talking(first, second):
        await asyncio.sleep(2.0)
        yield store, first, second


@in_virtual_time()
@pytest.mark.parametrize("away_s", [1.5, pytest.param(60.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "broken",
    [
        lambda first, second: [first.line._writing],
        lambda first, second: [second.line._reading],
        lambda first, second: [replica.line._writing for replica in (first, second)],
        lambda first, second: [
            client
            for replica in (first, second)
            for client in (replica.line._writing, replica.line._reading)
        ],
    ],
    ids=["sender", "reader", "all writing", "store"],
)
async def test_requests_open_across_an_outage_are_known_after_it(broken, away_s):
    """Requests that were open before it and began in it count, and none that ended in it."""
    async with two_replicas() as (store, first, second):
        ends, *_ = [first.send() for _ in range(3)]
        await asyncio.sleep(0.1)
        assert total(second) == 3
        clients = broken(first, second)
        for client in clients:
            client.is_up = False
        await asyncio.sleep(away_s)
        first.director().release(ends, 0.0)
        first.send("b")
        await asyncio.sleep(0.1)
        for client in clients:
            client.is_up = True
        await asyncio.sleep(REPAIR_S)
        assert total(first) == total(second) == 3
        written = store.started()
        await asyncio.sleep(60.0)
        assert total(second) == 3
        assert store.started() == written, "nothing is written again once all is known"


@in_virtual_time()
async def test_failover_that_keeps_connections_is_survived():
    """A connection whose server became a replica is replaced, as a new one leads to the primary."""
    async with two_replicas() as (_, first, second):
        first.line._writing.is_to_replica = second.line._writing.is_to_replica = True
        first.send()
        await asyncio.sleep(REPAIR_S)
        assert first.heard == second.heard == 1
        assert total(first) == total(second) == 1


@in_virtual_time()
async def test_failure_to_receive_is_logged_once(caplog):
    """It works again once something can be read, not where only the newest entry can."""
    caplog.set_level(logging.INFO, "extproc.server")
    async with two_replicas() as (_, first, _):
        caplog.clear()
        first.line._reading.may_read = False
        await asyncio.sleep(30.0)
        assert caplog.messages == ["peer sync: cannot receive: NoPermissionError"]
        first.line._reading.may_read = True
        await asyncio.sleep(REPAIR_S)
        assert caplog.messages[1:] == ["peer sync: can receive again"]


@in_virtual_time()
async def test_lost_entries_of_the_stream_are_repaired():
    """A reader that fell behind a stream that was trimmed learns what is open."""
    async with two_replicas() as (store, first, second):
        first.send()
        await first.line.flush()
        store.entries.clear()
        await asyncio.sleep(0.5)
        assert total(second) == 0
        await asyncio.sleep(REPAIR_S)
        assert total(second) == 1


@in_virtual_time()
async def test_a_peer_that_was_dropped_and_is_heard_again_is_charged():
    """A replica that stood still for longer than the silence, and lost nothing by itself."""
    async with two_replicas() as (_, first, second):
        first.send()
        await asyncio.sleep(0.1)
        assert total(second) == 1
        second.line.replica.drop_silent(asyncio.get_running_loop().time() + SETTINGS.silent_s)
        assert total(second) == 0
        await asyncio.sleep(REPAIR_S)
        assert total(second) == 1


@in_virtual_time()
async def test_new_replicas_learn_what_is_open_by_few_rewrites():
    """Open requests are written again at most once per list, however many replicas come."""
    store = MemoryStream()
    first = build_replica(store)
    async with talking(first):
        await asyncio.sleep(2.0)
        for _ in range(10):
            first.send()
        await asyncio.sleep(10.0)
        others = [build_replica(store) for _ in range(5)]
        async with talking(*others):
            await asyncio.sleep(REPAIR_S)
            assert [total(other) for other in others] == [10] * 5
            assert 20 <= store.started() <= 40


@in_virtual_time()
async def test_a_new_replica_reads_once_its_endpoints_are_known():
    """Open requests can be charged then, and only then."""
    store = MemoryStream()
    first, second = build_replica(store), build_replica(store)
    second.is_synced = False
    async with talking(first, second):
        await asyncio.sleep(2.0)
        first.send()
        await asyncio.sleep(60.0)
        assert (second.heard, total(second)) == (0, 0)
        second.is_synced = True
        await asyncio.sleep(REPAIR_S)
        assert total(second) == 1


@in_virtual_time()
async def test_requests_that_cannot_be_charged_are_written_once():
    """A replica without the pool of a request does not let it be written again and again."""
    store = MemoryStream()
    first, second = build_replica(store), build_replica(store)
    del second.registry.by_name["b"]
    async with talking(first, second):
        await asyncio.sleep(2.0)
        first.send("b")
        await asyncio.sleep(60.0)
        assert store.started() == 1
