"""Requests that wait for capacity, through a real Envoy in every body mode."""

from __future__ import annotations

import asyncio
import functools
import json

import pytest

from tests.e2e import backend, http1, installation
from tests.e2e.test_modes import CHAT, MODES, every_mode

PATH = "/v1/chat/completions"

CONFIG = """
apiVersion: extproc/v1alpha1
kind: ExtProcConfig
scrape: {enabled: false}
scheduling: {strategy: round-robin}
flow_control: {enabled: true, empty_timeout_s: 50}
pool: {endpoints_file: FILE}
"""


@pytest.fixture(scope="module")
def engine(live):
    with live.holding(backend.backend()) as item:
        yield item


@pytest.fixture(scope="module")
def listeners():
    return {}


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """The endpoints file; empty at first."""
    path = tmp_path_factory.mktemp("holding") / "endpoints.yaml"
    path.write_text("endpoints: []\n")
    return path


@pytest.fixture(scope="module")
def place(live, listeners, listed, binary):
    change = lambda config: every_mode(config, listeners)  # noqa: E731  keeps the port table at hand
    config = CONFIG.replace("FILE", str(listed))
    with live.holding(
        installation.installed(change=change, arguments=["--config-text", config], binary=binary)
    ) as item:
        yield item


async def leave(fixture, listed, engine):
    """Take the engine out of the list, until the picker knows."""
    installation.replace_file(listed, "endpoints: []\n")
    up = f'extproc_endpoint_up{{endpoint="{engine.address}"}}'
    await fixture.until(lambda result: up not in result)


def come(listed, engine):
    """Put the engine into the list."""
    installation.replace_file(listed, f"endpoints: ['{engine.address}']\n")


@pytest.fixture
def empty(live, place, listed, engine):
    """The pool is empty at first; the call brings the engine."""
    live.run(leave(place, listed, engine))
    return functools.partial(come, listed, engine)


async def waiting(fixture, count):
    """Wait until so many requests wait."""
    await fixture.until(lambda result: result.get("extproc_flow_control_queue_size") == count)


@pytest.fixture(scope="module")
def answers(live, place, listeners, listed, engine):
    """Answers to two requests in each mode, all of which waited for the first engine."""

    async def wait_in_every_mode():
        await leave(place, listed, engine)
        async with asyncio.TaskGroup() as tasks:
            requested = {
                modes: [
                    tasks.create_task(http1.ask(listeners[modes], PATH, body))
                    for body in (CHAT, CHAT)
                ]
                for modes in MODES
            }
            await waiting(place, 2 * len(MODES))
            come(listed, engine)
        await waiting(place, 0)
        return {modes: [task.result() for task in queued] for modes, queued in requested.items()}

    return live.run(wait_in_every_mode())


@pytest.mark.parametrize("modes", MODES, ids=["-".join(pair) for pair in MODES])
async def test_a_request_waits_for_the_first_engine(answers, engine, modes):
    """Held while there is no engine, answered by the first that comes, byte for byte."""
    for answer in answers[modes]:
        assert answer.status == 200
        assert json.loads(answer.body)["by"] == engine.address
        assert json.loads(answer.body)["bytes"] == len(CHAT)


async def test_requests_without_a_body_wait_too(place, listeners, empty):
    """GET is held as well."""
    async with asyncio.TaskGroup() as tasks:
        requested = tasks.create_task(http1.ask(listeners[MODES[0]], "/v1/other"))
        await waiting(place, 1)
        empty()
    assert requested.result().status == 200


async def test_a_wait_ends_at_the_timeout_of_the_client(place, listeners, empty):
    """503 with Retry-After once the header's time is over."""
    answer = await http1.ask(
        listeners[MODES[0]], PATH, CHAT, headers=[("x-extproc-queue-timeout-ms", "200")]
    )
    assert answer.status == 503
    assert int(answer.head.get("retry-after")) >= 1
    assert answer.head.get("x-llm-d-request-dropped-reason") == "rejected-no-endpoints"


async def test_a_client_that_leaves_is_removed_at_once(place, listeners, empty):
    """Nothing waits for it any longer."""
    async with http1.calling(listeners[MODES[0]]) as call:
        await call.start("POST", PATH, [("content-length", str(len(CHAT)))])
        await call.send(CHAT)
        await waiting(place, 1)
    await waiting(place, 0)
    assert (await place.metrics())['extproc_flow_control_requests_total{outcome="cancelled"}'] == 1
