"""Bar of KV events: whatever goes wrong, what is known equals the engine within 2 s, or is wiped.

Time is that of the test: it stands still while the subscriber settles.
"""

import asyncio
import contextlib
import random

import msgspec
import pytest

from extproc.endpoint import Endpoint
from extproc.scrape import kv_event_connection
from tests.scrape.kv_event_engines import (
    HOST,
    PublishingEngine,
    Subscriber,
    copy_stream,
    depth,
    running,
    text,
)

zmq = pytest.importorskip("zmq", reason="the extra kv-events is not installed")

#: Seconds for which what is known may be wrong.
WRONG_S = 2.0


@pytest.fixture(autouse=True)
def _connects_soon(monkeypatch):
    """Connections are cut more often than anywhere else."""
    monkeypatch.setattr(kv_event_connection, "_MAX_RECONNECT_S", 0.1)


class FaultySite:
    """An engine behind proxies, its subscriber, and a clock that the test moves."""

    def __init__(self):
        self.time = 1000.0
        self.rng = random.Random(5)
        self.engine = None
        self.num_marks = 0
        self.connections = []
        self.tasks = []

    @contextlib.asynccontextmanager
    async def running(self, **settings):
        self.start_engine()
        proxies = [
            await asyncio.start_server(self.forward(port), HOST, 0)
            for port in ("port", "replay_port")
        ]
        ports = [str(proxy.sockets[0].getsockname()[1]) for proxy in proxies]
        labels = dict(zip(("kv-events-port", "kv-events-replay-port"), ports, strict=True))
        self.subscriber = Subscriber({}, clock=lambda: self.time, **settings)
        self.subscriber.store.set_endpoints([Endpoint(f"{HOST}:8000", labels=labels)], 0.0)
        follows = asyncio.ensure_future(self.subscriber.events.run())
        try:
            await self.subscriber.until(lambda: self.state == "exact")
            yield self
        finally:
            for proxy in proxies:
                proxy.close()
            self.cut()
            for task in (follows, *self.tasks):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                    await task
            await self.engine.close()

    @property
    def state(self):
        return self.subscriber.state

    def start_engine(self):
        """Start another engine process, whose cache is empty and whose batches begin at 0."""
        self.engine = PublishingEngine(blocks=60)
        self.tasks.append(asyncio.ensure_future(self.engine.publisher.run()))

    async def restart(self):
        """End the engine, and start another one that serves at once."""
        self.tasks.pop().cancel()
        await self.engine.close()
        self.cut()
        self.start_engine()

    def forward(self, port):
        """Pass on what comes, to the engine that there is now."""

        async def forward(reader, writer):
            try:
                from_engine, to_engine = await asyncio.open_connection(
                    HOST, getattr(self.engine.publisher, port)
                )
            except OSError:
                writer.transport.abort()
                return
            self.connections += [writer, to_engine]
            await asyncio.gather(copy_stream(reader, to_engine), copy_stream(from_engine, writer))

        return forward

    def cut(self):
        """Cut every connection."""
        while self.connections:
            self.connections.pop().transport.abort()

    def garbage(self, count):
        """Publish messages of any form."""
        for _ in range(count):
            frames = [self.rng.randbytes(self.rng.randrange(40)) for _ in range(3)]
            if self.rng.random() < 0.8:
                frames[1] = self.rng.choice(
                    [self.rng.randbytes(8), self.engine.publisher.seq.to_bytes(8)]
                )
            self.engine.publisher.send(frames[: self.rng.choice([1, 2, 3, 3, 3, 3])])

    def is_right(self):
        """True if every block is known, or none, or what is known is not used."""
        engine = self.subscriber.subscription.engine
        if not engine.is_live or not (len(engine.keys) or engine.is_complete):
            return True
        held = sorted(key for key in self.engine.pool.keys if key >= 0)
        return sorted(engine.keys) == held and self.subscriber.exact.index.num_keys == len(held)

    async def serve(self, prompts):
        """Run some prompts, some of them again, and let the loop turn between."""
        for _ in range(prompts):
            self.advance(0.05)
            self.engine.run_prompt(text(self.rng.randrange(40), 64 * self.rng.randrange(1, 9)))
            await asyncio.sleep(0)

    async def settle(self):
        """Within 2 s of what was published, what is known is right; then time stands still."""
        self.engine.faults.clear()
        engine = self.subscriber.subscription.engine
        num_looks = 0

        def is_handled():
            nonlocal num_looks
            # One that is published while a connection comes up reaches no subscriber: the next one does.
            if num_looks % 50 == 0:
                self.num_marks += 1
                self.engine.run_prompt(text(10_000 + self.num_marks))
            num_looks += 1
            return not engine.is_live or depth(self.subscriber, text(10_000 + self.num_marks)) == 4

        # Behind this batch, all before it were handled, or nothing that is known is used.
        await self.subscriber.until(is_handled)
        await self.wait(WRONG_S)

    def advance(self, seconds):
        """Let time go on, but not while an answer is under way: that takes no time here."""
        if not self.subscriber.subscription.is_replaying:
            self.time += seconds

    async def wait(self, seconds):
        """The known blocks are correct after so many seconds."""
        until = self.time + seconds
        while self.time < until:
            self.advance(0.2)
            await asyncio.sleep(0.001)
        await self.subscriber.until(self.is_right)

    async def regain(self):
        """Let time go on until every block is known again."""

        def is_exact():
            self.advance(0.05)
            return self.state == "exact"

        await self.subscriber.until(is_exact)
        await self.settle()


