"""Batches of KV events that are lost, and come again where the engine has a replay socket."""

import asyncio

from extproc.endpoint import Load
from extproc.scrape import kv_event_replay
from tests.scrape.kv_event_engines import (
    HOST,
    PublishingEngine,
    copy_stream,
    depth,
    running,
    text,
)


async def test_batches_that_were_lost_are_asked_for_again():
    """With a replay socket no block is missed, whatever share is lost."""
    engine = PublishingEngine(blocks=40)
    engine.arm("kv-drop,rate=0.3")
    async with running(engine) as subscriber:
        await subscriber.until(lambda: subscriber.state == "exact")
        for number in range(100):
            engine.run_prompt(text(number))
            await asyncio.sleep(0)
        engine.faults.clear()
        engine.run_prompt(text(1000))
        await subscriber.until(
            lambda: depth(subscriber, text(1000)) == 4 and subscriber.state == "exact"
        )
        assert subscriber.holds(engine)
        assert all(
            depth(subscriber, text(number)) == (4 if number > 90 else 0) for number in range(100)
        )
        assert subscriber.events.batches["replayed"] > 0
        assert subscriber.events.batches["lost"] == 0


async def test_a_last_batch_that_was_lost_is_asked_for():
    """No later one shows that it is missing."""
    engine = PublishingEngine()
    async with running(engine) as subscriber:
        await subscriber.until(lambda: subscriber.state == "exact")
        engine.run_prompt(text(1))
        await subscriber.until(lambda: depth(subscriber, text(1)) == 4)
        engine.arm("kv-drop,count=1")
        engine.run_prompt(text(2))
        await subscriber.until(lambda: depth(subscriber, text(2)) == 4)
        assert subscriber.state == "exact"
        assert subscriber.events.batches["lost"] == 0


async def test_without_replay_a_lost_batch_leaves_what_is_known_partial():
    """It is wiped, and never taken for exact; a cleared cache is exact again."""
    engine = PublishingEngine()
    labels = {"kv-events-port": engine.ports["kv-events-port"]}
    async with running(engine, labels=labels) as subscriber:
        await subscriber.until(lambda: subscriber.state == "catching_up")
        engine.run_prompt(text(1))
        await subscriber.until(lambda: subscriber.state == "exact")
        engine.arm("kv-drop,count=1")
        engine.run_prompt(text(2))
        engine.run_prompt(text(3))
        await subscriber.until(lambda: subscriber.state == "partial")
        assert depth(subscriber, text(1)) == 0
        await subscriber.until(lambda: depth(subscriber, text(3)) == 4)
        assert subscriber.events.batches["lost"] == 1
        engine.pool.clear()
        engine.publisher.flush()
        await subscriber.until(lambda: subscriber.state == "exact")
        assert depth(subscriber, text(3)) == 0
        assert [endpoint.address for endpoint in subscriber.cleared] == [f"{HOST}:8000"]


async def test_what_is_partial_is_exact_once_known_blocks_fill_the_cache():
    """Earlier blocks have been evicted by then."""
    engine = PublishingEngine(blocks=8)
    engine.run_prompt(text(1))
    labels = {"kv-events-port": engine.ports["kv-events-port"]}
    async with running(engine, labels=labels) as subscriber:
        await subscriber.until(lambda: subscriber.state == "catching_up")
        engine.run_prompt(text(2))
        await subscriber.until(lambda: subscriber.state == "partial")
        store = subscriber.store
        load = Load(at=1.0, kv_blocks=8, block_tokens=16)
        store.observe(store.begin_scrape(store.pool.members[0].endpoint), load, 1.0)
        subscriber.events.step()
        assert subscriber.state == "partial"
        engine.run_prompt(text(3))
        await subscriber.until(lambda: subscriber.state == "exact")
        assert subscriber.holds(engine)


async def test_a_late_subscriber_without_replay_is_partial():
    """It says nothing of what was stored before."""
    engine = PublishingEngine()
    engine.run_prompt(text(1))
    labels = {"kv-events-port": engine.ports["kv-events-port"]}
    async with running(engine, labels=labels) as subscriber:
        await subscriber.until(lambda: subscriber.state == "catching_up")
        engine.run_prompt(text(2))
        await subscriber.until(lambda: subscriber.state == "partial")
        await subscriber.until(lambda: depth(subscriber, text(2)) == 4)
        assert subscriber.events.batches["lost"] == 0


