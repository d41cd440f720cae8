"""Follows the configuration: reads it again when its files change or SIGHUP asks for it.

A shell. Everything is read, checked and built before anything is swapped, and nothing waits between
the two, so a request is routed by the old configuration or by the new one. What is wrong leaves the
old one in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

import msgspec

from extproc.config import sources
from extproc.config.settings import Settings
from extproc.dispatch import claims
from extproc.errors import ConfigError

#: Seconds between two looks at the files. A stat costs microseconds, and a mounted ConfigMap takes
#: a minute to arrive.
_LOOK_S = 1.0

#: Sections that take effect at once.
_LIVE = frozenset({"health", "scheduling", "answers", "explain", "log", "conformance"})

#: Fields of other sections that take effect at once.
_LIVE_FIELDS = {
    "limits": frozenset({"body_idle_s", "max_body_bytes", "max_streams"}),
    "pool": frozenset({"objectives", "rewrites"}),
    "scrape": frozenset({"stale_after_s"}),
}

#: What identifies the content of a file without reading it; None when it is not there.
_Stamp = tuple[int, int, int] | None


class Source(msgspec.Struct, frozen=True):
    """Where a running server's configuration comes from.

    Attributes:
        files: Gives the files to watch, in the light of the settings in force.
        reread: Reads and checks everything again, flags included.
    """

    files: Callable[[Settings], Sequence[str]]
    reread: Callable[[], Settings]


class Reloaded(msgspec.Struct, frozen=True):
    """What came of one look at changed files.

    Attributes:
        error: Why the old configuration stays; empty when the new one is in force.
        restart: Settings that differ and only take effect after a restart.
    """

    error: str = ""
    restart: tuple[str, ...] = ()


class Reloader:
    """Keeps a server's configuration up to date.

    Args:
        source: Where it comes from.
        settings: What is in force.
        adopt: Puts settings in force; raises ConfigError before it changes anything.
        on_reload: Told of every attempt.
    """

    def __init__(
        self,
        source: Source,
        settings: Settings,
        *,
        adopt: Callable[[Settings], None],
        on_reload: Callable[[Reloaded], None],
    ) -> None:
        self._source = source
        self._settings = settings
        self._started = settings
        self._adopt = adopt
        self._on_reload = on_reload
        self._asked = asyncio.Event()
        self._stamps = self._look()

    def ask(self) -> None:
        """Read again at the next step, changed or not."""
        self._asked.set()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), _LOOK_S)
            await self.step()

    async def step(self) -> None:
        """Look once."""
        stamps = self._look()
        if stamps == self._stamps and not self._asked.is_set():
            return
        self._asked.clear()
        self._stamps = stamps
        try:
            settings = self._source.reread()
            self._adopt(settings)
        except ConfigError as error:
            self._on_reload(Reloaded(error=str(error)))
            return
        self._settings = settings
        # Plugin files may be others now.
        self._stamps = self._look()
        self._on_reload(Reloaded(restart=tuple(pending(self._started, settings))))

    def _look(self) -> dict[str, _Stamp]:
        return {name: _stamp(name) for name in self._source.files(self._settings)}


def pending(running: Settings, wanted: Settings) -> Iterator[str]:
    """Settings that differ and cannot change while a server runs, spelled as in the file.

    Args:
        running: What the server was started with.
        wanted: What the file says now.
    """
    for section in running.__struct_fields__:
        old, new = getattr(running, section), getattr(wanted, section)
        if section in _LIVE or old == new:
            continue
        if isinstance(old, tuple):
            # Of pools their claims and rules are live, and which there are is not.
            if list(map(_fixed, old)) != list(map(_fixed, new)):
                yield section
            continue
        if not isinstance(old, msgspec.Struct):
            yield section
            continue
        live = _LIVE_FIELDS.get(section, frozenset())
        for field in old.__struct_fields__:
            if field not in live and getattr(old, field) != getattr(new, field):
                yield f"{section}.{field}"


def _fixed(pool: sources.Pool) -> sources.Pool:
    """A pool without what takes effect at once."""
    return msgspec.structs.replace(
        pool, match=claims.Claim(), scheduling=None, objectives={}, rewrites=()
    )


def _stamp(name: str) -> _Stamp:
    """Follows symbolic links: a ConfigMap is swapped by turning one around."""
    try:
        found = os.stat(name)  # noqa: PTH116 - a Path would be made for every look
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
