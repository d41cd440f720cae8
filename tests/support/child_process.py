"""Async tests in an event loop that lives as long as their module.

A module is the unit: `make test` has xdist keep it on one worker (`--dist loadfile`), what it starts
runs once, and async tests run in the loop that watches the module's processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect

import pytest

#: Seconds one test, or the start or end of an installation, may take on a busy machine.
LIMIT_S = 900.0


class Live:
    """A module's event loop."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner

    def run(self, coroutine):
        """Run to the end, within the limit."""

        async def limited():
            async with asyncio.timeout(LIMIT_S):
                return await coroutine

        return self._runner.run(limited())

    @contextlib.contextmanager
    def holding(self, context):
        """Enter an asynchronous context for longer than one run."""
        value = self.run(context.__aenter__())
        try:
            yield value
        finally:
            self.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="module", autouse=True)
def live():
    with asyncio.Runner() as runner:
        yield Live(runner)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run async tests in the loop of their module."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    pyfuncitem.funcargs["live"].run(pyfuncitem.obj(**arguments))
    return True
