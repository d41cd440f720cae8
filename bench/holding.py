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
import collections
import functools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import uvloop

from bench import rig
from bench.stream_load import HEADER_BLOCK, framed
from extproc.demo import stack
from extproc.http2 import frames
from extproc.wire.pb import ext_proc_pb2 as pb

CONNECTIONS = 20
TENANTS = 10
PROMPT_BYTES = 2000

#: Seconds until all that was sent is read, and until memory is given back.
SETTLE_S = 3.0
GONE_S = 10.0

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


class HeldStreams(asyncio.Protocol):
    """One connection with many streams, each of one request.

    Args:
        numbers: Numbers of the requests.
        times: When each answer came; filled here.
    """

    def __init__(self, numbers: Sequence[int], times: list[float]) -> None:
        self._numbers = numbers
        self._times = times
        self._transport: asyncio.Transport
        self._buffer = b""
        self._window = frames.DEFAULT_WINDOW_BYTES
        self._unsent: collections.deque[bytes] = collections.deque()
        self._unanswered: set[int] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send all requests, as far as the window allows."""
        self._transport = cast("asyncio.Transport", transport)
        most = frames.MAX_WINDOW_BYTES
        self._transport.write(
            frames.PREFACE
            + frames.build_settings([(frames.INITIAL_WINDOW_SIZE, most)])
            + frames.build_window_update(0, most - frames.DEFAULT_WINDOW_BYTES)
        )
        for at, number in enumerate(self._numbers):
            stream_id = 2 * at + 1
            self._unanswered.add(stream_id)
            data = framed(messages(number))
            self._unsent.append(
                frames.build_frame(frames.HEADERS, frames.END_HEADERS, stream_id, HEADER_BLOCK)
                + frames.build_frame(frames.DATA, 0, stream_id, data)
            )
        self._send()

    def data_received(self, data: bytes) -> None:
        """Handle frames."""
        data = self._buffer + data
        at, end = 0, len(data)
        while end - at >= frames.HEAD_BYTES:
            high, low, kind, flags, stream_id = frames.unpack_head(data, at)
            start = at + frames.HEAD_BYTES
            stop = start + (high << 8 | low)
            if stop > end:
                break
            at = stop
            self._on_frame(kind, flags, stream_id, data[start:stop])
        self._buffer = data[at:]

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.DATA and stream_id in self._unanswered:
            self._unanswered.remove(stream_id)
            self._times.append(time.perf_counter())
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._transport.write(frames.build_frame(frames.SETTINGS, frames.ACK, 0))
        elif kind == frames.PING and not flags & frames.ACK:
            self._transport.write(frames.build_frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.WINDOW_UPDATE and not stream_id:
            self._window += frames.read_number(payload)
            self._send()
        elif kind in (frames.RST_STREAM, frames.GOAWAY):
            raise ConnectionError(f"the server sent a frame of type {kind}: {payload!r}")

    def _send(self) -> None:
        output = []
        while self._unsent and len(self._unsent[0]) <= self._window:
            output.append(self._unsent.popleft())
            self._window -= len(output[-1])
        self._transport.write(b"".join(output))

    def close(self) -> None:
        """End all streams with the connection."""
        self._transport.close()


async def held(pages: int) -> float:
    """Requests that wait."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pages)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    page = (await reader.read()).decode()
    writer.close()
    return float(page.partition('extproc_flow_control_queue_size{pool=""} ')[2].split("\n")[0])


async def open_streams(port: int, requests: int, times: list[float]) -> list[HeldStreams]:
    """Send all requests, over a few connections."""
    loop = asyncio.get_running_loop()
    clients = []
    for first in range(CONNECTIONS):
        numbers = range(first, requests, CONNECTIONS)
        connected = await loop.create_connection(
            functools.partial(HeldStreams, numbers, times), "127.0.0.1", port
        )
        clients.append(connected[1])
    return clients


async def wait_for_answers(
    clients: Sequence[HeldStreams], times: Sequence[float], requests: int
) -> None:
    """Wait until every request is answered, then close the connections."""
    while len(times) < requests:
        await asyncio.sleep(0.02)
    for client in clients:
        client.close()


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
            before = running.memory_bytes()
            times: list[float] = []
            clients = await open_streams(ports[0], requests, times)
            while await held(ports[2]) < requests:
                await asyncio.sleep(0.05)
            await asyncio.sleep(SETTLE_S)
            holding = running.memory_bytes()
            listed.write_text("endpoints: ['127.0.0.1:9']\n")
            await wait_for_answers(clients, times, requests)
            await asyncio.sleep(GONE_S)
            after = running.memory_bytes()
    return {
        "requests": requests,
        "release_s": round(max(times) - min(times), 3),
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
        before = running.memory_bytes()
        times: list[float] = []
        clients = await open_streams(port, requests, times)
        await asyncio.sleep(SETTLE_S)
        holding = running.memory_bytes()
        os.kill(running.pid, signal.SIGUSR1)
        await wait_for_answers(clients, times, requests)
        await asyncio.sleep(GONE_S)
        after = running.memory_bytes()
    return {
        "floor_release_s": round(max(times) - min(times), 3),
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
