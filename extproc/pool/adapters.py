"""Residency of a LoRA adapter on an endpoint, from our in-flight requests and its scrapes.

An engine's labels list adapters with running requests only: one that waits for a slot and one that
idles in a slot are both absent (docs/spec/engines.md#lora-info). So our open requests say which are
in use, and our latest ones which probably still sit in a slot, as many as there are slots.
"""

from __future__ import annotations

from itertools import islice

from extproc.endpoint import AdapterResidency, Load
from extproc.pool.inflight import AdapterSlotState, InflightLoad


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
