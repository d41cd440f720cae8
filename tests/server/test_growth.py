"""Memory that requests leave: bounded in number and size, whatever clients send."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import soak, soak_kinds, soak_messages
from extproc.parsing import envelope
from extproc.protocol.headers import CONTROL_HEADERS
from extproc.request import PATH_HEADERS, FlowHeaders
from tests.support.seeded import examples

#: Bytes that a hostile request may leave on average while tables of fixed sizes fill: its place among
#: conversations, its blocks in the prefix index, a session, a tenant, the series of its model.
LEFT_BYTES = 3500

#: Requests before the first look and between looks.
FIRST, MORE = 64, 64


async def grown(step, settle):
    """Bytes that one request leaves; `step` sends a number of them.

    `settle` counts those that wait for others before each look: they are held until then.
    """
    step(0, FIRST)
    settle()
    gc.collect()
    tracemalloc.start()
    try:
        step(FIRST, MORE)
        settle()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / MORE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", soak_kinds.KINDS)
async def test_hostile_requests_leave_no_memory(kind):
    """Whatever clients put into requests is forgotten with them."""
    core = soak.Core(soak.settings(engines=2, decisions=10))
    await core.picker.sync()
    left = await grown(
        lambda start, count: soak.attack(core, kind, count, start=start),
        core.picker.counters.settle,
    )
    assert left < LEFT_BYTES
    assert all(member.account.in_flight == 0 for member in core.store.pool.members)
    assert core.picker.budget.held_bytes == 0


#: Headers that something reads.
_NAMES = (
    *(":method", ":authority", "content-type", "content-length", "x-request-id", "traceparent"),
    *CONTROL_HEADERS,
    *envelope.SESSION_HEADERS,
    *PATH_HEADERS,
    *FlowHeaders().timeout_headers,
)
_VALUES = st.one_of(
    st.binary(max_size=30),
    st.integers(-(10**30), 10**30).map(lambda number: str(number).encode()),
    st.sampled_from(
        [b"1e308", b"NaN", b"-0", b"\xff\xfe", b"\0", b"h" * 20_000, b"[" * 500, b"1,2", b"POST"]
    ),
)


@settings(max_examples=examples(100), deadline=None)
@given(headers=st.dictionaries(st.sampled_from(sorted(_NAMES)), _VALUES, max_size=8))
def test_any_headers_are_survived(headers):
    """Whatever clients write into headers, nothing raises and nothing stays open."""

    async def scenario():
        core = soak.Core(soak.settings(engines=2, decisions=10))
        await core.picker.sync()
        path = {":method": "POST", ":path": "/v1/chat/completions"}
        chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        stream = core.open(
            soak_messages.headers({**path, **headers}),
            soak_messages.body(json.dumps(chat).encode()),
        )
        stream.finish()
        assert not core.picker.counters.exceptions
        assert all(member.account.in_flight == 0 for member in core.store.pool.members)
        assert core.picker.budget.held_bytes == 0

    asyncio.run(scenario())
