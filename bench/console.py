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

from bench import engine_pages, slices
from extproc.demo import stack
from tests.console import browser

#: Largest share of a core with 500 endpoints, whether the console is open or not.
BAR_SHARE = 0.05

PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


async def measure(args: argparse.Namespace) -> None:
    """Print first paint, time to all rows, and the share of a core with and without a viewer."""
    async with stack.stack() as children:
        engines, pages = stack.free_port(), stack.free_port()
        runner = await engine_pages.serve(engines)
        config = {
            "apiVersion": "extproc/v1alpha1",
            "kind": "ExtProcConfig",
            "pool": {"endpoints": engine_pages.addresses(args.endpoints, engines)},
        }
        picker = await children.extproc(
            *("--config-text", json.dumps(config), "--host", "127.0.0.1"),
            *("--grpc-port", str(stack.free_port()), "--metrics-port", str(pages)),
            *("--grpc-health-port", str(stack.free_port())),
        )
        async with browser.chromium() as chromium:
            await compare(args, chromium, picker.process.pid, pages)
        await runner.cleanup()


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
