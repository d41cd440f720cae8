import asyncio
import random

import pytest

from extproc.endpoint import Endpoint, ServedModels, find_metrics_ports
from extproc.pool import store
from extproc.scrape import client, model_list, scraper

LIST = b'{"data": [{"id": "m"}, {"id": "lora", "parent": "m"}]}'
LISTED = ServedModels(frozenset({"m"}), frozenset({"lora"}))
PAGE = b"vllm:num_requests_waiting 3\n"


class ListingEngine:
    """Answers both pages; a list may be a failure. The clock stands unless a test moves it."""

    def __init__(self, *labelled, interval_s=30.0):
        self.now = 100.0
        self.page = PAGE
        self.list = LIST
        self.missed = 0
        self.requests = []
        self.forgotten = []
        self.facts = []
        self.store = store.PoolStore(lambda _: None)
        endpoint = Endpoint("10.0.0.1:8000", labels=dict(labelled))
        self.store.set_endpoints([endpoint], 0.0)
        self.scraper = scraper.Scraper(
            scraper.ScraperSettings(
                models=model_list.ModelListSettings(interval_s=interval_s, jitter=0.0)
            ),
            self.store,
            client=self,
            clock=lambda: self.now,
            rng=random.Random(1),
            on_result=self.facts.append,
            unlisted_models=lambda: self.missed,
        )
        (port,) = find_metrics_ports([endpoint], None).values()
        self.watch = scraper.EndpointScraper(self.scraper, self.store.pool.members[:1], port)

    async def get(self, where):
        path = where.request.split()[1].decode()
        self.requests.append((where.port, path))
        return self.list if path == model_list.PATH else self.page

    def forget(self, where):
        self.forgotten.append(where.port)

    @property
    def models(self):
        return self.store.pool.members[0].models

    @property
    def lists(self):
        """Number of requests for the model list."""
        return sum(path == model_list.PATH for _, path in self.requests)

    async def at(self, *moments):
        """A scrape at each of these seconds."""
        for moment in moments:
            self.now = 100.0 + moment
            await self.watch.step()
        return self.lists


async def test_a_new_endpoint_is_polled_at_once_and_then_rarely():
    """Once at once, then once an interval, however often loads are scraped."""
    engine = ListingEngine()
    assert await engine.at(0) == 1
    assert engine.models == LISTED
    assert await engine.at(0.2, 5, 29.9) == 1
    assert await engine.at(30.0) == 2
    assert await engine.at(30.2, 59.9) == 2
    assert await engine.at(60.0) == 3
    first = engine.facts[:2]
    assert [(fact.listing, fact.outcome) for fact in first] == [(False, "ok"), (True, "ok")]


async def test_a_disabled_poller_never_polls():
    """Without an interval no list is requested."""
    engine = ListingEngine(interval_s=None)
    assert await engine.at(0, 100, 1000) == 0
    assert engine.models is None


@pytest.mark.parametrize(
    "failure",
    [client.FetchFailed("status 404"), client.FetchFailed("timeout"), b"<html>", b'{"data": []}'],
)
async def test_a_failed_poll_keeps_the_models_and_retries_sooner(failure):
    """After 2, 4, 8 s and at last every interval; the names stay."""
    engine = ListingEngine()
    await engine.at(0)
    engine.list = failure
    assert await engine.at(30.0, 31.9) == 2
    assert await engine.at(32.0, 35.9) == 3
    assert await engine.at(36.0, 43.9) == 4
    assert await engine.at(44.0, 60.0, 90.0) == 7
    assert await engine.at(119.9) == 7
    assert engine.models == LISTED
    assert engine.facts[-2].outcome == getattr(failure, "reason", "unreadable")
    engine.list = LIST
    assert await engine.at(120.0, 149.9) == 8
    engine.list = failure
    assert await engine.at(150.0, 151.9) == 9
    assert await engine.at(152.0) == 10


async def test_an_endpoint_without_a_model_list_stays_unknown():
    """No list is not an empty list."""
    engine = ListingEngine()
    engine.list = client.FetchFailed("status 404")
    await engine.at(0, 2, 6)
    assert engine.models is None


@pytest.mark.parametrize("reason", sorted(scraper.UNREACHABLE))
async def test_an_unreachable_endpoint_is_not_polled(reason):
    """A refused or hung scrape is not followed by a second one."""
    engine = ListingEngine()
    engine.page = client.FetchFailed(reason)
    assert await engine.at(0, 1) == 0
    engine.page = client.FetchFailed("status 404")
    assert await engine.at(2) == 1


