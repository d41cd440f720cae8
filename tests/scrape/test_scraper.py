import asyncio
import random
import threading

import msgspec
import pytest

from extproc.endpoint import Endpoint
from extproc.pool import store
from extproc.scrape import client, metrics_page, schedule, scraper
from tests.scrape.scraper_scene import QUICK, ScraperScene


async def test_a_page_reaches_the_store_with_its_time():
    """A step hands over the load, timed between its request and its arrival, and says so."""
    scene = ScraperScene("10.0.0.1:1")
    await scene.watch().step()
    assert (scene.load().waiting, scene.load().at) == (3.0, 100.125)
    assert scene.facts == [scraper.ScrapeResult("10.0.0.1:1", "ok", 0.25, "vllm")]


async def test_the_scrape_token_is_taken_before_the_request():
    """Requests of ours that start while the page is on its way are not foreign work."""
    flow_controller = asyncio.Event()
    scene = ScraperScene("10.0.0.1:1", p1=flow_controller)
    scene.store.pool.members[0].account.open("m", 1, cached_tokens=0, now=0.0)
    marks = []
    begin = scene.store.begin_scrape
    scene.store.begin_scrape = lambda endpoint: marks.append(begin(endpoint)) or marks[-1]
    step = asyncio.ensure_future(scene.watch().step())
    await scene.fetcher.until(lambda: scene.fetcher.requests)
    scene.store.pool.members[0].account.open("m", 1, cached_tokens=0, now=0.0)
    flow_controller.set()
    await step
    assert [mark.in_flight for mark in marks] == [1]


async def test_117_each_rank_is_scraped_on_its_own_port():
    """Checklist 117: the endpoint's port is asked, unless its metrics-port label is a port."""
    moved = [
        Endpoint("10.0.0.1:8002", labels={"metrics-port": "9100"}),
        Endpoint("10.0.0.1:8003", labels={"metrics-port": "none"}),
        Endpoint("10.0.0.1:8004", labels={"metrics-port": "65536"}),
    ]
    scene = ScraperScene("10.0.0.1:8000", "10.0.0.1:8001", "[fd00::1]:8000", *moved)
    for at in range(6):
        await scene.watch(at).step()
    assert scene.fetcher.requests == [
        ("10.0.0.1", 8000),
        ("10.0.0.1", 8001),
        ("fd00::1", 8000),
        ("10.0.0.1", 9100),
        ("10.0.0.1", 8003),
        ("10.0.0.1", 8004),
    ]


@pytest.mark.parametrize("key", ["llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"])
async def test_115_the_engine_label_is_honored(key):
    """Checklist 115: both label keys name the engine."""
    labelled = Endpoint("10.0.0.1:1", labels={key: "sglang"})
    page = b"vllm:num_requests_waiting 1\nsglang:num_queue_reqs 2\n"
    scene = ScraperScene(labelled, p1=page)
    await scene.watch().step()
    assert (scene.load().engine, scene.load().waiting) == ("sglang", 2.0)


async def test_traffic_sets_the_pace():
    """Busy are endpoints with open requests or with picks since the last scrape."""
    scene = ScraperScene("10.0.0.1:1")
    watch = scene.watch()
    account = scene.store.pool.members[0].account
    await watch.step()
    await watch.step()
    assert not watch.busy
    reservation = account.open("m", 1, cached_tokens=0, now=0.0)
    await watch.step()
    assert watch.busy
    await watch.step()
    assert watch.busy
    reservation.close(0.0)
    await watch.step()
    assert not watch.busy
    account.open("m", 1, cached_tokens=0, now=0.0).close(0.0)
    await watch.step()
    assert watch.busy
    await watch.step()
    assert not watch.busy


