"""Prompts without a conversation: text, token ids, and batches of either."""

from __future__ import annotations

import msgspec

from extproc.parsing import canonical_prompt, tokens
from extproc.request import BYTES_PER_TOKEN


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt and its size.

    Attributes:
        content: Stable bytes: equal beginnings are equal bytes.
        tokens: Exact for token ids, else estimated; the sum over a batch.
        text_bytes: Bytes of text that `tokens` is estimated from; 0 for token ids.
    """

    content: bytes
    tokens: int
    text_bytes: int = 0


NOTHING = Prompt(b"", 0)


def estimate(size: int) -> int:
    """Tokens in so many bytes of text: a quarter, at least one when there is any."""
    return size // BYTES_PER_TOKEN or (1 if size else 0)


def text_prompt(content: bytes) -> Prompt:
    """A prompt already put into stable bytes, with an estimate of its tokens."""
    return Prompt(content, estimate(len(content)), len(content))


def prompt_of(value: object) -> Prompt | None:
    """Read a `prompt` or `input` value.

    A string is its UTF-8; token ids are four little-endian bytes each, so that blocks of bytes are
    blocks of tokens. Of a batch the first member comes first, the others follow after separators.

    Returns:
        None when the value is absent, empty as a list, or of a type no surface takes.
    """
    if type(value) is str:
        return text_prompt(value.encode())
    if type(value) is tokens.Packed:
        return Prompt(value.ids, len(value.ids) // tokens.WIDTH)
    if type(value) is bytes:
        return text_prompt(value)
    if type(value) is dict or type(value) is msgspec.Raw:
        return text_prompt(canonical_prompt.item(value))
    if type(value) is not list or not value:
        return None
    first = value[0]
    if type(first) is int:
        packed = tokens.pack(value)
        if packed is not None:
            return Prompt(packed, len(value))
    elif type(first) is list or type(first) is tokens.Packed:
        batch = [_packed(ids) for ids in value]
        rows = [row for row in batch if row is not None]
        if len(rows) == len(batch):
            return Prompt(tokens.SEPARATOR.join(rows), sum(map(len, rows)) // tokens.WIDTH)
    # The first text has no marker before it: alone or first in a batch, it is the same prefix.
    content = canonical_prompt.content(value)
    return text_prompt(content.removeprefix(canonical_prompt.TEXT))


def _packed(ids: object) -> bytes | None:
    if type(ids) is tokens.Packed:
        return ids.ids
    return tokens.pack(ids) if type(ids) is list else None


def with_cache_salt(prompt: Prompt, salt: object) -> Prompt:
    """The prompt behind its cache salt. Salted token ids keep their alignment.

    The salt is padded with zero bytes to whole tokens and closed by a separator.
    """
    head = canonical_prompt.salt(salt)
    if not head:
        return prompt
    padding = b"\0" * (-len(head) % tokens.WIDTH)
    content = head + padding + tokens.SEPARATOR + prompt.content
    return Prompt(content, prompt.tokens, prompt.text_bytes)
