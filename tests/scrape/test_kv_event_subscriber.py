"""Subscriptions over real sockets on loopback: restarts, ranks, bounds and garbage."""

import asyncio
import contextlib
import gc
import sys

import msgspec
import pytest

from extproc.endpoint import Endpoint
from extproc.errors import ConfigError
from extproc.scrape.kv_event_subscriber import KvEventsSection, require
from extproc.simulator import prompt
from extproc.simulator.http import kv_publisher
from tests.scrape.kv_event_engines import (
    HOST,
    SIZE,
    PublishingEngine,
    Subscriber,
    depth,
    running,
    text,
)

pytest.importorskip("zmq", reason="the extra kv-events is not installed")


@pytest.mark.parametrize("form", ["map", "array"])
async def test_copies_in_the_memory_of_the_host_are_followed(form):
    """An engine names them by their hashes alone, in both forms, and removes them again."""
    engine = PublishingEngine(form=form, blocks=8, host_blocks=6)
    async with running(engine) as subscriber:
        for number in range(5):
            engine.run_prompt(text(number))
        await subscriber.until(lambda: subscriber.events.batches["applied"] == 5)
        await subscriber.until(lambda: subscriber.holds(engine))
        held = subscriber.subscription.engine
        await subscriber.until(lambda: sorted(held.lower_keys) == sorted(engine.pool.host.keys))
        assert len(held.lower_keys) == len(engine.pool.host) == 6
        assert (held.dropped, held.is_exact) == (0, True)


@pytest.mark.parametrize("form", ["map", "array"])
async def test_subscription_learns_what_was_published_before_it_and_since(form):
    """A replay has the beginning, in both forms; what is evicted is gone."""
    engine = PublishingEngine(form=form, blocks=12)
    engine.run_prompt(text(1))
    async with running(engine) as subscriber:
        await subscriber.until(lambda: subscriber.state == "exact")
        assert depth(subscriber, text(1)) == 4
        engine.run_prompt(text(2))
        engine.run_prompt(text(1) + text(3), adapter="")
        await subscriber.until(
            lambda: subscriber.holds(engine) and depth(subscriber, text(1) + text(3)) == 8
        )
        assert depth(subscriber, text(2)) == 4
        engine.run_prompt(text(4))
        await subscriber.until(lambda: depth(subscriber, text(4)) == 4)
        assert depth(subscriber, text(2)) == 0
        assert subscriber.holds(engine)
        assert subscriber.events.batches["lost"] == 0
        assert [change.state for change in subscriber.changes] == ["exact"]


async def test_adapters_have_blocks_of_their_own():
    """The name of the adapter comes with the events."""
    engine = PublishingEngine()
    async with running(engine) as subscriber:
        await subscriber.until(lambda: subscriber.state == "exact")
        engine.run_prompt(text(1), adapter="ad")
        await subscriber.until(lambda: depth(subscriber, text(1), adapter="ad") == 4)
        assert depth(subscriber, text(1)) == 0


async def test_garbage_is_counted_and_ends_the_subscription_for_a_while():
    """Its blocks are dropped, and nothing more is read."""
    engine = PublishingEngine()
    async with running(engine) as subscriber:
        await subscriber.until(lambda: subscriber.state == "exact")
        engine.arm("kv-garble")
        for number in range(40):
            engine.run_prompt(text(number))
        await subscriber.until(lambda: subscriber.state == "lost")
        assert subscriber.events.batches["malformed"] == 16
        assert subscriber.subscription.engine.held == 0
        assert subscriber.changes[-1].detail == "its messages are malformed"
        assert not subscriber.supervisor.failures["kv_events"]


async def neighbors():
    """Two engines on ports that follow each other; other processes take ports as well."""
    for _ in range(100):
        first = PublishingEngine()
        with contextlib.suppress(ConfigError):
            return first, PublishingEngine(port=first.publisher.port + 1, rank=1)
        await first.close()
    raise OSError("expected two free ports that follow each other, found none in 100 attempts")


async def test_ranks_are_subscribed_to_on_the_ports_behind_the_first():
    """Each has blocks of its own."""
    engine, second = await neighbors()
    labels = {"kv-events-port": engine.ports["kv-events-port"]}
    async with running(engine, labels=labels, ranks=2) as subscriber:
        await subscriber.until(lambda: len(list(subscriber.events.subscriptions)) == 2)
        await subscriber.until(
            lambda: {sub.state for sub in subscriber.events.subscriptions} == {"catching_up"}
        )
        await subscriber.until(lambda: second.publisher.num_subscriptions)
        second.run_prompt(text(1))
        await subscriber.until(
            lambda: [sub.engine.held for sub in subscriber.events.subscriptions] == [0, 4]
        )
    await second.close()