async def test_an_idle_endpoint_is_scraped_soon_after_a_request():
    """The first request ends the long wait of an endpoint without traffic; silence does not."""
    pace = schedule.ScrapeSchedule(fast_s=0.001, slow_s=1e6, scrapes_per_s=1e9, tick_s=0.001)
    scene = ScraperScene(
        "10.0.0.1:1",
        "10.0.0.2:2",
        settings=scraper.ScraperSettings(follow_s=0.001, schedule=pace),
    )
    task = asyncio.ensure_future(scene.subject.run())
    await scene.fetcher.until(lambda: len(scene.fetcher.requests) == 4)
    while any(watch.busy for watch in scene.subject.watches.values()):
        await asyncio.sleep(0)
    scene.store.pool.members[0].account.open("m", 1, cached_tokens=0, now=0.0)
    await scene.fetcher.until(lambda: scene.fetcher.requests.count(("10.0.0.1", 1)) >= 5)
    assert scene.fetcher.requests.count(("10.0.0.2", 2)) == 2
    assert scene.subject.endpoint_counts.busy == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_request_to_one_endpoint_ends_the_rest_of_all():
    """Without requests for half a minute all endpoints rest; one request has all scraped again."""
    pace = schedule.ScrapeSchedule(
        fast_s=0.001, slow_s=0.001, rest_s=1e6, scrapes_per_s=1e9, tick_s=0.001
    )
    scene = ScraperScene(
        "10.0.0.1:1",
        "10.0.0.2:2",
        settings=scraper.ScraperSettings(follow_s=0.001, schedule=pace),
    )
    task = asyncio.ensure_future(scene.subject.run())
    await scene.fetcher.until(lambda: len(scene.fetcher.requests) >= 8)
    watches = scene.subject.watches.values()
    assert not any(watch.is_resting for watch in watches)
    scene.clock.now += schedule.REST_AFTER_S
    while not all(watch.is_resting for watch in watches):
        await asyncio.sleep(0)
    first, second = (scene.fetcher.requests.count((f"10.0.0.{n}", n)) for n in (1, 2))
    scene.store.pool.members[0].account.open("m", 1, cached_tokens=0, now=0.0)
    await scene.fetcher.until(
        lambda: (
            scene.fetcher.requests.count(("10.0.0.1", 1)) >= first + 2
            and scene.fetcher.requests.count(("10.0.0.2", 2)) >= second + 2
        )
    )
    assert not any(watch.is_resting for watch in watches)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_hanging_endpoint_delays_no_other():
    """While one endpoint never answers, the other is scraped again and again."""
    scene = ScraperScene("10.0.0.1:1", "10.0.0.2:2", p1=asyncio.Event())
    task = asyncio.ensure_future(scene.subject.run())
    await scene.fetcher.until(lambda: scene.fetcher.requests.count(("10.0.0.2", 2)) >= 20)
    assert scene.fetcher.requests.count(("10.0.0.1", 1)) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert sorted(scene.fetcher.forgotten) == [1, 2]


