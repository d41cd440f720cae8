"""Whether an adapter is on an endpoint's device, from our own account and what was scraped.

An engine's labels list adapters with running requests only: one that waits for a slot and one that
idles in a slot are both absent (engines report 1.5). So our open requests say which are in use, and
our latest ones which probably still sit in a slot, as many as there are slots.
"""

from __future__ import annotations

from itertools import islice

from extproc.endpoint import Load, Residency
from extproc.pool.accounts import Account


def residency(adapter: str, account: Account, load: Load, known: frozenset[str]) -> Residency:
    """Where an adapter stands on one endpoint.

    Args:
        adapter: Its name.
        account: Our requests there.
        load: The last scrape, `UNKNOWN` when it is stale.
        known: Names that are adapters; others in the account are base models.
    """
    running = load.adapters or frozenset()
    if adapter in account.adapters or adapter in running:
        return Residency.RESIDENT
    slots = load.adapter_slots
    if slots is None:
        return Residency.UNKNOWN
    in_use = running | (known & account.adapters.keys())
    if len(in_use) >= slots:
        return Residency.FULL
    recent = set(islice((name for name in reversed(account.recent) if name in known), slots))
    if adapter in recent:
        return Residency.IDLE
    return Residency.EVICTABLE if len(in_use | recent) >= slots else Residency.ROOM
