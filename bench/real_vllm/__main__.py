"""`python -m bench.real_vllm`: see the package."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench import rig
from bench.real_vllm import client, counters, install, replicas, report, tiny, workload
from extproc.cli import stack
from extproc.errors import ConfigError

STRATEGIES = ("round-robin", "prefix-hash", "adaptive")
GROUPS = (12, 24)
#: Groups of each adapter.
ADAPTER_GROUPS = 3
#: Requests in flight. Few, so that the order of arrival is nearly that of sending.
AT_ONCE = 4
SEED = 7
#: The picker tells of each decision, and draws the same chance in every run.
_CONFIG = """\
apiVersion: extproc/v1alpha1
kind: ExtProcConfig
seed: 7
explain: {header: true}
"""
REQUEST_TIMEOUT_S = 60.0
#: Everything after the installation; ten times what it takes on two free cores.
TOTAL_TIMEOUT_S = 1200.0


def cache() -> Path:
    """Where the virtualenv is kept unless somebody says otherwise."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "extproc-real-vllm"


def outside(folder: Path) -> Path:
    """The folder, if it is not inside the repository.

    Raises:
        ConfigError: It is.
    """
    resolved = folder.expanduser().resolve()
    if resolved.is_relative_to(rig.ROOT):
        raise ConfigError(
            "--folder",
            wanted="a folder outside the repository",
            found=str(folder),
            fix="leave it out, or name one elsewhere",
        )
    return resolved


async def measure(
    session: aiohttp.ClientSession,
    engines: Sequence[str],
    strategy: str,
    runs: Sequence[tuple[str, Sequence[workload.Ask]]],
) -> dict[str, dict[str, Any]]:
    """Each run from empty caches, behind a picker that knows nothing yet.

    Args:
        session: For everything.
        engines: Addresses.
        strategy: Of the picker.
        runs: Names and requests.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, asks in runs:
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
            before = await replicas.loads(session, engines)
            began = time.perf_counter()
            answers = await client.play(
                session, f"http://127.0.0.1:{ports.listener}", asks, at_once=AT_ONCE
            )
            wall_s = time.perf_counter() - began
            # The picker's last scrape of a busy engine comes within this time.
            await asyncio.sleep(0.5)
            after = await replicas.loads(session, engines)
            moved = [counters.moved(*pair) for pair in zip(before, after, strict=True)]
            own = await replicas.text(session, f"127.0.0.1:{pages}")
        found[name] = {
            **counters.figures(answers, moved, wall_s),
            "prediction": counters.prediction(answers),
            "belief": report.belief(own),
        }
        print(f"{strategy:12} {name:10} {report.line(found[name])}", flush=True)
    return found


async def compare(python: Path, model: Path) -> dict[str, Any]:
    """The same runs on real engines and on simulated ones."""
    runs = [
        (f"{groups} groups", workload.asks([replicas.MODEL], groups, seed=SEED))
        for groups in GROUPS
    ]
    runs.append(("adapters", workload.asks(tiny.ADAPTERS, ADAPTER_GROUPS, seed=SEED)))
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        async with stack.stack() as children:
            print("starting two real engines", flush=True)
            async with replicas.real(children, session, python=python, model=model) as engines:
                real = {
                    strategy: await measure(session, engines, strategy, runs)
                    for strategy in STRATEGIES
                }
                wrong: list[str] = []
                for engine in engines:
                    served = await replicas.text(session, engine)
                    listed = await replicas.models(session, engine)
                    wrong += counters.differences(served, adapters=tiny.ADAPTERS, models=listed)
        print("the same with simulated engines", flush=True)
        async with stack.stack() as children:
            engines = await replicas.simulated(children)
            simulated = {
                strategy: await measure(session, engines, strategy, runs) for strategy in STRATEGIES
            }
    prompt = real[STRATEGIES[0]][f"{GROUPS[0]} groups"]
    each = prompt["counter_tokens"]["prompt"] / prompt["requests"]
    return {
        "prompt_tokens": round(each),
        "ideal_hit_ratio": round(workload.ideal(each, replicas.BLOCK_TOKENS), 4),
        "real": real,
        "simulated": simulated,
        "page_differences": wrong,
    }


async def _bounded(python: Path, model: Path) -> dict[str, Any]:
    """`compare` with an end, also when it is asked to end: children go with the blocks."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with asyncio.timeout(TOTAL_TIMEOUT_S):
        return await compare(python, model)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.real_vllm", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=cache(), help="virtualenv and model (%(default)s)"
    )
    parser.add_argument("--python", default=sys.executable, help="to make the virtualenv of")
    parser.add_argument("--write", action="store_true", help="write bench/results/real_vllm.json")
    given = parser.parse_args()
    try:
        folder = outside(given.folder)
        folder.mkdir(parents=True, exist_ok=True)
        python, installed = install.ensure(folder / "venv", base=given.python)
        model = tiny.build(folder)
        figures = asyncio.run(_bounded(python, model))
    except ConfigError as error:
        print(f"bench.real_vllm: {error}", file=sys.stderr)
        return 2
    except asyncio.CancelledError:
        return 130
    print(report.table(figures))
    problems = report.problems(figures)
    for problem in problems:
        print(f"WRONG: {problem}")
    if given.write:
        settings = {
            **installed,
            "replicas": replicas.COUNT,
            "kv_tokens": replicas.BLOCKS * replicas.BLOCK_TOKENS,
            "block_tokens": replicas.BLOCK_TOKENS,
            "shared_tokens": workload.SHARED_TOKENS,
            "own_tokens": workload.OWN_TOKENS,
            "requests_of_a_group": workload.EACH,
            "at_once": AT_ONCE,
            "seed": SEED,
        }
        path = rig.write("real_vllm", "python -m bench.real_vllm --write", {**settings, **figures})
        print(f"wrote {path.relative_to(rig.ROOT)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