async def test_every_run_starts_the_loops():
    """A pool that is run again is scraped again."""
    scene = ScraperScene("10.0.0.1:1")
    for _ in range(2):
        task = asyncio.ensure_future(scene.subject.run())
        for _ in range(5):
            await asyncio.sleep(0)
        assert list(scene.subject.watches) == ["10.0.0.1:1"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_loops_follow_the_endpoint_set():
    """New endpoints are scraped, removed ones are not, and the others keep their loop."""
    scene = ScraperScene("10.0.0.1:1", "10.0.0.2:2")
    async with asyncio.TaskGroup() as tasks:
        await scene.subject.step(tasks)
        stays = scene.subject.watches["10.0.0.2:2"]
        leaves = scene.subject.watches["10.0.0.1:1"]
        scene.hold("10.0.0.2:2", "10.0.0.3:3")
        await scene.subject.step(tasks)
        assert list(scene.subject.watches) == ["10.0.0.2:2", "10.0.0.3:3"]
        assert scene.subject.watches["10.0.0.2:2"] is stays
        assert scene.fetcher.forgotten == [1]
        await asyncio.wait([leaves.task])
        assert leaves.task.cancelled()
        scene.hold()
        await scene.subject.step(tasks)
    assert scene.subject.endpoint_counts.busy == 0


async def test_a_new_incarnation_or_new_labels_restart_the_loop():
    """An address that left and came back, or moved its metrics port, is started afresh."""
    scene = ScraperScene("10.0.0.1:1")
    async with asyncio.TaskGroup() as tasks:
        await scene.subject.step(tasks)
        first = scene.subject.watches["10.0.0.1:1"]
        scene.hold()
        scene.hold("10.0.0.1:1")
        await scene.subject.step(tasks)
        second = scene.subject.watches["10.0.0.1:1"]
        scene.hold(Endpoint("10.0.0.1:1", labels={"metrics-port": "9"}))
        await scene.subject.step(tasks)
        third = scene.subject.watches["10.0.0.1:1"]
        assert first is not second is not third
        assert third.target.port == 9
        scene.hold()
        await scene.subject.step(tasks)


async def test_a_configured_port_is_that_of_every_engine_with_an_address_of_its_own():
    """Not of engines that share an IP address, as each has a page; labels name other ports."""
    settings = msgspec.structs.replace(QUICK, port=9400)
    alone, labelled = "10.0.0.1:1", Endpoint("10.0.0.2:1", labels={"metrics-port": "9"})
    scene = ScraperScene(alone, labelled, "10.0.0.3:1", "10.0.0.3:2", settings=settings)

    def ports():
        return [watch.target.port for watch in scene.subject.watches.values()]

    async with asyncio.TaskGroup() as tasks:
        await scene.subject.step(tasks)
        assert ports() == [9400, 9, 1, 2]
        scene.hold(alone, "10.0.0.3:2")
        await scene.subject.step(tasks)
        assert ports() == [9400, 9400]
        scene.store.set_ranks(scene.store.pool.members[0].endpoint, (0, 1), 0.0)
        await scene.subject.step(tasks)
        assert sorted(ports()) == [9400, 9400]
        scene.hold()
        await scene.subject.step(tasks)


async def test_a_scrape_of_a_removed_endpoint_is_dropped():
    """A load of an earlier life is never charged to the new one."""
    flow_controller = asyncio.Event()
    scene = ScraperScene("10.0.0.1:1", p1=flow_controller)
    step = asyncio.ensure_future(scene.watch().step())
    await scene.fetcher.until(lambda: scene.fetcher.requests)
    scene.hold()
    scene.hold("10.0.0.1:1")
    flow_controller.set()
    await step
    assert scene.load().waiting is None


def test_real_engines_are_scraped_over_sockets(http):
    """The shells together: two addresses of loopback, one page each, into the pool."""

    async def scene():
        first, second = (
            http.ScriptedServer(),
            http.ScriptedServer(http.answer(b"sglang:num_queue_reqs 9\n")),
        )
        async with http.serving(first, "127.0.0.1"), http.serving(second, "127.0.0.2"):
            fleet_ = store.PoolStore(lambda _: None)
            fleet_.set_endpoints(
                [Endpoint(f"127.0.0.1:{first.port}"), Endpoint(f"127.0.0.2:{second.port}")], 0.0
            )
            fetch = client.ScrapeClient(timeout_s=300.0, cap_bytes=10_000)
            clock = asyncio.get_running_loop().time
            subject = scraper.Scraper(
                QUICK, fleet_, client=fetch, clock=clock, rng=random.Random(1)
            )
            for member in fleet_.pool.members:
                await scraper.EndpointScraper(subject, (member,), member.endpoint.port).step()
            fetch.close()
            return [(member.load.engine, member.load.waiting) for member in fleet_.pool.members]

    assert asyncio.run(scene()) == [("vllm", 3.0), ("sglang", 9.0)]


@pytest.mark.parametrize("extra_bytes", [0, 1])
def test_a_large_page_is_read_in_a_thread(monkeypatch, extra_bytes):
    """One that takes longer than the loop may be held is read by a thread, and reads alike."""
    line = b"vllm:num_requests_waiting 3\n"
    padding = b"#" * (scraper.INLINE_BYTES - len(line) + extra_bytes)
    scene = ScraperScene("10.0.0.1:1", p1=line + padding)
    threads = []
    read = metrics_page.MetricsPageReader.read_ranks

    def noting(*args, **named):
        threads.append(threading.current_thread() is threading.main_thread())
        return read(*args, **named)

    monkeypatch.setattr(metrics_page.MetricsPageReader, "read_ranks", noting)
    asyncio.run(scene.watch().step())
    assert threads == [extra_bytes == 0]
    assert scene.store.pool.members[0].load.waiting == 3.0
