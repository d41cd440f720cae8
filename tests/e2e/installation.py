"""A whole installation on loopback for one module of tests: extproc and Envoy, as processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from extproc.demo import stack
from tests.e2e import http1
from tests.support import transport
from tests.support.canary import CANARY

SHIPPED = Path(__file__).resolve().parents[2] / "envoy"

#: Endpoints are what the test says they are: their metrics pages are not scraped.
UNSCRAPED = (
    "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, scrape: {enabled: false}, "
    "scheduling: {strategy: least-request}}"
)

#: Seconds a fact may take to become visible on a page.
_VISIBLE_S = 300.0

#: What no process of an installation says when all is well. What happens to engines is no alarm:
#: most tests stage that.
_ALARMS = re.compile(
    r"Traceback|Exception|\bERROR\b|\bWARNING\b(?! extproc\.pool )|RuntimeWarning"
    r"|never (retrieved|awaited)"
    r"|was destroyed|^extproc: [EWF]\d{4} "
)

#: Accounts that go back to zero when nothing is under way.
_ACCOUNTS = (
    "extproc_streams_open",
    "extproc_body_buffer_bytes",
    "extproc_endpoint_inflight_requests",
)


def replace_file(path: Path, text: str) -> None:
    """Replace a file that a running picker reads: at no moment it is empty or half written."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)


