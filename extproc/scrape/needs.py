"""Protocols that the scrape loops require: the pool store and an HTTP client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from extproc.endpoint import Endpoint, Load, ServedModels
from extproc.scrape import client

MarkT = TypeVar("MarkT")


class Account(Protocol):
    """Open requests of this replica on one endpoint."""

    in_flight: int
    opened: int


class Member(Protocol):
    """One endpoint of the pool."""

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint of this member."""

    @property
    def account(self) -> Account:
        """Open requests of this replica on it."""

    @property
    def models(self) -> ServedModels | None:
        """Models that it serves; None while unknown."""


class ScrapedPool(Protocol):
    """Pool snapshot that the loops follow."""

    @property
    def members(self) -> Iterable[Member]:
        """All endpoints."""

    def find(self, address: str) -> Member | None:
        """Returns the endpoint at an address; None when it is not in the pool."""


class Fleet(Protocol[MarkT]):
    """Receiver of scraped loads and model lists."""

    @property
    def pool(self) -> ScrapedPool:
        """Current snapshot."""

    def begin_scrape(self, endpoint: Endpoint) -> MarkT:
        """Marks the start of a scrape, just before the request is sent."""

    def observe(self, mark: MarkT, load: Load, now: float) -> None:
        """Records the load read from a page."""

    def scrape_failed(self, mark: MarkT, reason: str, now: float) -> None:
        """Records a scrape without a page."""

    def observe_models(self, endpoint: Endpoint, models: ServedModels) -> None:
        """Records the models that an endpoint listed."""


class Fetcher(Protocol):
    """HTTP client of the loops; implemented by `client.ScrapeClient`."""

    async def get(self, where: client.ScrapeTarget) -> bytes | client.FetchFailed:
        """Fetches one page."""

    def forget(self, where: client.ScrapeTarget) -> None:
        """Closes the connection to a removed target."""
