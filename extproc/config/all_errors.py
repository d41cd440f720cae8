"""Collects every error of a configuration in one pass; `loader` alone stops at the first.

A wrong value is removed and the rest is read again. The removed value then has its default, so
the other errors are the same as if it had been corrected.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from extproc.config import validation
from extproc.config.loader import ConfigDocument
from extproc.errors import ConfigError

#: Errors that are shown (count); a file with more is another kind of file.
_MOST_ERRORS = 20

_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")

Read = TypeVar("Read")


def collect(
    document: ConfigDocument, read: Callable[[ConfigDocument], Read]
) -> tuple[Read | None, Sequence[ConfigError]]:
    """Read a configuration, and continue after errors as far as they can be separated.

    Args:
        document: The configuration as written.
        read: Reads a document, and raises ConfigError at the first error.

    Returns:
        The result of `read` without the wrong values, None if the last error has no place in the
        file; and the errors, in the order they occurred.
    """
    errors: list[ConfigError] = []
    removed: list[validation.Path] = []
    while len(errors) < _MOST_ERRORS:
        try:
            return read(document), errors
        except ConfigError as error:
            path = _path_of(error, document)
            original = _original(path, removed)
            if path and original in removed:  # its default is as wrong as the value was
                return None, errors
            if not _is_consequence(error, original, removed):
                head = document.where
                spelled = f"{head}: {validation.format_path(original)}" if path else error.where
                errors.append(_at(error, spelled))
            tree = _without(document.tree, path) if path else None
            if tree is None:
                return None, errors
            removed.append(original)
            document = msgspec.structs.replace(document, tree=tree)
    return None, errors


def _path_of(error: ConfigError, document: ConfigDocument) -> validation.Path:
    """Return the path of an error in the tree of a file; empty if it is unknown."""
    head = f"{document.where}: "
    if document.epp is not None or not error.where.startswith(head):
        return ()
    steps: list[validation.Step] = []
    for key, index in _STEP.findall(error.where.removeprefix(head).replace(": ", ".")):
        steps.append(int(index) if index else key)
    return tuple(steps)


def _original(path: validation.Path, removed: Sequence[validation.Path]) -> validation.Path:
    """Return the path in the file as written: indexes count the removed list items as well."""
    steps: validation.Path = ()
    for step in path:
        if isinstance(step, int):
            gone = {place[-1] for place in removed if place[:-1] == steps}
            index = -1
            for _ in range(step + 1):
                index += 1
                while index in gone:
                    index += 1
            steps = (*steps, index)
        else:
            steps = (*steps, step)
    return steps


def _is_consequence(
    error: ConfigError, path: validation.Path, removed: Sequence[validation.Path]
) -> bool:
    """Return True if a key is missing only because its wrong value was removed."""
    return error.wanted.startswith("the key ") and any(
        place[:-1] == path and error.wanted.startswith(f"the key {place[-1]}") for place in removed
    )


def _at(error: ConfigError, where: str) -> ConfigError:
    return ConfigError(where, wanted=error.wanted, got=error.got, fix=error.fix)


def _without(tree: object, path: validation.Path) -> dict[str, object] | None:
    """Copy a tree without one value; None if the path has no value."""
    remaining = copy.deepcopy(tree)
    below: object = remaining
    *steps, last = path
    try:
        for step in steps:
            below = below[step]  # type: ignore[index]  # what it is not raises below
        del below[last]  # type: ignore[attr-defined]  # the same
    except (KeyError, IndexError, TypeError):
        return None
    return remaining if isinstance(remaining, dict) else None
