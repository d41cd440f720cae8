"""`extproc demo`: a real Envoy, extproc and four simulated engines, and what routing changes.

The same conversations run twice, by round robin and by the default strategy, each time on fresh
engines with empty caches. Everything listens on loopback and is gone at the end; with --keep it
stays, on the usual ports where they are free.

Exit status: 0 all requests were answered, also after the Ctrl-C that ends --keep; 1 some failed;
2 wrong flags or files, or a child did not start; 130 Ctrl-C before the result, 143 SIGTERM before it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from extproc import distribution
from extproc.cli import envoy_config, main
from extproc.config.settings import API_VERSION, KIND
from extproc.demo import stack, traffic
from extproc.endpoint import Load
from extproc.errors import ConfigError
from extproc.scrape import metrics_page
from extproc.server import transport
from extproc.simulator import engine_command, simulate_command
from extproc.supervision import run_forever

_ENGINES = 4
_MODEL = "demo-model"
_ADAPTERS = ("sql-lora", "chat-lora", "code-lora", "docs-lora")
_CONVERSATIONS = 40
_TURNS = 5
_AT_ONCE = 16
_FIRST_ENGINE_PORT = 8001
_STRATEGIES = ("round-robin", "adaptive")

#: Configuration of a demo that stays: the console shows first token and usage of every request.
_KEPT_CONFIG = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "responses": {"stream_sample_ratio": 1.0},
}


class StrategyRun(msgspec.Struct, frozen=True):
    """Results of one strategy.

    Attributes:
        samples: One per request.
        hit_ratio: Share of prompt tokens the engines found in their prefix caches.
        requests: Requests by engine address.
    """

    strategy: str
    samples: Sequence[traffic.AnswerSample]
    hit_ratio: float
    requests: Counter[str]


class DemoInstallation(msgspec.Struct, frozen=True):
    """Ports and addresses of the demo installation.

    Attributes:
        access_log: File with the access log of Envoy; None where there is none.
    """

    envoy: int
    admin: int
    metrics: int
    engines: tuple[str, ...]
    access_log: Path | None = None


class Ports:
    """Ports of an installation.

    Args:
        usual: Whether to take those that the documentation names, where they are free.
    """

    def __init__(self, *, usual: bool) -> None:
        self._usual = usual

    def take(self, number: int) -> int:
        """This port, or any that is free and that no other demo is about to take."""
        if self._usual and not transport.is_taken("127.0.0.1", number) and stack.claim_port(number):
            return number
        return stack.free_port()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--keep", action="store_true", help="leave it running until Ctrl-C")
    parser.add_argument(
        "--envoy-config",
        default="override-host-eds",
        metavar="NAME|FILE",
        help="the Envoy configuration to run (%(default)s)",
    )
    parser.add_argument(
        "--conversations",
        type=simulate_command.count,
        default=_CONVERSATIONS,
        metavar="N",
        help="how many of five turns to hold; fewer fit into the caches of any engine (%(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=engine_command.whole_number,
        default=1,
        help="seed of the conversations (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit status."""
    import uvloop

    try:
        template = envoy_config.find(args.envoy_config, where="--envoy-config")
        talks = traffic.conversations(
            args.conversations, _TURNS, model=_MODEL, adapters=_ADAPTERS, seed=args.seed
        )
        return uvloop.run(_demo(template, talks, keep=args.keep))
    except ConfigError as error:
        main.print_error(error)
        return 2
    except asyncio.CancelledError:
        return stack.TERMINATED


async def _demo(template: Path, talks: Sequence[traffic.ChatConversation], *, keep: bool) -> int:
    stack.stop_on_signals()
    total = len(talks) * _TURNS
    held = "1 conversation" if len(talks) == 1 else f"{len(talks)} conversations"
    print(
        f"{_ENGINES} simulated vLLM engines, {held} of {_TURNS} turns, "
        f"{_AT_ONCE} at once, a quarter on {len(_ADAPTERS)} LoRA adapters."
    )
    runs = []
    for strategy in _STRATEGIES:
        last = strategy == _STRATEGIES[-1]
        async with stack.stack() as children:
            ports = Ports(usual=keep and last)
            place = await _install(children, template, strategy, ports, is_kept=keep)
            runs.append(await _measure(place, strategy, talks, show=_progress(strategy, total)))
            if last:
                print(_table(runs))
                print(await find_decision(place, total))
                print(render_hints(place, keep=keep))
            if last and keep:
                with contextlib.suppress(asyncio.CancelledError):  # the end that the hints name
                    await children.watch(_report_end)
                    await run_forever()
    return 0 if _healthy(runs) else 1


