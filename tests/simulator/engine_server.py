"""A served engine and a client for one test."""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp
import msgspec

from extproc.simulator import profiles
from extproc.simulator.http import server

DEMO = profiles.PROFILES["demo"]


@contextlib.asynccontextmanager
async def engine(*, speed=10_000.0, profile=DEMO, machine=None, **facts):
    """A server on a free port and a session with its base URL; `machine` changes the profile."""
    profile = msgspec.structs.replace(profile, **(machine or {}))
    settings = server.EngineServerSettings(profile=profile, speed=speed, **facts)
    async with server.serving(settings) as engine_server:
        base = f"http://127.0.0.1:{engine_server.port}"
        async with aiohttp.ClientSession(base) as client:
            yield engine_server, client


async def until(fact):
    """Let the loop run until a fact holds."""
    while not fact():
        await asyncio.sleep(0)


async def leave(*tasks):
    """Give up requests under way, as a client that goes away."""
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await task).close()


def chat(*texts, **more):
    """A chat body with alternating user and assistant texts."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"model": "demo", "messages": messages, **more}


async def events(response):
    """The `data:` payloads of a stream: decoded JSON, or the text [DONE]."""
    text = (await response.read()).decode()
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in data]
