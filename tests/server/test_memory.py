from __future__ import annotations

import asyncio
import sys
import tracemalloc
import types

import pytest

from extproc.server import grpc_workarounds
from tests.support import serving


async def test_memory_is_trimmed_once_after_a_peak(monkeypatch):
    """When nine in ten of a thousand left, and not again before the next crowd."""
    monkeypatch.setattr(grpc_workarounds, "_PAUSES_S", (0.0,))
    trims = []
    crowds = grpc_workarounds.IdleMemoryTrimmer(lambda: trims.append(1))
    for streams in (*range(1, 999), *range(998, -1, -1)):
        crowds.count(streams)
    await asyncio.sleep(0)
    assert not trims
    for streams in (*range(1, 2001), *range(1999, -1, -1), *range(1, 50), *range(49, -1, -1)):
        crowds.count(streams)
    async with asyncio.timeout(300.0):
        while not trims:
            await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert trims == [1]


def test_malloc_trim_is_available():
    """It is one call that must not raise, whatever the C library."""
    assert grpc_workarounds.trimmer()() is None


async def test_memory_is_trimmed_again_when_the_last_streams_end(monkeypatch):
    """Memory of gRPC's connections, and of the last tenth of the streams, is returned later."""
    monkeypatch.setattr(grpc_workarounds, "_PAUSES_S", (0.0, 0.001))
    trims = asyncio.Queue()
    crowds = grpc_workarounds.IdleMemoryTrimmer(lambda: trims.put_nowait(1))
    for streams in (2000, 200):
        crowds.count(streams)
    for _ in range(2):
        async with asyncio.timeout(300.0):
            await trims.get()


async def test_a_picker_trims_memory_after_a_peak(monkeypatch):
    """Open streams are counted with each look at the event loop, on either transport."""
    monkeypatch.setattr(grpc_workarounds, "_PAUSES_S", (0.0,))
    trims = asyncio.Queue()
    monkeypatch.setattr(grpc_workarounds, "trimmer", lambda: lambda: trims.put_nowait(1))
    async with serving.running(serving.settings("127.0.0.11:9")) as running, asyncio.timeout(300.0):
        await running.sync()
        counters = running.picker.counters
        lags = counters.event_loop_lag_s
        for streams in (1000, 100):
            counters.streams_open, looks = streams, sum(lags.counts)
            while sum(lags.counts) == looks:
                await asyncio.sleep(0.005)
        await trims.get()
        counters.streams_open = 0


def test_malloc_keeps_memory_between_requests(monkeypatch):
    """The numbers are glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""
    options = {}
    library = types.SimpleNamespace(
        mallopt=lambda option, value: not options.update({option: value})
    )
    monkeypatch.setattr(grpc_workarounds.ctypes, "CDLL", lambda _: library)
    assert grpc_workarounds.configure_malloc({"PATH": "/bin"})
    assert options == {-1: 4 << 20, -3: 1 << 20}


async def test_what_arrives_while_many_wait_is_allocated_apart():
    """Until the next turn of the event loop no block of Python's arenas is taken."""
    allocator = grpc_workarounds.build_apart_allocator()
    if allocator is None:
        pytest.skip("needs glibc, and Python with its arenas")
    count = grpc_workarounds.APART_STREAMS
    allocator.begin_turn(count - 1)
    before = sys.getallocatedblocks()
    held = [bytes((0, 0, number % 256)) for number in range(10_000)]
    assert sys.getallocatedblocks() - before > 9_000
    allocator.begin_turn(count)
    allocator.begin_turn(count)
    before = sys.getallocatedblocks()
    apart = [bytes((1, 0, number % 256)) for number in range(10_000)]
    assert sys.getallocatedblocks() - before < 1_000
    await asyncio.sleep(0)
    before = sys.getallocatedblocks()
    again = [bytes((2, 0, number % 256)) for number in range(10_000)]
    assert sys.getallocatedblocks() - before > 9_000
    assert held[:300] != apart[:300] != again[:300]


def test_a_hook_of_another_allocator_stands():
    """With `tracemalloc` or a debug build, nothing is allocated apart."""
    tracemalloc.start()
    try:
        assert grpc_workarounds.build_apart_allocator() is None
    finally:
        tracemalloc.stop()


def test_python_without_a_gil_keeps_its_allocator(monkeypatch):
    """Its garbage collector finds objects in the heaps of mimalloc only."""
    monkeypatch.setattr(grpc_workarounds.sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    assert grpc_workarounds.build_apart_allocator() is None


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_malloc_of_the_environment_stands(name):
    assert not grpc_workarounds.configure_malloc({name: "x"})


def test_another_c_library_is_left_alone(monkeypatch):
    """Musl has no mallopt."""
    monkeypatch.setattr(grpc_workarounds.ctypes, "CDLL", lambda _: object())
    assert not grpc_workarounds.configure_malloc({})
