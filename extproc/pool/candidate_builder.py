"""Candidates: endpoints as a request sees them, with what is unknown of their load imputed.

Imputed loads (`load_imputation`) follow from pages alone, and so they stand until another page is
read or one gets too old: they are worked out from what changed since the request before, not for
each request anew.

Residency of a LoRA adapter follows from our open requests and from scrapes. An engine's labels list
adapters with running requests only: one that waits for a slot and one that idles in a slot are both
absent (docs/spec/engines.md#lora-info). So our open requests say which are in use, and our latest
ones which probably still sit in a slot, as many as there are slots.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, islice

import msgspec

from extproc.endpoint import NO_EXTRA, NO_LOAD, AdapterResidency, Candidate, Load
from extproc.pool import plausibility
from extproc.pool.engine_counters import AdapterSlotState
from extproc.pool.inflight import InflightLoad
from extproc.pool.load_imputation import (
    NO_REQUESTS,
    UNMEASURED,
    UNSOUND,
    LoadMeans,
    are_extra_means_close,
    fill_endpoint,
    fillable_flaws,
)
from extproc.pool.snapshot import EndpointSnapshot, Pool

#: Share of the members, as a divisor, from which on changes are not taken in one by one.
_MUCH = 4


class Imputation(msgspec.Struct, frozen=True):
    """The pages of some endpoints as they count, by position.

    Attributes:
        counted: The endpoints, with their pages and the requests of others as they count; `NO_LOAD`
            where neither its own page nor any other one says anything.
        stale: Whether the page is too old.
        measured: Whether the page shows how much of the memory is in use.
        held_tokens: KV tokens in use of those whose page is void.
    """

    counted: list[EndpointSnapshot]
    pages: list[Load | None]
    stale: list[bool]
    measured: list[bool]
    held_tokens: dict[int, float]

    def unscraped_tokens(self, members: Sequence[EndpointSnapshot]) -> Mapping[int, float]:
        """By position of endpoints whose page is void, KV tokens sent since their last page.

        Most of what was sent since a page of long ago may have ended: the mean of the others counts,
        or what is open there beyond what is in use, where that is more. Unlike the rest this changes
        with every request.
        """
        if not self.held_tokens:
            return {}
        accounts = [member.account for member in members]
        tokens = [a.kv_tokens_sent - a.kv_tokens_scraped for a in compress(accounts, self.measured)]
        mean = sum(tokens) / len(tokens) if tokens else 0.0
        # A call of `max` takes as long as the rest.
        return {
            n: beyond if (beyond := accounts[n].active_context_tokens - held) > mean else mean
            for n, held in self.held_tokens.items()
        }


class Imputer:
    """Imputes for consecutive requests, and works out what changed between them.

    A result is valid until the next call. Pages that are filled are filled anew when a mean changed
    by more than a hundredth: in a large pool each page moves the means a little.
    """

    def __init__(self) -> None:
        self._members: Sequence[EndpointSnapshot] = ()
        self._flaws: list[int] = []
        self._sums: list[float] = []
        self._counts: list[int] = []
        self._num_sound = 0
        self._num_with_extra = 0
        # The members are worked out for `oldest` from the first until before the second.
        self._since = self._until = -math.inf
        self._means: LoadMeans | None = None
        self._extra_means = NO_EXTRA
        self._fillable = 0
        self._stale: list[bool] = []
        self._is_any_stale = False
        self._imputation = Imputation([], [], [], [], {})
        self._young_of: object = None
        self._young_until = -math.inf

    def impute(
        self, members: Sequence[EndpointSnapshot], pool: Pool, oldest: float
    ) -> Imputation | None:
        """Fill in unknown load; None where every page counts as it is.

        Args:
            members: Eligible endpoints of the pool; must not change in place.
            oldest: Monotonic seconds; a page from then or before is void.
        """
        if not pool.has_unknown_values and (
            (pool.positions is self._young_of and oldest < self._young_until)
            or self._are_young(pool, oldest)
        ):
            return None
        if members is not self._members or not self._since <= oldest < self._until:
            self._follow(members, oldest)
        return self._imputation if pool.has_unknown_values or self._is_any_stale else None

    def _are_young(self, pool: Pool, oldest: float) -> bool:
        """Look whether no page of the pool is too old, and until when that is certain.

        Pages are only ever replaced by younger ones.
        """
        if self._is_any_stale:
            return False
        self._young_of = pool.positions
        self._young_until = min([member.load.at for member in pool.members], default=math.inf)
        return oldest < self._young_until

    def _follow(self, members: Sequence[EndpointSnapshot], oldest: float) -> None:
        """Update by what changed since the call before; everything where that is much."""
        before, changed = self._members, [*range(len(members))]
        if len(before) == len(members) and self._since <= oldest < self._until:
            changed = [*compress(changed, map(operator.is_not, members, before))]
        if _MUCH * len(changed) > len(members):
            self._start(members, oldest)
        else:
            for n in changed:
                self._replace(n, members[n], oldest)
        self._members, self._since = members, oldest
        self._is_any_stale = True in self._stale
        self._fill(changed)

    def _start(self, members: Sequence[EndpointSnapshot], oldest: float) -> None:
        """Update by all members."""
        loads = [member.load for member in members]
        stale = [load.at <= oldest for load in loads]
        young = [load.at for load, is_stale in zip(loads, stale, strict=True) if not is_stale]
        self._until = min(young, default=math.inf)
        flaws = [
            plausibility.VOID if is_stale else member.flaws
            for member, is_stale in zip(members, stale, strict=True)
        ]
        loads = [load for load, flaw in zip(loads, flaws, strict=True) if not flaw & UNSOUND]
        shown = [m for m, flaw in zip(members, flaws, strict=True) if not flaw & NO_REQUESTS]
        known: Sequence[Sequence[float]] = (
            [value for load in loads if (value := load.waiting) is not None],
            [value for load in loads if (value := load.running) is not None],
            [value for load in loads if (value := load.kv_usage) is not None],
            [value for load in loads if (value := load.kv_tokens)],
            [member.foreign for member in shown],
            [member.foreign_waiting for member in shown],
        )
        self._sums, self._counts = [*map(sum, known)], [*map(len, known)]
        self._num_sound, self._means = len(loads), None
        self._num_with_extra = len([load for load in loads if load.extra])
        measured = [not flaw & UNMEASURED for flaw in flaws]
        self._stale, self._flaws = stale, flaws
        self._imputation = Imputation([], [], stale, measured, {})

    def _replace(self, n: int, member: EndpointSnapshot, oldest: float) -> None:
        """Update by a member that changed."""
        at = member.load.at
        self._stale[n] = is_stale = at <= oldest
        if not is_stale:
            self._until = min(self._until, at)
        self._count(self._members[n], self._flaws[n], -1)
        self._flaws[n] = flaw = plausibility.VOID if is_stale else member.flaws
        self._count(member, flaw, 1)
        self._imputation.measured[n] = not flaw & UNMEASURED

    def _count(self, member: EndpointSnapshot, flaw: int, sign: int) -> None:
        """Add a member to the sums, or subtract it."""
        if flaw & UNSOUND:
            return
        self._num_sound += sign
        load = member.load
        if load.extra:
            self._num_with_extra += sign
        values = [load.waiting, load.running, load.kv_usage, load.kv_tokens or None]
        if not flaw & NO_REQUESTS:
            values += member.foreign, member.foreign_waiting
        for n, value in enumerate(values):
            if value is not None:
                self._counts[n] += sign
                self._sums[n] += sign * value

    def _fill(self, changed: Iterable[int]) -> None:
        """Fill the pages that changed, or all where the means did."""
        members, imputation = self._members, self._imputation
        totals = zip(self._sums, self._counts, strict=True)
        means = LoadMeans._make(
            [
                *(total / count if count else None for total, count in totals),
                members[0].account.typical_work.typical if members else None,
            ]
        )
        fillable = fillable_flaws(means) if self._num_sound else plausibility.VOID
        extra_means = self._average_extra() if self._num_with_extra else NO_EXTRA
        if (
            self._means is None
            or fillable != self._fillable
            or not means.is_close(self._means)
            or not are_extra_means_close(extra_means, self._extra_means)
        ):
            if means.kv_usage is not None:
                means = means._replace(kv_usage=self._clamp_usage(means.kv_usage))
            self._means, self._extra_means, self._fillable = means, extra_means, fillable
            imputation.counted[:] = members
            imputation.pages[:] = [None] * len(members)
            imputation.held_tokens.clear()
            changed = [n for n, flaw in enumerate(self._flaws) if flaw]
        for n in changed:
            member, flaw = members[n], self._flaws[n]
            counted, page = member, None
            imputation.held_tokens.pop(n, None)
            if flaw & fillable:
                counted = fill_endpoint(member, flaw, self._means, self._extra_means)
                load = counted.load
                if load is not NO_LOAD:
                    page = member.load
                    if flaw & plausibility.VOID:
                        page = NO_LOAD
                        held = (load.kv_usage or 0.0) * (load.kv_tokens or 0)
                        imputation.held_tokens[n] = held
            imputation.counted[n], imputation.pages[n] = counted, page

    def _clamp_usage(self, mean: float) -> float:
        """Clamp a mean to the known shares: rounding makes that of equal ones less than each."""
        members = zip(self._members, self._flaws, strict=True)
        sound = [member.load for member, flaw in members if not flaw & UNSOUND]
        known = [usage for load in sound if (usage := load.kv_usage) is not None]
        return min(max(mean, min(known)), max(known))

    def _average_extra(self) -> Mapping[str, float]:
        """Mean of every extra metric over the pages that have it.

        Not followed from page to page: sums of values up to 2^53 would not come back to small ones.
        """
        values: dict[str, list[float]] = {}
        for member, flaw in zip(self._members, self._flaws, strict=True):
            if not flaw & UNSOUND:
                for name, value in member.load.extra.items():
                    values.setdefault(name, []).append(value)
        return {name: math.fsum(known) / len(known) for name, known in values.items()}


def adapter_residency(
    adapter: str, account: InflightLoad, load: Load, known: frozenset[str]
) -> AdapterResidency:
    """Residency of an adapter on one endpoint.

    Args:
        load: The last scrape, `NO_LOAD` when it is stale.
        known: Names that are adapters; others in the account are base models.
    """
    if adapter in account.adapters:
        return AdapterResidency.RESIDENT
    running = load.adapters
    if running and adapter in running:
        return AdapterResidency.RESIDENT
    slots = load.adapter_slots
    if slots is None:
        # vLLM shows its slots with its first adapter; by default it has one (`--max-loras`).
        is_in_use = not known.isdisjoint(account.adapters)
        return AdapterResidency.FULL if is_in_use else AdapterResidency.UNKNOWN
    slot_state = account.adapter_slots
    if slot_state is None or slot_state.load is not load or slot_state.known is not known:
        slot_state = account.cache_adapter_slots(_slot_state(account, load, known, slots))
    if slot_state.full:
        return AdapterResidency.FULL
    if adapter in slot_state.idle:
        return AdapterResidency.IDLE
    return AdapterResidency.ROOM if slot_state.room else AdapterResidency.EVICTABLE


def _slot_state(
    account: InflightLoad, load: Load, known: frozenset[str], slots: int
) -> AdapterSlotState:
    """Adapter slot state of an endpoint; computed again when its adapters or load change."""
    # The account holds a handful of names, and there may be thousands of known ones.
    in_use = known.intersection(account.adapters)
    if load.adapters:
        in_use |= load.adapters
    if len(in_use) >= slots:
        return AdapterSlotState(load, known, full=True)
    idle = frozenset(islice((name for name in reversed(account.recent) if name in known), slots))
    room = len(in_use | idle) < slots
    return AdapterSlotState(load, known, full=False, room=room, idle=idle)


def build_candidates(
    members: Sequence[EndpointSnapshot],
    matched_tokens: Sequence[int],
    adapter: str,
    adapters: frozenset[str],
    now: float,
    imputation: Imputation | None,
    last_account: InflightLoad | None = None,
) -> list[Candidate]:
    """Turn members into candidates.

    Args:
        matched_tokens: Per member, prompt tokens predicted as cached there.
        adapter: LoRA adapter the request asks for; empty for a base model.
        imputation: Imputed pages of these members; None where every page counts as it is.
        last_account: Account of the endpoint of the conversation's last turn; None without one.
    """
    if imputation is not None:
        return _build_imputed(
            members, matched_tokens, adapter, adapters, now, imputation, last_account
        )
    candidates: list[Candidate] = []
    place = resident = AdapterResidency.RESIDENT
    for member, matched in zip(members, matched_tokens, strict=True):
        account, load, foreign_tokens = member.account, member.load, member.foreign_tokens
        if adapter:
            # The first question of `adapter_residency`, inlined: on a busy fleet it is mostly the last.
            if adapter in account.adapters:
                place = resident
            else:
                place = adapter_residency(adapter, account, load, adapters)
        own = account.in_flight
        # `InflightLoad.queued`, written out: a call to `max` takes as long as building the candidate.
        queued = account.sent - account.done - (now - account.at) * account.tokens_per_s
        candidates.append(
            Candidate(
                member.endpoint,
                load,
                now - load.at,
                own,
                own + member.foreign,
                account.prompt_tokens,
                matched,
                queued + foreign_tokens if queued > 0.0 else foreign_tokens,
                account.kv_tokens_sent - account.kv_tokens_scraped,
                member.rates,
                place,
                account.active_context_tokens,
                account is last_account,
            )
        )
    return candidates


def _build_imputed(
    members: Sequence[EndpointSnapshot],
    matched_tokens: Sequence[int],
    adapter: str,
    adapters: frozenset[str],
    now: float,
    imputation: Imputation,
    last_account: InflightLoad | None,
) -> list[Candidate]:
    """The same where pages are filled; apart, since looking for that in each takes an eighth more."""
    candidates: list[Candidate] = []
    place = resident = AdapterResidency.RESIDENT
    unscraped_by_position = imputation.unscraped_tokens(members)
    for n, (member, matched, counts, page) in enumerate(
        zip(members, matched_tokens, imputation.counted, imputation.pages, strict=True)
    ):
        account, foreign_tokens = member.account, counts.foreign_tokens
        if adapter:
            if adapter in account.adapters:
                place = resident
            else:
                load = NO_LOAD if imputation.stale[n] else member.load
                place = adapter_residency(adapter, account, load, adapters)
        unscraped: float = account.kv_tokens_sent - account.kv_tokens_scraped
        if page is NO_LOAD:
            unscraped = unscraped_by_position[n]
        own = account.in_flight
        queued = account.sent - account.done - (now - account.at) * account.tokens_per_s
        candidates.append(
            Candidate(
                member.endpoint,
                counts.load,
                now - member.load.at,
                own,
                own + counts.foreign,
                account.prompt_tokens,
                matched,
                queued + foreign_tokens if queued > 0.0 else foreign_tokens,
                unscraped,
                member.rates,
                place,
                account.active_context_tokens,
                account is last_account,
                page,
            )
        )
    return candidates
