"""Comparison of two configurations for `extproc check --diff`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from extproc.config import loader, profile_builder, reloading
from extproc.config.settings import Settings
from extproc.errors import ConfigError

_LIVE, _RESTART = "live", "needs a restart"


class Comparison(msgspec.Struct, frozen=True):
    """Effect of a reload from one configuration to another.

    Attributes:
        file: The file of the configuration that runs.
        changes: Every field that differs.
        refusal: Why reading the other one would be refused; empty if it would not be.
    """

    file: str
    changes: tuple[reloading.Change, ...]
    refusal: str

    def to_lines(self) -> Iterator[str]:
        """The comparison for people."""
        if not self.changes:
            yield f"nothing differs from {self.file}"
            return
        longest = max(len(change.path) for change in self.changes)
        yield f"compared with {self.file}, as if that was running"
        for change in self.changes:
            effect = _LIVE if change.is_live else _RESTART
            yield (
                f"  {effect:<{len(_RESTART)}}  {change.path:<{longest}}  "
                f"{change.before} -> {change.after}"
            )
        num_live = sum(change.is_live for change in self.changes)
        num_restart = len(self.changes) - num_live
        yield (
            f"{_fields(num_live)} in force once the file is read again, "
            f"{_fields(num_restart)} after a restart"
        )
        if self.refusal:
            yield f"refused until the restart, if it is read again: {self.refusal}"


def compare(running: Settings, wanted: Settings, *, where: str) -> Comparison:
    """Compare two configurations.

    Args:
        running: What a process was started with.
        wanted: What it reads.
        where: The file of `running`, for people.
    """
    changes = tuple(reloading.changes(running, wanted))
    return Comparison(where, changes, refusal(running, wanted))


def refusal(running: Settings, wanted: Settings) -> str:
    """Reason for which a reload would be rejected; empty if it would succeed.

    What is new and live may lean on what needs a restart.
    """
    merged = reloading.in_force(running, wanted)
    try:
        loader.check_compatible(merged, where="the live fields with what is running")
        profile_builder.build_profile(merged, where="the live fields with what is running")
    except ConfigError as error:
        return str(error)
    return ""


def _fields(count: int) -> str:
    return f"{count} field" if count == 1 else f"{count} fields"
