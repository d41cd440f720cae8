"""Measures the CPU of scraping N endpoints once a second, and of parsing one page.

    python bench/scrape.py [--endpoints 100] [--seconds 10] [--chunked] [--loop uvloop] [--json]

The pages are served by another process; only this process's CPU time counts, kernel time included.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import pathlib
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import uvloop

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from extproc.endpoint import Endpoint
from extproc.pool import store
from extproc.scrape import client, metrics_page, schedule, scraper

PAGE = pathlib.Path(__file__).parents[1] / "tests/data/vllm-0.32-after-lora-load.txt"


async def serve(count: int, *, chunked: bool) -> None:
    body = PAGE.read_bytes()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4; charset=utf-8\r\n"
    if chunked:
        answer = head + b"transfer-encoding: chunked\r\n\r\n"
        answer += b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    else:
        answer = head + b"content-length: %d\r\n\r\n" % len(body) + body

    class PageServer(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            if data.endswith(b"\r\n\r\n"):
                self.transport.write(answer)

    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(PageServer, "127.0.0.1", 0) for _ in range(count)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    # The parent holds our standard input; we leave when it does.
    await loop.run_in_executor(None, sys.stdin.read)


async def measure(ports: list[int], seconds: float) -> dict:
    outcomes: dict[str, int] = {}
    latencies: list[float] = []

    def note(fact: scraper.ScrapeResult) -> None:
        outcomes[fact.outcome] = outcomes.get(fact.outcome, 0) + 1
        latencies.append(fact.seconds)

    pool = store.PoolStore(lambda _: None)
    pool.set_endpoints([Endpoint(f"127.0.0.1:{port}") for port in ports], time.monotonic())
    settings = scraper.ScraperSettings(
        schedule=schedule.ScrapeSchedule(fast_s=1.0, slow_s=1.0, scrapes_per_s=2.0 * len(ports))
    )
    http = client.ScrapeClient(timeout_s=settings.timeout_s, cap_bytes=settings.cap_bytes)
    subject = scraper.Scraper(
        settings, pool, client=http, clock=time.monotonic, rng=random.Random(1), on_result=note
    )
    task = asyncio.get_running_loop().create_task(subject.run())
    await asyncio.sleep(2.5)
    outcomes.clear()
    latencies.clear()
    began, cpu = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    wall, used = time.monotonic() - began, time.process_time() - cpu
    counted, took = dict(outcomes), sorted(latencies)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    scrapes = sum(counted.values())
    return {
        "outcomes": counted,
        "scrapes_per_s": round(scrapes / wall, 1),
        "cpu_share_percent": round(100 * used / wall, 2),
        "cpu_us_per_scrape": round(1e6 * used / scrapes, 1),
        "scrape_ms_p50": round(1e3 * statistics.median(took), 3),
        "scrape_ms_p99": round(1e3 * took[int(0.99 * len(took))], 3),
    }


def parse(repeats: int) -> dict:
    """Reading of the pages of an engine on which every value changes, and of one that idles."""
    text = PAGE.read_bytes()
    other = re.sub(rb"[0-9](?=\n)", lambda digit: b"%d" % ((int(digit[0]) + 1) % 10), text)
    took, same_took = _time_reads((text, other), repeats), _time_reads((text,), repeats)
    return {
        "page_bytes": len(text),
        "parse_us_min": round(1e6 * took[0], 1),
        "parse_us_p50": round(1e6 * took[len(took) // 2], 1),
        "parse_us_p99": round(1e6 * took[int(0.99 * len(took))], 1),
        "parse_unchanged_us_p50": round(1e6 * same_took[len(same_took) // 2], 1),
    }


def _time_reads(pages: Sequence[bytes], repeats: int) -> list[float]:
    """Seconds that reads of these pages in turns take, in ascending order."""
    reader = metrics_page.MetricsPageReader()
    took = []
    for _, page in zip(range(repeats), itertools.cycle(pages), strict=False):
        # A fresh copy, as a page off the network would be: nothing of it is in any cache by name.
        copy = bytes(bytearray(page))
        began = time.perf_counter()
        reader.read(copy, 1.0)
        took.append(time.perf_counter() - began)
    return sorted(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoints", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3000)
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--chunked", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    run = uvloop.run if args.loop == "uvloop" else asyncio.run
    if args.serve:
        run(serve(args.endpoints, chunked=args.chunked))
        return
    command = [sys.executable, __file__, "--serve", "--endpoints", str(args.endpoints)]
    command += ["--chunked"] if args.chunked else []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        ports = [int(port) for port in server.stdout.readline().split()]
        result = parse(args.repeats) | run(measure(ports, args.seconds))
        server.stdin.close()
    result |= {
        "endpoints": args.endpoints,
        "loop": args.loop,
        "chunked": args.chunked,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:>20}  {value}")
    ok = (
        result["cpu_share_percent"] <= 8
        and result["parse_us_p50"] <= 150
        and result["outcomes"].keys() == {"ok"}
        and result["scrapes_per_s"] >= 0.95 * args.endpoints
    )
    print(f"{'bar 4':>20}  {'met' if ok else 'MISSED'} (8 % of a core, 150 us a page)")


if __name__ == "__main__":
    main()
