"""Endpoint list file, loaded when its stat stamp changes.

The stamp follows symbolic links, so the swap by which Kubernetes updates a mounted ConfigMap is a
change like any other.
"""

from __future__ import annotations

import os
import pathlib

import msgspec
import yaml

from extproc.discovery import endpoint_list
from extproc.errors import ConfigError

#: The C loader reads a list of 10,000 endpoints some ten times faster; not every wheel has it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

#: What the safe loaders raise: their own errors, and bare ones on tagged nonsense (`!!int ""`) and
#: dates that cannot be. The loader of the configuration goes by the same list.
YAML_FAILURES = (
    yaml.YAMLError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class Stamp(msgspec.Struct, frozen=True):
    """Stat fields that change with the file; all zero for a missing file."""

    modified_ns: int = 0
    size: int = 0
    inode: int = 0


def stamp(path: pathlib.Path) -> Stamp:
    """Returns the current stamp of a file."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a Path method in a loop of one call a second is no clearer
    except OSError:
        return Stamp()
    return Stamp(status.st_mtime_ns, status.st_size, status.st_ino)


def load(path: pathlib.Path, *, limit_bytes: int) -> tuple[endpoint_list.EndpointListEntry, ...]:
    """Loads a YAML or JSON file.

    Args:
        limit_bytes: Longest file taken.

    Raises:
        ConfigError: If it cannot be read, is too long, is no YAML or no list of endpoints.
    """
    where = str(path)
    try:
        with path.open("rb") as file:
            text = file.read(limit_bytes + 1)
    except OSError as error:
        raise ConfigError(
            where,
            wanted="an endpoints file",
            got=error.strerror or type(error).__name__,
            fix="check the path and its permissions",
        ) from error
    if len(text) > limit_bytes:
        raise ConfigError(
            where,
            wanted=f"at most {limit_bytes} bytes",
            got="more",
            fix="split the pool or raise the limit",
        )
    try:
        # Safe loaders only, so the rule against yaml.load does not apply.
        document = yaml.load(text, Loader=_LOADER)  # noqa: S506
    except YAML_FAILURES as error:
        raise ConfigError(
            where,
            wanted="YAML or JSON",
            got=" ".join(str(error).split())[:200] or type(error).__name__,
            fix="correct the syntax",
        ) from error
    return endpoint_list.from_document(document, where=where)
