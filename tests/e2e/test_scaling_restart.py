"""Two pickers that scale, behind one Envoy; one is restarted under load, and nothing changes."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import signal
import sys
import time

import pytest

from extproc.demo import stack
from tests.e2e import http1, installation
from tests.support import transport

#: One answer takes some 0.3 s of an engine at this speed.
ASK = json.dumps({"model": "demo", "prompt": "hello", "max_tokens": 60}).encode()
PATH = "/v1/completions"

#: Seconds the policy looks back, and between two looks.
WINDOW_S, INTERVAL_S = 2.0, 0.2

CLIENTS = 6
MOST = 3

#: Seconds a change may take to become visible.
_VISIBLE_S = 300.0


class Keeper:
    """The operator of a machine: runs as many engines as were requested last, by any picker.

    Attributes:
        calls: Requested numbers, in order: the number of the picker, replicas, seconds
            since 1970.
    """

    def __init__(self, children, folder):
        self.calls = []
        self.listed = folder / "endpoints.yaml"
        self.listed.write_text("endpoints: []\n")
        self._notes = folder / "notes"
        self._notes.touch()
        self._children = children
        self._engines = []

    def hook(self, which):
        """The program a picker runs."""
        line = f'echo "{which} $0 $(date +%s.%N)" >> {self._notes}'
        return ["/bin/sh", "-c", line, "{replicas}"]

    @property
    def replicas(self):
        return self.calls[-1][1] if self.calls else 0

    async def run(self):
        """Make it so, until cancelled; a file says nothing by itself."""
        while True:
            lines = [line.split() for line in self._notes.read_text().splitlines()]
            self.calls = [(int(name), int(count), float(at)) for name, count, at in lines]
            missing = self.replicas - len(self._engines)
            if missing > 0:
                self._engines += await asyncio.gather(*(self._engine() for _ in range(missing)))
                self._list()
            while len(self._engines) > self.replicas:
                gone = self._engines.pop()
                self._list()
                await gone.stop()
            await asyncio.sleep(0.05)

    async def _engine(self):
        argv = [sys.executable, "-m", "extproc", "engine", "--port", "0", "--speed", "4"]
        return await self._children.start("engine", argv, ready="listening on ")

    def _list(self):
        addresses = [item.ready_line.rpartition(" ")[2] for item in self._engines]
        installation.replace_file(self.listed, json.dumps({"endpoints": addresses}))


class ReplicaPair:
    """Two pickers, an Envoy, and the operator of the engines."""

    def __init__(self, children, folder):
        self.keeper = Keeper(children, folder)
        self._children = children
        self._folder = folder
        self.grpc = [stack.free_port(), stack.free_port()]
        self.pages = [stack.free_port(), stack.free_port()]
        self.ports = stack.EnvoyPorts(stack.free_port(), stack.free_port(), self.grpc[0])
        self.pickers = []

    async def start(self):
        self.pickers = await asyncio.gather(self.picker(0), self.picker(1))
        config = stack.envoy_config(
            installation.SHIPPED / "original-dst-buffered.yaml", self.ports, plaintext=True
        )
        cluster = installation.cluster(config, "extproc")
        both = [f"127.0.0.1:{port}" for port in self.grpc]
        cluster["load_assignment"] = stack.assignment("extproc", both)
        await self._children.envoy(config)
        await self.until(lambda: self.stat("cluster.extproc.membership_healthy"), 2)

    async def picker(self, which):
        """Start a picker on the ports it has, with the file it has."""
        policy = {"window_s": WINDOW_S, "interval_s": INTERVAL_S, "up": 1.5, "down": 0.0}
        settings = {
            "apiVersion": "extproc/v1alpha1",
            "kind": "ExtProcConfig",
            "scrape": {"enabled": False},
            "scheduling": {"strategy": "least-request"},
            "flow_control": {"enabled": True, "busy_s": 1000},
            "pool": {
                "endpoints_file": str(self.keeper.listed),
                "autoscaling": {
                    "policy": "queue-depth",
                    "params": {**policy, "step_size": MOST},
                    "max": MOST,
                    "exec": self.keeper.hook(which),
                },
            },
            "autoscaling": {
                "peers": [f"127.0.0.1:{port}" for port in self.pages],
                "state_file": str(self._folder / f"state-{which}.json"),
                "save_s": 0.5,
            },
        }
        ports = ["--grpc-port", str(self.grpc[which]), "--metrics-port", str(self.pages[which])]
        return await self._children.extproc(
            *("--config-text", json.dumps(settings), "--secure-serving=false", *ports),
            *("--grpc-health-port", "0", "--host", "127.0.0.1", "--drain-timeout", "1s"),
            *transport.FLAGS,
        )

    async def stat(self, name):
        """A counter or gauge of Envoy."""
        page = (await http1.ask(self.ports.admin, f"/stats?filter=^{name}$")).body.decode()
        return int(page.partition(": ")[2] or 0)

    async def metric(self, which, name):
        """The sum of a picker's metric over its labels."""
        page = (await http1.ask(self.pages[which], "/metrics")).body.decode()
        lines = [line.rpartition(" ") for line in page.splitlines()]
        return sum(float(value) for key, _, value in lines if key.partition("{")[0] == name)

    async def until(self, ask, wanted):
        """Ask until it is so; there is no event for it outside the processes."""
        result = None
        try:
            async with asyncio.timeout(_VISIBLE_S):
                while (result := await ask()) != wanted:
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"{result}, not {wanted}; asked: {self.keeper.calls}") from None

    async def replaced(self, how):
        """End the first picker, and start another one in its place."""
        old = self.pickers[0].process
        old.send_signal(how)
        assert await old.wait() == (0 if how == signal.SIGTERM else -how)
        self.pickers[0] = await self.picker(0)
        await self.until(lambda: self.stat("cluster.extproc.membership_healthy"), 2)