def _report_end(child: stack.Child) -> None:
    """Show that a child ended, and that the others go on: one may have been killed as a test."""
    line = main.to_printable(child.describe_end())
    print(f"extproc: warning: {line}", file=sys.stderr, flush=True)


async def _install(
    children: stack.Stack, template: Path, strategy: str, numbers: Ports, *, is_kept: bool
) -> DemoInstallation:
    engines = [numbers.take(_FIRST_ENGINE_PORT + at) for at in range(_ENGINES)]
    addresses = tuple(f"127.0.0.1:{port}" for port in engines)
    envoy_ports = stack.EnvoyPorts(
        listener=numbers.take(8080), admin=numbers.take(9901), extproc=numbers.take(9002)
    )
    metrics, xds = numbers.take(9090), numbers.take(18000)
    access_log = children.folder / "envoy-access.log" if is_kept else None
    config = stack.envoy_config(
        template,
        envoy_ports,
        access_log=access_log,
        engines=addresses,
        pickers={"extproc-xds": [f"127.0.0.1:{xds}"]},
    )
    # Envoy would share its port with any other process of this user, which then gets some requests.
    config["static_resources"]["listeners"][0]["enable_reuse_port"] = False
    loras = [word for name in _ADAPTERS for word in ("--lora", name)]
    arguments = ["--model", _MODEL, "--profile", "demo", "--max-loras", "2", *loras]
    await asyncio.gather(*(children.engine("--port", str(port), *arguments) for port in engines))
    words = ["--endpoints", ",".join(addresses), "--strategy", strategy, "--host", "127.0.0.1"]
    words += ["--grpc-port", str(envoy_ports.extproc)]
    words += ["--grpc-health-port", str(numbers.take(9003))]
    words += ["--metrics-port", str(metrics), "--drain-timeout", "0s"]
    if is_kept:
        words += ["--config-text", msgspec.json.encode(_KEPT_CONFIG).decode()]
    if stack.asks_for_xds(template):
        words += ["--xds", "--xds-port", str(xds), "--fallback-endpoints", "2"]
    await children.extproc(*words)
    await children.envoy(config)
    return DemoInstallation(envoy_ports.listener, envoy_ports.admin, metrics, addresses, access_log)


async def _measure(
    place: DemoInstallation,
    strategy: str,
    talks: Sequence[traffic.ChatConversation],
    *,
    show: Callable[[traffic.AnswerSample], None],
) -> StrategyRun:
    url = f"http://127.0.0.1:{place.envoy}"
    samples = await traffic.play(url, talks, at_once=_AT_ONCE, on_answer=show)
    hit_ratio = await find_hit_ratio(place.engines)
    requests = Counter(dict.fromkeys(place.engines, 0))
    requests.update(f"127.0.0.1:{sample.engine}" for sample in samples if sample.engine)
    return StrategyRun(strategy, samples, hit_ratio, requests)


async def find_hit_ratio(engines: Sequence[str]) -> float:
    """Prefix cache hit ratio by the counters of engines; one that has ended is left out."""
    hits = queries = 0.0
    async with aiohttp.ClientSession() as session:
        for address in engines:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://{address}/metrics") as response:
                    load = metrics_page.read(await response.read(), 0.0)
                if isinstance(load, Load):
                    hits += load.prefix_hits or 0.0
                    queries += load.prefix_queries or 0.0
    return hits / queries if queries else 0.0


