"""KV event subscriptions: a connection per engine and rank, read in turns of the loop.

Of what has come, a bounded number of blocks is taken in per turn. A subscription that begins, or is
connected again, asks the engine's replay socket for what was missed, and reads on only behind that.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Annotated, Final, TypeVar, get_args

import msgspec

from extproc.endpoint import MAX_PORT, Endpoint, parse_port
from extproc.errors import ConfigError
from extproc.pool.store import PoolStore
from extproc.prefix_cache.cache_model import index_key
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.scrape import client
from extproc.scrape.kv_event_connection import KvEventListener, plain_ip
from extproc.scrape.kv_event_subscription import (
    BatchResult,
    EngineSubscription,
    SubscriptionChange,
)
from extproc.scrape.local_tokenizer import LocalTokenizer
from extproc.supervision import Supervisor

_T = TypeVar("_T")

#: Labels of an endpoint whose engine publishes on other ports.
PORT_LABEL, REPLAY_PORT_LABEL = "kv-events-port", "kv-events-replay-port"

#: Seconds between comparisons of the endpoint set with the subscriptions.
_FOLLOW_S = 0.2

#: Blocks that are taken in per turn of the event loop (count), about a millisecond.
_BLOCKS_PER_TURN = 256

#: Blocks of a subscription that are taken in at once, and per second after that (count): about a tenth
#: of a second of the loop, and a tenth of its time. An engine stores a few hundred a second, and a
#: replay after a reconnection may have a full cache of them.
_BURST_BLOCKS: Final = 20_000
_BLOCKS_PER_S: Final = 20_000.0

#: Seconds for others that turns may owe them before there is a pause. Turns follow each other until then:
#: on a busy machine, a process that sleeps waits long for the processor.
_MAX_OWED_S = 0.01

#: Seconds that a block takes at most where the time is that of the process alone (5 us are usual); a
#: clock of processor time costs a system call, at which a busy machine takes the processor away.
_MAX_BLOCK_S = 20e-6

#: Address to listen on, in the form of ZeroMQ; empty for none.
BIND_PATTERN: Final = r"^(tcp://(\*|[0-9.]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5})?$"

_Port = Annotated[int, msgspec.Meta(ge=1, le=MAX_PORT)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class KvEventsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Events of engines about the blocks in their prefix caches, over ZeroMQ.

    Attributes:
        enabled: Subscribe to every endpoint, and know by its events which prefixes it holds. False:
            engines publish events only where they are configured to.
        port: TCP port on which engines publish, on the address of the endpoint. 5557 is that of
            vLLM. Label `kv-events-port` of an endpoint: another one.
        bind: Address on which engines that connect are waited for, written as that of an engine that
            listens: `tcp://*:5557`, or `tcp://[::]:5557` for IPv6 as well. Rank r connects to the port plus r. Only endpoints of the pool
            may, from their own addresses; of several endpoints at an address each names its own
            `ip:port` in its topic, as in `kv@10.0.0.1:8000@model`. Needs a single pool, and a single
            replica or `cluster.leader_election`, with which the leader alone listens. Empty:
            engines are connected to, so that replicas of extproc hear all of them.
        replay_port: TCP port on which engines send earlier events again. 0: they do not, as engines
            have none unless configured; what is cached when extproc starts is then not known, and
            a lost event is only repaired as the cache turns over. Label `kv-events-replay-port` of
            an endpoint: another one.
        ranks: Data-parallel ranks behind an endpoint (count); rank r publishes, and sends again, on
            the port plus r. 1: engines without data parallelism.
        render_url: Base URL of a server with vLLM's `/render` beneath the paths of the API, such as
            `vllm launch render`, that is asked for the tokens of prompts. Empty: the engine that a
            prompt was routed to, which is also asked where this server fails.
        render_model: Model that prompts have at `render_url`. Empty: as in the request.
        tokenizer_path: Folder of a Hugging Face model with its tokenizer.json and chat template, by which
            prompts are tokenized in a thread of extproc instead; needs the extra `tokenizer`. For
            engines that render no prompts, and pools of one base model. Empty: engines are asked.
        render_budget_ms: Milliseconds that a request may wait for the tokens of its prompt before the
            choice, where they are not known from an earlier one. When they are over, it is routed by
            the estimate. 0: no request waits, and a prompt is matched from its second request on.
        cpu_weight: Share of computing a token that an engine saves by loading it from the memory of its
            host, while its metrics page does not show it. 0.8 is what the llm-d picker counts. 0: such
            blocks do not count.
        storage_weight: The same of disks and other storage, which no page shows. 0.5, because reading
            from them takes several times as long, and others read as well.
        max_blocks: Blocks of an endpoint and rank that are remembered, and as many again in tiers below
            the device (count). 200000 are 3.2 million tokens in blocks of 16, and take about 8 MB.
    """

    enabled: bool = False
    port: _Port = 5557
    bind: Annotated[str, msgspec.Meta(pattern=BIND_PATTERN)] = ""
    replay_port: Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)] = 0
    ranks: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    render_url: Annotated[str, msgspec.Meta(pattern="^(https?://[^/?#]+[^?#]*[^/?#])?$")] = ""
    render_model: str = ""
    tokenizer_path: str = ""
    render_budget_ms: Annotated[float, msgspec.Meta(ge=0.0, le=10_000.0)] = 0.0
    cpu_weight: _Share = 0.8
    storage_weight: _Share = 0.5
    max_blocks: Annotated[int, msgspec.Meta(ge=1)] = 200_000


