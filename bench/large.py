"""Measures long prompts and long responses: CPU and memory of a picker.

    python -m bench.large [--write]

CPU per request at 400 kB prompts (100k tokens), peak memory per request in flight while bodies
are assembled, and CPU for answers of 10 and of 1,000 chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

import uvloop

from bench import rig
from bench.wire_load import load, post

PROMPT_BYTES = 400_000
HELD = 100
STREAMS = 100


async def long_prompts(seconds: float) -> dict[str, float]:
    """CPU per request; prompts alternate between a few, so the index works too."""
    async with rig.rig("fds") as running:
        body = rig.chat(PROMPT_BYTES)
        request = post("/v1/chat/completions", body)
        await load(running.port, request, connections=4, seconds=1)
        before = running.cpu_s()
        stats = await load(running.port, request, connections=4, seconds=seconds)
        used = running.cpu_s() - before
    assert not stats["failed"], stats
    return {
        "body_bytes": len(body),
        "cpu_ms": used / stats["requests"] * 1e3,
        "rps": stats["requests"] / stats["seconds"],
        "p50_ms": stats["p50"] * 1e3,
    }


async def memory() -> dict[str, float]:
    """Memory while `HELD` bodies are complete but for their last byte, and at the peak after."""
    async with rig.rig("fds") as running:
        bodies = [rig.chat(PROMPT_BYTES, salt=str(number)) for number in range(HELD)]
        warm = post("/v1/chat/completions", bodies[0])
        await load(running.port, warm, connections=1, seconds=0.5)
        before = running.memory_bytes()
        running.reset_peak()
        held = []
        for body in bodies:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(post("/v1/chat/completions", body)[:-1])
            await writer.drain()
            held.append((reader, writer))
        gathered = await _gathered(running.pages, HELD * (PROMPT_BYTES - 1))
        holding = running.memory_bytes()
        for (_, writer), body in zip(held, bodies, strict=True):
            writer.write(body[-1:])
        for reader, writer in held:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            writer.close()
        peak = running.memory_bytes("VmHWM")
    total = sum(len(body) for body in bodies)
    return {
        "requests": HELD,
        "gathered_bytes": gathered,
        "held_ratio": (holding - before) / total,
        "peak_ratio": (peak - before) / total,
    }


async def _gathered(pages: int, wanted: int) -> float:
    """Wait until the picker holds that many body bytes; returns how many."""
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", pages)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        page = (await reader.read()).decode()
        writer.close()
        held = float(page.partition("\nextproc_body_buffer_bytes ")[2].split("\n")[0])
        if held >= wanted:
            return held
        await asyncio.sleep(0.05)


async def chunks(count: int) -> float:
    """CPU seconds of the server for `STREAMS` answers of `count` chunks, all two seconds long.

    Scraping is off: it goes by time, not by chunks.
    """
    quiet = (
        "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, scrape: {enabled: false}, "
        "scheduling: {strategy: least-request}}"
    )
    async with rig.rig("fds", chunks=count, arguments=("--config-text", quiet)) as running:
        request = post("/v1/chat/completions", rig.chat(2000))
        await _answers(running.port, request)
        before = running.cpu_s()
        rounds = 4
        for _ in range(rounds):
            await _answers(running.port, request)
        return (running.cpu_s() - before) / rounds


async def _answers(port: int, request: bytes) -> None:
    async def request_one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()

    await asyncio.gather(*(request_one() for _ in range(STREAMS)))


async def main(*, write: bool) -> None:
    prompts = [await long_prompts(4) for _ in range(3)]
    prompts.sort(key=lambda row: row["cpu_ms"])
    held = await memory()
    few, many = [], []
    for _ in range(4):
        few.append(await chunks(10))
        many.append(await chunks(1000))
    ratio = statistics.median(m / f for m, f in zip(many, few, strict=True))
    figures = {
        "prompts_400kB": {key: round(value, 2) for key, value in prompts[1].items()},
        "memory": {key: round(value, 2) for key, value in held.items()},
        "chunks": {
            "streams": STREAMS,
            "cpu_s_10": round(statistics.median(few), 4),
            "cpu_s_1000": round(statistics.median(many), 4),
            "ratio_median": round(ratio, 3),
        },
    }
    for name, figure in figures.items():
        print(name, figure)
    if write:
        rig.write("large", "python -m bench.large --write", figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    uvloop.run(main(write=parser.parse_args().write))
