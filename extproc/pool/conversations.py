"""Conversations: prompts that continue earlier ones, and the load of those that are queued.

A conversation is known by the deepest block of its latest prompt, which every later prompt of it
contains. Engines forget prefixes, and so does the index that follows them; `ConversationTracker` does
not, so that a conversation whose prefix is lost can still be distinguished from a new one.

Conversations that wait for an endpoint push each other's prefixes out of its cache as much as those
that it serves. So `PendingLoad` counts them as load before they are dispatched.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from extproc.pool.inflight import InflightLoad
from extproc.pool.request_tokens import ContextShare
from extproc.pool.store import PoolStore

_TIMES = struct.Struct("dd")
_pack_times, _unpack_times = _TIMES.pack, _TIMES.unpack

#: Weight of a request in what is learned. At 0.01 it follows a change of traffic within a few hundred.
_ALPHA = 0.01

#: Conversations away for each open request that count at most: where users read for long, what they
#: go on from has mostly made room for others. Simulated days of chats (Mooncake) are 2 % slower
#: without a bound.
_MAX_IDLE_PER_OPEN = 0.5


class LastTurn(msgspec.Struct, eq=False, gc=False):
    """The latest prompt of a conversation.

    Attributes:
        account: Account of the endpoint that answers it; a weak reference, so that removed endpoints
            are freed.
        times: When it was sent, and when its request ended, monotonic seconds; infinity while it is
            open. Packed: Python makes a float of the memory of the last one that was freed, so tens
            of thousands of them would lie, and stay, between what ended requests leave.
    """

    account: weakref.ref[InflightLoad]
    times: bytes

    @classmethod
    def begin(cls, account: InflightLoad, now: float) -> LastTurn:
        """A prompt that is sent now."""
        return cls(weakref.ref(account), _pack_times(now, math.inf))

    def end(self, now: float) -> None:
        """Mark the end of its request."""
        self.times = _pack_times(self.at, now)

    def move(self, account: InflightLoad) -> None:
        """Mark its request as open on another endpoint."""
        self.account = weakref.ref(account)
        self.times = _pack_times(self.at, math.inf)

    @property
    def at(self) -> float:
        """Monotonic seconds at which it was sent."""
        at: float = _unpack_times(self.times)[0]
        return at

    @property
    def ended(self) -> float:
        """Monotonic seconds at which its request ended; infinity while it is open."""
        ended: float = _unpack_times(self.times)[1]
        return ended


class ConversationTracker:
    """The latest prompts and where they went. Mutable; one owner.

    Args:
        max_prompts: Prompts remembered (count). 65,536 take some 17 MB.

    Attributes:
        continuation_ratio: Share of requests that go on from an earlier one, 0..1.
        prompt_tokens: Mean prompt tokens of a request.
    """

    __slots__ = (
        "_interval_s",
        "_last_chain",
        "_last_match",
        "_max_prompts",
        "_open_s",
        "_turns",
        "continuation_ratio",
        "prompt_tokens",
    )

    def __init__(self, max_prompts: int = 65_536) -> None:
        self._max_prompts = max_prompts
        self._turns: OrderedDict[int, LastTurn] = OrderedDict()
        self._interval_s = self._open_s = 0.0
        self.continuation_ratio = 0.5
        self.prompt_tokens = 0.0
        #: The chain that was looked up last, and its turn: a request that is routed is sent next.
        self._last_chain: Sequence[int] | None = None
        self._last_match: LastTurn | None = None

    def __len__(self) -> int:
        """Prompts remembered (count)."""
        return len(self._turns)

    def last_endpoint(self, chain: Sequence[int]) -> InflightLoad | None:
        """Endpoint of the latest prompt that this one continues; None if new or freed."""
        latest = self._latest(chain)
        return None if latest is None else latest.account()

    def expected_growth_tokens(self, prompt_tokens: int) -> float:
        """Tokens a conversation will grow by: young ones grow to the size of the others."""
        # Without a call: every request comes here twice.
        growth = self.prompt_tokens - prompt_tokens
        return self.continuation_ratio * growth if growth > 0.0 else 0.0

    def idle_per_open(self, others: float = 0.0) -> float:
        """Conversations that will go on and have no request open now, for each open request.

        r max(0, t (1 - s) / b - 1), half of one at most: of open requests the share r goes on t
        seconds after it was sent, and for b of these it is open (Little's law). Where others send the
        share s of all requests, as many turns lie between two that are seen here.

        Args:
            others: s, 0..1.
        """
        if not self._open_s:
            return 0.0
        pauses = self._interval_s * (1.0 - others) / self._open_s - 1.0
        idle = self.continuation_ratio * pauses
        # Without calls of `max` and `min`: every request comes here.
        if idle <= 0.0:
            return 0.0
        return idle if idle < _MAX_IDLE_PER_OPEN else _MAX_IDLE_PER_OPEN  # noqa: FURB136

    def record_sent(
        self, chain: Sequence[int], account: InflightLoad, *, prompt_tokens: int, now: float
    ) -> LastTurn | None:
        """Record a prompt that was sent.

        Returns:
            The turn, to be marked when the request ends; None where no later prompt can match it.
        """
        if not chain:
            return None
        turns, latest = self._turns, self._latest(chain)
        self.continuation_ratio += _ALPHA * ((latest is not None) - self.continuation_ratio)
        self.prompt_tokens += _ALPHA * (prompt_tokens - self.prompt_tokens)
        if latest is not None:
            # Of the same turns, so that neither runs ahead while engines fill.
            at, ended = latest.at, latest.ended
            self._interval_s += _ALPHA * (now - at - self._interval_s)
            self._open_s += _ALPHA * (min(ended, now) - at - self._open_s)
        self._last_chain = None
        last = chain[-1]
        last_turn = turns[last] = LastTurn.begin(account, now)
        if latest is not None:
            turns.move_to_end(last)  # it may have had a place
        if len(turns) > self._max_prompts:
            turns.popitem(last=False)
        return last_turn

    def _latest(self, chain: Sequence[int]) -> LastTurn | None:
        """The latest turn that this prompt continues; None for a new conversation."""
        if chain is not self._last_chain:
            self._last_chain, self._last_match = chain, None
            # Most prompts continue none, and this is one call.
            if not self._turns.keys().isdisjoint(chain):
                self._last_match = next(filter(None, map(self._turns.get, reversed(chain))), None)
        return self._last_match


class PendingShare(msgspec.Struct, frozen=True, gc=False):
    """The load that a queued request will add.

    Attributes:
        share: Share of the KV cache that it will hold there.
    """

    account: InflightLoad
    share: ContextShare


class PendingLoad:
    """Adds the load of queued requests to the endpoints of a pool, and removes it.

    Args:
        tokens: Prompt tokens by depth of a chain.
        counted: Whether any profile reads the pending load; nothing is added otherwise.
    """

    def __init__(
        self,
        store: PoolStore,
        tracker: ConversationTracker,
        tokens: Sequence[int],
        *,
        counted: bool,
    ) -> None:
        self._store = store
        self._tracker = tracker
        self._tokens = tokens
        self._is_counted = counted

    def reconfigure(self, *, counted: bool) -> None:
        """Count pending load, or no longer, from the next request on."""
        self._is_counted = counted

    def add(self, address: str, chain: Sequence[int], *, prompt_tokens: int) -> PendingShare | None:
        """Add the load of a queued request to an endpoint.

        Args:
            address: Address of the endpoint; empty for none.

        Returns:
            What to take back once the request goes on or leaves; None where there is nothing.
        """
        if not (address and chain and self._is_counted):
            return None
        member = self._store.pool.find(address)
        if member is None:
            return None
        growth = self._tracker.expected_growth_tokens(prompt_tokens)
        return PendingShare(
            member.account, member.account.add_pending(chain, self._tokens, growth=growth)
        )


def remove_pending(pending: PendingShare | None) -> None:
    """Remove the load of a request that left the queue."""
    if pending is not None:
        pending.account.remove_pending(pending.share)
