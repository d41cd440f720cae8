"""The pages on the metrics port."""

from __future__ import annotations

import asyncio

from extproc.cli import stack
from extproc.config import load
from extproc.server import app
from tests.e2e import http1

HEAD = "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n"


def test_pages_name_no_software():
    """No answer, be it a page, a 404 or a refusal, has a Server header."""

    async def test() -> None:
        port = stack.free_port()
        server = f"server: {{host: 127.0.0.1, metrics_port: {port}}}\n"
        settings = load.settings(load.parse(HEAD + server, where="f.yaml"))
        picker = app.Picker(settings)
        await picker._start_pages(settings.server)
        try:
            for path, status in (("/healthz", 200), ("/metrics", 200), ("/nothing", 404)):
                answer = await http1.ask(port, path)
                assert answer.status == status
                assert answer.head.all("server") == []
        finally:
            await picker._pages.cleanup()

    asyncio.run(test())
