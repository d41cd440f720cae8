"""One run: requests through Envoy and a picker, or straight to engines as a picker once sent them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from bench import rig
from bench.real_vllm import client, counters, replicas, report, workload
from extproc.demo import stack

#: Requests in flight. Few, so that the order of arrival is nearly that of sending.
AT_ONCE = 4

#: The picker tells of each decision, and draws the same chance in every run.
_CONFIG = """\
apiVersion: extproc/v1alpha1
kind: ExtProcConfig
seed: 7
decisions: {header: true}
"""

#: Seconds in which the picker scrapes an engine once more after the last answer.
_LAST_SCRAPE_S = 0.5


async def routed(
    session: aiohttp.ClientSession,
    engines: Sequence[str],
    strategy: str,
    asks: Sequence[workload.WorkloadRequest],
    *,
    at_once: int = AT_ONCE,
    in_bursts: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """From empty caches, behind a picker that knows nothing yet.

    Args:
        session: For everything.
        engines: Addresses.
        strategy: Of the picker.
        asks: What to send.
        at_once: Requests in flight at most.
        in_bursts: Whether so many are sent together, once all before them are answered.

    Returns:
        The figures, and the engine each request went to; empty where it is unknown.
    """
    await replicas.forget(session, engines)
    async with stack.stack() as children:
        ports = stack.EnvoyPorts(stack.free_port(), stack.free_port(), stack.free_port())
        pages = stack.free_port()
        await children.extproc(
            *("--config-text", _CONFIG, "--endpoints", ",".join(engines)),
            *("--strategy", strategy, "--host", "127.0.0.1", "--drain-timeout", "0s"),
            *("--grpc-port", str(ports.extproc), "--metrics-port", str(pages)),
            *("--grpc-health-port", "0"),
        )
        template = rig.ROOT / "envoy" / "original-dst.yaml"
        await children.envoy(stack.envoy_config(template, ports, engines=engines))
        envoy = f"http://127.0.0.1:{ports.listener}"
        urls = [envoy] * len(asks)
        answers, figures = await _counted(
            session, engines, asks, urls, at_once=at_once, in_bursts=in_bursts
        )
        await asyncio.sleep(_LAST_SCRAPE_S)
        own = await replicas.text(session, f"127.0.0.1:{pages}")
        pool = await replicas.pool(session, f"127.0.0.1:{pages}")
    figures["prediction"] = counters.prediction(answers)
    figures["belief"] = report.belief(own)
    figures["believed"] = report.believed(own)
    figures["picker_differences"] = counters.pool_differences(pool, model=replicas.MODEL)
    return figures, [answer.endpoint for answer in answers]


async def replayed(
    session: aiohttp.ClientSession,
    engines: Sequence[str],
    asks: Sequence[workload.WorkloadRequest],
    places: Sequence[int],
    *,
    at_once: int = AT_ONCE,
    in_bursts: bool = False,
) -> dict[str, Any]:
    """From empty caches, without a picker: each request to the engine that is named for it.

    Args:
        session: For everything.
        engines: Addresses.
        asks: What to send.
        places: Positions in `engines`.
        at_once: Requests in flight at most.
        in_bursts: Whether so many are sent together, once all before them are answered.
    """
    await replicas.forget(session, engines)
    urls = [f"http://{engines[place]}" for place in places]
    _, figures = await _counted(session, engines, asks, urls, at_once=at_once, in_bursts=in_bursts)
    return figures


async def _counted(
    session: aiohttp.ClientSession,
    engines: Sequence[str],
    asks: Sequence[workload.WorkloadRequest],
    urls: Sequence[str],
    *,
    at_once: int,
    in_bursts: bool,
) -> tuple[list[counters.EngineAnswer], dict[str, Any]]:
    """Send between two readings of the engines' counters."""
    before = await replicas.pages(session, engines)
    began = time.perf_counter()
    answers = await client.play(session, urls, asks, at_once=at_once, in_bursts=in_bursts)
    wall_s = time.perf_counter() - began
    after = await replicas.pages(session, engines)
    moved = [
        counters.moved(replicas.load(old), replicas.load(new))
        for old, new in zip(before, after, strict=True)
    ]
    figures = counters.figures(answers, moved, wall_s)
    figures["engine_ms"] = counters.engine_ms(before, after)
    figures["server_ms"] = counters.server_ms(before, after, len(asks))
    places = [answer.endpoint or url for answer, url in zip(answers, urls, strict=True)]
    figures["waits_ms"] = counters.waits_ms(answers, places)
    return answers, figures
