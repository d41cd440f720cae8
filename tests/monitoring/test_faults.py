"""A real Prometheus beside two installations: every panel has data, and what goes wrong is seen.

Simulated engines stage the faults. Windows of rules are `prometheus.SPEEDUP` times shorter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import signal
import sys

import aiohttp
import pytest

from tests.e2e import http1, installation
from tests.monitoring import boards, files, prometheus, recording_rules
from tests.monitoring.watched_fleet import ENGINE, PATH, again_and_again, body, started_fleet

pytestmark = pytest.mark.slow


SCALED = {
    "apiVersion": "extproc/v1alpha1",
    "kind": "ExtProcConfig",
    "flow_control": {"enabled": True},
    "pool": {
        "autoscaling": {
            "policy": "adaptive",
            "params": {"interval_s": 0.5},
            "meter": {"concurrency": 4},
            "min": 0,
            "max": 1,
            "launch": {
                "command": [sys.executable, "-m", "extproc", "engine", "--port", "{port}"],
            },
        }
    },
}


@pytest.fixture(scope="module")
def fleet(live, tmp_path_factory):
    """Both installations under load, with rules that know some time of it."""
    prometheus.need("prometheus")
    with live.holding(_fleet(tmp_path_factory.mktemp("prometheus"))) as item:
        yield item


@contextlib.asynccontextmanager
async def _fleet(folder):
    async with contextlib.AsyncExitStack() as items:
        fleet = await items.enter_async_context(started_fleet(folder))
        scaled = await items.enter_async_context(
            installation.installed(arguments=["--config-text", json.dumps(SCALED)])
        )
        scaled.alarms.append("engine 1 ended")
        assert (await http1.ask(scaled.port, PATH, body(0, 0))).status == 200
        fleet.prometheus = await prometheus.Prometheus.start(
            fleet.children,
            folder,
            {"extproc": fleet.place.pages, "scaled": scaled.pages},
            prometheus.shortened_groups(files.groups()),
        )
        await items.enter_async_context(fleet.loaded())
        await fleet.returns("")
        await fleet.is_silent()
        yield fleet


@pytest.fixture
def victim(fleet, live):
    """An engine that is as the others before and after the test."""
    address = next(iter(fleet.engines))
    yield address
    live.run(fleet.arm(address))
    live.run(fleet.is_silent())


def test_every_staged_query_has_a_test():
    """A query that needs more than traffic names what a test of this file stages."""
    staged = {
        query.staged
        for board in boards.BOARDS
        for panel in board.panels()
        for query in panel.queries
    }
    assert staged == {*USUAL, *STAGED}


#: What is there as soon as there is traffic.
USUAL = (
    "",
    "autoscaling",
    "bodies of responses",
    "chunks of streams",
    "flow control",
    "recording",
    "shadow",
)

#: What tests of this file stage.
STAGED = (
    "client leaves",
    "engine errors",
    "engine killed",
    "large body",
    "no endpoint",
    "requests wait",
    "scrapes fail",
)


async def test_queries_return_series(fleet):
    """After some traffic, every query of every panel does, but for those of failures."""
    for staged in USUAL:
        await fleet.returns(staged)
    assert not await fleet.prometheus.rule_errors()


async def test_rules_return_series(fleet):
    """So does every recording rule, but for those of failures and of waits in the queue."""
    for rule in recording_rules.RECORDING_RULES:
        if not re.search("failed|queue", rule.record):
            await prometheus.until(
                lambda rule=rule: fleet.prometheus.query(rule.record), lambda rule=rule: rule.record
            )


#: Queries of the failure and saturation board of llm-d's guides, as far as they are of its endpoint
#: picker: ratio of errors, duration, rate, scheduler, plugins.
LLMD_QUERIES = (
    "sum(rate(llm_d_epp_request_error_total[10s])) / sum(rate(llm_d_epp_request_total[10s]))",
    (
        "sum by (model_name) (rate(llm_d_epp_request_error_total[10s]))"
        " / sum by (model_name) (rate(llm_d_epp_request_total[10s]))"
    ),
    *(
        f"histogram_quantile({share}, sum by (le)"
        ' (rate(llm_d_epp_request_duration_seconds_bucket{model_name=~".*"}[10s])))'
        for share in (0.5, 0.9, 0.99)
    ),
    "sum by (model_name, target_model_name) (rate(llm_d_epp_request_total[10s]))",
    (
        "histogram_quantile(0.99, sum by (le)"
        " (rate(llm_d_epp_scheduler_e2e_duration_seconds_bucket[10s])))"
    ),
    (
        "histogram_quantile(0.99, sum by (le, plugin_type)"
        " (rate(llm_d_epp_plugin_duration_seconds_bucket[10s])))"
    ),
)


async def test_the_failure_board_of_llmd_has_data(fleet, victim):
    """With metrics under its names, each of its queries returns a number once requests failed."""
    async with fleet.filled():
        await fleet.arm(victim, "status=500")
        for promql in LLMD_QUERIES:

            async def has_number(promql=promql):
                values = [float(item["value"][1]) for item in await fleet.prometheus.query(promql)]
                return any(map(math.isfinite, values))

            await prometheus.until(has_number, lambda promql=promql: promql)


async def test_large_bodies(fleet):
    """Their panel has a series."""
    large = json.dumps({"model": "demo", "prompt": "word " * 300_000, "max_tokens": 1}).encode()

    async def ask():
        await http1.ask(fleet.place.port, "/v1/completions", large)

    async with again_and_again(ask):
        await fleet.returns("large body")


async def test_clients_that_leave(fleet):
    """Those that do not wait for an answer are shown."""

    async def leave():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await http1.ask(fleet.place.port, PATH, body(0, 0, tokens=4000))

    async with again_and_again(leave):
        await fleet.returns("client leaves")


async def test_a_slow_engine(fleet, victim):
    """Five times slower, it is far above the others, however little `adaptive` sends it then."""
    async with fleet.filled():
        await fleet.arm(victim, "slow=5")
        await fleet.panel_shows(boards.SLOW_ENGINE, lambda ratio: ratio > 3, endpoint=victim)
        await fleet.fires(boards.SLOW_ENGINE.alert, victim)
        await fleet.arm(victim)
        await fleet.is_silent(boards.SLOW_ENGINE.alert)


async def test_an_engine_that_hangs(fleet, victim):
    """Stopped in the middle of its requests, it is ejected."""
    process = fleet.engines[victim].process
    async with fleet.filled():
        process.send_signal(signal.SIGSTOP)
        try:
            await fleet.panel_shows(boards.HUNG_ENGINE, lambda value: value == 1, endpoint=victim)
            await fleet.fires(boards.HUNG_ENGINE.alert, victim)
        finally:
            process.send_signal(signal.SIGCONT)


async def test_an_engine_that_answers_errors(fleet, victim):
    """Its share of errors, its ejections and probes are there."""
    async with fleet.filled():
        await fleet.arm(victim, "status=500")
        await fleet.returns("engine errors")


async def test_an_engine_that_fails_some_requests(fleet, victim):
    """Too few to be ejected for long; the others serve all of theirs, and one line names it."""
    async with fleet.filled():
        await fleet.arm(victim, "status=500,rate=0.3")
        await fleet.panel_shows(boards.FAILING_ENGINE, lambda share: share > 0.05, endpoint=victim)
        await fleet.fires(boards.FAILING_ENGINE.alert, victim)
    lines = [line for line in fleet.place.lines if " requests fail " in line]
    assert any(f" endpoint={victim} status=500 " in line for line in lines), lines


async def test_a_cold_cache(fleet, victim):
    """The engine reports fewer cached tokens than predicted."""
    url = f"http://{victim}/reset_prefix_cache"

    async def reset():
        async with aiohttp.ClientSession() as http, http.post(url) as answer:
            assert answer.status == 200

    async with fleet.filled(), again_and_again(reset):
        await fleet.panel_shows(boards.COLD_CACHE, lambda ratio: ratio < 0.5, endpoint=victim)
        await fleet.fires(boards.COLD_CACHE.alert, victim)


async def test_a_full_queue(fleet, victim):
    """With slow engines and more clients than the queue takes, requests are rejected."""
    for address in fleet.engines:
        await fleet.arm(address, "slow=50")
    try:
        async with fleet.overloaded(120, tokens=400):
            await fleet.panel_shows(
                boards.FULL_QUEUE, lambda value: value > 0, status="429", cause="queue-full"
            )
            await fleet.returns("requests wait")
            await fleet.fires(boards.FULL_QUEUE.alert)
    finally:
        for address in fleet.engines:
            await fleet.arm(address)


async def test_no_endpoint_is_left(fleet, victim):
    """The pool has none that serves."""
    fleet.list_engines()
    try:
        await fleet.panel_shows(boards.NO_ENDPOINT, lambda value: value == 0, namespace="extproc")
        await fleet.fires(boards.NO_ENDPOINT.alert)
        await fleet.returns("no endpoint")
    finally:
        fleet.list_engines(*fleet.engines)


async def test_metrics_that_cannot_be_read(fleet, victim):
    """The result of scrapes says why."""
    await fleet.arm(victim, "metrics-status=500")
    await fleet.returns("scrapes fail")
    await fleet.panel_shows(boards.FAILED_SCRAPES, lambda value: value > 0, endpoint=victim)
    await fleet.fires(boards.FAILED_SCRAPES.alert, victim)


async def test_a_broken_configuration(fleet, victim):
    """The file that replaces a good one is not taken."""
    fleet.place.alarms.append("extproc.yaml")
    text = fleet.config.read_text()
    installation.replace_file(fleet.config, text.replace("max_requests", "most_requests"))
    try:
        await fleet.panel_shows(boards.WRONG_CONFIG, lambda value: value == 1)
        await fleet.fires(boards.WRONG_CONFIG.alert)
    finally:
        installation.replace_file(fleet.config, text)


async def test_a_picker_that_hangs(fleet, victim):
    """Prometheus misses it, and as the last one of its job the installation is down."""
    process = fleet.place.extproc.process
    process.send_signal(signal.SIGSTOP)
    try:
        await fleet.panel_shows(
            boards.STOPPED_PICKER, lambda value: value == 0, namespace="extproc"
        )
        await fleet.fires(boards.STOPPED_PICKER.alert)
        await fleet.fires("ExtprocDown")
    finally:
        process.send_signal(signal.SIGCONT)


async def test_an_engine_that_dies(fleet):
    """It cannot be reached, is ejected, and is back when it runs again."""
    victim = list(fleet.engines)[1]
    async with fleet.filled():
        fleet.engines[victim].process.kill()
        await fleet.engines[victim].process.wait()
        await fleet.panel_shows(boards.DEAD_ENGINE, lambda value: value == 0, endpoint=victim)
        await fleet.fires(boards.DEAD_ENGINE.alert, victim)
        await fleet.returns("engine killed")
    port = victim.rpartition(":")[2]
    fleet.engines[victim], _ = await fleet.children.engine(*ENGINE, "--port", port)
    await fleet.is_silent()
