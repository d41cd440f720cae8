from __future__ import annotations

import logging

import pytest


@pytest.fixture
def level():
    """A reload sets the level of our logger, which is the process's."""
    ours = logging.getLogger("extproc")
    before = ours.level
    ours.setLevel(logging.INFO)
    yield
    ours.setLevel(before)
