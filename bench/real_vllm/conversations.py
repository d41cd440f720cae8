"""Conversations with real engines: turns that go on with the answers, several conversations at once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
import msgspec

from bench.real_vllm import counters, replicas, tiny

#: System prompts, each of a quarter of the conversations, and their tokens.
SYSTEMS: Final = 4
SYSTEM_TOKENS: Final = 128

CONVERSATIONS: Final = 32
TURNS: Final = 6
#: Tokens of a message of the user, and of an answer.
USER_TOKENS: Final = 80
ANSWER_TOKENS: Final = 32

#: Conversations with a request in flight.
AT_ONCE: Final = 4


class ConversationTurn(msgspec.Struct, frozen=True):
    """A request of a conversation, and its answer.

    Attributes:
        number: From 1.
        answer: What came back.
    """

    number: int
    answer: counters.EngineAnswer


def word_ids() -> list[int]:
    """Tokens that are words: text of them is tokenized as it was generated."""
    ids, _ = tiny.vocabulary()
    space = tiny.byte_letters()[ord(" ")]
    return [ids[space + word[1:]] for word in tiny.WORDS]


async def play(
    session: aiohttp.ClientSession,
    url: str,
    *,
    seed: int,
    model: str = replicas.MODEL,
    images: Sequence[Mapping[str, Any]] = (),
) -> list[ConversationTurn]:
    """Hold all conversations, each turn once the answer before it is complete.

    Args:
        session: Its timeout bounds each request.
        url: Base URL.
        seed: Of the texts, and of which conversation goes on next.
        model: Name in requests.
        images: Content parts, of which each conversation begins with the next one; none for texts.
    """
    rng = random.Random(seed)
    systems = [_words(rng, SYSTEM_TOKENS) for _ in range(SYSTEMS)]
    held: list[list[dict[str, Any]]] = [
        [{"role": "system", "content": systems[n % SYSTEMS]}] for n in range(CONVERSATIONS)
    ]
    users = [[_words(rng, USER_TOKENS) for _ in range(TURNS)] for _ in range(CONVERSATIONS)]
    #: Conversations whose answers are complete, and their turns so far.
    waiting = [(number, 0) for number in range(CONVERSATIONS)]
    turns: list[ConversationTurn] = []

    async def work() -> None:
        while waiting:
            number, done = waiting.pop(rng.randrange(len(waiting)))
            messages = held[number]
            content: Any = users[number][done]
            if images and not done:
                content = [images[number % len(images)], {"type": "text", "text": content}]
            messages.append({"role": "user", "content": content})
            answer, text = await _send(session, url, {"model": model, "messages": messages})
            turns.append(ConversationTurn(done + 1, answer))
            messages.append({"role": "assistant", "content": text})
            if done + 1 < TURNS:
                waiting.append((number, done + 1))

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())
    return turns


async def _send(
    session: aiohttp.ClientSession, url: str, turn: Mapping[str, Any]
) -> tuple[counters.EngineAnswer, str]:
    """Send a turn; returns what is known of it, and the text of the answer."""
    body = {
        **turn,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "allowed_token_ids": word_ids(),
    }
    began = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            decision = response.headers.get("x-extproc-decision", "")
            if response.status != 200:
                return counters.EngineAnswer(status=response.status, decision=decision), ""
            answer: dict[str, Any] = await response.json()
    except (aiohttp.ClientError, TimeoutError):
        return counters.EngineAnswer(status=0), ""
    usage = answer["usage"]
    row = counters.EngineAnswer(
        status=200,
        ttft_s=time.perf_counter() - began,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        decision=decision,
    )
    return row, answer["choices"][0]["message"]["content"]


def _words(rng: random.Random, tokens: int) -> str:
    return "".join(rng.choices(tiny.WORDS, k=tokens))
