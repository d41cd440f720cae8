"""Poller of the model list of one endpoint: seldom, and soon after a start or restart.

A shell, driven by the endpoint's scrape loop, so that the two share one connection.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec

from extproc.endpoint import Endpoint
from extproc.pool.store import PoolStore
from extproc.scrape import client, models_page, schedule


class ModelListSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals of model list polling.

    Attributes:
        interval_s: Seconds between two lists; None for never.
        retry_s: Wait after the first failure; it doubles with each further one, up to the interval.
            An engine that has just started may not list anything yet.
        jitter: Each wait is spread by this share to either side, lest all poll at once.
        unlisted_retry_s: Least time between two lists when requests for unlisted models want one sooner. 5:
            an adapter that was just loaded is found soon. With more than 200 endpoints the budget of
            lists (`schedule.LISTS_RATIO`) makes it longer, so that a client that makes names up
            costs 40 small pages a second at most.
    """

    interval_s: float | None
    retry_s: float = 2.0
    jitter: float = 0.1
    unlisted_retry_s: float = 5.0


#: For who wants no lists.
NEVER = ModelListSettings(interval_s=None)


class ModelListPoller:
    """Polls the models of one endpoint incarnation.

    A failure leaves what is known: models change with the process, not with its load.

    Args:
        unlisted_models: Requests so far for models that no endpoint lists (count).
        least_wait_s: Seconds between two lists that keep to the budget of all endpoints.

    Attributes:
        target: Its own port, wherever its metrics are.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        store: PoolStore,
        client: client.ScrapeClient,
        clock: Callable[[], float],
        rng: random.Random,
        settings: ModelListSettings,
        unlisted_models: Callable[[], int],
        least_wait_s: Callable[[], float],
    ) -> None:
        self.target = _target(endpoint)
        self._endpoint = endpoint
        self._store = store
        self._client = client
        self._clock = clock
        self._rng = rng
        self._settings = settings
        self._unlisted_models = unlisted_models
        self._least_wait_s = least_wait_s
        self._unlisted_at_poll = 0
        self._requested = self._due = -math.inf
        self._failures = 0
        self._listed = False

    async def step(self) -> str:
        """Polls if a poll is due.

        Returns:
            `ok`, or the failure reason; empty if no poll was due.
        """
        began = self._clock()
        interval_s = self._settings.interval_s
        if interval_s is None or not (
            began >= self._due or self._is_forgotten() or self._is_due(began)
        ):
            return ""
        self._requested, self._unlisted_at_poll = began, self._unlisted_models()
        fetched = await self._client.get(self.target)
        if isinstance(fetched, client.FetchFailed):
            outcome, models = fetched.reason, None
        else:
            models = models_page.read(fetched)
            outcome = "unreadable" if models is None else "ok"
        self._listed = models is not None
        if models is None:
            self._failures += 1
        else:
            self._failures = 0
            self._store.observe_models(self._endpoint, models)
        self._due = began + schedule.model_list_wait_s(
            interval_s,
            retry_s=self._settings.retry_s,
            least_s=self._least_wait_s(),
            jitter=self._settings.jitter,
            failures=self._failures,
            rng=self._rng,
        )
        return outcome

    def _is_forgotten(self) -> bool:
        """Returns True if the pool dropped the last list, as it does at an engine restart."""
        members = self._store.pool.ranks_at(self._endpoint.host_port)
        return self._listed and any(member.models is None for member in members)

    def _is_due(self, now: float) -> bool:
        """Returns True if unlisted models were requested since the last list, some time ago."""
        return self._unlisted_models() != self._unlisted_at_poll and now >= self._requested + max(
            self._settings.unlisted_retry_s, self._least_wait_s()
        )


def _target(endpoint: Endpoint) -> client.ScrapeTarget:
    return client.target(
        endpoint.ip, endpoint.port, path=models_page.PATH, accept="application/json"
    )
