"""Model names of a server: the base model and its LoRA adapters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec
from aiohttp import web

from extproc.simulator.http import responses


class _UnloadRequest(msgspec.Struct):
    lora_name: str


class _LoadRequest(_UnloadRequest):
    lora_path: str


_RequestT = TypeVar("_RequestT", bound=_UnloadRequest)


class Adapters:
    """The adapter names a server knows, and the routes that list and change them.

    Args:
        names: Adapters known from the start.
        max_model_len: Longest context of the base model, in tokens.
    """

    def __init__(self, base: str, names: Iterable[str], *, max_model_len: int) -> None:
        self.names = list(names)
        self._base = base
        self._longest = max_model_len

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Base model and adapters; an adapter names its parent."""
        del request
        base = self._card(self._base, None)
        cards = [base, *(self._card(name, self._base) for name in self.names)]
        return web.json_response({"object": "list", "data": cards})

    def _card(self, name: str, parent: str | None) -> Mapping[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": name,
            "parent": parent,
            "max_model_len": None if parent else self._longest,
            "permission": [],
        }

    async def load(self, request: web.Request) -> web.StreamResponse:
        """Make an adapter known; it comes to the device with its first request."""
        body = await _read(request, _LoadRequest)
        if isinstance(body, web.Response):
            return body
        name = body.lora_name
        if not name or not body.lora_path:
            message = "Both 'lora_name' and 'lora_path' must be provided."
            return responses.failure(message, "InvalidUserInput", 400)
        if name in self.names:
            message = f"The lora adapter '{name}' has already been loaded."
            return responses.failure(message, "InvalidUserInput", 400)
        self.names.append(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: web.Request) -> web.StreamResponse:
        """Forget an adapter; requests under way end as they would."""
        body = await _read(request, _UnloadRequest)
        if isinstance(body, web.Response):
            return body
        name = body.lora_name
        if not name:
            message = "'lora_name' needs to be provided to unload a LoRA adapter."
            return responses.failure(message, "InvalidUserInput", 400)
        if name not in self.names:
            message = f"The lora adapter '{name}' cannot be found."
            return responses.failure(message, "NotFoundError", 404)
        self.names.remove(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


async def _read(request: web.Request, kind: type[_RequestT]) -> _RequestT | web.Response:
    """The body, or vLLM's error response where a field is missing or no text."""
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return responses.bad_request(str(error))
