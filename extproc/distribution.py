"""The distribution: its name on the package index, its version and its extras.

The name differs from that of the package, because `extproc` on the index belongs to another
project. Every hint that tells how to install something is built here.
"""

from __future__ import annotations

from importlib import metadata

#: `project.name` of pyproject.toml.
NAME = "extproc-epp"


def installed_version() -> str | None:
    """The installed version; None in a checkout that is not installed."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return None


def install_command(extra: str) -> str:
    """The command that installs an extra, such as `pip install 'extproc-epp[redis]'`."""
    return f"pip install '{NAME}[{extra}]'"