def test_a_publisher_forgets_what_was_noted_longest_ago(monkeypatch):
    """A prefix that requests share is noted with each of them, and may be evicted and stored again."""
    monkeypatch.setattr(kv_publisher, "_MAX_NOTED", 6)
    sent = []

    async def test():
        engine = PublishingEngine()
        monkeypatch.setattr(engine.publisher, "send", sent.append)
        shared, *others = (text(n) for n in range(3))
        engine.run_prompt(shared)
        for other in (others[0], shared, others[1][:128]):
            hashes = prompt.hashes(other, salt="", block_tokens=SIZE)
            engine.publisher.note(hashes, other, adapter="", salt="")
        engine.pool.clear()
        hashes = prompt.hashes(shared, salt="", block_tokens=SIZE)
        engine.pool.allocate(len(hashes))
        engine.pool.register([], hashes, len(hashes))
        engine.publisher.flush()
        await engine.close()
        return hashes

    hashes = asyncio.run(test())
    _, events, _ = msgspec.msgpack.decode(sent[-1][2])
    assert [event["block_hashes"] for event in events if event["type"] == "BlockStored"] == [hashes]


async def test_a_publisher_whose_port_is_taken_closes_its_sockets():
    """An open one would be found by the collector of garbage, in another test."""
    engine = PublishingEngine()
    with pytest.raises(ConfigError):
        PublishingEngine(port=engine.publisher.port)
    gc.collect()
    await engine.close()


@pytest.mark.parametrize("step", ["check", "note_page", "note_capacity", "work"])
async def test_a_subscription_that_raises_rests_and_stops_no_other(step, monkeypatch):
    """Whatever a bug does with what one engine sends, the others are followed."""
    engine = PublishingEngine()
    addresses = (f"{HOST}:8000", f"{HOST}:8001")
    async with running(engine, addresses=addresses) as subscriber:
        first, second = subscriber.events.subscriptions
        await subscriber.until(lambda: first.state == second.state == "exact")

        def wrong(_):
            raise LookupError

        monkeypatch.setattr(first, step, wrong)
        engine.run_prompt(text(1))
        await subscriber.until(lambda: first.is_resting and second.engine.held == 4)
        assert list(subscriber.events.subscriptions) == [first, second]
        assert subscriber.supervisor.failures["kv_events"]


async def test_an_endpoint_that_leaves_takes_its_blocks_along():
    """Sockets are closed, and its blocks are swept."""
    engine = PublishingEngine()
    engine.run_prompt(text(1))
    async with running(engine) as subscriber:
        await subscriber.until(lambda: subscriber.state == "exact")
        assert subscriber.exact.index.num_keys == 4
        subscriber.store.set_endpoints([], 1.0)
        await subscriber.until(lambda: not subscriber.exact.index.num_keys)
        assert subscriber.subscription is None


async def test_an_endpoint_whose_other_labels_change_stays_known():
    """Labels that name a port mean another publisher."""
    engine = PublishingEngine()
    labels = {"kv-events-port": engine.ports["kv-events-port"]}
    async with running(engine, labels=labels) as subscriber:
        engine.run_prompt(text(1))
        await subscriber.until(lambda: depth(subscriber, text(1)) == 4)
        subscription = subscriber.subscription
        for more, is_same in (
            ({"role": "decode"}, True),
            ({"kv-events-replay-port": engine.ports["kv-events-replay-port"]}, False),
        ):
            endpoint = Endpoint(f"{HOST}:8000", labels=labels | more)
            subscriber.store.set_endpoints([endpoint], 0.0)
            subscriber.events.step()
            assert (subscriber.subscription is subscription) == is_same
        await subscriber.until(lambda: depth(subscriber, text(1)) == 4)


async def test_messages_of_other_forms_are_malformed():
    """Any frames have an answer."""
    engine = PublishingEngine()
    async with running(engine) as subscriber:
        await subscriber.until(lambda: subscriber.state == "exact")
        send = engine.publisher.send
        send((b"",))
        send((b"", b"12345678"))
        send((b"", b"short", b"x"))
        send((b"", (0).to_bytes(8), msgspec.msgpack.encode([0.0, [["Other", 1], 7]])))
        await subscriber.until(lambda: subscriber.events.batches["malformed"] == 4)
        assert subscriber.state in ("exact", "partial")


