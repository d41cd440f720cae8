"""Protocol of the Kubernetes API client, and the errors that it returns as values."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from extproc.discovery.kubernetes.watch_plan import WatchedCollection

#: Answers 403 in a row (count) after which a right that was there before is missing.
FINAL_DENIALS = 4

#: Refusals that come after the right was checked.
_AUTHORIZED = frozenset({404, 409})


class ApiError(msgspec.Struct, frozen=True):
    """A failed request: no response, or an unsuccessful status.

    Attributes:
        status: HTTP status; 0 when there was no answer at all.
        credentials_expired: Whether fresh credentials may help.
    """

    status: int
    message: str
    retry_after_s: float = 0.0
    credentials_expired: bool = False


class Denials:
    """Distinguishes a missing right from an API server that has not loaded its Roles yet.

    The right to do what was allowed before is missing from the fourth 403 in a row on, any other
    right from the first one.
    """

    def __init__(self) -> None:
        self._allowed: set[str] = set()
        self._refused: Counter[str] = Counter()

    def is_missing(self, verb: str, answer: bytes | ApiError) -> bool:
        """Records a response; returns True if the right to `verb` is missing."""
        if not isinstance(answer, ApiError) or answer.status in _AUTHORIZED:
            self._allowed.add(verb)
            self._refused[verb] = 0
            return False
        if answer.status != 403:
            self._refused[verb] = 0
            return False
        self._refused[verb] += 1
        return verb not in self._allowed or self._refused[verb] >= FINAL_DENIALS


class KubernetesApi(Protocol):
    """API client of the reflectors; implemented by `api_client.KubernetesApiClient`."""

    @property
    def name(self) -> str:
        """Server address, for messages."""

    @property
    def generation(self) -> int:
        """Generation of the credentials in use."""

    async def renew(self, generation: int) -> None:
        """Reloads tokens, certificates and address; requests in progress continue.

        Args:
            generation: Number of the credentials that failed; of many calls at once the first loads
                for all.

        Raises:
            ConfigError: If the configuration is broken now.
        """

    async def page(self, collection: WatchedCollection, more: str) -> bytes | ApiError:
        """Fetches one page of a list.

        Args:
            more: Token of the page; empty for the first.
        """

    def watch(
        self, collection: WatchedCollection, version: str, seconds: int
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes] | ApiError]:
        """Opens a watch and yields its bytes until it ends for any reason.

        Args:
            version: Resource version to go on after.
            seconds: Seconds after which the server ends the watch.
        """

    async def close(self) -> None:
        """Closes all connections."""
