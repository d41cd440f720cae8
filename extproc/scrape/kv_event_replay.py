"""Replay: the batches that an engine is asked to send again, one request at a time, and when."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, Literal

from extproc.scrape.kv_event_connection import EngineConnection, EngineConnector

#: Seconds without any answer of a replay socket after which it counts as silent.
_TIMEOUT_S = 2.0

#: Batches and bytes of a replay behind which its socket counts as silent: ten times the batches that
#: vLLM keeps.
_MAX_BATCHES, _MAX_BYTES = 100_000, 1 << 30

#: Seconds between two requests, each of which takes a connection, and those that may follow each other at
#: once (count): an engine chooses by what it publishes how often it is asked.
_REQUEST_S, _MAX_BURST = 0.05, 8

#: Seconds at most without a batch until the replay socket is asked whether there are more, time and
#: again: no later batch would show that the last one was lost.
_CONFIRM_S: Final = 1.0

#: Such questions per second over all subscriptions (count): each takes a connection.
_CONFIRMS_PER_S: Final = 100.0

#: Seconds at most until an engine is asked for everything again, behind a malformed message. It is
#: doubled each time, because what is malformed may be sent again.
_MAX_LEARN_WAIT_S: Final = 64.0

#: Seconds for which a silent replay socket is left alone, and a subscription whose messages are of no use.
REST_S: Final = 30.0

#: Number that ends a replay.
END: Final = (1 << 64) - 1

#: What a batch is for: to be compared with the one that was taken in under its number, to be taken in,
#: or nothing.
ReplayedBatch = Literal["compare", "take", "skip"]


class BatchReplay:
    """Requests to the replay socket of an engine, and the order of what it answers.

    Args:
        connect: Connects to the socket after so many seconds, and calls back with each open connection.
        clock: Monotonic seconds.

    Attributes:
        is_verifying: Whether its first batch is still to come, and to be compared.
        has_hole: Whether the engine dropped some while we did not read, and sent later ones.
    """

    def __init__(
        self,
        connect: Callable[[Callable[[EngineConnection], None], float], EngineConnector],
        clock: Callable[[], float],
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._connector: EngineConnector | None = None
        self._until = 0.0
        #: When requests as often as allowed would have led to as many as there were.
        self._even_at = 0.0
        self._num_batches = self._num_bytes = 0
        self._has_progress = False
        self.is_verifying = False
        self.has_hole = False

    @property
    def is_running(self) -> bool:
        """True from a request until its connection is closed."""
        return self._connector is not None

    @property
    def is_silent(self) -> bool:
        """True if no answer came for a while, or answers without end."""
        return self._clock() >= self._until

    @property
    def is_cut_off(self) -> bool:
        """True if the rest is to be asked for: the engine dropped what its socket had no room for.

        ZeroMQ holds 1000 messages for a peer that reads slowly, and may drop the last one as well.
        """
        return self.has_hole or (self._has_progress and self.is_silent)

    def request(self, start: int, *, verify: bool) -> None:
        """Ask for the batches from a number on, instead of an earlier request.

        Args:
            start: First number.
            verify: Whether the first one was taken in already: if it differs, the engine is another.
        """
        self.close()
        self.is_verifying = verify
        self._has_progress = self.has_hole = False
        now = self._clock()
        wait_s = max(0.0, self._even_at - now - (_MAX_BURST - 1) * _REQUEST_S)
        self._even_at = max(self._even_at, now) + _REQUEST_S
        self._until = now + wait_s + _TIMEOUT_S
        # As from a socket of type REQ, behind an empty frame.
        self._connector = self._connect(
            lambda connection: connection.send(b"", start.to_bytes(8)), wait_s
        )

    def check(self, now: float) -> None:
        """Close a connection that is silent: another one is made."""
        if self._connector is not None:
            self._connector.check(now)

    def receive(self) -> list[bytes] | None:
        """Frames of the next message; None where there is none."""
        return None if self._connector is None else self._connector.receive()

    def read(self, frames: list[bytes]) -> tuple[int, bytes] | None:
        """Number and payload of a batch, behind an empty frame, and a topic from newer engines.

        Returns:
            None for a malformed message; number `END` behind the last batch, and for one too many.
        """
        self._until = self._clock() + _TIMEOUT_S
        self._num_batches += 1
        self._num_bytes += sum(map(len, frames))
        if self._num_batches > _MAX_BATCHES or self._num_bytes > _MAX_BYTES:
            self._until, self.has_hole, self._has_progress = 0.0, False, False
            return END, b""
        if len(frames) not in (3, 4) or frames[0] or len(frames[-2]) != 8:
            return None
        return int.from_bytes(frames[-2]), frames[-1]

    def sort(self, seq: int, expected: int) -> ReplayedBatch:
        """Returns what a batch is for, by its number and that of the batch that comes next."""
        was_verifying, self.is_verifying = self.is_verifying, False
        if was_verifying and seq < expected:
            return "compare"
        if seq > expected and self._has_progress:
            self.has_hole = True
        if self.has_hole or seq < expected:
            return "skip"
        self._has_progress = True
        return "take"

    def forget_size(self) -> None:
        """Bound the next request for itself."""
        self._num_batches = self._num_bytes = 0

    def close(self) -> None:
        """Close the connection."""
        if self._connector is not None:
            self._connector.close()
            self._connector = None


class ReplaySchedule:
    """Times at which a replay socket is asked although no gap is known.

    It is asked for more while no batch comes, and for everything behind a malformed message.

    Args:
        clock: Monotonic seconds.
        count_subscriptions: Returns the number of subscriptions, which share a rate of questions.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        rng: random.Random,
        *,
        count_subscriptions: Callable[[], int],
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._count_subscriptions = count_subscriptions
        self._confirm_at = self._rests_until = 0.0
        self._learn_at: float | None = None
        self._learn_wait_s = _CONFIRM_S

    def start(self) -> None:
        """Begin with a new connection, whatever the socket did before."""
        self._rests_until = 0.0
        self.confirm_later()

    def confirm_later(self) -> None:
        """Ask for more once nothing has come for a while, not all subscriptions at once."""
        wait_s = max(_CONFIRM_S, self._count_subscriptions() / _CONFIRMS_PER_S)
        later = self._clock() + wait_s * self._rng.uniform(0.8, 1.0)
        self._confirm_at = max(self._rests_until, later)

    def rest(self) -> None:
        """Leave the socket alone for a while: it is silent."""
        self._rests_until = self._clock() + REST_S
        self.confirm_later()

    def learn_later(self) -> None:
        """Ask for everything, unless that is planned."""
        if self._learn_at is None:
            self._learn_at = self._clock() + self._learn_wait_s

    def cancel_learning(self) -> None:
        """Do not ask for everything."""
        self._learn_at = None

    def lengthen_learning(self) -> None:
        """Wait twice as long the next time."""
        self._learn_wait_s = min(_MAX_LEARN_WAIT_S, 2.0 * self._learn_wait_s)

    def note_learned(self) -> None:
        """Note that everything is known: nothing is to be asked for, and the next wait is the shortest."""
        self._learn_at = None
        self._learn_wait_s = _CONFIRM_S

    def take_due(self, now: float) -> Literal["learn", "confirm"] | None:
        """Take the question that is due, and plan a repeated one again; None while none is."""
        if self._learn_at is not None and now >= self._learn_at:
            self._learn_at = None
            return "learn"
        if now < self._confirm_at:
            return None
        self.confirm_later()
        return "confirm"
