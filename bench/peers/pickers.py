"""The compared pickers as processes, behind one Envoy with listeners for each of them."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import yaml

from bench import rig
from extproc.autoscaling.runtime.process_actuator import with_parent_death_signal
from extproc.demo import stack

#: Programs that `make bench-peers` builds from `bench/peers/tools`.
PROGRAMS: Final = rig.ROOT / ".cache/peers"

#: Metrics page of the engines.
PAGE: Final = rig.ROOT / "tests/data/vllm-0.32-idle.txt"

#: Scorers and weights of llm-d without a configuration, and of our `weighted`.
SCORERS: Final = {
    "queue-scorer": 2,
    "kv-cache-utilization-scorer": 2,
    "prefix-cache-scorer": 3,
}

Setting = Literal["plain", "tls", "wide"]

#: Engines of a picker by its setting (count).
NUM_ENDPOINTS: Final[Mapping[Setting, int]] = {"plain": 8, "tls": 8, "wide": 100}

#: How often llm-d scrapes an engine in `go-equal`: as often as extproc does under load.
SCRAPE_INTERVAL: Final[Mapping[Setting, str]] = {"plain": "200ms", "tls": "200ms", "wide": "1s"}

#: Pickers in words.
NAMES: Final = {
    "go": "llm-d as shipped",
    "go-equal": "llm-d, our scrape interval",
    "native": "extproc, same scorers",
    "adaptive": "extproc, default strategy",
    "grpcio": "extproc on grpcio, same scorers",
    "floor-go": "constant answers, grpc-go",
    "floor-python": "constant answers, grpc.aio",
    "direct": "no picker",
}


class BenchProcess:
    """A child process with its output in a file.

    Args:
        folder: Folder of the file.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                with_parent_death_signal(argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=rig.ROOT,
                env={**os.environ, **(environment or {})},
            )
        self.log = folder / f"{name}.log"

    @property
    def pids(self) -> list[int]:
        """The process and its children."""
        pids = [self._process.pid]
        for pid in pids:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
        return pids

    def cpu_s(self) -> float:
        """CPU seconds of it and its children so far, user and system."""
        return sum(time.clock_gettime(~pid << 3 | rig.PROCESS_CLOCK) for pid in self.pids)

    def rss_mib(self) -> float:
        """Resident memory."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def pause(self) -> None:
        """Stop it until `resume`."""
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        for pid in self.pids:
            os.kill(pid, signal.SIGCONT)

    def pin(self, cores: set[int]) -> None:
        """Let it and its children run on these cores only."""
        for pid in self.pids:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), cores)

    def wait_until_listening(self, port: int) -> None:
        """Wait until a port of it accepts connections.

        Raises:
            RuntimeError: It ended, or took too long; holds its last lines.
        """
        end = time.monotonic() + stack.START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                return
            if self._process.poll() is not None or time.monotonic() > end:
                lines = self.log.read_text(errors="replace").splitlines()[-20:]
                raise RuntimeError("\n".join([f"{self.log.stem} does not listen:", *lines]))
            time.sleep(0.02)

    def stop(self) -> None:
        """End it, paused or not."""
        if self._process.poll() is None:
            self.resume()
            self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class PickerPorts(msgspec.Struct, frozen=True):
    """Ports of a picker.

    Attributes:
        grpc: ext_proc; 0 for Envoy without a picker.
        lean: Envoy's listener that shows it no response bodies.
        full: Envoy's listener that shows it response bodies too.
    """

    grpc: int
    lean: int
    full: int


def llmd_argv(epp: str, endpoints: Sequence[str], folder: Path, *, name: str) -> list[str]:
    """Command line of llm-d's picker with its default scorers, without its ports.

    Args:
        epp: Its binary.
        endpoints: Engines as `ip:port`, which it reads from a file.
        folder: Folder of the files.
        name: Name of the files.
    """
    rows = []
    for number, endpoint in enumerate(endpoints):
        host, _, port = endpoint.rpartition(":")
        rows.append({"name": f"vllm-{number}", "address": host, "port": port})
    listed = folder / f"{name}-endpoints.yaml"
    listed.write_text(yaml.safe_dump({"endpoints": rows}))
    config = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [
            *({"type": scorer} for scorer in SCORERS),
            {"name": "files", "type": "file-discovery", "parameters": {"path": str(listed)}},
        ],
        "schedulingProfiles": [
            {
                "name": "default",
                "plugins": [{"pluginRef": n, "weight": w} for n, w in SCORERS.items()],
            }
        ],
        "dataLayer": {"discovery": {"pluginRef": "files"}},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return [
        *(epp, "--config-file", str(path)),
        *("--pool-name", "pool", "--pool-namespace", "default", "--tracing=false"),
        *("--metrics-endpoint-auth=false", "--allow-experimental-plugins"),
    ]


def extproc_argv(endpoints: Sequence[str], *arguments: str) -> list[str]:
    """Command line of extproc, without its ports."""
    return [
        *(sys.executable, "-m", "extproc", "serve", "--host", "127.0.0.1"),
        *("--drain-timeout", "0s", "--endpoints", ",".join(endpoints), *arguments),
    ]


def server_ports(grpc: int) -> list[str]:
    """Flags of the ports, which both pickers have."""
    return [
        *("--grpc-port", str(grpc), "--grpc-health-port", str(stack.free_port())),
        *("--metrics-port", str(stack.free_port())),
    ]


def picker_argv(
    name: str, setting: Setting, endpoints: Sequence[str], folder: Path, *, grpc: int, epp: str
) -> list[str]:
    """Command line of a compared picker."""
    if name == "floor-go":
        return [str(PROGRAMS / "floor"), "--port", str(grpc), "--destination", endpoints[0]]
    if name == "floor-python":
        body = folder / "floor-body"
        body.write_bytes(b"x" * 2000)
        floor = [sys.executable, "-m", "bench.floor_server", str(grpc), endpoints[0], "fds"]
        return [*floor, str(body)]
    if name.startswith("go"):
        argv = llmd_argv(epp, endpoints, folder, name=f"{name}-{setting}")
        if name == "go-equal":
            argv += ["--refresh-metrics-interval", SCRAPE_INTERVAL[setting]]
    else:
        transport = "grpcio" if name == "grpcio" else "native"
        argv = extproc_argv(endpoints, "--transport", transport)
        argv += [] if name == "adaptive" else ["--strategy", "weighted"]
    secure = "true" if setting == "tls" else "false"
    return [*argv, f"--secure-serving={secure}", *server_ports(grpc)]


class PeerRig:
    """Engines, all pickers and one Envoy; those whose turn it is not are paused.

    Args:
        rows: Name and setting of each picker.
        folder: Folder of configurations and logs.
        epp: Binary of llm-d's picker.
    """

    def __init__(self, rows: Sequence[tuple[str, Setting]], folder: Path, *, epp: str) -> None:
        self._folder = folder
        self._epp = epp
        self.engine_port = stack.free_port()
        self.ports = {
            row: PickerPorts(stack.free_port(), stack.free_port(), stack.free_port())
            for row in rows
        }
        self.pickers: dict[tuple[str, Setting], BenchProcess] = {}
        self.engines: BenchProcess
        self.envoy: BenchProcess

    def endpoints(self, setting: Setting) -> list[str]:
        """Engines of a setting as `ip:port`."""
        numbers = range(1, NUM_ENDPOINTS[setting] + 1)
        return [f"127.0.0.{number}:{self.engine_port}" for number in numbers]

    def start(self) -> None:
        """Start everything, and pause the pickers once all are up."""
        argv = [str(PROGRAMS / "engines"), "-port", str(self.engine_port), "-page", str(PAGE)]
        self.engines = BenchProcess("engines", argv, self._folder)
        self.engines.wait_until_listening(self.engine_port)
        for (name, setting), ports in self.ports.items():
            if name == "direct":
                continue
            endpoints = self.endpoints(setting)
            argv = picker_argv(
                name, setting, endpoints, self._folder, grpc=ports.grpc, epp=self._epp
            )
            self.pickers[name, setting] = BenchProcess(f"{name}-{setting}", argv, self._folder)
        for row, process in self.pickers.items():
            process.wait_until_listening(self.ports[row].grpc)
        config = self._folder / "envoy.json"
        config.write_bytes(msgspec.json.encode(envoy_config(self.ports)))
        argv = [stack.find_envoy(), "-c", str(config), "--concurrency", "2"]
        argv += ["--use-dynamic-base-id", "-l", "warning"]
        self.envoy = BenchProcess("envoy", argv, self._folder)
        for ports in self.ports.values():
            self.envoy.wait_until_listening(ports.full)
        time.sleep(3.0)  # the pickers scrape all engines, and end what they do at their start
        for process in self.pickers.values():
            process.pause()

    def stop(self) -> None:
        """Stop whatever was started."""
        for process in (
            *self.pickers.values(),
            *(vars(self).get(name) for name in ("envoy", "engines")),
        ):
            if process is not None:
                process.stop()

    def counts(self) -> tuple[int, int]:
        """Requests and scrapes at all engines since the last call."""
        url = f"http://127.0.0.1:{self.engine_port}/counts"
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            rows = [line.split() for line in answer.read().decode().splitlines()]
        return sum(int(row[1]) for row in rows), sum(int(row[2]) for row in rows)


@contextlib.contextmanager
def peer_rig(rows: Sequence[tuple[str, Setting]], *, epp: str) -> Iterator[PeerRig]:
    """A running rig; everything ends with the block."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        running = PeerRig(rows, Path(folder), epp=epp)
        try:
            running.start()
            yield running
        finally:
            running.stop()


