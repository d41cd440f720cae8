"""Cache model: keeps the prefix index near what engines really hold.

The index predicts that an engine keeps what was sent to it, and its answers, up to the engine's own
capacity. Engines keep less (others use them, tiers differ) or more (offloading), and their
counters say how much was hit. So the predicted capacity of an endpoint is its nominal one times a
factor that follows the difference of the two hit ratios (`Calibration`).
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from extproc.endpoint import Endpoint, Load
from extproc.prefix_cache.index import Key, PrefixIndex
from extproc.request import BYTES_PER_TOKEN

#: Requests of ours in a comparison: at least, fewer are noise; and at most, while it may be chance.
_MIN_REQUESTS = 8
_MAX_REQUESTS = 64

#: Hit ratios closer than this are equal: counters move by whole blocks and requests.
_NOISE = 0.01

#: Share of a scrape window's looked-up tokens that must be ours to compare at all.
_OWN_SHARE = 0.5

#: How much of a difference of hit ratios is corrected at once, in the logarithm of the capacity:
#: differences up and down bring it back to where it was.
_GAIN = 1.5

#: Bounds of one correction and of the factor, the last where the host keeps copies of what is evicted:
#: its memory may hold several times the device's cache.
_STEP = (0.7, 1.15)
_FACTOR = (0.02, 2.0)
_MAX_FACTOR_WITH_COPIES = 16.0

#: Requests remembered while their look-up was not seen yet.
_MOST_PENDING = 4096

#: Bits of a number of tokens, far above that of any prompt.
_TOKEN_BITS: Final = 48
_TOKEN_MASK: Final = (1 << _TOKEN_BITS) - 1


class Calibration:
    """One endpoint's predictions held against its counters.

    Attributes:
        factor: Estimated capacity as a share of the nominal one.
        predicted: Prompt tokens ever predicted to be found, of requests that were looked up.
        observed: Prompt tokens the engine found, as far as they were ours.
        error: Last difference of predicted and observed hit ratio, -1..1.
        has_copies: Whether the engine loads copies of what it evicted from the memory of its host.
    """

    __slots__ = (
        "_count",
        "_hit",
        "_looked_up",
        "_pending",
        "_predicted",
        "_reported",
        "_squares",
        "_unmatched_tokens",
        "error",
        "factor",
        "has_copies",
        "observed",
        "predicted",
    )

    def __init__(self) -> None:
        self.factor = 1.0
        self.predicted = 0.0
        self.observed = 0.0
        self.error = 0.0
        self.has_copies = False
        #: Prompt tokens and cached ones of each request, in one number: thousands may be remembered.
        self._pending: deque[int] = deque()
        self._unmatched_tokens = 0.0
        #: Answers since the last increase of the counters that said themselves what was cached.
        self._reported = 0
        self._clear()

    def record_sent(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Record a sent request and how many of its prompt tokens were predicted as cached."""
        self._pending.append(prompt_tokens << _TOKEN_BITS | cached_tokens)
        if len(self._pending) > _MOST_PENDING:
            self._pending.popleft()

    def record_cancelled(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Take back a sent request that is not to be looked up: refused, or its client or engine left.

        One that was looked up all the same makes the requests of others look like more than they are.
        """
        with contextlib.suppress(ValueError):
            self._pending.remove(prompt_tokens << _TOKEN_BITS | cached_tokens)

    def observe_counters(self, queries: float, hits: float) -> bool:
        """Record an increase of the engine's counters.

        It corrects nothing where most answers report what was cached: both say the same, and these
        say it of each request.

        Args:
            queries: Prompt tokens looked up since the last scrape.
            hits: Of these, the tokens that were cached.

        Returns:
            Whether `factor` changed.
        """
        if queries <= 0:
            return False
        self._unmatched_tokens += queries
        looked_up = predicted = count = longest = 0
        pending = self._pending
        # A request belongs to the window in which most of it was looked up.
        while pending and pending[0] >> _TOKEN_BITS <= 2 * self._unmatched_tokens:
            packed = pending.popleft()
            prompt, cached = packed >> _TOKEN_BITS, packed & _TOKEN_MASK
            self._unmatched_tokens -= prompt
            looked_up += prompt
            predicted += cached
            count += 1
            longest = max(longest, prompt)
        if not pending:
            self._unmatched_tokens = 0.0
        ours = min(1.0, looked_up / queries)
        if ours < _OWN_SHARE:
            return False
        self.predicted += predicted
        self.observed += min(hits, queries) * ours
        reported, self._reported = self._reported, 0
        if 2 * reported > count:
            return False
        hit_tokens = hits * looked_up / queries
        self._count += count
        self._looked_up += looked_up
        self._predicted += predicted
        self._hit += hit_tokens
        # A request at the end of the window may have been looked up in the next one.
        self._squares += min(abs(predicted - hit_tokens), longest) ** 2
        return self._correct()

    def observe_usage(self, prompt_tokens: int, predicted: int, cached: int) -> bool:
        """Record the cached tokens that an answer reports (`usage.prompt_tokens_details`).

        Args:
            prompt_tokens: Prompt length by the engine.
            predicted: Tokens predicted as cached when it was sent.

        Returns:
            Whether `factor` changed.
        """
        self._reported += 1
        self._looked_up += prompt_tokens
        self._predicted += predicted
        self._hit += cached
        self._squares += (predicted - cached) ** 2
        self._count += 1
        return self._correct()

    def _correct(self) -> bool:
        """Move the factor once enough was compared."""
        if self._count < _MIN_REQUESTS or not self._looked_up:
            return False
        difference = self._predicted - self._hit
        self.error = difference / self._looked_up
        # What independent differences of these sizes add up to; a single one is always chance.
        is_chance = difference**2 <= self._squares
        if is_chance and self._count < _MAX_REQUESTS:
            return False
        self._clear()
        if is_chance or abs(self.error) <= _NOISE:
            return False
        step = min(_STEP[1], max(_STEP[0], math.exp(min(1.0, -_GAIN * self.error))))
        before = self.factor
        most = _MAX_FACTOR_WITH_COPIES if self.has_copies else _FACTOR[1]
        self.factor = min(most, max(_FACTOR[0], before * step))
        return self.factor != before

    def _clear(self) -> None:
        self._count = 0
        self._looked_up = 0.0
        self._predicted = 0.0
        self._hit = 0.0
        self._squares = 0.0


#: Weight of a request in the means of its endpoint, once there were 1 / _ALPHA of them.
_ALPHA = 0.05


class EndpointCacheState:
    """Capacity and calibration of the prefix cache of one endpoint.

    Attributes:
        nominal_tokens: KV tokens the engine says it has; None while it did not.
        engine_block_tokens: Tokens of a block of the engine; 1 while it did not say.
        block_tokens: Prompt tokens of a block of the index, mean.
        capacity_tokens: Tokens predicted to stay cached; None while nominal is unknown.
    """

    __slots__ = (
        "block_tokens",
        "calibration",
        "capacity_tokens",
        "engine_block_tokens",
        "nominal_tokens",
        "requests",
    )

    def __init__(self, block_tokens: float) -> None:
        self.calibration = Calibration()
        self.nominal_tokens: int | None = None
        self.engine_block_tokens = 1
        self.block_tokens = block_tokens
        self.capacity_tokens: int | None = None
        self.requests = 0


class CacheModel:
    """Sizes each endpoint's part of the index by its engine's capacity and counters.

    Args:
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
        key = index_key(endpoint)
        known = self._states.get(key)
        if known is None:
            known = self._states[key] = EndpointCacheState(float(self._tokens[1]))
        return known

    def record_sent(
        self,
        endpoint: Endpoint,
        blocks: Sequence[int],
        *,
        prompt_tokens: int,
        cached_tokens: int,
        answer_tokens: float = 0.0,
        bytes_per_token: float = BYTES_PER_TOKEN,
    ) -> None:
        """Record a request that was committed to an endpoint: what it will hold of it is cached there.

        Args:
            cached_tokens: Of these, tokens predicted as cached there.
            answer_tokens: Expected tokens of the answer.
        """
        state = self.state_of(endpoint)
        state.requests += 1
        # The mean of all requests at first, or a mean that began at 0 would make the cache small.
        weight = 1.0 / state.requests
        if weight < _ALPHA:  # noqa: PLR1730 - a call
            weight = _ALPHA
        if blocks:
            depth = len(blocks)
            named = self._tokens[depth] * BYTES_PER_TOKEN / bytes_per_token
            state.block_tokens += weight * (named / depth - state.block_tokens)
            # An engine counts in blocks of its own, the last of which is not full.
            size = state.engine_block_tokens
            taken = math.ceil((prompt_tokens + answer_tokens) / size) * size
            unnamed = round((taken - named) / state.block_tokens)
            self._index.record(index_key(endpoint), blocks, max(0, unnamed))
        state.calibration.record_sent(prompt_tokens, cached_tokens)

    def record_cancelled(
        self,
        endpoint: Endpoint,
        blocks: Sequence[int],
        *,
        prompt_tokens: int,
        cached_tokens: int,
        bytes_per_token: float = BYTES_PER_TOKEN,
    ) -> None:
        """Take back a committed request that did not run: nothing of it is cached.

        Args:
            endpoint: The endpoint, in its incarnation when the request was sent.
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

    def record_abandoned(self, endpoint: Endpoint, prompt_tokens: int, cached_tokens: int) -> None:
        """Expect no look-up of a request whose client left; what ran of it may be cached."""
        known = self._states.get(index_key(endpoint))
        if known is not None:
            known.calibration.record_cancelled(prompt_tokens, cached_tokens)

    def observe_load(
        self,
        endpoint: Endpoint,
        *,
        before: Load,
        after: Load,
        restarted: bool,
    ) -> None:
        """Size and correct the cache of an endpoint by a scrape; a restarted engine has an empty one."""
        state = self.state_of(endpoint)
        if restarted:
            self._index.clear(index_key(endpoint))
            state.calibration = Calibration()
        else:
            queries, hits = _moved(before, after)
            state.calibration.has_copies = bool(after.counters.reload_s)
            state.calibration.observe_counters(queries, hits)
        if after.kv_tokens:
            state.nominal_tokens = after.kv_tokens
            state.engine_block_tokens = after.block_tokens or 1
            self._resize(endpoint, state)

    def observe_usage(
        self, endpoint: Endpoint, *, prompt_tokens: int, predicted: int, cached: int
    ) -> None:
        """Record the cached tokens that the `usage` of an answer reports."""
        state = self.state_of(endpoint)
        if state.calibration.observe_usage(prompt_tokens, predicted, cached):
            self._resize(endpoint, state)

    def forget(self, endpoint: Endpoint) -> None:
        """Drop the cache state of an endpoint that left."""
        self._states.pop(index_key(endpoint), None)
        self._index.forget(index_key(endpoint))

    def _resize(self, endpoint: Endpoint, state: EndpointCacheState) -> None:
        if state.nominal_tokens is None:
            return
        tokens = state.nominal_tokens * state.calibration.factor
        state.capacity_tokens = round(tokens)
        blocks = min(self._most, max(1, round(tokens / state.block_tokens)))
        held = self._index.capacity(index_key(endpoint))
        # Means move with every request: a small change is not worth walking the index.
        if abs(blocks - held) > 0.02 * held:
            self._index.resize(index_key(endpoint), blocks)


def index_key(endpoint: Endpoint) -> Key:
    """Key of an endpoint incarnation in the prefix index."""
    return endpoint.address, endpoint.incarnation


def _moved(before: Load, after: Load) -> tuple[float, float]:
    """Tokens looked up and found between two scrapes; none where a counter is missing.

    Tokens loaded from the memory of the host are found as well. They count where the page shows the
    time of that: other connectors load what another engine has computed.
    """
    if (
        before.prefix_queries is None
        or before.prefix_hits is None
        or after.prefix_queries is None
        or after.prefix_hits is None
    ):
        return 0.0, 0.0
    hits = after.prefix_hits - before.prefix_hits
    old, new = before.counters, after.counters
    if None not in (new.reload_s, old.reloaded_tokens, new.reloaded_tokens):
        hits += max(0.0, (new.reloaded_tokens or 0.0) - (old.reloaded_tokens or 0.0))
    return after.prefix_queries - before.prefix_queries, hits
