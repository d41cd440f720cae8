"""`extproc demo-scale`: a real Envoy, extproc, and no engine before the first request.

The first request is held while extproc starts an engine, load calls for more, and silence takes all
of them away. Everything listens on free loopback ports and is gone at the end.

Exit status: 0 all requests were answered, and no engine is left; 1 otherwise; 2 wrong flags or files,
or a child did not start; 130 Ctrl-C before the result, 143 SIGTERM before it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from extproc.autoscaling.scaling_history import HistoryRow
from extproc.cli import envoy_config
from extproc.demo import scaling_plot, stack

_MODEL = "demo-model"
_MOST = 4

#: A real cold start takes a minute; everything here is some ten times faster. In short, the load is a
#: fifth, and what is waited for half.
_COLD_S = 4.0
_SHORT_LOAD, _SHORT_WAITS = 0.2, 0.5

#: Requests one simulated engine takes at once, and tokens of an answer: some 3 s of work.
_AT_ONCE, _TOKENS = 4, 120

#: How many clients ask, and for how long (seconds).
_LOAD = ((2, 10.0), (20, 30.0), (2, 15.0))

#: Seconds between two looks at the picker, and until zero must be reached.
_LOOK_S, _ZERO_S = 0.5, 60.0

#: What the policy waits for, and how long it looks back (seconds).
_WAITS_S = {"wait_s": 3.0, "rise_s": 3.0, "window_s": 15.0, "down_s": 6.0, "idle_s": 8.0}


class ClientAnswer(msgspec.Struct, frozen=True):
    """One answer.

    Attributes:
        status: HTTP status; 0 where there was none.
        seconds: From asking to the last byte.
        error: Status and body, or the broken connection, of a request that failed; else empty.
    """

    status: int
    seconds: float
    error: str = ""


class DemoAddresses(msgspec.Struct, frozen=True):
    """Addresses of the demo installation."""

    envoy: int
    pages: int


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add = parser.add_argument
    add(
        "--envoy-config",
        default="original-dst",
        metavar="NAME|FILE",
        help="Envoy profile or file (%(default)s)",
    )
    add(
        "--plot",
        type=Path,
        default=".cache/demo-scale.png",
        metavar="FILE",
        help="file for the charts; ends in .svg or .png (%(default)s)",
    )
    add(
        "--short",
        action="store_true",
        help="a shorter demo: a fifth of the load, and quicker scaling",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit status.

    Raises:
        ConfigError: A flag or the file that it names is wrong, or there is no Envoy.
    """
    import uvloop

    from extproc.simulator import report_plots

    report_plots.require_format("--plot", args.plot)
    template = envoy_config.find(args.envoy_config, where="--envoy-config")
    try:
        return uvloop.run(_demo(template, args.plot, short=args.short))
    except asyncio.CancelledError:
        return stack.TERMINATED


async def _demo(template: Path, plot: Path, *, short: bool) -> int:
    stack.stop_on_signals()
    async with stack.stack() as children, aiohttp.ClientSession() as http:
        place = await _install(children, template, waits=_SHORT_WAITS if short else 1.0)
        chart = scaling_plot.ScalingPlot()
        watching = asyncio.get_running_loop().create_task(watch(http, place, chart), name="watch")
        try:
            answers = await _play(http, place, chart, share=_SHORT_LOAD if short else 1.0)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
    print(scaling_plot.as_text(chart))
    lost = [answer.error for answer in answers if answer.status != 200]
    slowest = max(answer.seconds for answer in answers)
    print(f"{len(answers)} requests, {len(lost)} lost, the slowest took {slowest:.1f} s.")
    print(*lost, sep="\n", end="\n" if lost else "")
    back = bool(chart.rows) and chart.rows[-1].available == 0
    print("No engine is left." if back else "Engines still run: the demo did not scale to zero.")
    print(scaling_plot.save_plot(chart, plot))
    return 1 if lost or not back else 0


def _scaling(*, waits: float) -> dict[str, Any]:
    """Settings of autoscaling, with times of another length."""
    return {
        "policy": "adaptive",
        "params": {name: waits * it for name, it in _WAITS_S.items()} | {"interval_s": 0.5},
        "meter": {"cold_start_s": waits * (_COLD_S + 2.0), "concurrency": _AT_ONCE},
        "min": 0,
        "max": _MOST,
    }


