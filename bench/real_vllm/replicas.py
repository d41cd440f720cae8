"""Two engines of a kind, real or simulated, started and ended with the stack; their pages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.real_vllm import tiny
from extproc.demo import stack
from extproc.endpoint import Load
from extproc.errors import ConfigError
from extproc.scrape import metrics_page

COUNT = 2
MODEL = "tiny"
#: A KV cache small enough that 24 groups do not fit one replica; blocks as the CPU wants them.
BLOCKS = 256
BLOCK_TOKENS = 32
#: Seconds until an engine answers /health; 20 to 25 alone on a core, some minutes on a machine that
#: is busy.
START_TIMEOUT_S = 900.0

#: Starts an engine in a group of its own, by which its workers are ended too, but in the session of the
#: bench: the kernel compares priorities within a session only. The line is printed at once, because
#: vLLM's first one takes longer than the stack waits.
_START = (
    "import os, sys; print('starting', flush=True); os.setpgid(0, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)

#: Part of the title of the process that computes, beside the HTTP server of an engine.
CORE_TITLE = "VLLM::EngineCore"

#: One thread for each engine, or they starve each other; development mode for
#: /reset_prefix_cache; no look-ups, because there is no network.
ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}

_LIMITS = {"max-model-len": 4096, "max-num-seqs": 16, "max-loras": 2}
_BUDGET_TOKENS = 2048


#: KV events on free ports of the loopback address (`VLLM_HOST_IP`).
_EVENTS = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:0",
    "replay_endpoint": "tcp://*:0",
}


def command(
    python: Path,
    model: Path,
    port: int,
    *,
    events: bool = False,
    images: bool = False,
    **overrides: object,
) -> list[str]:
    """The command line of one real engine.

    Args:
        python: Of the virtualenv with vLLM.
        model: Folder of the model; adapters stand beside it.
        port: Loopback port.
        events: Publish KV events, and render prompts.
        images: The model is `tiny_vision`, which has no weights and no adapters.
        overrides: Values of flags in place of the usual ones, with underscores.
    """
    flags: dict[str, object] = {
        **_LIMITS,
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": MODEL,
        "dtype": "bfloat16",
        "max-num-batched-tokens": _BUDGET_TOKENS,
        "block-size": BLOCK_TOKENS,
        "num-gpu-blocks-override": BLOCKS,
        "max-lora-rank": tiny.RANK,
        "distributed-executor-backend": "uni",
        **{name.replace("_", "-"): value for name, value in overrides.items()},
    }
    more = ("--kv-events-config", json.dumps(_EVENTS), "--enable-scale-out") if events else ()
    adapters = [f"{name}={model.parent / name}" for name in tiny.ADAPTERS]
    weights = (
        ("--load-format", "dummy") if images else ("--enable-lora", "--lora-modules", *adapters)
    )
    return [
        *(str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
        *("--enable-prefix-caching", "--enforce-eager", "--enable-prompt-tokens-details"),
        *more,
        *weights,
    ]


@contextlib.asynccontextmanager
async def real(
    children: stack.Stack,
    session: aiohttp.ClientSession,
    *,
    python: Path,
    model: Path,
    count: int = COUNT,
    events: bool = False,
    images: bool = False,
    **overrides: object,
) -> AsyncIterator[list[str]]:
    """Real engines, ready; their addresses. Every process of theirs is gone afterwards.

    `events`, `images` and `overrides` are those of `command`.

    Should this process be killed without warning, the engines die with it, and of each an idle
    helper of Python's multiprocessing stays: it waits for a pipe that it holds open itself.
    """
    settings = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    ports = [stack.free_port() for _ in range(count)]
    started: list[stack.Child] = []
    try:
        for port in ports:
            argv = [sys.executable, "-c", _START, "env", *settings]
            argv += command(python, model, port, events=events, images=images, **overrides)
            started.append(await children.start(f"vllm {port}", argv, ready="starting"))
        addresses = [f"127.0.0.1:{port}" for port in ports]
        for child, address in zip(started, addresses, strict=True):
            await _healthy(child, address, session)
            if not events:  # which the process that computes publishes
                yield_cores(child.name, child.process.pid)
        yield addresses
    finally:
        for child in started:
            await _end(child)


def yield_cores(name: str, group: int) -> None:
    """Let what an engine computes wait for all else: it takes the place of a GPU, which takes no core.

    Otherwise HTTP servers, Envoy, picker and client wait for cores longer than requests wait for the
    engines.

    Args:
        name: Of the engine.
        group: Process group of the engine.

    Raises:
        ConfigError: The process that computes is not found.
    """
    num_threads = 0
    for title in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # a process that ended meanwhile
            is_member = os.getpgid(int(title.parent.name)) == group
            if is_member and CORE_TITLE in title.read_text():
                for thread in (title.parent / "task").iterdir():
                    os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
                    num_threads += 1
    if not num_threads:
        raise ConfigError(
            name,
            wanted=f"a process {CORE_TITLE} that computes",
            got="none in its process group",
            fix="use the version of vLLM that this bench installs",
        )


async def _end(child: stack.Child) -> None:
    """Ask an engine to end, then make all of its processes.

    The group first: a helper that is left holds the pipe open whose end the child is read to.
    """
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, how)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(child.process.wait(), stack.STOP_TIMEOUT_S)
    await child.stop()


async def simulated(children: stack.Stack) -> list[str]:
    """Simulated engines with the same blocks and limits, about as fast; their addresses."""
    argv = [
        *("--model", MODEL, "--profile", "h100-8b-bf16", "--speed", "2"),
        *(word for name in tiny.ADAPTERS for word in ("--lora", name)),
        *(word for name, value in _LIMITS.items() for word in (f"--{name}", str(value))),
        *("--block-tokens", str(BLOCK_TOKENS), "--kv-tokens", str(BLOCKS * BLOCK_TOKENS)),
        *("--token-budget", str(_BUDGET_TOKENS)),
    ]
    return [(await children.engine(*argv))[1] for _ in range(COUNT)]


async def _healthy(child: stack.Child, address: str, session: aiohttp.ClientSession) -> None:
    """Wait until an engine answers, ended, or took too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and child.process.returncode is None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(f"http://{address}/health") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(0.5)
    raise ConfigError(
        child.name,
        wanted=f"an answer of /health within {START_TIMEOUT_S:.0f} s",
        got="\n".join(["its last lines:", *child.last_lines]),
        fix="see the lines above",
    )


