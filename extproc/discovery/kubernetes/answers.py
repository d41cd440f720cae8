"""What an API server may be asked, and what it may say: a protocol and values."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from extproc.discovery.kubernetes.collections import Collection


class Refused(msgspec.Struct, frozen=True):
    """No answer, or not the one asked for.

    Attributes:
        status: HTTP status; 0 when there was no answer at all.
        message: For people.
        retry_after_s: How long the server asks to be left alone.
        stale: Whether fresh credentials may help.
    """

    status: int
    message: str
    retry_after_s: float = 0.0
    stale: bool = False


class Server(Protocol):
    """Who is asked; `api.Server` is one."""

    @property
    def name(self) -> str:
        """Its address, for people."""

    @property
    def generation(self) -> int:
        """Of the credentials in use."""

    async def renew(self, generation: int) -> None:
        """Loads tokens, certificates and address again; what is being read goes on.

        Args:
            generation: That which failed; of many that fail at once the first loads for all.

        Raises:
            ConfigError: If the configuration is broken now.
        """

    async def page(self, collection: Collection, more: str) -> bytes | Refused:
        """One page of a list.

        Args:
            collection: Of what.
            more: Token of the page; empty for the first.
        """

    def watch(
        self, collection: Collection, version: str, seconds: int
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes] | Refused]:
        """The bytes of a watch, as they come, until it ends in whatever way.

        Args:
            collection: Of what.
            version: Resource version to go on after.
            seconds: After which the server ends it.
        """

    async def close(self) -> None:
        """Ends all connections."""
