"""Measures KV events: CPU and memory of a block, and what they add to a routing decision.

    python -m bench.kv_events [--engines 100] [--blocks 2000] [--rounds 20]

Engines that hold `--blocks` blocks each store and remove batches of 20, decoded from their bytes.
Then two pools route the same requests in turns, half of which continue one of 64 conversations: one
has the events of all engines, the other none. Both know of the same prompts on the same engines.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import tracemalloc
from array import array

import msgspec

from bench import rig
from bench.route import HEADERS, NOW, bodies, fleet
from extproc.config import factory
from extproc.config.settings import Settings
from extproc.prefix_cache import blocks, kv_events
from extproc.prefix_cache.cache_model import index_key
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.request import HttpRequest
from extproc.scrape.kv_event_subscriber import KvEventsSection

#: Tokens of a block, blocks of a stored event, and blocks per engine and second that are stored, and
#: as many removed.
SIZE, BATCH, RATE = 16, 20, 200

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


def measure_events(args: argparse.Namespace) -> None:
    """Print CPU and memory of a block."""
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
    share = per_pair * RATE * 100
    print(f"a stored and a removed block: {per_pair * 1e6:.2f} us of CPU")
    print(f"100 engines with {RATE} of each per second: {share:.3f} of a core, without the sockets")


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


def measure_routing(args: argparse.Namespace) -> None:
    """Print what events add to a decision."""
    rng = random.Random(2)
    requests = [HttpRequest(HEADERS, body) for body in bodies(rng, args.bytes, args.requests)]
    believed, exact = routing_pool(args, is_exact=False), routing_pool(args, is_exact=True)
    prefixes = exact.exact
    holders = []
    for member in exact.store.pool.members:
        engine = prefixes.open(index_key(member.endpoint), 0)
        prefixes.index.set_live(engine, is_live=True)
        prefixes.index.set_complete(engine)
        holders.append((engine, member))
    for request in requests:
        prepared = exact.director.prepare(request)
        text = prepared.request.prompt
        tokens = array("I", text[: len(text) // 4 * 4])
        for engine, member in rng.sample(holders, 2):
            for parts in (believed, exact):
                parts.index.record(index_key(member.endpoint), prepared.chain)
            full = len(tokens) // SIZE
            hashes = kv_events.block_keys(engine.bit, tokens.tobytes(), SIZE)
            event = kv_events.BlockStored(hashes, None, tokens[: full * SIZE].tobytes(), SIZE)
            prefixes.index.apply(engine, event)
        prefixes.map_prompt(
            prepared.chain, tokens, adapter="", prompt_bytes=len(prepared.request.prompt)
        )
    for request in requests:
        for parts in (believed, exact):
            outcome = parts.director.route(request, NOW - 60.0)
            reservation = parts.director.reserve(outcome, NOW - 60.0)
            parts.director.release(reservation, NOW - 59.0)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--lower", action="store_true", help="blocks are in host memory as well")
    parser.add_argument("--bytes", type=int, default=32_768)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    print(rig.machine())
    measure_events(args)
    measure_routing(args)


if __name__ == "__main__":
    main()