async def test_a_restarted_engine_is_polled_at_once():
    """Another process may serve other models."""
    engine = ListingEngine()
    engine.page = PAGE + b"process_start_time_seconds 1000\n"
    assert await engine.at(0, 1) == 1
    engine.page = PAGE + b"process_start_time_seconds 2000\n"
    engine.list = b'{"data": [{"id": "other"}]}'
    assert await engine.at(2, 3) == 2
    assert engine.models == ServedModels(frozenset({"other"}))


async def test_requests_for_unlisted_models_trigger_a_poll():
    """Once after each such request, and never within 5 s of the last list."""
    engine = ListingEngine()
    assert await engine.at(0, 3) == 1
    engine.missed += 1
    assert await engine.at(3.2, 4.9) == 1
    assert await engine.at(5.0, 29.9) == 2
    engine.missed += 100
    assert await engine.at(30.0) == 3
    assert await engine.at(34.9, 36.0) == 3
    engine.missed += 1
    assert await engine.at(36.2, 60.0) == 4


async def test_a_model_that_the_engine_does_not_know_triggers_a_poll():
    """One that listed an adapter and answers 404 has unloaded it; other answers say nothing."""
    engine = ListingEngine()
    account = engine.store.pool.members[0].account
    assert await engine.at(0) == 1
    engine.list = b'{"data": [{"id": "m"}]}'
    for target, not_found in (("lora", False), ("", True)):
        account.open(target, 1, cached_tokens=0, now=0.0).refuse(not_found=not_found)
    assert await engine.at(5.0) == 1
    account.open("lora", 1, cached_tokens=0, now=0.0).refuse(not_found=True)
    assert await engine.at(5.2, 29.9) == 2
    assert engine.models == ServedModels(frozenset({"m"}))


async def test_a_large_pool_lists_no_oftener_than_its_budget():
    """Neither failures nor made-up names make 1,000 endpoints list more than 40 times a second."""
    engine = ListingEngine()
    engine.scraper.endpoint_counts.all = 1000
    engine.list = client.FetchFailed("status 500")
    assert await engine.at(0, 24.9) == 1
    engine.list = LIST
    assert await engine.at(25.0) == 2
    engine.missed += 1
    assert await engine.at(30.0, 49.9) == 2
    assert await engine.at(50.0) == 3


async def test_models_are_polled_on_the_serving_port():
    """A metrics-port label moves the metrics only; both connections are closed at the end."""
    engine = ListingEngine(("metrics-port", "9100"))
    await engine.at(0)
    assert engine.requests == [(9100, "/metrics"), (8000, "/v1/models")]
    async with asyncio.TaskGroup() as tasks:
        await engine.scraper.step(tasks)
        engine.store.set_endpoints([], 0.0)
        await engine.scraper.step(tasks)
    assert engine.forgotten == [9100, 8000]


def test_a_model_list_of_a_removed_endpoint_is_dropped():
    """Names of an earlier life are not those of the new one."""
    queued = store.PoolStore(lambda _: None)
    queued.set_endpoints([Endpoint("10.0.0.1:1")], 0.0)
    old = queued.pool.members[0].endpoint
    queued.set_endpoints([], 0.0)
    queued.set_endpoints([Endpoint("10.0.0.1:1")], 0.0)
    queued.observe_models(old, LISTED)
    assert queued.pool.members[0].models is None


def test_poll_intervals_have_jitter():
    """Ten engines that start together are not asked together for ever."""
    rng = random.Random(1)
    settings = model_list.ModelListSettings(interval_s=30.0)
    waits = [settings.wait_s(failures=0, least_s=0.0, rng=rng) for _ in range(100)]
    assert 27.0 <= min(waits) < 28.0
    assert 32.0 < max(waits) <= 33.0
    settings = model_list.ModelListSettings(interval_s=30.0, jitter=0.0)
    assert settings.wait_s(failures=5000, least_s=0.0, rng=rng) == 30.0


def test_both_pages_share_a_connection(http):
    """Over sockets: the metrics page, then the list, on one kept connection."""

    async def scene():
        served = http.ScriptedServer(http.answer(PAGE), http.answer(LIST))
        async with http.serving(served, "127.0.0.1"):
            queued = store.PoolStore(lambda _: None)
            queued.set_endpoints([Endpoint(f"127.0.0.1:{served.port}")], 0.0)
            fetch = client.ScrapeClient(timeout_s=300.0, cap_bytes=10_000)
            subject = scraper.Scraper(
                scraper.ScraperSettings(models=model_list.ModelListSettings(interval_s=30.0)),
                queued,
                client=fetch,
                clock=asyncio.get_running_loop().time,
                rng=random.Random(1),
            )
            await scraper.EndpointScraper(subject, queued.pool.members[:1], served.port).step()
            fetch.close()
            assert served.connections == 1
            assert b"accept: application/json\r\n" in served.requests[1]
            return queued.pool.members[0].models

    assert asyncio.run(scene()) == LISTED
