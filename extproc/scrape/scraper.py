"""Scrape loops: one task per endpoint, and one that follows the endpoint set.

A shell. Endpoints share nothing but the event loop, so one that hangs delays no other.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from extproc.endpoint import Endpoint, Load, find_metrics_ports
from extproc.errors import TOO_MANY_FILES
from extproc.pool.observed_page import ScrapeToken
from extproc.pool.snapshot import EndpointSnapshot, Pool
from extproc.pool.store import PoolStore
from extproc.scrape import client, engines, metrics_page, model_list, schedule
from extproc.supervision import Supervisor, sleep_to_tick

#: Longest page that is read on the event loop (bytes): five times a vLLM page, and some 30 ms at
#: worst. A thread reads longer ones, which the interpreter preempts every few milliseconds.
INLINE_BYTES: Final = 256 * 1024

#: Pages in a row without running requests for which the ranks of an engine are kept: 6 s of scrapes
#: at the shortest interval. Requests on ranks that go leave their accounts.
MAX_RANKLESS_PAGES: Final = 30

#: How outcomes of a scrape begin whose page made our own code raise.
BUG = "bug: "

#: Outcomes of a scrape after which no other page is fetched: the list of models would fail as well.
UNREACHABLE = frozenset({"timeout", "refused", "unreachable", TOO_MANY_FILES})

#: Outcome of a scrape whose connection was refused.
REFUSED = "refused"


class ScraperSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the scrape loops.

    Attributes:
        port: Port of the pages, as `find_metrics_ports` has it; None for those of the endpoints.
        timeout_s: Time limit of a scrape, from connect to last byte (seconds). A real vLLM answers
            in 44 ms at worst under load; ten times that and more is an engine in trouble.
        cap_bytes: Longest page taken. A vLLM page is 50 kB and grows with every adapter set seen.
        follow_s: Seconds between comparisons of the endpoint set with the loops, and between looks
            for requests at idle endpoints.
        extra: Metrics for `Load.extra`; None for none.
        ranks: Whether data-parallel ranks on an engine's page become endpoints.
    """

    path: str = "/metrics"
    port: int | None = None
    timeout_s: float = 1.0
    cap_bytes: int = 4 * 1024 * 1024
    follow_s: float = 0.2
    schedule: schedule.ScrapeSchedule = schedule.ScrapeSchedule()
    models: model_list.ModelListSettings = model_list.NEVER
    extra: metrics_page.ExtraMetrics | None = None
    ranks: bool = True


class ScrapeResult(msgspec.Struct, frozen=True, gc=False):
    """Result of one scrape, for telemetry.

    Attributes:
        outcome: `ok`, or why not: a `client.FetchFailed` reason, `unreadable`, or `bug: <type>`.
        engine: The engine recognised; empty for an unknown one or a failure.
    """

    address: str
    outcome: str
    seconds: float
    engine: str = ""
    listing: bool = False