async def test_a_hundredth_of_the_messages_is_lost():
    """Each gap is filled, the last one too."""
    async with FaultySite().running() as site:
        for _ in range(8):
            site.engine.arm("kv-drop,rate=0.01")
            await site.serve(60)
            await site.settle()
        await site.wait(30.0)
        site.engine.arm("kv-drop,count=1")
        site.engine.run_prompt(text(9_999))
        assert not site.is_right()
        await site.wait(WRONG_S)
        assert site.state == "exact"
        assert site.subscriber.events.batches["replayed"]
        assert not site.subscriber.events.batches["lost"]


async def test_a_replay_socket_that_was_silent_is_asked_again():
    """Nothing was known to be missing, so what is known counts on."""
    async with FaultySite().running() as site:
        subscription = site.subscriber.subscription
        site.tasks.pop().cancel()  # it answers replays
        site.time += 1.0
        await site.subscriber.until(lambda: subscription.is_replaying)
        site.time += 2.0
        await site.subscriber.until(lambda: not subscription.is_replaying)
        assert site.state == "exact"
        site.tasks.append(asyncio.ensure_future(site.engine.publisher.run()))
        site.engine.arm("kv-drop,count=1")
        site.engine.run_prompt(text(9_999))
        assert not site.is_right()
        site.time += 31.0
        await site.subscriber.until(site.is_right)
        assert site.state == "exact"
        assert not site.subscriber.events.batches["lost"]


def send_garbage(site):
    """Publish a message that makes what is known worthless."""
    site.engine.publisher.send((b"", b"short", b""))


async def test_a_replay_socket_that_is_silent_leaves_what_was_forgotten_unknown():
    """Behind a malformed message everything is asked for; without an answer, it is not known."""
    async with FaultySite().running() as site:
        site.engine.run_prompt(text(1))
        await site.subscriber.until(site.is_right)
        subscription = site.subscriber.subscription
        site.tasks.pop().cancel()  # it answers replays
        send_garbage(site)
        await site.subscriber.until(lambda: site.state == "partial")
        site.time += 1.0
        await site.subscriber.until(lambda: subscription.is_replaying)
        site.time += 2.0
        await site.subscriber.until(lambda: not subscription.is_replaying)
        assert not subscription.engine.held
        assert site.state == "partial"
        site.tasks.append(asyncio.ensure_future(site.engine.publisher.run()))
        site.cut()
        await site.subscriber.until(lambda: site.state == "lost")
        site.time += 2.0
        await site.subscriber.until(lambda: site.state == "exact")
        assert site.is_right()


async def test_everything_is_asked_for_once_a_lost_connection_is_back(monkeypatch):
    """The time to ask may come while there is none."""
    monkeypatch.setattr(kv_event_connection, "_RECONNECT_S", 0.4)
    async with FaultySite().running() as site:
        site.engine.run_prompt(text(1))
        await site.subscriber.until(site.is_right)
        send_garbage(site)
        await site.subscriber.until(lambda: site.state == "partial")
        site.cut()
        await site.subscriber.until(lambda: site.state == "lost")
        site.time += 1.0
        site.subscriber.events.step()
        assert site.state == "lost"
        await site.subscriber.until(lambda: site.state == "exact")
        assert site.is_right()


