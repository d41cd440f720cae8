"""KV event loops of a pool: subscriptions to engines, and the mapping of prompts to tokens."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator

from extproc.config import factory
from extproc.endpoint import Endpoint
from extproc.prefix_cache.cache_model import index_key
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.scrape.kv_event_subscriber import KvEventSubscriber, SubscriberCallbacks
from extproc.scrape.kv_event_subscription import SubscriptionChange
from extproc.scrape.prompt_renderer import PromptRenderer, RenderSettings
from extproc.supervision import Supervisor
from extproc.telemetry.kv_event_metrics import KvEventStats

_log = logging.getLogger("extproc.server")

#: Seconds in which a change of one subscription is logged at most once for each direction.
_REPEAT_S = 60.0


class KvEventLoops:
    """Subscriptions and mapping of a pool.

    Args:
        parts: Parts of the pool, whose director shows routed requests from now on.
        exact: What engines publish, and prompts by their tokens.
        may_listen: As of `SubscriberCallbacks`.
    """

    def __init__(
        self,
        pool: str,
        parts: factory.PoolParts,
        exact: ExactPrefixes,
        *,
        clock: Callable[[], float],
        supervisor: Supervisor,
        may_listen: Callable[[], bool],
    ) -> None:
        self._pool = pool
        self._exact = exact
        self._index = parts.index
        self._clock = clock
        self._logged: dict[tuple[str, int, bool], float] = {}
        settings, store = parts.settings, parts.store
        events = settings.kv_events
        self._subscriber = KvEventSubscriber(
            events,
            store,
            exact,
            clock=clock,
            rng=parts.rng,
            callbacks=SubscriberCallbacks(
                on_cleared=self._on_cleared, on_change=self._on_change, may_listen=may_listen
            ),
            supervisor=supervisor,
        )
        self._renderer = PromptRenderer(
            exact,
            adapters=lambda: store.pool.adapters,
            scheme=settings.scrape.scheme,
            tls=factory.build_scrape_tls(settings.scrape),
            clock=clock,
            supervisor=supervisor,
            instance=f"pool {pool}",
            settings=RenderSettings(
                events.render_url,
                events.render_model,
                events.render_budget_ms / 1e3,
                events.tokenizer_path,
            ),
        )
        parts.director.set_prompt_listener(self._renderer)

    def loops(self) -> Iterator[Callable[[], Awaitable[None]]]:
        """Loops that run until they are cancelled."""
        yield self._subscriber.run
        yield self._renderer.run

    @property
    def num_unmapped(self) -> int:
        """Routed prompts that are still to be mapped (count)."""
        return self._renderer.num_unmapped

    def stats(self) -> KvEventStats:
        """Counts for the metrics page."""
        subscriptions = [
            (subscription.endpoint.address, subscription.rank, subscription.state, engine)
            for subscription in self._subscriber.subscriptions
            for engine in (subscription.engine,)
        ]
        return KvEventStats(
            batches=self._subscriber.batches,
            prompts=self._renderer.results,
            waits=self._renderer.waits,
            usage_tokens=self._exact.usage_tokens,
            states=[(address, rank, state) for address, rank, state, _ in subscriptions],
            blocks=[(address, rank, engine.held) for address, rank, _, engine in subscriptions],
            lower_blocks=[
                (address, rank, len(engine.lower_keys), engine.lower_weights[0])
                for address, rank, _, engine in subscriptions
            ],
            refused_connections=self._subscriber.num_refused,
            dropped_blocks=sum(engine.dropped for *_, engine in subscriptions),
        )

    def _on_cleared(self, endpoint: Endpoint) -> None:
        """An engine says that its cache is empty: so is our estimate of it."""
        self._index.clear(index_key(endpoint))

    def _on_change(self, change: SubscriptionChange) -> None:
        is_lost, now = change.state == "lost", self._clock()
        key = (change.address, change.rank, is_lost)
        if now - self._logged.get(key, now - _REPEAT_S) < _REPEAT_S:
            return
        if len(self._logged) >= 4096:
            self._logged.clear()
        self._logged[key] = now
        prefix = f"pool {self._pool}: " if self._pool else ""
        rank = f" rank {change.rank}" if change.rank else ""
        if is_lost:
            text = "%sKV events of %s%s are lost, its cache is estimated: %s"
            _log.warning(text, prefix, change.address, rank, change.detail)
        else:
            text = "%sKV events of %s%s arrive: %s"
            _log.info(text, prefix, change.address, rank, change.detail)