class EndpointScraper:
    """Scrapes one engine, in one incarnation.

    Args:
        members: The endpoint, or one of each of its data-parallel ranks, in order; replaced when
            there are others.
        port: Of its metrics page (TCP).

    Attributes:
        is_resting: Whether the next scrape was set while the process was at rest.
    """

    def __init__(self, scraper: Scraper, members: Sequence[EndpointSnapshot], port: int) -> None:
        self.members = members
        endpoint = members[0].endpoint
        self.address = endpoint.host_port
        self.busy = True
        self.failures = 0
        self.is_refused = False
        self._num_rankless = 0
        self.task: asyncio.Task[None] | None = None
        self._scraper = scraper
        self._opened = -1
        self.is_resting = False
        self._began = -math.inf
        self._sleep: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.target = client.target(endpoint.ip, port, path=scraper.settings.path)
        self._reader = metrics_page.MetricsPageReader()
        self._model_list = model_list.ModelListPoller(scraper, endpoint)

    async def run(self) -> None:
        """Scrapes until cancelled; the first scrape is spread over one fast interval."""
        scraper = self._scraper
        wait_s = scraper.rng.uniform(0.0, scraper.settings.schedule.fast_s)
        while True:
            self._sleep = asyncio.get_running_loop().create_future()
            self._set_timer(wait_s)
            try:
                await self._sleep
            finally:
                self._cancel_timer()
            self._began = scraper.clock()
            await self.step()
            wait_s = scraper.wait_s(self) - (scraper.clock() - self._began)

    def hasten(self, *, is_rest_over: bool) -> None:
        """Brings the next scrape forward where the endpoint was idle and requests went there since.

        Its page would show no load for up to `slow_s` otherwise, and whatever scores waiting
        requests and KV usage would send it every request until then. So does the end of a rest,
        for every endpoint; those that are late by then are spread over a fast interval.

        Args:
            is_rest_over: Whether some endpoint of the process had a request lately.
        """
        if self.busy or self.failures or self._timer is None:
            return
        has_requests = self._num_opened != self._opened
        if not has_requests and not (is_rest_over and self.is_resting):
            return
        scraper = self._scraper
        now, soonest_s = scraper.clock(), 0.0
        if has_requests:
            self.busy = True
            scraper.endpoint_counts.change_busy(1, now)
        else:
            soonest_s = scraper.rng.uniform(0.0, scraper.settings.schedule.fast_s)
        self._set_timer(max(soonest_s, scraper.wait_s(self) - (now - self._began)))

    def _set_timer(self, wait_s: float) -> None:
        """Lets the current sleep end after this many seconds, on a tick."""
        self._cancel_timer()
        if self._sleep is not None:
            wait_s = schedule.align_to_tick(
                self._scraper.clock(),
                max(0.0, wait_s),
                settings=self._scraper.settings.schedule,
                resting=self.is_resting,
            )
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(wait_s, _end_sleep, self._sleep)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def step(self) -> None:
        """Scrapes once and passes the result to the pool store."""
        scraper = self._scraper
        self._note_traffic()
        began = scraper.clock()
        tokens = [scraper.store.begin_scrape(member.endpoint) for member in self.members]
        fetched = await scraper.client.get(self.target)
        now = scraper.clock()
        # An engine computes its page at some time between the two.
        outcome, engine = await self._observe(tokens, fetched, now, at=(began + now) / 2)
        if outcome == "ok":
            self._set_failures(0)
        else:
            # A lack of files is a fault of this machine: longer waits would spare no engine.
            self._set_failures(self.failures + (outcome != TOO_MANY_FILES))
            for token in tokens:
                is_own_port = self.target.port == token.endpoint.port
                scraper.store.scrape_failed(token, outcome, now, is_own_port=is_own_port)
        self.is_refused = outcome == REFUSED
        scraper.on_result(ScrapeResult(self.address, outcome, scraper.clock() - began, engine))
        if outcome not in UNREACHABLE:
            began = scraper.clock()
            listed = await self._model_list.step()
            if listed:
                seconds = scraper.clock() - began
                scraper.on_result(ScrapeResult(self.address, listed, seconds, listing=True))
        if not outcome.startswith(BUG):
            scraper.supervisor.record_success("scrape", self.address)

    def _set_failures(self, failures: int) -> None:
        self._scraper.endpoint_counts.change_failing(bool(failures) - bool(self.failures))
        self.failures = failures

    def close(self) -> None:
        """Ends the loop, and gives its counts and connections back."""
        scraper = self._scraper
        scraper.endpoint_counts.change_busy(-int(self.busy), scraper.clock())
        scraper.endpoint_counts.change_all(-1, scraper.clock())
        self._set_failures(0)
        if self.task is not None:
            self.task.cancel()
        for target in self.targets:
            scraper.client.forget(target)

    async def _observe(
        self,
        tokens: Sequence[ScrapeToken],
        fetched: bytes | client.FetchFailed,
        now: float,
        *,
        at: float,
    ) -> tuple[str, str]:
        """Reads a page and passes its load on; returns the outcome and the engine type.

        What a page makes raise counts against its endpoint: its load ages, as if it did not answer.
        """
        scraper, endpoint, reader = self._scraper, tokens[0].endpoint, self._reader
        settings = scraper.settings
        try:
            if isinstance(fetched, bytes) and len(fetched) > INLINE_BYTES:
                read = await asyncio.to_thread(_read, reader, fetched, endpoint, at, settings)
            else:
                read = _read(reader, fetched, endpoint, at, settings)
            if not isinstance(read, str):
                read = self._keep_ranks(tokens, read)
                tokens = self._follow_ranks(tokens, read.numbers, now)
                scraper.store.observe_ranks(tokens, read.loads, now)
                return "ok", read.loads[0].engine
        except Exception as bug:  # noqa: BLE001 - one page must not end every other loop
            scraper.supervisor.record_failure("scrape", bug, instance=self.address)
            return f"{BUG}{type(bug).__name__}", ""
        return read, ""

    def _keep_ranks(
        self, tokens: Sequence[ScrapeToken], read: Load | metrics_page.RankedLoad
    ) -> metrics_page.RankedLoad:
        """Loads by rank; unknown ones of the known ranks for some pages without running requests."""
        if isinstance(read, metrics_page.RankedLoad) or read.running is not None:
            self._num_rankless = 0
            if isinstance(read, Load):
                return metrics_page.RankedLoad((), (read,))
            return read
        self._num_rankless += 1
        ranks = [rank for token in tokens if (rank := token.endpoint.rank) is not None]
        if not ranks or self._num_rankless > MAX_RANKLESS_PAGES:
            return metrics_page.RankedLoad((), (read,))
        numbers = tuple([rank.number for rank in ranks])
        return metrics_page.RankedLoad(
            numbers, (Load(at=read.at, engine=read.engine),) * len(ranks)
        )

    def _follow_ranks(
        self, tokens: Sequence[ScrapeToken], numbers: tuple[int, ...], now: float
    ) -> Sequence[ScrapeToken]:
        """Makes endpoints of the ranks on a page; returns the tokens of this scrape for them."""
        ranks = [endpoint.rank for endpoint in (token.endpoint for token in tokens)]
        if numbers == tuple(rank.number for rank in ranks if rank is not None):
            return tokens
        store = self._scraper.store
        store.set_ranks(tokens[0].endpoint, numbers, now)
        members = store.pool.ranks_at(self.address)
        if len(members) != max(1, len(numbers)):
            return ()  # the engine left meanwhile
        self.members = members
        self._opened = self._num_opened
        known = {token.endpoint.address: token for token in tokens}
        return [
            known.get(member.endpoint.address) or store.begin_scrape(member.endpoint)
            for member in members
        ]

    def is_target(self, endpoint: Endpoint, port: int) -> bool:
        """Returns True if the loop may go on: same incarnation of the engine, labels and port."""
        current = self.members[0].endpoint
        is_same = current.engine == endpoint.engine and current.labels == endpoint.labels
        return is_same and self.target.port == port

    @property
    def targets(self) -> Iterator[client.ScrapeTarget]:
        """Scrape targets, one per keep-alive connection."""
        yield self.target
        if self._model_list.target.port != self.target.port:
            yield self._model_list.target

    @property
    def _num_opened(self) -> int:
        """Requests sent to it so far (count)."""
        members = self.members
        if len(members) == 1:  # five times per second for each endpoint
            return members[0].account.opened
        return sum([member.account.opened for member in members])

    def _note_traffic(self) -> None:
        opened = self._num_opened
        busy = opened != self._opened or any(member.account.in_flight for member in self.members)
        self._opened = opened
        self._scraper.endpoint_counts.change_busy(busy - self.busy, self._scraper.clock())
        self.busy = busy


