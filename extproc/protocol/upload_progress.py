"""Upload progress: finds request bodies that arrive too slowly."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final, Generic, TypeVar

import msgspec

#: A body that has taken longer than `idle_s` must have come at this rate (bytes per second): the
#: slowest mobile networks are about as fast, and a byte a minute would hold a place for days.
SLOWEST_BYTES_PER_S: Final = 16 * 1024

#: Share of `idle_s` that bodies have while more than half of a budget is taken by bodies on their
#: way: those that wait for nothing make room for those that move.
HURRIED: Final = 0.1

UploadKeyT = TypeVar("UploadKeyT", bound=Hashable)


class UploadProgress(msgspec.Struct, frozen=True):
    """Progress of a body at the last check.

    Attributes:
        began: When it was first looked at, monotonic seconds.
        moved: When it was first looked at with this size.
        size_bytes: Bytes received.
    """

    began: float
    moved: float
    size_bytes: int


class Uploads(Generic[UploadKeyT]):
    """Checks request bodies periodically, at no cost per message."""

    def __init__(self) -> None:
        self._progress: dict[UploadKeyT, UploadProgress] = {}

    def look(
        self,
        arriving: Mapping[UploadKeyT, int],
        now: float,
        *,
        idle_s: float,
        most_streams: int,
        most_bytes: int,
    ) -> list[UploadKeyT]:
        """Bodies to abort: idle for `idle_s`, or too slow since they began.

        Args:
            arriving: All bodies on their way, with their bytes so far.
            now: Monotonic seconds.
            idle_s: Seconds that a body may stand still.
            most_streams: Bodies on their way beyond half of which they are hurried (count).
            most_bytes: Bytes of them beyond half of which they are hurried.
        """
        if len(arriving) > most_streams / 2 or sum(arriving.values()) > most_bytes / 2:
            idle_s *= HURRIED
        before = self._progress
        progress = self._progress = {}
        stalled = []
        for key, size_bytes in arriving.items():
            known = before.get(key)
            if known is None:
                known = UploadProgress(now, now, size_bytes)
            elif known.size_bytes != size_bytes:
                known = UploadProgress(known.began, now, size_bytes)
            slowest_s = idle_s + size_bytes / SLOWEST_BYTES_PER_S
            if now - known.moved >= idle_s or now - known.began >= slowest_s:
                stalled.append(key)
            else:
                progress[key] = known
        return stalled
