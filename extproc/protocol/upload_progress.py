"""Which request bodies arrive too slowly, of those that are on their way."""

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
    """How far one body was when it was looked at.

    Attributes:
        began: When it was first looked at, monotonic seconds.
        moved: When it was first looked at with this size.
        size_bytes: What had come.
    """

    began: float
    moved: float
    size_bytes: int


class Uploads(Generic[UploadKeyT]):
    """Follows request bodies from look to look, so that a message on its way costs nothing."""

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
        """The bodies that end here: nothing came for `idle_s`, or too little since they began.

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
