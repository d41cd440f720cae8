"""Large bodies are read by another process: what it finds, and what happens when it does not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import select
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import grpc
import pytest

from extproc.decision import Rejection
from extproc.parsing import model_edit, surfaces
from extproc.prefix_cache import blocks
from extproc.request import HttpRequest
from extproc.server import large_bodies, parser_worker
from extproc.telemetry.counters import ProcessCounters
from tests.support import ext_proc_script, serving
from tests.support.pool_fixture import PoolFixture
from tests.support.virtual_loop import in_virtual_time

LIMIT = blocks.DEFAULT.limit_bytes
TEXT = json.dumps({"model": "m", "prompt": "some text, " * 120_000}).encode()
RAW = HttpRequest({":method": "POST", ":path": "/v1/completions"}, TEXT)
CHAT = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "x" * 1_200_000}]}
).encode()
LIMIT_S = 300.0

#: A client whose window stays at 64 KiB. Where it measures the connection, it may grow the window until
#: all of a body fits, and whether it does so depends on the times of its pings.
FIXED_WINDOW = [("grpc.http2.bdp_probe", 0)]


@contextlib.asynccontextmanager
async def reading(process=None, counters=None):
    """Large bodies, with their counters."""
    counters = counters or ProcessCounters()
    bodies = large_bodies.LargeBodies(counters, max_prompt_bytes=lambda: LIMIT, process=process)
    try:
        yield bodies, counters
    finally:
        await bodies.close()


class SlowProcess:
    """Reads each body when the test says so; `die` is for those that it does not survive."""

    def __init__(self):
        self.started, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.done = []
        self.die = False
        self.ends = 0

    def read(self, job, body):
        self.started.release()
        assert self.go.acquire(timeout=LIMIT_S)
        if self.die:
            raise large_bodies.ParserDiedError
        self.done.append(body)
        return parser_worker.parse_body(job, body)

    def kill(self):
        self.go.release(100)

    def end(self):
        self.ends += 1

    async def begun(self):
        """Once a body is being read."""
        assert await asyncio.to_thread(self.started.acquire, timeout=LIMIT_S)


class WatchedBody(bytearray):
    """A body that a test can watch without a reference to it."""


@in_virtual_time()
async def test_a_large_body_is_freed_in_turns_once_nothing_else_refers_to_it():
    """A thread may still read it; then it shrinks by more than half in each of several turns."""
    body = WatchedBody(32 << 20)
    watched = weakref.ref(body)
    reader = memoryview(body)
    large_bodies.free_in_turns(body)
    del body
    await asyncio.sleep(1.0)
    assert len(watched()) == 32 << 20
    reader.release()
    sizes = []
    while watched() is not None:
        sizes.append(len(watched()) >> 20)
        await asyncio.sleep(0.005)
    assert list(dict.fromkeys(sizes)) == [32, 14]


def process_ended(pid):
    """Wait until a process is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], LIMIT_S)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("body", [TEXT, CHAT, TEXT[:-1], b"\0" * 2_000_000], ids=len)
async def test_the_worker_parses_like_the_event_loop(body):
    """A request, a refusal, and where the name of the model stands."""
    raw = HttpRequest({":method": "POST", ":path": "/v1/completions", "x-session-id": "s"}, body)
    async with reading() as (bodies, counters):
        read = await bodies.read(raw)
        assert type(read) is surfaces.PreparsedRequest
        assert surfaces.parse(read) == surfaces.parse(raw)
        assert model_edit.locate_model(read, "new") == model_edit.locate_model(raw, "new")
        assert (counters.large_bodies, bodies.waiting_bytes) == ({"read": 1}, 0)


async def test_a_single_worker_parses_all_bodies():
    """It is started with the first, and gone after `close`."""
    process = large_bodies.ParserProcess()
    async with reading(process) as (bodies, _):
        assert process.pid is None
        await bodies.read(RAW)
        pid = process.pid
        await asyncio.gather(bodies.read(RAW), bodies.read(RAW))
        assert process.pid == pid
    assert process_ended(pid)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, which is set to do so")
