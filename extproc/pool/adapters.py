"""Whether an adapter is on an endpoint's device, from our own account and what was scraped.

An engine's labels list adapters with running requests only: one that waits for a slot and one that
idles in a slot are both absent (engines report 1.5). So our open requests say which are in use, and
our latest ones which probably still sit in a slot, as many as there are slots.
"""

from __future__ import annotations

from extproc.endpoint import Load, Residency
from extproc.pool.accounts import Account

#: No adapter is in the batch, or none that anybody told of.
_NONE: frozenset[str] = frozenset()


def residency(adapter: str, account: Account, load: Load, known: frozenset[str]) -> Residency:
    """Where an adapter stands on one endpoint.

    Args:
        adapter: Its name.
        account: Our requests there.
        load: The last scrape, `UNKNOWN` when it is stale.
        known: Names that are adapters; others in the account are base models.
    """
    running = load.adapters or _NONE
    if adapter in account.adapters or adapter in running:
        return Residency.RESIDENT
    slots = load.adapter_slots
    if slots is None:
        return Residency.UNKNOWN
    # The account holds a handful of names, and there may be thousands of known ones.
    in_use = known.intersection(account.adapters)
    if running:
        in_use |= running
    if len(in_use) >= slots:
        return Residency.FULL
    recent = _latest(account, known, slots)
    if adapter in recent:
        return Residency.IDLE
    return Residency.EVICTABLE if len(in_use.union(recent)) >= slots else Residency.ROOM


def _latest(account: Account, known: frozenset[str], slots: int) -> list[str]:
    """The adapters used last, the latest first, at most as many as there are slots."""
    latest: list[str] = []
    for name in reversed(account.recent):
        if name in known:
            latest.append(name)
            if len(latest) == slots:
                break
    return latest