async def publish_without_end(reader, writer):
    """Speak ZMTP 3 as a publisher, and send parts of one message that has no last one."""
    writer.write(b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\5READY\x0bSocket-Type" + (3).to_bytes(4, "big") + b"PUB"
    writer.write(bytes([4, len(ready)]) + ready)
    with contextlib.suppress(ConnectionError):
        await reader.readexactly(64)
        while True:
            writer.write(b"\3" + (100_000).to_bytes(8, "big") + bytes(100_000))
            await writer.drain()
    writer.close()


async def test_a_message_without_end_ends_the_connection():
    """Its number of parts is bounded; another connection is made."""
    num_accepted = 0

    async def serve(reader, writer):
        nonlocal num_accepted
        num_accepted += 1
        await publish_without_end(reader, writer)

    server = await asyncio.start_server(serve, HOST, 0)
    port = str(server.sockets[0].getsockname()[1])
    subscriber = Subscriber({"kv-events-port": port})
    task = asyncio.ensure_future(subscriber.events.run())
    try:
        await subscriber.until(lambda: num_accepted == 3)
        assert not subscriber.supervisor.failures["kv_events"]
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        server.close()


@pytest.mark.parametrize(
    ("event", "most"),
    [
        pytest.param(["BlockStored", [1], None, [1] * 65_536, 65_536], 4, id="long blocks"),
        pytest.param(["Unknown", "x" * 65_536], 4, id="unknown events"),
        pytest.param(["AllBlocksCleared"], 8, id="cleared caches"),
        pytest.param(["BlockStored", [1], None, list(range(16)), 16], 128, id="usual blocks"),
    ],
)
async def test_a_turn_does_as_much_as_its_events_cost(event, most):
    """Engines choose what is in a message; the event loop is held for as long by any of them."""
    engine = PublishingEngine()
    async with running(engine) as subscriber:
        subscription = subscriber.subscription
        events = [msgspec.Raw(msgspec.msgpack.encode(event))] * 200
        subscription._pending.extend(events)
        subscription.work(128)
        assert 200 - most <= len(subscription._pending) < 200


async def test_pages_of_a_token_are_followed():
    """SGLang has them by default, and publishes those of a step as one event."""
    engine = PublishingEngine()
    hashes = [*range(-5000, 5000)]

    def publish(seq, *event):
        payload = msgspec.msgpack.encode([0.0, [event]])
        engine.publisher.send((b"", seq.to_bytes(8), payload))

    labels = {"kv-events-port": engine.ports["kv-events-port"]}
    async with running(engine, labels=labels) as subscriber:
        publish(0, "BlockStored", hashes, None, [7] * 10_000, 1)
        await subscriber.until(lambda: subscriber.subscription.engine.held == 10_000)
        publish(1, "BlockRemoved", hashes)
        await subscriber.until(lambda: subscriber.subscription.engine.held == 0)
        assert subscriber.state == "exact"
        assert subscriber.events.batches["malformed"] == 0


async def test_an_engine_has_a_rate_of_blocks_beyond_a_burst():
    """30,000 blocks at once take half a second at least: 20,000 are the burst, and a second's worth."""
    engine = PublishingEngine()
    async with running(engine) as subscriber:
        subscription = subscriber.subscription
        event = ["BlockStored", [1], None, list(range(16)), 16]
        events = [msgspec.Raw(msgspec.msgpack.encode(event))] * 40_000
        subscription._pending.extend(events)
        cost = subscription.work(1)
        began = asyncio.get_running_loop().time()
        subscription.wake()
        await subscriber.until(lambda: (40_000 - len(subscription._pending)) * cost >= 30_000)
        assert asyncio.get_running_loop().time() - began >= 0.45


def test_a_publisher_needs_the_extra(monkeypatch):
    """Only simulated engines use libzmq; without it the error says how to install it."""
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install 'extproc-epp\[kv-events\]'"):
        PublishingEngine()


@pytest.mark.parametrize(
    "ports", [{"port": 65535}, {"replay_port": 65535}, {"bind": "tcp://*:65535"}]
)
def test_ranks_beyond_the_last_port_are_refused(ports):
    """A picker does not start with a rank that has no port; one rank has."""
    require(KvEventsSection(enabled=True, ranks=1, **ports))
    require(KvEventsSection(enabled=False, ranks=2, **ports))
    with pytest.raises(ConfigError, match="port 65536"):
        require(KvEventsSection(enabled=True, ranks=2, **ports))
