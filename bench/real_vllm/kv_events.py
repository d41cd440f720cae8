"""`python -m bench.real_vllm.kv_events`: predictions by KV events beside those by the estimate.

Two real replicas whose caches hold less than the conversations that they serve get the same
conversations twice: through a picker that estimates what they hold, and through one that reads their KV
events. Of every follow-up turn, the tokens that the picker predicted as cached are compared with those
that the engine reports (`usage.prompt_tokens_details.cached_tokens`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from bench import rig
from bench.real_vllm import capture, conversations, install, replicas, tiny, tiny_vision
from bench.real_vllm.__main__ import REQUEST_TIMEOUT_S, TOTAL_TIMEOUT_S
from extproc.demo import stack
from extproc.prefix_cache import kv_events
from extproc.prefix_cache.kv_events import BlockRemoved, BlockStored

RESULT, IMAGES_RESULT = "real_vllm_events", "real_vllm_images"
SEED: Final = 7

#: Widths and heights of images, two images of each.
_SIZES: Final = ((224, 224), (300, 200), (420, 280), (140, 700))

#: Share of follow-up turns whose prediction is to be that of the engine.
WANTED_RATIO: Final = 0.99

_SUBSCRIBED: Final = 'state="exact"} 1'
_WAIT_S: Final = 60.0


def _config(engines: Mapping[str, tuple[int, int]], *, is_exact: bool) -> str:
    """Configuration of the picker, with the ports of the engines' events."""
    endpoints = [
        {
            "address": address,
            "labels": {"kv-events-port": str(port), "kv-events-replay-port": str(replay_port)},
        }
        for address, (port, replay_port) in engines.items()
    ]
    tree = {
        "apiVersion": "extproc/v1alpha1",
        "kind": "ExtProcConfig",
        "seed": SEED,
        "decisions": {"header": True},
        "kv_events": {"enabled": is_exact},
        "pool": {"endpoints": endpoints},
    }
    return msgspec.json.encode(tree).decode()


