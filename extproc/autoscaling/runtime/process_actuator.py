"""Runs engines as child processes: actuator and discovery without Kubernetes."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import ipaddress
import logging
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Self

from extproc.autoscaling.interface import ScalingDecision
from extproc.autoscaling.runtime.actuator import (
    Actuator,
    ActuatorContext,
    ActuatorError,
    ChildProcess,
)
from extproc.config.autoscaling import PORT, LaunchSection, ScalingSection
from extproc.discovery.endpoint_list import DiscoveredPool
from extproc.endpoint import Endpoint, join_host_port, parse_port
from extproc.pool.inflight import InflightLoad
from extproc.scrape import client
from extproc.server.pool_runtime import PoolRuntime
from extproc.supervision import Supervisor, place_of

_log = logging.getLogger("extproc.server")

#: Name of the loop that starts and ends engines, for the supervisor.
_ENGINES = "engines"

#: Seconds between two looks whether an engine answers, or has nothing left to do.
_POLL_S = 0.1

#: Seconds until another engine is tried where one ended by itself.
_RESTART_PAUSE_S = 5.0

#: Seconds one answer to a look may take, and bytes of it.
_HEALTH_S, _HEALTH_BYTES = 1.0, 65536

#: Last lines of an engine that are shown when it fails (count).
_LAST_LINES = 5

#: Longest line of an engine that is kept, and longest part of one that waits for its end (bytes).
_MAX_LINE_BYTES = 4096


class EngineProcess:
    """Child process of an engine.

    Attributes:
        address: `ip:port`; empty while it is unknown.
        ready: True once it answers and may get requests.
        is_wanted: False once it has to end.
        accounts: Our open requests on it and its ranks, as long as the pool had it.
        unfinished: Output since the end of the last line.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.address = ""
        self.ready = False
        self.is_wanted = True
        self.accounts: Sequence[InflightLoad] = ()
        self.is_leaving = asyncio.Event()
        self.lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self.unfinished = b""


