"""Sends requests at a fixed rate from a process of its own, and records each outcome.

python -m bench.steady_client PORT RATE SECONDS TOKENS FILE

Each answer has TOKENS. FILE becomes JSON: a list of rows as of `ClientOutcome`. Times are of the
system's monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import msgspec

from tests.e2e import http1

PATH = "/v1/completions"

#: Response header in which Envoy names the endpoint that it took.
UPSTREAM = "x-upstream"

#: Seconds after which a request counts as failed.
LIMIT_S = 300.0

#: Conversations that go on beside each other, which share the beginning of their prompts.
_CONVERSATIONS = 20


class ClientOutcome(msgspec.Struct, frozen=True, array_like=True):
    """One request.

    Attributes:
        begun: Monotonic seconds at which it should have been sent: a late client is no excuse.
        ended: Monotonic seconds at which its answer was complete, or it had failed.
        status: HTTP status; 0 without an answer.
        upstream: `ip:port` that Envoy took; empty where it says none.
    """

    begun: float
    ended: float
    status: int
    upstream: str


async def request_once(port: int, number: int, begun: float, tokens: int) -> ClientOutcome:
    """Send one request. Every fourth is for the pool of the cluster, where there is one."""
    prompt = f"conversation {number % _CONVERSATIONS}: " + "a word and another one, " * 40
    body = {"model": "demo", "prompt": prompt + str(number), "max_tokens": tokens}
    headers = [("content-type", "application/json"), ("x-pool", "kube" if number % 4 == 3 else "")]
    status, upstream = 0, ""
    try:
        async with asyncio.timeout(LIMIT_S):
            answer = await http1.ask(port, PATH, json.dumps(body).encode(), headers=headers)
        status, upstream = answer.status, answer.head.get(UPSTREAM)
    except (OSError, TimeoutError, AssertionError, asyncio.IncompleteReadError):
        pass
    return ClientOutcome(begun, time.monotonic(), status, upstream)


async def main(port: int, rate_per_s: float, seconds: float, tokens: int, file: Path) -> None:
    """Send at the rate, however long answers take, and write the file at the end."""
    print("steady client is ready", flush=True)
    start, tasks = time.monotonic(), []
    for number in range(int(seconds * rate_per_s)):
        begun = start + number / rate_per_s
        await asyncio.sleep(max(0.0, begun - time.monotonic()))
        tasks.append(asyncio.ensure_future(request_once(port, number, begun, tokens)))
    file.write_bytes(msgspec.json.encode(await asyncio.gather(*tasks)))
    print("steady client is done", flush=True)


if __name__ == "__main__":
    port, rate, seconds, tokens, file = sys.argv[1:]
    asyncio.run(main(int(port), float(rate), float(seconds), int(tokens), Path(file)))
