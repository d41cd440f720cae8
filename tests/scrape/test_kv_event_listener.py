"""Engines that connect to extproc, over real sockets on loopback, and peers that are none."""

import asyncio
import contextlib
import socket

import pytest

from extproc.endpoint import Endpoint
from extproc.scrape import kv_event_connection
from extproc.scrape.kv_event_connection import KvEventListener, plain_ip
from tests.scrape.kv_event_engines import HOST, PublishingEngine, Subscriber, depth, text
from tests.scrape.test_kv_event_connection import BROKEN, GREETING, READY

zmq = pytest.importorskip("zmq", reason="the extra kv-events is not installed")


@contextlib.asynccontextmanager
async def listening(*addresses, bind=f"tcp://{HOST}:0", is_bound=True, **settings):
    """A subscriber that listens for the engines of some endpoints, or will."""
    subscriber = Subscriber({}, addresses=addresses or (f"{HOST}:8000",), bind=bind, **settings)
    task = asyncio.ensure_future(subscriber.events.run())
    try:
        await subscriber.until(lambda: subscriber.events.listeners or not is_bound)
        await subscriber.until(lambda: subscriber.subscription is not None)
        yield subscriber
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def connected(subscriber, *, topic=b"", **settings):
    """An engine that publishes to a subscriber, once it knows that it is subscribed to."""
    port = subscriber.events.listeners[0].port
    engine = PublishingEngine(connect=f"tcp://{HOST}:{port}", topic=topic, **settings)
    task = asyncio.ensure_future(engine.publisher.run())
    try:
        await subscriber.until(lambda: engine.publisher.num_subscriptions)
        yield engine
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await engine.close()


async def connect(subscriber, *, host=HOST):
    """A peer of our own at the port of a subscriber."""
    port = subscriber.events.listeners[0].port
    return await asyncio.open_connection(HOST, port, local_addr=(host, 0))