class Scraper:
    """Runs one `EndpointScraper` per endpoint of the pool.

    Args:
        unlisted_models: Requests so far for models that no endpoint lists (count); a rise makes the
            next poll of the lists come sooner.
        endpoint_counts: Shared by scrapers that share a budget; None for one alone.
        supervisor: Keeps the loops alive; None for one of its own.
    """

    def __init__(  # noqa: PLR0913 - the last two are what all scrapers of a process share
        self,
        settings: ScraperSettings,
        store: PoolStore,
        *,
        client: client.ScrapeClient,
        clock: Callable[[], float],
        rng: random.Random,
        on_result: Callable[[ScrapeResult], None] = lambda _: None,
        unlisted_models: Callable[[], int] = lambda: 0,
        endpoint_counts: schedule.EndpointCounts | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.settings = settings
        self.store = store
        self.client = client
        self.clock = clock
        self.rng = rng
        self.on_result = on_result
        self.unlisted_models = unlisted_models
        self.endpoint_counts = endpoint_counts or schedule.EndpointCounts()
        self.supervisor = supervisor or Supervisor(clock=clock)
        self.watches: dict[str, EndpointScraper] = {}
        # Of the snapshot whose endpoints are scraped: the same object until endpoints change.
        self._positions: object = None

    def reconfigure(self, settings: ScraperSettings) -> None:
        """Applies other settings, from the next scrape of each endpoint on.

        Paths are those of the settings before.
        """
        self.settings = settings

    async def run(self) -> None:
        """Follows the endpoint set and scrapes it until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self.step(tasks)
                    await sleep_to_tick(self.settings.follow_s)
        finally:
            self._positions = None
            for watch in list(self.watches.values()):
                self._stop(watch.address)

    async def step(self, tasks: asyncio.TaskGroup) -> None:
        """Starts and stops scrape loops so that they match the pool, and brings scrapes forward."""
        pool = self.store.pool
        if pool.positions is not self._positions:
            self._positions = pool.positions if self._follow(pool, tasks) else None
        is_rest_over = not self.endpoint_counts.is_resting(self.clock())
        for watch in self.watches.values():
            watch.hasten(is_rest_over=is_rest_over)

    def _follow(self, pool: Pool, tasks: asyncio.TaskGroup) -> bool:
        """Starts and stops loops; returns False if one could not be started."""
        left, is_complete = dict(self.watches), True
        endpoints = [member.endpoint for member in pool.members]
        ports = find_metrics_ports(endpoints, self.settings.port)
        for member in pool.members:
            rank, address = member.endpoint.rank, member.endpoint.host_port
            if rank is not None and rank.index:
                continue  # of the engine that its first rank stands for
            watch, members = left.pop(address, None), pool.ranks_at(address)
            port = ports[address]
            if watch is not None and watch.is_target(member.endpoint, port):
                watch.members = members
                continue
            self._stop(address)
            try:
                self._start(members, port, tasks)
            except Exception as error:  # noqa: BLE001 - the endpoints after it are scraped
                self.supervisor.record_error("scrape", error, instance=address)
                is_complete = False
        for address in left:
            self._stop(address)
        return is_complete

    def wait_s(self, watch: EndpointScraper) -> float:
        """Returns seconds from the start of the last scrape of this endpoint to the next one."""
        watch.is_resting = not watch.busy and self.endpoint_counts.is_resting(self.clock())
        return schedule.wait_s(
            self.settings.schedule,
            busy=watch.busy,
            counts=self.endpoint_counts,
            failures=watch.failures,
            refused=watch.is_refused,
            resting=watch.is_resting,
            rng=self.rng,
        )

    def least_list_wait_s(self) -> float:
        """Returns the seconds between two model lists of an endpoint that keep to the budget."""
        return schedule.least_list_wait_s(self.settings.schedule, self.endpoint_counts.all)

    def _start(
        self, members: Sequence[EndpointSnapshot], port: int, tasks: asyncio.TaskGroup
    ) -> None:
        watch = EndpointScraper(self, members, port)
        address = watch.address
        self.endpoint_counts.change_busy(int(watch.busy), self.clock())
        self.endpoint_counts.change_all(1, self.clock())
        self.watches[address] = watch
        supervised = self.supervisor.keep("scrape", watch.run, instance=address)
        watch.task = tasks.create_task(supervised, name=f"scrape {address}")

    def _stop(self, address: str) -> None:
        watch = self.watches.pop(address, None)
        if watch is not None:
            watch.close()


def _end_sleep(sleep: asyncio.Future[None]) -> None:
    if not sleep.done():
        sleep.set_result(None)


def _read(
    reader: metrics_page.MetricsPageReader,
    fetched: bytes | client.FetchFailed,
    endpoint: Endpoint,
    at: float,
    settings: ScraperSettings,
) -> Load | metrics_page.RankedLoad | str:
    """Reads the load from a page; the failure reason without one."""
    if isinstance(fetched, client.FetchFailed):
        return fetched.reason
    labels = endpoint.labels
    engine_type = next((labels[key] for key in engines.TYPE_LABELS if key in labels), "")
    read_page = reader.read_ranks if settings.ranks else reader.read
    read = read_page(fetched, at, engine_type=engine_type, extra=settings.extra)
    return "unreadable" if isinstance(read, metrics_page.UnreadablePage) else read
