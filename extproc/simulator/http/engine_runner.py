"""The engine loop: paces the pure core by the real clock and feeds the open generations."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from extproc.simulator import core, engine_request, faults, stats

#: How far the loop may fall behind its schedule and still catch up; beyond, time is lost. Timers
#: of the event loop are coarse (1 ms in uvloop), so single steps are late and must not add up.
_LAG_S = 0.1


class Generation:
    """Progress of one request, for the HTTP handler that waits for its tokens.

    Attributes:
        tokens: Output tokens it will have.
        ready: Output tokens that are there.
        cached_tokens: Prompt tokens found in the prefix cache; valid once `ready` is not 0.
    """

    __slots__ = ("_waiter", "cached_tokens", "id", "ready", "stream", "tokens")

    def __init__(self, job_id: str, tokens: int, *, stream: bool) -> None:
        self.id = job_id
        self.tokens = tokens
        self.stream = stream
        self.ready = 0
        self.cached_tokens = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        """True once all tokens are generated."""
        return self.ready >= self.tokens

    async def past(self, count: int) -> int:
        """Wait for more than `count` tokens; returns the number there."""
        while self.ready <= count and not self.done:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.ready

    async def end(self) -> None:
        """Wait for all tokens."""
        await self.past(self.tokens - 1)

    def advance(self, ready: int) -> None:
        """Set the number of tokens generated so far."""
        self.ready = ready
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Runner:
    """Paces one core. Its profile is already scaled by the speed: all its times are wall seconds.

    Args:
        trouble: Armed faults; `slow` stretches steps.
        coalesce_s: Tokens that come within this time are delivered together, as a busy vLLM does;
            0 delivers every step.
    """

    def __init__(
        self,
        engine: core.SimulatedEngine,
        counts: stats.Stats,
        trouble: faults.Faults,
        *,
        coalesce_s: float,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_step = on_step
        self.engine = engine
        self.stats = counts
        self._trouble = trouble
        self._coalesce_s = coalesce_s
        self._open: dict[str, Generation] = {}
        self._streams: dict[str, Generation] = {}
        self._ids = itertools.count()
        self._wake = asyncio.Event()
        self._end = 0.0

    def next_id(self) -> str:
        """Next request id."""
        return str(next(self._ids))

    def submit(
        self, new: engine_request.EngineRequest, *, stream: bool
    ) -> Generation | engine_request.EngineRejection:
        """Submit a request to the engine."""
        now, due = time.monotonic(), self.engine.due
        if due is not None and due < now:
            now = due  # the loop is late: on its schedule the job came before the next step
        refusal = self.engine.submit(new, now)
        if refusal is not None:
            if refusal is engine_request.EngineRejection.BUSY:
                self.stats.rejected()
            return refusal
        generation = Generation(new.id, new.output_tokens, stream=stream)
        self._open[new.id] = generation
        if stream:
            self._streams[new.id] = generation
        self._wake.set()
        return generation

    def close(self, generation: Generation, reason: str) -> None:
        """Release a generation; an unfinished request is aborted.

        Args:
            reason: The `finished_reason` to count if it is done.
        """
        self._open.pop(generation.id, None)
        self._streams.pop(generation.id, None)
        if generation.done:
            self.stats.ended(reason)
            return
        self.engine.cancel(generation.id, time.monotonic())
        self.stats.ended("abort")

    async def run(self) -> None:
        """Step for ever."""
        while True:
            if not await self.step():
                self._wake.clear()
                await self._wake.wait()
                self._end = time.monotonic()

    async def step(self) -> bool:
        """One plan of the core at its pace; returns whether there was anything to do."""
        start = max(self._end, time.monotonic() - _LAG_S)
        due = self.engine.begin(start, horizon=start + self._coalesce_s)
        if due is None:
            return False
        slow = self._trouble.slowdown(start)
        delay = start + (due - start) * slow - time.monotonic()
        # Below half a millisecond the timer would oversleep; the schedule makes up for it.
        await asyncio.sleep(delay if delay > 0.0005 else 0)
        due = self.engine.due or due  # an arrival may have cut it short
        self._end = start + (due - start) * slow
        self._deliver(self.engine.commit(self._end))
        self._on_step()
        return True

    def _deliver(self, result: engine_request.StepResult) -> None:
        """Deliver the result of a plan to the generations and the counters."""
        self.stats.observe(result, time.time())
        for started in result.started:
            generation = self._open.get(started.id)
            if generation is not None:
                generation.cached_tokens = started.cached_tokens
        for done in result.finished:
            generation = self._open.get(done.job.id)
            if generation is not None:
                generation.advance(generation.tokens)
        generated = self.engine.generated
        for job_id, generation in self._streams.items():
            if not generation.done:
                ready = generated(job_id)
                if ready > generation.ready:
                    generation.advance(ready)
