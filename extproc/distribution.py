"""The distribution: its name on the package index, its version and its extras.

The name differs from that of the package, because `extproc` on the index belongs to another
project. Every hint that tells how to install something is built here.
"""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from pathlib import Path

#: `project.name` of pyproject.toml.
NAME = "extproc-epp"


def installed_version() -> str | None:
    """The installed version; None in a checkout that is not installed."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return None


def install_command(extra: str) -> str:
    """The command that installs an extra here: `.venv/bin/python -m pip install 'extproc-epp[otel]'`."""
    return f"{program_path(Path(sys.executable).name)} -m pip install '{NAME}[{extra}]'"


def program_path(name: str) -> str:
    """Path of a program of this Python environment for a shell; a short one below its folder."""
    folder, here = Path(sys.executable).parent, Path.cwd()
    path = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return shlex.quote(str(path / name))
