"""Body buffer: request bodies as they arrive, bounded per exchange, in total and in time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Final, Generic, TypeVar

import msgspec

from extproc.decision import BodyEdit, Rejection
from extproc.request import RequestBody

#: Bodies up to this size are taken whatever others hold (bytes): most requests are smaller, and
#: 10,000 streams cannot hold more than 640 MiB of them.
ALWAYS_TAKEN_BYTES: Final = 64 * 1024

#: A larger body has at most a quarter of what others leave of the budget. However many uploads
#: stall, each leaves room for one more of its size.
SHARES: Final = 4

#: Chunks of a body are joined when it is complete; beyond this size (bytes), or so many of them (count),
#: as they arrive. One of two bytes takes some 50: clients may send each in a frame of its own.
JOIN_BYTES: Final = 1024 * 1024
MAX_CHUNKS: Final = 128

#: Bodies from this size are freed by `BufferBudget.free` (bytes): to take their memory back costs the
#: kernel 1 to 2 ms, and ten times that for the largest.
FREED_APART_BYTES: Final = 8 * 1024 * 1024


class BufferBudget(msgspec.Struct):
    """Limit on the bytes that all exchanges buffer together.

    Attributes:
        limit_bytes: Shared limit; bodies up to `ALWAYS_TAKEN_BYTES` may go beyond it.
        free: Frees large bodies once nothing else refers to them; None leaves it to the interpreter.
    """

    limit_bytes: int
    free: Callable[[bytearray], None] | None = None
    held_bytes: int = 0

    def hold(self, size: int) -> bool:
        """Count bytes besides bodies; False, and nothing is counted, where others leave no room."""
        if size > (self.limit_bytes - self.held_bytes) // SHARES:
            return False
        self.held_bytes += size
        return True

    def release(self, size: int) -> None:
        """Return bytes that `hold` counted."""
        self.held_bytes -= size


class BodyBuffer(msgspec.Struct):
    """The body of one request as it arrives."""

    _budget: BufferBudget
    _limit_bytes: int
    _chunks: list[RequestBody] = []
    size_bytes: int = 0

    def add(self, chunk: RequestBody) -> Rejection | None:
        """Add a chunk, which belongs to the buffer from now on, or return the rejection."""
        size = len(chunk)
        if not size:
            return None
        if self.size_bytes + size > self._limit_bytes:
            message = f"request body is larger than {self._limit_bytes} bytes"
            return Rejection(413, message, cause="body-too-large")
        budget, after = self._budget, self.size_bytes + size
        if after > ALWAYS_TAKEN_BYTES:
            room = (budget.limit_bytes - budget.held_bytes + self.size_bytes) // SHARES
            if after > room:
                return Rejection(
                    429,
                    f"request bodies of {budget.held_bytes} bytes are being assembled already, "
                    f"which leaves room for one of {max(room, ALWAYS_TAKEN_BYTES)}",
                    reason="rejected-saturated",
                    retry_after_s=1,
                    cause="too-many-bodies",
                )
        budget.held_bytes += size
        self.size_bytes = after
        if after == size or (after <= JOIN_BYTES and len(self._chunks) < MAX_CHUNKS):
            self._chunks.append(chunk)
        else:
            self._append_in_place(chunk)
        return None

    def _append_in_place(self, chunk: RequestBody) -> None:
        """Append to a single bytearray, so that no later step copies a large body at once."""
        body, *others = self._chunks
        if not isinstance(body, bytearray):
            body = bytearray().join(self._chunks)
        elif others:
            body += b"".join(others)
        self._chunks = [body]
        body += chunk

    def joined(self) -> RequestBody:
        """The complete body, stored in place of its chunks; no copy for a single chunk."""
        if len(self._chunks) != 1:
            self._chunks = [b"".join(self._chunks)]
        return self._chunks[0]

    def apply_edit(self, edit: BodyEdit) -> RequestBody:
        """Replace a part of the complete body, which is returned, and account for its new size."""
        body = self.joined()
        if isinstance(body, bytearray):
            edited: RequestBody = body
            body[edit.start : edit.stop] = edit.content
        else:
            edited = edit.apply(body)
        self._chunks = [edited]
        self._budget.held_bytes += len(edited) - self.size_bytes
        self.size_bytes = len(edited)
        return edited

    def release(self) -> None:
        """Return the bytes to the budget and drop them; idempotent."""
        budget, size_bytes = self._budget, self.size_bytes
        budget.held_bytes -= size_bytes
        self.size_bytes = 0
        if size_bytes >= FREED_APART_BYTES and budget.free is not None:
            body = self._chunks[0]
            if isinstance(body, bytearray):
                budget.free(body)
        self._chunks.clear()


#: A body that has taken longer than `idle_s` must have come at this rate (bytes per second): the
#: slowest mobile networks are about as fast, and a byte a minute would hold a place for days.
MIN_UPLOAD_BYTES_PER_S: Final = 16 * 1024

#: Share of `idle_s` that bodies have while more than half of a budget is taken by bodies on their
#: way: those that wait for nothing make room for those that move.
HURRY_FACTOR: Final = 0.1

UploadKeyT = TypeVar("UploadKeyT", bound=Hashable)


class UploadProgress(msgspec.Struct, frozen=True):
    """Progress of a body at the last check.

    Attributes:
        began: Monotonic seconds of the first observation.
        moved: Monotonic seconds at which this size was first observed.
    """

    began: float
    moved: float
    size_bytes: int


class UploadMonitor(Generic[UploadKeyT]):
    """Checks request bodies periodically, at no cost per message."""

    def __init__(self) -> None:
        self._progress: dict[UploadKeyT, UploadProgress] = {}

    def find_stalled(
        self,
        arriving: Mapping[UploadKeyT, int],
        now: float,
        *,
        idle_s: float,
        max_streams: int,
        max_bytes: int,
    ) -> list[UploadKeyT]:
        """Find the bodies to abort: idle for `idle_s`, or too slow since they began.

        Args:
            max_streams: Arriving bodies beyond half of which `idle_s` is shortened (count).
            max_bytes: Bytes of them beyond half of which it is shortened.
        """
        if len(arriving) > max_streams / 2 or sum(arriving.values()) > max_bytes / 2:
            idle_s *= HURRY_FACTOR
        before = self._progress
        progress = self._progress = {}
        stalled = []
        for key, size_bytes in arriving.items():
            known = before.get(key)
            if known is None:
                known = UploadProgress(now, now, size_bytes)
            elif known.size_bytes != size_bytes:
                known = UploadProgress(known.began, now, size_bytes)
            slowest_s = idle_s + size_bytes / MIN_UPLOAD_BYTES_PER_S
            if now - known.moved >= idle_s or now - known.began >= slowest_s:
                stalled.append(key)
            else:
                progress[key] = known
        return stalled
