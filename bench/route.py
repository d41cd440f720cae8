"""Measures one routing decision: 200 endpoints, an 8k-token prompt.

    python -m bench.route [--endpoints 200] [--bytes 32768] [--scorers 4] [--alone] [--write]

The real dispatcher decides over a real fleet: parse the JSON body, chain the prompt, match the
index, build candidates, score, pick; then the decision is committed and completed. Half of the
requests continue a conversation, all share a system prompt, about ten are open per endpoint. Engines
show requests of other pickers as well, unless this one is `--alone`.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
from collections import deque
from random import Random
from time import perf_counter_ns

import msgspec

from bench import rig
from extproc.config import factory
from extproc.config.pool_sections import SchedulingSection
from extproc.config.settings import Settings
from extproc.endpoint import Endpoint, Load
from extproc.request import HttpRequest
from extproc.routing import director

NOW = 100.0
HEADERS = {":path": "/v1/chat/completions", ":method": "POST", "content-type": "application/json"}


def fleet(parts: factory.PoolParts, size: int, rng: Random, *, is_alone: bool) -> None:
    """Endpoints with loads as a busy fleet has them; of other pickers none where this one is alone."""
    endpoints = [Endpoint(f"10.0.{i // 250}.{i % 250}:8000") for i in range(size)]
    parts.store.set_endpoints(endpoints, NOW)
    for at, hits in ((NOW - 1.0, 4.5e5), (NOW, 5e5)):
        for member in parts.store.pool.members:
            load = Load(
                at=at - rng.random(),
                engine="vllm",
                waiting=0.0 if is_alone else float(rng.randrange(4)),
                running=0.0 if is_alone else float(rng.randrange(12)),
                kv_usage=0.3 + 0.3 * rng.random(),
                adapters=frozenset(rng.sample(("red", "green", "blue"), 2)),
                waiting_adapters=frozenset(),
                adapter_slots=4,
                kv_blocks=30_000,
                block_tokens=16,
                prefix_queries=2.0 * hits,
                prefix_hits=hits,
            )
            parts.store.observe(parts.store.begin_scrape(member.endpoint), load, at)


def bodies(rng: Random, size: int, turns: int):
    """Half new conversations, half continued ones; all with one system prompt of a quarter."""

    def text(length: int) -> str:
        return base64.b64encode(rng.randbytes(length)).decode()[:length]

    system = text(size // 4)
    talks = [text(size // 2) for _ in range(64)]
    for _ in range(turns):
        first = rng.choice(talks) if rng.random() < 0.5 else text(size // 2)
        rest = text(size - len(system) - len(first))
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": first},
            {"role": "user", "content": rest},
        ]
        yield json.dumps({"model": "red", "messages": messages, "stream": True}).encode()


def measure(args: argparse.Namespace) -> dict[str, object]:
    rng = Random(args.seed)
    parts = factory.build(
        Settings(seed=args.seed, scheduling=SchedulingSection(strategy=args.strategy))
    )
    profile = msgspec.structs.replace(parts.profile, scorers=parts.profile.scorers[: args.scorers])
    settings = parts.settings
    dispatcher = director.Director(
        store=parts.store,
        routing=factory.build_routing_config(settings, profile, {}),
        index=parts.index,
        cache_model=parts.cache_model,
        schedule=settings.prefix.schedule,
        rng=rng,
    )
    fleet(parts, args.endpoints, rng, is_alone=args.alone)
    opened: deque = deque()
    routes, commits = [], []
    for number, body in enumerate(bodies(rng, args.bytes, args.turns + args.warmup)):
        raw = HttpRequest(HEADERS, body)
        began = perf_counter_ns()
        decision = dispatcher.route(raw, NOW)
        routed = perf_counter_ns()
        opened.append(dispatcher.reserve(decision, NOW))
        committed = perf_counter_ns()
        if len(opened) > 10 * args.endpoints:
            dispatcher.release(opened.popleft(), NOW)
        if number >= args.warmup:
            routes.append((routed - began) / 1000)
            commits.append((committed - routed) / 1000)
    routes.sort()
    commits.sort()
    held = parts.index.blocks_total
    return {
        "endpoints": args.endpoints,
        "prompt_bytes": args.bytes,
        "blocks": len(decision.block_hashes),
        "scorers": len(decision.scores),
        "turns": args.turns,
        "route_us_p50": round(routes[len(routes) // 2], 1),
        "route_us_p95": round(routes[int(len(routes) * 0.95)], 1),
        "route_us_p99": round(routes[int(len(routes) * 0.99)], 1),
        "commit_us_p50": round(commits[len(commits) // 2], 1),
        "index_blocks": held,
        "index_bytes_per_block": round(parts.index.bytes_estimate() / held),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--endpoints", type=int, default=200)
    parser.add_argument("--bytes", type=int, default=32 * 1024)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=3000)
    parser.add_argument("--scorers", type=int, default=4, help="the first so many of the profile")
    parser.add_argument("--strategy", default="adaptive")
    parser.add_argument("--alone", action="store_true", help="without requests of other pickers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # as the server does
    figures = measure(args)
    for name, value in figures.items():
        print(f"{name:>24}  {value}")
    if args.write:
        rig.write("route", f"python -m bench.route --strategy {args.strategy} --write", figures)


if __name__ == "__main__":
    main()
