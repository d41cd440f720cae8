"""Sends requests, a few at a time, and notes what came back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from bench.real_vllm.counters import EngineAnswer
from bench.real_vllm.workload import WorkloadRequest


async def play(
    session: aiohttp.ClientSession,
    urls: Sequence[str],
    asks: Sequence[WorkloadRequest],
    *,
    at_once: int,
    in_bursts: bool = False,
) -> list[EngineAnswer]:
    """Send all, in order, so many at the same time.

    Args:
        session: Its timeout bounds each request.
        urls: Where to, base URLs.
        asks: What to send.
        at_once: Requests in flight at most.
        in_bursts: Send so many together, and the next ones once all of them are answered.
    """
    places = asyncio.Semaphore(at_once)

    async def request_one(url: str, ask: WorkloadRequest) -> EngineAnswer:
        async with places:
            return await send(session, url, ask)

    pairs = list(zip(urls, asks, strict=True))
    size = at_once if in_bursts else len(pairs)
    answers: list[EngineAnswer] = []
    for start in range(0, len(pairs), size):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(request_one(*pair)) for pair in pairs[start : start + size]]
        answers += [task.result() for task in tasks]
    return answers


async def send(session: aiohttp.ClientSession, url: str, ask: WorkloadRequest) -> EngineAnswer:
    """Send one request; an error inside a stream counts with its own status."""
    began = time.perf_counter()
    first_s = 0.0
    usage: dict[str, Any] = {}
    try:
        async with session.post(f"{url}/v1/chat/completions", json=ask.body()) as response:
            status = response.status
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                first_s = first_s or time.perf_counter() - began
                event = msgspec.json.decode(line[6:])
                usage = event.get("usage") or usage
                if "error" in event:
                    status = int(event["error"].get("code") or 500)
            decision = response.headers.get("x-extproc-decision", "")
    except (aiohttp.ClientError, TimeoutError):
        return EngineAnswer(status=0)
    details = usage.get("prompt_tokens_details") or {}
    return EngineAnswer(
        status=status if usage else status if status != 200 else 0,
        began_s=began,
        ttft_s=first_s,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens"),
        decision=decision,
    )
