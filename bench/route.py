"""How long one scheduling turn takes: 200 endpoints, the default profile, an 8k-token prompt.

Run: python -m bench.route [--endpoints 200] [--bytes 32768] [--scorers 4]

Bar: the whole turn in at most 500 us median. A turn is what a dispatcher does for one request:
chain the prompt, match the index, build the candidates from plain records, run the profile, record
the chain. Half of the turns continue a conversation, all share a system prompt.
"""

import argparse
import gc
import platform
from collections import deque
from random import Random
from statistics import median
from time import perf_counter_ns

import msgspec

from extproc.endpoint import Candidate, Endpoint, Load
from extproc.prefix import blocks
from extproc.prefix.index import PrefixIndex
from extproc.request import BYTES_PER_TOKEN, Request
from extproc.scheduling import defaults
from extproc.scheduling.turn import Turn

PARTS = ("chain", "match", "candidates", "profile", "record", "route")


class Fleet:
    """Endpoints with plain records of load and accounts, as a pool would hand them out."""

    def __init__(self, size, rng):
        self.index = PrefixIndex(capacity_blocks=8_192)
        self.records = []
        self.open = deque()
        for i in range(size):
            endpoint = Endpoint(f"10.0.{i // 250}.{i % 250}:8000", name=f"engine-{i}")
            load = Load(
                at=99.0,
                engine="vllm",
                waiting=float(rng.randrange(4)),
                running=float(rng.randrange(12)),
                kv_usage=0.3 + 0.3 * rng.random(),
                adapters=frozenset(rng.sample(("red", "green", "blue"), 2)),
                waiting_adapters=frozenset(),
                adapter_slots=4,
            )
            slot = self.index.slot((endpoint.address, 0))
            own = rng.randrange(8, 12)
            self.records.append([endpoint, load, own, rng.randrange(90_000), slot])
            self.open.extend([i] * own)
        rng.shuffle(self.open)

    def account(self, slot):
        """One request begins on an endpoint, the oldest one ends; slots are places here."""
        self.open.append(slot)
        self.records[slot][2] += 1
        self.records[self.open.popleft()][2] -= 1

    def candidates(self, depths, now):
        tokens = blocks.DEFAULT.tokens
        return [
            Candidate(e, load, now - load.at, own, own + 2.0, prompt_tokens, tokens[depths[slot]])
            for e, load, own, prompt_tokens, slot in self.records
        ]


def prompts(rng, size, turns):
    """Half new conversations, half continued ones; all with one system prompt of a quarter."""
    system = rng.randbytes(size // 4)
    talks = [system + rng.randbytes(size // 2) for _ in range(64)]
    for _ in range(turns):
        talk = rng.choice(talks) if rng.random() < 0.5 else system
        yield (talk + rng.randbytes(size))[:size]


def measure(args):
    rng = Random(args.seed)
    fleet = Fleet(args.endpoints, rng)
    profile = defaults.profiles()["default"]
    profile = msgspec.structs.replace(profile, scorers=profile.scorers[: args.scorers])
    times = {part: [] for part in PARTS}
    seed = blocks.seed("meta-llama/Llama-3.1-8B-Instruct", "red")
    for at, prompt in enumerate(prompts(rng, args.bytes, args.turns + args.warmup)):
        request = Request(
            "chat", model="red", prompt=prompt, prompt_tokens=len(prompt) // BYTES_PER_TOKEN
        )
        t0 = perf_counter_ns()
        chain = blocks.chain(prompt, seed)
        t1 = perf_counter_ns()
        depths = fleet.index.match(chain)
        t2 = perf_counter_ns()
        candidates = fleet.candidates(depths, 100.0)
        t3 = perf_counter_ns()
        decision = profile.run(Turn(request, 100.0, rng), candidates, blocks=chain)
        t4 = perf_counter_ns()
        endpoint = decision.endpoints[0]
        fleet.index.record((endpoint.address, endpoint.incarnation), chain)
        t5 = perf_counter_ns()
        fleet.account(fleet.index.slot((endpoint.address, 0)))
        if at >= args.warmup:  # the index warms up first
            marks = (t1 - t0, t2 - t1, t3 - t2, t4 - t3, t5 - t4, t5 - t0)
            for part, spent in zip(PARTS, marks, strict=True):
                times[part].append(spent / 1000)
    return times, fleet, decision


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--endpoints", type=int, default=200)
    parser.add_argument("--bytes", type=int, default=32 * 1024)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=8000)
    parser.add_argument("--scorers", type=int, default=5, help="the first so many of the profile")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    gc.collect()
    gc.freeze()
    times, fleet, decision = measure(args)
    print(
        f"{args.endpoints} endpoints, {args.bytes} byte prompt ({len(decision.blocks)} blocks), "
        f"{len(decision.scores)} scorers, {args.turns} turns, "
        f"CPython {platform.python_version()} on {platform.machine()}"
    )
    print(f"{'part':12}{'p50 us':>10}{'p99 us':>10}")
    for part in PARTS:
        spent = sorted(times[part])
        print(f"{part:12}{median(spent):10.1f}{spent[int(len(spent) * 0.99)]:10.1f}")
    held = fleet.index.blocks_total
    print(f"index: {held} blocks held, {fleet.index.bytes_estimate() / held:.0f} bytes each")


if __name__ == "__main__":
    main()
