"""Traffic of the demo: conversations through Envoy, some of them on LoRA adapters."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

_WORDS = (
    "engine", "request", "prefix", "cache", "token", "batch", "queue", "layer", "answer", "prompt",
    "route", "stream", "block", "adapter", "latency", "turn", "model", "reply", "score", "pick",
)  # fmt: skip

#: Characters of the parts of a conversation; four make a token in the simulated engine.
_SYSTEM_CHARS = 800
_FIRST_CHARS = 2400
_NEXT_CHARS = 600
_ANSWER_TOKENS = 32

#: Seconds without a byte after which a request counts as failed. Beside much other work first tokens
#: take some seconds.
_SILENCE_S = 60.0


class ChatConversation(msgspec.Struct, frozen=True):
    """Planned turns of one client.

    Attributes:
        model: Base model or adapter.
        system: The system prompt, shared by a group of conversations.
        turns: What the user says, in order.
    """

    model: str
    system: str
    turns: tuple[str, ...]


class AnswerSample(msgspec.Struct, frozen=True):
    """One answer.

    Attributes:
        status: HTTP status; 0 if there was no answer.
        engine: Which engine says it answered.
        ttft_s: Seconds to the first piece of text.
        first: Whether it was the first turn of its conversation.
    """

    status: int
    engine: str
    ttft_s: float
    first: bool


def conversations(
    count: int, turns: int, *, model: str, adapters: Sequence[str], seed: int
) -> list[ChatConversation]:
    """Generate conversations; equal seeds generate equal ones.

    Args:
        model: Base model of three quarters of them.
        adapters: The rest are spread over these.
    """
    rng = random.Random(seed)
    systems = [_text(rng, _SYSTEM_CHARS) for _ in range(4)]
    invented = []
    for number in range(count):
        lora = number % 4 == 3
        sizes = [_FIRST_CHARS, *[_NEXT_CHARS] * (turns - 1)]
        invented.append(
            ChatConversation(
                model=adapters[number // 4 % len(adapters)] if lora else model,
                system=systems[number % len(systems)],
                turns=tuple(_text(rng, size) for size in sizes),
            )
        )
    return invented


async def play(
    url: str,
    talks: Sequence[ChatConversation],
    *,
    at_once: int,
    on_answer: Callable[[AnswerSample], None],
) -> list[AnswerSample]:
    """Hold all conversations, some at once, each turn after the answer to the one before.

    Args:
        url: Base URL of Envoy.
        at_once: How many are held at the same time.
        on_answer: Called with each answer; what it raises ends all conversations.
    """
    samples: list[AnswerSample] = []
    places = asyncio.Semaphore(at_once)

    def note(sample: AnswerSample) -> None:
        samples.append(sample)
        on_answer(sample)

    async def hold(session: aiohttp.ClientSession, talk: ChatConversation) -> None:
        async with places:
            messages = [{"role": "system", "content": talk.system}]
            for number, text in enumerate(talk.turns):
                messages.append({"role": "user", "content": text})
                sample, answer = await _ask(session, talk.model, messages, first=number == 0)
                note(sample)
                messages.append({"role": "assistant", "content": answer})

    timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
    try:
        async with (
            aiohttp.ClientSession(url, timeout=timeout) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for number, talk in enumerate(talks):
                tasks.create_task(hold(session, talk), name=f"conversation {number}")
    except BaseExceptionGroup as failures:
        # Alone, as from the caller's own code: a closed pipe is no error of the conversations.
        raise failures.exceptions[0] from None
    return samples


async def _ask(
    session: aiohttp.ClientSession, model: str, messages: Sequence[dict[str, str]], *, first: bool
) -> tuple[AnswerSample, str]:
    """Send one turn; returns its measurements and the text of the answer."""
    body = {"model": model, "messages": messages, "max_tokens": _ANSWER_TOKENS, "stream": True}
    began = time.perf_counter()
    ttft_s = 0.0
    pieces: list[str] = []
    try:
        async with session.post("/v1/chat/completions", json=body) as response:
            engine = response.headers.get("x-inference-port", "")
            async for line in response.content:
                text = _piece(line)
                if not text:
                    continue
                if not pieces:
                    ttft_s = time.perf_counter() - began
                pieces.append(text)
            return AnswerSample(response.status, engine, ttft_s, first), "".join(pieces)
    except (aiohttp.ClientError, TimeoutError):
        return AnswerSample(0, "", 0.0, first), ""


def _piece(line: bytes) -> str:
    """The text in one SSE line; empty for any other line."""
    if not line.startswith(b"data: {"):
        return ""
    event = msgspec.json.decode(line[6:])
    choices = event.get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")


def _text(rng: random.Random, size: int) -> str:
    words = []
    length = 0
    while length < size:
        word = rng.choice(_WORDS)
        words.append(word)
        length += len(word) + 1
    return " ".join(words)