async def test_the_worker_returns_the_memory_of_its_bodies():
    """By itself glibc kept up to three times the largest body."""
    large = HttpRequest(RAW.headers, b'{"model": "m", "prompt": ' + b"[" * (24 << 20))
    process = large_bodies.ParserProcess()
    async with reading(process) as (bodies, _):
        held_bytes = []
        for raw in (RAW, large, large, large):
            await bodies.read(raw)
            status = Path(f"/proc/{process.pid}/status").read_text()
            held_bytes.append(int(status.partition("VmRSS:")[2].split()[0]) * 1024)
    assert max(held_bytes) - held_bytes[0] < 12 << 20


async def test_an_idle_worker_is_ended(monkeypatch):
    """And the next body starts another one."""
    monkeypatch.setattr(large_bodies, "_IDLE_S", 0.0)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Process(large_bodies.ParserProcess):
        def end(self):
            had_one = self.pid is not None
            super().end()
            if had_one:
                loop.call_soon_threadsafe(ended.set)

    process = Process()
    async with reading(process) as (bodies, _):
        await bodies.read(RAW)
        await ended.wait()
        assert process.pid is None
        assert surfaces.parse(await bodies.read(RAW)) == surfaces.parse(RAW)


async def test_a_worker_that_dies_fails_only_its_body():
    """Killed while it is idle it is replaced; a command that reads nothing fails every body."""
    process = large_bodies.ParserProcess()
    async with reading(process) as (bodies, counters):
        await bodies.read(RAW)
        pid = process.pid
        os.kill(pid, signal.SIGKILL)
        assert process_ended(pid)
        assert surfaces.parse(await bodies.read(RAW)) == surfaces.parse(RAW)
        assert process.pid != pid
    for command in (sys.executable, "-c", "pass"), ("/does/not/exist",):
        async with reading(large_bodies.ParserProcess(command)) as (bodies, counters):
            for _ in range(2):
                with pytest.raises(large_bodies.ParserDiedError):
                    await bodies.read(RAW)
            assert (counters.large_bodies, bodies.waiting_bytes) == ({"failed": 2}, 0)


async def test_a_hanging_worker_is_killed(monkeypatch):
    """A body is never waited for without end."""
    monkeypatch.setattr(large_bodies, "_LIMIT_S", 0.0)
    command = (sys.executable, "-c", "import signal; signal.pause()")
    monkeypatch.setattr(large_bodies, "_KILL_AGAIN_S", 0.0)
    async with reading(large_bodies.ParserProcess(command)) as (bodies, _):
        with pytest.raises(large_bodies.ParserDiedError):
            await bodies.read(RAW)


async def test_bodies_are_parsed_in_order_and_dropped_with_their_client():
    """A body of a client that left is not read if it waits, and awaited if it is being read."""
    process = SlowProcess()
    async with reading(process) as (bodies, counters):
        raws = [HttpRequest(RAW.headers, b'{"n":%d}' % at) for at in range(4)]
        tasks = [asyncio.ensure_future(bodies.read(raw)) for raw in raws]
        await process.begun()
        tasks[0].cancel()
        tasks[2].cancel()
        await asyncio.wait([tasks[2]])
        assert tasks[2].cancelled()
        assert not tasks[0].done()
        assert bodies.waiting_bytes == sum(len(raws[at].body) for at in (0, 1, 3))
        process.go.release(3)
        await asyncio.wait(tasks)
        assert [task.cancelled() for task in tasks] == [True, False, True, False]
        assert process.done == [raws[at].body for at in (0, 1, 3)]
        assert (counters.large_bodies, bodies.waiting_bytes) == ({"read": 2}, 0)


async def test_waiting_bodies_are_bounded(monkeypatch):
    """Beyond the bound a body is refused with 429; one alone never is."""
    monkeypatch.setattr(large_bodies, "MAX_WAITING_BYTES", 2 * len(TEXT))
    process = SlowProcess()
    async with reading(process) as (bodies, counters):
        tasks = [asyncio.ensure_future(bodies.read(RAW)) for _ in range(2)]
        await process.begun()
        refused = await bodies.read(RAW)
        assert isinstance(refused, Rejection)
        assert (refused.status, refused.retry_after_s) == (429, 1)
        process.go.release(2)
        await asyncio.wait(tasks)
        monkeypatch.setattr(large_bodies, "MAX_WAITING_BYTES", 1)
        process.go.release()
        assert isinstance(await bodies.read(RAW), HttpRequest)
        assert counters.large_bodies == {"read": 3, "refused": 1}


