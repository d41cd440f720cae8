"""A picker of this process for the tests of the console, whose traffic is written by hand."""

from __future__ import annotations

import contextlib
import json
import time

from aiohttp import web

from extproc.config.pool_sections import SchedulingSection
from extproc.config.settings import ScrapeSection
from extproc.demo import stack
from extproc.request import HttpRequest, RequestLabels
from tests.support import serving
from tests.support.waiting import until

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")

#: Metrics of an engine.
PAGE = """\
vllm:num_requests_running{model_name="demo"} 7
vllm:num_requests_waiting{model_name="demo"} 1
vllm:kv_cache_usage_perc{model_name="demo"} 0.42
vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql",waiting_lora_adapters=""} 1.0
"""

#: A model, a request id and a tenant are text of clients.
HOSTILE = "<img src=x onerror=alert(1)>"


class ConsoleScene:
    """A picker with some traffic.

    Attributes:
        picker: The composition root.
        port: Port of its pages.
    """

    def __init__(self, running):
        self.picker = running.picker
        self.port = running.ports.pages

    def open(self, request_id, *, model="demo", status="200", pool=""):
        """Let a request be routed and answered, but not end; what ends it, and its endpoint.

        Args:
            pool: Name of its pool, which is the host as well; empty for the only one.
        """
        picker, now = self.picker, time.monotonic()
        message = {"role": "user", "content": "word " * 400}
        body = json.dumps({"model": model, "messages": [message]}).encode()
        headers = {":method": "POST", ":path": "/v1/chat/completions", ":authority": pool}
        decision = picker.pool_registry.pool_selector.route(HttpRequest(headers, body), now).outcome
        recorder = picker.servicer.shared.observer.observe_request(pool)
        recorder.on_routed(
            decision,
            request_id=request_id,
            labels=RequestLabels(model, model, "none", 0),
            trace_id="",
            now=now,
            duration_s=0.0001,
        )
        recorder.on_response_headers(
            0.05, elapsed_s=0.051, status=status, is_stream=False, is_shown=True
        )
        address = decision.endpoints[0].address

        def end():
            recorder.on_usage({"prompt": 400, "completion": 20})
            recorder.on_finished(endpoint=address, status=status, duration_s=0.4)

        return end, address

    def route(self, request_id, **about):
        """Let a request be routed, answered and recorded; its endpoint."""
        end, address = self.open(request_id, **about)
        end()
        return address


@contextlib.asynccontextmanager
async def engines():
    """Servers whose metrics are always the same; their addresses."""
    port = stack.free_port()

    async def answer(_):
        return web.Response(text=PAGE)

    application = web.Application()
    application.add_routes([web.get("/metrics", answer)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    for host in HOSTS:
        await web.TCPSite(runner, host, port).start()
    try:
        yield [f"{host}:{port}" for host in HOSTS]
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def picker(**server):
    """A running picker that has scraped its engines."""
    async with engines() as addresses:
        settings = serving.settings(*addresses, **server)
        changes = {
            "scrape": ScrapeSection(),
            "scheduling": SchedulingSection(strategy="adaptive"),
        }
        async with serving.running(settings, **changes) as running:
            await running.sync()
            await until(lambda: running.picker.readiness.ready)
            yield running


@contextlib.asynccontextmanager
async def busy_scene():
    """A picker that routed twenty requests, and one whose text is hostile."""
    async with picker() as running:
        scene = ConsoleScene(running)
        for number in range(20):
            scene.route(f"request-{number}")
        scene.route(f"id {HOSTILE}", model=HOSTILE, status="500")
        yield scene
