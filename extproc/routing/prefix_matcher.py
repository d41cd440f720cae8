"""Prefix matchers: cached tokens of a prompt per endpoint, as routed or as engines publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Final

import msgspec

from extproc.decision import Decision, MatchSource, Outcome
from extproc.pool.snapshot import EndpointSnapshot
from extproc.pool.store import PoolStore
from extproc.prefix_cache import cache_model
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.prefix_cache.index import PrefixIndex
from extproc.prefix_cache.token_blocks import EngineBlocks

#: Relative error of the size that the estimate has for a cache.
_SIZE_ERROR: Final = 0.05

#: Engines beyond those of the first end that are looked at one by one (count).
_MANY: Final = 16


class PrefixMatcher:
    """Looks prompts up in the index for the members of a pool."""

    def __init__(self, store: PoolStore, index: PrefixIndex) -> None:
        self._store = store
        self._index = index
        self._slots: Mapping[str, int] = {}
        self._slots_in_order: Sequence[int] = ()
        self._slots_positions: object = None

    def match(
        self, chain: Sequence[int], members: Sequence[EndpointSnapshot], tokens: Sequence[int]
    ) -> Sequence[int]:
        """Predicted cached prompt tokens per member.

        Args:
            tokens: Prompt tokens by depth in the chain.
        """
        if not chain:
            return [0] * len(members)
        depths, slots = self.match_slots(chain)
        if members is self._store.pool.members:
            in_order = self._slots_in_order
        else:
            in_order = [slots[member.endpoint.address] for member in members]
        matched = [tokens[depths[slot]] for slot in in_order]
        lingering = self._index.lingering(chain, depths)
        if lingering is not None and lingering[0] in in_order:
            expected = before = float(max(matched))
            for depth, chance in lingering[1]:
                expected += chance * (tokens[depth] - before)
                before = tokens[depth]
            matched[in_order.index(lingering[0])] = int(expected)
        return matched

    def match_slots(self, chain: Sequence[int]) -> tuple[Sequence[int], Mapping[str, int]]:
        """Predicted cached blocks by slot (count), and the slots of the members by address.

        Args:
            chain: As of `match`, not empty.
        """
        pool = self._store.pool
        if self._slots_positions is not pool.positions:
            self._slots_positions = pool.positions
            self._slots_in_order = [
                self._index.slot(cache_model.index_key(member.endpoint)) for member in pool.members
            ]
            self._slots = dict(zip(pool.positions, self._slots_in_order, strict=True))
        return self._index.match(chain), self._slots


class _Estimate:
    """The estimate of one prompt, looked up when it is needed first."""

    __slots__ = ("_chain", "_depths", "_matcher", "_slots", "_tokens")

    def __init__(self, matcher: PrefixMatcher, chain: Sequence[int], tokens: Sequence[int]) -> None:
        self._matcher = matcher
        self._chain = chain
        self._tokens = tokens
        self._depths: Sequence[int] | None = None
        self._slots: Mapping[str, int] = {}

    def tokens_at(self, address: str) -> int:
        """Predicted cached tokens on a member."""
        if self._depths is None:
            self._depths, self._slots = self._matcher.match_slots(self._chain)
        return self._tokens[self._depths[self._slots[address]]]


class ExactMatcher:
    """Matches prompts with what engines publish, and with the estimate where they do not.

    Args:
        exact: Blocks of the engines, and prompts by their tokens.
        estimate: Matcher by what was routed.
    """

    def __init__(self, store: PoolStore, exact: ExactPrefixes, estimate: PrefixMatcher) -> None:
        self._store = store
        self._exact = exact
        self._estimate = estimate
        self._engines: Mapping[str, Sequence[EngineBlocks]] = {}
        #: Takes the values of members by slot, while each has one engine and all of them are exact.
        self._take_slots: Callable[[list[int]], list[int]] | None = None
        self._positions: object = None
        self._version = -1
        self._positions_by_slot: Mapping[int, int] = {}
        #: Depth of the first end of the request that was matched last, the engines that hold so much,
        #: and the tokens that follow from it.
        self._first_end = (-1, 0)
        self._first_tokens: list[int] = []
        #: Of the request that was matched last: the usual source, and others by address.
        self._source: MatchSource = "estimate"
        self._sources: dict[str, MatchSource] = {}

    def match(
        self,
        chain: Sequence[int],
        members: Sequence[EndpointSnapshot],
        tokens: Sequence[int],
        *,
        prompt_tokens: int,
        now: float,
    ) -> Sequence[int]:
        """Cached prompt tokens per member, when it begins with the request.

        An engine whose events are complete holds what they say. One of which not everything is known
        holds at least that. Two differences from what it will find once it begins with the request
        are known by the estimate: blocks of prompts that were just sent there are on their way, and
        prompts that wait ahead evict others (`_eviction_ratio`). Of several ranks behind an endpoint
        any may serve, so it is their mean.
        """
        self._source = "estimate"
        if self._sources:
            self._sources.clear()
        exact = self._exact
        match = exact.match(chain)
        if match is None:
            return self._estimate.match(chain, members, tokens)
        estimate: _Estimate | None = None
        pool, index = self._store.pool, exact.index
        if self._positions is not pool.positions or self._version != index.version:
            self._follow_pool()
        positions: Mapping[str, int] = pool.positions
        if self._take_slots is None or members is not pool.members or match.lower:
            held = exact.tokens_by_slot(match.ends, match.lower)
            estimate = _Estimate(self._estimate, chain, tokens)
            corrected = self._correct_singly(members, held, prompt_tokens, estimate)
            positions = {member.endpoint.address: n for n, member in enumerate(members)}
        else:
            self._source = "events"
            corrected = self._tokens_in_order(match.ends, self._take_slots)
            if match.ends and match.ends[-1][0] * index.block_tokens > prompt_tokens:
                corrected = [min(prompt_tokens, some) for some in corrected]
        for address, sent in match.prompt.sent.items():
            position = positions.get(address)
            if position is not None:
                member, is_arriving = members[position], sent.is_arriving(address, now)
                lost = self._eviction_ratio(member, now)
                if lost or is_arriving:
                    estimate = estimate or _Estimate(self._estimate, chain, tokens)
                    corrected[position] = self._correct_sent(
                        address,
                        corrected[position],
                        estimate,
                        (tokens[match.depth], lost),
                        is_arriving=is_arriving,
                    )
                if member.load.waiting and corrected[position]:
                    self._discount_idle(member, corrected, position, (chain, tokens))
        return corrected

    def _tokens_in_order(
        self, ends: Sequence[tuple[int, int]], take_slots: Callable[[list[int]], list[int]]
    ) -> list[int]:
        """Tokens per member of the pool, while all of them are exact.

        Most prompts of a pool begin with few system prompts, which most engines hold: what follows
        from the first end alone is stored.
        """
        first, further = (0, 0), 0
        if ends:
            for _, bits in ends[1:]:
                further |= bits
            if further.bit_count() > _MANY:
                return take_slots(self._exact.tokens_by_slot(ends))
            depth, bits = ends[0]
            first = depth, bits | further
        if first != self._first_end:
            self._first_end = first
            self._first_tokens = take_slots(self._exact.tokens_by_slot((first,)))
        tokens = self._first_tokens.copy()
        if further:
            size, positions = self._exact.index.block_tokens, self._positions_by_slot
            for depth, mask in ends[1:]:
                bits, held = mask, depth * size
                while bits:
                    slot = bits.bit_length() - 1
                    bits ^= 1 << slot
                    position = positions.get(slot)
                    if position is not None:
                        tokens[position] = held
        return tokens

    def with_source(self, outcome: Outcome) -> Outcome:
        """The outcome of the request that was matched last, with the source of its tokens."""
        if isinstance(outcome, Decision):
            address = outcome.endpoints[0].address
            source = self._sources.get(address, self._source)
            if source != "estimate":
                # By force: `replace` takes six times as long, and nothing else has the decision yet.
                msgspec.structs.force_setattr(outcome, "match_source", source)
        return outcome

    def _correct_sent(
        self,
        address: str,
        held: int,
        estimate: _Estimate,
        eviction: tuple[int, float],
        *,
        is_arriving: bool,
    ) -> int:
        """Tokens of a member that the prompt, or one with the same beginning, was sent to.

        Args:
            eviction: Tokens of the prompt that the estimate can know of, and the share of those that
                it has given up that is lost, 0..1.
            is_arriving: Whether events of a prompt that was sent there may be outstanding.
        """
        known, lost = eviction
        estimated = estimate.tokens_at(address)
        if estimated < held and estimated < known and lost:
            self._sources[address] = "both"
            return int(held * (1.0 - lost * (1.0 - estimated / known)))
        if estimated > held and is_arriving:
            self._sources[address] = "estimate"
            return estimated
        return held

    def _correct_singly(
        self,
        members: Sequence[EndpointSnapshot],
        held: Sequence[int],
        prompt_tokens: int,
        estimate: _Estimate,
    ) -> list[int]:
        """Tokens per member, where members differ in what is known of them.

        Args:
            held: Tokens by slot.
        """
        corrected = []
        for member in members:
            address = member.endpoint.address
            tokens, engines = estimate.tokens_at(address), self._engines[address]
            if engines and all(engine.is_live for engine in engines):
                mean = sum([held[engine.slot] for engine in engines]) // len(engines)
                exact = min(prompt_tokens, mean)
                is_complete = all(engine.is_complete for engine in engines)
                if is_complete or exact >= tokens:
                    tokens = exact
                    self._sources[address] = "events" if is_complete else "both"
            corrected.append(tokens)
        return corrected

    def _eviction_ratio(self, member: EndpointSnapshot, now: float) -> float:
        """Share of what the estimate has given up of a prompt that an engine evicts before it.

        Engines evict what was used longest ago, and so does the estimate, in the order in which
        prompts were sent: it is ahead of the engine by the prompts that wait there. What it has given
        up is lost once those q tokens, less the free ones, are computed. While few wait, the
        estimate of the size of the cache K is at fault rather: q / (q + `_SIZE_ERROR` K) is lost. Of
        that, what the memory of the host spares is not.
        """
        queued = member.account.queued(now) + member.foreign_tokens
        capacity = member.load.kv_tokens
        if queued <= 0.0 or not capacity:
            return 0.0
        held = 0
        for engine in self._engines[member.endpoint.address]:
            held += len(engine.keys)
        queued -= max(0, capacity - held * self._exact.index.block_tokens)
        if queued <= 0.0:
            return 0.0
        return self._lost_ratio(member) * queued / (queued + _SIZE_ERROR * capacity)

    def _lost_ratio(self, member: EndpointSnapshot) -> float:
        """Share of computing a block again that its eviction costs: less where the host has copies."""
        engines = self._engines[member.endpoint.address]
        return 1.0 - (min([engine.spared_ratio for engine in engines]) if engines else 0.0)

    def _discount_idle(
        self,
        member: EndpointSnapshot,
        corrected: list[int],
        position: int,
        prompt: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        """Take off what an engine will evict because requests wait there for more memory than is idle.

        They take all blocks that no request holds, before it begins with this one. What open requests
        have in common with it stays. Of the rest x / (x + `_SIZE_ERROR` K) is lost, with x the tokens
        that those who wait lack.

        Args:
            corrected: Tokens by position, which are changed.
            prompt: Block hashes of the prompt, and tokens by depth.
        """
        load, account = member.load, member.account
        if load.kv_usage is None or not load.kv_tokens or not account.in_flight:
            return
        context_tokens = account.active_context_tokens / account.in_flight
        lacking = (load.waiting or 0.0) * context_tokens - (1.0 - load.kv_usage) * load.kv_tokens
        if lacking <= 0.0:
            return
        held, (chain, tokens) = corrected[position], prompt
        shared = min(held, tokens[account.count_open_blocks(chain)])
        share = self._lost_ratio(member) * lacking / (lacking + _SIZE_ERROR * load.kv_tokens)
        if shared < held:
            corrected[position] = held - int((held - shared) * share)
            self._sources[member.endpoint.address] = "both"

    def _follow_pool(self) -> None:
        """Look engines up again when the endpoint set or the subscriptions changed."""
        pool, index = self._store.pool, self._exact.index
        self._positions, self._version = pool.positions, index.version
        engines = [
            self._exact.engines(cache_model.index_key(member.endpoint)) for member in pool.members
        ]
        self._engines = dict(zip(pool.positions, engines, strict=True))
        self._take_slots = None
        if all(len(ranks) == 1 and ranks[0].is_exact for ranks in engines):
            slots = [ranks[0].slot for ranks in engines]
            self._first_end = (-1, 0)
            self._positions_by_slot = {slot: position for position, slot in enumerate(slots)}
            getter = itemgetter(*slots) if len(slots) > 1 else None
            # A getter of a single item returns it bare.
            self._take_slots = lambda held: (
                list(getter(held)) if getter is not None else [held[slot] for slot in slots]
            )
