"""Uploads that stall in front of Envoy."""

from __future__ import annotations

import pytest

from tests.e2e import http1, installation

IMPATIENT = installation.UNSCRAPED.removesuffix("}") + ", limits: {body_idle_s: 0.2}}"

#: What the client sends before it stops. Buffered bodies come in one piece.
STALLED = [
    ("original-dst.yaml", ()),
    ("original-dst.yaml", (b'{"model":"demo",',)),
    ("original-dst-buffered.yaml", (b'{"model":"demo",',)),
]


@pytest.mark.parametrize(("template", "chunks"), STALLED)
async def test_servicer_answers_an_upload_that_stalls_with_408(template, chunks):
    """A client that sends no more gets an error in JSON, and nothing of its request stays."""
    async with installation.installed(
        "127.0.0.1:9", template=template, arguments=["--config-text", IMPATIENT]
    ) as fixture:
        async with http1.calling(fixture.port) as call:
            await call.start("POST", "/v1/chat/completions", [], chunked=True)
            for chunk in chunks:
                await call.chunk(chunk)
            answer = await call.answer()
        assert answer.status == 408
        assert answer.json()["error"]["code"] == 408
        await fixture.settled()
