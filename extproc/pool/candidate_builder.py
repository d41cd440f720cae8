"""Candidates: endpoints as a request sees them, with what is unknown of their load imputed.

What is unknown or stale counts as the mean of what is known of the other candidates, for every
strategy alike: neither the best nor full. What a page provably claims too little of counts as the
mean where that is more. While no endpoint has a known load, only our own requests count.

All of it follows from pages alone, and so it stands until another page is read or one gets too old:
it is worked out once for each snapshot, not for each request.

Residency of a LoRA adapter follows from our open requests and from scrapes. An engine's labels list
adapters with running requests only: one that waits for a slot and one that idles in a slot are both
absent (docs/spec/engines.md#lora-info). So our open requests say which are in use, and our latest
ones which probably still sit in a slot, as many as there are slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec

from extproc.endpoint import NO_LOAD, AdapterResidency, Candidate, Load
from extproc.pool import plausibility
from extproc.pool.inflight import AdapterSlotState, InflightLoad
from extproc.pool.snapshot import EndpointSnapshot

#: A page with any of these says nothing certain of the requests on its engine.
_NO_REQUESTS = (
    plausibility.NO_WAITING | plausibility.NO_RUNNING | plausibility.TOO_LITTLE | plausibility.VOID
)

#: A page with any of these is no measure for others, whatever it says.
_UNSOUND = plausibility.TOO_LITTLE | plausibility.VOID


class CountedPage(msgspec.Struct, frozen=True, gc=False):
    """A page as it counts; same shape as `EndpointSnapshot`, which stands for its own page.

    Attributes:
        load: The page; `NO_LOAD` where neither it nor any other one says anything.
        foreign: Requests of others (count).
        foreign_tokens: Uncached prompt tokens of those that wait.
    """

    load: Load = NO_LOAD
    foreign: float = 0.0
    foreign_tokens: float = 0.0


class Imputation(msgspec.Struct, frozen=True):
    """The pages of some endpoints as they count.

    Attributes:
        members: The endpoints.
        counted: Of each, its page as it counts.
        pages: Of each, what `Candidate.page` is.
        stale: Of each, whether its page is too old.
        held_tokens: By position of those whose page is void, KV tokens in use.
        measured: Those whose pages show how much of their memory is in use.
    """

    members: Sequence[EndpointSnapshot]
    counted: Sequence[CountedPage | EndpointSnapshot]
    pages: Sequence[Load | None]
    stale: Sequence[bool]
    held_tokens: Mapping[int, float]
    measured: Sequence[EndpointSnapshot]

    def unscraped_tokens(self) -> Mapping[int, float]:
        """By position of endpoints whose page is void, KV tokens sent since their last page.

        Most of what was sent since a page of long ago may have ended: the mean of the others counts,
        or what is open there beyond what is in use, where that is more. Unlike the rest this changes
        with every request.
        """
        if not self.held_tokens:
            return {}
        known = [member.account for member in self.measured]
        mean = (
            sum([a.kv_tokens_sent - a.kv_tokens_scraped for a in known]) / len(known)
            if known
            else 0.0
        )
        members = self.members
        return {
            n: max(mean, members[n].account.active_context_tokens - held)
            for n, held in self.held_tokens.items()
        }


class Imputer:
    """Imputes, and remembers the result until pages change."""

    def __init__(self) -> None:
        self._members: Sequence[EndpointSnapshot] = ()
        self._since = self._until = -math.inf
        self._imputation: Imputation | None = None

    def impute(
        self, members: Sequence[EndpointSnapshot], *, oldest: float, is_patchy: bool
    ) -> Imputation | None:
        """See `impute`; members must not change in place."""
        if members is not self._members or not self._since <= oldest < self._until:
            self._imputation = impute(members, oldest=oldest, is_patchy=is_patchy)
            young = [at for member in members if (at := member.load.at) > oldest]
            self._members, self._since = members, oldest
            self._until = min(young, default=math.inf)
        return self._imputation


def impute(
    members: Sequence[EndpointSnapshot], *, oldest: float, is_patchy: bool
) -> Imputation | None:
    """Fill in unknown load; None where every page counts as it is.

    Args:
        members: Endpoints in play.
        oldest: Monotonic seconds; a page from then or before is void.
        is_patchy: As of the pool.
    """
    stale = [member.load.at <= oldest for member in members]
    if not is_patchy and True not in stale:
        return None
    flaws = [
        plausibility.VOID if old else member.flaws
        for member, old in zip(members, stale, strict=True)
    ]
    sound = [n for n, flaw in enumerate(flaws) if not flaw & _UNSOUND]
    means = _means(members, flaws, sound)
    fillable = _fillable(means) if sound else plausibility.VOID
    counted: list[CountedPage | EndpointSnapshot] = list(members)
    pages: list[Load | None] = [None] * len(members)
    held: dict[int, float] = {}
    for n, flaw in enumerate(flaws):
        if not flaw & fillable:
            continue
        counted[n] = page = _counted(members[n], flaw, means)
        load = page.load
        if load is not NO_LOAD:
            pages[n] = members[n].load
            if flaw & plausibility.VOID:
                pages[n], held[n] = NO_LOAD, (load.kv_usage or 0.0) * (load.kv_tokens or 0)
    measured = [members[n] for n in sound if not flaws[n] & plausibility.NO_KV_USAGE]
    return Imputation(members, counted, pages, stale, held, measured)


class _Means(msgspec.Struct, frozen=True, gc=False):
    """Means over the endpoints that report a value; None where no endpoint does.

    Attributes:
        waiting: Requests that wait (count).
        running: Requests in the batch (count).
        kv_usage: Share of KV blocks in use, 0..1.
        kv_tokens: Size of the KV cache.
        foreign: Requests of others (count).
        foreign_waiting: Of these, waiting.
    """

    waiting: float | None
    running: float | None
    kv_usage: float | None
    kv_tokens: float | None
    foreign: float | None
    foreign_waiting: float | None


def _means(
    members: Sequence[EndpointSnapshot], flaws: Sequence[int], sound: Sequence[int]
) -> _Means:
    """The means over endpoints whose pages are sound; those that no flaw calls for are None.

    Args:
        members: As of `impute`.
        flaws: Of their pages.
        sound: Positions of those whose pages are a measure for others.
    """
    loads = [members[n].load for n in sound]
    # The size of the cache is a product, and most engines name theirs.
    sizes: list[float] = []
    if not all(m.load.kv_tokens for m, flaw in zip(members, flaws, strict=True) if flaw):
        sizes = [size for load in loads if (size := load.kv_tokens)]
    counted = [members[n] for n in sound if not flaws[n] & _NO_REQUESTS]
    return _Means(
        waiting=_mean([value for load in loads if (value := load.waiting) is not None]),
        running=_mean([value for load in loads if (value := load.running) is not None]),
        kv_usage=_mean([value for load in loads if (value := load.kv_usage) is not None]),
        kv_tokens=_mean(sizes),
        foreign=_mean([member.foreign for member in counted]),
        foreign_waiting=_mean([member.foreign_waiting for member in counted]),
    )


def _mean(known: Sequence[float]) -> float | None:
    return sum(known) / len(known) if known else None


def _fillable(means: _Means) -> int:
    """Bits of the flaws that the means mend: what every page lacks stays unknown."""
    bits = _UNSOUND
    for bit, mean in (
        (plausibility.NO_WAITING, means.waiting),
        (plausibility.NO_RUNNING, means.running),
        (plausibility.NO_KV_USAGE, means.kv_usage),
        (plausibility.NO_KV_SIZE, means.kv_tokens),
    ):
        if mean is not None:
            bits |= bit
    return bits


def _counted(member: EndpointSnapshot, flaw: int, means: _Means) -> CountedPage:
    """A page as it counts."""
    load = _load(member, flaw, means)
    if load is NO_LOAD:
        return CountedPage()
    if not flaw & _NO_REQUESTS:
        return CountedPage(load, member.foreign, member.foreign_tokens)
    is_void = bool(flaw & plausibility.VOID)
    # Of a void page nothing was counted.
    foreign = 0.0 if is_void else member.foreign
    waiting = 0.0 if is_void else member.foreign_waiting
    works = member.account.works
    return CountedPage(
        load,
        max(foreign, means.foreign or 0.0),
        works.price(max(waiting, means.foreign_waiting or 0.0), load.kv_tokens),
    )


def _load(member: EndpointSnapshot, flaw: int, means: _Means) -> Load:
    """The page as it counts; `NO_LOAD` where neither it nor any other one says anything."""
    page = member.load
    waiting, running, usage = page.waiting, page.running, page.kv_usage
    if flaw & plausibility.VOID:
        waiting, running, usage = means.waiting, means.running, means.kv_usage
        if waiting is None and running is None and usage is None:
            return NO_LOAD
    elif flaw & plausibility.TOO_LITTLE:
        waiting = _more(waiting, means.waiting)
        running = _more(running, means.running)
        usage = _more(usage, means.kv_usage)
    else:
        waiting = means.waiting if waiting is None else waiting
        running = means.running if running is None else running
        usage = means.kv_usage if usage is None else usage
    size, blocks = page.block_tokens, page.kv_blocks
    if not page.kv_tokens and means.kv_tokens is not None:
        size = size or 1
        blocks = round(means.kv_tokens / size)
    # Sizes and slots outlive the page; which adapters are on the device does not.
    named = flaw & plausibility.VOID == 0
    # By position, which takes a tenth of `msgspec.structs.replace`: pages come many times a second.
    return Load(
        page.at,
        page.engine,
        waiting,
        running,
        usage,
        page.adapters if named else None,
        page.waiting_adapters if named else None,
        page.adapter_slots,
        blocks,
        size,
        page.prefix_queries,
        page.prefix_hits,
        page.started_at,
        page.counters,
    )


def _more(claimed: float | None, mean: float | None) -> float | None:
    if claimed is None or mean is None:
        return mean if claimed is None else claimed
    return max(claimed, mean)


def adapter_residency(
    adapter: str, account: InflightLoad, load: Load, known: frozenset[str]
) -> AdapterResidency:
    """Residency of an adapter on one endpoint.

    Args:
        adapter: Its name.
        account: Our requests there.
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
        return AdapterResidency.UNKNOWN
    standing = account.adapter_slots
    if standing is None or standing.load is not load or standing.known is not known:
        standing = account.adapter_slots = _slot_state(account, load, known, slots)
    if standing.full:
        return AdapterResidency.FULL
    if adapter in standing.idle:
        return AdapterResidency.IDLE
    return AdapterResidency.ROOM if standing.room else AdapterResidency.EVICTABLE


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
    *,
    adapter: str,
    adapters: frozenset[str],
    now: float,
    imputation: Imputation | None,
    home: InflightLoad | None = None,
) -> list[Candidate]:
    """Turn members into candidates.

    Args:
        members: Endpoints in play.
        matched_tokens: Per member, prompt tokens believed cached there.
        adapter: LoRA adapter the request asks for; empty for a base model.
        adapters: Names known to be adapters.
        now: Monotonic seconds.
        imputation: Of the pages of these members; None where every page counts as it is.
        home: Of the endpoint where the prompt is expected to go on; None where there is none.
    """
    candidates: list[Candidate] = []
    place = resident = AdapterResidency.RESIDENT
    counted: Sequence[EndpointSnapshot | CountedPage] = members
    pages: Sequence[Load | None] = (None,) * len(members)
    unseen_by_position: Mapping[int, float] = {}
    if imputation is not None:
        counted, pages = imputation.counted, imputation.pages
        unseen_by_position = imputation.unscraped_tokens()
    for member, matched, counts, page in zip(members, matched_tokens, counted, pages, strict=True):
        account, foreign_tokens = member.account, counts.foreign_tokens
        if adapter:
            # The first question of `adapter_residency`, inlined: on a busy fleet it is mostly the last.
            place = resident
            if adapter not in account.adapters:
                is_stale = imputation is not None and imputation.stale[len(candidates)]
                load = NO_LOAD if is_stale else member.load
                place = adapter_residency(adapter, account, load, adapters)
        unseen: float = account.kv_tokens_sent - account.kv_tokens_scraped
        if page is NO_LOAD:
            unseen = unseen_by_position[len(candidates)]
        # `InflightLoad.queued`, written out: this runs for every candidate of every request, and a
        # call to `max` takes as long as building the candidate.
        queued = account.sent - account.done - (now - account.at) * account.tokens_per_s
        candidates.append(
            Candidate(
                member.endpoint,
                counts.load,
                now - member.load.at,
                account.in_flight,
                account.in_flight + counts.foreign,
                account.prompt_tokens,
                matched,
                queued + foreign_tokens if queued > 0.0 else foreign_tokens,
                unseen,
                member.rates,
                place,
                account.active_context_tokens,
                account is home,
                page,
            )
        )
    return candidates
