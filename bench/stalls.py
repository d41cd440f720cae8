"""Measures what stall detection of the event loop costs in CPU.

To be woken costs more than to look, and how much more is the machine's; a busy loop is awake anyway,
so the third figure is what looking itself takes.

python -m bench.stalls [--seconds 10] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import time

import uvloop

from extproc.server import health
from extproc.server.health import StallMeter
from extproc.telemetry.counters import ProcessCounters


async def idle(seconds: float, *, measured: bool) -> float:
    """Share of a core that an idle loop takes."""
    meter = StallMeter(ProcessCounters())
    if measured:
        meter.start()
    began = time.process_time()
    await asyncio.sleep(seconds)
    used_s = time.process_time() - began
    meter.stop()
    return used_s / seconds


def look_s(rounds: int = 100_000) -> float:
    """Processor time of one look, timer included."""

    async def looking() -> float:
        meter = StallMeter(ProcessCounters())
        meter.start()
        began = time.thread_time()
        for _ in range(rounds):
            meter.stop()
            meter.measure()
        used_s = time.thread_time() - began
        meter.stop()
        return used_s / rounds

    return uvloop.run(looking())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for _ in range(args.rounds):
        without, measured = (
            uvloop.run(idle(args.seconds, measured=measured)) for measured in (False, True)
        )
        share = look_s() / health.BUSY_S
        print(
            f"quiet {without:.3%}, with the meter {measured:.3%} of a core; "
            f"beside open streams {share:.3%}"
        )


if __name__ == "__main__":
    main()
