"""What the loops need of the rest of a picker, structurally: the fleet, and an HTTP client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from extproc.endpoint import Endpoint, Load, ServedModels
from extproc.scrape import client

MarkT = TypeVar("MarkT")


class Account(Protocol):
    """Our own requests on one endpoint."""

    in_flight: int
    opened: int


class Member(Protocol):
    """One endpoint of the pool."""

    @property
    def endpoint(self) -> Endpoint:
        """Which one."""

    @property
    def account(self) -> Account:
        """Our own requests on it."""

    @property
    def models(self) -> ServedModels | None:
        """The names it answers to, if they are known."""


class Pool(Protocol):
    """The snapshot the loops follow."""

    @property
    def members(self) -> Iterable[Member]:
        """Every endpoint."""

    def find(self, address: str) -> Member | None:
        """The endpoint at an address."""


class Fleet(Protocol[MarkT]):
    """Where loads go."""

    @property
    def pool(self) -> Pool:
        """The current snapshot."""

    def begin_scrape(self, endpoint: Endpoint) -> MarkT:
        """Called just before the request is sent."""

    def observe(self, mark: MarkT, load: Load, now: float) -> None:
        """The page said this."""

    def scrape_failed(self, mark: MarkT, reason: str, now: float) -> None:
        """There was no page."""

    def observe_models(self, endpoint: Endpoint, models: ServedModels) -> None:
        """The endpoint listed these."""


class Fetcher(Protocol):
    """What the loops need of an HTTP client; `client.ScrapeClient` is one."""

    async def get(self, where: client.ScrapeTarget) -> bytes | client.FetchFailed:
        """Fetches one page."""

    def forget(self, where: client.ScrapeTarget) -> None:
        """Closes what is kept open."""
