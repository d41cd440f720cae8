"""The browser of a module."""

import pytest

from tests.console import browser
from tests.support.child_process import live, pytest_pyfunc_call

__all__ = ["live", "pytest_pyfunc_call"]


@pytest.fixture(scope="module")
def chromium(live):
    """A real Chromium."""
    browser.need()
    with live.holding(browser.chromium()) as item:
        yield item
