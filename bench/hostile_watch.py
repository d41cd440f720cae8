"""Samples a picker while it is attacked: waits, memory, CPU and open accounts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Self

import msgspec

from bench import healthz_probe
from extproc.demo import stack
from tests.e2e import http1

#: Gauges that are zero once nothing is under way.
ACCOUNTS = (
    "extproc_streams_open",
    "extproc_body_buffer_bytes",
    "extproc_endpoint_inflight_requests",
    "extproc_flow_control_queue_size",
    "extproc_peer_sync_inflight_requests",
)

#: Longest wait for the page of metrics.
_METRICS_LIMIT_S = 60.0

#: Seconds in which accounts go back to zero.
_SETTLED_S = 60.0

#: The histogram of how long the picker's event loop was held, in CPU time: others on the machine do
#: not count.
_STALLS = "extproc_event_loop_lag_cpu_seconds"

MIB = 1 << 20


class WatchedPicker(msgspec.Struct, frozen=True):
    """A running picker.

    Attributes:
        child: Its process.
        port: Where clients connect: Envoy's listener, 0 without Envoy.
        pages: Port of its pages.
        ext_proc: Port of ext_proc; 0 where no client but Envoy connects to it.
    """

    child: stack.Child
    port: int
    pages: int
    ext_proc: int = 0

    @property
    def is_alive(self) -> bool:
        """True while the process that was started still runs."""
        return self.child.process.returncode is None

    @property
    def pids(self) -> list[int]:
        """Of the process, and of those that it started, which read large bodies."""
        pid = self.child.process.pid
        with contextlib.suppress(OSError):
            tasks = Path(f"/proc/{pid}/task").glob("*/children")
            return [pid, *(int(word) for task in tasks for word in task.read_text().split())]
        return [pid]

    def memory_bytes(self, field: str = "VmRSS") -> int:
        """Resident memory now (`VmRSS`), or at its peak (`VmHWM`); 0 once the process ended."""
        total = 0
        for pid in self.pids:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith(field + ":"):
                        total += int(line.split()[1]) * 1024
        return total

    def reset_peak(self) -> None:
        """Make the peak of memory start over from now."""
        for pid in self.pids:
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def cpu_s(self) -> float:
        """CPU seconds it used so far, user and system."""
        ticks = 0
        for pid in self.pids:
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/stat").read_text()
                ticks += sum(map(int, text.rpartition(")")[2].split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    async def metrics(self) -> dict[str, float]:
        """Its metrics by name and labels; empty where it does not answer."""
        try:
            async with asyncio.timeout(_METRICS_LIMIT_S):
                page = (await http1.ask(self.pages, "/metrics")).body.decode()
        except (OSError, TimeoutError, AssertionError, asyncio.IncompleteReadError):
            return {}
        split = [line.rpartition(" ") for line in page.splitlines() if line[:1] not in {"#", ""}]
        return {name: float(value) for name, _, value in split}

    async def accounts(self) -> dict[str, float]:
        """Accounts that are not zero, once they are or after a while; `gone` without an answer."""
        left: dict[str, float] = {"gone": 1.0}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLED_S):
                while left and self.is_alive:
                    metrics = await self.metrics()
                    if metrics:
                        left = {
                            name: value
                            for name, value in metrics.items()
                            if name.partition("{")[0] in ACCOUNTS and value
                        }
                    await asyncio.sleep(0.2)
        return left


def longest_stall_s(before: dict[str, float], after: dict[str, float]) -> float | None:
    """Upper bound of the longest stall between two looks; None where the picker has no metric."""
    buckets = sorted(
        (float(name.partition('le="')[2].partition('"')[0]), name)
        for name in after
        if name.startswith(_STALLS + "_bucket")
    )
    longest, counted = 0.0, 0.0
    for bound, name in buckets:
        count = after[name] - before.get(name, 0.0)
        if count > counted:
            longest, counted = bound, count
    return longest if buckets else None


class Probe:
    """Probes /healthz from a process of its own, and keeps the longest wait.

    Args:
        port: Of the picker's pages.

    Attributes:
        longest_s: The longest wait for an answer, in seconds; known once the block is left.
        failures: Probes without an answer (count); known once the block is left.
    """

    def __init__(self, port: int) -> None:
        self.longest_s = 0.0
        self.failures = 0
        self._port = port

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, healthz_probe.__file__, str(self._port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == b"ready\n"
        return self

    async def __aexit__(self, *_: object) -> None:
        output, _ = await self._process.communicate(b"")  # ends its input
        figures = json.loads(output)
        self.longest_s, self.failures = figures["longest_s"], figures["failures"]
