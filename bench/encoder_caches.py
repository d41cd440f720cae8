"""Compares strategies with and without affinity for encoder caches, in virtual time.

    python -m bench.encoder_caches [--seeds 3] [--requests 3000] [--write]

Eight simulated engines serve requests of a question (200 tokens) and an image (1,000 tokens), each of
400 images, by Zipf's law. `behind`: the image follows the question, so no prefix is shared. `before`:
it comes first, and the prefix cache has it. An engine keeps embeddings of the images it used last, by
default 16,384 tokens of them, and encodes an image that it has neither there nor in its prefix cache,
which takes a share of the time of its prefill.

Strategies: `adaptive`; the same without the time of encoders (`encoder_share: 0`); `balanced`; the same
with `mm-embeddings-cache-scorer` (16 entries), weight 2.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import OrderedDict

import msgspec

from bench import rig
from extproc.config.settings import Settings
from extproc.endpoint import ServedModels
from extproc.request import MediaSpan
from extproc.scheduling import registry
from extproc.scheduling.estimated_time import EstimatedTime
from extproc.scheduling.prefix_affinity import MmEmbeddingsCacheScorer
from extproc.scheduling.profile import SchedulerProfile
from extproc.simulator import profiles
from extproc.simulator.fleet.engine_node import EngineNode
from extproc.simulator.fleet.event_queue import EventQueue
from extproc.simulator.fleet.picker import MODEL, ExtprocPicker
from extproc.simulator.fleet.sim_request import KEY_TOKENS, RequestSpec, SimRequest, Streams

NODES, IMAGES = 8, 400
QUESTION_TOKENS, IMAGE_TOKENS, OUTPUT_TOKENS = 200, 1000, 60
STRATEGIES = ("adaptive", "adaptive, blind", "balanced", "balanced, encoder")


class EncodingNode(EngineNode):
    """An engine with an encoder, whose work counts as more prompt tokens.

    Attributes:
        embeddings: Images whose embeddings it keeps, the longest unused first.
        most_images: Of them (count).
        share: Of the prefill of an image.
        encoded: Images (count).
    """

    most_images = 16
    share = 0.5
    encoded = 0

    def submit(self, sim_request: SimRequest) -> None:
        """Encode the image where that is needed, and give the request to the engine."""
        work = sim_request.work
        image, last = work.media[0], work.media[0].start + work.media[0].size
        cached = KEY_TOKENS * self.engine.pool.match(work.keys, len(work.keys))
        if 4 * cached < last - 4 * KEY_TOKENS:
            embeddings = self.__dict__.setdefault("embeddings", OrderedDict())
            if image.digest not in embeddings:
                self.encoded += 1
                more = round(self.share * image.tokens)
                sim_request.work = msgspec.structs.replace(
                    work, prompt_tokens=work.prompt_tokens + more
                )
            embeddings[image.digest] = None
            embeddings.move_to_end(image.digest)
            if len(embeddings) > self.most_images:
                embeddings.popitem(last=False)
        super().submit(sim_request)


def requests(place: str, count: int, rng: random.Random) -> list[RequestSpec]:
    """Requests with images of Zipf's law."""
    streams = Streams()
    weights = list(itertools.accumulate(1.0 / rank for rank in range(1, IMAGES + 1)))
    specs = []
    total = QUESTION_TOKENS + IMAGE_TOKENS
    for number, image in enumerate(rng.choices(range(IMAGES), cum_weights=weights, k=count)):
        start = 0 if place == "before" else 4 * QUESTION_TOKENS
        span = MediaSpan(
            "image", start, 4 * IMAGE_TOKENS, IMAGE_TOKENS, is_sized=True, digest=image + 1
        )
        keys = (
            streams.joined(("image", image), number, first=IMAGE_TOKENS, tokens=total)
            if place == "before"
            else streams.keys(number, total)
        )
        output = max(1, round(rng.expovariate(1.0 / OUTPUT_TOKENS)))
        specs.append(
            RequestSpec(prompt_tokens=total, output_tokens=output, keys=keys, media=(span,))
        )
    return specs


