"""Publishers of KV events with blocks of their own, and subscribers that follow them over sockets."""

import asyncio
import contextlib
import random

from extproc.endpoint import Endpoint
from extproc.pool.store import PoolStore
from extproc.prefix_cache import blocks, kv_events
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.scrape.kv_event_subscriber import (
    KvEventsSection,
    KvEventSubscriber,
    SubscriberCallbacks,
)
from extproc.simulator import faults, kv, prompt
from extproc.simulator.http.kv_publisher import KvPublisher, KvPublisherSettings
from extproc.supervision import Supervisor
from tests.support import waiting

SIZE = 16
HOST = "127.0.0.1"


class PublishingEngine:
    """Blocks of an engine, and their publisher."""

    def __init__(self, *, blocks=1000, host_blocks=0, **settings):
        self.blocks = blocks
        self.pool = kv.BlockPool(blocks, host_blocks)
        self.faults = faults.Faults(random.Random(1))
        settings = KvPublisherSettings(**settings)
        self.publisher = KvPublisher(settings, self.pool, block_tokens=SIZE, trouble=self.faults)
        self.publisher.bind(HOST)
        self.ports = {
            "kv-events-port": str(self.publisher.port),
            "kv-events-replay-port": str(self.publisher.replay_port),
        }

    def run_prompt(self, text, *, adapter=""):
        """Compute a prompt, evicting what was used longest ago, and publish what changed."""
        hashes = prompt.hashes(text, salt=adapter, block_tokens=SIZE)
        self.publisher.note(hashes, text, adapter=adapter, salt="")
        depth = self.pool.match(hashes, len(hashes))
        held = hashes[:depth]
        self.pool.pin(held)
        self.pool.allocate(len(hashes) - depth)
        self.pool.register(held, hashes, len(hashes))
        self.pool.release(held, 0)
        self.publisher.flush()

    def arm(self, *texts):
        self.faults.arm([faults.parse(text) for text in texts], 0.0)

    async def close(self):
        self.publisher.close()


class Subscriber:
    """A subscriber to one endpoint, and what it reported."""

    def __init__(
        self,
        labels,
        *,
        addresses=(f"{HOST}:8000",),
        clock=None,
        may_listen=lambda: True,
        **settings,
    ):
        self.changes, self.cleared = [], []
        self.store = PoolStore(on_gone=lambda _: None)
        endpoints = [Endpoint(address, labels=labels) for address in addresses]
        self.store.set_endpoints(endpoints, 0.0)
        self.exact = ExactPrefixes(blocks.DEFAULT, max_blocks=10_000)
        self.now = clock or asyncio.get_running_loop().time
        self.supervisor = Supervisor()
        self.events = KvEventSubscriber(
            KvEventsSection(enabled=True, **settings),
            self.store,
            self.exact,
            clock=self.now,
            rng=random.Random(1),
            callbacks=SubscriberCallbacks(
                on_cleared=self.cleared.append, on_change=self.changes.append, may_listen=may_listen
            ),
            supervisor=self.supervisor,
        )

    @property
    def subscription(self):
        return next(iter(self.events.subscriptions), None)

    @property
    def state(self):
        return None if self.subscription is None else self.subscription.state

    def holds(self, engine):
        """True if as many blocks are known as the engine has, and every one of them."""
        return self.subscription.engine.held == engine.pool.cached + engine.pool.used

    async def until(self, fact):
        await waiting.until(fact)


@contextlib.asynccontextmanager
async def running(engine, *, labels=None, **settings):
    """A subscriber that follows an engine, which answers replays, once it gets what is published."""
    subscriber = Subscriber(engine.ports if labels is None else labels, **settings)
    tasks = [
        asyncio.ensure_future(engine.publisher.run()),
        asyncio.ensure_future(subscriber.events.run()),
    ]
    try:
        await subscriber.until(lambda: engine.publisher.num_subscriptions)
        yield subscriber
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await engine.close()


def text(number, length=256):
    return (b"%08d" % number) * (length // 8)


def depth(subscriber, words, *, adapter=""):
    """Leading blocks of a text on the engine."""
    packed = kv_events.array("I", prompt.token_ids(words)).tobytes()
    keys = kv_events.block_keys(kv_events.root_key(adapter), packed, SIZE)
    ends = subscriber.exact.index.holders(keys, len(keys))
    return max((end for end, _ in ends), default=0)


async def copy_stream(reader, writer):
    """Pass on what comes, until its end."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()