async def is_closed(reader):
    """Wait until the other side closes."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(4096):
            pass
    return True


@pytest.mark.parametrize("form", ["map", "array"])
async def test_an_engine_that_connects_is_followed(form):
    """Without a topic, it is known by the address that it connects from."""
    async with listening() as subscriber, connected(subscriber, form=form) as engine:
        await subscriber.until(lambda: subscriber.state == "catching_up")
        for number in range(20):
            engine.run_prompt(text(number))
        await subscriber.until(lambda: subscriber.state == "exact")
        await subscriber.until(lambda: subscriber.holds(engine))
        assert depth(subscriber, text(19)) == 4
        assert subscriber.events.batches["applied"] == 20
        assert subscriber.events.num_refused == 0


async def test_an_engine_that_connects_again_is_asked_for_what_was_missed():
    """Its replay socket is that of an engine that listens."""
    async with listening() as subscriber, connected(subscriber) as engine:
        labels = {"kv-events-replay-port": str(engine.publisher.replay_port)}
        subscriber.store.set_endpoints([Endpoint(f"{HOST}:8000", labels=labels)], 1.0)
        engine.run_prompt(text(1))
        await subscriber.until(lambda: depth(subscriber, text(1)) == 4)
        await subscriber.until(lambda: subscriber.state == "exact")
        (connection,) = subscriber.events.listeners[0].connections
        connection.connection_lost(None)
        assert subscriber.state == "lost"
        engine.run_prompt(text(2))
        await subscriber.until(lambda: depth(subscriber, text(2)) == 4)
        await subscriber.until(lambda: subscriber.state == "exact")
        assert subscriber.events.batches["lost"] == 0
        assert subscriber.events.batches["replayed"] >= 2
        assert subscriber.holds(engine)


async def test_an_engine_goes_over_to_the_replica_that_leads_now():
    """As behind a Service: the one that led listens no longer, and the other is sent everything again."""
    leads = [True, False]
    async with listening(may_listen=lambda: leads[0]) as first:
        port = first.events.listeners[0].port
        bind = f"tcp://{HOST}:{port}"
        async with (
            connected(first) as engine,
            listening(bind=bind, is_bound=False, may_listen=lambda: leads[1]) as second,
        ):
            labels = {"kv-events-replay-port": str(engine.publisher.replay_port)}
            for replica in (first, second):
                replica.store.set_endpoints([Endpoint(f"{HOST}:8000", labels=labels)], 1.0)
                await replica.until(lambda: replica.subscription.endpoint.labels)  # noqa: B023
            engine.run_prompt(text(1))
            await first.until(lambda: first.state == "exact" and first.holds(engine))
            assert (second.state, second.events.listeners) == ("lost", [])
            leads[0] = False
            await first.until(lambda: first.state == "lost" and not first.events.listeners)
            leads[1] = True  # now the port is free: here both are on one host
            await second.until(lambda: second.state == "exact" and second.holds(engine))
            assert [change.state for change in first.changes][-1] == "lost"
            assert depth(second, text(1)) == 4


async def test_of_two_replicas_the_one_that_an_engine_connects_to_follows_it():
    """The other one estimates its cache, and waits for it."""
    async with listening() as first, listening() as second, connected(first) as engine:
        engine.run_prompt(text(1))
        await first.until(lambda: depth(first, text(1)) == 4)
        assert (second.state, second.subscription.engine.held) == ("lost", 0)
        assert not second.exact.is_any_live


async def test_a_topic_names_the_endpoint_where_several_have_an_address():
    """One that names none of them is refused."""
    addresses = f"{HOST}:8000", f"{HOST}:8001"
    async with (
        listening(*addresses) as subscriber,
        connected(subscriber, topic=b"kv@127.0.0.1:8001@model") as engine,
    ):
        engine.run_prompt(text(1))
        held = lambda: [sub.engine.held for sub in subscriber.events.subscriptions]  # noqa: E731
        await subscriber.until(lambda: held() == [0, 4])
        async with connected(subscriber, topic=b"kv@127.0.0.1@model") as other:
            other.run_prompt(text(2))
            await subscriber.until(lambda: subscriber.events.num_refused)
        assert held() == [0, 4]


async def test_an_address_that_no_endpoint_has_is_refused():
    """Until discovery lists it, nothing that it sends is read."""
    async with listening("127.0.0.2:8000") as subscriber:
        reader, writer = await connect(subscriber)
        assert await is_closed(reader)
        writer.close()
        assert subscriber.events.num_refused == 1
        assert not subscriber.events.listeners[0].connections
        reader, writer = await connect(subscriber, host="127.0.0.2")
        writer.write(GREETING + READY)
        await subscriber.until(lambda: subscriber.state == "catching_up")
        writer.close()
        await subscriber.until(lambda: subscriber.state == "lost")


async def test_connections_of_an_address_are_bounded():
    """Further ones are closed, and places come free again."""
    async with listening() as subscriber:
        peers = [await connect(subscriber) for _ in range(3)]
        (listener,) = subscriber.events.listeners
        await subscriber.until(lambda: len(listener.connections) == 3)
        reader, writer = await connect(subscriber)
        assert await is_closed(reader)
        writer.close()
        for _, writer in peers:
            writer.close()
        await subscriber.until(lambda: not listener.connections)
        async with connected(subscriber) as engine:
            engine.run_prompt(text(1))
            await subscriber.until(lambda: depth(subscriber, text(1)) == 4)


async def test_a_place_is_free_only_a_while_after_its_connection(monkeypatch):
    """A peer that connects again and again is refused, instead of occupying the event loop."""
    monkeypatch.setattr(kv_event_connection, "_RELEASE_S", 1e6)
    async with listening() as subscriber:
        (listener,) = subscriber.events.listeners
        for _ in range(3):
            _, writer = await connect(subscriber)
            await subscriber.until(lambda: listener.connections)
            writer.close()
            await subscriber.until(lambda: not listener.connections)
        assert not subscriber.events.num_refused
        reader, writer = await connect(subscriber)
        assert await is_closed(reader)
        writer.close()
        assert subscriber.events.num_refused == 1


@pytest.mark.parametrize("sent", BROKEN)
async def test_a_peer_that_does_not_keep_to_the_protocol_is_refused(sent):
    """Whatever it sends, the connection is closed, and the subscription is as before."""
    async with listening() as subscriber:
        reader, writer = await connect(subscriber)
        writer.write(sent)
        assert await is_closed(reader)
        writer.close()
        await subscriber.until(lambda: subscriber.events.num_refused == 1)
        await subscriber.until(lambda: subscriber.state == "lost")
        assert not subscriber.supervisor.failures["kv_events"]


async def test_a_peer_that_is_silent_is_given_up(monkeypatch):
    """One that never greets, and one that answers no pings."""
    monkeypatch.setattr(kv_event_connection, "_HANDSHAKE_S", 0.0)
    monkeypatch.setattr(kv_event_connection, "_HEARTBEAT_S", 0.0)
    async with listening() as subscriber:
        reader, writer = await connect(subscriber)
        assert await is_closed(reader)
        writer.close()
        monkeypatch.setattr(kv_event_connection, "_HANDSHAKE_S", 1e9)
        reader, writer = await connect(subscriber)
        writer.write(GREETING.replace(b"\x7f\x03\x00", b"\x7f\x03\x01") + READY)
        await subscriber.until(lambda: subscriber.state == "catching_up")
        assert await is_closed(reader)
        writer.close()
        assert subscriber.state == "lost"
        monkeypatch.setattr(kv_event_connection, "_MAX_SILENT", 1e9)
        async with connected(subscriber):
            (connection,) = subscriber.events.listeners[0].connections
            for _ in range(10):
                await subscriber.until(connection.is_answered)
                connection.check(subscriber.now())
            assert subscriber.state == "catching_up"


def test_a_listener_that_closes_while_it_accepts_reports_no_error():
    """On asyncio's own loop, at any step of a connection that is being made."""

    async def close_after(num_steps):
        errors = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        listener = KvEventListener(HOST, 0, find=lambda _: [None], clock=loop.time)
        with socket.create_connection((HOST, listener.port)):
            for _ in range(num_steps):
                await asyncio.sleep(0)
            listener.close("shutdown")
            for _ in range(10):
                await asyncio.sleep(0)
        assert errors == []
        assert not listener.connections

    for num_steps in range(8):
        asyncio.run(close_after(num_steps))


