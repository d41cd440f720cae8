"""Writes recordings of decisions to a file and to clients of the metrics port."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Final

import msgspec

from extproc import distribution
from extproc.config.decisions import RecordSection
from extproc.config.settings import Settings
from extproc.recording import recorder, rows
from extproc.recording.recorder import MAX_ENTRIES, Recording, Recordings, RotatingFile

_log = logging.getLogger("extproc.server")

#: Seconds between two batches of rows: what may wait is more than a process decides in them.
_BATCH_S: Final = 0.5

#: Entries turned into rows at a time (count), between which requests have their turn: some 5 us each.
_TURN_ENTRIES: Final = 128

#: Recordings for clients at a time (count): each costs every request some microseconds.
MAX_CLIENTS: Final = 4

#: Seconds in which the file must take what is left at the end: a mount may stall.
_END_S: Final = 2.0

#: Longest recording of a client (seconds).
MAX_CLIENT_S: Final = 86_400.0


class DecisionRecorder:
    """Recordings of one process: the one of `decisions.record`, and those of clients.

    Args:
        counts: Rows by result; updated here.
        settle: Records the ends of requests that wait to be counted.
        on_change: Called with the recordings when the first starts, and with None after the last.

    Attributes:
        error: Reason for which the file of the configuration cannot be written; empty while it can.
        is_closed: True once recordings of clients are cut short, because the process ends.
    """

    def __init__(
        self,
        settings: Settings,
        counts: Counter[str],
        *,
        clock: Callable[[], float],
        settle: Callable[[], None],
        on_change: Callable[[Recordings | None], None],
    ) -> None:
        self._settings = settings
        self._settle = settle
        self._counts = counts
        self._clock = clock
        self._process = secrets.token_hex(8)
        self.error = ""
        self._clients = 0
        self.is_closed = False
        self._unwritten = bytearray()
        self._writing: asyncio.Future[bool] | None = None
        self.recordings = Recordings(
            counts,
            self._header,
            schedule=settings.prefix.schedule,
            on_change=lambda active: on_change(self.recordings if active else None),
        )

    @property
    def has_room(self) -> bool:
        """True if another client may record."""
        return self._clients < MAX_CLIENTS

    def reconfigure(self, settings: Settings) -> None:
        """Take other settings, which recordings under way name in a new header."""
        self._settings = settings
        self.recordings.add_header()

    def close(self) -> None:
        """End the recordings of clients."""
        self.is_closed = True

    async def run(self) -> None:
        """Write the recording of the configuration until cancelled."""
        section = self._settings.decisions.record
        if section is None:
            return
        recording = self.recordings.start()
        for result in ("recorded", "dropped", "failed"):
            self._counts[result] += 0  # a series that begins at its first failure hides that one
        file = RotatingFile(
            section.file, max_bytes=section.max_file_bytes, max_files=section.max_files
        )
        try:
            self._set_error(await asyncio.to_thread(recorder.find_obstacle, section.file), section)
            while True:
                await asyncio.sleep(_BATCH_S)
                await self._write_batch(recording, file, section)
        finally:
            await self._end(recording, file, section)

    async def _end(self, recording: Recording, file: RotatingFile, section: RecordSection) -> None:
        """Write what is left and close the file, or leave both to a thread that takes too long."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + _END_S
        if self._writing is not None:
            with contextlib.suppress(OSError):  # a write that failed, or takes too long
                async with asyncio.timeout_at(ends_at):
                    await self._finish_write(recording, self._writing)
        recording.resume()
        self._settle()
        self.recordings.stop(recording)
        self._unwritten += recording.take(MAX_ENTRIES)
        if self._writing is None:
            last = loop.run_in_executor(None, _write_last, file, bytes(self._unwritten))
            written, _ = await asyncio.wait([last], timeout=ends_at - loop.time())
            if written:
                return
        _log.warning("the last decisions are not recorded: writing %s takes too long", section.file)

    async def stream(
        self, seconds: float, *, is_gone: Callable[[], bool]
    ) -> AsyncGenerator[bytes, None]:
        """Record for a client; yields complete lines.

        Args:
            seconds: Length of the recording; closing the iterator ends it earlier.
            is_gone: True if the client left, which ends it too, also where there is nothing to yield.
        """
        recording = self.recordings.start()
        self._clients += 1
        try:
            ends_at = self._clock() + min(seconds, MAX_CLIENT_S)
            while self._clock() < ends_at and not (self.is_closed or is_gone()):
                await asyncio.sleep(_BATCH_S)
                self._settle()
                async for lines in _take_batch(recording):
                    yield lines
        finally:
            self._clients -= 1
            self.recordings.stop(recording)

    async def _write_batch(
        self, recording: Recording, file: RotatingFile, section: RecordSection
    ) -> None:
        """Write what waits."""
        self._settle()
        async for lines in _take_batch(recording):
            self._unwritten += lines
        # Cancelled, it goes on being held: `run` waits for the write.
        self._unwritten += recording.hold()
        await self._write(recording, file, section)
        recording.resume()

    async def _write(
        self, recording: Recording, file: RotatingFile, section: RecordSection
    ) -> None:
        if not self._unwritten:
            return
        batch = bytes(self._unwritten)
        self._unwritten.clear()
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(None, file.write, batch)
        try:
            await self._finish_write(recording, self._writing)
        except OSError as error:
            self._counts["failed"] += batch.count(b"\n")
            self._set_error(error.strerror or str(error), section)
        else:
            self._set_error("", section)

    def _set_error(self, error: str, section: RecordSection) -> None:
        """Set the error, and log its beginning and end."""
        if error and not self.error:
            _log.error("decisions are not recorded: %s cannot be written: %s", section.file, error)
        elif self.error and not error:
            _log.info("decisions are recorded again in %s", section.file)
        self.error = error

    async def _finish_write(self, recording: Recording, writing: asyncio.Future[bool]) -> None:
        """Wait for a write; what comes behind it begins anew where another file or a gap follows.

        Raises:
            OSError: The file cannot be written.
        """
        # A thread cannot be cancelled: `run` waits for it before it closes the file.
        await asyncio.wait([writing])
        self._writing = None
        if writing.exception() is not None or writing.result():
            recording.restart()
        writing.result()

    def _header(self) -> rows.HeaderRow:
        """First row of a recording."""
        settings, to_tree = self._settings, functools.partial(msgspec.to_builtins, str_keys=True)
        flow_control = msgspec.structs.replace(settings.flow_control, limit=None, limits={})
        kv_events = msgspec.structs.replace(
            settings.kv_events, bind="", render_url="", tokenizer_path=""
        )
        sections = {
            "scheduling": settings.scheduling,
            "prefix": settings.prefix,
            "kv_events": kv_events,
            "scrape": settings.scrape,
            "health": settings.health,
            "flow_control": flow_control,
            "parse_bodies": settings.parse_bodies,
        }
        return rows.HeaderRow(
            version=rows.VERSION,
            software=distribution.installed_version() or "",
            unix_s=time.time(),  # noqa: TID251 - the only way from the clock of the rows to that of people
            clock_s=self._clock(),
            process=self._process,
            settings={name: to_tree(section) for name, section in sections.items()},
            pools={
                pool.name: {"scheduling": to_tree(pool.scheduling)}
                for pool in settings.pools
                if pool.scheduling is not None
            },
        )


def _write_last(file: RotatingFile, lines: bytes) -> None:
    with contextlib.suppress(OSError):
        if lines:
            file.write(lines)
    with contextlib.suppress(OSError):
        file.close()


async def _take_batch(recording: Recording) -> AsyncGenerator[bytes, None]:
    """Rows of what waits, in pieces between which requests are routed.

    They are as many as may wait, at most: while the process has more to do than it can, as many come
    with each piece as are taken, and the batch would be without an end.
    """
    for _ in range(MAX_ENTRIES // _TURN_ENTRIES):
        lines = recording.take(_TURN_ENTRIES)
        if not lines:
            return
        yield lines
        await asyncio.sleep(0)
