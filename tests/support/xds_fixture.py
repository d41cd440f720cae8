"""The real fleet and dispatcher before engines that look alike, under virtual time."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Literal

import msgspec

from extproc.config import factory
from extproc.config.settings import Settings
from extproc.endpoint import Endpoint, EngineCounters, Load
from extproc.pool.inflight import Reservation
from extproc.request import InferenceRequest

#: What becomes of an engine's page: it is true; it stands as it was; it claims nothing to do; its
#: numbers are below zero, so that none is read; it claims more than there is; it cannot be read.
Page = Literal["true", "still", "low", "negative", "absurd", "fails"]

TRUE: Page = "true"

#: Seconds between two events of a scene.
STEP_S = 0.05

_KV_BLOCKS, _BLOCK_TOKENS = 20_000, 16


class SharedEngine:
    """One engine: requests of ours, which run, and those of others, which run or wait."""

    def __init__(self, address: str, *, running: int, waiting: int) -> None:
        self.address = address
        self.foreign = running, waiting
        self.open: dict[Reservation, int] = {}
        self.generated = 0.0

    def page(self, now: float) -> Load:
        """Metrics page of an engine, with true values."""
        running, waiting = self.foreign
        tokens = sum(self.open.values()) + 200 * running
        return Load(
            at=now,
            engine="vllm",
            waiting=float(waiting),
            running=float(running + len(self.open)),
            kv_usage=min(1.0, tokens / (_KV_BLOCKS * _BLOCK_TOKENS)),
            kv_blocks=_KV_BLOCKS,
            block_tokens=_BLOCK_TOKENS,
            counters=EngineCounters(generated_tokens=self.generated),
        )


class EqualEnginesScene:
    """Engines that are in the same state but for what we send them.

    Args:
        strategy: By which requests are routed.
        size: Engines (count).
        seed: Of all chance.
        running: Requests of others in each batch (count).
        waiting: Requests of others in each queue (count).
        pages: What becomes of pages by engine; the others are true.
        periods: Seconds between pages by engine; the others have 0.2.

    Attributes:
        picks: Requests sent by address.
    """

    def __init__(
        self,
        strategy: str,
        size: int,
        *,
        seed: int = 1,
        running: int = 0,
        waiting: int = 0,
        pages: dict[int, Page] | None = None,
        periods: dict[int, float] | None = None,
    ) -> None:
        settings = Settings()
        scheduling = msgspec.structs.replace(settings.scheduling, strategy=strategy)
        settings = msgspec.structs.replace(settings, scheduling=scheduling)
        self.parts = factory.build(settings)
        self.parts.rng.seed(seed)
        self.rng = random.Random(seed)
        self.now = 100.0
        addresses = [f"10.0.0.{n}:8000" for n in range(size)]
        self.parts.store.set_endpoints([Endpoint(address) for address in addresses], self.now)
        self.engines = [
            SharedEngine(address, running=running, waiting=waiting) for address in addresses
        ]
        self._engine_at = {engine.address: engine for engine in self.engines}
        self._pages: dict[int, Page] = {}
        self._planned = pages or {}
        self._periods = periods or {}
        self.due = [self.now] * size
        self._last: list[Load | None] = [None] * size
        self._sent = 0
        self._ending: deque[tuple[float, SharedEngine, Reservation]] = deque()
        self.picks: Counter[str] = Counter()

    def turn_bad(self) -> None:
        """From now on pages are what they are to become."""
        self._pages = self._planned

    def step(self) -> None:
        """Let a moment pass: engines compute, requests end, pages are read."""
        self.now += STEP_S
        for engine in self.engines:
            engine.generated += STEP_S * 20.0 * (engine.foreign[0] + len(engine.open))
        while self._ending and self._ending[0][0] <= self.now:
            _, engine, reservation = self._ending.popleft()
            self._end(engine, reservation)
        for at, due in enumerate(self.due):
            if due <= self.now:
                self._scrape(at)
                self.due[at] = self.now + self._periods.get(at, 0.2)

    def send(self, tokens: int, *, for_s: float | None = None) -> str:
        """Send a new prompt; returns where it went.

        Args:
            tokens: Of the prompt.
            for_s: Seconds until it is answered; None to hold it open.
        """
        self._sent += 1
        director = self.parts.director
        request = InferenceRequest(
            api="completions", model="m", prompt_tokens=tokens, session=f"talk {self._sent}"
        )
        chain = [1_000_000 * self._sent + depth for depth in range(1, 1 + tokens // 64)]
        decision = director.scheduler.schedule(request, self.now, chain=chain[:8], headers={})
        reservation = director.reserve(decision, self.now)  # type: ignore[arg-type]
        engine = self._engine_at[reservation.endpoint.address]
        engine.open[reservation] = tokens
        self.picks[engine.address] += 1
        if for_s is not None:
            self._ending.append((self.now + for_s, engine, reservation))
        return engine.address

    def serve(self, count: int, tokens: int) -> None:
        """Send requests one after another, and see them answered."""
        for _ in range(count):
            self.send(tokens, for_s=0.3)
            self.step()
        while self._ending:
            self.step()
        self.picks.clear()

    def hold(self, count: int, tokens: int, *, steps: int = 1) -> list[int]:
        """Send requests and hold them open; returns how many each engine has."""
        for _ in range(count):
            self.send(tokens)
            for _ in range(steps):
                self.step()
        return [self.picks[engine.address] for engine in self.engines]

    def _end(self, engine: SharedEngine, ticket: Reservation) -> None:
        del engine.open[ticket]
        director = self.parts.director
        director.on_response_headers(ticket, "200", self.now)
        director.release(ticket, self.now)

    def _scrape(self, at: int) -> None:
        store, engine = self.parts.store, self.engines[at]
        member = store.pool.find(engine.address)
        assert member is not None
        mark = store.begin_scrape(member.endpoint)
        page = self._page(at, engine)
        if page is None:
            store.scrape_failed(mark, "status 500", self.now)
        else:
            self._last[at] = page
            store.observe(mark, page, self.now)

    def _page(self, at: int, engine: SharedEngine) -> Load | None:
        true, last = engine.page(self.now), self._last[at]
        change = msgspec.structs.replace
        match self._pages.get(at, TRUE):
            case "still":
                return change(true if last is None else last, at=self.now)
            case "low":
                return change(true, waiting=0.0, running=0.0, kv_usage=0.0)
            case "negative":
                return change(true, waiting=None, running=None, kv_usage=None)
            case "absurd":
                return change(true, waiting=1e6, running=1e6, kv_usage=1.0)
            case "fails":
                return None
            case _:
                return true
