"""Peer synchronization: replicas exchange the start and end of their requests.

Each replica writes facts about its own requests to an event log, which a channel carries to the
other replicas. These charge the requests and predict their prefixes as cached as for their own
decisions, but count them separately. Facts may be late, lost, duplicated and out of order: each
replica regularly lists its open requests, and a silent replica has none. A list also names the
replicas whose lists had requests of unknown start; over a store, they write their open requests
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Final, get_args

import msgspec

from extproc.decision import Decision
from extproc.pool.inflight import Reservation
from extproc.pool.queued_work import Stage
from extproc.pool.request_tokens import CachedTokens, PromptSize
from extproc.prefix_cache.blocks import HASH_MASK
from extproc.routing.director import Director

#: Facts that wait to be carried (count), some 10 s of a busy picker. The oldest are dropped first:
#: what is open is said again and again.
MAX_WAITING = 20_000

#: Requests of one picker that are mirrored (count), and ended ones remembered until it says what
#: is open. Far more than a picker has in a second.
MAX_OPEN = 50_000

#: Pickers that are listened to (count).
MAX_PICKERS = 256

#: Facts in a message (count), some 100 KB with long prompts.
MAX_FACTS: Final = 500

#: Longest message that is decoded (bytes), also of versions whose messages have up to 5.4 MB.
MAX_MESSAGE_BYTES: Final = 8 * 1024 * 1024

#: Blocks in a message (count), 9 bytes each; with more it is cut. Two messages wait for a reader that
#: keeps up: a channel must not take it for a slow one.
_MAX_BLOCKS: Final = 50_000

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Block = Annotated[int, msgspec.Meta(ge=0, le=HASH_MASK)]
_Name = Annotated[str, msgspec.Meta(max_length=512)]
_PickerName = Annotated[str, msgspec.Meta(max_length=256)]

#: Stages by name in messages: a value that does not decode would void all facts of its message.
_STAGES: Final[Mapping[str, Stage]] = {stage: stage for stage in get_args(Stage)}


class RequestStarted(msgspec.Struct, frozen=True, array_like=True, tag="s", gc=False):
    """A request was committed to an endpoint.

    Attributes:
        number: Number of the request, counted from 1 by its replica.
        prompt_bytes: Bytes the tokens are estimated from; 0 when they are exact.
        stage: What the endpoint computes of the request; empty for all, and from versions without it.
            Of a stage that this version does not know, the endpoint counts as computing all.
    """

    number: _Number
    pool: _Name
    address: _Name
    target: _Name
    prompt_tokens: _Tokens
    prompt_bytes: _Bytes
    blocks: Sequence[_Block]
    has_media: bool = False
    stage: _Name = ""


class RequestEnded(msgspec.Struct, frozen=True, array_like=True, tag="e", gc=False):
    """A request is over.

    Attributes:
        answered: Whether the engine computed it.
        ran: Whether its prompt may be cached where it was sent; False when it was refused there.
    """

    number: _Number
    answered: bool
    ran: bool = True


class OpenRequests(msgspec.Struct, frozen=True, array_like=True, tag="o", gc=False):
    """Numbers of the open requests; every other request up to `until` has ended.

    Attributes:
        until: The latest number.
        serial: Number of the list, counted from 1 by its replica; 0 from versions without it.
        incomplete: Names of the replicas that listed requests whose start the replica does not know.
    """

    until: _Number
    numbers: Sequence[_Number]
    serial: _Number = 0
    incomplete: Sequence[_PickerName] = ()


class PickerLeft(msgspec.Struct, frozen=True, array_like=True, tag="l", gc=False):
    """A replica stops. Its open requests continue, and only scrapes show them."""


Fact = RequestStarted | RequestEnded | OpenRequests | PickerLeft


class PeerMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Events of a replica, in the order in which they occurred.

    Attributes:
        picker: Name of the picker in this life; no other has it, nor had it.
    """

    picker: _PickerName
    facts: Sequence[Fact]


_decoder = msgspec.msgpack.Decoder(PeerMessage)