def test_the_worker_ends_with_a_killed_parent():
    """No orphan stays, and signals to a whole group leave it to the picker."""
    code = (
        "from extproc.request import HttpRequest\n"
        "from extproc.server import parser_worker\n"
        "from extproc.server.large_bodies import ParserProcess\n"
        "process = ParserProcess()\n"
        "job = parser_worker.describe_job(HttpRequest({}), max_prompt_bytes=0)\n"
        "process.read(job, b'{}')\n"
        "import os, signal\n"
        "os.kill(process.pid, signal.SIGTERM)\n"
        "os.kill(process.pid, signal.SIGINT)\n"
        "process.read(job, b'{}')\n"
        "print(process.pid, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as picker:
        pid = int(picker.stdout.readline())
        picker.kill()
    assert process_ended(pid)


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("parser_worker._CPU_S = 0.01; parser_worker.limit(0)\nwhile True: pass", -signal.SIGPROF),
        ("parser_worker.limit(1000)\nbytearray(1 << 32)", 1),
    ],
    ids=["time", "memory"],
)
def test_worker_limits_bound_cpu_and_memory(code, ended):
    """The kernel ends a process that computes too long, and refuses memory beyond the limit."""
    begin = "from extproc.server import parser_worker\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + code], stderr=subprocess.DEVNULL, check=False
    )
    assert done.returncode == ended


def test_worker_limits_allow_hostile_bodies():
    """The limits of the worker are several times the bars of bench/hostile_bodies.py."""
    assert parser_worker.CPU_S_PER_MIB >= 5 * 0.03
    assert parser_worker.MEMORY_PER_BYTE >= 1 + 4 + 1


@contextlib.asynccontextmanager
async def serving_large(process=None):
    """A servicer with a process for large bodies, before one endpoint."""
    pool_fixture = PoolFixture({ext_proc_script.ADDRESS: None})
    async with serving.serving(
        pool_fixture, max_body_bytes=8 << 20, client_options=FIXED_WINDOW
    ) as scene:
        shared = scene.servicer.shared
        async with reading(process, shared.observer.counters) as (bodies, _):
            shared.large_bodies = bodies
            yield scene, pool_fixture


async def send_large(scene, body=TEXT):
    """A stream that sent a request with a large body in pieces."""
    stream = scene.stream()
    await stream.say(
        ext_proc_script.request_headers({**ext_proc_script.PLAIN, ":path": "/v1/completions"})
    )
    for at in range(0, len(body), 60_000):
        piece = body[at : at + 60_000]
        await stream.say(ext_proc_script.request_body(piece, ends=at + len(piece) == len(body)))
    return stream


async def hear_body(stream):
    """The endpoint, and the body that goes on."""
    (route,) = await stream.hear()
    pieces = []
    while True:
        (response,) = await stream.hear()
        pieces.append(response.body)
        if response.ends:
            return route, b"".join(pieces)


async def test_stream_parses_and_forwards_a_large_body():
    """Byte for byte, with its prompt believed cached, and small bodies are read here meanwhile."""
    process = SlowProcess()
    async with serving_large(process) as (scene, pool_fixture):
        large = await send_large(scene)
        await process.begun()
        small = scene.stream()
        await small.say(
            ext_proc_script.request_headers(),
            ext_proc_script.request_body(b'{"model":"m"}', ends=True),
        )
        (refused,) = await small.hear()
        assert refused.status == 400
        process.go.release()
        route, body = await hear_body(large)
        assert (route.headers["x-gateway-destination-endpoint"], body) == (
            ext_proc_script.ADDRESS,
            TEXT,
        )
        assert pool_fixture.index.blocks_total == len(blocks.chain(surfaces.parse(RAW).prompt, b""))
        assert await large.end() is grpc.StatusCode.OK
        await scene.idle()
        assert (pool_fixture.in_flight, scene.servicer.shared.body_budget.held_bytes) == (0, 0)


async def test_stream_rejects_an_invalid_large_body():
    """With the same words as a small one."""
    async with serving_large() as (scene, _):
        body = b'{"model":"m","prompt":' + b" " * 2_000_000
        stream = await send_large(scene, body)
        (response,) = await stream.hear()
        assert response.status == 400
        refused = surfaces.parse(HttpRequest(RAW.headers, body))
        assert response.error["error"]["message"].endswith(refused.message)


