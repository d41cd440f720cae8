"""An event loop whose time passes only while it has nothing to do, or where a test lets it pass."""

from __future__ import annotations

import asyncio
import functools
import selectors


class _InstantSelector(selectors.DefaultSelector):
    """Waits for no file: the time that it would wait for passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_s = 0.0

    def select(self, timeout=None):
        """Files that are ready already."""
        ready = super().select(0)
        if timeout is None and not ready:
            raise RuntimeError("the loop would wait for ever: no timer is set, nothing is ready")
        if timeout and not ready:
            self.passed_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time.

    Args:
        begins_s: Its time at first.
    """

    def __init__(self, begins_s: float = 0.0) -> None:
        self._begins_s = begins_s
        self._virtual = _InstantSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds."""
        return self._begins_s + self._virtual.passed_s

    def compute(self, seconds: float) -> None:
        """Let time pass in which the loop is held, as if a callback computed for so long."""
        self._virtual.passed_s += seconds


def in_virtual_time(begins_s=0.0):
    """Decorate an async test, which then has a loop on virtual time of its own."""

    def decorate(test):
        @functools.wraps(test)
        def run(**fixtures):
            with asyncio.Runner(loop_factory=lambda: VirtualLoop(begins_s)) as runner:
                runner.run(test(**fixtures))

        return run

    return decorate
