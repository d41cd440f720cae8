"""The event loop of a module, and one line for all tests that lack Prometheus."""

from pathlib import Path

import pytest

from tests.monitoring import prometheus
from tests.support.child_process import live, pytest_pyfunc_call

__all__ = ["live", "pytest_pyfunc_call"]

HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Report a missing Prometheus as of this folder."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(prometheus.NoPrometheus):
        report.longrepr = (str(HERE), 0, str(call.excinfo.value))
    return report
