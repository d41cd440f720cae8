"""KV events and rendered prompts of a simulated engine, at a picker in a process of its own."""

from __future__ import annotations

import json

from extproc.demo import stack
from tests.e2e import http1, installation

PATH = "/v1/chat/completions"


async def test_events_and_rendered_prompts_arrive():
    """Blocks of an engine are known exactly, and prompts that were routed to it are mapped."""
    port, replay_port = (stack.free_port() for _ in range(2))
    section = f"kv_events: {{enabled: true, port: {port}, replay_port: {replay_port}}}"
    text = f"{{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, {section}}}"
    async with stack.stack() as engines:
        flags = ("--kv-events-port", str(port), "--kv-replay-port", str(replay_port))
        _, address = await engines.engine(*flags)
        async with installation.installed(address, arguments=["--config-text", text]) as fixture:
            messages = [{"role": "user", "content": "a question of many words " * 40}]
            body = json.dumps({"model": "demo", "max_tokens": 2, "messages": messages}).encode()
            assert (await http1.ask(fixture.port, PATH, body)).status == 200
            await fixture.until(
                lambda page: (
                    page[f'extproc_kv_event_blocks{{endpoint="{address}",rank="0"}}'] > 0
                    and 'extproc_kv_event_subscription_state{endpoint="'
                    f'{address}",rank="0",state="exact"}}'
                    in page
                    and page['extproc_mapped_prompts_total{result="mapped"}'] > 0
                )
            )
