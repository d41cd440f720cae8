"""Compares data-parallel ranks behind one port with as many engines, one of them hot.

    python -m bench.ranks [--seeds 3] [--requests 4000] [--write]

Sessions go to eight simulated machines with the default strategy, in virtual time. Others keep the
first of them busy with requests that the picker does not see but on its page. The machines are
eight engines, two engines with four ranks each, and the same two as endpoints without ranks: there
the engine chooses the rank, by running and four times its waiting requests, as vLLM does.

Bar: the ranks' hit ratio within 2 % of that of eight engines, and less than a third of an eighth
of all requests on the hot rank.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench import rig
from extproc.config.settings import Settings
from extproc.endpoint import EngineCounters, Load, ServedModels
from extproc.simulator import profiles
from extproc.simulator.fleet import workloads
from extproc.simulator.fleet.client import Client, Sender
from extproc.simulator.fleet.engine_node import EngineNode
from extproc.simulator.fleet.event_queue import EventQueue
from extproc.simulator.fleet.picker import MODEL, ExtprocPicker
from extproc.simulator.fleet.sim_request import RequestSpec, SimRequest
from extproc.simulator.fleet.workloads import Lengths

NODES, RANKS = 8, 4
#: Bars: difference of the hit ratios of ranks and engines, and share of all requests on the hot rank.
MARGIN, MAX_HOT_SHARE = 0.02, 1 / NODES / 3
#: Requests of others that are always open on the first machine.
FOREIGN = 48
VARIANTS = ("8 engines", "2 engines, 4 ranks each", "2 engines, ranks unknown")


class BalancedEngine:
    """An engine that chooses among its ranks by itself, and shows their sum on its page."""

    def __init__(self, ranks: Sequence[EngineNode]) -> None:
        self.ranks = ranks
        self.up = self.has_metrics = True

    def submit(self, sim_request: SimRequest) -> None:
        """Give a request to the rank with the least to do."""
        load = lambda node: node.engine.running + 4 * node.engine.waiting  # noqa: E731
        min(self.ranks, key=load).submit(sim_request)

    def page(self, now: float) -> Load:
        """Counts summed, shares averaged, as the reader of pages does."""
        pages = [node.page(now) for node in self.ranks]
        first = pages[0]
        names = ("waiting", "running", "prefix_queries", "prefix_hits", "kv_blocks")
        sums = {name: sum(getattr(page, name) for page in pages) for name in names}
        counters = {
            name: sum(getattr(page.counters, name) for page in pages)
            for name in ("steps", "step_tokens", "generated_tokens", "finished")
        }
        return msgspec.structs.replace(
            first,
            **sums,
            kv_usage=sum(page.kv_usage or 0.0 for page in pages) / len(pages),
            counters=EngineCounters(**counters),
        )


class RankedFleet:
    """Machines, a picker, clients and the load of others.

    Args:
        variant: One of `VARIANTS`.
        requests: Requests of our clients (count).
        seed: Of all chance.
    """

    def __init__(self, variant: str, *, requests: int, seed: int) -> None:
        self.timeline = EventQueue()
        profile = profiles.find("l4-8b-fp8")
        self.nodes = [
            EngineNode(self.timeline, profile, finished=self._ended, gaps=lambda *_: None)
            for _ in range(NODES)
        ]
        for node in self.nodes:
            node.start()
        groups = [self.nodes[at : at + RANKS] for at in range(0, NODES, RANKS)]
        is_split = variant != VARIANTS[2]
        self._targets = self.nodes if is_split else [BalancedEngine(group) for group in groups]
        self.picker = ExtprocPicker(
            Settings(seed=seed),
            self._targets,  # type: ignore[arg-type] # page and up are all it looks at
            timeline=self.timeline,
            delay_s=0.005,
            models=ServedModels(frozenset({MODEL})),
            ranks=[RANKS] * len(groups) if variant == VARIANTS[1] else None,
        )
        workload = workloads.ConversationWorkload(
            conversations=max(1, requests // 6),
            turns=Lengths(mean=6.0, deviation=3.0, lowest=1.0, highest=15.0),
            prompt=Lengths(mean=300.0, deviation=200.0, shape="lognormal", lowest=20.0),
            output=Lengths(mean=120.0, deviation=80.0, shape="lognormal", lowest=4.0),
            think_s=Lengths(mean=10.0, deviation=10.0, shape="exponential", lowest=0.0),
            system=Lengths(mean=800.0),
            systems=8,
        )
        self._sender = Sender(
            Client(rate_per_s=3.0),
            workloads.sessions(workload, random.Random(seed), ()),
            adapters=0,
            timeline=self.timeline,
            rng=random.Random(seed + 1),
            send=self._send,
        )
        self._rng = random.Random(seed + 2)
        self._count = 0
        self._done: list[SimRequest] = []
        self._on_hot: set[str] = set()

    def run(self) -> dict[str, float]:
        """Run to the end; returns hit ratio, share of the hot rank, mean and p99 of TTFT (s)."""
        for _ in range(FOREIGN):
            self._disturb()
        self.picker.listed(range(len(self._targets)))
        self.timeline.at(5.0, self._sender.start)
        while not self._sender.is_done and self.timeline.step():
            pass
        done = [request for request in self._done if not request.failure]
        ttft_s = sorted(request.first_s for request in done)
        prompts = sum(request.work.prompt_tokens for request in done)
        return {
            "requests": len(done),
            "hit_ratio": sum(request.cached_tokens for request in done) / prompts,
            "hot_share": len(self._on_hot) / len(self._done),
            "ttft_mean_s": sum(ttft_s) / len(ttft_s),
            "ttft_p99_s": ttft_s[int(len(ttft_s) * 0.99)],
        }

    def _disturb(self) -> None:
        """Send a request of others to the first machine."""
        self._count += 1
        keys = tuple([self._rng.getrandbits(60) for _ in range(12)])
        spec = RequestSpec(keys=keys, prompt_tokens=200, output_tokens=400)
        self.nodes[0].submit(SimRequest(f"foreign {self._count}", spec, self.timeline.now))

    def _send(self, work: RequestSpec) -> SimRequest:
        self._count += 1
        sim_request = SimRequest(f"r{self._count}", work, self.timeline.now)
        sim_request.node = self.picker.pick(sim_request)
        if sim_request.node < 0:
            self.timeline.after(0.0, lambda: self._over(sim_request))
            return sim_request
        self._targets[sim_request.node].submit(sim_request)
        if sim_request.id in self.nodes[0].requests:
            self._on_hot.add(sim_request.id)
        return sim_request

    def _ended(self, sim_request: SimRequest) -> None:
        if sim_request.id.startswith("foreign"):
            self._disturb()
            return
        self.picker.ended(sim_request)
        self._over(sim_request)

    def _over(self, sim_request: SimRequest) -> None:
        self._done.append(sim_request)
        self._sender.finished(sim_request)


def block(result: Mapping[str, Any]) -> str:
    """The result as `docs/benchmarks` shows it."""
    runs = result["variants"]
    engines, ranks, _ = (runs[variant] for variant in VARIANTS)
    head = "| | hit ratio | requests on the hot rank | TTFT mean, s | TTFT p99, s |"
    lines = [head, "|---|---|---|---|---|"]
    for variant in VARIANTS:
        run = runs[variant]
        lines.append(
            f"| {variant} | {run['hit_ratio']:.3f} | {run['hot_share']:.1%} "
            f"| {run['ttft_mean_s']:.3f} | {run['ttft_p99_s']:.3g} |"
        )
    ratio = ranks["hit_ratio"] / engines["hit_ratio"]
    is_met = abs(ratio - 1.0) <= MARGIN and ranks["hot_share"] < MAX_HOT_SHARE
    caption = (
        f"Hit ratio of ranks to that of engines: {ratio:.3f}; the bar is {'met' if is_met else 'missed'}. "
        f"`{result['command']}`, {result['date']}, means of {result['seeds']} seeds."
    )
    return "\n".join([*lines, "", caption])


def main() -> None:
    """Run all variants and print the means over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--write", action="store_true", help="keep the result in bench/results")
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for variant in VARIANTS:
        runs = [
            RankedFleet(variant, requests=args.requests, seed=seed).run()
            for seed in range(args.seeds)
        ]
        results[variant] = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
        shown = "  ".join(f"{name} {value:.3f}" for name, value in results[variant].items())
        print(f"{variant:26}  {shown}", flush=True)
    if args.write:
        rig.write(
            "ranks", "python -m bench.ranks --write", {"seeds": args.seeds, "variants": results}
        )


if __name__ == "__main__":
    main()
