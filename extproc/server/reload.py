"""Reloads the configuration when its files change or on SIGHUP.

A shell. Files are read beside the event loop; everything is checked and built before anything is
swapped, and nothing waits between the two, so a request is routed by the old configuration or by the
new one. What is wrong, in whatever way, leaves the old one in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from extproc.config import loader, reloading
from extproc.config.settings import Settings
from extproc.discovery.static_discovery import FileStamp, file_stamp
from extproc.errors import ConfigError
from extproc.supervision import place_of, seconds_to_tick
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.log_format import log_event

_log = logging.getLogger("extproc.server")

#: Seconds between two looks at the files. A stat costs microseconds, and a mounted ConfigMap takes
#: a minute to arrive.
_POLL_S = 1.0

#: Looks at unchanged files after which a configuration that was refused is read again (count). What
#: it lacked may lie outside of them: a mounted token, a plugin file, a descriptor.
_RETRY_LOOKS: Final = 30

#: Reloads that are remembered (count).
_MAX_REMEMBERED: Final = 50


class ReadConfiguration(msgspec.Struct, frozen=True):
    """A configuration as it was read, with warnings about it."""

    settings: Settings
    warnings: tuple[str, ...] = ()


class ConfigSource(msgspec.Struct, frozen=True):
    """Source of the configuration of a running server.

    Attributes:
        files: Returns the files to watch for the settings that were read last.
        read: Reads the configuration again.
        check_start: Raises ConfigError if a process with these settings would not start.
        stamps: Stamps of files from before they were read at the start.
        warnings: Warnings that the start printed.
    """

    files: Callable[[Settings], Sequence[str]]
    read: Callable[[], ReadConfiguration]
    check_start: Callable[[Settings], None] = lambda _: None
    stamps: Mapping[str, FileStamp] = {}
    warnings: tuple[str, ...] = ()


def read_stamps(files: Iterable[str]) -> dict[str, FileStamp]:
    """Return the stamps of files by their names."""
    return {name: file_stamp(name) for name in files}


class ReloadResult(msgspec.Struct, frozen=True):
    """Result of a reload.

    Attributes:
        error: Reason why the old configuration stays; empty if the new one is in force.
        changes: Fields that are other than before from now on.
        restart: Fields that differ from what is in force, and take effect after a restart.
        settings: Settings in force from now on; None where the old ones stay.
        warnings: Warnings that the configuration before did not have.
    """

    error: str = ""
    changes: tuple[reloading.Change, ...] = ()
    restart: tuple[str, ...] = ()
    settings: Settings | None = None
    warnings: tuple[str, ...] = ()

    @property
    def changed(self) -> tuple[str, ...]:
        """Paths of the changes."""
        return tuple(change.path for change in self.changes)


class ReloadHistory:
    """The settings in force, and the last reloads."""

    def __init__(
        self, settings: Settings, clock: Callable[[], float], counters: ProcessCounters
    ) -> None:
        self._settings = settings
        self._counters = counters
        self._clock = clock
        self._started_at = clock()
        self._results: deque[tuple[float, ReloadResult]] = deque(maxlen=_MAX_REMEMBERED)

    @property
    def error(self) -> str:
        """Reason why the last reload was refused; empty where it was not."""
        return self._results[-1][1].error if self._results else ""

    @property
    def needs_restart(self) -> tuple[str, ...]:
        """Fields that wait for a restart since the last reload that was accepted."""
        accepted = (result for _, result in reversed(self._results) if not result.error)
        return next((result.restart for result in accepted), ())

    def add(self, result: ReloadResult) -> None:
        """Count, remember and log the result of a reload."""
        self._results.append((self._clock(), result))
        if result.settings is not None:
            self._settings = result.settings
        self._counters.record_reload(ok=not result.error, restart=bool(result.restart))
        if result.error:
            log_event(_log, logging.ERROR, "the configuration stays as it was", error=result.error)
            return
        changed = ",".join(result.changed)
        log_event(_log, logging.INFO, "the configuration was read again", changed=changed)
        if result.restart:
            restart = ",".join(result.restart)
            log_event(_log, logging.WARNING, "the configuration needs a restart", fields=restart)
        for warning in result.warnings:
            log_event(_log, logging.WARNING, "the configuration may be wrong", warning=warning)

    def describe(self, now: float) -> dict[str, Any]:
        """Settings that differ from their defaults, and reloads, newest first; without secrets."""
        return {
            "started_s_ago": now - self._started_at,
            "settings": list(reloading.find_public_changes_from_defaults(self._settings)),
            "reloads": [
                {
                    "seconds_ago": now - at,
                    "error": result.error,
                    "changes": result.changes,
                    "restart": result.restart,
                }
                for at, result in reversed(self._results)
            ],
        }


class Reloader:
    """Keeps a server's configuration up to date.

    Args:
        apply_settings: Puts settings in force, which differ from `settings` in live fields only; raises
            before it changes anything.
    """

    def __init__(
        self,
        source: ConfigSource,
        settings: Settings,
        *,
        apply_settings: Callable[[Settings], None],
        on_reload: Callable[[ReloadResult], None],
    ) -> None:
        self._source = source
        self._applied = self._file_settings = settings
        self._warnings = source.warnings
        self._apply_settings = apply_settings
        self._on_reload = on_reload
        self._requested = asyncio.Event()
        self._error = ""
        self._looks = 0
        #: Files that changed since the last reload that was accepted.
        self._edited: set[str] = set()
        self._stamps = {**read_stamps(source.files(settings)), **source.stamps}

    def request_reload(self) -> None:
        """Request a reload at the next step, changed or not."""
        self._requested.set()

    async def run(self) -> None:
        """Check for changes until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    seconds_to_tick(asyncio.get_running_loop().time(), _POLL_S)
                ):
                    await self._requested.wait()
            await self.step()

    async def step(self) -> None:
        """Check for changes once, and reload if there are any."""
        stamps = read_stamps(self._source.files(self._file_settings))
        is_due = stamps != self._stamps or self._requested.is_set()
        self._looks += 1
        if not is_due and not (self._error and self._looks >= _RETRY_LOOKS):
            return
        self._requested.clear()
        self._looks = 0
        self._edited |= {
            name for name, stamp in stamps.items() if self._stamps.get(name, stamp) != stamp
        }
        self._stamps = stamps
        result = await self._reload()
        if is_due or result.error != self._error:
            self._on_reload(result)
        self._error = result.error

    async def _reload(self) -> ReloadResult:
        restart: tuple[str, ...] = ()
        try:
            # In a thread: a long file takes longer than a request may wait, to read and to compare.
            read = await asyncio.to_thread(self._source.read)
            written = read.settings
            # Plugin files may be others, and are executed after this. What changes while it is read
            # is read at the next look.
            stamps = read_stamps(self._source.files(written))
            restart = await asyncio.to_thread(reloading.find_restart_fields, self._applied, written)
            if restart:
                await asyncio.to_thread(self._source.check_start, written)
            in_force, changes = await asyncio.to_thread(self._compare, written)
            self._apply_settings(in_force)
        except ConfigError as error:
            # What is new may lean on what the process does not have yet.
            more = f" (only a restart changes {', '.join(restart)})" if restart else ""
            return ReloadResult(error=f"{error}{more}")
        except Exception as error:  # noqa: BLE001 - a broken file must not end the process
            return ReloadResult(error=f"reading it raised {place_of(error)}")
        self._applied, self._file_settings = in_force, written
        self._stamps = {name: self._stamps.get(name, stamp) for name, stamp in stamps.items()}
        self._edited.clear()
        warnings = tuple(text for text in read.warnings if text not in self._warnings)
        self._warnings = read.warnings
        return ReloadResult(changes=changes, restart=restart, settings=in_force, warnings=warnings)

    def _compare(self, written: Settings) -> tuple[Settings, tuple[reloading.Change, ...]]:
        """Settings that are to be in force, and what they change."""
        in_force = reloading.apply_live_fields(self._applied, written)
        loader.check_compatible(in_force, where="the configuration")
        changes = reloading.find_changes(self._applied, in_force)
        return in_force, (*changes, *reloading.find_edited_plugins(in_force, self._edited))
