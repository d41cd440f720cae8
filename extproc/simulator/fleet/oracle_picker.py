"""Oracle picker: knows true queues, caches, answer lengths and outages, without delay.

It prices like the adaptive strategy, greedily, one request after another, but every term is exact.
What it gains over the adaptive strategy is what better knowledge could gain. It is no proof of the
optimum: a scheduler that also knew the requests to come could beat it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from extproc.endpoint import Endpoint
from extproc.pool.conversations import ConversationTracker
from extproc.pool.inflight import InflightLoad, Reservation
from extproc.scheduling.estimated_time import EstimatedTime
from extproc.simulator import engine_request, lora
from extproc.simulator.fleet.engine_node import EngineNode
from extproc.simulator.fleet.sim_request import KEY_TOKENS, RequestSpec, SimRequest

#: What the adaptive strategy weighs its terms with.
_WEIGHTS = EstimatedTime()

#: Keys of a prompt of which one is a block of the chain; 64 tokens, as the director's first blocks.
_CHAIN = 4


class _CandidateState(msgspec.Struct):
    """State of one engine, for one request.

    Attributes:
        others: What every job there still needs.
        cached: Prompt tokens of the request that its cache has, on the device or its host.
        reload_s: Seconds to load those of the host.
        depth: Blocks of it on the device (count).
        home: Whether the conversation lives there.
        held: Tokens that the open prompts there will hold.
    """

    node: EngineNode
    work: RequestSpec
    others: Sequence[engine_request.Outstanding]
    cached: int
    reload_s: float
    depth: int
    home: bool
    held: float

    @property
    def saved(self) -> float:
        """Tokens whose computation takes as long as its cache saves."""
        per_token = self.node.engine.profile.prefill_s_per_token
        return self.cached - (self.reload_s / per_token if per_token else 0.0)

    def unpinned_tokens(self) -> int:
        """Prompt tokens that it takes room for: those in blocks that no request holds."""
        engine, keys = self.node.engine, self.work.keys
        pinned = self.depth - engine.pool.idle_among(keys, self.depth)
        return self.work.prompt_tokens - pinned * engine.profile.block_tokens


class OraclePicker:
    """Picker with perfect knowledge; see the module.

    Args:
        nodes: All engines there will ever be.
    """

    def __init__(self, nodes: Sequence[EngineNode]) -> None:
        self._nodes = nodes
        self._listed: Sequence[int] = ()
        self._uncached: dict[str, int] = {}
        #: Prompt tokens that requests take room for, when they were sent.
        self._unpinned: dict[str, int] = {}
        self._recurrence = ConversationTracker()
        self._accounts = [InflightLoad(Endpoint(f"engine-{n}")) for n in range(len(nodes))]
        self._reservations: dict[str, Reservation] = {}

    def listed(self, up: Sequence[int]) -> None:
        """See `SimPicker`."""
        self._listed = up

    def pick(self, sim_request: SimRequest) -> int:
        """See `SimPicker`."""
        work = sim_request.work
        chain = work.keys[_CHAIN - 1 : work.prompt_tokens // KEY_TOKENS : _CHAIN]
        home = self._recurrence.last_endpoint(chain)
        candidates = [
            self._look(n, work, home=home) for n in self._listed if self._nodes[n].is_serving
        ]
        if not candidates:
            sim_request.failure = "rejected 503"
            return -1
        most = max(candidate.saved for candidate in candidates)
        growth = self._recurrence.expected_growth_tokens(work.prompt_tokens)
        best = min(candidates, key=lambda candidate: self._price(candidate, most, growth))
        where = next(n for n in self._listed if self._nodes[n] is best.node)
        sim_request.predicted_tokens = best.cached
        self._uncached[sim_request.id] = work.prompt_tokens - best.cached
        self._unpinned[sim_request.id] = best.unpinned_tokens()
        account = self._accounts[where]
        reservation = self._reservations[sim_request.id] = account.open(
            "", work.prompt_tokens, cached_tokens=best.cached, now=0.0
        )
        self._recurrence.record_sent(chain, account, prompt_tokens=work.prompt_tokens, now=0.0)
        if chain:
            size = _CHAIN * KEY_TOKENS
            account.track_context(
                reservation, chain, range(0, (len(chain) + 1) * size, size), growth=growth
            )
        return where

    def cancel(self, sim_request: SimRequest) -> bool:
        """See `SimPicker`; no request is ever queued."""
        del sim_request
        return False

    def began(self, sim_request: SimRequest) -> None:
        """See `SimPicker`; it never splits a request."""

    def ended(self, sim_request: SimRequest) -> None:
        """See `SimPicker`."""
        del self._uncached[sim_request.id], self._unpinned[sim_request.id]
        self._reservations.pop(sim_request.id).close(0.0)

    def rates(self) -> None:
        """See `SimPicker`; it needs no estimate."""

    def _look(self, n: int, work: RequestSpec, *, home: InflightLoad | None) -> _CandidateState:
        engine = self._nodes[n].engine
        machine, pool = engine.profile, engine.pool
        size, limit = machine.block_tokens, (work.prompt_tokens - 1) // machine.block_tokens
        depth = pool.match(work.keys, limit)
        reloaded = 0 if pool.host is None else pool.host.match(work.keys, depth, limit) * size
        account = self._accounts[n]
        return _CandidateState(
            self._nodes[n],
            work,
            others=list(engine.outstanding()),
            cached=depth * size + reloaded,
            reload_s=reloaded * machine.reload_s_per_token,
            depth=depth,
            home=account is home,
            held=account.active_context_tokens,
        )

    def _price(self, candidate: _CandidateState, most: float, growth: float) -> float:
        """Cost of a candidate in seconds; `most` is the highest number of saved tokens."""
        work, machine = candidate.work, candidate.node.engine.profile
        per_token, per_seq = machine.prefill_s_per_token, machine.decode_s_per_seq
        prefill = (work.prompt_tokens - candidate.cached) * per_token + candidate.reload_s
        queued = waiting = first = 0
        slower = load = 0.0
        own = per_seq + machine.context_s_per_token * (work.prompt_tokens + work.output_tokens / 2)
        step_s = machine.base_s
        for other in candidate.others:
            queued += self._remaining_tokens(other)
            waiting += other.waiting
            first += other.prompt_left > 0
            iteration_s = per_seq + machine.context_s_per_token * other.context
            step_s += 0.0 if other.waiting else iteration_s
            together = min(other.output_left, work.output_tokens)
            slower += together * iteration_s
            load += together * own
        count = len(candidate.others)
        adapter, stall_s = self._adapter_s(candidate), self._stall_s(candidate)
        if stall_s and candidate.node.engine.pool.host is not None:
            # As the adaptive strategy's term: those that wait for memory, and the next one.
            taken = candidate.unpinned_tokens() + work.output_tokens / 2
            stall_s += (1 + waiting) * work.output_tokens * step_s * taken / machine.kv_tokens
        return (
            queued * per_token
            + prefill
            + 1.5 * step_s
            + adapter
            + stall_s
            + _WEIGHTS.own_share * slower
            + _WEIGHTS.others_share * (load + count * (prefill + min(adapter, machine.lora_load_s)))
            + _WEIGHTS.waiting_share * first * prefill
            + _WEIGHTS.waste_share * (count + waiting) * (most - candidate.saved) * per_token
            + self._crowding_s(candidate, growth)
        )

    def _remaining_tokens(self, other: engine_request.Outstanding) -> int:
        """Prompt tokens that a request has still to compute."""
        if not other.waiting:
            return other.prompt_left
        return min(self._uncached.get(other.id, other.prompt_left), other.prompt_left)

    def _crowding_s(self, candidate: _CandidateState, growth: float) -> float:
        """As the adaptive strategy's term, with what is truly cached."""
        if candidate.home:
            return 0.0
        machine = candidate.node.engine.profile
        tokens = candidate.work.prompt_tokens + growth
        wanted = tokens - candidate.cached
        share = (candidate.held + wanted) / machine.kv_tokens
        low, lost = _WEIGHTS.crowding_start, _WEIGHTS.crowding_end
        value = min((share - low) / (1.0 - low), (lost - share) / (lost - 1.0), 1.0)
        per_token = machine.prefill_s_per_token
        if candidate.node.engine.pool.host is not None:
            per_token = min(per_token, machine.reload_s_per_token)
        moving_s = machine.kv_tokens * per_token * wanted / tokens
        return _WEIGHTS.crowding * self._recurrence.continuation_ratio * moving_s * max(0.0, value)

    def _stall_s(self, candidate: _CandidateState) -> float:
        """Seconds until the cache has room for this request and all ahead of it."""
        engine, work = candidate.node.engine, candidate.work
        machine = engine.profile
        missing = work.prompt_tokens + work.output_tokens // 2
        missing -= engine.pool.available * machine.block_tokens
        for other in candidate.others:
            if other.waiting:
                tokens = min(self._unpinned.get(other.id, other.prompt_left), other.prompt_left)
                missing += tokens + other.output_left // 2
        if missing > 0:
            # Cached blocks that no request holds are among those available, and taken from there.
            missing -= work.prompt_tokens - candidate.unpinned_tokens()
        if missing <= 0:
            return 0.0
        step_s = machine.base_s + machine.decode_s_per_seq * engine.running
        waited = 0
        running = (other for other in candidate.others if not other.waiting)
        for other in sorted(running, key=lambda job: job.output_left):
            missing -= other.context
            waited = other.output_left
            if missing <= 0:
                return waited * step_s
        # Those that wait must run as well before there is room.
        return waited * step_s * (1.0 + missing / max(1, machine.kv_tokens))

    def _adapter_s(self, candidate: _CandidateState) -> float:
        """Seconds until the adapter is resident."""
        adapter, engine = candidate.work.adapter, candidate.node.engine
        machine, slots = engine.profile, engine.slots
        if not adapter or adapter in slots.resident:
            return 0.0
        ahead = {o.adapter for o in candidate.others if o.waiting and o.adapter} - set(
            slots.resident
        )
        if slots.fit(adapter) is not lora.SlotFit.NONE and not ahead:
            return machine.lora_load_s
        # A slot is free when the last sequence of some adapter ends.
        ends: dict[str, int] = {}
        for other in candidate.others:
            if other.adapter and not other.waiting:
                ends[other.adapter] = max(ends.get(other.adapter, 0), other.output_left)
        free = sorted(ends.values())
        place = min(len(ahead), len(free) - 1)
        wait = free[place] if free else 0
        step_s = machine.base_s + machine.decode_s_per_seq * engine.running
        return machine.lora_load_s + wait * step_s
