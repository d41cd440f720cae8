"""Scenarios of the arena, each drawn from its seed.

What is drawn does not depend on the strategies: the rate of a scenario is a share of the saturation
that `bench.arena.saturation` finds with a published strategy. A few hundred requests make a scenario.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from bench.arena import traffic
from extproc.simulator import profiles
from extproc.simulator.fleet.scenario import EngineGroup, Outage, Picking, Scenario
from extproc.simulator.fleet.sim_request import RequestSpec
from extproc.simulator.fleet.workloads import Group, Groups

#: First seed of each set; a set has seeds up to the next one's first.
SETS = {"training": 1, "validation": 1001, "test": 2001}

#: Machines that hold the same model of 7 or 8 billion parameters.
_MACHINES = ("l4-8b-fp8", "l4-8b-fp8-2k", "a100-8b-bf16", "a100-7b-fp16", "h100-8b-bf16")

_SIZES = (1, 2, 2, 2, 3, 3, 4, 4, 4, 6, 6, 8, 8, 8, 12, 12, 16, 24, 32)

#: Shares of saturation. Most fleets run below it; 1.05 and 1.2 are overload.
_LOADS = (0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.05, 1.2)

_DRIFTS = ("", "", "", "", "new system prompt", "new tenant", "engine lost", "burst")

#: Seconds after which pickers that exchange their requests know of one.
EXCHANGE_S = 0.02

#: Sessions that means of a workload are taken over.
_SAMPLE = 100


@dataclass(frozen=True)
class ArenaScenario:
    """A scenario before its rate is known.

    Attributes:
        seed: Of all that was drawn, and of the simulation.
        kinds: Kinds of traffic in it.
        drift: What changes in the middle; empty for nothing.
        load: Share of saturation.
        requests: Requests that are sent, about.
        fleet: The engines.
        picking: The pickers.
        parts: Workloads, each with its share of the sessions.
    """

    seed: int
    kinds: Sequence[str]
    drift: str
    load: float
    requests: int
    fleet: Sequence[EngineGroup]
    picking: Picking
    parts: Sequence[tuple[traffic.Traffic, float]]

    @property
    def exchanging(self) -> ArenaScenario:
        """The same with pickers that exchange their requests."""
        picking = msgspec.structs.replace(self.picking, share_delay_s=EXCHANGE_S)
        return dataclasses.replace(self, picking=picking)

    @property
    def engines(self) -> int:
        """Engines of the fleet."""
        return sum(group.count for group in self.fleet)

    @property
    def requests_per_session(self) -> float:
        """Mean requests of a session."""
        return _requests_per_session(self.parts, self.seed)

    @property
    def key(self) -> str:
        """Short name of all that was drawn: what is found for another one does not hold for this."""
        drawn = msgspec.json.encode((self.at_rate(1.0), self.load))
        return hashlib.sha256(drawn).hexdigest()[:12]

    @property
    def traits(self) -> tuple[str, ...]:
        """Names of what strategies find easy or hard in it."""
        alike, picking = len(self.fleet) == 1, self.picking
        busy = "0.9 of saturation and more" if self.load >= 0.9 else "0.5 to 0.8 of saturation"
        return (
            "a single engine"
            if self.engines == 1
            else "alike engines"
            if alike
            else "unlike engines",
            "a single picker" if picking.replicas == 1 else "several pickers",
            f"{'old' if picking.scrape_s or picking.delay_s >= 1.0 else 'fresh'} metrics",
            busy if self.load >= 0.5 else "below 0.5 of saturation",
        )

    def at_rate(self, rate_per_s: float) -> Scenario:
        """The scenario with so many sessions per second, as `extproc simulate` takes it."""
        duration_s = self.requests / (self.requests_per_session * rate_per_s)
        groups = [
            Group(
                tenant=f"tenant-{n}",
                rate_per_s=rate_per_s * share,
                until_s=duration_s,
                workload=workload,
            )
            for n, (workload, share) in enumerate(self.parts)
        ]
        middle_s = duration_s / 2
        outages = []
        if self.drift == "new system prompt":
            # The same traffic over other texts: groups share no blocks.
            before = msgspec.structs.replace(groups[0], until_s=middle_s)
            after = msgspec.structs.replace(groups[0], tenant="after", from_s=middle_s)
            groups = [before, *groups[1:], after]
        elif self.drift == "new tenant":
            groups[-1] = msgspec.structs.replace(groups[-1], from_s=middle_s)
        elif self.drift == "burst":
            burst = {"from_s": middle_s, "until_s": middle_s + duration_s / 10}
            rate = groups[0].rate_per_s * 2
            groups.append(
                msgspec.structs.replace(groups[0], tenant="burst", rate_per_s=rate, **burst)
            )
        elif self.drift == "engine lost":
            back_s = None if self.seed % 2 else duration_s / 4
            outages = [Outage(engine=self.seed % self.engines, at_s=middle_s, back_s=back_s)]
        return Scenario(
            title=self.title,
            fleet=self.fleet,
            workload=Groups(groups=groups),
            picking=self.picking,
            outages=outages,
            seeds=[self.seed],
        )

    @property
    def title(self) -> str:
        """One line."""
        machines = " + ".join(f"{group.count} {group.profile}" for group in self.fleet)
        drift = f", {self.drift}" if self.drift else ""
        return f"{' and '.join(self.kinds)} on {machines} at {self.load:g} of saturation{drift}"


def draw(seed: int, *, may_test: bool = False) -> ArenaScenario:
    """The scenario of a seed.

    Args:
        may_test: Whether seeds of the test set may be drawn; nothing else than a recorded run does.

    Raises:
        ValueError: The seed belongs to the test set.
    """
    if seed >= SETS["test"] and not may_test:
        raise ValueError(
            f"expected a seed below {SETS['test']}, got {seed} of the test set; "
            "the test set is run with python -m bench.arena --test"
        )
    rng = random.Random(f"arena {seed}")
    size = rng.choice(_SIZES)
    kinds = _draw_kinds(rng)
    drift = rng.choice(_DRIFTS)
    if size == 1 and drift == "engine lost":
        drift = "burst"
    if drift == "new tenant" and len(kinds) == 1:
        kinds = [*kinds, rng.choice([kind for kind in traffic.KINDS if kind not in kinds])]
    adapters = rng.randint(2, 24) if rng.random() < 0.2 else 0
    parts = [
        (_with_adapters(traffic.KINDS[kind](rng), adapters if n == 0 else 0), share)
        for n, (kind, share) in enumerate(_with_shares(kinds, rng))
    ]
    requests = min(900, 300 + 40 * size)
    fleet = _draw_fleet(rng, size, parts, requests=requests, seed=seed)
    if adapters:
        slots, load_s = rng.randint(1, 8), round(traffic.log_uniform(rng, 0.03, 1.0), 3)
        fleet = [_with_slots(group, slots, load_s) for group in fleet]
    sessions_per_s = estimate_rate(fleet, parts, seed)
    duration_s = requests / _requests_per_session(parts, seed) / sessions_per_s
    parts = [(traffic.with_pauses(workload, duration_s), share) for workload, share in parts]
    return ArenaScenario(
        seed=seed,
        kinds=[*kinds, *(["LoRA"] if adapters else [])],
        drift=drift,
        load=rng.choice(_LOADS),
        requests=requests,
        fleet=fleet,
        picking=_draw_picking(rng),
        parts=parts,
    )


def estimate_rate(
    fleet: Sequence[EngineGroup], parts: Sequence[tuple[traffic.Traffic, float]], seed: int
) -> float:
    """Sessions per second of full batches with half of the prompt tokens cached."""
    seconds = [0.0 for _ in fleet]
    for workload, share in parts:
        source = workload.source(random.Random(seed))
        sampled = [next(source).specs for _ in range(_SAMPLE)]
        for n, group in enumerate(fleet):
            profile = group.resolved()
            spent = sum(_request_s(profile, spec) for specs in sampled for spec in specs)
            seconds[n] += share * spent / len(sampled)
    return sum(group.count / s for group, s in zip(fleet, seconds, strict=True))


def _request_s(profile: profiles.EngineProfile, spec: RequestSpec) -> float:
    """Seconds of an engine that one request of a full batch takes."""
    context = spec.prompt_tokens + spec.output_tokens / 2
    batch = max(1.0, min(32.0, profile.max_num_seqs, profile.kv_tokens / context))
    token_s = profile.base_s / batch + profile.decode_s_per_seq
    token_s += profile.context_s_per_token * context
    return 0.5 * spec.prompt_tokens * profile.prefill_s_per_token + spec.output_tokens * token_s


def _draw_kinds(rng: random.Random) -> list[str]:
    kinds = list(traffic.KINDS)
    if rng.random() < 0.6:
        return [rng.choice(kinds)]
    return rng.sample(kinds, rng.choice((2, 2, 3)))


def _with_shares(kinds: Sequence[str], rng: random.Random) -> list[tuple[str, float]]:
    weights = [rng.uniform(0.2, 1.0) for _ in kinds]
    return [(kind, weight / sum(weights)) for kind, weight in zip(kinds, weights, strict=True)]


def _with_adapters(workload: traffic.Traffic, adapters: int) -> traffic.Traffic:
    return msgspec.structs.replace(workload, adapters=adapters) if adapters else workload


def _with_slots(group: EngineGroup, slots: int, load_s: float) -> EngineGroup:
    extra = {"max_loras": slots, "lora_load_s": load_s}
    return msgspec.structs.replace(group, set={**group.set, **extra})


def _draw_fleet(
    rng: random.Random,
    size: int,
    parts: Sequence[tuple[traffic.Traffic, float]],
    *,
    requests: int,
    seed: int,
) -> list[EngineGroup]:
    """Engines whose caches together hold a tenth to ten times what is sent."""
    types = min(size, rng.choice((1, 1, 1, 2, 2, 3)))
    ratio = traffic.log_uniform(rng, 0.1, 10.0)
    share_tokens = round(ratio * _distinct_tokens(parts, requests, seed) / size)
    # The longest request has to fit, with others beside it.
    tokens = min(4_000_000, max(round(1.2 * traffic.LONGEST_TOKENS), share_tokens))
    machines = rng.sample(_MACHINES, types)
    cuts = sorted(rng.sample(range(1, size), types - 1))
    counts = [high - low for low, high in zip([0, *cuts], [*cuts, size], strict=True)]
    sequences = rng.choice((32, 64, 128, 256, 256))
    groups = []
    for machine, count in zip(machines, counts, strict=True):
        speed = 1.0 if types == 1 else round(traffic.log_uniform(rng, 0.4, 1.0), 2)
        limits = {
            "kv_tokens": tokens,
            "max_model_len": traffic.LONGEST_TOKENS,
            "max_num_seqs": sequences,
        }
        hidden = rng.random() < 0.05
        groups.append(
            EngineGroup(
                count=count, profile=machine, speed=speed, set=limits, has_metrics=not hidden
            )
        )
    return groups


def _draw_picking(rng: random.Random) -> Picking:
    replicas = rng.choice((1, 1, 1, 1, 2, 2, 3, 4))
    shares = replicas > 1 and rng.random() < 0.3
    return Picking(
        replicas=replicas,
        share_delay_s=EXCHANGE_S if shares else None,
        scrape_s=rng.choice((None, None, None, None, 1.0, 5.0, 15.0)),
        delay_s=rng.choice((0.005, 0.005, 0.005, 0.1, 1.0)),
        with_max_tokens=rng.random() < 0.15,
    )


def _requests_per_session(parts: Sequence[tuple[traffic.Traffic, float]], seed: int) -> float:
    total = 0.0
    for workload, share in parts:
        source = workload.source(random.Random(seed))
        sizes = [len(next(source).specs) for _ in range(_SAMPLE)]
        total += share * sum(sizes) / _SAMPLE
    return total


def _distinct_tokens(
    parts: Sequence[tuple[traffic.Traffic, float]], requests: int, seed: int
) -> int:
    """Tokens of the blocks that so many requests are made of, each block once."""
    sessions = requests / _requests_per_session(parts, seed)
    blocks = 0
    for workload, share in parts:
        source = workload.source(random.Random(seed))
        keys: set[int] = set()
        for _ in range(max(1, round(sessions * share))):
            for spec in next(source).specs:
                keys.update(spec.keys)
        blocks += len(keys)
    size = profiles.find("demo").block_tokens
    return max(1, blocks * size)
