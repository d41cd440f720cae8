from __future__ import annotations

import asyncio
import logging

import grpc
import pytest

from extproc.decision import NO_ENDPOINTS
from extproc.server import app
from tests.support import ext_proc_script, serving
from tests.support.waiting import until


async def test_an_exception_in_the_drain_does_not_shorten_it(monkeypatch):
    """Every step of the drain raises; the drain goes on to its end all the same."""
    settings = serving.settings("127.0.0.11:9")
    async with serving.running(settings) as running:
        await running.sync()
        picker = running.picker

        async def wrong(*_):
            raise OSError

        monkeypatch.setattr(picker.autoscaler, "hand_over", wrong)
        monkeypatch.setattr(picker.servicer, "drain_streams", wrong)
        skip_drain = asyncio.Event()
        skip_drain.set()
        await picker.drain(skip_drain)
        assert picker.readiness.draining
        assert picker.counters.supervisor.failures["drain"] == 2
        monkeypatch.undo()


async def test_a_drain_ends_once_no_data_plane_is_connected():
    """A drain without a connected data plane is over at once; a connection keeps it going."""
    settings = serving.settings("127.0.0.11:9", drain_timeout_s=300.0)
    async with serving.running(settings) as running:
        await running.sync()
        await running.picker.drain(asyncio.Event())
    if settings.server.transport == "grpcio":
        return  # it does not show its connections
    async with serving.running(settings) as running:
        await running.sync()
        async with running.channel() as channel:
            await channel.channel_ready()
            draining = asyncio.ensure_future(running.picker.drain(asyncio.Event()))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not draining.done()
        await draining


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("transport", ["native", "grpcio"])
async def test_a_drain_waits_for_further_streams_of_a_data_plane(transport, is_over, caplog):
    """A first stream that is open keeps a drain going, and one that ended before it as well."""
    settings = serving.settings("127.0.0.11:9", drain_timeout_s=300.0, transport=transport)
    async with serving.running(settings) as running:
        await running.sync()
        picker, skip_drain = running.picker, asyncio.Event()
        async with running.channel() as channel:
            stream = serving.Stream(channel)
            headers = {":method": "POST", ":path": "/v1/completions", "x-request-id": "r"}
            await stream.say(ext_proc_script.request_headers(headers, ends=True))
            await stream.hear()
            if is_over:
                await stream.call.done_writing()
                await stream.rest()
                assert (picker.counters.streams_open, picker.counters.streams.total()) == (0, 1)
            draining = asyncio.ensure_future(picker.drain(skip_drain))
            for _ in range(100):
                await asyncio.sleep(0)
            # The log, as a drain that waits for no stream ends after an open one all the same.
            assert "drain is over" not in caplog.text
            del stream  # or its connection outlives the channel
        skip_drain.set()
        await draining


@pytest.mark.parametrize("transport", ["native", "grpcio"])
async def test_a_drain_fails_requests_that_do_not_become_complete(transport, monkeypatch):
    """Envoy must not go on without an endpoint: the stream ends with UNAVAILABLE, not with OK."""
    monkeypatch.setattr(app, "_STREAM_END_S", 0.01)
    settings = serving.settings("127.0.0.11:9", transport=transport)
    async with serving.running(settings) as running:
        await running.sync()
        async with running.channel() as channel:
            stream = serving.Stream(channel)
            headers = {":method": "POST", ":path": "/v1/completions", "x-request-id": "r"}
            await stream.say(ext_proc_script.request_headers(headers, ends=False))
            await until(lambda: running.picker.counters.streams_open)
            skip_drain = asyncio.Event()
            skip_drain.set()
            await running.picker.drain(skip_drain)
            assert await stream.call.code() is grpc.StatusCode.UNAVAILABLE
            del stream  # or its connection outlives the channel


async def test_a_drain_on_grpcio_waits_for_a_data_plane_that_only_checks_health():
    """Its connections are not shown, but what asks for health may send a stream next."""
    settings = serving.settings("127.0.0.11:9", drain_timeout_s=300.0, transport="grpcio")
    async with serving.running(settings) as running:
        await running.sync()
        picker, skip_drain = running.picker, asyncio.Event()
        async with running.channel() as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            await check(b"")
            draining = asyncio.ensure_future(picker.drain(skip_drain))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not draining.done()
        skip_drain.set()
        await draining


async def test_refusals_of_the_last_minute_are_logged_at_the_end(caplog):
    """Those since the last line too, and those of the drain."""
    caplog.set_level(logging.INFO, "extproc.pool")
    async with serving.running(serving.settings("127.0.0.11:9")) as running:
        await running.sync()
        pool = running.picker.counters.for_pool("")
        running.picker._failure_log.step(running.picker._clock())
        pool.record_rejection(NO_ENDPOINTS)
        running.picker._failure_log.step(running.picker._clock())
        for _ in range(2):
            pool.record_rejection(NO_ENDPOINTS)
    lines = [record for record in caplog.records if record.getMessage() == "requests refused"]
    assert [record.fields["count"] for record in lines] == [1, 2]


async def test_a_drain_in_a_pod_takes_its_time(monkeypatch):
    """A Service may still send a first stream to a pod, so its drain time is kept."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    async with serving.running(serving.settings("127.0.0.11:9", drain_timeout_s=300.0)) as running:
        await running.sync()
        skip_drain = asyncio.Event()
        draining = asyncio.ensure_future(running.picker.drain(skip_drain))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not draining.done()
        skip_drain.set()
        await draining
