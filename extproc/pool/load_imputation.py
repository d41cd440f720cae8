"""Load imputation: pages with their unknown values filled by the means of other pages.

What is unknown or stale counts as the mean of what is known of the other candidates, for every
strategy alike: neither the best nor full. What a page provably claims too little of counts as the
mean where that is more. While no endpoint has a known load, only our own requests count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from extproc.endpoint import NO_LOAD, Load
from extproc.pool import plausibility
from extproc.pool.snapshot import EndpointSnapshot

#: A page with any of these says nothing certain of the requests on its engine.
NO_REQUESTS = (
    plausibility.NO_WAITING | plausibility.NO_RUNNING | plausibility.TOO_LITTLE | plausibility.VOID
)

#: A page with any of these is no measure for others, whatever it says.
UNSOUND = plausibility.TOO_LITTLE | plausibility.VOID

#: A page with any of these does not show how much of the memory is in use.
UNMEASURED = UNSOUND | plausibility.NO_KV_USAGE

#: Change of a mean from which the pages filled with it are filled anew, as a share of it.
_CHANGE = 0.01


class LoadMeans(NamedTuple):
    """Means over the endpoints that report a value; None where no endpoint does.

    Attributes:
        waiting: Requests that wait (count).
        running: Requests in the batch (count).
        kv_usage: Share of KV blocks in use, 0..1.
        kv_tokens: Size of the KV cache.
        foreign: Requests of others (count).
        foreign_waiting: Of these, waiting.
        request_tokens: Tokens of a request; not a mean of pages.
    """

    waiting: float | None
    running: float | None
    kv_usage: float | None
    kv_tokens: float | None
    foreign: float | None
    foreign_waiting: float | None
    request_tokens: float | None

    def is_close(self, other: LoadMeans) -> bool:
        """True if pages that were filled with the other means may stay."""
        for mean, before in zip(self, other, strict=True):
            if mean is None or before is None:
                if mean is not before:
                    return False
            elif abs(mean - before) > _CHANGE * before:
                return False
        return True


def are_extra_means_close(means: Mapping[str, float], before: Mapping[str, float]) -> bool:
    """True if pages that were filled with the means before may stay."""
    return means.keys() == before.keys() and all(
        abs(mean - before[name]) <= _CHANGE * abs(before[name]) for name, mean in means.items()
    )


def fillable_flaws(means: LoadMeans) -> int:
    """Bits of the flaws that the means mend: what every page lacks stays unknown."""
    bits = UNSOUND
    for bit, mean in (
        (plausibility.NO_WAITING, means.waiting),
        (plausibility.NO_RUNNING, means.running),
        (plausibility.NO_KV_USAGE, means.kv_usage),
        (plausibility.NO_KV_SIZE, means.kv_tokens),
    ):
        if mean is not None:
            bits |= bit
    return bits


def fill_endpoint(
    member: EndpointSnapshot, flaw: int, means: LoadMeans, extra_means: Mapping[str, float]
) -> EndpointSnapshot:
    """An endpoint with its page as it counts."""
    load = _fill_load(member, flaw, means, extra_means)
    foreign, foreign_tokens = member.foreign, member.foreign_tokens
    if load is NO_LOAD:
        foreign = foreign_tokens = 0.0
    elif flaw & NO_REQUESTS:
        # Of a void page nothing was counted.
        is_void = bool(flaw & plausibility.VOID)
        foreign = 0.0 if is_void else member.foreign
        waiting = 0.0 if is_void else member.foreign_waiting
        foreign = max(foreign, means.foreign or 0.0)
        foreign_tokens = member.account.typical_work.price(
            max(waiting, means.foreign_waiting or 0.0), load.kv_tokens
        )
    # By position, which takes a tenth of `msgspec.structs.replace`: pages come many times a second.
    return EndpointSnapshot(
        member.endpoint,
        member.account,
        load,
        foreign,
        member.foreign_waiting,
        foreign_tokens,
        member.rates,
        member.failures,
        member.failure,
        member.models,
        member.condition,
        member.flaws,
        member.progress,
    )


def _fill_load(
    member: EndpointSnapshot, flaw: int, means: LoadMeans, extra_means: Mapping[str, float]
) -> Load:
    """The page as it counts; `NO_LOAD` where neither it nor any other one says anything."""
    page = member.load
    waiting, running, usage = page.waiting, page.running, page.kv_usage
    if flaw & plausibility.VOID:
        waiting, running, usage = means.waiting, means.running, means.kv_usage
        if waiting is None and running is None and usage is None and not extra_means:
            return NO_LOAD
    elif flaw & plausibility.TOO_LITTLE:
        waiting = _larger(waiting, means.waiting)
        running = _larger(running, means.running)
        usage = _larger(usage, means.kv_usage)
    else:
        waiting = means.waiting if waiting is None else waiting
        running = means.running if running is None else running
        usage = means.kv_usage if usage is None else usage
    size, blocks = page.block_tokens, page.kv_blocks
    if not page.kv_tokens and means.kv_tokens is not None:
        size = size or 1
        blocks = round(means.kv_tokens / size)
    # Sizes and slots outlive the page; adapters on the device do not.
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
        page.extra if named else extra_means,
    )


def _larger(claimed: float | None, mean: float | None) -> float | None:
    if claimed is None or mean is None:
        return mean if claimed is None else claimed
    return max(claimed, mean)
