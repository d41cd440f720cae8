"""Programs that neither pip nor this repository brings: tests are skipped where they are missing."""

from __future__ import annotations

import os

import pytest


class MissingProgram(pytest.skip.Exception):
    """A program is missing; the summary has one line for all tests of a folder that lack it."""


def missing(reason: str, variable: str) -> MissingProgram:
    """The skip of a test; fails where CI set the variable to 1, since it has installed the program."""
    if os.environ.get(variable) == "1":
        pytest.fail(reason)
    return MissingProgram(reason)
