"""One candidate's view of a Lease: when it leads, and when it may take over. Pure.

The algorithm of client-go's leader election. The store compares and swaps: a write that names an
older version than the stored one is refused. Nobody compares clocks of two machines:

- A leader leads until `renew_s` after it *asked* for the last write that was confirmed.
- Another may take the Lease when it has seen no write to it for the duration that stands in it,
  counted from when it *heard* of the last one, and that is later than when the leader asked.

So with `renew_s` below the duration two never lead at once, as long as their clocks run at about
the same rate, whatever becomes of requests and answers.
"""

from __future__ import annotations

import math
import random

import msgspec

from extproc.election.settings import ElectionSettings

#: Shortest pause in seconds: what is left of a wait may be less than a clock can tell apart.
_LEAST_S = 0.001


class LeaseRecord(msgspec.Struct, frozen=True):
    """What is stored.

    Attributes:
        holder: Identity of who holds the Lease; empty when it was released.
        duration_s: Seconds it is held without another write.
        transitions: How often it went to another holder (count).
        version: Of the object; every write makes another one.
    """

    holder: str
    duration_s: float
    transitions: int
    version: str


class LeaseWrite(msgspec.Struct, frozen=True):
    """A write.

    Attributes:
        holder: Who is to hold the Lease; empty releases it.
        duration_s: For how long without another write (whole seconds, 1 or more).
        transitions: As in `LeaseRecord`.
        acquired: Whether the holder is another than before.
        version: That must be the stored one; empty where nothing may be stored.
    """

    holder: str
    duration_s: int
    transitions: int
    acquired: bool
    version: str


class LeaseState:
    """One candidate.

    Args:
        identity: Of this candidate in this life: one that starts again must take another, because
            it does not know what its former self has left on the way.
        settings: How patient it is.
    """

    def __init__(self, identity: str, settings: ElectionSettings) -> None:
        self.identity = identity
        self._settings = settings
        self._stored: LeaseRecord | None = None
        self._known = False
        self._until = -math.inf
        self._free = -math.inf
        self._version = ""
        self._resigned = False

    def leads(self, now: float) -> bool:
        """Whether nobody else can hold the Lease now.

        Args:
            now: Monotonic seconds.
        """
        return now < self._until

    @property
    def holder(self) -> str:
        """Who held the Lease when it was last seen; empty for nobody."""
        return self._stored.holder if self._stored is not None else ""

    @property
    def mine(self) -> bool:
        """Whether the Lease is known to be ours, if perhaps run out: it is written, not read."""
        return self._known and self.holder == self.identity

    def observe(self, record: LeaseRecord | None, now: float) -> None:
        """Take in what was read.

        Args:
            record: What is stored; None for nothing.
            now: Monotonic seconds when it was heard.
        """
        self._stored, self._known = record, True
        if self.holder != self.identity:
            self._until = -math.inf
        # The version, not the time in the record: two writes may carry the same time. And a record
        # that somebody deleted leaves the wait for its holder standing.
        if record is not None and record.version != self._version:
            self._version = record.version
            others = record.holder not in {"", self.identity}
            self._free = now + record.duration_s if others else -math.inf

    def claim(self, now: float) -> LeaseWrite | None:
        """The write that takes or renews the Lease; None while that is not for us.

        Args:
            now: Monotonic seconds.
        """
        if self._resigned or not self._known:
            return None
        if self.mine:
            return self._put(acquired=False)
        return self._put(acquired=True) if now >= self._free else None

    def confirm(self, put: LeaseWrite, version: str, asked_at_s: float) -> None:
        """A write was confirmed.

        Args:
            put: The write.
            version: The version it made.
            asked_at_s: Monotonic seconds when it was asked for.
        """
        self._stored = LeaseRecord(put.holder, put.duration_s, put.transitions, version)
        self._known, self._version, self._free = True, version, -math.inf
        if put.holder and not self._resigned:
            self._until = asked_at_s + self._settings.renew_s

    def invalidate(self) -> None:
        """A write was refused or its fate is unknown: what is stored has to be read."""
        self._known = False

    def resign(self) -> None:
        """Lead no more, for good."""
        self._resigned = True
        self._until = -math.inf

    def release(self) -> LeaseWrite | None:
        """The write that lets others lead at once; None when the Lease is not ours."""
        if not self.mine or self._stored is None:
            return None
        return LeaseWrite(
            "", 1, self._stored.transitions, acquired=True, version=self._stored.version
        )

    def pause(self, now: float, rng: random.Random) -> float:
        """Seconds until the next attempt, at most `retry_s`.

        Args:
            now: Monotonic seconds.
            rng: Chance: candidates that started together do not ask together.
        """
        pause = self._settings.retry_s * rng.uniform(0.5, 1.0)
        return max(min(pause, self._free - now), _LEAST_S) if now < self._free else pause

    def _put(self, *, acquired: bool) -> LeaseWrite:
        stored = self._stored
        transitions = stored.transitions + int(acquired) if stored is not None else 0
        return LeaseWrite(
            self.identity,
            self._settings.duration_s,
            transitions,
            acquired=acquired,
            version=stored.version if stored is not None else "",
        )
