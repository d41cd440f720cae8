"""Exact matcher: the cached tokens of a prompt per endpoint, by what engines publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

import msgspec

from extproc.decision import Decision, MatchSource, Outcome
from extproc.pool.snapshot import EndpointSnapshot
from extproc.pool.store import PoolStore
from extproc.prefix_cache import cache_model
from extproc.prefix_cache.exact_prefixes import SETTLE_S, ExactPrefixes
from extproc.prefix_cache.token_blocks import EngineBlocks


class ExactMatcher:
    """Corrects predicted cached tokens by what engines publish.

    Args:
        store: Store of the members.
        exact: Blocks of the engines, and prompts by their tokens.
    """

    def __init__(self, store: PoolStore, exact: ExactPrefixes) -> None:
        self._store = store
        self._exact = exact
        self._engines: Mapping[str, Sequence[EngineBlocks]] = {}
        #: Takes the values of members by slot, while each has one engine and all of them are exact.
        self._take_slots: Callable[[list[int]], Sequence[int]] | None = None
        self._positions: object = None
        self._version = -1
        #: Of the request that was matched last: the usual source, and others by address.
        self._source: MatchSource = "estimate"
        self._sources: dict[str, MatchSource] = {}

    def correct(
        self,
        matched: Sequence[int],
        chain: Sequence[int],
        members: Sequence[EndpointSnapshot],
        *,
        prompt_tokens: int,
        now: float,
    ) -> Sequence[int]:
        """Cached prompt tokens per member.

        An engine whose events are complete is taken at its word, but for a prompt that was just sent
        there: its blocks are on their way. One of which not everything is known holds at least what
        its events say. Of several ranks behind an endpoint any may serve, so it is their mean.

        Args:
            matched: Predictions per member.
            chain: Block hashes of the prompt, 64 bits each, root first.
            members: Endpoints.
            prompt_tokens: Estimated tokens of the prompt.
        """
        self._source = "estimate"
        self._sources.clear()
        match = self._exact.match(chain)
        if match is None:
            return matched
        prompt, ends = match
        self._follow_pool()
        held = self._exact.tokens_by_slot(ends)
        recent = [address for address, at in prompt.sent.items() if now - at <= SETTLE_S]
        if self._take_slots is None or recent or members is not self._store.pool.members:
            return self._correct_singly(matched, members, held, prompt_tokens, recent)
        self._source = "events"
        taken = self._take_slots(held)
        most = ends[-1][0] * self._exact.index.block_tokens if ends else 0
        return taken if most <= prompt_tokens else [min(prompt_tokens, some) for some in taken]

    def with_source(self, outcome: Outcome) -> Outcome:
        """The outcome of the request that was matched last, with the source of its tokens."""
        if not isinstance(outcome, Decision):
            return outcome
        source = self._sources.get(outcome.endpoints[0].address, self._source)
        return msgspec.structs.replace(outcome, match_source=source)

    def _correct_singly(
        self,
        matched: Sequence[int],
        members: Sequence[EndpointSnapshot],
        held: Sequence[int],
        prompt_tokens: int,
        recent: Sequence[str],
    ) -> Sequence[int]:
        """As `correct`, where members differ in what is known of them.

        Args:
            held: Tokens by slot.
            recent: Addresses that the prompt was just sent to.
        """
        corrected = list(matched)
        for position, member in enumerate(members):
            address = member.endpoint.address
            engines = self._engines[address]
            if not engines or not all(engine.is_live for engine in engines):
                continue
            mean = sum([held[engine.slot] for engine in engines]) // len(engines)
            tokens = min(prompt_tokens, mean)
            if address not in recent and all(engine.is_complete for engine in engines):
                corrected[position] = tokens
                self._sources[address] = "events"
            elif tokens >= corrected[position]:
                corrected[position] = tokens
                self._sources[address] = "both"
        return corrected

    def _follow_pool(self) -> None:
        """Look engines up again when the endpoint set or the subscriptions changed."""
        pool, index = self._store.pool, self._exact.index
        if self._positions is pool.positions and self._version == index.version:
            return
        self._positions, self._version = pool.positions, index.version
        engines = [
            self._exact.engines(cache_model.index_key(member.endpoint)) for member in pool.members
        ]
        self._engines = dict(zip(pool.positions, engines, strict=True))
        self._take_slots = None
        if all(len(ranks) == 1 and ranks[0].is_exact for ranks in engines):
            slots = [ranks[0].slot for ranks in engines]
            # A getter of a single item returns it bare.
            self._take_slots = (
                itemgetter(*slots)
                if len(slots) > 1
                else lambda held: [held[slot] for slot in slots]
            )
