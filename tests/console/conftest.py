"""The browser of a module."""

import pytest

from tests.console import browser


@pytest.fixture(scope="module")
def chromium(live):
    """A real Chromium."""
    browser.need()
    with live.holding(browser.chromium()) as item:
        yield item
