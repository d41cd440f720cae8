"""Requests that wait for the tokens of their prompts, on both transports and with flow control."""

import asyncio
import contextlib
import json

import grpc
import pytest

from extproc.endpoint import Endpoint
from extproc.routing.pool_selector import PoolRoute
from tests.server.test_stream_flow_control import A, WaitingStreamFixture, refusals, turned
from tests.support import ext_proc_script, serving
from tests.support.pool_fixture import PoolFixture

BODY = json.dumps({"model": "m", "prompt": "x" * 400}).encode()


class RenderListener:
    """Lets requests wait until the test ends it, as often as it is set to."""

    def __init__(self, count=1):
        self.count = count
        self.waits, self.noted = [], []

    def note(self, decision, raw):
        self.noted.append((decision, raw))

    def render_ahead(self, decision, raw):
        if len(self.waits) >= self.count:
            return None
        self.waits.append(asyncio.get_running_loop().create_future())
        return self.waits[-1]


@contextlib.asynccontextmanager
async def waiting(transport, *addresses):
    """A served pool with a stream whose request waits."""
    house = PoolFixture(dict.fromkeys(addresses or (ext_proc_script.ADDRESS,)))
    listener = RenderListener()
    house.director.set_prompt_listener(listener)
    async with serving.serving(house, transport=transport) as scene:
        stream = scene.stream()
        await stream.say(
            ext_proc_script.request_headers({**ext_proc_script.PLAIN, ":path": "/v1/completions"}),
            ext_proc_script.request_body(BODY, ends=True),
        )
        async with asyncio.timeout(300):
            while not listener.waits:
                await asyncio.sleep(0.001)
        yield scene, house, listener, stream


transports = pytest.mark.parametrize("transport", ["native", "grpcio"])


@transports
async def test_a_request_is_routed_once_its_wait_is_over(transport):
    """Nothing is charged before; the choice is made anew, for the pool as it is then."""
    async with waiting(transport) as (scene, house, listener, stream):
        assert house.in_flight == 0
        house.store.set_endpoints([Endpoint("10.0.0.9:8000")], house.now)
        listener.waits[0].set_result(None)
        (route,) = await stream.hear()
        assert route.headers["x-gateway-destination-endpoint"] == "10.0.0.9:8000"
        assert [decision.endpoints[0].address for decision, _ in listener.noted] == [
            "10.0.0.9:8000"
        ]
        await stream.hear()
        assert await stream.end() is grpc.StatusCode.OK
        await scene.idle()
        assert (house.in_flight, scene.servicer.shared.body_budget.held_bytes) == (0, 0)


@transports
async def test_a_client_may_leave_while_its_request_waits(transport):
    """Nothing of it stays, whenever the wait ends."""
    async with waiting(transport) as (scene, house, listener, stream):
        stream.call.cancel()
        await scene.idle()
        assert (house.in_flight, scene.servicer.shared.body_budget.held_bytes) == (0, 0)
        if not listener.waits[0].done():
            listener.waits[0].set_result(None)
        await asyncio.sleep(0)
        assert not listener.noted
        assert house.in_flight == 0
        assert scene.servicer.shared.observer.counters.streams == {"cancelled": 1}
        assert not scene.servicer.shared.observer.counters.exceptions


@transports
async def test_a_drain_waits_for_a_request_that_waits(transport):
    """It ends once its request is decided."""
    async with waiting(transport) as (scene, _, listener, stream):
        released = asyncio.ensure_future(scene.drain(300.0, apart_s=0.0))
        listener.waits[0].set_result(None)
        (route,) = await stream.hear()
        assert route.headers["x-gateway-destination-endpoint"] == ext_proc_script.ADDRESS
        await stream.hear()
        await released
        assert await stream.call.code() is grpc.StatusCode.OK


async def test_a_request_is_queued_behind_its_wait():
    """Flow control sees it once its tokens are there, and a rejection is answered."""
    fixture = WaitingStreamFixture(A, timeout_s=5.0)
    listener = RenderListener()
    fixture.pool_fixture.director.set_prompt_listener(listener)
    stream, answers = fixture.send()
    assert not answers
    assert stream.is_waiting
    fixture.busy(A)
    listener.waits[0].set_result(None)
    assert not list(stream.resume_rendered())
    assert stream.queued is not None
    assert stream.unrendered is None
    fixture.pool_fixture.now += 6.0
    fixture.flow_controller.notify_capacity()
    assert refusals(stream.resume(await turned(stream))) == [429]
    stream.finish()
    assert fixture.pool_fixture.in_flight == 0


@pytest.mark.parametrize("others", [0, 1])
async def test_a_request_whose_pool_is_removed_is_routed_anew(others):
    """It goes to a pool that is left, or gets the answer of a request that comes now."""
    fixture, other = WaitingStreamFixture(A), PoolFixture({"10.0.0.9:8000": None})
    removed = fixture.pool_fixture.director
    removed.set_prompt_listener(RenderListener())
    stream, _ = fixture.send()
    fixture.shared.pool_selector.reconfigure([PoolRoute("other", other.director)][:others])
    answers = list(stream.resume_rendered())
    assert refusals(answers) == [404] * (1 - others)
    assert (fixture.pool_fixture.in_flight, other.in_flight) == (0, others)
    stream.finish()
    assert other.in_flight == 0
    fixture.flow_controller.close()


async def test_a_request_that_left_is_labelled_by_its_model():
    """It counts as abandoned before an endpoint was chosen."""
    fixture = WaitingStreamFixture(A)
    fixture.pool_fixture.director.set_prompt_listener(RenderListener())
    stream, _ = fixture.send()
    stream.finish("cancelled")
    assert stream.unrendered is None
    assert fixture.pool_fixture.in_flight == 0
    assert not fixture.counters.exceptions


async def test_a_bug_in_the_wait_costs_no_request():
    """One that raises is counted, and so is one of the choice behind it."""
    fixture = WaitingStreamFixture(A)
    director = fixture.pool_fixture.director

    class Faulty(RenderListener):
        def render_ahead(self, decision, raw):
            raise ValueError

    director.set_prompt_listener(Faulty())
    stream, answers = fixture.send()
    assert answers
    assert not stream.is_waiting
    stream.finish()
    listener = RenderListener()
    director.set_prompt_listener(listener)
    stream, _ = fixture.send()
    director.decide = None
    assert list(stream.resume_rendered())
    stream.finish()
    assert fixture.counters.exceptions.total() == 2
    with pytest.raises(RuntimeError, match="waits for no tokens"):
        stream.resume_rendered()
