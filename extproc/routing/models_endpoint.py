"""`GET /v1/models`: the models of several endpoints in the format of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import unquote

import msgspec

from extproc.decision import DirectResponse, model_not_found
from extproc.protocol import error_response
from extproc.routing.director import Director

#: Where engines list their models.
PATH: Final = "/v1/models"


class ModelCard(msgspec.Struct, frozen=True):
    """An entry of the list of models.

    Attributes:
        id: Model name in requests.
        object: Always `model`.
        created: Unix seconds; 0, because engines do not agree.
        owned_by: Always the name of this server.
        root: The base model.
        parent: The base model of an adapter; None for a base model.
    """

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "extproc"
    root: str = ""
    parent: str | None = None


def requested_model(path: str) -> str | None:
    """The model that a path names: empty for the list, None for any other path."""
    path = path.rstrip("/")
    if path == PATH:
        return ""
    # The OpenAI SDK writes a slash in a name as %2F.
    return unquote(path.removeprefix(PATH + "/")) if path.startswith(PATH + "/") else None


def answer(directors: Sequence[Director], name: str) -> DirectResponse | None:
    """Build the response to a request for the list of models or for a single model.

    Args:
        directors: Whose endpoints count.
        name: From `requested_model`.

    Returns:
        None while no endpoint listed anything: an engine is asked then.
    """
    entries = _entries(directors)
    if not entries:
        return None
    if not name:
        return _json(200, {"object": "list", "data": [entries[model] for model in sorted(entries)]})
    if name in entries:
        return _json(200, entries[name])
    return DirectResponse(404, error_response.error_body(model_not_found(name, entries)))


def names(director: Director) -> frozenset[str]:
    """Model names that requests to a pool may use: served models and rewritten models."""
    return director.pool.serving.names | director.rewritten_models


def _entries(directors: Iterable[Director]) -> dict[str, ModelCard]:
    entries: dict[str, ModelCard] = {}
    for director in directors:
        for member in director.pool.members:
            models = member.serves
            if models is None:
                continue
            for base in models.bases:
                entries.setdefault(base, ModelCard(base, root=base))
            parent = min(models.bases, default=None)
            for adapter in models.adapters:
                entries.setdefault(adapter, ModelCard(adapter, root=adapter, parent=parent))
        for other in names(director):
            entries.setdefault(other, ModelCard(other, root=other))
    return entries


def _json(status: int, content: object) -> DirectResponse:
    return DirectResponse(status, msgspec.json.encode(content))
