from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.decision import BodyEdit
from extproc.protocol import body_buffer
from extproc.protocol.body_buffer import (
    JOIN_BYTES,
    MIN_UPLOAD_BYTES_PER_S,
    BodyBuffer,
    BufferBudget,
    UploadMonitor,
)
from tests.support.seeded import examples

IDLE_S = 60.0
MIB = 1 << 20


class Arrivals:
    """Bodies on their way, looked at every five seconds.

    Attributes:
        ended: When each body was given up.
    """

    def __init__(self, *, streams: int = 1000, size: int = 512 * MIB) -> None:
        self.uploads: UploadMonitor[str] = UploadMonitor()
        self.now = 0.0
        self.sizes: Counter[str] = Counter()
        self.ended: dict[str, float] = {}
        self._most = (streams, size)

    def pass_time(self, seconds: float, **rates: float) -> None:
        """Let time pass while bodies arrive at so many bytes per second."""
        until = self.now + seconds
        while self.now < until:
            streams, size = self._most
            for name in self.uploads.find_stalled(
                self.sizes, self.now, idle_s=IDLE_S, max_streams=streams, max_bytes=size
            ):
                self.ended[name] = self.now
                del self.sizes[name]
            self.now += 5.0
            for name, rate in rates.items():
                if name in self.sizes:
                    self.sizes[name] = int(rate * self.now)


def test_a_stalled_body_is_ended():
    """Headers without a body, and a body that stops, end a minute later."""
    arrivals = Arrivals()
    arrivals.sizes = Counter(headers=0, stops=MIB)
    arrivals.sizes["headers"] = 0
    arrivals.pass_time(55.0)
    assert not arrivals.ended
    arrivals.pass_time(15.0)
    assert arrivals.ended == {"headers": 60.0, "stops": 60.0}


def test_a_very_slow_body_is_ended():
    """A body that moves all the time, and too slowly to be meant, ends as well."""
    arrivals = Arrivals()
    arrivals.sizes = Counter(trickles=1)
    arrivals.pass_time(120.0, trickles=0.2)
    assert arrivals.ended == {"trickles": 65.0}


def test_a_slow_body_may_arrive():
    """A slow network is no attack: 64 MiB that take an hour are not ended."""
    arrivals = Arrivals()
    arrivals.sizes = Counter(slow=1)
    arrivals.pass_time(64 * MIB / MIN_UPLOAD_BYTES_PER_S, slow=MIN_UPLOAD_BYTES_PER_S)
    assert not arrivals.ended


def test_upload_monitor_forgets_complete_bodies():
    """A body that came, and another one under the same name, have nothing in common."""
    arrivals = Arrivals()
    arrivals.sizes = Counter(body=1)
    arrivals.pass_time(40.0)
    arrivals.sizes.clear()
    arrivals.pass_time(5.0)
    arrivals.sizes = Counter(body=1)
    arrivals.pass_time(55.0)
    assert not arrivals.ended


@pytest.mark.parametrize("many", [{"streams": 9}, {"size": 9 * MIB}])
def test_stalled_bodies_end_sooner_under_load(many):
    """If arriving bodies take half of a budget, stalled ones end ten times sooner."""
    arrivals = Arrivals(**many)
    arrivals.sizes = Counter({f"stands {number}": MIB for number in range(5)})
    arrivals.pass_time(15.0)
    assert set(arrivals.ended.values()) == {10.0}


@given(
    hogs=st.lists(st.integers(0, 20 * MIB), max_size=40),
    size=st.integers(1, body_buffer.ALWAYS_TAKEN_BYTES),
)
@settings(deadline=None, max_examples=examples(100))
def test_small_bodies_are_accepted_while_the_budget_is_used(hogs: list[int], size: int):
    """However much others send: a small body gets in, and large ones leave room for another."""
    budget = BufferBudget(16 * MIB)
    piece = memoryview(bytes(MIB))
    for total in hogs:
        hog = BodyBuffer(budget, 1 << 40)
        left = total
        while left > 0 and hog.add(piece[: min(left, MIB)]) is None:
            left -= MIB
    assert budget.held_bytes < budget.limit_bytes
    assert BodyBuffer(budget, 1 << 40).add(bytes(size)) is None


def test_body_buffer_accepts_the_largest_allowed_body():
    """A body alone may take a quarter of the budget, which `max_body_bytes` cannot exceed."""
    budget = BufferBudget(4 * MIB)
    body = BodyBuffer(budget, MIB)
    assert body.add(bytes(MIB)) is None
    assert body.add(b"x").status == 413


@given(
    sizes=st.lists(st.integers(1, 700_000), min_size=1, max_size=6),
    span=st.tuples(st.integers(0, 1000), st.integers(0, 1000)),
    content=st.binary(max_size=64),
    seed=st.binary(min_size=1, max_size=8),
    kind=st.sampled_from([bytes, bytearray]),
)
@settings(deadline=None, max_examples=examples(40))
def test_a_body_is_the_same_however_its_chunks_are_stored(sizes, span, content, seed, kind):
    """Above and below `JOIN_BYTES` a body is all of its chunks, and an edit replaces its span."""
    budget = BufferBudget(512 * MIB)
    buffer = BodyBuffer(budget, 64 * MIB)
    expected = b""
    for number, size in enumerate(sizes):
        chunk = (seed + bytes([number])) * (size // (len(seed) + 1)) or seed
        assert buffer.add(kind(chunk)) is None
        expected += chunk
    body = buffer.joined()
    assert body == expected
    is_one = len(sizes) == 1
    assert (
        (type(body) is kind)
        if is_one
        else isinstance(body, bytearray) == (len(expected) > JOIN_BYTES)
    )
    edit = BodyEdit(min(span), max(span), content)
    edited = buffer.apply_edit(edit)
    assert edited == expected[: min(span)] + content + expected[max(span) :]
    assert budget.held_bytes == buffer.size_bytes == len(edited)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_small_chunks_take_little_more_than_their_bytes(size):
    """A client that sends each of two bytes in a frame of its own takes no other memory."""
    buffer = BodyBuffer(BufferBudget(512 * MIB), 64 * MIB)
    tracemalloc.start()
    try:
        for at in range(40_000):
            assert buffer.add(bytes([at & 0xFF]) * size) is None
        assert tracemalloc.get_traced_memory()[0] < 1.2 * buffer.size_bytes + 32_768
    finally:
        tracemalloc.stop()
    assert buffer.joined() == b"".join(bytes([at & 0xFF]) * size for at in range(40_000))


@pytest.mark.parametrize(
    ("num_chunks", "is_freed"), [(1, False), (7, False), (8, True), (20, True)]
)
def test_only_large_bodies_are_freed_apart(num_chunks, is_freed):
    """The body itself is freed, after its bytes were returned to the budget."""
    freed = []
    budget = BufferBudget(512 * MIB, free=lambda body: freed.append((body, budget.held_bytes)))
    buffer = BodyBuffer(budget, 64 * MIB)
    for _ in range(num_chunks):
        assert buffer.add(bytes(MIB)) is None
    body = buffer.joined()
    buffer.release()
    buffer.release()
    assert freed == [(body, 0)] * is_freed
    buffer.release()
    assert budget.held_bytes == 0
