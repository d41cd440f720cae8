"""Serves the metrics page and the models of an engine at many addresses of this machine, in this process."""

from __future__ import annotations

import itertools

from aiohttp import web

PAGE = """\
vllm:num_requests_running{{model_name="demo"}} 7
vllm:num_requests_waiting{{model_name="demo"}} 1
vllm:kv_cache_usage_perc{{model_name="demo"}} 0.42
vllm:prefix_cache_queries_total{{model_name="demo"}} {queries}
vllm:prefix_cache_hits_total{{model_name="demo"}} 700
vllm:lora_requests_info{{max_lora="4",running_lora_adapters="sql,chat",waiting_lora_adapters=""}} 1.0
"""

MODELS = {"object": "list", "data": [{"id": "demo", "object": "model"}]}


def addresses(count: int, port: int) -> list[str]:
    """So many addresses of this machine, with one port."""
    return [f"127.1.{at // 250}.{1 + at % 250}:{port}" for at in range(count)]


async def serve(port: int) -> web.AppRunner:
    """Answer scrapes of all addresses, and requests for their models.

    A counter moves from page to page: one that stands still shows nothing of a busy engine.
    """
    queries = itertools.count(1000)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=PAGE.format(queries=next(queries)))

    async def list_models(_: web.Request) -> web.Response:
        return web.json_response(MODELS)

    application = web.Application()
    application.add_routes([web.get("/metrics", answer), web.get("/v1/models", list_models)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", port).start()
    return runner
