"""The session hint: what ties the turns of one conversation together.

The first of these that is a non-empty string:

| order | where | why there |
|---|---|---|
| 1 | body `prompt_cache_key` | made for this: the client says which prompts share a prefix |
| 2 | body `conversation`, `conversation.id` | names the conversation itself |
| 3 | body `metadata.session_id` | a custom of agent frameworks |
| 4 | headers, in the order of `HEADERS` | set by gateways and tools, may cover many prompts |
| 5 | body `user`, `metadata.user_id`, `safety_identifier` | names a person: many conversations |
| 6 | body `previous_response_id` | names the last turn only, so it changes with every turn |

Anthropic clients put account and session into `metadata.user_id`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.request import shorten_id

HEADERS = (
    "x-session-id",
    "x-session-token",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
)

_NAMES = frozenset(HEADERS)


def of_headers(headers: Mapping[str, str]) -> str:
    """The hint in the headers; empty when there is none."""
    if _NAMES.isdisjoint(headers):
        return ""
    for name in HEADERS:
        value = headers.get(name)
        if value:
            return shorten_id(value)
    return ""


def of_body(headers: Mapping[str, str], body: Any) -> str:
    """The hint in body and headers.

    Args:
        headers: Names in lower case.
        body: An `envelope.Envelope`, whose fields may be of any type.

    Returns:
        At most `request.MAX_ID_BYTES` bytes; empty when there is no hint.
    """
    if not (
        body.prompt_cache_key
        or body.conversation
        or body.metadata
        or body.user
        or body.safety_identifier
        or body.previous_response_id
    ):
        return of_headers(headers)
    metadata = body.metadata if type(body.metadata) is dict else {}
    conversation = body.conversation
    if type(conversation) is dict:
        conversation = conversation.get("id")
    for hint in (
        body.prompt_cache_key,
        conversation,
        metadata.get("session_id"),
        of_headers(headers),
        body.user,
        metadata.get("user_id"),
        body.safety_identifier,
        body.previous_response_id,
    ):
        if type(hint) is str and hint:
            return shorten_id(hint)
    return ""