async def measure(
    session: aiohttp.ClientSession,
    engines: Mapping[str, tuple[int, int]],
    *,
    is_exact: bool,
    images: bool,
) -> dict[str, Any]:
    """Conversations from empty caches behind a picker that knows nothing yet."""
    model = tiny_vision.NAME if images else replicas.MODEL
    await replicas.forget(session, list(engines))
    for address in engines:
        await _step(session, address, model)
    listeners = [capture.EventListener(ports) for ports in engines.values()]
    try:
        async with stack.stack() as children:
            ports = stack.EnvoyPorts(stack.free_port(), stack.free_port(), stack.free_port())
            pages = stack.free_port()
            await children.extproc(
                *("--config-text", _config(engines, is_exact=is_exact)),
                *("--host", "127.0.0.1", "--drain-timeout", "0s"),
                *("--grpc-port", str(ports.extproc), "--metrics-port", str(pages)),
                *("--grpc-health-port", "0"),
            )
            template = rig.ROOT / "envoy" / "original-dst.yaml"
            await children.envoy(stack.envoy_config(template, ports, engines=list(engines)))
            if is_exact:
                await _subscribed(session, f"127.0.0.1:{pages}", len(engines))
            turns = await conversations.play(
                session,
                f"http://127.0.0.1:{ports.listener}",
                seed=SEED,
                model=model,
                images=[
                    tiny_vision.image(*size, seed) for seed in (1, 2) for size in _SIZES if images
                ],
            )
        for listener in listeners:
            await listener.settle()
        messages = [listener.messages for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()
    return {
        **figures(turns),
        "blocks_stored": _count(messages, BlockStored),
        "blocks_evicted": _count(messages, BlockRemoved),
    }


async def _step(session: aiohttp.ClientSession, address: str, model: str) -> None:
    """Let an engine do a step, with which it publishes that its cache was cleared."""
    body = {"model": model, "prompt": tiny.WORDS[0], "max_tokens": 1}
    async with session.post(f"http://{address}/v1/completions", json=body) as response:
        response.raise_for_status()


async def _subscribed(session: aiohttp.ClientSession, pages: str, count: int) -> None:
    """Wait until the events of all engines are known from the start."""
    async with asyncio.timeout(_WAIT_S):
        while (await replicas.text(session, pages)).count(_SUBSCRIBED) < count:
            await asyncio.sleep(0.1)


def _count(messages: Sequence[Sequence[Sequence[bytes]]], kind: type) -> int:
    """Blocks of all events of a kind (count)."""
    events = [
        kv_events.decode_event(raw)
        for rows in messages
        for frames in rows
        for raw in kv_events.decode_batch(frames[2])
    ]
    return sum(
        len(event.hashes)
        for event in events
        if isinstance(event, BlockStored | BlockRemoved) and isinstance(event, kind)
    )


def figures(turns: Sequence[conversations.ConversationTurn]) -> dict[str, Any]:
    """One run in numbers; ratios are of the follow-up turns."""
    followed = [turn.answer for turn in turns if turn.number > 1]
    pairs = [
        (answer.predicted or 0, answer.cached_tokens or 0)
        for answer in followed
        if answer.status == 200
    ]
    errors = [predicted - cached for predicted, cached in pairs]
    answers = [turn.answer for turn in turns]
    prompts = sum(answer.prompt_tokens for answer in answers)
    return {
        "requests": len(turns),
        "failed": sum(answer.status != 200 for answer in answers),
        "follow_ups": len(pairs),
        "equal_ratio": round(sum(error == 0 for error in errors) / len(errors), 4),
        "within_a_block_ratio": round(
            sum(abs(error) <= replicas.BLOCK_TOKENS for error in errors) / len(errors), 4
        ),
        "mean_absolute_error_tokens": round(statistics.mean(map(abs, errors)), 1),
        "hit_ratio": round(sum(answer.cached_tokens or 0 for answer in answers) / prompts, 4),
        "differences": [
            {
                "turn": turn.number,
                "predicted": turn.answer.predicted,
                "cached": turn.answer.cached_tokens,
            }
            for turn in turns
            if turn.number > 1 and turn.answer.predicted != turn.answer.cached_tokens
        ][:100],
    }


def block(results: Sequence[Mapping[str, Any]]) -> str:
    """The text of `docs/benchmarks` about results as they were written."""
    rows = [
        "| prediction | equal to the engine's | within a block | mean error | hit ratio | blocks evicted |",
        "|---|---|---|---|---|---|",
    ]
    captions = []
    for result in results:
        images = ", images" if "torchvision" in result else ""
        for name, row in result["runs"].items():
            rows.append(
                f"| {name}{images} | {100 * row['equal_ratio']:.1f} % "
                f"| {100 * row['within_a_block_ratio']:.1f} % "
                f"| {row['mean_absolute_error_tokens']:.1f} tokens | {row['hit_ratio']:.3f} "
                f"| {row['blocks_evicted']} |"
            )
        captions.append(
            f"`{result['command']}`, {result['vllm']}, 2 replicas of {result['kv_tokens']} KV "
            f"tokens in blocks of {replicas.BLOCK_TOKENS}; {result['date']}, "
            f"{result['machine']['cores']} cores of {result['machine']['cpu']}."
        )
    captions.append(
        f"{conversations.CONVERSATIONS} conversations of {conversations.TURNS} turns, "
        f"{conversations.AT_ONCE} requests at once, in random order: "
        f"{results[0]['runs']['KV events']['follow_ups']} follow-up turns."
    )
    return "\n".join([*rows, "", " ".join(captions)])


async def run(python: Path, model: Path, running: Sequence[str], *, images: bool) -> dict[str, Any]:
    """Both predictions on the same engines.

    Args:
        python: Of the virtualenv with vLLM.
        model: Folder of the model.
        running: Addresses of engines that run; empty starts them.
        images: The model reads images, and conversations begin with them.
    """
    name = {"served_model_name": tiny_vision.NAME} if images else {}
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    results: dict[str, Any] = {}
    async with (
        asyncio.timeout(TOTAL_TIMEOUT_S),
        aiohttp.ClientSession(timeout=timeout) as session,
        contextlib.AsyncExitStack() as stays,
    ):
        if not running:
            children = await stays.enter_async_context(stack.stack())
            engine = replicas.real(
                children, session, python=python, model=model, events=True, images=images, **name
            )
            running = await stays.enter_async_context(engine)
        engines = {address: await replicas.event_ports(session, address) for address in running}
        for row, is_exact in (("KV events", True), ("estimate", False)):
            results[row] = await measure(session, engines, is_exact=is_exact, images=images)
            print(row, results[row], flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.real_vllm.kv_events", description=__doc__
    )
    install.add_flags(parser)
    parser.add_argument(
        "--engines",
        default="",
        help="ip:port of both replicas, which run with the flags of this bench",
    )
    parser.add_argument("--images", action="store_true", help="conversations begin with images")
    parser.add_argument("--write", action="store_true", help="write it to bench/results")
    args = parser.parse_args()
    python, model, installed = install.prepare(args, images=args.images)
    running = args.engines.split(",") if args.engines else ()
    results = asyncio.run(run(python, model, running, images=args.images))
    is_met = results["KV events"]["equal_ratio"] >= WANTED_RATIO
    print(
        f"{'met' if is_met else 'MISSED'}: {results['KV events']['equal_ratio']} of {WANTED_RATIO}"
    )
    if args.write:
        document = {
            **installed,
            "kv_tokens": replicas.BLOCKS * replicas.BLOCK_TOKENS,
            "seed": SEED,
            "runs": results,
        }
        name, flag = (IMAGES_RESULT, " --images") if args.images else (RESULT, "")
        path = rig.write(name, f"python -m bench.real_vllm.kv_events{flag} --write", document)
        print(f"wrote {path.relative_to(rig.ROOT)}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
