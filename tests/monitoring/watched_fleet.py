"""An installation with simulated engines that a Prometheus watches, and its traffic."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import math
import re

import aiohttp

from extproc.demo import stack
from tests.e2e import http1, installation
from tests.monitoring import boards, prometheus

PATH = "/v1/chat/completions"

#: Engines of the fleet; three of four are a quicker quarter that one slow engine does not move.
ENGINES = 4

CONFIG = """
apiVersion: extproc/v1alpha1
kind: ExtProcConfig
flow_control: {enabled: true, max_requests: 4, timeout_s: 20}
health: {base_s: 1}
responses: {stream_sample_ratio: 1.0}
server: {llmd_metrics: true}
scheduling: {shadow: {strategy: least-load, sample_ratio: 1.0}}
decisions: {record: {file: RECORDING}}
pool: {endpoints_file: FILE}
"""


def config_text(folder, listed):
    """The configuration of the installation whose engines fail, which records in the folder."""
    text = CONFIG.replace("FILE", str(listed))
    return text.replace("RECORDING", str(folder / "decisions.jsonl"))


#: Clients, and characters of the prompt that each begins all its requests with.
CLIENTS, PREFIX_CHARS = 8, 6000

#: Seconds between two requests of a client.
PAUSE_S = 0.1

#: Seconds until a client of an overload asks again, most often after a refusal.
RETRY_S = 0.5


def body(number, turn, *, tokens=24):
    """A request of a client: its own long prompt, and something new; every other one is a stream."""
    words = f"client {number} " * (PREFIX_CHARS // 10)
    stream = {"stream": True, "stream_options": {"include_usage": True}} if turn % 2 else {}
    message = {"role": "user", "content": f"{words} turn {turn}"}
    request = {"model": "demo", "messages": [message], "max_tokens": tokens}
    return json.dumps({**request, **stream}).encode()


class WatchedFleet:
    """Two installations, the clients of the first one, and the Prometheus that watches both.

    Attributes:
        place: The installation whose engines fail.
        engines: Its engines, by address.
        listed: Its endpoints file.
        config: Its configuration file.
        prometheus: Scrapes both pickers, with all rules.
    """

    def __init__(self, place, children, engines, listed, config):
        self.place = place
        self.children = children
        self.engines = engines
        self.listed = listed
        self.config = config
        self.prometheus = None

    @contextlib.asynccontextmanager
    async def loaded(self):
        """All clients while the block runs; each ends after its next answer."""

        async def ask_again_and_again(number):
            for turn in itertools.count(1):
                if is_over:
                    break
                await self._ask(body(number, turn))
                await asyncio.sleep(PAUSE_S)

        is_over = False
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(ask_again_and_again(number))
            try:
                yield
            finally:
                is_over = True

    async def crowd(self, count, *, tokens):
        """So many further clients ask once, all at the same time."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(self._ask(body(CLIENTS + number, 0, tokens=tokens)))

    async def _ask(self, message):
        """Ask once; an engine may die meanwhile."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await http1.ask(self.place.port, PATH, message)

    def filled(self):
        """Crowds without a pause while the block runs.

        Each is of more requests than all engines may have open, so that every engine has some,
        whichever the strategy prefers.
        """
        return again_and_again(lambda: self.crowd(32, tokens=60))

    @contextlib.asynccontextmanager
    async def overloaded(self, count, *, tokens):
        """So many further clients while the block runs; each asks again a moment after its answer.

        With more of them than engines hold and the queue takes, the queue is full all the time.
        """

        async def ask(number):
            await self._ask(body(CLIENTS + number, 0, tokens=tokens))
            await asyncio.sleep(RETRY_S)

        async with contextlib.AsyncExitStack() as clients:
            for number in range(count):
                await clients.enter_async_context(again_and_again(functools.partial(ask, number)))
            yield

    def list_engines(self, *addresses):
        """Write the endpoints file."""
        installation.replace_file(self.listed, json.dumps({"endpoints": list(addresses)}))

    async def arm(self, address, *faults):
        """Replace the faults of an engine; none disarms all."""
        url = f"http://{address}/admin/faults"
        async with (
            aiohttp.ClientSession() as http,
            http.put(url, json={"faults": faults}) as answer,
        ):
            assert answer.status == 200

    async def shows(self, query):
        """The series of a query of a board, for all pools: value by labels."""
        promql = query.promql().replace("$__rate_interval", "10s")
        promql = re.sub(r"\$(namespace|pool|model)", ".*", promql)
        return {
            tuple(sorted(series["metric"].items())): float(series["value"][1])
            for series in await self.prometheus.query(promql)
        }

    async def returns(self, staged):
        """Wait until each query of a board that this was staged for returns a series."""
        missing = [
            query
            for board in boards.BOARDS
            for panel in board.panels()
            for query in panel.queries
            if query.staged == staged
        ]

        async def are_complete():
            for query in missing[:]:
                if any(map(math.isfinite, (await self.shows(query)).values())):
                    missing.remove(query)
            return not missing

        await prometheus.until(are_complete, lambda: [query.promql() for query in missing])

    async def fires(self, name, endpoint=""):
        """Wait until an alert fires."""
        firing = set()

        async def is_firing():
            firing.clear()
            firing.update(await self.prometheus.firing())
            return (name, endpoint) in firing

        await prometheus.until(is_firing, lambda: (name, endpoint, firing, self.place.lines[-20:]))

    async def is_silent(self, name=""):
        """Wait until no alert fires, or none of that name."""
        firing = set()

        async def is_silent():
            firing.clear()
            firing.update(await self.prometheus.firing())
            return not any(name in alert for alert, _ in firing)

        await prometheus.until(is_silent, lambda: firing)

    async def panel_shows(self, finding, holds, **labels):
        """Wait until a query of the panel has a series with these labels and such a value."""
        wanted, shown = set(labels.items()), {}

        async def is_shown():
            for query in finding.queries():
                shown[query.legend] = await self.shows(query)
                for series, value in shown[query.legend].items():
                    if wanted <= set(series) and holds(value):
                        return True
            return False

        await prometheus.until(is_shown, lambda: shown)


@contextlib.asynccontextmanager
async def started_fleet(folder):
    """Engines behind an installation that answers, without load."""
    listed, config = folder / "endpoints.yaml", folder / "extproc.yaml"
    config.write_text(config_text(folder, listed))
    async with contextlib.AsyncExitStack() as items:
        children = await items.enter_async_context(stack.stack())
        started = await asyncio.gather(*(children.engine(*ENGINE) for _ in range(ENGINES)))
        engines = {address: child for child, address in started}
        listed.write_text(json.dumps({"endpoints": list(engines)}))
        place = await items.enter_async_context(
            installation.installed(
                template="original-dst-buffered.yaml",
                arguments=["--config-file", str(config)],
            )
        )
        assert (await http1.ask(place.port, PATH, body(0, 0))).status == 200
        yield WatchedFleet(place, children, engines, listed, config)


#: A simulated engine. One that stood still longer than it keeps connections closes them when it goes on.
ENGINE = ("--keepalive-s", "600")


@contextlib.asynccontextmanager
async def again_and_again(action):
    """Call a coroutine function without a pause while the block runs."""

    async def repeat():
        while True:
            await action()

    task = asyncio.get_running_loop().create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
