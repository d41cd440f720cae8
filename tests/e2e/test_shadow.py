"""A shadow beside the strategy that routes, on real streams: compared, and without effect."""

from __future__ import annotations

import asyncio
import json

from extproc.demo import stack
from tests.e2e import http1, installation

PATH = "/v1/chat/completions"
COUNT = 20

CONFIG = (
    "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, "
    "scheduling: {strategy: round-robin, shadow: {strategy: adaptive, sample_ratio: 1.0}}}"
)


async def test_a_shadow_compares_and_routes_nothing():
    """Requests go round as the strategy says, and each of them is compared."""
    async with stack.stack() as engines:
        addresses = [(await engines.engine())[1] for _ in range(2)]
        async with installation.installed(
            *addresses, arguments=("--config-text", CONFIG)
        ) as fixture:
            for number in range(COUNT):
                messages = [{"role": "user", "content": f"hello {number} " * 50}]
                body = json.dumps({"model": "demo", "max_tokens": 2, "messages": messages})
                assert (await http1.ask(fixture.port, PATH, body.encode())).status == 200
            for address in addresses:
                name = f'extproc_routed_requests_total{{endpoint="{address}"}}'
                assert (await fixture.metrics())[name] == COUNT / 2
            async with asyncio.timeout(300):
                while True:
                    page = (await http1.ask(fixture.pages, "/debug/shadow")).json()["pools"][""]
                    if sum(page["results"].values()) == COUNT:
                        break
                    await asyncio.sleep(0.05)
            assert set(page["results"]) <= {"agreed", "differed"}
            assert page["seconds"] > 0.0