def envoy_config(rows: Mapping[tuple[str, str], PickerPorts]) -> dict[str, Any]:
    """The duplex profile with two listeners and a cluster for each picker.

    Args:
        rows: Ports by name and setting; `direct` has no ext_proc filter.
    """
    template = yaml.safe_load((rig.ROOT / "envoy" / rig.TEMPLATES["fds"]).read_bytes())
    template["admin"]["address"]["socket_address"]["port_value"] = stack.free_port()
    resources = template["static_resources"]
    (listener,) = resources.pop("listeners")
    clusters = {cluster["name"]: cluster for cluster in resources["clusters"]}
    resources["listeners"] = []
    resources["clusters"] = [clusters["engines"]]
    for (name, setting), ports in rows.items():
        cluster_name = f"{name}-{setting}"
        for port in (ports.lean, ports.full):
            own = copy.deepcopy(listener)
            own["name"] = f"{cluster_name}-{port}"
            own["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
            manager = own["filter_chains"][0]["filters"][0]["typed_config"]
            filters = {entry["name"]: entry for entry in manager["http_filters"]}
            if name == "direct":
                manager["http_filters"] = manager["http_filters"][-1:]
            else:
                settings = filters["envoy.filters.http.ext_proc"]["typed_config"]
                settings["grpc_service"]["envoy_grpc"]["cluster_name"] = cluster_name
                if port == ports.full:
                    mode = settings["processing_mode"]
                    mode["response_body_mode"] = "FULL_DUPLEX_STREAMED"
            resources["listeners"].append(own)
        if name == "direct":
            continue
        cluster = copy.deepcopy(clusters["extproc"])
        cluster["name"] = cluster_name
        del cluster["health_checks"]  # a paused picker answers none
        if setting != "tls":
            del cluster["transport_socket"]
        cluster["load_assignment"] = stack.assignment(cluster_name, [f"127.0.0.1:{ports.grpc}"])
        resources["clusters"].append(cluster)
    return template
