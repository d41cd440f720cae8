from __future__ import annotations

import pathlib
from collections import deque

from extproc.demo import stack


def test_a_port_that_another_process_was_given_is_not_given(monkeypatch):
    """Its server may not have bound it yet."""
    taken, other = stack.free_port(), stack.free_port()
    stack._claims.pop().close()
    monkeypatch.setattr(stack, "_recent_ports", deque())  # as in another process
    monkeypatch.setattr(stack, "_PORTS", [taken] * 1000 + [other])
    assert stack.free_port() == other


def test_matches_are_bounded():
    descriptors = pathlib.Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(stack.MAX_CLAIMS + 10):
        stack.free_port()
    assert len(list(descriptors.iterdir())) <= before + stack.MAX_CLAIMS
