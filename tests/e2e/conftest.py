"""One event loop and one installation for each module.

A module is the unit: xdist keeps it on one worker, its installation starts once, and async tests
run in the loop that watches the installation's processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from pathlib import Path

import pytest

#: Seconds one test, or the start or end of an installation, may take on a busy machine.
LIMIT_S = 60.0


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


def pytest_collection_modifyitems(items):
    """Mark what drives Envoy, and keep each module on one worker."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _binaries():
    """The default Envoy, and behind the mark `versions` each of those that are installed."""
    yield pytest.param("", id="default")
    folder = os.environ.get("EXTPROC_ENVOYS", "")
    for found in sorted(Path(folder).resolve().glob("*/envoy/_bin/envoy")) if folder else []:
        yield pytest.param(str(found), id=found.parts[-4], marks=pytest.mark.versions)


@pytest.fixture(scope="module", params=_binaries())
def binary(request):
    """Path of an Envoy; empty for the default one."""
    return request.param
