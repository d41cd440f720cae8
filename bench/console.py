"""Measures the console: first paint, and CPU that a picker spends on it, with 500 endpoints.

    python -m bench.console [--endpoints 500] [--seconds 30] [--rounds 3]

A picker scrapes 500 addresses of this machine behind which one process answers with the page and the
models of an engine. Its CPU is measured over spans with the console closed and open in a real Chromium, in
turns. Needs Chromium and the development dependencies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics

from aiohttp import web

from bench import slices
from extproc.demo import stack
from tests.console import browser

PAGE = """\
vllm:num_requests_running{model_name="demo"} 7
vllm:num_requests_waiting{model_name="demo"} 1
vllm:kv_cache_usage_perc{model_name="demo"} 0.42
vllm:prefix_cache_queries_total{model_name="demo"} 1000
vllm:prefix_cache_hits_total{model_name="demo"} 700
vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql,chat",waiting_lora_adapters=""} 1.0
"""

MODELS = {"object": "list", "data": [{"id": "demo", "object": "model"}]}

#: Largest share of a core with 500 endpoints, whether the console is open or not.
BAR_SHARE = 0.05

PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def addresses(count: int, port: int) -> list[str]:
    """So many addresses of this machine, with one port."""
    return [f"127.1.{at // 250}.{1 + at % 250}:{port}" for at in range(count)]


async def measure(args: argparse.Namespace) -> None:
    """Print first paint, time to all rows, and the share of a core with and without a viewer."""
    async with stack.stack() as children:
        engines, pages = stack.free_port(), stack.free_port()
        runner = await serve_engines(engines)
        config = {
            "apiVersion": "extproc/v1alpha1",
            "kind": "ExtProcConfig",
            "pool": {"endpoints": addresses(args.endpoints, engines)},
        }
        picker = await children.extproc(
            *("--config-text", json.dumps(config), "--host", "127.0.0.1"),
            *("--grpc-port", str(stack.free_port()), "--metrics-port", str(pages)),
            *("--grpc-health-port", str(stack.free_port())),
        )
        async with browser.chromium() as chromium:
            await compare(args, chromium, picker.process.pid, pages)
        await runner.cleanup()


async def serve_engines(port: int) -> web.AppRunner:
    """Answer scrapes of all addresses, and requests for their models."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=PAGE)

    async def list_models(_: web.Request) -> web.Response:
        return web.json_response(MODELS)

    application = web.Application()
    application.add_routes([web.get("/metrics", answer), web.get("/v1/models", list_models)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", port).start()
    return runner


async def compare(
    args: argparse.Namespace, chromium: browser.Chromium, pid: int, pages: int
) -> None:
    """Measure spans with the console closed and open, in turns."""
    rows = f"document.querySelectorAll('#endpoints tbody tr').length == {args.endpoints}"
    paints, full, closed, opened = [], [], [], []
    for _ in range(args.rounds):
        closed.append(await share_of_core(pid, args.seconds))
        async with chromium.page(pages) as page:
            await page.open()
            await page.until(rows)
            full.append(await page.page.evaluate("performance.now()"))
            paints.append(await page.page.evaluate(PAINT))
            opened.append(await share_of_core(pid, args.seconds))
            assert not page.complaints, page.complaints
    print(f"first paint: {statistics.median(paints):.0f} ms, largest {max(paints):.0f}")
    print(f"all {args.endpoints} rows: {statistics.median(full):.0f} ms, largest {max(full):.0f}")
    for name, shares in (("closed", closed), ("open", opened)):
        share = statistics.median(shares)
        verdict = "met" if share < BAR_SHARE else "missed"
        print(f"picker, console {name}: {share:.2%} of a core (bar {BAR_SHARE:.0%}: {verdict})")


async def share_of_core(pid: int, seconds: float) -> float:
    """CPU of a process over a span, as a share of one core."""
    before = slices.threads_cpu_s(pid)
    await asyncio.sleep(seconds)
    return (slices.threads_cpu_s(pid) - before) / seconds


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoints", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
