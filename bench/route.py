"""Measures one routing decision: 200 endpoints, an 8k-token prompt.

    python -m bench.route [--endpoints 200] [--bytes 32768] [--scorers 4] [--alone] [--write]
    python -m bench.route --against FOLDER [--starts 6] [--rounds 20] [--endpoints 8] [--bytes 4096]

The real dispatcher decides over a real fleet: parse the JSON body, chain the prompt, match the
index, build candidates, score, pick; then the decision is committed and completed. Half of the
requests continue a conversation, all share a system prompt, about ten are open per endpoint. Engines
show requests of other pickers as well, unless this one is `--alone`. `--against` compares with the
sources in another folder: a process of each decides in turns, a slice of a few hundred decisions at a
time, on one core; ratios are of medians of neighboring slices, and each start has another hash seed.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
import os
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from time import perf_counter_ns

import msgspec

from bench import rig
from extproc.config import factory
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


def bodies(rng: Random, size: int, turns: int) -> Iterator[bytes]:
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


def decide(args: argparse.Namespace, parts: factory.PoolParts) -> Iterator[tuple[float, float]]:
    """Decide without end; microseconds of each decision, and of its commit."""
    rng = Random(args.seed)
    profile = msgspec.structs.replace(parts.profile, scorers=parts.profile.scorers[: args.scorers])
    dispatcher = director.Director(
        store=parts.store,
        routing=msgspec.structs.replace(parts.director.routing, profile=profile),
        index=parts.index,
        cache_model=parts.cache_model,
        schedule=parts.settings.prefix.schedule,
        rng=rng,
    )
    fleet(parts, args.endpoints, rng, is_alone=args.alone)
    opened: deque = deque()
    for body in bodies(rng, args.bytes, sys.maxsize):
        raw = HttpRequest(HEADERS, body)
        began = perf_counter_ns()
        decision = dispatcher.route(raw, NOW)
        routed = perf_counter_ns()
        opened.append(dispatcher.reserve(decision, NOW))
        committed = perf_counter_ns()
        if len(opened) > 10 * args.endpoints:
            dispatcher.release(opened.popleft(), NOW)
        yield (routed - began) / 1000, (committed - routed) / 1000


def build(args: argparse.Namespace) -> factory.PoolParts:
    """The parts of a pool; by the configuration, whose classes moved between versions."""
    tree = {"seed": args.seed, "scheduling": {"strategy": args.strategy}}
    return factory.build(msgspec.convert(tree, Settings))


def measure(args: argparse.Namespace) -> dict[str, object]:
    parts = build(args)
    decisions = decide(args, parts)
    for _ in range(args.warmup):
        next(decisions)
    routes, commits = zip(*[next(decisions) for _ in range(args.turns)], strict=True)
    routes, commits = sorted(routes), sorted(commits)
    held = parts.index.blocks_total
    return {
        "endpoints": args.endpoints,
        "prompt_bytes": args.bytes,
        "turns": args.turns,
        "route_us_p50": round(routes[len(routes) // 2], 1),
        "route_us_p95": round(routes[int(len(routes) * 0.95)], 1),
        "route_us_p99": round(routes[int(len(routes) * 0.99)], 1),
        "commit_us_p50": round(commits[len(commits) // 2], 1),
        "index_blocks": held,
        "index_bytes_per_block": round(parts.index.bytes_estimate() / held),
    }


def decide_slices(args: argparse.Namespace) -> None:
    """Print the median of a slice of decisions (us) for every line of the input."""
    decisions = decide(args, build(args))
    for _ in range(args.warmup):
        next(decisions)
    print(flush=True)
    for _ in sys.stdin:
        print(statistics.median([next(decisions)[0] for _ in range(args.turns)]), flush=True)


def compare(args: argparse.Namespace, start: int) -> Sequence[tuple[float, float]]:
    """Medians of neighboring slices (us), of the other sources and of these."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    flags = [
        f"--{name}={getattr(args, name)}" for name in ("endpoints", "bytes", "strategy", "seed")
    ]
    flags += [f"--turns={2400 // args.endpoints}", *(["--alone"] if args.alone else [])]
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--slices", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "PYTHONHASHSEED": str(start)},
        )
        for folder in (Path(args.against).resolve(), rig.ROOT)
    ]
    pairs: list[tuple[float, float]] = []
    for worker in workers:
        if not worker.stdout.readline():
            sys.exit("a process ended before its first decision; its error stands above")
    for number in range(args.rounds):
        medians = [0.0, 0.0]
        for at in (0, 1) if number % 2 else (1, 0):
            print(file=workers[at].stdin, flush=True)
            medians[at] = float(workers[at].stdout.readline())
        pairs.append((medians[0], medians[1]))
    for worker in workers:
        worker.communicate()
    return pairs


def print_comparison(args: argparse.Namespace) -> None:
    """Print ratios of these sources to others."""
    for package in ("extproc", "bench"):
        if not (Path(args.against) / package).is_dir():
            sys.exit(
                f"expected a folder with {package}/, found {args.against}; give the root of sources"
            )
    starts = [compare(args, start) for start in range(1, args.starts + 1)]
    ratios = [statistics.median([here / there for there, here in pairs]) for pairs in starts]
    slices = [pair for pairs in starts for pair in pairs]
    there, here = map(statistics.median, zip(*slices, strict=True))
    print(
        f"{args.endpoints} endpoints, {args.bytes} bytes, {'alone' if args.alone else 'beside others'}: "
        f"there {there:.1f} us, here {here:.1f} us, ratio {statistics.mean(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f} by start)"
    )


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
    parser.add_argument("--against", metavar="FOLDER", help="root of other sources")
    parser.add_argument("--starts", type=int, default=6, help="of the two processes")
    parser.add_argument("--rounds", type=int, default=20, help="slices of each process")
    parser.add_argument("--slices", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # as the server does
    if args.slices:
        decide_slices(args)
        return
    if args.against:
        print_comparison(args)
        return
    figures = measure(args)
    for name, value in figures.items():
        print(f"{name:>24}  {value}")
    if args.write:
        rig.write("route", f"python -m bench.route --strategy {args.strategy} --write", figures)


if __name__ == "__main__":
    main()