class Installation:
    """extproc and Envoy, and what can be asked of them.

    Attributes:
        port: Where clients connect.
        ports: All of Envoy's ports.
        children: For further processes.
        extproc: The picker's process.
        envoy: Envoy's process.
        lines: Everything any process said.
        alarms: Parts of lines that a test provokes and expects.
    """

    def __init__(self, arguments: Sequence[str], config: dict[str, Any], binary: str) -> None:
        self.lines: list[str] = []
        self._line_taken = asyncio.Event()
        self.children = stack.Stack(log=self._take_line)
        self.alarms: list[str] = []
        self._arguments = list(arguments)
        self._config = config
        self._binary = binary
        self.ports = stack.EnvoyPorts(0, 0, 0)
        self.pages = self.health = 0

    def _take_line(self, line: str) -> None:
        self.lines.append(line)
        self._line_taken.set()

    @property
    def port(self) -> int:
        return self.ports.listener

    async def start_extproc(self) -> None:
        """Start the picker, on the ports it had before."""
        numbers = (self.ports.extproc, self.health, self.pages)
        flags = ("--grpc-port", "--grpc-health-port", "--metrics-port")
        where = [word for pair in zip(flags, map(str, numbers), strict=True) for word in pair]
        self.extproc = await self.children.extproc(
            *("--host", "127.0.0.1", "--drain-timeout", "0s", *transport.FLAGS),
            *("--log-requests", "all"),
            *(*self._arguments, *where),
        )

    async def start_envoy(self) -> None:
        """Start Envoy, on the ports it had before."""
        self.envoy = await self.children.envoy(self._config, binary=self._binary)

    async def metrics(self) -> dict[str, float]:
        """The picker's metrics, by name and labels as written, without a pool that has no name."""
        page = (await http1.ask(self.pages, "/metrics")).body.decode()
        for unnamed, bare in (('{pool=""}', ""), ('{pool="",', "{"), (',pool=""', "")):
            page = page.replace(unnamed, bare)
        split = [line.rpartition(" ") for line in page.splitlines() if line[:1] not in {"#", ""}]
        return {name: float(value) for name, _, value in split}

    async def stats(self) -> dict[str, int]:
        """Envoy's counters and gauges that were ever touched, and are not zero."""
        page = (await http1.ask(self.ports.admin, "/stats?usedonly")).body.decode()
        split = [line.partition(": ") for line in page.splitlines()]
        return {name: int(value) for name, _, value in split if value.isdigit() and int(value)}

    async def until_stats(self, holds: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """Read Envoy's counters and gauges until a fact shows; there is no event for it."""
        async with asyncio.timeout(_VISIBLE_S):
            while not holds(result := await self.stats()):
                await asyncio.sleep(0.1)
        return result

    async def total(self, name: str) -> float:
        """The sum of a metric over its labels."""
        result = await self.metrics()
        return sum(value for key, value in result.items() if key.partition("{")[0] == name)

    async def until(self, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Read the metrics until a fact shows; there is no event for it outside the process."""
        result: dict[str, float] = {}
        try:
            async with asyncio.timeout(_VISIBLE_S):
                while not holds(result := await self.metrics()):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            shown = {key: value for key, value in result.items() if "_bucket" not in key}
            raise AssertionError(f"it did not become so; at last: {shown}") from None
        return result

    async def access(self, **fields: Any) -> dict[str, Any]:
        """The first line of Envoy's access log with these fields; it is written a moment later."""
        async with asyncio.timeout(_VISIBLE_S):
            while True:
                self._line_taken.clear()
                for line in self.lines:
                    if line.startswith("envoy: {"):
                        entry: dict[str, Any] = json.loads(line.removeprefix("envoy: "))
                        if fields.items() <= entry.items():
                            return entry
                await self._line_taken.wait()

    async def settled(self) -> None:
        """Every account is back at exactly zero."""
        await self.until(
            lambda result: not any(result[key] for key in result if key.startswith(_ACCOUNTS))
        )

    async def check(self) -> None:
        """Checks of every installation at its end."""
        await self.settled()
        result = await self.metrics()
        for end in ("error", "protocol"):
            assert result.get(f'extproc_streams_total{{result="{end}"}}', 0) == 0
        if self.envoy.process.returncode is None:
            for name, count in (await self.stats()).items():
                assert not name.endswith(".spurious_msgs_received"), (name, count)
        code = await self.extproc.stop(signal.SIGINT)
        assert code == 0, (code, self.lines[-20:])
        expected = [re.escape(part) for part in self.alarms]
        for line in self.lines:
            alarm = line.startswith("extproc: ") and _ALARMS.search(line)
            assert not alarm or re.search("|".join(expected) or "(?!)", line), line
            assert CANARY not in line


@contextlib.asynccontextmanager
async def installed(
    *endpoints: str,
    template: str = "original-dst.yaml",
    plaintext: bool = True,
    arguments: Sequence[str] = ("--config-text", UNSCRAPED),
    change: Callable[[dict[str, Any]], None] = lambda config: None,
    listed: Sequence[str] | None = None,
    binary: str = "",
):
    """Start extproc and Envoy; at the end, everything must have come back to nothing.

    Args:
        endpoints: What extproc routes to; none leaves that to `arguments`.
        template: Which of the shipped Envoy configurations.
        plaintext: Without TLS between Envoy and extproc.
        arguments: Further words for `extproc serve`; by default nothing is scraped.
        change: Edits Envoy's configuration.
        listed: Endpoints for a cluster that lists them, where they differ.
        binary: Which Envoy.
    """
    ports = stack.EnvoyPorts(stack.free_port(), stack.free_port(), stack.free_port())
    config = stack.envoy_config(
        SHIPPED / template,
        ports,
        engines=listed or endpoints,
        plaintext=plaintext,
        has_access_log=True,
    )
    change(config)
    words = ["--secure-serving", "false"] if plaintext else []
    words += ["--endpoints", ",".join(endpoints)] if endpoints else []
    fixture = Installation([*words, *arguments], config, binary)
    fixture.ports = ports
    fixture.health, fixture.pages = stack.free_port(), stack.free_port()
    try:
        await fixture.start_extproc()
        await fixture.start_envoy()
        yield fixture
        await fixture.check()
    finally:
        await fixture.children.stop()


def first_and_slow(templates: Sequence[str]) -> list[Any]:
    """Parameters of a test: the first template, and the others for `make test-slow`."""
    first, *others = templates
    return [first, *(pytest.param(template, marks=pytest.mark.slow) for template in others)]


# Editing Envoy's configuration


def manager(config: dict[str, Any], listener: int = 0) -> dict[str, Any]:
    """The HTTP connection manager of a listener."""
    chain = config["static_resources"]["listeners"][listener]["filter_chains"][0]
    return chain["filters"][0]["typed_config"]


def processor(config: dict[str, Any], listener: int = 0) -> dict[str, Any]:
    """The ext_proc filter of a listener."""
    filters = manager(config, listener)["http_filters"]
    return next(item for item in filters if item["name"].endswith("ext_proc"))["typed_config"]


def name_xds_server(port: int) -> Callable[[dict[str, Any]], None]:
    """The change that has Envoy look for its xDS server on a port of loopback, if it asks one."""

    def change(config: dict[str, Any]) -> None:
        for item in config["static_resources"]["clusters"]:
            if item["name"] == "extproc-xds":
                item["load_assignment"] = stack.assignment(item["name"], [f"127.0.0.1:{port}"])

    return change


def cluster(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A cluster by name."""
    return next(item for item in config["static_resources"]["clusters"] if item["name"] == name)


def keep_selection(config: dict[str, Any]) -> None:
    """Let the conformance tests' selection header through, as a test gateway does."""
    keep_headers(config, "test-epp-endpoint-selection")


def keep_headers(config: dict[str, Any], *names: str) -> None:
    """Let headers of clients through to the picker, on every listener."""
    for number in range(len(config["static_resources"]["listeners"])):
        filters = manager(config, number)["http_filters"]
        mutation = next(item for item in filters if item["name"].endswith("header_mutation"))
        removed = mutation["typed_config"]["mutations"]["request_mutations"]
        removed[:] = [entry for entry in removed if entry["remove"] not in names]
