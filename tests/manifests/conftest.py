"""All tests that lack a tool are skipped at one place: the summary shows one line for each tool."""

from pathlib import Path

import pytest

from tests.manifests import tools

HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Report missing tools as of this folder."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(tools.MissingTool):
        report.longrepr = (str(HERE), 0, str(call.excinfo.value))
    return report
