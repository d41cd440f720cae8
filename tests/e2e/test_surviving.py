"""A real picker that is shown what once ended it: files, and the page of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal

import aiohttp

from extproc.demo import stack
from tests.e2e import installation
from tests.support import transport

HEAD = (
    "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n"
    "scrape: {busy_interval_s: 0.1, idle_interval_s: 0.1}\n"
)
PAGE = (
    "# TYPE vllm:num_requests_waiting gauge\n"
    'vllm:num_requests_waiting{{model_name="m"}} 0\n'
    "# TYPE vllm:cache_config_info gauge\n"
    'vllm:cache_config_info{{block_size="{0}",num_gpu_blocks="{0}"}} 1\n'
)
ARGUMENTS = (
    *("--secure-serving=false", "--grpc-port=0", "--grpc-health-port=0", "--metrics-port=0"),
    *transport.FLAGS,
)


class PageEngine:
    """Answers every request with one page."""

    def __init__(self):
        self.number = "16"
        self.requests = 0

    async def serve(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                body = PAGE.format(self.number).encode()
                head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
        writer.close()


async def until(holds):
    """Wait until what is looked at holds."""
    async with asyncio.timeout(300):
        while not await holds():
            await asyncio.sleep(0.1)


async def test_no_file_and_no_page_ends_the_process(tmp_path):
    """Each is a line and a count; the process stays, and what comes after is read."""
    config = tmp_path / "c.yaml"
    config.write_text(HEAD)
    engine = PageEngine()
    async with (
        # It waits for the end of its connections, which the picker holds.
        await asyncio.start_server(engine.serve, "127.0.0.1", 0) as listener,
        stack.stack() as children,
        aiohttp.ClientSession() as session,
    ):
        port = listener.sockets[0].getsockname()[1]
        child = await children.extproc(
            "--config-file", str(config), "--endpoints", f"127.0.0.1:{port}", *ARGUMENTS
        )
        (pages,) = re.findall(r"metrics on (\d+)", child.ready_line)

        async def metric(name):
            async with session.get(f"http://127.0.0.1:{pages}/metrics") as answer:
                page = await answer.text()
            result = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
            return float(result.group(1)) if result else 0.0

        for count, text in enumerate(("log: {level: \0}\n", 'x: !!int ""\n', "x: !!timestamp x\n")):
            installation.replace_file(config, HEAD + text)
            child.process.send_signal(signal.SIGHUP)

            async def refused(count=count):
                errors = await metric('extproc_config_reloads_total{result="error"}')
                return errors > count

            await until(refused)
        installation.replace_file(config, HEAD + "log: {level: debug}\n")
        child.process.send_signal(signal.SIGHUP)

        async def mended():
            return await metric('extproc_config_reloads_total{result="ok"}') > 0

        await until(mended)
        engine.number = "1e300"
        requested = engine.requests

        async def scraped():
            return engine.requests > requested + 2

        await until(scraped)
        assert child.process.returncode is None
        assert await metric("extproc_config_reload_failed") == 0.0

        async def measured():
            return await metric("extproc_event_loop_lag_seconds_count") > 0

        await until(measured)
