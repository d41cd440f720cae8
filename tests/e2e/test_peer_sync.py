"""Two extproc processes that exchange requests directly: a conversation stays on its endpoint."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import grpc
import msgspec

from extproc.demo import stack
from tests.support import ext_proc_script, serving

#: Replicas that know nothing of each other agree on all by chance with 3**-8.
ENGINES, CONVERSATIONS = 3, 8


def turn(conversation: int, number: int) -> bytes:
    """Body of a turn: all turns of the conversation begin with the same long message."""
    messages = [
        {"role": "user", "content": f"conversation {conversation} " + f"word{conversation} " * 2000}
    ]
    for n in range(number):
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": f"{n}?"}]
    return json.dumps({"model": "demo", "messages": messages}).encode()


async def send(channel, http, pages: int, body: bytes) -> str:
    """Send a request and end it; returns the endpoint that was chosen."""
    stream = serving.Stream(channel)
    headers = {":method": "POST", ":path": "/v1/chat/completions"}
    await stream.say(
        ext_proc_script.request_headers(headers), ext_proc_script.request_body(body, ends=True)
    )
    await stream.hear(2)
    await stream.say(ext_proc_script.response_headers({":status": "200"}, ends=True))
    assert await stream.end() is grpc.StatusCode.OK
    async with http.get(f"http://127.0.0.1:{pages}/debug/decisions?limit=1") as answer:
        (record,) = (await answer.json())["decisions"]
    return record["endpoint"]


async def gauge(http, pages: int, name: str) -> float:
    async with http.get(f"http://127.0.0.1:{pages}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


async def until(read, holds) -> None:
    """Wait for a gauge."""
    async with asyncio.timeout(serving.LIMIT_S):
        while not holds(await read()):
            await asyncio.sleep(0.01)


async def test_the_next_turn_through_another_replica_goes_to_the_same_endpoint():
    """Without any store: each process names both, and skips itself."""
    grpc_ports = [stack.free_port() for _ in range(2)]
    pages = [stack.free_port() for _ in range(2)]
    async with stack.stack() as children, aiohttp.ClientSession() as http:
        engines = await asyncio.gather(*(children.engine() for _ in range(ENGINES)))
        text = msgspec.json.encode(
            {
                "apiVersion": "extproc/v1alpha1",
                "kind": "ExtProcConfig",
                "pool": {"endpoints": [address for _, address in engines]},
                # `adaptive` would send engines that compute nothing a first request each.
                "scheduling": {"strategy": "balanced"},
                "peer_sync": {"peers": [f"127.0.0.1:{port}" for port in pages]},
            }
        ).decode()
        await asyncio.gather(
            *(
                children.extproc(
                    *("--config-text", text, "--host", "127.0.0.1", "--secure-serving=false"),
                    *("--drain-timeout", "0s", "--grpc-port", str(grpc_port)),
                    *("--grpc-health-port", "0", "--metrics-port", str(pages_port)),
                )
                for grpc_port, pages_port in zip(grpc_ports, pages, strict=True)
            )
        )
        for port in pages:
            await until(lambda p=port: gauge(http, p, "extproc_peer_sync_peers"), (1.0).__eq__)
        channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}") for port in grpc_ports]
        chosen = {}
        for conversation in range(CONVERSATIONS):
            chosen[conversation] = await send(channels[0], http, pages[0], turn(conversation, 0))
        first = await gauge(http, pages[0], "extproc_prefix_index_blocks")
        assert first > 0.0
        await until(lambda: gauge(http, pages[1], "extproc_prefix_index_blocks"), first.__eq__)
        # The end of the last request is an event of its own.
        await until(
            lambda: gauge(http, pages[1], "extproc_peer_sync_inflight_requests"), (0.0).__eq__
        )
        for conversation in reversed(range(CONVERSATIONS)):
            endpoint = await send(channels[1], http, pages[1], turn(conversation, 1))
            assert endpoint == chosen[conversation]
        assert len(set(chosen.values())) > 1
        for channel in channels:
            await channel.close()