def _progress(strategy: str, total: int) -> Callable[[traffic.AnswerSample], None]:
    """A line that grows on a terminal, and one line at the end elsewhere."""
    done = 0
    live = sys.stdout.isatty()

    def show(_: traffic.AnswerSample) -> None:
        nonlocal done
        done += 1
        if not live and done < total:
            return
        bar = "#" * (30 * done // total)
        end = "\n" if done == total else ""
        print(f"{chr(13) if live else ''}{strategy:12} [{bar:30}] {done}/{total}", end=end)
        sys.stdout.flush()

    return show


def _table(runs: Sequence[StrategyRun]) -> str:
    head = f"{'':34}" + "".join(f"{run.strategy:>14}" for run in runs)
    lines = ["", head, "-" * len(head)]

    def row(name: str, values: Sequence[str]) -> None:
        lines.append(f"{name:34}" + "".join(f"{value:>14}" for value in values))

    failed = [sum(sample.status != 200 for sample in run.samples) for run in runs]
    row("requests", [str(len(run.samples)) for run in runs])
    row("failed", [str(count) for count in failed])
    row("prefix cache hit ratio (engines)", [f"{run.hit_ratio:.1%}" for run in runs])
    for share, name in ((0.5, "TTFT p50"), (0.95, "TTFT p95")):
        row(f"{name}, ms", [f"{1e3 * _ttft(run.samples, share):.0f}" for run in runs])
    later = [[sample for sample in run.samples if not sample.first] for run in runs]
    row("TTFT p50 of follow-up turns, ms", [f"{1e3 * _ttft(part, 0.5):.0f}" for part in later])
    for at in range(_ENGINES):
        row(f"requests on engine {at + 1}", [str(list(run.requests.values())[at]) for run in runs])
    return "\n".join(lines)


def _ttft(samples: Sequence[traffic.AnswerSample], share: float) -> float:
    times = sorted(sample.ttft_s for sample in samples if sample.status == 200)
    return times[min(len(times) - 1, int(share * len(times)))] if times else 0.0


def _healthy(runs: Sequence[StrategyRun]) -> bool:
    return all(sample.status == 200 for run in runs for sample in run.samples)


async def find_decision(place: DemoInstallation, most: int) -> str:
    """The decision that saved the most prompt tokens of the last ones, in words.

    Empty if there is none, or extproc has ended.
    """
    base = f"http://127.0.0.1:{place.metrics}/debug/decisions"
    decisions = []
    async with aiohttp.ClientSession() as session:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{base}?limit={most}") as response:
                listed = (await response.json())["decisions"]
            for summary in listed:
                if summary["endpoint"] is None:
                    continue  # refused
                async with session.get(f"{base}/{summary['id']}") as response:
                    decisions.append(await response.json())
    best = max(decisions, key=_cached_tokens, default=None)
    return "" if best is None else render_decision(best)


def render_decision(decision: dict[str, Any]) -> str:
    """A decision in two lines.

    Args:
        decision: As the page `/debug/decisions/{id}` shows it.
    """
    chosen = decision["endpoints"][0]
    costs = {it["endpoint"]: it.get("cost") for it in decision["scored_candidates"]}
    unit = (decision["cost"] or {}).get("unit", "")
    other = decision["runner_up"]
    line = (
        f"\nOne decision: {_cached_tokens(decision)} of {decision['request']['prompt_tokens']} prompt "
        f"tokens were cached on {chosen}, so the request went there"
    )
    if costs.get(chosen) is not None and costs.get(other) is not None:
        line += (
            f",\nat an estimated {costs[chosen]:.0f} {unit}; the next best, {other}, would have "
            f"taken {costs[other]:.0f} {unit}"
        )
    return f"{line}."


def _cached_tokens(decision: dict[str, Any]) -> int:
    """Predicted prefix cache hit of a request on the chosen endpoint, in prompt tokens."""
    chosen = decision["endpoints"][0]
    return max(
        (it["matched_tokens"] for it in decision["candidates"] if it["endpoint"] == chosen),
        default=0,
    )


def render_hints(place: DemoInstallation, *, keep: bool) -> str:
    """Render commands to try while the demo runs, or how to leave it running."""
    if not keep:
        return (
            "\nStopped. `make demo KEEP=1` or `extproc demo --keep` leaves it running, for "
            "requests of your own."
        )
    body = f'{{"model":"{_MODEL}","messages":[{{"role":"user","content":"hello"}}],"max_tokens":8}}'
    extproc = distribution.program_path("extproc")
    server = "" if place.metrics == 9090 else f" --server http://127.0.0.1:{place.metrics}"
    return "\n".join(
        [
            "",
            f"Running until Ctrl-C. Console: http://127.0.0.1:{place.metrics}/console/",
            f"  curl 127.0.0.1:{place.envoy}/v1/chat/completions -d '{body}'",
            f"  {extproc} explain --last{server}",
            f"  echo '{body}' | {extproc} explain{server}",
            f"  curl 127.0.0.1:{place.metrics}/metrics        # extproc",
            f"  curl 127.0.0.1:{place.metrics}/debug/pool     # what it knows of the engines",
            f"  curl {place.engines[0]}/metrics        # an engine",
            f"  curl 127.0.0.1:{place.admin}/stats          # Envoy",
            f"  tail {place.access_log}          # its access log, with the id of each request",
        ]
    )
