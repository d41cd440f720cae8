"""The picker that knows: true queues, true caches, true lengths of answers, no delay.

It prices like the adaptive strategy, greedily, one request after another, but every term is exact.
What it gains over the adaptive strategy is what better knowledge could gain. It is no proof of the
optimum: a scheduler that also knew the requests to come could beat it.
"""

from __future__ import annotations

from collections.abc import Sequence

from extproc.sim import job, lora
from extproc.sim.virtual.site import Site
from extproc.sim.virtual.timeline import Timeline
from extproc.sim.virtual.trip import Trip, Work

#: As `EstimatedTime.others_share`.
_OTHERS = 0.3


class Clairvoyant:
    """See the module.

    Args:
        sites: All engines there will ever be.
        timeline: The clock; not used, as nothing it knows ages.
    """

    def __init__(self, sites: Sequence[Site], timeline: Timeline) -> None:
        del timeline
        self._sites = sites
        self._listed: Sequence[int] = ()
        self._uncached: dict[str, int] = {}

    def listed(self, up: Sequence[int]) -> None:
        """See `Picker`; it is not told of anything it does not know."""
        self._listed = up

    def pick(self, trip: Trip) -> int:
        """See `Picker`."""
        best, where, uncached = 0.0, -1, 0
        for n in self._listed:
            site = self._sites[n]
            if not site.up:
                continue
            cost, work = self._price(site, trip.work)
            if where < 0 or cost < best:
                best, where, uncached = cost, n, work
        if where < 0:
            trip.failure = "rejected 503"
            return -1
        trip.predicted_tokens = trip.work.prompt_tokens - uncached
        self._uncached[trip.id] = uncached
        return where

    def ended(self, trip: Trip) -> None:
        """See `Picker`."""
        del self._uncached[trip.id]

    def _price(self, site: Site, work: Work) -> tuple[float, int]:
        """Seconds, and the prompt tokens that are not cached."""
        engine, machine = site.engine, site.engine.profile
        size = machine.block_tokens
        cached = engine.pool.match(work.keys, (work.prompt_tokens - 1) // size) * size
        uncached = work.prompt_tokens - cached
        per_token, per_seq = machine.prefill_s_per_token, machine.decode_s_per_seq
        output = work.output_tokens
        queued = wanted = 0
        others = list(engine.outstanding())
        own = per_seq + machine.context_s_per_token * (work.prompt_tokens + output / 2)
        slower = load = 0.0
        for other in others:
            if other.waiting:
                left = self._uncached.get(other.id, other.prompt_left)
                queued += min(left, other.prompt_left)
                wanted += other.context + other.output_left // 2
            else:
                queued += other.prompt_left
            together = min(other.output_left, output)
            slower += together * (per_seq + machine.context_s_per_token * other.context)
            load += together * own
        adapter = self._adapter_s(site, work, others)
        prefill = uncached * per_token
        count = len(others)
        cost = (
            queued * per_token
            + prefill
            + machine.base_s * (1 + output)
            + slower
            + adapter
            + self._stall_s(site, others, wanted + uncached + output // 2)
            + _OTHERS * (load + count * (prefill + min(adapter, machine.lora_load_s)))
        )
        return cost, uncached

    def _stall_s(self, site: Site, others: Sequence[job.Outstanding], wanted: int) -> float:
        """Seconds until so many KV tokens are free."""
        engine, machine = site.engine, site.engine.profile
        missing = wanted - engine.pool.available * machine.block_tokens
        if missing <= 0:
            return 0.0
        step_s = machine.base_s + machine.decode_s_per_seq * engine.running
        waited = 0
        for other in sorted((o for o in others if not o.waiting), key=lambda o: o.output_left):
            missing -= other.context
            waited = other.output_left
            if missing <= 0:
                return waited * step_s
        # Those that wait must run as well before there is room.
        return waited * step_s * (1.0 + missing / max(1, machine.kv_tokens))

    def _adapter_s(self, site: Site, work: Work, others: Sequence[job.Outstanding]) -> float:
        """Seconds until the adapter is there."""
        if not work.adapter:
            return 0.0
        engine, machine = site.engine, site.engine.profile
        slots = engine.slots
        if work.adapter in slots.resident:
            return 0.0
        ahead = {o.adapter for o in others if o.waiting and o.adapter} - set(slots.resident)
        if slots.fit(work.adapter) is not lora.Fit.NONE and not ahead:
            return machine.lora_load_s
        # A slot is free when the last sequence of some adapter ends.
        ends: dict[str, int] = {}
        for other in others:
            if other.adapter and not other.waiting:
                ends[other.adapter] = max(ends.get(other.adapter, 0), other.output_left)
        free = sorted(ends.values())
        place = min(len(ahead), len(free) - 1)
        wait = free[place] if free else 0
        step_s = machine.base_s + machine.decode_s_per_seq * engine.running
        return machine.lora_load_s + wait * step_s