async def test_the_connection_is_cut_every_ten_seconds():
    """Batches that were published meanwhile are requested."""
    async with FaultySite().running() as site:
        for _ in range(6):
            await site.serve(200)  # 10 s
            site.cut()
            await site.serve(5)
            await site.settle()
            await site.regain()
        assert not site.subscriber.events.batches["lost"]
        assert site.subscriber.events.batches["replayed"]


async def test_the_engine_restarts_under_load():
    """Nothing of its earlier life is left."""
    async with FaultySite().running() as site:
        for prompts in (3, 80, 1, 20):
            await site.serve(40)
            await site.restart()
            await site.serve(prompts)
            await site.settle()
            await site.regain()
        assert site.subscriber.cleared


@pytest.mark.parametrize("num_batches", [0, 1, 5])
async def test_an_engine_that_restarts_is_known_from_its_start(num_batches):
    """With fewer or more batches than before, blocks of the earlier process are dropped."""
    first = PublishingEngine()
    first.run_prompt(text(1))
    async with running(first) as subscriber:
        await subscriber.until(lambda: subscriber.state == "exact" and subscriber.holds(first))
        first.run_prompt(text(2))
        await subscriber.until(lambda: depth(subscriber, text(2)) == 4)
        await first.close()
        await subscriber.until(lambda: subscriber.state == "lost")
        assert not subscriber.subscription.engine.is_live
        second = PublishingEngine(
            port=first.publisher.port, replay_port=first.publisher.replay_port
        )
        for number in range(num_batches):
            second.run_prompt(text(100 + number))
        answering = asyncio.ensure_future(second.publisher.run())
        await subscriber.until(lambda: subscriber.state == "exact" and subscriber.holds(second))
        assert depth(subscriber, text(1)) == 0
        assert subscriber.cleared
        states = [change.state for change in subscriber.changes]
        assert states == ["exact", "lost", "exact"]
        # The next batch is one of the process that is known, whatever its number.
        num_cleared = len(subscriber.cleared)
        await subscriber.until(lambda: second.publisher.num_subscriptions)
        second.run_prompt(text(200))
        await subscriber.until(lambda: depth(subscriber, text(200)) == 4)
        assert len(subscriber.cleared) == num_cleared
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering
        first.publisher = second.publisher


async def test_a_flood_of_garbage_is_survived():
    """The subscription rests, and learns all anew behind it; memory stays bounded."""
    async with FaultySite().running() as site:
        for _ in range(3):
            await site.serve(40)
            site.garbage(1)
            await site.serve(1)
            await site.settle()
            site.garbage(300)
            await site.settle()
            await site.subscriber.until(lambda: site.state == "lost")
            await site.serve(20)
            await site.settle()
            site.time += 31.0
            await site.regain()
        assert site.subscriber.events.batches["malformed"] >= 48
        assert not site.subscriber.supervisor.failures["kv_events"]


async def test_malformed_events_end_the_subscription_for_a_while():
    """Sixteen batches in a row count, whatever is well-formed in them; a whole batch ends the row."""
    engine = PublishingEngine()
    cleared = ["AllBlocksCleared"]
    good = msgspec.msgpack.encode([0.0, [cleared]])
    bad = msgspec.msgpack.encode([0.0, [cleared, ["BlockStored", "no hashes", None, [1], 16]]])
    async with running(engine) as subscriber:
        await subscriber.until(lambda: subscriber.state == "exact")
        batches = subscriber.events.batches
        payloads = [bad] * 15 + [good] + [bad] * 15
        for seq, payload in enumerate(payloads):
            engine.publisher.send((b"", seq.to_bytes(8), payload))
        await subscriber.until(lambda: batches["malformed"] == 30)
        assert not subscriber.subscription.is_resting
        engine.publisher.send((b"", len(payloads).to_bytes(8), bad))
        await subscriber.until(lambda: batches["malformed"] == 31)
        assert subscriber.subscription.is_resting
        assert subscriber.changes[-1].detail == "its messages are malformed"


async def test_all_of_it_at_once():
    """Losses, cuts, restarts and garbage in an order by chance."""
    async with FaultySite().running() as site:
        for _ in range(25):
            site.engine.arm("kv-drop,rate=0.01")
            await site.serve(site.rng.randrange(40))
            match site.rng.randrange(4):
                case 0:
                    site.cut()
                case 1:
                    await site.restart()
                case 2:
                    site.garbage(site.rng.choice([1, 5, 40]))
            await site.serve(site.rng.randrange(1, 10))
            await site.settle()
            if site.subscriber.subscription.is_resting:
                site.time += 31.0
            await site.regain()
        assert not site.subscriber.supervisor.failures["kv_events"]