def require(settings: KvEventsSection) -> None:
    """Refuse a tokenizer that needs a package that is not installed, or is not there, and a bad URL.

    Raises:
        ConfigError: The package is not installed, the folder cannot be read, the URL has no host, a port
            that is none, or a user, or ranks have ports beyond the last one.
    """
    if settings.enabled and settings.tokenizer_path:
        LocalTokenizer(settings.tokenizer_path)
    bound = int(settings.bind.rpartition(":")[2] or 0)
    last = max(bound, settings.port, settings.replay_port) + settings.ranks - 1
    if settings.enabled and last > MAX_PORT:
        raise ConfigError(
            "kv_events",
            wanted=f"ports up to {MAX_PORT}, that of a rank being the port plus its number",
            got=f"{settings.ranks} ranks, the last of them on port {last}",
            fix="set lower ports, or fewer ranks",
        )
    if settings.enabled and settings.render_url:
        try:
            client.post_target(settings.render_url)
        except ValueError as error:
            raise ConfigError(
                "kv_events.render_url",
                wanted="http://host:port or https://host:port, with a path or without",
                got=str(error),
                fix="write such a URL, or leave it empty: engines are asked for tokens then",
            ) from None


class SubscriberCallbacks(msgspec.Struct, frozen=True, kw_only=True):
    """Callbacks of a subscriber.

    Attributes:
        on_cleared: Called with an endpoint whose cache is empty now.
        on_change: Called when a subscription is lost or regained.
        may_listen: Returns False while engines must not connect, because another replica leads.
    """

    on_cleared: Callable[[Endpoint], None]
    on_change: Callable[[SubscriptionChange], None]
    may_listen: Callable[[], bool] = lambda: True


