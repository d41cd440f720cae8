"""A scraper with a scripted client, in virtual time."""

import asyncio
import random

from extproc.endpoint import Endpoint, find_metrics_ports
from extproc.pool import store
from extproc.scrape import schedule, scraper

QUICK = scraper.ScraperSettings(
    follow_s=0.001,
    schedule=schedule.ScrapeSchedule(
        fast_s=0.001, slow_s=0.001, scrapes_per_s=1e9, tick_s=0.001, backoff_cap_s=0.001
    ),
)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Fetcher:
    """Answers by port; an answer may be a page, a failure or an event to wait for."""

    def __init__(self, clock, **answers):
        self.clock = clock
        self.answers = answers
        self.requests = []
        self.forgotten = []
        self.moved = asyncio.Event()

    async def get(self, where):
        self.requests.append((where.host, where.port))
        self.clock.now += 0.25
        self.moved.set()
        answer = self.answers.get(f"p{where.port}", b"vllm:num_requests_waiting 3\n")
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        await asyncio.sleep(0)
        return answer

    def forget(self, where):
        self.forgotten.append(where.port)

    async def until(self, condition):
        """Waits until the condition holds, looking after every request."""
        while not condition():
            self.moved.clear()
            await self.moved.wait()


class ScraperScene:
    def __init__(self, *endpoints, settings=QUICK, **answers):
        self.clock = Clock()
        self.fetcher = Fetcher(self.clock, **answers)
        self.store = store.PoolStore(lambda _: None)
        self.facts = []
        self.hold(*endpoints)
        self.subject = scraper.Scraper(
            settings,
            self.store,
            client=self.fetcher,
            clock=self.clock,
            rng=random.Random(1),
            on_result=self.facts.append,
        )

    def hold(self, *endpoints):
        self.store.set_endpoints(
            [
                endpoint if isinstance(endpoint, Endpoint) else Endpoint(endpoint)
                for endpoint in endpoints
            ],
            0.0,
        )

    def watch(self, at=0):
        members = self.store.pool.members
        ports = find_metrics_ports(
            [member.endpoint for member in members], self.subject.settings.port
        )
        port = ports[members[at].endpoint.host_port]
        return scraper.EndpointScraper(self.subject, members[at : at + 1], port)

    def load(self, at=0):
        return self.store.pool.members[at].load
