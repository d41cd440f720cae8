"""The browser of a module, and one line for all tests that lack it."""

from pathlib import Path

import pytest

from tests.console import browser
from tests.support.child_process import live, pytest_pyfunc_call

__all__ = ["live", "pytest_pyfunc_call"]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def chromium(live):
    """A real Chromium."""
    browser.need()
    with live.holding(browser.chromium()) as item:
        yield item


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Report a missing Chromium as of this folder."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(browser.NoChromium):
        report.longrepr = (str(HERE), 0, str(call.excinfo.value))
    return report