async def test_what_a_peer_sends_waits_in_its_socket():
    """A flood is read as far as it is worked off, and ends with the rest of its subscription."""
    async with listening() as subscriber:
        reader, writer = await connect(subscriber)
        frame = b"\x01\x00\x01\x08" + bytes(8) + b"\x02" + (900_000).to_bytes(8)
        writer.write(GREETING + READY)
        sizes = []
        for _ in range(40):
            # Once it is closed, uvloop raises a RuntimeError.
            with contextlib.suppress(ConnectionError, RuntimeError):
                writer.write(frame + bytes(900_000))
                async with asyncio.timeout(300):
                    await writer.drain()
            connections = subscriber.events.listeners[0].connections
            sizes += [connection.num_buffered for connection in connections]
        await is_closed(reader)
        writer.close()
        assert max(sizes) < 4_000_000
        assert subscriber.events.batches["malformed"] == 16
        assert subscriber.state == "lost"
        reader, writer = await connect(subscriber)
        writer.write(GREETING + READY)
        assert await is_closed(reader)
        writer.close()
        assert subscriber.events.num_refused == 1


async def test_ranks_connect_to_the_ports_behind_the_first():
    """Each has a listener of its own."""
    async with listening(ranks=2) as subscriber:
        first, second = subscriber.events.listeners
        _, writer = await asyncio.open_connection(HOST, second.port)
        writer.write(GREETING + READY)
        await subscriber.until(
            lambda: (
                [sub.state for sub in subscriber.events.subscriptions] == ["lost", "catching_up"]
            )
        )
        assert first.port != second.port
        writer.close()


@pytest.mark.parametrize(
    ("ip", "plain"),
    [
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::1"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("engine", "engine"),
    ],
)
def test_addresses_have_one_form(ip, plain):
    """Both sides write them differently."""
    assert plain_ip(ip) == plain
