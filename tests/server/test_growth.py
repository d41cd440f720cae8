"""What requests leave behind: nothing that clients can make as large or as many as they like."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from bench import soak, soak_kinds

#: Bytes that a hostile request may leave on average while tables of fixed sizes fill: its place among
#: conversations, its blocks in the prefix index, a session, a tenant.
LEFT_BYTES = 3000

#: Requests before the first look and between looks.
FIRST, MORE = 20, 60


async def grown(step):
    """Bytes that one request leaves; `step` sends a number of them."""
    step(0, FIRST)
    gc.collect()
    tracemalloc.start()
    try:
        step(FIRST, MORE)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / MORE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", soak_kinds.KINDS)
async def test_hostile_requests_leave_no_memory(kind):
    """Whatever clients put into requests is forgotten with them."""
    core = soak.Core(soak.settings(engines=2, decisions=10))
    await core.picker.sync()
    left = await grown(lambda start, count: soak.attack(core, kind, count, start=start))
    assert left < LEFT_BYTES
    assert all(member.account.in_flight == 0 for member in core.store.pool.members)
    assert core.picker.budget.held_bytes == 0
