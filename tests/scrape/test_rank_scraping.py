"""Scraping of engines with several data-parallel ranks: endpoints come and go with the page."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from extproc.endpoint import Endpoint
from extproc.scrape import client
from extproc.scrape.scraper import MAX_RANKLESS_PAGES
from tests.scrape.scraper_scene import QUICK, ScraperScene

ENGINE = "10.0.0.1:1"


def vllm_page(ranks: Mapping[int, tuple[int, int]]) -> bytes:
    """A page of requests that run and wait, by rank."""
    return b"".join(
        b'vllm:num_requests_running{engine="%d"} %d\nvllm:num_requests_waiting{engine="%d"} %d\n'
        % (rank, running, rank, waiting)
        for rank, (running, waiting) in ranks.items()
    )


def addresses(scene: ScraperScene) -> list[str]:
    return [member.endpoint.address for member in scene.store.pool.members]


async def test_ranks_on_a_page_become_endpoints_with_their_loads():
    """The first page splits the engine, and its loads are there at once."""
    scene = ScraperScene(ENGINE, p1=vllm_page({0: (1, 0), 1: (2, 5)}))
    watch = scene.watch()
    await watch.step()
    assert addresses(scene) == [f"{ENGINE}@0", f"{ENGINE}@1"]
    assert [member.load.waiting for member in scene.store.pool.members] == [0.0, 5.0]
    scene.fetcher.answers["p1"] = vllm_page({0: (1, 3), 1: (2, 4)})
    await watch.step()
    assert [member.load.waiting for member in scene.store.pool.members] == [3.0, 4.0]
    assert [fact.address for fact in scene.facts] == [ENGINE] * 2


async def test_a_changed_number_of_ranks_keeps_the_accounts_of_those_that_stay():
    """Two more ranks come and go; requests on the first two stay counted, and close."""
    scene = ScraperScene(ENGINE, p1=vllm_page({0: (0, 0), 1: (0, 0)}))
    watch = scene.watch()
    await watch.step()
    accounts = [member.account for member in scene.store.pool.members]
    opened = accounts[1].open("m", 100, cached_tokens=0, now=0.0)
    for count in (4, 2, 3):
        scene.fetcher.answers["p1"] = vllm_page({rank: (0, rank) for rank in range(count)})
        await watch.step()
        members = scene.store.pool.members
        assert len(members) == count
        assert [member.account for member in members[:2]] == accounts
        assert {member.endpoint.rank.count for member in members} == {count}
        assert members[1].account.in_flight == 1
        assert [member.load.waiting for member in members] == [*map(float, range(count))]
    opened.close(1.0, answered=True)
    assert members[1].account.in_flight == 0
    scene.fetcher.answers["p1"] = vllm_page({0: (0, 0)})
    await watch.step()
    assert addresses(scene) == [ENGINE]


async def test_a_request_that_ran_before_the_ranks_were_known_closes_its_account():
    """Its engine chose the rank, where it counts as work of others until it ends."""
    scene = ScraperScene(ENGINE, p1=vllm_page({0: (1, 0), 1: (0, 0)}))
    account = scene.store.pool.members[0].account
    opened = account.open("m", 100, cached_tokens=0, now=0.0)
    await scene.watch().step()
    assert [member.foreign for member in scene.store.pool.members] == [1.0, 0.0]
    opened.close(1.0, answered=True)
    assert account.in_flight == 0


async def test_ranks_share_one_loop_that_goes_on_after_the_split():
    """An engine is scraped once whatever its ranks, and its loop is not started anew."""
    scene = ScraperScene(ENGINE, "10.0.0.2:2", p1=vllm_page({0: (0, 0), 1: (0, 0)}))
    running = asyncio.ensure_future(scene.subject.run())
    await scene.fetcher.until(lambda: len(scene.store.pool.members) == 3)
    watch = scene.subject.watches[ENGINE]
    num_requests = len(scene.fetcher.requests)
    await scene.fetcher.until(lambda: len(scene.fetcher.requests) > num_requests + 6)
    assert set(scene.subject.watches) == {ENGINE, "10.0.0.2:2"}
    assert scene.subject.watches[ENGINE] is watch
    assert scene.fetcher.forgotten == []
    running.cancel()


async def test_a_failed_scrape_makes_all_ranks_unreachable_once():
    """Failures count for the engine: two of them, not one for each rank, take it out."""
    scene = ScraperScene(ENGINE, "10.0.0.2:2", p1=vllm_page({0: (0, 0), 1: (0, 0), 2: (0, 0)}))
    watch = scene.watch()
    await watch.step()
    scene.fetcher.answers["p1"] = client.FetchFailed("timeout")
    await watch.step()
    assert all(member.is_reachable and member.is_up for member in scene.store.pool.members)
    await watch.step()
    members = scene.store.pool.members
    assert [member.is_up for member in members] == [False, False, False, True]
    assert len({member.condition.since for member in members[:3]}) == 1


async def test_ranks_can_be_left_together():
    """`data_parallel_ranks: false` reads the page of such an engine as one load."""
    settings = msgspec.structs.replace(QUICK, ranks=False)
    scene = ScraperScene(ENGINE, settings=settings, p1=vllm_page({0: (1, 0), 1: (2, 5)}))
    await scene.watch().step()
    assert addresses(scene) == [ENGINE]
    assert scene.load().running == 3.0


async def test_a_page_that_arrives_after_its_engine_left_changes_nothing():
    """Neither the pool that lost it nor another engine at its address gets its ranks."""
    answer = asyncio.Event()
    scene = ScraperScene(ENGINE, p1=answer)
    step = asyncio.ensure_future(scene.watch().step())
    await scene.fetcher.until(lambda: scene.fetcher.requests)
    scene.hold(Endpoint(ENGINE, uid="other"))
    scene.store.set_ranks(Endpoint(ENGINE, engine=1), (0, 1), 1.0)
    assert addresses(scene) == [ENGINE]
    step.cancel()


@pytest.mark.parametrize(
    "page",
    [
        b"python_gc_objects_collected_total 3\n",
        b'vllm:num_requests_waiting{engine="0"} 1\nvllm:num_requests_waiting{engine="1"} 1\n',
    ],
)
async def test_a_page_without_running_requests_keeps_ranks_with_unknown_loads(page):
    """Requests on the ranks stay counted, and are not foreign on the next page."""
    scene = ScraperScene(ENGINE, p1=vllm_page({0: (1, 0), 1: (1, 0)}))
    watch = scene.watch()
    await watch.step()
    accounts = [member.account for member in scene.store.pool.members]
    for account in accounts:
        account.open("m", 100, cached_tokens=0, now=0.0)
    for _ in range(2):
        scene.fetcher.answers["p1"] = page
        for _ in range(MAX_RANKLESS_PAGES):
            await watch.step()
        members = scene.store.pool.members
        assert [member.account for member in members] == accounts
        assert [(member.load.running, member.load.waiting) for member in members] == [
            (None, None)
        ] * 2
        assert scene.facts[-1].outcome == "ok"
        scene.fetcher.answers["p1"] = vllm_page({0: (1, 0), 1: (1, 0)})
        await watch.step()
        members = scene.store.pool.members
        assert [(member.load.running, member.foreign) for member in members] == [(1.0, 0.0)] * 2


async def test_an_engine_that_shows_no_running_requests_any_more_has_no_ranks():
    """Another engine at the address may not have any."""
    scene = ScraperScene(ENGINE, p1=vllm_page({0: (1, 0), 1: (1, 0)}))
    watch = scene.watch()
    await watch.step()
    scene.fetcher.answers["p1"] = b"nv_inference_pending_request_count 3\n"
    for _ in range(MAX_RANKLESS_PAGES + 1):
        await watch.step()
    assert addresses(scene) == [ENGINE]
    assert scene.load().waiting == 3.0
