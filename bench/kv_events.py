"""Measures KV events: CPU and memory of a block, and what they add to a routing decision.

    python -m bench.kv_events [--engines 100] [--blocks 2000] [--rounds 20] [--write]

Engines that hold `--blocks` blocks each store and remove batches of 20, decoded from their bytes.
A process publishes as much for all engines over sockets of ZeroMQ, and the subscriber takes it in.
Then two pools route the same requests in turns, half of which continue one of 64 conversations: one
has the events of all engines, the other none. Both know of the same prompts on the same engines.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import sys
import time
import tracemalloc
from array import array
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import zmq

from bench import rig
from bench.route import HEADERS, NOW, bodies, fleet
from extproc.config import factory
from extproc.config.settings import Settings
from extproc.endpoint import Endpoint
from extproc.pool.store import PoolStore
from extproc.prefix_cache import blocks, kv_events
from extproc.prefix_cache.cache_model import index_key
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.request import HttpRequest
from extproc.scrape.kv_event_subscriber import (
    KvEventsSection,
    KvEventSubscriber,
    SubscriberCallbacks,
)
from extproc.supervision import Supervisor

#: Tokens of a block, blocks of a stored event, and blocks per engine and second that are stored, and
#: as many removed.
SIZE, BATCH, RATE = 16, 20, 200

#: Batches per engine and second, seconds before the measurement over sockets and of each of its windows,
#: and windows (count).
BATCHES, WARM_S, WINDOW_S, WINDOWS = RATE // BATCH, 3.0, 4.0, 8

#: Bars: share of a core, seconds until an event is applied, bytes of a block, ratio of routing times.
BARS = {"cpu_share": 0.5, "applied_p99_s": 0.05, "block_bytes": 60.0, "route_ratio": 1.05}

#: Tokens of the cache of an engine, where requests are routed.
CACHE = 200_000


def batch(
    rng: random.Random, hashes: list[int], removed: list[int], *, lower: bool = False
) -> bytes:
    """A batch as vLLM 0.32 publishes it: a chain that is stored, and blocks that are removed.

    Args:
        lower: Whether stored blocks are copied to the memory of the host.
    """
    stored = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": [rng.randrange(150_000) for _ in range(SIZE * len(hashes))],
        "block_size": SIZE,
        "medium": "GPU",
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    events = [
        {"type": "BlockRemoved", "block_hashes": [hashed], "medium": "GPU"} for hashed in removed
    ]
    if lower:
        offloaded = {"block_hashes": hashes, "token_ids": [], "block_size": 0, "medium": "CPU"}
        events.insert(0, {"type": "BlockStored", **offloaded})
    return msgspec.msgpack.encode([0.0, [stored, *events], 0])


def measure_events(args: argparse.Namespace) -> dict[str, float]:
    """CPU and memory of a block."""
    rng = random.Random(1)
    exact = ExactPrefixes(blocks.DEFAULT, max_blocks=1_000_000)
    engines = [exact.open((f"e{number}", 0), 0) for number in range(args.engines)]

    def fill(held):
        hashes = [rng.getrandbits(64) for _ in range(BATCH)]
        is_full = len(held) >= args.blocks
        removed = list(held[:BATCH]) if is_full else []
        payload = batch(rng, hashes, removed, lower=args.lower and not is_full)
        if is_full:
            del held[:BATCH]
        held.extend(hashes)
        return payload

    held = [array("Q") for _ in engines]
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(args.blocks // BATCH):
        for engine, hashes in zip(engines, held, strict=True):
            payload = fill(hashes)
            for raw in kv_events.decode_batch(payload):
                exact.index.apply(engine, kv_events.decode_event(raw))
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    own = sum(hashes.buffer_info()[1] * hashes.itemsize for hashes in held)  # of this script
    total = args.engines * args.blocks
    print(f"{total} blocks on {args.engines} engines: {(taken - own) / total:.1f} bytes each")
    payloads = [
        (engine, fill(hashes))
        for _ in range(10)
        for engine, hashes in zip(engines, held, strict=True)
    ]
    gc.freeze()
    began = time.process_time()
    for engine, payload in payloads:
        for raw in kv_events.decode_batch(payload):
            event = kv_events.decode_event(raw)
            if event is not None:
                exact.index.apply(engine, event)
    took = time.process_time() - began
    per_pair = took / (len(payloads) * BATCH)
    print(f"a stored and a removed block: {per_pair * 1e6:.2f} us of CPU")
    return {"block_bytes": (taken - own) / total, "pair_s": per_pair}


def publish(connection: Connection, engines: int) -> None:
    """Publish blocks of engines at their rate until the parent process says that it is enough.

    The first hash of a batch is the time at which it was begun, in nanoseconds.
    """
    rng, context = random.Random(3), zmq.Context()
    sockets = [context.socket(zmq.PUB) for _ in range(engines)]
    connection.send([socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets])
    held: list[list[int]] = [[] for _ in sockets]
    numbers = [0] * engines
    began = time.monotonic()
    for turn in range(round((2.0 * WARM_S + WINDOWS * WINDOW_S) * BATCHES * engines)):
        time.sleep(max(0.0, began + turn / (BATCHES * engines) - time.monotonic()))
        if connection.poll():
            break
        at = turn % engines
        hashes = [time.time_ns(), *(rng.getrandbits(63) for _ in range(BATCH - 1))]
        removed = held[at][:BATCH] if len(held[at]) >= 5 * BATCH else []
        held[at] = held[at][len(removed) :] + hashes
        frames = [b"", numbers[at].to_bytes(8), batch(rng, hashes, removed)]
        sockets[at].send_multipart(frames)
        numbers[at] += 1
    context.destroy(linger=0)


async def subscribe(ports: Sequence[int]) -> dict[str, float]:
    """Follow engines on these ports; CPU, and seconds from a batch to its blocks in the index."""
    store = PoolStore(on_gone=lambda _: None)
    labels = [{"kv-events-port": str(port)} for port in ports]
    endpoints = [Endpoint(f"127.0.0.1:{n + 1}", labels=label) for n, label in enumerate(labels)]
    store.set_endpoints(endpoints, 0.0)
    exact = ExactPrefixes(blocks.DEFAULT, max_blocks=1_000_000)
    waits_s: list[float] = []
    apply = exact.index.apply

    def timed(engine, event):
        count = apply(engine, event)
        if isinstance(event, kv_events.BlockStored):
            waits_s.append((time.time_ns() - event.hashes[0]) * 1e-9)
        return count

    exact.index.apply = timed
    events = KvEventSubscriber(
        KvEventsSection(enabled=True),
        store,
        exact,
        clock=asyncio.get_running_loop().time,
        rng=random.Random(1),
        callbacks=SubscriberCallbacks(on_cleared=lambda _: None, on_change=lambda _: None),
        supervisor=Supervisor(),
    )
    running = asyncio.ensure_future(events.run())
    await asyncio.sleep(WARM_S)
    began, used, num_pairs = time.monotonic(), time.process_time(), 0
    medians, ends = [], []
    for _ in range(WINDOWS):
        waits_s.clear()
        await asyncio.sleep(WINDOW_S)
        waits_s.sort()
        num_pairs += len(waits_s) * BATCH
        medians.append(waits_s[len(waits_s) // 2])
        ends.append(waits_s[int(len(waits_s) * 0.99)])
    passed_s, used_s = time.monotonic() - began, time.process_time() - used
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return {
        "cpu_share": used_s / passed_s,
        "pairs_per_s": num_pairs / passed_s,
        "applied_p50_s": min(medians),
        "applied_p99_s": statistics.median(ends),
        "applied_p99_least_s": min(ends),
        "applied_p99_most_s": max(ends),
    }


def measure_sockets(args: argparse.Namespace) -> dict[str, float]:
    """CPU and delay of events of all engines over sockets."""
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=publish, args=(theirs, args.engines), daemon=True)
    process.start()
    try:
        figures = asyncio.run(subscribe(ours.recv()))
    finally:
        ours.send("enough")
        process.join(10.0)
        process.kill()
    print(
        f"{args.engines} engines over sockets, {figures['pairs_per_s']:.0f} blocks/s stored and removed: "
        f"{figures['cpu_share']:.3f} of a core; applied after {figures['applied_p50_s'] * 1e3:.1f} ms "
        f"(median) and {figures['applied_p99_least_s'] * 1e3:.1f} ms (p99) in the quietest of {WINDOWS} "
        f"windows; p99 {figures['applied_p99_s'] * 1e3:.1f} ms in half of them, "
        f"{figures['applied_p99_most_s'] * 1e3:.1f} ms in all"
    )
    return figures


def routing_pool(args: argparse.Namespace, *, is_exact: bool) -> factory.PoolParts:
    """A pool of busy engines, whose pages say how large their caches are."""
    events = KvEventsSection(enabled=is_exact)
    parts = factory.build(Settings(seed=1, kv_events=events))
    fleet(parts, args.engines, random.Random(1))
    store = parts.store
    for member in store.pool.members:
        page = msgspec.structs.replace(member.load, kv_blocks=CACHE // SIZE, block_tokens=SIZE)
        store.observe(store.begin_scrape(member.endpoint), page, NOW)
    return parts


def measure_routing(args: argparse.Namespace) -> dict[str, float]:
    """Time of a decision, with events and without."""
    rng = random.Random(2)
    requests = [HttpRequest(HEADERS, body) for body in bodies(rng, args.bytes, args.requests)]
    believed, exact = routing_pool(args, is_exact=False), routing_pool(args, is_exact=True)
    prefixes = exact.exact
    engines = {}
    for member in exact.store.pool.members:
        engine = engines[member.endpoint.address] = prefixes.open(index_key(member.endpoint), 0)
        prefixes.index.set_live(engine, is_live=True)
        prefixes.index.set_complete(engine)

    def hold(endpoint: Endpoint, text: bytes) -> array[int]:
        """An engine stores a prompt, and says so; returns its tokens."""
        engine, tokens = engines[endpoint.address], array("I", text[: len(text) // 4 * 4])
        hashes = kv_events.block_keys(engine.bit, tokens.tobytes(), SIZE)
        full = tokens[: len(hashes) * SIZE].tobytes()
        prefixes.index.apply(engine, kv_events.BlockStored(hashes, None, full, SIZE))
        return tokens

    for request in requests:
        prepared = exact.director.preparer.prepare(request)
        text = prepared.request.prompt
        for member in rng.sample(exact.store.pool.members, 2):
            for parts in (believed, exact):
                parts.index.record(index_key(member.endpoint), prepared.chain)
            tokens = hold(member.endpoint, text)
        prefixes.map_prompt(prepared.chain, tokens, adapter="", prompt_bytes=len(text))
    for request in requests:
        for parts in (believed, exact):
            outcome = parts.director.route(request, NOW - 60.0)
            reservation = parts.director.reserve(outcome, NOW - 60.0)
            parts.director.release(reservation, NOW - 59.0)
        hold(outcome.endpoints[0], exact.director.preparer.prepare(request).request.prompt)
    gc.collect()
    gc.freeze()
    # The least of all rounds, for each request: what else the machine does only adds.
    best = [[float("inf")] * len(requests) for _ in range(2)]
    for _ in range(args.rounds):
        for times, parts in zip(best, (believed, exact), strict=True):
            for number, request in enumerate(requests):
                began = time.perf_counter()
                parts.director.route(request, NOW)
                times[number] = min(times[number], time.perf_counter() - began)
    without, with_events = (statistics.mean(times) * 1e6 for times in best)
    print(
        f"a decision over {args.engines} engines, {args.bytes} bytes: {without:.0f} us without, "
        f"{with_events:.0f} us with events; ratio {with_events / without:.3f}"
    )
    return {"route_s": without * 1e-6, "route_ratio": with_events / without}


def block(result: Mapping[str, Any]) -> str:
    """The result as `docs/benchmarks` shows it."""
    known = result["figures"]
    rows = (
        ("CPU of the process, events of 100 engines", "cpu_share", "{:.2f} of a core", 1.0),
        ("applied after, p99 of the median window", "applied_p99_s", "{:.0f} ms", 1e3),
        ("memory of a block that one endpoint holds", "block_bytes", "{:.0f} bytes", 1.0),
        ("time of a decision, to one without events", "route_ratio", "{:.3f}", 1.0),
    )
    lines = ["| | measured | bar | |", "|---|---|---|---|"]
    for text, name, form, scale in rows:
        measured, bar = form.format(known[name] * scale), form.format(BARS[name] * scale)
        lines.append(
            f"| {text} | {measured} | {bar} | {'met' if known[name] <= BARS[name] else '**missed**'} |"
        )
    machine = result["machine"]
    caption = (
        f"`{result['command']}`, {result['date']}, {machine['cores']} cores of {machine['cpu']}, "
        f"Python {machine['python']}; {known['pairs_per_s']:.0f} blocks a second were stored, and as "
        f"many removed. The p99 of the quietest of {WINDOWS} windows of {WINDOW_S:.0f} s is "
        f"{known['applied_p99_least_s'] * 1e3:.0f} ms, of the longest "
        f"{known['applied_p99_most_s'] * 1e3:.0f} ms. A decision without events takes "
        f"{known['route_s'] * 1e6:.0f} µs."
    )
    return "\n".join([*lines, "", caption])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--lower", action="store_true", help="blocks are in host memory as well")
    parser.add_argument("--bytes", type=int, default=32_768)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    print(rig.machine())
    figures = {**measure_sockets(args), **measure_events(args), **measure_routing(args)}
    if args.write:
        command = " ".join(["python -m bench.kv_events", *sys.argv[1:]])
        rig.write("kv_events", command, {"figures": figures})


if __name__ == "__main__":
    main()