async def text(session: aiohttp.ClientSession, address: str) -> str:
    """An engine's metrics page."""
    async with session.get(f"http://{address}/metrics") as response:
        return await response.text()


async def event_ports(session: aiohttp.ClientSession, address: str) -> tuple[int, int]:
    """Ports on which an engine publishes KV events, and sends them again."""
    async with session.get(f"http://{address}/kv_event_sources") as response:
        source = (await response.json())["0"]
    return tuple(int(source[key].rpartition(":")[2]) for key in ("endpoint", "replay_endpoint"))


async def pages(session: aiohttp.ClientSession, addresses: Sequence[str]) -> list[str]:
    """The engines' metrics pages."""
    return [await text(session, address) for address in addresses]


def load(page: str) -> Load:
    """An engine's page as the picker reads it.

    Raises:
        TypeError: It is none.
    """
    known = metrics_page.read(page.encode(), 0.0)
    if not isinstance(known, Load):
        raise TypeError(f"the metrics page is unreadable: {known}")
    return known


async def models(session: aiohttp.ClientSession, address: str) -> dict[str, str | None]:
    """Parent by id of `/v1/models`."""
    async with session.get(f"http://{address}/v1/models") as response:
        listed = await response.json()
    return {model["id"]: model.get("parent") for model in listed["data"]}


async def pool(session: aiohttp.ClientSession, address: str) -> list[dict[str, Any]]:
    """Endpoints as a picker sees them (`/debug/pool`)."""
    async with session.get(f"http://{address}/debug/pool") as response:
        endpoints: list[dict[str, Any]] = (await response.json())["endpoints"]
    return endpoints


async def forget(session: aiohttp.ClientSession, addresses: Sequence[str]) -> None:
    """Empty the engines' prefix caches.

    Raises:
        RuntimeError: One would not: a run would begin with a warm cache.
    """
    for address in addresses:
        async with session.post(f"http://{address}/reset_prefix_cache") as response:
            if response.status != 200:
                raise RuntimeError(f"{address} kept its prefix cache: {await response.text()}")
