"""Bars of the adaptive strategy in virtual time: the production director over simulated engines.

    python -m bench.brain [--trace FILE] [--strategy NAME]... [--write]

FILE is the Mooncake conversation trace (JSON lines with timestamp, input_length, output_length and
hash_ids of 512-token blocks). Without it the trace is left out. Nothing is measured in real time, so
results do not depend on the machine: the same seed gives the same numbers.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
from pathlib import Path

import msgspec

from bench import rig
from extproc.config import factory
from extproc.config.pool_sections import SchedulingSection
from extproc.config.settings import PrefixSection, ScrapeSection, Settings
from extproc.decision import Decision
from extproc.endpoint import Endpoint, EngineCounters, Load
from extproc.prefix_cache import blocks
from extproc.request import InferenceRequest
from extproc.simulator import core, engine_request, profiles

CUTS = blocks.DEFAULT.tokens
ENGINES = 8


class BrainRequest:
    """One request: what was asked, and what became of it."""

    def __init__(self, tokens: int, output: int, hashes: list[int], session: str = "") -> None:
        self.tokens, self.output, self.hashes, self.session = tokens, output, hashes, session
        self.arrived = self.first_s = 0.0
        self.endpoint = self.cached = 0


class BrainWorld:
    """Eight engines behind one dispatcher, each scraped on its own beat."""

    def __init__(self, profile, strategy: str, *, scrape_s: float = 0.2, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.engines = [core.SimulatedEngine(profile) for _ in range(ENGINES)]
        self.parts = factory.build(
            Settings(
                seed=seed,
                scheduling=SchedulingSection(strategy=strategy),
                prefix=PrefixSection(capacity_blocks=10**7),
                scrape=ScrapeSection(stale_after_s=max(6.0, 3 * scrape_s)),
            )
        )
        self.parts.store.set_endpoints([Endpoint(f"10.0.0.{i}:8000") for i in range(ENGINES)], 0.0)
        self.scrape_s, self.now, self.left = scrape_s, 0.0, 0
        self.counters = [[0.0] * 4 for _ in self.engines]
        self.due: list[float | None] = [None] * ENGINES
        self.open: dict[str, tuple] = {}
        self.done: list[BrainRequest] = []
        self.queue: list[tuple] = []
        for at in range(ENGINES):
            self.plan(self.rng.random() * scrape_s, self.scrape, at)

    def plan(self, when: float, act, *argument) -> None:
        heapq.heappush(self.queue, (when, len(self.queue) + self.rng.random(), act, argument))

    def ask(self, when: float, spec: BrainRequest) -> None:
        self.left += 1
        self.plan(when, self.send, spec)

    def run(self) -> BrainWorld:
        while self.queue and self.left:
            self.now, _, act, argument = heapq.heappop(self.queue)
            act(*argument)
        return self

    def send(self, spec: BrainRequest) -> None:
        chain = [spec.hashes[cut // 16 - 1] for cut in CUTS[1:] if cut <= spec.tokens]
        request = InferenceRequest(
            api="chat", model="m", prompt_tokens=spec.tokens, session=spec.session
        )
        dispatcher = self.parts.director
        decision = dispatcher.scheduler.schedule(request, self.now, chain=chain, headers={})
        assert isinstance(decision, Decision), decision
        ticket = dispatcher.reserve(decision, self.now)
        at = self.parts.store.pool.positions[decision.endpoints[0].address]
        spec.arrived, spec.endpoint = self.now, at
        name = str(len(self.done) + len(self.open) + self.rng.random())
        self.open[name] = (spec, ticket)
        refused = self.engines[at].submit(
            engine_request.EngineRequest(name, spec.tokens, spec.output, spec.hashes), self.now
        )
        assert refused is None, refused
        self.kick(at)

    def kick(self, at: int) -> None:
        engine = self.engines[at]
        due = engine.due if engine.due is not None else engine.begin(self.now)
        if due is not None and due != self.due[at]:
            self.due[at] = due
            self.plan(due, self.step, at, due)

    def step(self, at: int, due: float) -> None:
        engine = self.engines[at]
        if self.due[at] != due or engine.due != due:
            return
        done, self.due[at] = engine.commit(due), None
        counters = self.counters[at]
        for i, more in enumerate(
            (done.steps, done.prefill_tokens + done.tokens, done.tokens, len(done.finished))
        ):
            counters[i] += more
        for first in done.first_tokens:
            self.open[first.id][0].first_s = first.after_s
        for finished in done.finished:
            spec, ticket = self.open.pop(finished.job.id)
            spec.cached = finished.cached_tokens
            self.parts.director.release(ticket, due)
            self.done.append(spec)
            self.left -= 1
        self.kick(at)

    def scrape(self, at: int) -> None:
        engine, counters = self.engines[at], self.counters[at]
        member = self.parts.store.pool.members[at]
        load = Load(
            at=self.now,
            engine="vllm",
            waiting=float(engine.waiting),
            running=float(engine.running),
            kv_usage=engine.kv_usage,
            kv_blocks=engine.profile.blocks,
            block_tokens=16,
            prefix_queries=float(engine.prefix_queries),
            prefix_hits=float(engine.prefix_hits),
            counters=EngineCounters(
                **dict(
                    zip(
                        ("steps", "step_tokens", "generated_tokens", "finished"),
                        counters,
                        strict=True,
                    )
                )
            ),
        )
        self.parts.store.observe(self.parts.store.begin_scrape(member.endpoint), load, self.now)
        self.plan(self.now + self.scrape_s, self.scrape, at)

    def summary(self) -> dict[str, float]:
        waits = sorted(done.first_s for done in self.done)
        requests, tokens = [0] * ENGINES, [0] * ENGINES
        for done in self.done:
            requests[done.endpoint] += 1
            tokens[done.endpoint] += done.tokens
        hit_blocks = sum(done.cached // 512 for done in self.done)
        all_blocks = sum(-(-done.tokens // 512) for done in self.done)
        return {
            "requests": len(self.done),
            "hit_ratio_tokens": sum(o.cached for o in self.done) / sum(o.tokens for o in self.done),
            "hit_ratio_blocks": hit_blocks / all_blocks,
            "max_over_mean_requests": max(requests) * ENGINES / sum(requests),
            "max_over_mean_tokens": max(tokens) * ENGINES / sum(tokens),
            "ttft_mean_ms": statistics.mean(waits) * 1e3,
            "ttft_p50_ms": waits[len(waits) // 2] * 1e3,
            "ttft_p99_ms": waits[int(0.99 * len(waits))] * 1e3,
        }


def mooncake(path: Path, strategy: str) -> BrainWorld:
    """The conversation trace on eight H100 with caches nothing falls out of."""
    profile = msgspec.structs.replace(
        profiles.find("h100-8b-bf16"), kv_tokens=200_000_000, max_model_len=400_000
    )
    world = BrainWorld(profile, strategy)
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            tokens, ids = row["input_length"], row["hash_ids"]
            hashes = [ids[k // 32] * 32 + k % 32 + 1 for k in range(tokens // 16)]
            spec = BrainRequest(tokens, max(1, row["output_length"]), hashes)
            world.ask(row["timestamp"] / 1000, spec)
    return world.run()


def burst(strategy: str, *, distinct: bool) -> BrainWorld:
    """A hundred new prompts of 2,000 tokens within 10 ms."""
    world = BrainWorld(profiles.find("l4-8b-fp8"), strategy)
    for k in range(100):
        name = (k + 1 if distinct else 1) << 20
        world.ask(2.0 + 1e-4 * k, BrainRequest(2000, 100, list(range(name, name + 125))))
    return world.run()


def conversations(strategy: str, *, scrape_s: float, seed: int) -> BrainWorld:
    """Multi-turn conversations at 60 % of what eight L4 carry, scraped every so often."""
    world = BrainWorld(profiles.find("l4-8b-fp8"), strategy, scrape_s=scrape_s, seed=seed)
    rng, now = random.Random(seed), 0.0
    lengths = [0] * 400
    for _ in range(4000):
        now += rng.expovariate(45.0)
        at = rng.randrange(len(lengths))
        lengths[at] += rng.randint(60, 260)
        if lengths[at] > 2000:
            lengths[at] = 100
        name = at << 20
        hashes = list(range(name, name + lengths[at] // 16))
        output = max(4, round(rng.lognormvariate(4.0, 0.8)))
        world.ask(now, BrainRequest(lengths[at], min(output, 400), hashes, session=str(at)))
    return world.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--strategy", action="append")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    results: dict[str, dict] = {}
    for strategy in args.strategy or ["adaptive", "lmetric", "balanced", "least-request"]:
        rows = results[strategy] = {}
        if args.trace:
            rows["mooncake"] = mooncake(args.trace, strategy).summary()
        rows["burst of distinct"] = burst(strategy, distinct=True).summary()
        rows["burst of one"] = burst(strategy, distinct=False).summary()
        for name, scrape_s in (("scraped every 0.2 s", 0.2), ("scraped every 10 s", 10.0)):
            runs = [
                conversations(strategy, scrape_s=scrape_s, seed=seed).summary()
                for seed in (1, 2, 3)
            ]
            rows[name] = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
        for name, row in rows.items():
            print(strategy, name, {key: round(value, 3) for key, value in row.items()}, flush=True)
    if args.write:
        rig.write("brain", "python -m bench.brain --trace FILE --write", {"strategies": results})


if __name__ == "__main__":
    main()
