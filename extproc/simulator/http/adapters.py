"""Model names of a server: the base model and its LoRA adapters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import msgspec
from aiohttp import web

from extproc.simulator.http import responses


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
        name = await self._name(request)
        if isinstance(name, web.Response):
            return name
        if name in self.names:
            message = f"The lora adapter '{name}' has already been loaded."
            return responses.failure(message, "InvalidUserInput", 400)
        self.names.append(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: web.Request) -> web.StreamResponse:
        """Forget an adapter; requests under way end as they would."""
        name = await self._name(request)
        if isinstance(name, web.Response):
            return name
        if name not in self.names:
            message = f"The lora adapter '{name}' cannot be found."
            return responses.failure(message, "NotFoundError", 404)
        self.names.remove(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _name(self, request: web.Request) -> str | web.Response:
        """`lora_name` of a body, or the error response where it is missing."""
        try:
            read = msgspec.json.decode(await request.read(), type=dict[str, object])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return responses.bad_request(str(error))
        name = read.get("lora_name")
        if isinstance(name, str) and name:
            return name
        return responses.failure("'lora_name' needs to be provided.", "InvalidUserInput", 400)