async def test_stream_routes_a_large_body_that_is_not_to_be_parsed():
    """The parser process is not started for it."""
    async with serving_large(SlowProcess()) as (scene, pool_fixture):
        selector = scene.servicer.shared.pool_selector
        selector.reconfigure(selector.routes, parse_bodies=False)
        body = b"{" * 2_000_000
        stream = await send_large(scene, body)
        route, sent = await hear_body(stream)
        assert (route.headers["x-gateway-destination-endpoint"], sent) == (
            ext_proc_script.ADDRESS,
            body,
        )
        assert scene.servicer.shared.observer.counters.large_bodies == {}
        await stream.end()
        await scene.idle()
        assert pool_fixture.in_flight == 0


async def test_stream_routes_a_body_that_kills_the_worker():
    """As what meets a bug: counted, and routed without a look at the body."""
    process = SlowProcess()
    process.die = True
    async with serving_large(process) as (scene, pool_fixture):
        stream = await send_large(scene)
        process.go.release()
        route, body = await hear_body(stream)
        assert (route.headers["x-gateway-destination-endpoint"], body) == (
            ext_proc_script.ADDRESS,
            TEXT,
        )
        assert scene.servicer.shared.observer.counters.exceptions.total() == 1
        assert scene.servicer.shared.observer.counters.large_bodies == {"failed": 1}
        await stream.end()
        await scene.idle()
        assert pool_fixture.in_flight == 0


async def test_stream_releases_a_large_body_of_a_disconnected_client():
    """Once the process is through with it; its request is sent nowhere."""
    process = SlowProcess()
    async with serving_large(process) as (scene, pool_fixture):
        budget = scene.servicer.shared.body_budget
        stream = await send_large(scene)
        await process.begun()
        assert budget.held_bytes == len(TEXT)
        stream.call.cancel()
        process.go.release()
        await scene.idle()
        assert (budget.held_bytes, pool_fixture.in_flight) == (0, 0)
        assert scene.servicer.shared.observer.counters.streams == {"cancelled": 1}


async def test_stream_that_drains_waits_for_its_large_body():
    """It ends once its request is decided, not before."""
    process = SlowProcess()
    async with serving_large(process) as (scene, _):
        stream = await send_large(scene)
        await process.begun()
        released = asyncio.ensure_future(scene.drain(LIMIT_S, apart_s=0.0))
        process.go.release()
        _, body = await hear_body(stream)
        assert body == TEXT
        await released
        assert await stream.call.code() is grpc.StatusCode.OK


async def start_taking(scene, house):
    """A stream whose body is routed, and of whose answers the client took none."""
    stream = await send_large(scene, json.dumps({"model": "m", "prompt": "x" * 6_000_000}).encode())
    async with asyncio.timeout(LIMIT_S):
        while not house.in_flight:
            # Looked at now and then: the threads of the transport and of the parser need the core.
            await asyncio.sleep(0.005)
    return stream


async def test_body_is_held_until_the_client_takes_it():
    """Built piece by piece, and what the client says meanwhile is answered after it."""
    async with serving_large() as (scene, house):
        stream = await start_taking(scene, house)
        assert scene.servicer.shared.body_budget.held_bytes > 6_000_000
        await stream.say(ext_proc_script.response_headers({":status": "200"}, ends=True))
        _, body = await hear_body(stream)
        assert json.loads(body)["prompt"] == "x" * 6_000_000
        (answer,) = await stream.hear()
        assert answer.part == "response_headers"
        assert await stream.end() is grpc.StatusCode.OK
        await scene.idle()
        assert (house.in_flight, scene.servicer.shared.body_budget.held_bytes) == (0, 0)


async def test_body_that_the_client_does_not_take_is_released_with_its_stream():
    """The client leaves in the middle of it."""
    async with serving_large() as (scene, house):
        stream = await start_taking(scene, house)
        await stream.hear(3)
        stream.call.cancel()
        await scene.idle()
        assert (house.in_flight, scene.servicer.shared.body_budget.held_bytes) == (0, 0)


async def test_drain_lets_the_client_take_the_body():
    """All of it, and the end of the stream after it."""
    async with serving_large() as (scene, house):
        stream = await start_taking(scene, house)
        drained = asyncio.ensure_future(scene.drain(LIMIT_S, apart_s=0.0))
        _, body = await hear_body(stream)
        assert len(body) > 6_000_000
        assert await stream.call.code() is grpc.StatusCode.OK
        await drained
