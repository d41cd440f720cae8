"""Parser of /v1/models pages.

vLLM lists its base model under every served name and, with `parent` set to the base model, each
LoRA adapter it can serve, loaded or not (docs/spec/engines.md#models-page). Other engines list the
base model. A list that cannot be read whole is no list: who is missing from it would be kept from
traffic.
"""

from __future__ import annotations

from typing import Final

import msgspec

from extproc.endpoint import ServedModels
from extproc.request import is_long_name

#: Where OpenAI's API has the list, and so every engine that speaks it.
PATH: Final = "/v1/models"

#: Names taken from one engine (count); far more adapters than one serves.
MAX_NAMES: Final = 4096

#: Longest page read. A card of vLLM has about 500 bytes.
MAX_BYTES: Final = MAX_NAMES * 512


class _Card(msgspec.Struct, gc=False):
    """One entry; `parent` may be of any type, since some engines use the field otherwise.

    It is not built before its type is known: two bytes of JSON can make an object of a hundred.
    """

    id: str
    parent: msgspec.Raw = msgspec.Raw()


class _Page(msgspec.Struct, gc=False):
    data: list[_Card]


_DECODER = msgspec.json.Decoder(_Page)
_TEXT = msgspec.json.Decoder(str)


def read(page: bytes) -> ServedModels | None:
    """Returns the model names on a page.

    Returns:
        None when it is no such page, lists nothing, or lists more than `MAX_NAMES` names or one
        that no request may carry (`request.MAX_NAME_BYTES`).
    """
    if len(page) > MAX_BYTES:
        return None
    try:
        cards = _DECODER.decode(page).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not cards or len(cards) > MAX_NAMES:
        return None
    if any(not card.id or is_long_name(card.id) for card in cards):
        return None
    try:
        adapters = frozenset(card.id for card in cards if _is_adapter(card))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return ServedModels(frozenset(card.id for card in cards) - adapters, adapters)


def _is_adapter(card: _Card) -> bool:
    """Returns True if a card names another card as its parent."""
    if bytes(memoryview(card.parent)[:1]) != b'"':
        return False
    return _TEXT.decode(card.parent) not in ("", card.id)
