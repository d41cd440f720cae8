"""Text as an engine sees it: rendered, counted in tokens, hashed in blocks, answered.

The stand-in for a tokenizer: every 4 UTF-8 bytes of prompt and answer together are one token, the
last one of a prompt may be shorter. Answers are 4-byte words picked by the hash of the prompt, so
that one word is one token and a follow-up turn that carries the answer finds its blocks cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

BYTES_PER_TOKEN = 4

#: 256 words of a space and three letters: one byte of a hash picks one.
_WORDS = tuple(f" {a}{b}{c}" for a in "bdfklmrt" for b in "aeio" for c in "gnpsvxyz")


def count(text: bytes) -> int:
    """Tokens of a text; at least 1."""
    return max(1, -(-len(text) // BYTES_PER_TOKEN))


def answer(prompt: bytes, tokens: int) -> str:
    """Text of an answer: `tokens` words, the same for the same prompt."""
    return "".join([_WORDS[pick] for pick in hashlib.shake_128(prompt).digest(tokens)])


def hashes(text: bytes, *, salt: str, block_tokens: int) -> list[int]:
    """One hash per full block of a text, each of everything up to the block's end.

    Args:
        text: Prompt and answer.
        salt: What keeps equal texts apart: adapter and cache salt.

    Returns:
        Non-negative 63-bit integers in prefix order.
    """
    chain = hashlib.blake2b(salt.encode(), digest_size=8)
    size = block_tokens * BYTES_PER_TOKEN
    view = memoryview(text)
    block_hashes = []
    for end in range(size, len(text) + 1, size):
        chain.update(view[end - size : end])
        block_hashes.append(int.from_bytes(chain.digest(), "big") >> 1)
    return block_hashes


def chat(turns: Iterable[tuple[str, Any]], *, tools: Any = None) -> bytes:
    """A conversation as one prompt that ends where the assistant begins to speak.

    The prompt of a turn, followed by its answer, is the beginning of the next turn's prompt.

    Args:
        turns: Role and content; content is text, a list of parts, or anything JSON.
        tools: Tool definitions, rendered before everything else.
    """
    out = [] if not tools else [b"<|tools|>", msgspec.json.encode(tools), b"<|end|>"]
    for role, content in turns:
        out += [f"<|{role}|>".encode(), content_text(content), b"<|end|>"]
    out.append(b"<|assistant|>")
    return b"".join(out)


def content_text(content: Any) -> bytes:
    """Message content as text: text parts as they are, anything else as JSON."""
    match content:
        case None:
            return b""
        case str():
            return content.encode()
        case list():
            return b"".join([content_text(part) for part in content])
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return content_text(text)
        case _:
            return msgspec.json.encode(content)


def token_ids(text: bytes) -> list[int]:
    """Tokens of a text as numbers, each the four bytes that it stands for."""
    size = BYTES_PER_TOKEN
    return [int.from_bytes(text[at : at + size], "little") for at in range(0, len(text), size)]


def token_id(token: int) -> bytes:
    """One token of a tokenized prompt: 4 bytes."""
    return (token & 0xFFFFFFFF).to_bytes(BYTES_PER_TOKEN, "little")
