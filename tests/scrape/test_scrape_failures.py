import asyncio
import heapq
from collections import Counter

import msgspec
import pytest

from extproc.errors import TOO_MANY_FILES
from extproc.pool.endpoint_health import HealthState
from extproc.scrape import client, model_list, scraper
from extproc.supervision import Supervisor
from tests.scrape.scraper_scene import QUICK, ScraperScene


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (client.FetchFailed("timeout"), "timeout"),
        (client.FetchFailed("refused"), "refused"),
        (client.FetchFailed("status 500"), "status 500"),
        (b"<html>", "unreadable"),
        (12, "bug: AttributeError"),
    ],
)
async def test_116_a_failure_leaves_the_old_load_to_age(answer, outcome):
    """Checklist 116: failures are named, counted, and do not touch the load."""
    scene = ScraperScene("10.0.0.1:1")
    watch = scene.watch()
    await watch.step()
    scene.fetcher.answers["p1"] = answer
    await watch.step()
    await watch.step()
    assert (scene.load().waiting, scene.load().at) == (3.0, 100.125)
    assert scene.store.pool.members[0].failure == outcome
    assert [fact.outcome for fact in scene.facts] == ["ok", outcome, outcome]
    assert watch.failures == 2
    assert watch.is_refused == (outcome == "refused")
    scene.fetcher.answers.clear()
    await watch.step()
    assert watch.failures == 0
    assert not watch.is_refused


async def test_a_lack_of_files_says_nothing_about_an_engine():
    """It neither ejects nor readmits, and the next scrape comes as soon as ever."""
    scene = ScraperScene("10.0.0.1:1")
    watch = scene.watch()
    for answer, failures, is_up in (
        (TOO_MANY_FILES, 0, True),
        ("refused", 1, True),
        (TOO_MANY_FILES, 1, True),
        ("refused", 2, False),
        (TOO_MANY_FILES, 2, False),
    ):
        scene.fetcher.answers["p1"] = client.FetchFailed(answer)
        await watch.step()
        member = scene.store.pool.members[0]
        assert (member.failure, member.failures, member.is_up) == (answer, failures, is_up)
        assert watch.failures == failures


@pytest.mark.parametrize(("port", "state"), [(None, HealthState.DOWN), (9400, HealthState.HEALTHY)])
async def test_a_refusal_at_another_port_is_none_of_the_engine(port, state):
    """The sidecar that serves the page may be away while the engine serves."""
    settings = msgspec.structs.replace(QUICK, port=port)
    refused = client.FetchFailed("refused")
    scene = ScraperScene("10.0.0.1:1", settings=settings, p1=refused, p9400=refused)
    watch = scene.watch()
    for _ in range(5):
        await watch.step()
    assert scene.store.pool.members[0].condition.state is state


@pytest.mark.parametrize(("reason", "longest_s"), [("refused", 2.0), ("timeout", 11.0)])
async def test_a_refused_endpoint_is_scraped_again_within_two_seconds_of_recovery(
    reason, longest_s
):
    """Back-off from refused connections ends at 2 s, from others at its own cap."""
    scene = ScraperScene(
        "10.0.0.1:1", settings=scraper.ScraperSettings(), p1=client.FetchFailed(reason)
    )
    watch = scene.watch()
    for _ in range(9):
        await watch.step()
    assert 0.8 * longest_s <= scene.subject.wait_s(watch) <= longest_s


@pytest.mark.parametrize("reason", ["status 500", "refused"])
def test_many_endpoints_that_fail_at_once_stay_near_the_budget(reason):
    """500 idle endpoints fail at once: about two budgets of scrapes and one of lists follow."""

    async def scene():
        settings = scraper.ScraperSettings(models=model_list.ModelListSettings(interval_s=30.0))
        scene = ScraperScene(
            *(f"10.0.{at // 250}.{at % 250}:1" for at in range(500)), settings=settings
        )
        counts, clock, fetcher = scene.subject.endpoint_counts, scene.clock, Pages(scene.clock)
        scene.subject.client = fetcher
        counts.busy = counts.all = 500
        watches = [scene.watch(at) for at in range(500)]
        due = [(clock.now + at / 100, at) for at in range(500)]
        while due[0][0] < 240.0:
            clock.now, at = due[0]
            if clock.now >= 200.0:
                fetcher.answer = client.FetchFailed(reason)
            await watches[at].step()
            heapq.heapreplace(due, (clock.now + scene.subject.wait_s(watches[at]), at))
        return fetcher.per_second

    per_second = asyncio.run(scene())
    assert max(per_second["/metrics", at] for at in range(170, 200)) <= 120
    assert max(per_second["/metrics", at] for at in range(200, 240)) <= 260
    assert max(per_second["/v1/models", at] for at in range(170, 240)) <= 120


class Pages:
    """Answers at once, and counts the requests by path and second."""

    def __init__(self, clock):
        self.clock = clock
        self.answer = b"vllm:num_requests_waiting 3\n"
        self.per_second = Counter()

    async def get(self, where):
        path = where.request.split()[1].decode()
        self.per_second[path, int(self.clock.now)] += 1
        return b'{"data": [{"id": "m"}]}' if path == "/v1/models" else self.answer


POISON = b"vllm:num_requests_waiting 13\n"


def poisoned(fleet_):
    """A fleet that raises at one page, as a bug that a hostile number sets off."""
    observe = fleet_.observe_ranks

    def raising(marks, loads, now):
        if any(load.waiting == 13 for load in loads):
            raise OverflowError("a secret of the page")
        observe(marks, loads, now)

    fleet_.observe_ranks = raising


def test_a_page_that_raises_stops_no_other_endpoint(caplog):
    """Its load ages as if it did not answer; the others are scraped on, and it heals."""

    async def scene():
        scene = ScraperScene("10.0.0.1:1", "10.0.0.2:2", p1=POISON)
        poisoned(scene.store)
        task = asyncio.ensure_future(scene.subject.run())
        await scene.fetcher.until(lambda: scene.fetcher.requests.count(("10.0.0.2", 2)) >= 20)
        subject = scene.subject.supervisor
        assert subject.failures["scrape"] >= 1
        assert subject.degraded == ["scrape"]
        assert scene.load(0).waiting is None
        assert scene.store.pool.members[0].failure == "bug: OverflowError"
        assert scene.load(1).waiting == 3.0
        scene.fetcher.answers.clear()
        await scene.fetcher.until(lambda: not subject.degraded)
        assert scene.load(0).waiting == 3.0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scene())
    assert "secret" not in caplog.text
    assert len([line for line in caplog.messages if "OverflowError" in line]) == 1


async def test_a_callback_that_raises_stops_no_scraping():
    """A listener of scrapes may raise; scraping continues after a pause."""

    async def no_pause(_):
        await asyncio.sleep(0)

    scene = ScraperScene("10.0.0.1:1")
    scene.subject.supervisor = Supervisor(sleep=no_pause)
    scene.subject.on_result = {}.__getitem__
    task = asyncio.ensure_future(scene.subject.run())
    await scene.fetcher.until(lambda: len(scene.fetcher.requests) >= 5)
    assert scene.load().waiting == 3.0
    assert scene.subject.supervisor.failures["scrape"] >= 4
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