class EncoderFleet:
    """Engines with encoders, a picker, and clients that do not wait for one another."""

    def __init__(self, strategy: str, place: str, *, requests_s: float, seed: int, **node: float):
        self.timeline = EventQueue()
        profile = profiles.find("l4-8b-fp8")
        self.nodes = [
            EncodingNode(self.timeline, profile, finished=self._ended, gaps=lambda *_: None)
            for _ in range(NODES)
        ]
        for engine in self.nodes:
            engine.__dict__.update(node)
            engine.start()
        self.picker = ExtprocPicker(
            Settings(seed=seed),
            self.nodes,
            timeline=self.timeline,
            delay_s=0.005,
            models=ServedModels(frozenset({MODEL})),
        )
        self.picker.listed(range(NODES))
        director = self.picker.parts.director
        chosen = _profile(strategy, director.routing.profile)
        director.reconfigure(msgspec.structs.replace(director.routing, profile=chosen))
        self._rng, self._rate, self._place = random.Random(seed), requests_s, place
        self._done: list[SimRequest] = []

    def change_cost(self, cost: EstimatedTime) -> None:
        """Decide by the default strategy with another cost."""
        director = self.picker.parts.director
        profile = msgspec.structs.replace(director.routing.profile, cost=cost)
        director.reconfigure(msgspec.structs.replace(director.routing, profile=profile))

    def run(self, count: int) -> dict[str, float]:
        """Run to the end; returns the share of encoded images, mean and p99 of TTFT (s)."""
        at = 5.0
        for number, spec in enumerate(requests(self._place, count, self._rng)):
            at += self._rng.expovariate(self._rate)
            self.timeline.at(at, lambda number=number, spec=spec: self._send(number, spec))
        while len(self._done) < count and self.timeline.step():
            pass
        warm = self._done[count // 4 :]
        ttft_s = sorted(request.first_s for request in warm)
        return {
            "encoded": sum(node.encoded for node in self.nodes) / count,
            "ttft_mean_s": sum(ttft_s) / len(ttft_s),
            "ttft_p99_s": ttft_s[int(len(ttft_s) * 0.99)],
        }

    def _send(self, number: int, spec: RequestSpec) -> None:
        sim_request = SimRequest(f"r{number}", spec, self.timeline.now)
        sim_request.node = self.picker.pick(sim_request)
        self.nodes[sim_request.node].submit(sim_request)

    def _ended(self, sim_request: SimRequest) -> None:
        self.picker.ended(sim_request)
        self._done.append(sim_request)


def _profile(strategy: str, adaptive: SchedulerProfile) -> SchedulerProfile:
    balanced = registry.profiles()["balanced"]
    match strategy:
        case "adaptive":
            return adaptive
        case "adaptive, blind":
            return msgspec.structs.replace(adaptive, cost=EstimatedTime(encoder_share=0.0))
        case "balanced":
            return balanced
    scorers = (*balanced.scorers, (MmEmbeddingsCacheScorer(entries_per_server=16), 2.0))
    return msgspec.structs.replace(balanced, scorers=scorers)


def main() -> None:
    """Run all cases and print the means over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--write", action="store_true", help="keep the result in bench/results")
    args = parser.parse_args()
    results = []
    for place, share, images, rate in CASES:
        for strategy in STRATEGIES:
            runs = [
                EncoderFleet(
                    strategy, place, requests_s=rate, seed=seed, share=share, most_images=images
                ).run(args.requests)
                for seed in range(args.seeds)
            ]
            means = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
            case = {"place": place, "share": share, "images": images, "rate": rate}
            results.append({**case, "strategy": strategy, **means})
            shown = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
            print(
                f"{place:7} {share:.1f} {images:5} {rate:4.0f}  {strategy:18} {shown}", flush=True
            )
    if args.write:
        rig.write(
            "encoder_caches",
            "python -m bench.encoder_caches --write",
            {"seeds": args.seeds, "requests": args.requests, "cases": results},
        )


#: Place of the image, share of the prefill that encoding takes, images kept by an engine, requests/s.
CASES = (
    ("behind", 0.0, 16, 26.0),
    ("behind", 0.25, 16, 26.0),
    ("behind", 0.5, 16, 20.0),
    ("behind", 0.5, 16, 26.0),
    ("behind", 1.0, 16, 20.0),
    ("behind", 0.5, 4, 26.0),
    ("behind", 0.5, 2048, 26.0),
    ("before", 0.5, 16, 26.0),
)


if __name__ == "__main__":
    main()