class KvEventSubscriber:
    """Subscribes to every endpoint of a pool.

    Attributes:
        batches: Batches by result (count), all results from the start.
        num_subscriptions: Subscriptions of all endpoints and ranks (count).
    """

    def __init__(
        self,
        settings: KvEventsSection,
        store: PoolStore,
        exact: ExactPrefixes,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        callbacks: SubscriberCallbacks,
        supervisor: Supervisor,
    ) -> None:
        self.settings = settings
        self.exact = exact
        self.clock = clock
        self.rng = rng
        self.callbacks = callbacks
        self.batches: Counter[BatchResult] = Counter(dict.fromkeys(get_args(BatchResult), 0))
        self._store = store
        self.supervisor = supervisor
        self._subscriptions: dict[str, list[EngineSubscription]] = {}
        self.num_subscriptions = 0
        #: Subscriptions by IP address and rank, and listeners by rank, where engines connect.
        self._at: dict[tuple[str, int], list[EngineSubscription]] = {}
        self._listeners: dict[int, KvEventListener] = {}
        #: Those that are to work in the next turn, in order.
        self._ready: dict[EngineSubscription, None] = {}
        self._turn: asyncio.Handle | None = None
        #: When the blocks that each took in are within its rate, and those that wait until then.
        self._even_at: dict[EngineSubscription, float] = {}
        self._resting: set[EngineSubscription] = set()
        #: Seconds owed to others, half of what was computed, and when the last turn ended.
        self._owed_s = 0.0
        self._ended_at = -math.inf

    @property
    def subscriptions(self) -> Iterator[EngineSubscription]:
        """Subscriptions of all endpoints and ranks."""
        for subscriptions in self._subscriptions.values():
            yield from subscriptions

    @property
    def num_refused(self) -> int:
        """Connections that were not taken for those of an engine (count)."""
        return sum(listener.num_refused for listener in self._listeners.values())

    @property
    def listeners(self) -> Sequence[KvEventListener]:
        """Listeners for engines that connect, by rank."""
        return list(self._listeners.values())

    async def run(self) -> None:
        """Follow the endpoint set until cancelled; raises OSError for a port that is taken."""
        try:
            while True:
                self.step()
                await asyncio.sleep(_FOLLOW_S)
        finally:
            for address in list(self._subscriptions):
                self._stop(address)
            self._listen(frozenset())
            if self._turn is not None:
                self._turn.cancel()
                self._turn = None

    def step(self) -> None:
        """Start and stop subscriptions so that they match the pool, and end silent replays.

        What an engine held before we listened is gone once blocks that we know fill its cache.
        """
        left = set(self._subscriptions)
        for member in self._store.pool.members:
            endpoint = member.endpoint
            running = self._subscriptions.get(endpoint.address)
            if running is not None and self._is_same_source(running[0].endpoint, endpoint):
                left.discard(endpoint.address)
                for subscription in running:
                    self._attempt(subscription, subscription.note_page, member)
                if len(running) == 1:
                    self._attempt(running[0], running[0].note_capacity, member.load.kv_blocks)
                continue
            self._stop(endpoint.address)
            left.discard(endpoint.address)
            self._start(endpoint)
        for address in left:
            self._stop(address)
        self._listen({rank for _, rank in self._at} if self.callbacks.may_listen() else frozenset())
        now = self.clock()
        for listener in self._listeners.values():
            listener.check(now)
        for subscription in self.subscriptions:
            self._attempt(subscription, subscription.check, now)
        if self.exact.index.sweep(0):
            self._schedule_turn(0.0)

    def _attempt(
        self, subscription: EngineSubscription, step: Callable[[_T], int | None], value: _T
    ) -> int | None:
        """Call a step of a subscription, which rests where that raises: the others go on."""
        try:
            return step(value)
        except Exception as error:  # noqa: BLE001 - one engine must not end the others
            self.supervisor.record_error("kv_events", error, instance=subscription.endpoint.address)
            subscription.rest("its messages cannot be handled")
            return None

    def wake(self, subscription: EngineSubscription) -> None:
        """Let a subscription work in the next turn, or once it keeps to its rate again."""
        if subscription not in self._resting:
            self._ready[subscription] = None
            self._schedule_turn(0.0)

    def _end_rest(self, subscription: EngineSubscription) -> None:
        self._resting.discard(subscription)
        self.wake(subscription)

    def _charge(self, subscription: EngineSubscription, blocks: int, now: float) -> None:
        """Let a subscription go on in its turn, or later where it is ahead of its rate."""
        even_at = max(self._even_at.get(subscription, 0.0), now) + blocks / _BLOCKS_PER_S
        self._even_at[subscription] = even_at
        ahead_s = even_at - now - _BURST_BLOCKS / _BLOCKS_PER_S
        if ahead_s <= 0.0:
            self._ready[subscription] = None
            return
        # Its connections stop reading meanwhile, and its engine drops what it cannot send.
        self._resting.add(subscription)
        asyncio.get_running_loop().call_later(ahead_s, self._end_rest, subscription)

    def _start(self, endpoint: Endpoint) -> None:
        key = index_key(endpoint)
        started = self._subscriptions[endpoint.address] = []
        port, replay_port = _ports(self.settings, endpoint)
        # A rank that is an endpoint has its own blocks; others share those of their endpoint.
        known = endpoint.rank
        for rank in range(self.settings.ranks) if known is None else (known.number,):
            engine = self.exact.open(key, len(started))
            subscription = EngineSubscription(
                self,
                endpoint,
                rank,
                engine,
                port=0 if self.settings.bind else port + rank,
                replay_port=replay_port and replay_port + rank,
            )
            started.append(subscription)
            self.num_subscriptions += 1
            if self.settings.bind:
                self._at.setdefault((plain_ip(endpoint.ip), rank), []).append(subscription)
            subscription.open()

    def _is_same_source(self, previous: Endpoint, current: Endpoint) -> bool:
        """True if events of an endpoint go on to come from there, whatever its other labels say."""
        before, after = previous.rank, current.rank
        if previous.incarnation != current.incarnation:
            return False
        if previous.labels != current.labels and (
            _ports(self.settings, previous) != _ports(self.settings, current)
        ):
            return False
        return (before and before.number) == (after and after.number)

    def _stop(self, address: str) -> None:
        stopped = self._subscriptions.pop(address, ())
        self.num_subscriptions -= len(stopped)
        for subscription in stopped:
            subscription.close()
            self._even_at.pop(subscription, None)
            place = plain_ip(subscription.endpoint.ip), subscription.rank
            others = [other for other in self._at.pop(place, ()) if other is not subscription]
            if others:
                self._at[place] = others
        if stopped:
            self.exact.forget(index_key(stopped[0].endpoint))

    def _listen(self, ranks: AbstractSet[int]) -> None:
        """Listen for the engines of these ranks, on the port plus the rank, and for no others."""
        for rank in self._listeners.keys() - ranks:
            self._listeners.pop(rank).close("this replica does not listen")
        for rank in ranks - self._listeners.keys():
            host, _, port = self.settings.bind.removeprefix("tcp://").rpartition(":")
            # Port 0 picks a free one for each rank.
            number = int(port) and int(port) + rank
            self._listeners[rank] = KvEventListener(
                "" if host == "*" else host.strip("[]"),
                number,
                find=partial(self._find_at, rank),
                clock=self.clock,
            )

    def _find_at(self, rank: int, ip: str) -> Sequence[EngineSubscription]:
        return self._at.get((ip, rank), ())

    def _schedule_turn(self, wait_s: float) -> None:
        if self._turn is None:
            loop = asyncio.get_running_loop()
            self._turn = (
                loop.call_later(wait_s, self._take_turn)
                if wait_s
                else loop.call_soon(self._take_turn)
            )

    def _take_turn(self) -> None:
        """Work off some blocks of the subscriptions that have messages, each in its turn."""
        self._turn = None
        began = time.monotonic()
        owed_s = max(0.0, self._owed_s - (began - self._ended_at))
        left, ready = _BLOCKS_PER_TURN, self._ready
        while ready and left > 0:
            subscription = next(iter(ready))
            del ready[subscription]
            used = self._attempt(subscription, subscription.work, min(left, _BLOCKS_PER_TURN // 4))
            if used:
                left -= used
                self._charge(subscription, used, began)
        is_sweeping = self.exact.index.sweep(_BLOCKS_PER_TURN)
        # Never more than two thirds of the loop.
        self._ended_at = time.monotonic()
        computed_s = min(self._ended_at - began, (_BLOCKS_PER_TURN - left) * _MAX_BLOCK_S)
        self._owed_s = owed_s = owed_s + 0.5 * computed_s
        if is_sweeping or ready:
            self._schedule_turn(owed_s if owed_s > _MAX_OWED_S else 0.0)


def _ports(settings: KvEventsSection, endpoint: Endpoint) -> tuple[int, int]:
    """Ports of events and of replays; a label that is no port is not used."""
    ports = []
    for label, usual in ((PORT_LABEL, settings.port), (REPLAY_PORT_LABEL, settings.replay_port)):
        ports.append(parse_port(endpoint.labels.get(label, "")) or usual)
    return ports[0], ports[1]
