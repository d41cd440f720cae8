"""Staged faults are the first problems in the overview of the console, at the first look."""

from __future__ import annotations

import contextlib
import json
import signal

import aiohttp
import pytest

from tests.e2e import installation
from tests.monitoring.watched_fleet import again_and_again, started_fleet

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def _fleet(folder):
    async with started_fleet(folder) as fleet, fleet.loaded():
        yield fleet


@pytest.fixture(scope="module")
def fleet(live, chromium, tmp_path_factory):
    with live.holding(_fleet(tmp_path_factory.mktemp("console"))) as item:
        yield item


@pytest.fixture(scope="module")
def overview(live, chromium, fleet):
    """The overview, open from before the first fault to after the last."""
    with live.holding(chromium.page(fleet.place.pages)) as page:
        live.run(page.open())
        yield page


@pytest.fixture
def victim(fleet, live):
    """An engine that is as the others before and after the test."""
    address = next(iter(fleet.engines))
    yield address
    live.run(fleet.arm(address))


async def is_named(overview, *parts):
    """Wait until a problem in the first window has all parts."""
    await overview.page.evaluate("window.scrollTo(0, 0)")
    wanted = json.dumps(parts)
    try:
        await overview.until(
            f"""[...document.querySelectorAll('.problem')].some((node) =>
              {wanted}.every((part) => node.innerText.includes(part)) &&
              node.getBoundingClientRect().bottom <= window.innerHeight)"""
        )
    except TimeoutError as error:
        raise AssertionError(f"{parts} not in: {await overview.text('main')}") from error


async def test_no_problem(fleet, overview):
    """Under usual load there is none."""
    await is_named(overview, "No problems")


async def test_a_broken_configuration(fleet, overview):
    """The file that replaces a good one is not taken; the field that is wrong is named."""
    fleet.place.alarms.append("extproc.yaml")
    text = fleet.config.read_text()
    installation.replace_file(fleet.config, text.replace("max_requests", "most_requests"))
    try:
        await is_named(overview, "configuration was refused", "most_requests")
    finally:
        installation.replace_file(fleet.config, text)


async def test_a_slow_engine(fleet, overview, victim):
    """Five times slower, it computes so, however little `adaptive` sends it then."""
    async with fleet.filled():
        await fleet.arm(victim, "slow=5")
        await is_named(overview, f"{victim} computes", "times slower")


async def test_an_engine_that_hangs(fleet, overview, victim):
    """Stopped in the middle of its requests, it is out of reach: it answers no scrape either."""
    process = fleet.engines[victim].process
    async with fleet.filled():
        process.send_signal(signal.SIGSTOP)
        try:
            await is_named(overview, f"{victim} is out of reach (for ")
        finally:
            process.send_signal(signal.SIGCONT)


async def test_an_engine_that_fails_some_requests(fleet, overview, victim):
    """Too few to be ejected for long."""
    async with fleet.filled():
        await fleet.arm(victim, "status=500,rate=0.3")
        await is_named(overview, f"{victim} fails", "requests in the last minute")


async def test_a_cold_cache(fleet, overview, victim):
    """The engine reports fewer cached tokens than predicted."""
    url = f"http://{victim}/reset_prefix_cache"

    async def reset():
        async with aiohttp.ClientSession() as http, http.post(url) as answer:
            assert answer.status == 200

    async with fleet.filled(), again_and_again(reset):
        await is_named(overview, f"The cache of {victim} is cold")


async def test_a_full_queue(fleet, overview, victim):
    """With slow engines and more clients than the queue takes, requests are refused."""
    for address in fleet.engines:
        await fleet.arm(address, "slow=50")
    try:
        async with fleet.overloaded(120, tokens=400):
            await is_named(overview, "The queue is full", "(4 of 4 places taken)")
    finally:
        for address in fleet.engines:
            await fleet.arm(address)
