"""Measures ten thousand requests that wait in flow control until an engine comes.

    python -m bench.holding [--requests N] [--rounds N] [--write]

One picker without endpoints, one client that speaks ext_proc to it over loopback. Memory is the
picker's resident set before, while all wait, and after they left; the release is timed from the
first answer to the last, client included. Order within a tenant is held by tests/holding. The same
is done with the default strategy, which remembers every prompt, and with a server that only reads and
waits, `bench.holding_floor`: what gRPC itself does. Figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import grpc
import uvloop

from bench import rig
from extproc.demo import stack
from extproc.wire.pb import ext_proc_pb2 as pb

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHANNELS = 20
TENANTS = 10
PROMPT_BYTES = 2000

#: Seconds until streams are read or gone, and memory is given back (a second after they left).
SETTLE_S = 3.0

CONFIG = """
apiVersion: extproc/v1alpha1
kind: ExtProcConfig
{more}
limits: {{max_streams: 20000}}
flow_control: {{enabled: true, busy_s: 1000, fairness: round-robin}}
pool: {{endpoints_file: {file}}}
"""

#: What picks by what requests do, and the default, whose signals come from scrapes.
LEAST = "scrape: {enabled: false}\nscheduling: {strategy: least-request}"
DEFAULT = ""


def messages(number: int) -> list[bytes]:
    """Headers and body of one request."""
    headers = {
        ":method": "POST",
        ":path": "/v1/chat/completions",
        "x-request-id": str(number),
        "x-llm-d-inference-fairness-id": f"tenant-{number % TENANTS}",
    }
    opened = pb.ProcessingRequest()
    for name, value in headers.items():
        header = opened.request_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    opened.protocol_config.request_body_mode = 4
    body = pb.ProcessingRequest()
    body.request_body.body = rig.chat(PROMPT_BYTES, salt=str(number))
    body.request_body.end_of_stream = True
    return [opened.SerializeToString(), body.SerializeToString()]


class ExtProcClient:
    """Thousands of streams, each with one request.

    Attributes:
        times: When each answer came.
    """

    def __init__(self, port: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channels = [
            grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) for _ in range(CHANNELS)
        ]
        self.times: list[float] = []
        self.num_requests = 0
        self.calls: list[grpc.aio.StreamStreamCall] = []

    async def ask(self, number: int) -> None:
        """One request until its answer."""
        process = self.channels[number % CHANNELS].stream_stream(METHOD)
        call = process()
        for message in messages(number):
            await call.write(message)
        self.num_requests += 1
        answer = await call.read()
        assert answer is not grpc.aio.EOF, number
        self.times.append(time.perf_counter())
        # Answers take longer than the release: streams end after it.
        self.calls.append(call)

    async def close(self) -> None:
        """End all streams and connections."""
        for call in self.calls:
            call.cancel()
        for channel in self.channels:
            await channel.close()


async def held(pages: int) -> float:
    """Requests that wait."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pages)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    page = (await reader.read()).decode()
    writer.close()
    return float(page.partition('extproc_flow_control_queue_size{pool=""} ')[2].split("\n")[0])


async def crowd(client: ExtProcClient, requests: int, tasks: asyncio.TaskGroup) -> None:
    """Ask for all of it, not faster than it is read."""
    for number in range(requests):
        tasks.create_task(client.ask(number))
        if number % 200 == 199:
            while client.num_requests < number - 400:
                await asyncio.sleep(0.01)
    while client.num_requests < requests:
        await asyncio.sleep(0.01)


async def once(requests: int, *, more: str) -> dict[str, float]:
    """Hold and release; `more` is the rest of the configuration."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "endpoints.yaml"
        listed.write_text("endpoints: []\n")
        config = Path(folder) / "extproc.yaml"
        config.write_text(CONFIG.format(file=listed, more=more))
        ports = [stack.free_port() for _ in range(3)]
        flags = ("--grpc-port", "--grpc-health-port", "--metrics-port")
        words = [word for pair in zip(flags, map(str, ports), strict=True) for word in pair]
        async with stack.stack() as children:
            server = await children.extproc(
                "--config-file", str(config), "--secure-serving", "false", *words
            )
            running = rig.Rig(0, ports[2], server.process.pid, children)
            client = ExtProcClient(ports[0])
            before = running.memory_bytes()
            async with asyncio.TaskGroup() as tasks:
                await crowd(client, requests, tasks)
                while await held(ports[2]) < requests:
                    await asyncio.sleep(0.05)
                holding = running.memory_bytes()
                listed.write_text("endpoints: ['127.0.0.1:9']\n")
            await client.close()
            while await held(ports[2]):
                await asyncio.sleep(0.05)
            await asyncio.sleep(SETTLE_S)
            after = running.memory_bytes()
    return {
        "requests": requests,
        "release_s": round(max(client.times) - min(client.times), 3),
        "before_mib": round(before / 2**20, 1),
        "holding_mib": round(holding / 2**20, 1),
        "after_mib": round(after / 2**20, 1),
    }


async def floor(requests: int) -> dict[str, float]:
    """Memory that gRPC itself takes for as many streams, and keeps."""
    port = stack.free_port()
    async with stack.stack() as children:
        argv = [sys.executable, "-m", "bench.holding_floor", str(port)]
        server = await children.start("floor", argv, ready="floor is ready")
        running = rig.Rig(0, 0, server.process.pid, children)
        client = ExtProcClient(port)
        before = running.memory_bytes()
        async with asyncio.TaskGroup() as tasks:
            await crowd(client, requests, tasks)
            await asyncio.sleep(SETTLE_S)
            holding = running.memory_bytes()
            os.kill(running.pid, signal.SIGUSR1)
        await client.close()
        await asyncio.sleep(SETTLE_S)
        after = running.memory_bytes()
    return {
        "floor_release_s": round(max(client.times) - min(client.times), 3),
        "floor_before_mib": round(before / 2**20, 1),
        "floor_holding_mib": round(holding / 2**20, 1),
        "floor_after_mib": round(after / 2**20, 1),
    }


async def main(*, requests: int, rounds: int, write: bool) -> None:
    runs = []
    for _ in range(rounds):
        default = await once(requests, more=DEFAULT)
        runs.append(
            {
                **await once(requests, more=LEAST),
                **{f"default_{name}": value for name, value in default.items()},
                **await floor(requests),
            }
        )
        print(runs[-1], flush=True)
    figures = {name: statistics.median(run_row[name] for run_row in runs) for name in runs[0]}
    figures |= {"requests": requests, "rounds": rounds}
    if write:
        rig.write("holding", "python -m bench.holding --write", figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    uvloop.run(main(requests=args.requests, rounds=args.rounds, write=args.write))
