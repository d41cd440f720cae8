"""Kinds of traffic that scenarios of the arena are made of, each drawn from a seed.

A kind is a workload without end: how many of its sessions are sent says the time until which they
begin. Lengths are drawn log-uniformly within bounds that fit what the kind is known for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

import msgspec

from extproc.simulator.fleet.workloads import (
    ConversationWorkload,
    Independent,
    Lengths,
    SharedPrefix,
)

Traffic = Independent | SharedPrefix | ConversationWorkload

#: More sessions than any scenario sends.
_ENDLESS = 10**6

#: Tokens of the longest prompt with its answer; every simulated engine takes them.
LONGEST_TOKENS = 10_000


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """A number between two others, evenly in its logarithm."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _tokens(
    rng: random.Random, low: float, high: float, *, highest: float = LONGEST_TOKENS / 2
) -> Lengths:
    """Lengths with a long tail and a mean between the two."""
    mean = round(log_uniform(rng, low, high))
    deviation = round(mean * rng.uniform(0.2, 1.2))
    return Lengths(mean=mean, deviation=deviation, shape="lognormal", lowest=1, highest=highest)


def _pauses(rng: random.Random, low: float, high: float) -> Lengths:
    """Pauses of a whole session, as a share of the time that a scenario takes; see `with_pauses`."""
    mean = round(log_uniform(rng, low, high), 4)
    return Lengths(mean=mean, shape="exponential", lowest=0.0)


def with_pauses(workload: Traffic, duration_s: float) -> Traffic:
    """The workload with pauses in seconds, where a fleet takes so long for all requests.

    Scenarios are short. With pauses of people none would have two turns of a session while it is busy.
    """
    if not isinstance(workload, ConversationWorkload):
        return workload
    mean_s = workload.think_s.mean * duration_s / workload.turns.mean
    pauses = Lengths(mean=round(mean_s, 4), shape="exponential", lowest=0.0)
    return msgspec.structs.replace(workload, think_s=pauses)


def _turns(rng: random.Random, low: float, high: float) -> Lengths:
    return Lengths(mean=round(rng.uniform(low, high), 1), shape="exponential", lowest=1, highest=40)


def chat(rng: random.Random) -> Traffic:
    """People who read answers, and few system prompts."""
    return ConversationWorkload(
        conversations=_ENDLESS,
        turns=_turns(rng, 2.5, 8),
        prompt=_tokens(rng, 40, 400, highest=3000),
        output=_tokens(rng, 40, 300, highest=1200),
        think_s=_pauses(rng, 0.05, 0.6),
        system=Lengths(mean=round(log_uniform(rng, 20, 2000))),
        systems=rng.randint(1, 6),
        longest_tokens=LONGEST_TOKENS // 2,
    )


def agents(rng: random.Random) -> Traffic:
    """Programs that answer at once with the output of a tool."""
    return ConversationWorkload(
        conversations=_ENDLESS,
        turns=_turns(rng, 6, 15),
        prompt=_tokens(rng, 80, 800, highest=6000),
        output=_tokens(rng, 20, 150, highest=800),
        think_s=_pauses(rng, 0.005, 0.05),
        system=Lengths(mean=round(log_uniform(rng, 500, 4000))),
        systems=rng.randint(1, 4),
        longest_tokens=LONGEST_TOKENS,
    )


def shared_documents(rng: random.Random) -> Traffic:
    """Short questions about a few long texts, of which a single one may be asked for more often."""
    return SharedPrefix(
        requests=_ENDLESS,
        groups=round(log_uniform(rng, 4, 200)),
        prefix=_tokens(rng, 800, 4000),
        prompt=_tokens(rng, 15, 200, highest=2000),
        output=_tokens(rng, 10, 250, highest=1000),
        hot_share=rng.choice((0.0, 0.0, round(rng.uniform(0.1, 0.6), 2))),
    )


def code_completion(rng: random.Random) -> Traffic:
    """Files that are edited: a long beginning, little added, a few tokens of answer."""
    return ConversationWorkload(
        conversations=_ENDLESS,
        turns=_turns(rng, 5, 14),
        prompt=_tokens(rng, 10, 80, highest=1000),
        output=_tokens(rng, 5, 40, highest=200),
        think_s=_pauses(rng, 0.02, 0.2),
        system=Lengths(
            mean=round(log_uniform(rng, 400, 3000)),
            deviation=500,
            lowest=100,
            highest=LONGEST_TOKENS / 2,
        ),
        systems=round(log_uniform(rng, 8, 200)),
        longest_tokens=LONGEST_TOKENS,
    )


def batch(rng: random.Random) -> Traffic:
    """Prompts that share nothing, with long answers that no user waits for."""
    return Independent(
        requests=_ENDLESS,
        prompt=_tokens(rng, 200, 2500),
        output=_tokens(rng, 200, 700, highest=2000),
    )


def long_documents(rng: random.Random) -> Traffic:
    """Texts of thousands of tokens, each sent once."""
    return Independent(
        requests=_ENDLESS,
        prompt=_tokens(rng, 2500, 6000, highest=LONGEST_TOKENS * 0.8),
        output=_tokens(rng, 40, 300, highest=1200),
    )


def embeddings(rng: random.Random) -> Traffic:
    """Prompts that are answered in the iteration that computes them."""
    return Independent(
        requests=_ENDLESS,
        prompt=_tokens(rng, 50, 1000, highest=6000),
        output=Lengths(mean=1),
    )


KINDS: Mapping[str, Callable[[random.Random], Traffic]] = {
    "chat": chat,
    "agents": agents,
    "shared documents": shared_documents,
    "code completion": code_completion,
    "batch": batch,
    "long documents": long_documents,
    "embeddings": embeddings,
}
