"""Set-up of the benches: a picker or a constant gRPC server behind a real Envoy, a lean backend."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from extproc.demo import stack

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
#: Linux: the clock of the CPU time of another process, in nanoseconds.
PROCESS_CLOCK = 2
TEMPLATES = {"fds": "original-dst.yaml", "buffered": "original-dst-buffered.yaml"}


class Rig:
    """A running set-up.

    Attributes:
        port: Envoy's listener.
        pages: The picker's metrics port; 0 for the floor.
        pid: The measured server's process id.
        children: For stopping single parts.
    """

    def __init__(self, port: int, pages: int, pid: int, children: stack.Stack) -> None:
        self.port = port
        self.pages = pages
        self.pid = pid
        self.children = children

    def cpu_s(self) -> float:
        """CPU seconds the server used so far, user and system."""
        # Its clock and not /proc, whose ticks of 10 ms are a tenth of what some loads take.
        return time.clock_gettime(~self.pid << 3 | PROCESS_CLOCK)

    def memory_bytes(self, field: str = "VmRSS") -> int:
        """Resident memory now (`VmRSS`) or at its peak (`VmHWM`)."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        return 0

    def reset_peak(self) -> None:
        """Make the peak start over from now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


@contextlib.asynccontextmanager
async def rig(
    mode: str,
    *,
    floor: Path | None = None,
    experiments: str = "",
    chunks: int = 0,
    module: Sequence[str] = ("extproc", "serve"),
    arguments: Sequence[str] = (),
) -> AsyncIterator[Rig]:
    """Start backend, server and Envoy.

    Args:
        mode: `fds` or `buffered`; `direct` for Envoy without a processor.
        floor: Start the constant-answer floor for this request body instead of the picker.
        experiments: How the floor's gRPC is run (`GRPC_EXPERIMENTS`); empty as it comes.
        chunks: Pieces of the backend's answer; 0 for a plain one.
        module: Module that runs the picker, with its first arguments.
        arguments: Further arguments of `extproc serve`.
    """
    python = sys.executable
    ports = stack.EnvoyPorts(stack.free_port(), stack.free_port(), stack.free_port())
    pages = stack.free_port()
    async with stack.stack() as children:
        backend = await children.start(
            "backend",
            [python, str(ROOT / "bench/wire_load.py"), "backend", "0", str(chunks)],
            ready="listening on ",
        )
        address = backend.ready_line.rpartition(" ")[2]
        if floor is not None:
            argv = ["env", f"GRPC_EXPERIMENTS={experiments}", python, "-m", "bench.floor_server"]
            argv += [str(ports.extproc), address, mode, str(floor)]
            server = await children.start("floor", argv, ready="floor is ready")
        else:
            argv = [
                *(python, "-m", *module),
                *("--endpoints", address, "--host", "127.0.0.1", "--secure-serving=false"),
                *("--grpc-port", str(ports.extproc), "--metrics-port", str(pages)),
                *("--grpc-health-port", "0", "--drain-timeout", "0s", *arguments),
            ]
            server = await children.start("extproc", argv, ready="extproc is listening")
        config = _config(mode, ports, address)
        await children.envoy(config)
        yield Rig(ports.listener, pages, server.process.pid, children)


def _config(mode: str, ports: stack.EnvoyPorts, address: str) -> dict[str, Any]:
    template = ROOT / "envoy" / TEMPLATES.get(mode, "original-dst.yaml")
    config = stack.envoy_config(template, ports, plaintext=True)
    for cluster in config["static_resources"]["clusters"]:
        cluster.pop("health_checks", None)  # the floor answers none
        if mode == "direct" and cluster["name"] == "engines":
            cluster["type"] = "STATIC"
            cluster["lb_policy"] = "ROUND_ROBIN"
            del cluster["original_dst_lb_config"]
            cluster["load_assignment"] = stack.assignment("engines", [address])
    if mode == "direct":
        manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
        filters = manager["typed_config"]["http_filters"]
        manager["typed_config"]["http_filters"] = [
            http_filter
            for http_filter in filters
            if http_filter["name"] != "envoy.filters.http.ext_proc"
        ]
    return config


def chat(size_bytes: int, *, salt: str = "") -> bytes:
    """A chat completions body whose prompt has about `size_bytes` bytes."""
    text = f"{salt} " + "the quick brown fox jumps over the lazy dog " * (size_bytes // 44 + 1)
    message = {"role": "user", "content": text[:size_bytes]}
    return json.dumps({"model": "m", "messages": [message], "max_tokens": 16}).encode()


def machine() -> dict[str, Any]:
    """Machine that the numbers were measured on."""
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text()
        name = next(
            (line.partition(":")[2].strip() for line in info.splitlines() if "model name" in line),
            "",
        )
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return {
            "cpu": name,
            "cores": os.cpu_count(),
            "memory_gib": round(memory),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
        }
    return {"system": platform.platform()}


def write(name: str, command: str, figures: dict[str, Any]) -> Path:
    """Write a result with its command, commit, machine and date."""
    RESULTS.mkdir(exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    ).stdout.strip()
    path = RESULTS / f"{name}.json"
    record = {
        "command": command,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        **figures,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def set_session_nice(nice: int) -> None:
    """Set the priority of this session beside other sessions, where kernel and user allow it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


def settle() -> asyncio.Future[None]:
    """Let the machine calm down between measurements."""
    return asyncio.ensure_future(asyncio.sleep(0.5))
