"""Keeps the prefix index near what engines really hold."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from extproc.endpoint import DEFAULT_STEP_TIMES, Endpoint, Load, StepTimeModel
from extproc.prefix_cache.calibration import Calibration
from extproc.prefix_cache.index import Key, PrefixIndex
from extproc.request import BYTES_PER_TOKEN

#: Weight of a request in the means of its endpoint, once there were 1 / _ALPHA of them.
_ALPHA = 0.05


class EndpointCacheState:
    """Capacity and calibration of the prefix cache of one endpoint.

    Attributes:
        calibration: Predictions against counters.
        nominal_tokens: KV tokens the engine says it has; None while it did not.
        block_tokens: Prompt tokens of a block of the index, mean.
        prompt_tokens: Of a request, mean; 0 before the first.
        capacity_tokens: Prompt tokens believed kept; None while nominal is unknown.
        requests: How many were sent (count).
    """

    __slots__ = (
        "block_tokens",
        "calibration",
        "capacity_tokens",
        "nominal_tokens",
        "prompt_tokens",
        "requests",
    )

    def __init__(self, block_tokens: float) -> None:
        self.calibration = Calibration()
        self.nominal_tokens: int | None = None
        self.block_tokens = block_tokens
        self.prompt_tokens = 0.0
        self.capacity_tokens: int | None = None
        self.requests = 0


class CacheModel:
    """Sizes each endpoint's part of the index by its engine's capacity and counters.

    Args:
        index: Whose parts are sized.
        tokens: Cumulative prompt tokens by depth of a chain, at `BYTES_PER_TOKEN`.
        most_blocks: Blocks of one endpoint at most, whatever its engine holds.
    """

    def __init__(self, index: PrefixIndex, tokens: Sequence[int], *, most_blocks: int) -> None:
        self._index = index
        self._tokens = tokens
        self._most = most_blocks
        self._states: dict[Key, EndpointCacheState] = {}

    def state_of(self, endpoint: Endpoint) -> EndpointCacheState:
        """Cache state of an endpoint; created at the first call."""
        known = self._states.get(index_key(endpoint))
        if known is None:
            known = self._states[index_key(endpoint)] = EndpointCacheState(float(self._tokens[1]))
        return known

    def record_sent(
        self,
        endpoint: Endpoint,
        blocks: Sequence[int],
        *,
        prompt_tokens: int,
        cached_tokens: int,
        bytes_per_token: float = BYTES_PER_TOKEN,
    ) -> None:
        """A request was committed to an endpoint.

        Args:
            endpoint: Its endpoint.
            blocks: Its prompt's chain.
            prompt_tokens: Its length.
            cached_tokens: Of these, believed cached there.
            bytes_per_token: Of its prompt.
        """
        belief = self.state_of(endpoint)
        belief.requests += 1
        # The mean of all requests at first, or a mean that began at 0 would make the cache small.
        weight = max(_ALPHA, 1.0 / belief.requests)
        if blocks:
            depth = len(blocks)
            mean = self._tokens[depth] / depth * BYTES_PER_TOKEN / bytes_per_token
            belief.block_tokens += weight * (mean - belief.block_tokens)
        belief.prompt_tokens += weight * (prompt_tokens - belief.prompt_tokens)
        belief.calibration.record_sent(prompt_tokens, cached_tokens)

    def record_cancelled(
        self,
        endpoint: Endpoint,
        blocks: Sequence[int],
        *,
        prompt_tokens: int,
        cached_tokens: int,
        bytes_per_token: float = BYTES_PER_TOKEN,
    ) -> None:
        """A request that was committed did not run: nothing of it is cached.

        Args:
            endpoint: In its life then.
            blocks: Its prompt's chain.
            prompt_tokens: Its length.
            cached_tokens: Of these, believed cached before.
            bytes_per_token: Of its prompt.
        """
        known = self._states.get(index_key(endpoint))
        if known is None:
            return
        known.calibration.record_cancelled(prompt_tokens, cached_tokens)
        if blocks:
            # Tokens by depth were rounded down.
            reference_tokens = (cached_tokens + 1) * bytes_per_token / BYTES_PER_TOKEN
            self._index.retract(
                index_key(endpoint), blocks, bisect.bisect_right(self._tokens, reference_tokens) - 1
            )

    def observe_load(
        self,
        endpoint: Endpoint,
        *,
        before: Load,
        after: Load,
        rates: StepTimeModel,
        restarted: bool,
    ) -> None:
        """A scrape was taken in.

        Args:
            endpoint: The endpoint scraped.
            before: The load until then.
            after: The load from now on.
            rates: How fast it is; answers take room in the cache as well.
            restarted: Whether the engine is another process now: its cache is empty.
        """
        belief = self.state_of(endpoint)
        if restarted:
            self._index.clear(index_key(endpoint))
            belief.calibration = Calibration()
        else:
            queries, hits = _moved(before, after)
            belief.calibration.observe_counters(queries, hits)
        if after.kv_tokens:
            belief.nominal_tokens = after.kv_tokens
            self._resize(endpoint, belief, rates)

    def observe_usage(
        self, endpoint: Endpoint, *, prompt_tokens: int, predicted: int, cached: int
    ) -> None:
        """Take in the cached tokens that the `usage` of an answer reports."""
        belief = self.state_of(endpoint)
        if belief.calibration.observe_usage(prompt_tokens, predicted, cached):
            self._resize(endpoint, belief, DEFAULT_STEP_TIMES)

    def forget(self, endpoint: Endpoint) -> None:
        """An endpoint left."""
        self._states.pop(index_key(endpoint), None)
        self._index.forget(index_key(endpoint))

    def _resize(self, endpoint: Endpoint, belief: EndpointCacheState, rates: StepTimeModel) -> None:
        if belief.nominal_tokens is None:
            return
        prompt = belief.prompt_tokens
        # Nothing was sent yet: nothing says how much room answers take.
        share = prompt / (prompt + rates.output_tokens) if prompt else 1.0
        tokens = belief.nominal_tokens * share * belief.calibration.factor
        belief.capacity_tokens = round(tokens)
        blocks = min(self._most, max(1, round(tokens / belief.block_tokens)))
        held = self._index.capacity(index_key(endpoint))
        # Means move with every request: a small change is not worth walking the index.
        if abs(blocks - held) > 0.02 * held:
            self._index.resize(index_key(endpoint), blocks)


def index_key(endpoint: Endpoint) -> Key:
    """Key of an endpoint incarnation in the prefix index."""
    return endpoint.address, endpoint.incarnation


def _moved(before: Load, after: Load) -> tuple[float, float]:
    """Tokens looked up and found between two scrapes; none where a counter is missing."""
    if (
        before.prefix_queries is None
        or before.prefix_hits is None
        or after.prefix_queries is None
        or after.prefix_hits is None
    ):
        return 0.0, 0.0
    return after.prefix_queries - before.prefix_queries, after.prefix_hits - before.prefix_hits
