"""Delays of the event loop, with clocks that a test sets."""

from __future__ import annotations

import asyncio

from extproc.server import health
from extproc.telemetry.counters import ProcessCounters
from tests.support.metrics_pages import build_exposition


class StallScene:
    def __init__(self):
        self.counters = ProcessCounters()
        self.now = self.computed = 0.0
        self.subject = health.StallMeter(
            self.counters, clock=lambda: self.now, thread_time=lambda: self.computed
        )

    def pass_(self, seconds, *, computing=0.0):
        self.now += seconds
        self.computed += computing
        self.subject.measure()

    def above(self, bound, *, cpu=False):
        histogram = self.counters.event_loop_lag_cpu_s if cpu else self.counters.event_loop_lag_s
        return sum(histogram.counts[histogram.bounds.index(bound) + 1 :])


async def test_lateness_is_recorded():
    """A timer that is due and not called was held up; one that is in time was not."""
    scene = StallScene()
    scene.counters.streams_open = 1
    scene.subject.start()
    for _ in range(5):
        scene.pass_(health.BUSY_S)
    assert scene.above(0.001) == 0
    scene.pass_(health.BUSY_S + 0.06, computing=0.06)
    assert (scene.above(0.05), scene.above(0.1)) == (1, 0)
    assert scene.above(0.05, cpu=True) == 1
    scene.subject.stop()


async def test_time_of_other_processes_is_separate():
    """Lateness without computing is a machine with no core to spare, or a call that blocks."""
    scene = StallScene()
    scene.subject.start()
    scene.pass_(health.QUIET_S + 2.0, computing=0.004)
    assert (scene.above(1), scene.above(0.005, cpu=True)) == (1, 0)
    # What was computed in time before is no hold.
    scene.pass_(health.QUIET_S + 0.002, computing=0.09)
    assert scene.above(0.005, cpu=True) == 0
    scene.subject.stop()


async def test_a_stream_that_opens_shortens_the_interval():
    """No timer runs while no stream is open; from the first one on holds are seen within 20 ms."""
    scene = StallScene()
    loop = asyncio.get_running_loop()
    began = loop.time()
    scene.subject.start()
    assert scene.subject._timer.when() - began > health.BUSY_S
    scene.counters.streams_open = 1
    scene.subject.wake()
    timer = scene.subject._timer
    assert timer.when() - loop.time() <= health.BUSY_S
    scene.subject.wake()
    assert scene.subject._timer is timer
    scene.subject.stop()
    scene.subject.wake()
    assert scene.subject._timer is None


async def test_a_stall_before_a_stream_opens_is_recorded():
    """The first stream after quiet may be seen before the timer that was due meanwhile."""
    scene = StallScene()
    scene.subject.start()
    scene.counters.streams_open = 1
    scene.now += 1.5 * health.QUIET_S + 0.3
    scene.subject.wake()
    assert scene.above(0.25) == 1
    scene.subject.stop()


async def test_a_blocked_loop_shows_on_the_page():
    """The real loop, held for a while by a callback, and the page that says so."""
    counters = ProcessCounters()
    counters.streams_open = 1
    subject = health.StallMeter(counters)
    subject.start()
    looks = 0

    def hold():
        clock = health.time.monotonic
        until = clock() + 0.12
        while clock() < until:
            pass

    asyncio.get_running_loop().call_soon(hold)
    async with asyncio.timeout(300):
        while not looks:
            await asyncio.sleep(0.01)
            looks = sum(
                counters.event_loop_lag_s.counts[counters.event_loop_lag_s.bounds.index(0.05) + 1 :]
            )
    subject.stop()
    page = build_exposition(counters).render().decode()
    assert 'extproc_event_loop_lag_seconds_bucket{le="0.05"}' in page
    assert "extproc_event_loop_lag_cpu_seconds_sum" in page


async def test_a_measurement_that_raises_is_not_the_last():
    """The supervisor hears of it, and the timer is set again."""
    times = iter([0.0])
    subject = health.StallMeter(
        ProcessCounters(), clock=lambda: 0.0, thread_time=lambda: next(times)
    )
    failed: asyncio.Queue[Exception] = asyncio.Queue()
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failed.put_nowait(context["exception"])
    )
    subject.start()
    async with asyncio.timeout(60):
        for _ in range(2):
            await failed.get()
    subject.stop()
