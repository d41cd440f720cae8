"""A real Prometheus and its promtool, for tests of queries and rules."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import urllib.parse
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from extproc.demo import stack
from tests.monitoring import files
from tests.support import programs

#: Seconds between scrapes, and between evaluations of the rules.
INTERVAL_S = 1

#: Times of rules are so many times shorter than in production: five minutes are ten seconds.
SPEEDUP = 30

#: Shortest window: on a busy machine several scrapes in a row may take longer than the interval.
_LEAST_WINDOW_S = 10 * INTERVAL_S

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def need(name: str) -> str:
    """Path of a program of Prometheus; skips, or fails where it is required."""
    path = shutil.which(name)
    if path:
        return path
    raise programs.missing(
        f"needs {name}: apt-get install prometheus", "EXTPROC_REQUIRE_PROMETHEUS"
    )


def promtool(*words: str | Path) -> str:
    """Output of promtool; fails where it does."""
    command = [need("promtool"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shortened(expr: str) -> str:
    """An expression whose windows are `SPEEDUP` times shorter, but ten scrapes at least."""
    return re.sub(r"(?<=\[)[0-9]+[smhd](?=\])|(?<=offset )[0-9]+[smhd]", _shorter, expr)


def _shorter(match: re.Match[str]) -> str:
    return f"{max(_LEAST_WINDOW_S, _shortened_s(match[0]))}s"


def shortened_duration(duration: str) -> str:
    """A duration that is `SPEEDUP` times shorter, in whole seconds."""
    return f"{_shortened_s(duration)}s"


def _shortened_s(duration: str) -> int:
    return int(duration[:-1]) * _UNITS_S[duration[-1]] // SPEEDUP


def shortened_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of rules with shorter windows."""
    return [
        {**group, "rules": [_shortened_rule(rule) for rule in group["rules"]]} for group in groups
    ]


def _shortened_rule(rule: dict[str, Any]) -> dict[str, Any]:
    result = {**rule, "expr": shortened(rule["expr"])}
    if "for" in rule:
        result["for"] = shortened_duration(rule["for"])
    return result


class Prometheus:
    """A running Prometheus.

    Attributes:
        port: Port of its API.
    """

    def __init__(self, port: int) -> None:
        self.port = port

    @classmethod
    async def start(
        cls,
        children: stack.Stack,
        folder: Path,
        targets: Mapping[str, int],
        groups: Sequence[dict[str, Any]] = (),
    ) -> Prometheus:
        """Start one that scrapes ports of this machine.

        Args:
            children: What its process belongs to.
            folder: An empty folder for its files.
            targets: Ports whose `/metrics` it scrapes, by namespace.
            groups: Groups of rules.
        """
        (folder / "rules.yml").write_text(files.dumped({"groups": list(groups)}))
        config = {
            "global": {
                "scrape_interval": f"{INTERVAL_S}s",
                "scrape_timeout": f"{INTERVAL_S}s",
                "evaluation_interval": f"{INTERVAL_S}s",
            },
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {
                    "job_name": namespace,
                    "static_configs": [
                        {"targets": [f"127.0.0.1:{port}"], "labels": {"namespace": namespace}}
                    ],
                }
                for namespace, port in targets.items()
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = stack.free_port()
        argv = [
            need("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        await children.start("prometheus", argv, ready="Server is ready to receive web requests")
        return cls(port)

    async def query(self, promql: str) -> list[dict[str, Any]]:
        """The series of an expression now: `metric` and `value`."""
        result: list[dict[str, Any]] = (await self._get("query", query=promql))["result"]
        return result

    async def firing(self) -> set[tuple[str, str]]:
        """Names of the alerts that fire, and the endpoint of each, where it has one."""
        alerts = (await self._get("alerts"))["alerts"]
        return {
            (alert["labels"]["alertname"], alert["labels"].get("endpoint", ""))
            for alert in alerts
            if alert["state"] == "firing"
        }

    async def rule_errors(self) -> list[str]:
        """Errors of rules when they were evaluated last."""
        groups = (await self._get("rules"))["groups"]
        return [rule["lastError"] for rule in _rules(groups) if rule.get("lastError")]

    async def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            body = await answer.json()
        assert body["status"] == "success", (parameters, body)
        data: dict[str, Any] = body["data"]
        return data


def _rules(groups: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for group in groups:
        yield from group["rules"]


async def until(
    reached: Callable[[], Awaitable[Any]], missing: Callable[[], object], *, limit_s: float = 300.0
) -> None:
    """Wait until a coroutine function returns something true.

    Args:
        reached: Called again and again.
        missing: What to say when it never does.
        limit_s: Longest wait (seconds).
    """
    try:
        async with asyncio.timeout(limit_s):
            while not await reached():
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise AssertionError(f"it did not become so; at last: {missing()}") from None
