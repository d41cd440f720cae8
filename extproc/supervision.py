"""Supervision: a loop that raises is logged, counted and restarted after a pause.

What ends the process all the same is short, and `tests/test_supervision.py` holds it:

- `ConfigError` before the loops run: a configuration that is wrong, a port that is taken.
- Signals, which cancel the loops; `SystemExit` and `KeyboardInterrupt` from anywhere.

`MemoryError` is survived: a container that is out of memory is ended by the kernel without any
exception, so what raises it is a single allocation that is too large, as a hostile page causes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, get_args

import msgspec

#: What starts a loop that runs until it is cancelled.
Loop = Callable[[], Awaitable[None]]

#: Loops by their names on the metrics page. `callback` is what the event loop calls by itself.
LoopName = Literal[
    "autoscaling",
    "callback",
    "discovery",
    "drain",
    "election",
    "history",
    "keda",
    "kubernetes",
    "kv_events",
    "log",
    "peer_sync",
    "pools",
    "readiness",
    "recording",
    "reload",
    "scrape",
    "uploads",
    "xds",
]
LOOPS: Final[tuple[LoopName, ...]] = get_args(LoopName)

#: Seconds until a loop goes on after its first failure, doubled with each further one.
FIRST_PAUSE_S: Final = 0.5

#: Longest pause in seconds: it bounds how late a loop notices that the cause is gone.
LONGEST_PAUSE_S: Final = 10.0

#: Seconds after which a loop that does not report its steps counts as working again.
CALM_S: Final = 60.0

#: Seconds between two log lines about the same failure at the same place.
REPEAT_S: Final = 600.0

#: Places of failures that are remembered (count); there are not nearly as many in the code.
_MOST_PLACES = 512

_ROOT = f"{Path(__file__).parent}{os.sep}"

_log = logging.getLogger("extproc.supervision")

_request_log = logging.getLogger("extproc.server")

#: Seconds between two log entries about one place: a client may run into a bug with every request.
_REQUEST_REPEAT_S = 60.0

#: Places counted apart (count). The code has few of them, but plugins may raise any type.
_MOST_REQUEST_PLACES = 100

#: Key of all further places.
_OTHER_PLACE = ("other", "other")


class _Report(msgspec.Struct):
    """When a failure was last logged (monotonic seconds), and how often it came since."""

    at: float
    repeats: int = 0


class Supervisor:
    """Runs loops again after they fail.

    Args:
        rng: Random jitter, so that loops that fail together do not retry together.

    Attributes:
        failures: Exceptions by loop, all loops at 0 from the start.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._rng = rng or random.Random()
        self._sleep = sleep
        self.failures: Counter[LoopName] = Counter(dict.fromkeys(LOOPS, 0))
        #: Failures of loops in a row (count), since they last worked.
        self._failing: dict[tuple[LoopName, str], int] = {}
        self._reports: dict[tuple[LoopName, str], _Report] = {}
        self._logged: set[LoopName] = set()

    @property
    def degraded(self) -> Sequence[LoopName]:
        """Names of the loops that failed and have not worked since, in alphabetical order."""
        return sorted({loop for loop, _ in self._failing})

    async def keep(self, loop: LoopName, run: Loop, *, instance: str = "") -> None:
        """Run a loop until it returns or is cancelled, and again whenever it raises.

        Args:
            run: Starts it; the state it changes must be consistent at every await.
            instance: Name of the endpoint, pool or other part that it serves, for the log; empty
                where there is a single one.
        """
        try:
            while True:
                try:
                    await self._run_once(loop, run, instance)
                except asyncio.CancelledError as error:
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    # A library cancelled itself; the loop would end without a word.
                    pause_s = self.record_failure(loop, error, instance=instance)
                except Exception as error:  # noqa: BLE001 - this is the place for all of them
                    pause_s = self.record_failure(loop, error, instance=instance)
                else:
                    return
                await self._sleep(pause_s)
        finally:
            self.forget(loop, instance)

    async def attempt(self, loop: LoopName, work: Awaitable[object], *, instance: str = "") -> bool:
        """Await something once; returns False if it raised."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - counted and logged
            self.record_error(loop, error, instance=instance)
            return False
        return True

    def call(self, loop: LoopName, call: Callable[[], object], *, instance: str = "") -> bool:
        """Call something; returns False if it raised."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - counted and logged
            self.record_error(loop, error, instance=instance)
            return False
        return True

    def record_failure(self, loop: LoopName, error: BaseException, *, instance: str = "") -> float:
        """Record a failure of a loop; returns seconds to wait before it goes on."""
        times = self._failing.get((loop, instance), 0)
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(times, 16))
        self._failing[loop, instance] = times + 1
        self.record_error(loop, error, instance=instance)
        return pause_s * self._rng.uniform(0.5, 1.0)

    def record_error(self, loop: LoopName, error: BaseException, *, instance: str = "") -> None:
        """Count a failure that stops nothing, and log it unless it was logged lately."""
        self.failures[loop] += 1
        place, now = place_of(error), self._clock()
        report = self._reports.get((loop, place))
        if report is not None and now - report.at < REPEAT_S:
            report.repeats += 1
            return
        if report is None and len(self._reports) >= _MOST_PLACES:
            del self._reports[next(iter(self._reports))]
        self._reports[loop, place] = _Report(now)
        if (loop, instance) in self._failing:
            self._logged.add(loop)
        suffix = f" ({instance})" if instance else ""
        repeats_text = (
            f", {report.repeats} times since it was last logged" if report is not None else ""
        )
        _log.error("loop %s%s failed and goes on: %s%s", loop, suffix, place, repeats_text)

    def record_success(self, loop: LoopName, instance: str = "") -> None:
        """Record a successful step of a loop. Cheap while nothing fails."""
        if not self._failing or self._failing.pop((loop, instance), None) is None:
            return
        if loop in self._logged and loop not in self.degraded:
            self._logged.remove(loop)
            _log.info("loop %s works again", loop)

    def forget(self, loop: LoopName, instance: str) -> None:
        """Drop the state of a removed loop."""
        self._failing.pop((loop, instance), None)

    def handle(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle what callbacks, timers and lost tasks raise; an exception handler of asyncio."""
        error = context.get("exception")
        if isinstance(error, Exception):
            self.record_error("callback", error)
        else:
            _log.warning("event loop: %s", context.get("message", "an unnamed problem"))

    async def _run_once(self, loop: LoopName, run: Loop, instance: str) -> None:
        """Run once; a run that is calm for long enough counts as working again."""
        timer = None
        if (loop, instance) in self._failing:
            timer = asyncio.get_running_loop().call_later(
                CALM_S, self.record_success, loop, instance
            )
        try:
            await run()
        finally:
            if timer is not None:
                timer.cancel()


def seconds_to_tick(now: float, interval_s: float) -> float:
    """Seconds from now to a multiple of an interval: one interval, or half a one more or less at first.

    Loops that sleep so share wake-ups of an idle process, which cost more than what most of them do.

    Args:
        now: Seconds of the clock of the event loop.
    """
    return interval_s * (round(now / interval_s) + 1) - now


async def sleep_to_tick(interval_s: float) -> None:
    """Sleep until a multiple of an interval, as `seconds_to_tick` says."""
    await asyncio.sleep(seconds_to_tick(asyncio.get_running_loop().time(), interval_s))


async def run_forever() -> None:
    """Wait until cancelled; a group of tasks would end, with what runs it, without any task."""
    await asyncio.Event().wait()


class ExceptionLog:
    """Counts and logs unexpected exceptions without messages, which may quote requests.

    Each place is logged once a minute.

    Args:
        counts: Exceptions by type and place; updated here.
    """

    def __init__(self, counts: Counter[tuple[str, str]], clock: Callable[[], float]) -> None:
        self._counts = counts
        self._clock = clock
        self._logged: dict[tuple[str, str], float] = {}

    def record(self, error: BaseException) -> None:
        """Count an exception, and log its type and stack."""
        key = origin_of(error)
        if key not in self._counts and len(self._counts) >= _MOST_REQUEST_PLACES:
            key = _OTHER_PLACE
        self._counts[key] += 1
        now = self._clock()
        if now - self._logged.get(key, -_REQUEST_REPEAT_S) < _REQUEST_REPEAT_S:
            return
        self._logged[key] = now
        frames = traceback.extract_tb(error.__traceback__)
        stack = "\n".join(f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
        record = _request_log.makeRecord(
            _request_log.name,
            logging.ERROR,
            fn="",
            lno=0,
            msg="a request ran into a bug: %s",
            args=(key[0],),
            exc_info=None,
            sinfo=stack,
        )
        _request_log.handle(record)


def place_of(error: BaseException) -> str:
    """Type, file and line of an exception; never its message, which may quote a request."""
    return "{} at {}".format(*origin_of(error))


def origin_of(error: BaseException) -> tuple[str, str]:
    """Type of an exception, and its file and line; of a group those of its first exception.

    The line is the innermost one of this package, or of whatever there is if none is.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    innermost, own = "", ""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(_ROOT) and file != __file__:
            own = f"extproc/{file.removeprefix(_ROOT)}:{trace.tb_lineno}"
        innermost = f"{Path(file).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return type(error).__name__, own or innermost or "an unknown place"
