"""`extproc demo-scale`: from no engine to some and back, and no process is left behind."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest

from tests.e2e import installation
from tests.e2e.test_demo import session_of

ROOT = installation.SHIPPED.parent


@pytest.mark.slow
async def test_the_demo_scales_from_zero_and_back(tmp_path):
    """The first request is held and answered, none is lost, and at the end no engine is left."""
    plot = tmp_path / "charts.png"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", "demo-scale", "--short", "--plot", str(plot)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    message, _ = await process.communicate()
    text = message.decode()
    assert process.returncode == 0, text
    assert re.search(r"held while an engine started, answered with 200 in \d", text), text
    assert re.search(r"\d+ requests, 0 lost", text), text
    assert "No engine is left." in text
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert not session_of(process.pid)
