"""`extproc engine`: one simulated vLLM engine on a port."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.simulator.http import server

_MAX_PORT = 65535


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=whole_number, default=8000, help="port; 0 picks a free one (%(default)s)")
    add("--model", default="demo", help="name of the base model (%(default)s)")
    add("--lora", action="append", default=[], metavar="NAME", help="an adapter; repeatable")
    add("--max-loras", type=whole_number, help="adapter slots; 0 turns LoRA off (of the profile)")
    add("--profile", default="demo", help="machine to simulate, as h100-8b-bf16 (%(default)s)")
    add(
        "--speed",
        type=number,
        default=1.0,
        help="factor of its speed; 1 is real time (%(default)s)",
    )
    add(
        "--seed",
        type=whole_number,
        default=0,
        help="seed of random request ids and faults (%(default)s)",
    )
    add("--kv-tokens", type=whole_number, help="KV cache in tokens (of the profile)")
    add("--block-tokens", type=whole_number, help="tokens per KV block (of the profile)")
    add(
        "--host-kv-tokens",
        type=whole_number,
        help="evicted tokens that its host holds (of the profile)",
    )
    add(
        "--reload-us",
        type=number,
        help="microseconds to load a token from host memory (of the profile)",
    )
    add("--max-num-seqs", type=whole_number, help="sequences in the batch (of the profile)")
    add("--token-budget", type=whole_number, help="tokens per step (of the profile)")
    add("--max-model-len", type=whole_number, help="prompt plus output tokens (of the profile)")
    add("--max-queued", type=whole_number, help="requests before it answers 503; 0 is no limit")
    _add_answer_flags(parser)


def _add_answer_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of answers, events, ranks and faults."""
    add = parser.add_argument
    add("--cold-start-s", type=number, default=0.0, help="seconds before it listens (%(default)s)")
    add(
        "--output-tokens",
        type=whole_number,
        default=64,
        help="length where max_tokens is not set, but 16 on /v1/completions (%(default)s)",
    )
    add(
        "--coalesce-ms",
        type=number,
        default=5.0,
        help="tokens within so many ms are one chunk (%(default)s)",
    )
    add(
        "--keepalive-s",
        type=number,
        default=5.0,
        help="seconds until an idle connection is closed (%(default)s)",
    )
    add("--hide-cached-tokens", action="store_true", help="no cached_tokens in usage")
    add(
        "--kv-events-port",
        type=whole_number,
        default=0,
        help="port that publishes KV events; 0 is off (%(default)s)",
    )
    add(
        "--kv-replay-port",
        type=whole_number,
        default=0,
        help="port that replays earlier KV events; 0 is off (%(default)s)",
    )
    add(
        "--kv-events-form",
        choices=("map", "array"),
        default="map",
        help="of events: of vLLM from 0.24, or before (%(default)s)",
    )
    add(
        "--ranks",
        type=whole_number,
        default=1,
        help="data-parallel ranks behind the port (%(default)s)",
    )
    add("--pod", default="", help="value of x-inference-pod (engine-PORT)")
    add(
        "--fault",
        action="append",
        default=[],
        metavar="KIND[=N][,rate=R][,count=N][,for=S]",
        help="arm a fault from the start; repeatable",
    )


