"""The one place where what nobody knows of an endpoint is filled in.

What is unknown or stale counts as the mean of what is known of the other candidates, for every
strategy alike: neither the best nor full. What a page provably claims too little of counts as the
mean where that is more. While nothing is known of anybody, own requests are all that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from extproc.endpoint import UNKNOWN, Candidate, Load
from extproc.pool import plausibility

if TYPE_CHECKING:
    from extproc.pool.snapshot import Member

#: A page with any of these says nothing certain of the requests on its engine.
_NO_REQUESTS = (
    plausibility.NO_WAITING | plausibility.NO_RUNNING | plausibility.TOO_LITTLE | plausibility.VOID
)

#: A page with any of these is no measure for others, whatever it says.
_UNSOUND = plausibility.TOO_LITTLE | plausibility.VOID


class _Means(msgspec.Struct, frozen=True, gc=False):
    """What is known, averaged over those of whom it is known; None where it is of nobody.

    Attributes:
        waiting: Requests that wait (count).
        running: Requests in the batch (count).
        kv_usage: Share of KV blocks in use, 0..1.
        unseen_tokens: KV tokens sent since the page.
        kv_tokens: Size of the KV cache.
        foreign: Requests of others (count).
        foreign_waiting: Of these, waiting.
    """

    waiting: float | None
    running: float | None
    kv_usage: float | None
    unseen_tokens: float | None
    kv_tokens: float | None
    foreign: float | None
    foreign_waiting: float | None


def impute(candidates: list[Candidate], members: Sequence[Member], *, oldest: float) -> None:
    """Fill in what nobody knows of some candidates, in place.

    Args:
        candidates: As pages have them, those of void pages with nothing but our own account.
        members: Of the same endpoints.
        oldest: Monotonic seconds; a page from then or before is void.
    """
    flaws = [plausibility.VOID if member.load.at <= oldest else member.flaws for member in members]
    sound = [n for n, flaw in enumerate(flaws) if not flaw & _UNSOUND]
    if not sound:
        for n, flaw in enumerate(flaws):
            if flaw & plausibility.VOID and candidates[n].load is not UNKNOWN:
                candidates[n] = msgspec.structs.replace(candidates[n], load=UNKNOWN)
        return
    means = _means(candidates, members, flaws, sound)
    fillable = _fillable(means)
    for n, flaw in enumerate(flaws):
        if flaw & fillable:
            candidates[n] = _filled(candidates[n], members[n], flaw, means)


def _means(
    candidates: Sequence[Candidate],
    members: Sequence[Member],
    flaws: Sequence[int],
    sound: Sequence[int],
) -> _Means:
    """The means over candidates whose pages are sound; those that no flaw calls for are None.

    Written out with lists: this runs for every request while some page is flawed.

    Args:
        candidates: As of `impute`.
        members: Of the same endpoints.
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
        unseen_tokens=_mean(
            [candidates[n].unseen_tokens for n in sound if not flaws[n] & plausibility.NO_KV_USAGE]
        ),
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


def _filled(c: Candidate, member: Member, flaw: int, means: _Means) -> Candidate:
    """One candidate as it counts."""
    load = _load(member, flaw, means)
    if load is UNKNOWN:
        return c if c.load is UNKNOWN else msgspec.structs.replace(c, load=UNKNOWN)
    is_void = bool(flaw & plausibility.VOID)
    requests, queued, unseen = c.requests, c.queued_tokens, c.unseen_tokens
    if flaw & _NO_REQUESTS:
        # Of a void page nothing was counted.
        foreign = 0.0 if is_void else member.foreign
        waiting = 0.0 if is_void else member.foreign_waiting
        works = member.account.works
        requests = c.in_flight + max(foreign, means.foreign or 0.0)
        queued += works.price(max(waiting, means.foreign_waiting or 0.0), load.kv_tokens)
        queued -= 0.0 if is_void else member.foreign_tokens
    if is_void:
        # What was sent since the last page says nothing: most of it may have ended long ago.
        held = (load.kv_usage or 0.0) * (load.kv_tokens or 0)
        unseen = max(means.unseen_tokens or 0.0, c.open_tokens - held)
    return msgspec.structs.replace(
        c,
        load=load,
        requests=requests,
        queued_tokens=queued,
        unseen_tokens=unseen,
        page=UNKNOWN if is_void else member.load,
    )


def _load(member: Member, flaw: int, means: _Means) -> Load:
    """The page as it counts; `UNKNOWN` where neither it nor any other one says anything."""
    kept = member.load
    waiting, running, usage = kept.waiting, kept.running, kept.kv_usage
    if flaw & plausibility.VOID:
        waiting, running, usage = means.waiting, means.running, means.kv_usage
        if waiting is None and running is None and usage is None:
            return UNKNOWN
    elif flaw & plausibility.TOO_LITTLE:
        waiting = _more(waiting, means.waiting)
        running = _more(running, means.running)
        usage = _more(usage, means.kv_usage)
    else:
        waiting = means.waiting if waiting is None else waiting
        running = means.running if running is None else running
        usage = means.kv_usage if usage is None else usage
    size, blocks = kept.block_tokens, kept.kv_blocks
    if not kept.kv_tokens and means.kv_tokens is not None:
        size = size or 1
        blocks = round(means.kv_tokens / size)
    # Sizes and slots outlive the page; which adapters are on the device does not.
    named = flaw & plausibility.VOID == 0
    return msgspec.structs.replace(
        kept,
        waiting=waiting,
        running=running,
        kv_usage=usage,
        kv_blocks=blocks,
        block_tokens=size,
        adapters=kept.adapters if named else None,
        waiting_adapters=kept.waiting_adapters if named else None,
    )


def _more(claimed: float | None, mean: float | None) -> float | None:
    if claimed is None or mean is None:
        return mean if claimed is None else claimed
    return max(claimed, mean)