async def _install(children: stack.Stack, template: Path, *, waits: float) -> DemoAddresses:
    engine = [sys.executable, "-m", "extproc", "engine", "--port", "{port}", "--model", _MODEL]
    engine += ["--cold-start-s", str(waits * _COLD_S), "--max-num-seqs", str(_AT_ONCE)]
    config = {
        "apiVersion": "extproc/v1alpha1",
        "kind": "ExtProcConfig",
        "flow_control": {"enabled": True},
        "pool": {"autoscaling": {**_scaling(waits=waits), "launch": {"command": engine}}},
    }
    ports = stack.EnvoyPorts(
        listener=stack.free_port(), admin=stack.free_port(), extproc=stack.free_port()
    )
    envoy = stack.envoy_config(template, ports)
    pages = stack.free_port()
    await children.extproc(
        *("--config-text", json.dumps(config), "--host", "127.0.0.1", "--drain-timeout", "0s"),
        *("--grpc-port", str(ports.extproc), "--grpc-health-port", str(stack.free_port())),
        *("--metrics-port", str(pages)),
    )
    await children.envoy(envoy)
    return DemoAddresses(ports.listener, pages)


async def _play(
    http: aiohttp.ClientSession,
    place: DemoAddresses,
    chart: scaling_plot.ScalingPlot,
    *,
    share: float,
) -> Sequence[ClientAnswer]:
    print(f"No engine runs, {_MOST} at most may. One request:")
    first = await ask(http, place)
    print(f"  held while an engine started, answered with {first.status} in {first.seconds:.1f} s")
    answers = [first]
    for clients, seconds in _LOAD:
        print(f"{clients} clients, {share * seconds:.0f} s")
        until = time.monotonic() + share * seconds
        async with asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(ask_until(http, place, until), name="client")
                for _ in range(clients)
            ]
        answers += [answer for task in asking for answer in task.result()]
        num_engines = chart.rows[-1].available if chart.rows else 0
        print(f"  {num_engines} {'engine serves' if num_engines == 1 else 'engines serve'}")
    print("No more requests, until scale to zero")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ZERO_S):
            await chart.empty()
    return answers


async def ask_until(
    http: aiohttp.ClientSession, place: DemoAddresses, until: float
) -> Sequence[ClientAnswer]:
    """Send requests one after the other until a time, or until one is lost.

    Without Envoy or extproc, thousands would be lost, each at once, and shown at the end.
    """
    answers: list[ClientAnswer] = []
    while time.monotonic() < until and all(answer.status == 200 for answer in answers[-1:]):
        answers.append(await ask(http, place))
    return answers


async def ask(http: aiohttp.ClientSession, place: DemoAddresses) -> ClientAnswer:
    """Send one request; returns what came of it, whatever that is."""
    began = time.monotonic()
    body = {"model": _MODEL, "prompt": "What is an engine?", "max_tokens": _TOKENS}
    url = f"http://127.0.0.1:{place.envoy}/v1/completions"
    status, error = 0, ""
    try:
        async with http.post(url, json=body) as answer:
            status = answer.status
            text = await answer.text()
            error = "" if status == 200 else f"{status} {text}"
    except (aiohttp.ClientError, TimeoutError) as cut:
        status, error = 0, repr(cut)
    return ClientAnswer(status, time.monotonic() - began, error)


async def watch(
    http: aiohttp.ClientSession, place: DemoAddresses, chart: scaling_plot.ScalingPlot
) -> None:
    """Look at the picker's page, where it can be read, until cancelled."""
    began, url = time.monotonic(), f"http://127.0.0.1:{place.pages}/metrics"
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            async with http.get(url) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            continue  # the requests show what came of it
        samples = dict(re.findall(r"^extproc_scaling_(\w+\{.*?\}) (\S+)$", text, re.MULTILINE))
        pool = '{pool=""}'
        chart.add(
            HistoryRow(
                at_s=time.monotonic() - began,
                depth=float(samples.get(f"queue_depth{pool}", 0.0)),
                depth_mean=float(samples.get(f"queue_depth_mean{pool}", 0.0)),
                queries_per_s=float(samples.get(f"requests_per_second{pool}", 0.0)),
                spec=int(float(samples.get('replicas{pool="",state="spec"}', 0.0))),
                available=int(float(samples.get('replicas{pool="",state="available"}', 0.0))),
            )
        )
