"""Measures one pass of the flow controller over its queues, during which the loop is blocked.

    python -m bench.pump [--waiting N ...]

The real gate and dispatcher of the default strategy in this process, without sockets. All endpoints
are busy, so that a pump looks in vain. Rows are what is waited for: one model, as many tenants as
requests, as many made-up models, adapters that each half of the endpoints lists differently, and as
many subset hints as there are. `sweep` is the CPU time until everybody was looked at, over as many
turns of the event loop as that takes, `turn` the longest of them; `displace` is one large request
of higher priority that makes as many of them leave as one may.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time

import msgspec

from extproc.config import factory
from extproc.config.settings import FlowControlSection, Settings
from extproc.decision import all_busy
from extproc.endpoint import Endpoint, Load, ServedModels
from extproc.flow_control.queue import MOST_DISPLACED
from extproc.request import HttpRequest
from extproc.server.flow_control_shell import AsyncFlowController, QueuedRequest
from extproc.supervision import ExceptionLog
from extproc.telemetry.counters import ProcessCounters

ENDPOINTS = 8
ADAPTERS = 300
NOW = 100.0


class QueuedPool:
    """A gate before endpoints that are all busy."""

    def __init__(self) -> None:
        holding = FlowControlSection(enabled=True, max_requests=20_000, max_bytes=2**40)
        self.parts = factory.build(Settings(flow_control=holding), where="bench")
        self.addresses = [f"10.0.0.{n}:8000" for n in range(1, ENDPOINTS + 1)]
        fleet = self.parts.store
        fleet.set_endpoints([Endpoint(address) for address in self.addresses], NOW - 1e6)
        for n, member in enumerate(fleet.pool.members):
            load = Load(
                at=NOW,
                engine="vllm",
                waiting=50.0,
                running=256.0,
                kv_usage=0.99,
                kv_blocks=1000,
                block_tokens=16,
            )
            fleet.observe(fleet.begin_scrape(member.endpoint), load, NOW)
            adapters = [f"lora-{at}" for at in range(ADAPTERS) if at % 255 + 1 & 1 << n]
            fleet.observe_models(
                fleet.pool.members[n].endpoint, ServedModels(frozenset({"m"}), frozenset(adapters))
            )
        self.flow_controller = AsyncFlowController(
            self.parts.director,
            holding,
            clock=lambda: NOW,
            on_exception=ExceptionLog(ProcessCounters().exceptions, lambda: NOW).record,
        )

    def hold(self, count: int, kind: str) -> None:
        """So many requests wait."""
        subsets = itertools.cycle(
            itertools.chain.from_iterable(
                itertools.combinations(self.addresses, size) for size in range(1, ENDPOINTS + 1)
            )
        )
        for n in range(count):
            model = {"models": f"made-up-{n}", "adapters": f"lora-{n % ADAPTERS}"}.get(kind, "m")
            tenant = {"x-llm-d-inference-fairness-id": f"t{n}"} if kind == "tenants" else {}
            headers = {":method": "POST", ":path": "/v1/completions", **tenant}
            body = json.dumps({"model": model, "prompt": f"{n} hello " * 20}).encode()
            subset = next(subsets) if kind == "subsets" else None
            prepared = self.parts.director.preparer.prepare(
                HttpRequest(headers, body, subset=subset)
            )
            why = self.parts.director.decide(prepared, NOW)
            assert isinstance(self.flow_controller.enqueue(prepared, why, NOW), QueuedRequest), why

    def sweep(self) -> tuple[float, float]:
        """CPU seconds of one look at everybody, and of its longest turn."""
        turns: list[float] = []
        while not turns or self.flow_controller.queue.is_sweeping:
            before = time.process_time()
            self.flow_controller.pump()
            turns.append(time.process_time() - before)
        return sum(turns), max(turns)


def row(kind: str, count: int) -> str:
    place = QueuedPool()
    place.hold(count, kind)
    place.sweep()
    sweeps = [place.sweep() for _ in range(5)]
    total_s, turn_s = min(sweeps)
    place.flow_controller.close()
    return f"{kind:9} {count:6} wait: sweep {total_s * 1e3:7.2f} ms, turn {turn_s * 1e3:6.2f} ms"


def displace(count: int) -> str:
    place = QueuedPool()
    place.hold(count, "one")
    queue = place.flow_controller.queue
    share = queue.bytes // count * min(count - 1, MOST_DISPLACED - 1)
    holding = FlowControlSection(enabled=True, max_requests=20_000, max_bytes=queue.bytes)
    place.flow_controller.reconfigure(holding)
    body = json.dumps({"model": "m", "prompt": "x" * share}).encode()
    raw = HttpRequest({":method": "POST", ":path": "/v1/completions"}, body)
    large = place.parts.director.preparer.prepare(raw)
    large = msgspec.structs.replace(
        large, request=msgspec.structs.replace(large.request, priority=1)
    )
    before = time.process_time()
    held = place.flow_controller.enqueue(large, all_busy(1.0), NOW)
    took = time.process_time() - before
    assert isinstance(held, QueuedRequest), held
    gone = place.flow_controller.outcomes["displaced"]
    place.flow_controller.close()
    return f"displace  {count:6} wait: {gone} leave in {took * 1e3:7.2f} ms"


async def main(waiting: list[int]) -> None:
    for kind in ("one", "tenants", "models", "adapters", "subsets"):
        for count in waiting:
            print(row(kind, count), flush=True)
    for count in waiting:
        print(displace(count), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 300, 1000, 2000, 10_000])
    args = parser.parse_args()
    asyncio.run(main(args.waiting))
