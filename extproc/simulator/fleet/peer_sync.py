"""State synchronization between the picker replicas of a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from extproc.routing import peer_sync
from extproc.routing.director import Director
from extproc.simulator.fleet.event_queue import EventQueue


class PeerSyncBus:
    """Delivers the events of every picker to all others, without loss.

    Args:
        directors: The director of every picker.
        delay_s: Seconds from the first fact that waits to its being taken in with those after it.
    """

    def __init__(
        self, directors: Sequence[Director], *, timeline: EventQueue, delay_s: float
    ) -> None:
        self._timeline = timeline
        self._mirrors: list[peer_sync.PeerReplica] = []
        for n, director in enumerate(directors):
            self._join(str(n), director, delay_s)

    def _join(self, name: str, director: Director, delay_s: float) -> None:
        def deliver() -> None:
            message = outbox.take()
            if message is not None:
                for mirror in self._mirrors:
                    mirror.apply_message(message, self._timeline.now)

        outbox = peer_sync.PeerEventLog(name, lambda: self._timeline.after(delay_s, deliver))
        peer_sync.connect([("", director)], outbox)
        # No replica ever leaves: an outage of a picker is not simulated.
        self._mirrors.append(peer_sync.PeerReplica(name, lambda _: director, silent_s=math.inf))
