"""Replay: the batches that an engine is asked to send again, one request at a time."""

from __future__ import annotations

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
        has_hole: Whether the engine dropped some while we did not read: they are to be asked for
            again.
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
            self._until, self.has_hole = 0.0, False
            return END, b""
        if len(frames) not in (3, 4) or frames[0] or len(frames[-2]) != 8:
            return None
        return int.from_bytes(frames[-2]), frames[-1]

    def sort(self, seq: int, expected: int) -> ReplayedBatch:
        """Returns what a batch is for.

        Args:
            seq: Its number.
            expected: Number of the batch that comes next.
        """
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
