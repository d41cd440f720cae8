"""What `extproc check --diff` prints: two configurations beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.config import load, profiles, reloading
from extproc.config.settings import Settings
from extproc.errors import ConfigError

_LIVE, _RESTART = "live", "needs a restart"


def lines(running: Settings, wanted: Settings, *, where: str) -> Sequence[str]:
    """What a process does that runs one configuration and reads another one again.

    Args:
        running: What it was started with.
        wanted: What it reads.
        where: The file of `running`, for people.
    """
    changes = list(reloading.changes(running, wanted))
    if not changes:
        return [f"nothing differs from {where}"]
    longest = max(len(change.path) for change in changes)
    found = [f"compared with {where}, as if that was running"]
    for change in changes:
        effect = _LIVE if change.is_live else _RESTART
        found.append(
            f"  {effect:<{len(_RESTART)}}  {change.path:<{longest}}  "
            f"{change.before} -> {change.after}"
        )
    num_live = sum(change.is_live for change in changes)
    num_restart = len(changes) - num_live
    found.append(
        f"{_fields(num_live)} in force once the file is read again, "
        f"{_fields(num_restart)} after a restart"
    )
    return found


def refusal(running: Settings, wanted: Settings) -> str:
    """Why reading it again would be refused; empty if it would not be.

    What is new and live may lean on what needs a restart.
    """
    merged = reloading.in_force(running, wanted)
    try:
        load.together(merged, where="the live fields with what is running")
        profiles.resolve(merged, where="the live fields with what is running")
    except ConfigError as error:
        return str(error)
    return ""


def _fields(count: int) -> str:
    return f"{count} field" if count == 1 else f"{count} fields"
