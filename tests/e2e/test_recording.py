"""Recordings of decisions behind a real Envoy."""

from __future__ import annotations

import asyncio
import json

import pytest

from extproc.simulator import replay
from tests.e2e import http1, installation
from tests.support.canary import CANARY

PATH = "/v1/chat/completions"
CHAT = json.dumps(
    {"model": "m", "user": CANARY, "messages": [{"role": "user", "content": CANARY * 50}]}
).encode()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("recording") / "decisions.jsonl"


@pytest.fixture(scope="module")
def place(live, served, file):
    config = f"{installation.UNSCRAPED[:-1]}, decisions: {{record: {{file: {file}}}}}}}"
    arguments = ("--config-text", config)
    with live.holding(installation.installed(served.address, arguments=arguments)) as running:
        yield running


async def test_requests_are_recorded_without_their_text(place, served, file):
    """Each has a decision that can be made again, and an end with its status."""
    name = 'extproc_recorded_rows_total{result="recorded"}'
    for turn in range(1, 6):
        headers = [("x-session-id", CANARY)]
        assert (await http1.ask(place.port, PATH, CHAT, headers=headers)).status == 200
        # The client may have its answer long before the picker sees the end.
        await place.until(lambda metrics, rows=2 * turn: metrics.get(name, 0) == rows)
    async with asyncio.timeout(300):
        while (recorded := file.read_bytes()).count(b'"kind":"end"') < 5:
            await asyncio.sleep(0.05)
    assert CANARY.encode() not in recorded
    ends = [json.loads(line) for line in recorded.splitlines() if b'"kind":"end"' in line]
    assert [end["status"] for end in ends] == ["200"] * 5
    loaded = replay.load(file, strategies=(), configs=())
    assert [(a.decisions, a.ratio) for a in loaded.agreements] == [(5, 1.0)]
    assert len(loaded.traffic.sessions) == 1