@contextlib.asynccontextmanager
async def place(folder):
    async with stack.stack() as children:
        item = ReplicaPair(children, folder)
        await item.start()
        keeping = asyncio.ensure_future(item.keeper.run())
        try:
            yield item
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await asyncio.gather(*(picker.stop(signal.SIGINT) for picker in item.pickers))


def now():
    """Seconds since 1970, as the programs that pickers run write them down."""
    return dt.datetime.now(dt.UTC).timestamp()


async def asking(port, stop):
    """Ask again and again; the statuses."""
    statuses = []
    while not stop.is_set():
        statuses.append((await http1.ask(port, PATH, ASK)).status)
    return statuses


async def window(item):
    """Wait until the picker that was replaced has seen a whole window and more of the load."""
    observed = await item.metric(0, "extproc_streams_total")
    async with asyncio.timeout(_VISIBLE_S):
        begun = time.monotonic()
        while time.monotonic() - begun < WINDOW_S + 2 * INTERVAL_S:
            await asyncio.sleep(INTERVAL_S)
    assert await item.metric(0, "extproc_streams_total") > observed


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
@pytest.mark.slow
async def test_a_restart_under_load_keeps_the_replicas(tmp_path, how):
    """Replicas stay until a window after the load; no request is lost but those a kill cuts."""
    async with place(tmp_path) as item:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            loads = [tasks.create_task(asking(item.ports.listener, stop)) for _ in range(CLIENTS)]
            for which in range(2):
                await item.until(
                    lambda which=which: item.metric(which, "extproc_endpoint_up"), MOST
                )
            await item.replaced(how)
            begun = now()
            line = "going on with what was kept of 1 pools"
            assert any(line in text for text in item.pickers[0].last_lines)
            await window(item)
            assert await item.metric(0, "extproc_scaling_desired_replicas") == MOST
            ended = now()
            stop.set()
        statuses = [status for load in loads for status in load.result()]
        lost = [status for status in statuses if status != 200]
        # Each client has one request under way, which the kill may cut.
        assert len(lost) <= (0 if how == signal.SIGTERM else CLIENTS), lost
        for which in range(2):
            await item.until(lambda which=which: item.metric(which, "extproc_endpoint_up"), 0)
        during = [count for _, count, at in item.keeper.calls if at < ended]
        assert during == sorted(during), item.keeper.calls
        after = [(name, count, at) for name, count, at in item.keeper.calls if at >= begun]
        assert {count for _, count, _ in after} == {0}, item.keeper.calls
        # The last look that saw load may be an interval older than its end.
        first = min(at for _, _, at in after) + INTERVAL_S
        assert ended + WINDOW_S <= first