def whole_number(text: str) -> int:
    """A whole number, for a flag."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def number(text: str) -> float:
    """A number, for a flag."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def settings(args: argparse.Namespace) -> server.EngineServerSettings:
    """Settings of the engine from parsed flags.

    Raises:
        extproc.errors.ConfigError: A profile, a number or a fault that cannot be.
    """
    import msgspec

    from extproc.simulator import faults, profiles
    from extproc.simulator.http import kv_publisher, server

    _check_numbers(args)
    _check_ports(args)
    changes = {
        "max_loras": args.max_loras,
        "kv_tokens": args.kv_tokens,
        "block_tokens": args.block_tokens,
        "host_kv_tokens": args.host_kv_tokens,
        "reload_s_per_token": None if args.reload_us is None else args.reload_us / 1e6,
        "max_num_seqs": args.max_num_seqs,
        "token_budget": args.token_budget,
        "max_model_len": args.max_model_len,
        "max_queued": args.max_queued,
    }
    named = profiles.find(args.profile)
    overrides = {name: value for name, value in changes.items() if value is not None}
    profile = msgspec.structs.replace(named, **overrides)
    profiles.check(profile)
    for text in args.fault:
        faults.parse(text)
    return server.EngineServerSettings(
        profile=profile,
        model=args.model,
        loras=tuple(args.lora),
        speed=args.speed,
        seed=args.seed,
        output_tokens=args.output_tokens,
        coalesce_s=args.coalesce_ms / 1e3,
        show_cached=not args.hide_cached_tokens,
        keepalive_s=args.keepalive_s,
        pod=args.pod,
        ranks=args.ranks,
        faults=tuple(args.fault),
        kv_events=(
            kv_publisher.KvPublisherSettings(
                port=args.kv_events_port,
                replay_port=args.kv_replay_port,
                form=args.kv_events_form,
            )
            if args.kv_events_port
            else None
        ),
    )


def _check_numbers(args: argparse.Namespace) -> None:
    from extproc import errors

    if not 0 < args.speed < math.inf:
        raise errors.ConfigError(
            "--speed", wanted="a number above 0", got=str(args.speed), fix="1 is real time"
        )
    if not 1 <= args.ranks <= 64:
        raise errors.ConfigError(
            "--ranks", wanted="1 to 64", got=str(args.ranks), fix="1 is an engine without ranks"
        )
    if args.output_tokens < 1:
        raise errors.ConfigError(
            "--output-tokens",
            wanted="1 or more",
            got=str(args.output_tokens),
            fix="leave it out for the default",
        )
    for flag, value in (
        ("--cold-start-s", args.cold_start_s),
        ("--coalesce-ms", args.coalesce_ms),
        ("--keepalive-s", args.keepalive_s),
    ):
        if not 0 <= value < math.inf:
            raise errors.ConfigError(
                flag, wanted="a number from 0", got=str(value), fix="leave it out for the default"
            )


def _check_ports(args: argparse.Namespace) -> None:
    """Check that ports exist, also those of further ranks, which follow the first rank's."""
    from extproc import errors

    events, replay, more = args.kv_events_port, args.kv_replay_port, args.ranks - 1
    for flag, port, last in (
        ("--port", args.port, _MAX_PORT),
        ("--kv-events-port", events, _MAX_PORT - more),
        ("--kv-replay-port", replay, _MAX_PORT - more),
    ):
        if not 0 <= port <= last:
            raise errors.ConfigError(
                flag, wanted=f"a port from 0 to {last}", got=str(port), fix="name another port"
            )
    if replay and not events:
        raise errors.ConfigError(
            "--kv-replay-port",
            wanted="--kv-events-port beside it",
            got=str(replay),
            fix="name the port of the events too, or remove this one",
        )
    if events and replay and abs(events - replay) <= more:
        raise errors.ConfigError(
            "--kv-replay-port",
            wanted=f"a port at least {args.ranks} from --kv-events-port {events}",
            got=str(replay),
            fix="name another port; every rank has one of each",
        )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    import uvloop

    from extproc import errors

    try:
        wanted = settings(args)
        uvloop.run(_serve(wanted, host=args.host, port=args.port, cold_s=args.cold_start_s))
    except errors.ConfigError as error:
        print(f"extproc engine: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"extproc engine: cannot listen on {args.host}:{args.port}: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(
    wanted: server.EngineServerSettings, *, host: str, port: int, cold_s: float
) -> None:
    from extproc.simulator.http import server

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    if cold_s > 0:
        # A real one reads its weights.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(cold_s):
                await stop.wait()
    async with server.serving(wanted, host=host, port=port) as engine_server:
        shown = f"[{host}]" if ":" in host else host
        print(
            f"engine {wanted.model} ({wanted.profile.name}, speed {wanted.speed:g}) "
            f"listening on {shown}:{engine_server.port}",
            flush=True,
        )
        await stop.wait()