async def test_a_replay_socket_that_is_silent_does_not_stop_the_subscription(monkeypatch):
    """After a time-out what was before is unknown."""
    monkeypatch.setattr("extproc.scrape.kv_event_replay._TIMEOUT_S", 0.05)
    engine = PublishingEngine()
    engine.run_prompt(text(1))
    labels = engine.ports | {"kv-events-replay-port": "9"}
    async with running(engine, labels=labels) as subscriber:
        await subscriber.until(lambda: subscriber.state == "partial")
        engine.run_prompt(text(2))
        await subscriber.until(lambda: depth(subscriber, text(2)) == 4)
        assert subscriber.state == "partial"


async def test_a_replay_without_end_is_given_up(monkeypatch):
    """Its batches are counted, also those that bring nothing new; live ones are taken in then."""
    monkeypatch.setattr(kv_event_replay, "_MAX_BATCHES", 200)
    engine = PublishingEngine()
    engine.run_prompt(text(1))

    async def answer_without_end():
        router, frames = engine.publisher._router, None
        while True:
            frames = frames or await router.recv_multipart()
            payload = engine.publisher._buffer[0][1]
            await router.send_multipart((frames[0], b"", b"", (0).to_bytes(8), payload))
            await asyncio.sleep(0)

    engine.publisher.run = answer_without_end
    async with running(engine) as subscriber:
        await subscriber.until(lambda: subscriber.state == "partial")
        assert not subscriber.subscription.is_replaying
        engine.run_prompt(text(2))
        await subscriber.until(lambda: depth(subscriber, text(2)) == 4)
        assert subscriber.events.batches["lost"] == 0


async def test_a_replay_that_is_cut_off_is_continued(monkeypatch):
    """ZeroMQ drops what a slow peer has no room for, the end as well."""
    monkeypatch.setattr(kv_event_replay, "_TIMEOUT_S", 0.05)
    engine = PublishingEngine()
    for number in range(50):
        engine.run_prompt(text(number))
    starts = []

    async def answer_partly():
        router = engine.publisher._router
        while True:
            client, _, start = await router.recv_multipart()
            starts.append(int.from_bytes(start))
            for seq, payload in list(engine.publisher._buffer)[starts[-1] :][:20]:
                await router.send_multipart((client, b"", b"", seq.to_bytes(8), payload))
            if len(engine.publisher._buffer) - starts[-1] < 20:
                end = kv_event_replay.END.to_bytes(8)
                await router.send_multipart((client, b"", b"", end, b""))

    engine.publisher.run = answer_partly
    async with running(engine) as subscriber:
        await subscriber.until(lambda: subscriber.state in {"exact", "partial"})
        assert subscriber.state == "exact"
        assert subscriber.holds(engine)
        assert starts == [0, 20, 40]


async def test_an_index_with_losses_and_lost_connections_equals_the_engine():
    """A hundredth of the batches is lost, and the connection is cut time and again."""
    engine = PublishingEngine(blocks=40)
    engine.arm("kv-drop,rate=0.01")
    connections = []

    async def forward(reader, writer):
        port = int(engine.ports["kv-events-port"])
        from_engine, to_engine = await asyncio.open_connection(HOST, port)
        connections.append((writer, to_engine))
        await asyncio.gather(copy_stream(reader, to_engine), copy_stream(from_engine, writer))

    proxy = await asyncio.start_server(forward, HOST, 0)
    port = proxy.sockets[0].getsockname()[1]
    async with running(engine, labels=engine.ports | {"kv-events-port": str(port)}) as subscriber:
        await subscriber.until(lambda: subscriber.state == "exact")
        for cut in range(4):
            for number in range(100):
                engine.run_prompt(text(1000 * cut + number % 30))
                await asyncio.sleep(0)
            for writer in connections.pop():
                writer.transport.abort()
            await subscriber.until(lambda: not subscriber.subscription.engine.is_live)
            engine.run_prompt(text(1000 * cut + 500))
            await subscriber.until(lambda: subscriber.state == "exact" and connections)
        engine.faults.clear()
        engine.run_prompt(text(9_999))
        await subscriber.until(
            lambda: depth(subscriber, text(9_999)) == 4 and subscriber.state == "exact"
        )
        assert subscriber.holds(engine)
        assert subscriber.events.batches["lost"] == 0
        assert subscriber.events.batches["replayed"] >= 4
    proxy.close()
    await proxy.wait_closed()
