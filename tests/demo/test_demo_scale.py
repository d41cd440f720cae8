from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from aiohttp import test_utils, web

from extproc.cli import main
from extproc.demo import demo_scale, scaling_plot, stack


@pytest.mark.parametrize("name", ["charts.jpg", "charts.pdf", "charts"])
def test_plots_have_a_known_format(tmp_path, capsys, name):
    """The name is refused before the demo, whose results an error at its end would take."""
    assert main.main(["demo-scale", "--plot", str(tmp_path / name)]) == 2
    output = capsys.readouterr()
    assert "--plot: expected a name that ends in .svg or .png" in output.err
    assert not output.out


def test_what_is_not_answered_is_lost_and_the_demo_goes_on(monkeypatch):
    """Requests that time out are counted, and a page that is not there is read the next time."""
    monkeypatch.setattr(demo_scale, "_LOOK_S", 0.0)
    pages_read = 0

    async def show_page(_):
        nonlocal pages_read
        pages_read += 1
        if pages_read == 1:
            await asyncio.Event().wait()
        return web.Response(text='extproc_scaling_queue_depth{pool=""} 7')

    async def answer_never(_):
        await asyncio.Event().wait()

    async def run():
        app = web.Application()
        app.router.add_get("/metrics", show_page)
        app.router.add_post("/v1/completions", answer_never)
        chart = scaling_plot.ScalingPlot()
        impatient = aiohttp.ClientTimeout(total=0.05)
        async with (
            test_utils.TestServer(app, handler_cancellation=True, shutdown_timeout=0.01) as server,
            aiohttp.ClientSession(timeout=impatient) as http,
        ):
            place = demo_scale.DemoAddresses(server.port, server.port)
            watching = asyncio.ensure_future(demo_scale.watch(http, place, chart))
            answer = await demo_scale.ask(http, place)
            while not chart.rows:
                await asyncio.sleep(0)
            watching.cancel()
        return answer, chart.rows[0].depth

    answer, depth = asyncio.run(run())
    assert (answer.status, answer.error, depth) == (0, "TimeoutError()", 7.0)


def test_a_client_whose_request_is_lost_asks_no_more():
    """Without Envoy, thousands of requests would be lost in a moment, and listed at the end."""

    async def run():
        port = stack.free_port()
        async with aiohttp.ClientSession() as http:
            place = demo_scale.DemoAddresses(port, port)
            return await demo_scale.ask_until(http, place, time.monotonic() + 1.0)

    (lost,) = asyncio.run(run())
    assert lost.status == 0
