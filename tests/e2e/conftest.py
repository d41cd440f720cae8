"""One installation for each module, in the event loop of `tests.support.child_process`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e import backend


def pytest_collection_modifyitems(items):
    """Mark what drives Envoy."""
    here = str(Path(__file__).parent) + os.sep
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.e2e)


def _binaries():
    """The default Envoy, and behind the mark `versions` each of those that are installed."""
    yield pytest.param("", id="default")
    folder = os.environ.get("EXTPROC_ENVOYS", "")
    for result in sorted(Path(folder).resolve().glob("*/envoy/_bin/envoy")) if folder else []:
        yield pytest.param(str(result), id=result.parts[-4], marks=pytest.mark.versions)


@pytest.fixture(scope="module", params=_binaries())
def binary(request):
    """Path of an Envoy; empty for the default one."""
    return request.param


@pytest.fixture(scope="module")
def served(live):
    """A backend that answers all it is asked."""
    with live.holding(backend.backend()) as item:
        yield item
