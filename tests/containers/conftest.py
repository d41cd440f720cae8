"""Tests that lack Docker are skipped at one place: the summary shows one line."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Report the missing Docker as of this folder."""
    report = yield
    if call.excinfo is not None and call.excinfo.typename == "NoDocker":
        report.longrepr = (str(HERE), 0, str(call.excinfo.value))
    return report