def encode(message: PeerMessage) -> bytes:
    """Encode a message as msgpack, without field names."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> PeerMessage | None:
    """Decode a message; None where it is unreadable, as from another version.

    Nor is a message with a number or a name out of range: none of it is used.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        return None
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class PeerEventLog:
    """Events of this replica that wait to be sent. Mutable; it has a single owner."""

    def __init__(self, picker: str, on_waiting: Callable[[], None]) -> None:
        self.picker = picker
        self._on_waiting = on_waiting
        self._latest = 0
        self._latest_list = 0
        self._open: dict[Reservation, RequestStarted] = {}
        self._waiting: list[Fact] = []

    def pool_log(self, pool: str) -> PoolEventLog:
        """The event log for the director of a pool."""
        return PoolEventLog(self, pool)

    def request_started(self, pool: str, reservation: Reservation, blocks: Sequence[int]) -> None:
        """Record a request that was charged to an endpoint."""
        self._latest += 1
        fact = self._open[reservation] = RequestStarted(
            self._latest,
            pool,
            reservation.endpoint.address,
            reservation.target,
            reservation.prompt_tokens,
            reservation.prompt_bytes,
            list(blocks),
            reservation.has_media,
            reservation.stage,
        )
        self._put(fact)

    def request_ended(self, reservation: Reservation, *, answered: bool, ran: bool) -> None:
        """Record that a request ended; does nothing for a request that was not recorded."""
        started = self._open.pop(reservation, None)
        if started is not None:
            self._put(RequestEnded(started.number, answered, ran))

    def publish_open(self, incomplete: Sequence[str] = ()) -> None:
        """Record the numbers of the open requests, and the replicas that are to send theirs again."""
        self._put(self._list_open(incomplete))

    def publish_left(self) -> None:
        """Record that this replica stops."""
        self._put(PickerLeft())

    def snapshot(self) -> Iterator[PeerMessage]:
        """Messages for a reader that knows none: the open requests as they are now, then their list."""
        facts: list[Fact] = [*self._open.values(), self._list_open()]
        while facts:
            fitting = _count_fitting(facts, MAX_FACTS)
            yield PeerMessage(self.picker, facts[:fitting])
            del facts[:fitting]

    def take(self, max_facts: int = MAX_WAITING) -> PeerMessage | None:
        """Remove and return the next message, oldest events first; None where none waits."""
        fitting = _count_fitting(self._waiting, max_facts)
        facts, self._waiting = self._waiting[:fitting], self._waiting[fitting:]
        return PeerMessage(self.picker, facts) if facts else None

    def _list_open(self, incomplete: Sequence[str] = ()) -> OpenRequests:
        self._latest_list += 1
        numbers = [started.number for started in self._open.values()]
        return OpenRequests(self._latest, numbers, self._latest_list, incomplete)

    def _put(self, fact: Fact) -> None:
        waiting = self._waiting
        if len(waiting) >= MAX_WAITING:
            del waiting[: MAX_WAITING // 2]
        waiting.append(fact)
        if len(waiting) == 1:
            self._on_waiting()


def _count_fitting(facts: Sequence[Fact], most: int) -> int:
    """Number of the first facts that fit into one message, at most `most`."""
    blocks = 0
    for number, fact in enumerate(facts[:most]):
        if isinstance(fact, RequestStarted):
            blocks += len(fact.blocks)
            if blocks > _MAX_BLOCKS and number:
                return number
    return min(most, len(facts))


class PoolEventLog:
    """The event log as the director of a pool writes to it."""

    __slots__ = ("_event_log", "_pool")

    def __init__(self, event_log: PeerEventLog, pool: str) -> None:
        self._event_log = event_log
        self._pool = pool

    def on_reserved(self, reservation: Reservation, decision: Decision) -> None:
        """A decision was committed."""
        self._event_log.request_started(self._pool, reservation, decision.block_hashes)

    def on_moved(self, reservation: Reservation, blocks: Sequence[int]) -> None:
        """Another endpoint answers than the one that was chosen."""
        self._event_log.request_ended(reservation, answered=False, ran=False)
        self._event_log.request_started(self._pool, reservation, blocks)

    def on_released(self, reservation: Reservation, *, answered: bool, ran: bool) -> None:
        """A request is over."""
        self._event_log.request_ended(reservation, answered=answered, ran=ran)


class _ChargedRequest(msgspec.Struct, frozen=True):
    """A request of another replica, as charged to our accounts."""

    pool: str
    director: Director
    reservation: Reservation


class _PeerRequests:
    """Open and recently ended requests of another replica, and those that cannot be charged here."""

    __slots__ = (
        "ended",
        "ended_until",
        "heard_at_s",
        "open",
        "reported_open",
        "serial",
        "uncharged",
    )

    def __init__(self) -> None:
        self.heard_at_s = 0.0
        self.open: dict[int, _ChargedRequest] = {}
        self.uncharged: dict[int, None] = {}
        self.ended: dict[int, None] = {}
        self.ended_until = 0
        self.serial = 0
        self.reported_open: frozenset[int] = frozenset()

    def is_over(self, number: int) -> bool:
        """True if a request is known to have ended."""
        return number in self.ended or (
            number <= self.ended_until and number not in self.reported_open
        )

    @property
    def is_incomplete(self) -> bool:
        """True if the start of a request that it listed as open is unknown."""
        return any(
            number not in self.open and number not in self.uncharged and number not in self.ended
            for number in self.reported_open
        )


class PeerReplica:
    """Charges the requests of other replicas. Mutable; it has a single owner.

    Args:
        own: Name of this picker, whose facts are passed over.
        directors: The director of a pool by name; None for a pool that is not here.
        silent_s: Seconds after which a picker that says nothing counts as gone.
    """

    def __init__(
        self, own: str, directors: Callable[[str], Director | None], *, silent_s: float
    ) -> None:
        self._own = own
        self._directors = directors
        self._silent_s = silent_s
        self._peers: dict[str, _PeerRequests] = {}

    @property
    def pickers(self) -> int:
        """Number of other replicas that are alive."""
        return len(self._peers)

    @property
    def open(self) -> int:
        """Number of open requests of other replicas in our accounts."""
        return sum(len(peer.open) for peer in self._peers.values())

    def is_alive(self, picker: str) -> bool:
        """True if a replica was heard lately; what was open in one that was dropped is not known."""
        return picker in self._peers

    @property
    def incomplete(self) -> list[str]:
        """Names of the replicas that listed requests whose start is unknown."""
        return [name for name, peer in self._peers.items() if peer.is_incomplete]

    def apply_message(self, message: PeerMessage, now: float) -> set[str]:
        """Apply the message of a picker.

        Returns:
            Names of the pools in which requests ended.
        """
        freed_pools: set[str] = set()
        if message.picker == self._own:
            return freed_pools
        peer = self._peers.get(message.picker)
        if peer is None:
            if len(self._peers) >= MAX_PICKERS:
                return freed_pools
            peer = self._peers[message.picker] = _PeerRequests()
        peer.heard_at_s = now
        for fact in message.facts:
            match fact:
                case RequestStarted():
                    self._on_started(peer, fact, now)
                case RequestEnded():
                    self._on_ended(peer, fact, now, freed_pools)
                case OpenRequests():
                    _settle(peer, fact, now, freed_pools)
                case PickerLeft():
                    self._drop(message.picker, now, freed_pools)
                    return freed_pools
        return freed_pools

    def drop_silent(self, now: float) -> set[str]:
        """Forget replicas without recent messages, and release their requests.

        Returns:
            Names of the pools in which requests stood.
        """
        freed: set[str] = set()
        for name, peer in list(self._peers.items()):
            if now - peer.heard_at_s >= self._silent_s:
                self._drop(name, now, freed)
        return freed

    def _on_started(self, peer: _PeerRequests, fact: RequestStarted, now: float) -> None:
        number = fact.number
        if number in peer.open or peer.is_over(number):
            return
        director = self._directors(fact.pool)
        member = None if director is None else director.pool.find(fact.address)
        if director is None or member is None or len(peer.open) >= MAX_OPEN:
            if len(peer.uncharged) < MAX_OPEN:
                peer.uncharged[number] = None
            return
        peer.uncharged.pop(number, None)
        target, size = (
            fact.target,
            PromptSize(fact.prompt_tokens, fact.prompt_bytes, fact.has_media),
        )
        blocks = fact.blocks[: director.max_blocks]
        # Our own prediction, not that of the other replica: reported hits correct it. Compared with
        # predictions of others it would never be corrected, and those of the replicas would differ
        # more and more.
        cached = director.estimate_cached_tokens(member, blocks, target=target, size=size)
        reservation = director.charge(
            member,
            blocks,
            target=target,
            size=size,
            cached_tokens=CachedTokens(cached, cached),
            now=now,
            from_peers=True,
            stage=_STAGES.get(fact.stage, ""),
        )
        if reservation.stage == "prefill":
            reservation.watch()
        peer.open[number] = _ChargedRequest(fact.pool, director, reservation)

    def _on_ended(
        self, peer: _PeerRequests, fact: RequestEnded, now: float, freed: set[str]
    ) -> None:
        number = fact.number
        if number > peer.ended_until or number in peer.reported_open:
            # Its start may arrive later, or twice.
            peer.ended[number] = None
            if len(peer.ended) > MAX_OPEN:
                del peer.ended[next(iter(peer.ended))]
        peer.uncharged.pop(number, None)
        charged = peer.open.pop(number, None)
        if charged is not None:
            _close(charged, now, freed, answered=fact.answered, ran=fact.ran)

    def _drop(self, name: str, now: float, freed: set[str]) -> None:
        for charged in self._peers.pop(name).open.values():
            _close(charged, now, freed, answered=False, ran=True)


def _settle(peer: _PeerRequests, fact: OpenRequests, now: float, freed: set[str]) -> None:
    """Release the requests that ended, and forget numbers that cannot return."""
    # A picker that sends nothing lists the same latest number again and again.
    if (fact.until, fact.serial) < (peer.ended_until, peer.serial):
        return  # overtaken by a later one
    peer.ended_until, peer.serial, peer.reported_open = (
        fact.until,
        fact.serial,
        frozenset(fact.numbers),
    )
    for number in [number for number in peer.open if peer.is_over(number)]:
        _close(peer.open.pop(number), now, freed, answered=False, ran=True)
    peer.uncharged = dict.fromkeys(n for n in peer.uncharged if not peer.is_over(n))
    ended = [n for n in peer.ended if n > peer.ended_until or n in peer.reported_open]
    peer.ended = dict.fromkeys(ended)


def _close(
    charged: _ChargedRequest, now: float, freed: set[str], *, answered: bool, ran: bool
) -> None:
    if not ran:
        charged.director.unreserve(charged.reservation, now)
    elif charged.reservation.is_open:  # one for prefill alone may have ended, as pages show
        charged.reservation.close(now, answered=answered)
    freed.add(charged.pool)


def connect(pools: Iterable[tuple[str, Director]], event_log: PeerEventLog) -> None:
    """Connect directors to an event log; directors that are connected stay unchanged."""
    for name, director in pools:
        if not director.has_listener:
            director.set_event_listener(event_log.pool_log(name))