class ProcessActuator(Actuator):
    """Starts and ends engines, and is the discovery of their pool; engines end with their process.

    Args:
        supervisor: Counts exceptions; None creates a new supervisor.
    """

    scales = True

    def __init__(
        self,
        launch: LaunchSection,
        runtime: PoolRuntime,
        *,
        clock: Callable[[], float],
        supervisor: Supervisor | None = None,
    ) -> None:
        self._launch = launch
        self._runtime = runtime
        self._clock = clock
        self._supervisor = supervisor or Supervisor(clock=clock)
        self._http = client.ScrapeClient(timeout_s=_HEALTH_S, cap_bytes=_HEALTH_BYTES)
        self._engines: dict[EngineProcess, asyncio.Task[bool]] = {}
        self._numbers = 0
        self._spec = 0
        self._changed = asyncio.Event()
        self._not_before = 0.0

    @classmethod
    def from_settings(
        cls, scaling: ScalingSection, pool: PoolRuntime, context: ActuatorContext
    ) -> Self:
        """See `Actuator`; raises ValueError where the section has no `launch`."""
        if scaling.launch is None:
            raise ValueError("expected a section with launch, got none")
        return cls(scaling.launch, pool, clock=context.clock, supervisor=context.supervisor)

    def start(self) -> None:
        """Publish an empty pool: no engine runs yet."""
        self._publish()

    async def current_replicas(self, available: int) -> int | ActuatorError:
        """See `Actuator`."""
        del available
        return self._spec

    async def scale(self, desired: ScalingDecision, spec: int) -> ActuatorError | None:
        """See `Actuator`: `run` starts and ends engines."""
        del spec
        self._spec = desired.replicas
        self._changed.set()
        return None

    async def run(self) -> None:
        """Keep the requested number of engines running until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._changed.clear()
                    wait_s = self._not_before - self._clock()
                    try:
                        self._adjust(tasks)
                        self._supervisor.record_success("autoscaling", _ENGINES)
                    except Exception as error:  # noqa: BLE001 - the group's end would end all engines
                        wait_s = self._supervisor.record_failure(
                            "autoscaling", error, instance=_ENGINES
                        )
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s if wait_s > 0 else None):
                            await self._changed.wait()
        finally:
            self._http.close()

    def _adjust(self, tasks: asyncio.TaskGroup) -> None:
        staying = [engine for engine in self._engines if engine.is_wanted]
        # The youngest go first: the others have more in their caches. What is not ready goes before.
        going = sorted(staying, key=lambda engine: (engine.ready, -engine.number))
        for engine in going[: max(0, len(staying) - self._spec)]:
            engine.is_wanted = False
            engine.is_leaving.set()
        pausing = self._clock() < self._not_before
        for _ in range(0 if pausing else self._spec - len(staying)):
            self._numbers += 1
            engine = EngineProcess(self._numbers)
            supervised = self._supervisor.attempt(
                "autoscaling", self._run_engine(engine), instance=f"engine {engine.number}"
            )
            task = tasks.create_task(supervised, name=f"engine {engine.number}")
            self._engines[engine] = task
        self._publish()

    def _publish(self) -> None:
        """Publish the endpoints: engines that answer and have to stay."""
        pool = self._runtime.parts.store.pool
        for engine in self._engines:
            if engine.address and (members := pool.ranks_at(engine.address)):
                engine.accounts = [member.account for member in members]
        ready = [engine for engine in self._engines if engine.ready and engine.is_wanted]
        endpoints = [
            Endpoint(engine.address, name=f"engine-{engine.number}", uid=str(engine.number))
            for engine in ready
        ]
        self._runtime.on_discovered(DiscoveredPool(tuple(endpoints)))

    async def _run_engine(self, engine: EngineProcess) -> None:
        """Run an engine from its start to its end."""
        try:
            process = await self._start_process(engine)
            if process is None:
                return
            try:
                await self._serve(engine, process)
            finally:
                await self._terminate(process)
                await process.wait_for_output()
                self._on_output(engine, b"\n")
        finally:
            self._on_exit(engine)

    async def _start_process(self, engine: EngineProcess) -> ChildProcess | None:
        """Start the program of an engine; None where that is impossible."""
        argv = list(self._launch.command)
        try:
            if any(PORT in word for word in argv):
                port = _free_port(self._launch.host)
                argv = [word.replace(PORT, str(port)) for word in argv]
                engine.address = join_host_port(self._launch.host, port)
            if shutil.which(argv[0]) is None:
                engine.lines.append(f"there is no program {argv[0]}")
                return None
            on_output = functools.partial(self._on_output, engine)
            return await ChildProcess.start(with_parent_death_signal(argv), on_output)
        except OSError as error:
            engine.lines.append(f"it cannot be started: {error.strerror}")
            return None

    async def _serve(self, engine: EngineProcess, process: ChildProcess) -> None:
        ended = asyncio.ensure_future(process.ended.wait())
        leaves = asyncio.ensure_future(engine.is_leaving.wait())
        starting = asyncio.ensure_future(self._is_healthy(engine))
        try:
            await asyncio.wait(
                {ended, leaves, starting},
                timeout=self._launch.start_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if ended.done():
                return
            if not starting.done():
                if engine.is_wanted:
                    _log.warning(
                        "engine %d did not answer within %g s", engine.number, self._launch.start_s
                    )
                return
            fault = starting.exception()
            if fault is not None:
                engine.lines.append(f"its health could not be looked at: {place_of(fault)}")
                return
            engine.ready = True
            _log.info("engine %d serves on %s", engine.number, engine.address)
            self._publish()
            await asyncio.wait({ended, leaves}, return_when=asyncio.FIRST_COMPLETED)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._launch.drain_s):
                    while (
                        any(account.in_flight for account in engine.accounts) and not ended.done()
                    ):
                        # A count has no event, and a late look does no harm.
                        await asyncio.wait({ended}, timeout=_POLL_S)
        finally:
            for task in (ended, leaves, starting):
                task.cancel()

    async def _is_healthy(self, engine: EngineProcess) -> None:
        """Wait until the health check of an engine succeeds."""
        while True:
            if engine.address:
                host, _, port = engine.address.rpartition(":")
                where = client.target(host.strip("[]"), int(port), path=self._launch.health)
                if isinstance(await self._http.get(where), bytes):
                    self._http.forget(where)
                    return
            await asyncio.sleep(_POLL_S)

    def _on_output(self, engine: EngineProcess, output: bytes) -> None:
        """Keep the last lines of an engine, and its address where the output contains it."""
        # Progress bars end their lines with carriage returns.
        *lines, rest = re.split(rb"[\r\n]+", engine.unfinished + output)
        if len(rest) > _MAX_LINE_BYTES:
            lines.append(rest)
            rest = b""
        engine.unfinished = rest
        where = re.compile(re.escape(self._launch.listening) + r"(\S+:\d+)\b")
        for raw in lines:
            line = raw[:_MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
            if not line:
                continue
            engine.lines.append(line)
            _log.debug("engine %d: %s", engine.number, line)
            match = where.search(line)
            if match and not engine.address:
                engine.address = connectable_address(match[1], self._launch.host)

    async def _terminate(self, process: ChildProcess) -> None:
        with contextlib.suppress(ProcessLookupError):
            if not process.ended.is_set():
                process.transport.terminate()
        try:
            async with asyncio.timeout(self._launch.stop_s):
                await process.ended.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.transport.kill()
            await process.ended.wait()

    def _on_exit(self, engine: EngineProcess) -> None:
        """Remove an ended engine; if it had to stay, another is started after a pause."""
        self._engines.pop(engine, None)
        if engine.is_wanted:
            _log.warning(
                "engine %d ended: %s", engine.number, " | ".join(engine.lines) or "it said nothing"
            )
            self._not_before = self._clock() + _RESTART_PAUSE_S
        self._publish()
        self._changed.set()


def connectable_address(printed: str, host: str) -> str:
    """`ip:port` of an engine from the address it printed; empty where that has no port.

    Args:
        printed: `host:port`, also as a URL.
        host: Address of the endpoints. It stands in for every address (`0.0.0.0`, `[::]`) and for a
            name such as `localhost`: an endpoint is an address that others can connect to.
    """
    place, _, port = printed.rpartition("/")[2].rpartition(":")
    number = parse_port(port)
    if not number:
        return ""
    try:
        address = ipaddress.ip_address(place.strip("[]"))
    except ValueError:
        return join_host_port(host, number)
    return join_host_port(host if address.is_unspecified else str(address), number)


def _free_port(host: str) -> int:
    """A TCP port that is free at this moment; raises OSError where the host is of another machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


#: Has the kernel kill the process with its parent, then becomes the program. A program of its own,
#: because Python code between fork and exec can hang where other threads hold locks (gRPC's do).
_LEASH = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def with_parent_death_signal(argv: Sequence[str]) -> Sequence[str]:
    """Wrap a command line so that it dies with this process, on Linux only."""
    if sys.platform != "linux":
        return argv
    return (sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), *argv)
