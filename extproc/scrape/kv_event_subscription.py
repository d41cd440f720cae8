"""Subscription to the KV events of one engine, or one rank of it: order, gaps, restarts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import xxhash

from extproc.endpoint import Endpoint
from extproc.pool.snapshot import EndpointSnapshot
from extproc.prefix_cache import kv_events
from extproc.prefix_cache.token_blocks import EngineBlocks
from extproc.scrape.kv_event_connection import EngineConnection, EngineConnector
from extproc.scrape.kv_event_replay import END, REST_S, BatchReplay, ReplaySchedule
from extproc.scrape.zmtp import SocketType

if TYPE_CHECKING:
    from extproc.scrape.kv_event_subscriber import KvEventSubscriber

#: Cost of a message besides its blocks, in blocks.
_MESSAGE_COST: Final = 4

#: Bytes of a message, and of an event, that cost as much as a block: engines choose how many tokens a
#: block has, and what else they send. A block of 16 tokens has some 90 bytes.
_MESSAGE_BYTES_PER_BLOCK: Final = 4096
_EVENT_BYTES_PER_BLOCK: Final = 256

#: Numbers of batches end here: a thousand per second for thousands of years.
_MAX_SEQ: Final = 1 << 48

#: Malformed messages in a row after which a subscription rests (count).
_MAX_MALFORMED: Final = 16

#: Share of the blocks of a cache that are known when it counts as known: the others are the last ones
#: of running requests, which are not full.
_FULL_RATIO: Final = 0.95

SubscriptionState = Literal["exact", "partial", "catching_up", "lost"]

#: What came of a batch. Lost ones were published before they were missed; replayed ones are applied
#: as well.
BatchResult = Literal["applied", "replayed", "duplicate", "lost", "malformed"]


class SubscriptionChange(msgspec.Struct, frozen=True, gc=False):
    """A subscription was lost or regained.

    Attributes:
        state: State of the subscription from now on.
        detail: Reason.
    """

    address: str
    rank: int
    state: SubscriptionState
    detail: str


class EngineSubscription:
    """Subscription to one rank of an endpoint.

    Args:
        owner: Settings, and where counts and changes go.
        port: TCP port that it publishes on; 0 where it connects to us.
        replay_port: That of its replay socket; 0 for none.

    Attributes:
        num_received: Messages that were published to us, also malformed ones (count).
    """

    def __init__(
        self,
        owner: KvEventSubscriber,
        endpoint: Endpoint,
        rank: int,
        engine: EngineBlocks,
        *,
        port: int,
        replay_port: int,
    ) -> None:
        self.endpoint = endpoint
        self.rank = rank
        self.engine = engine
        self._owner = owner
        self._port = port
        self._replay_port = replay_port
        self._connector: EngineConnector | None = None
        #: Connection on which the engine publishes; None while there is none.
        self._sub: EngineConnection | None = None
        self._replay = BatchReplay(
            lambda on_open, wait_s: self._connect(
                replay_port, b"DEALER", wait_s=wait_s, on_open=on_open, on_lost=lambda _: None
            ),
            owner.clock,
        )
        self._is_reported_lost = False
        self._was_live = False
        #: Number of the batch that comes next, and digest of the one before it.
        self._expected = 0
        self._digest = 0
        #: Number of the last batch that was published to us; -1 before the first.
        self._last_live = -1
        self.num_received = 0
        #: Whether every batch since the start of the engine was taken in.
        self._is_from_start = True
        #: Events of a batch that are still to be taken in.
        self._pending: deque[msgspec.Raw | kv_events.KvEvent] = deque()
        #: Batch that showed a gap, until that is filled.
        self._held: tuple[int, bytes] | None = None
        self._has_replay = False
        self._schedule = ReplaySchedule(
            owner.clock, owner.rng, count_subscriptions=lambda: owner.num_subscriptions
        )
        self._num_malformed = 0
        self._rests_until: float | None = None

    @property
    def state(self) -> SubscriptionState:
        """State for the metrics page."""
        if self._sub is None:
            return "lost"
        if not self.engine.is_live:
            return "catching_up"
        return "exact" if self.engine.is_complete else "partial"

    @property
    def _is_all_known(self) -> bool:
        """True if every batch was taken in, with all of its blocks."""
        return self._is_from_start and not self.engine.has_gap

    def open(self) -> None:
        """Begin to connect, or wait for the engine to."""
        if self._port:
            self._connector = self._connect(
                self._port, b"SUB", on_open=self.attach, on_lost=self._on_lost
            )

    @property
    def is_resting(self) -> bool:
        """True while the engine is not listened to."""
        return self._rests_until is not None

    @property
    def is_replaying(self) -> bool:
        """True while the engine is asked for earlier batches."""
        return self._replay.is_running

    def attach(self, source: EngineConnection) -> None:
        """Listen to a connection of the engine, instead of an earlier one."""
        if self._sub is not None:
            self._sub.close()
            self._on_lost("it connects again")
        self._sub = source
        self._on_connected()

    def detach(self, source: EngineConnection, why: str) -> None:
        """Note that a connection is lost."""
        if self._sub is source:
            self._on_lost(why)

    def close(self) -> None:
        """Close all connections."""
        self._replay.close()
        if self._connector is not None:
            self._connector.close()
        elif self._sub is not None:
            self._sub.close()
        self._connector = self._sub = None
        self._pending.clear()
        self._held = None
        self._schedule.cancel_learning()

    def rest(self, why: str) -> None:
        """Close the sockets for a while: what the engine sends is of no use."""
        self.close()
        # Whatever it sends then may be another life of it.
        self._num_malformed = self._expected = self._digest = 0
        self._last_live = -1
        self._is_from_start = True
        owner = self._owner
        self._rests_until = owner.clock() + REST_S * owner.rng.uniform(0.5, 1.0)
        owner.exact.index.wipe(self.engine, is_complete=False)
        self._lose(why)

    def check(self, now: float) -> None:
        """End a replay that is silent and a rest that is over, and confirm the last batch."""
        if self._connector is not None:
            self._connector.check(now)
        self._replay.check(now)
        if self._replay.is_running:
            # An answer that waits to be read shows a late event loop, not a silent socket.
            if self._replay.is_silent and not self.work(1):
                self._end_replay()
        elif self._sub is not None and self._has_replay:
            due = self._schedule.take_due(now)
            if due == "learn":
                self._learn_again()
            elif due == "confirm" and self.engine.is_live:
                self._ask_for_more()
        if self._rests_until is not None and now >= self._rests_until:
            self._rests_until = None
            self.open()

    def note_page(self, member: EndpointSnapshot) -> None:
        """Record what the metrics page of the engine shows of the time to reload blocks."""
        weight = member.rates.reload_saving
        if weight is not None:
            self._owner.exact.index.set_lower_weight(self.engine, 0, weight)

    def note_capacity(self, num_blocks: int | None) -> None:
        """Take the engine for exact once known blocks fill its cache, whose size may be unknown."""
        engine = self.engine
        if (
            num_blocks
            and engine.is_live
            and engine.held + engine.num_copies >= _FULL_RATIO * num_blocks
        ):
            self._owner.exact.index.set_complete(engine)

    def work(self, max_blocks: int) -> int:
        """Process messages and events; returns the blocks (count), 0 where there is nothing to do.

        Args:
            max_blocks: Blocks at most, but for those of one event (count).
        """
        used = 0
        while used < max_blocks:
            cost = self._work_once()
            if not cost:
                break
            used += cost
        return used

    def _work_once(self) -> int:
        if self._pending:
            return self._apply_next()
        replay, source = self._replay, self._sub
        reader, handle = (replay, self._on_replay) if replay.is_running else (source, self._on_live)
        frames = None if reader is None else reader.receive()
        if frames is None:
            return 0
        handle(frames)
        size = sum(map(len, frames))
        is_small = size <= kv_events.MAX_SMALL_BATCH_BYTES  # and decoded already
        return _MESSAGE_COST + size // (
            _EVENT_BYTES_PER_BLOCK if is_small else _MESSAGE_BYTES_PER_BLOCK
        )

    def wake(self) -> None:
        """Work in the next turn."""
        self._owner.wake(self)

    # Connection.

    def _connect(
        self,
        port: int,
        socket_type: SocketType,
        *,
        wait_s: float = 0.0,
        on_open: Callable[[EngineConnection], None],
        on_lost: Callable[[str], None],
    ) -> EngineConnector:
        owner = self._owner
        return EngineConnector(
            (self.endpoint.ip, port),
            socket_type,
            clock=owner.clock,
            rng=owner.rng,
            supervisor=owner.supervisor,
            wait_s=wait_s,
            on_open=on_open,
            on_readable=self.wake,
            on_lost=on_lost,
        )

    def _on_connected(self) -> None:
        self._has_replay = bool(self._replay_port)
        self._replay.forget_size()
        # What is published before the engine knows of the subscription is not sent to us.
        self._schedule.start()
        if self._has_replay:
            self._ask_for_more()
        # Else the number of its next batch says what was missed.

    def _on_lost(self, why: str) -> None:
        self._sub = self._held = None
        self._replay.close()
        self._lose(why)

    def _lose(self, why: str) -> None:
        owner = self._owner
        owner.exact.index.set_live(self.engine, is_live=False)
        if self._was_live and not self._is_reported_lost:
            self._is_reported_lost = True
            owner.callbacks.on_change(
                SubscriptionChange(self.endpoint.address, self.rank, "lost", why)
            )

    def _go_live(self) -> None:
        owner = self._owner
        if self._sub is None:
            return  # it rests
        owner.exact.index.set_live(self.engine, is_live=True)
        if self._is_all_known:
            owner.exact.index.set_complete(self.engine)
            self._schedule.note_learned()
        if self._is_reported_lost or not self._was_live:
            self._is_reported_lost, self._was_live = False, True
            detail = (
                "every batch is known" if self._is_from_start else "earlier batches are not known"
            )
            owner.callbacks.on_change(
                SubscriptionChange(self.endpoint.address, self.rank, self.state, detail)
            )

    # Batches.

    def _on_live(self, frames: list[bytes]) -> None:
        """A batch that was published: the next one, one behind a gap, or one of a new engine."""
        self.num_received += 1
        seq = int.from_bytes(frames[1]) if len(frames) == 3 and len(frames[1]) == 8 else _MAX_SEQ
        if seq >= _MAX_SEQ:
            self._on_malformed()
            return
        self._schedule.confirm_later()
        payload = frames[2]
        restarted = seq <= self._last_live
        if restarted:
            self._reset()
        self._last_live = seq
        if seq < self._expected:
            self._owner.batches["duplicate"] += 1
            return
        if seq != self._expected:
            if self._has_replay:
                self._held = (seq, payload)
                self._ask_for_more()
                return
            self._note_lost(seq)
        self._take(seq, payload)
        if not self.engine.is_live or (self._is_all_known and not self.engine.is_complete):
            self._go_live()

    def _take(self, seq: int, payload: bytes) -> None:
        """Record a batch, which must be the next one."""
        self._expected = seq + 1
        self._digest = xxhash.xxh3_64_intdigest(payload)
        try:
            self._pending.extend(kv_events.decode_batch(payload))
        except kv_events.Malformed:
            self._on_malformed()
            return
        self._owner.batches["applied"] += 1

    def _apply_next(self) -> int:
        raw = self._pending.popleft()
        size_cost = (
            len(memoryview(raw)) // _EVENT_BYTES_PER_BLOCK if isinstance(raw, msgspec.Raw) else 0
        )
        try:
            event = kv_events.decode_event(raw)
        except kv_events.Malformed:
            self._on_malformed()
            return _MESSAGE_COST + size_cost
        if not self._pending and not self._replay.is_running:
            # All events of a batch that was published are well-formed.
            self._num_malformed = 0
        if event is None:
            return 1 + size_cost
        event, *further = kv_events.split(event)
        self._pending.extendleft(reversed(further))
        owner = self._owner
        cost = max(size_cost, owner.exact.index.apply(self.engine, event))
        if isinstance(event, kv_events.AllBlocksCleared):
            owner.callbacks.on_cleared(self.endpoint)
        return cost

    def _on_malformed(self) -> None:
        """Forget the blocks of an engine, as a message that is unknown may have changed them."""
        self._pending.clear()
        self._owner.batches["malformed"] += 1
        self._num_malformed += 1
        self._is_from_start = False
        if self._num_malformed >= _MAX_MALFORMED:
            self.rest("its messages are malformed")
        else:
            owner = self._owner
            owner.exact.index.wipe(self.engine, is_complete=False)
            self._schedule.learn_later()

    def _learn_again(self) -> None:
        """Ask for everything from the start of the engine."""
        self._schedule.lengthen_learning()
        self._expected = self._digest = 0
        self._is_from_start = True
        self._pending.clear()
        self._owner.exact.index.wipe(self.engine, is_complete=False)
        self._replay.request(0, verify=False)

    def _note_lost(self, seq: int) -> None:
        """Batches up to this one are lost: what the engine holds is unknown."""
        if self._expected:
            # Before the first one, they are not lost but earlier than we are.
            self._owner.batches["lost"] += seq - self._expected
        self._is_from_start = False
        self._expected = seq
        self._owner.exact.index.wipe(self.engine, is_complete=False)

    def _reset(self) -> None:
        """Another engine process publishes: its cache began empty."""
        self._expected = self._digest = 0
        self._last_live = -1
        self._is_from_start = True
        self._pending.clear()
        owner = self._owner
        owner.exact.index.wipe(self.engine, is_complete=False)
        owner.callbacks.on_cleared(self.endpoint)

    # Replay.

    def _ask_for_more(self) -> None:
        """Ask for the batches behind the last one that is known, and for that one to compare it."""
        self._replay.request(max(0, self._expected - 1), verify=self._expected > 0)

    def _on_replay(self, frames: list[bytes]) -> None:
        """A batch that was sent again."""
        batch = self._replay.read(frames)
        if batch is None:
            self._on_malformed()
            return
        seq, payload = batch
        if seq == END:
            self._end_replay()
            return
        match self._replay.sort(seq, self._expected):
            case "compare":
                if xxhash.xxh3_64_intdigest(payload) != self._digest:
                    self._reset()
                    self._replay.request(0, verify=False)
            case "take":
                if seq > self._expected:
                    self._note_lost(seq)
                self._owner.batches["replayed"] += 1
                self._take(seq, payload)

    def _end_replay(self) -> None:
        """A replay is over, or its socket is silent, or sends without end."""
        replay = self._replay
        if replay.is_verifying and self._sub is not None and not replay.is_silent:
            # Not even the batch before: the engine has published fewer, so it is another.
            self._reset()
            replay.request(0, verify=False)
            return
        if replay.is_cut_off:
            replay.request(self._expected, verify=False)
            return
        engine = self.engine
        is_asked_for_all = self._is_all_known and not engine.is_complete
        if replay.is_silent and self._held is None and engine.is_live and not is_asked_for_all:
            # Nothing is known to be missing. It is asked again, but seldom, as batches wait for it.
            self._schedule.rest()
        elif replay.is_silent:
            # It is not asked again on this connection: each gap would wait for it.
            self._has_replay = False
            self._is_from_start = False
            self._owner.exact.index.wipe(engine, is_complete=False)
            self._schedule.learn_later()
        replay.close()
        replay.forget_size()
        held, self._held = self._held, None
        if held is not None and held[0] >= self._expected:
            if held[0] > self._expected:
                self._note_lost(held[0])
            self._take(*held)
        self._go_live()
        self.wake()
