"""`python -m bench.real_vllm.capture [--images] --write`: what vLLM sends of its KV cache, by bytes.

One engine with 24 blocks runs a few requests that store, reuse, copy and evict blocks, with an adapter,
a salt and an answer; with `--images`, one with 40 blocks runs requests with images. Then its cache is
reset, and it is started again. The capture has the frames of every message, those of replays, answers of
`/render` and `/tokenize`, and per request the batches published until its end and the cached tokens that
the engine reports. Tests of the decoder and of the index read it (`tests/prefix_cache/captures`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from bench import rig
from bench.real_vllm import conversations, install, replicas, tiny, tiny_vision
from bench.real_vllm.__main__ import REQUEST_TIMEOUT_S, TOTAL_TIMEOUT_S
from extproc.demo import stack
from extproc.parsing import canonical_prompt

FOLDER = rig.ROOT / "tests" / "prefix_cache" / "captures"

#: Blocks of the engine, of which one is never used, and tokens of a request at most; both with images.
BLOCKS, MAX_MODEL_LEN = 25, 512
IMAGE_BLOCKS, IMAGE_MAX_MODEL_LEN = 41, 1200

#: Seconds without a message after which a request has published everything.
_QUIET_S = 1.0

#: Field of a body to be rendered: the answer has no pixels of its images.
_NO_PIXELS = {"mm_payload": "none"}

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class CaptureStep(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        name: What it shows.
        path: Of the API.
        body: Its body, without sampling parameters.
        output_tokens: Tokens of the answer (count).
    """

    name: str
    path: str
    body: dict[str, Any]
    output_tokens: int = 1


def text(start: int, tokens: int) -> str:
    """Some words, each one token; other starts give other words."""
    return "".join(random.Random(start).choices(tiny.WORDS, k=tokens))


def steps() -> Iterator[CaptureStep]:
    """Requests from a cache that is empty."""

    def completion(name: str, prompt: str, **more: Any) -> CaptureStep:
        body = {"model": replicas.MODEL, "prompt": prompt, **more}
        return CaptureStep(name=name, path=_COMPLETIONS, body=body)

    yield completion("new", text(1, 100))
    yield completion("again", text(1, 100))
    yield completion("goes on", text(1, 100) + text(2, 40))
    yield completion("fills its blocks", text(3, 64))
    yield completion("copies its last block", text(3, 64))
    yield completion("adapter", text(1, 100), model=tiny.ADAPTERS[0])
    yield completion("salt", text(1, 100), cache_salt="tenant-7")
    messages = [
        {"role": "system", "content": text(4, 40)},
        {"role": "user", "content": text(5, 50)},
    ]
    body = {"model": replicas.MODEL, "messages": messages}
    yield CaptureStep(name="chat", path=_CHAT, body=body, output_tokens=40)
    for number in range(6, 10):
        yield completion("evicts", text(number, 130))
    yield completion("after evictions", text(1, 100))
    yield completion("copy after evictions", text(3, 64))


def image_steps() -> Iterator[CaptureStep]:
    """The same with images."""

    def chat(name: str, *parts: Mapping[str, Any] | str) -> CaptureStep:
        content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
        body = {"model": tiny_vision.NAME, "messages": [{"role": "user", "content": content}]}
        return CaptureStep(name=name, path=_CHAT, body=body)

    image, other = (tiny_vision.image(224, 224, seed) for seed in (1, 2))
    yield chat("new", image, text(1, 40))
    yield chat("again", image, text(1, 40))
    yield chat("another image", other, text(1, 40))
    yield chat("another question", image, text(2, 40))
    yield chat("another size", tiny_vision.image(300, 200, 1), text(1, 40))
    yield chat("two images", image, text(1, 40), other, text(2, 30))
    yield chat("behind a text", text(3, 70), image, text(1, 10))
    yield chat("named", image | {"uuid": "image-7"}, text(1, 40))
    yield chat("another image of that name", other | {"uuid": "image-7"}, text(1, 40))
    yield chat("evicts", tiny_vision.image(1000, 800, 1), text(1, 20))
    yield chat("after evictions", image, text(1, 40))


class EventListener:
    """Subscriber of an engine that keeps every message.

    Attributes:
        messages: Frames of each message, in order.
    """

    def __init__(self, ports: tuple[int, int]) -> None:
        self._context = zmq.asyncio.Context()
        self._ports = ports
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._sub.connect(f"tcp://127.0.0.1:{ports[0]}")
        self.messages: list[list[bytes]] = []

    async def settle(self) -> int:
        """Take in what comes until there is silence; returns the messages so far (count)."""
        while await self._sub.poll(1000 * _QUIET_S):
            self.messages.append(await self._sub.recv_multipart())
        return len(self.messages)

    async def replay(self, start: int) -> list[list[bytes]]:
        """Frames that the engine sends again from a number on, with the end."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{self._ports[1]}")
        await dealer.send_multipart((b"", start.to_bytes(8)))
        frames: list[list[bytes]] = []
        while not frames or frames[-1][-2] != b"\xff" * 8:
            frames.append(await asyncio.wait_for(dealer.recv_multipart(), REQUEST_TIMEOUT_S))
        dealer.close(linger=0)
        return frames

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=0)


class CapturedEngine:
    """A running engine, and what is captured of it.

    Attributes:
        requests: Rows of the requests, in order.
        listener: Its messages.
    """

    def __init__(
        self, session: aiohttp.ClientSession, address: str, listener: EventListener
    ) -> None:
        self._session = session
        self._url = f"http://{address}"
        self.listener = listener
        self.requests: list[dict[str, Any]] = []

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Answer to a body; raises where it is no success."""
        async with self._session.post(f"{self._url}{path}", json=body) as response:
            response.raise_for_status()
            return await response.json() if response.content_length != 0 else None

    async def run(self, step: CaptureStep) -> str:
        """Send a request once its tokens are known; returns the text of the answer."""
        rendered = await self.post(f"{step.path}/render", step.body | _NO_PIXELS)
        tokenized = await self.post("/tokenize", step.body)
        first = rendered[0] if isinstance(rendered, list) else rendered
        known = await self.listener.settle()
        sampling = {
            "max_tokens": step.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            # Words, so that the next turn is tokenized as it was generated.
            "allowed_token_ids": conversations.word_ids(),
        }
        answer = await self.post(step.path, step.body | sampling)
        usage = answer["usage"]
        details = usage["prompt_tokens_details"] or {}
        self.requests.append(
            {
                "name": step.name,
                "path": step.path,
                "body": step.body,
                "token_ids": first["token_ids"],
                "tokenize_agrees": tokenized["tokens"] == first["token_ids"],
                "placeholders": canonical_prompt.read_placeholders(first["features"]),
                "prompt_tokens": usage["prompt_tokens"],
                "cached_tokens": details.get("cached_tokens") or 0,
                "batches_before": known,
                "batches_after": await self.listener.settle(),
            }
        )
        choice = answer["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    async def samples(self, step: CaptureStep) -> dict[str, Any]:
        """Answers of `/render` and `/tokenize` as they are."""
        return {
            "body": step.body,
            "render": await self.post(f"{step.path}/render", step.body | _NO_PIXELS),
            "tokenize": await self.post("/tokenize", step.body),
        }


async def capture(python: Path, model: Path, *, images: bool) -> dict[str, Any]:
    """Run the requests on an engine, and again on a second one in its place."""
    planned = list(image_steps() if images else steps())
    flags: dict[str, Any] = {"num_gpu_blocks_override": BLOCKS, "max_model_len": MAX_MODEL_LEN}
    if images:
        flags = {
            "num_gpu_blocks_override": IMAGE_BLOCKS,
            "max_model_len": IMAGE_MAX_MODEL_LEN,
            "served_model_name": tiny_vision.NAME,
        }
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    lives: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for life in range(2):
            async with (
                stack.stack() as children,
                replicas.real(
                    children,
                    session,
                    python=python,
                    model=model,
                    count=1,
                    events=True,
                    images=images,
                    **flags,
                ) as (address,),
            ):
                listener = EventListener(await replicas.event_ports(session, address))
                engine = CapturedEngine(session, address, listener)
                try:
                    if life:
                        await engine.run(planned[0])
                    else:
                        result["samples"] = [
                            await engine.samples(step)
                            for step in planned
                            if step.name in ("fills its blocks", "chat", "two images")
                        ]
                        await _first_life(engine, planned)
                        result["replay_from_5"] = _hex(await listener.replay(5))
                    lives.append({"messages": _hex(listener.messages), "requests": engine.requests})
                finally:
                    listener.close()
    return {**result, "lives": lives}


async def _first_life(engine: CapturedEngine, planned: Sequence[CaptureStep]) -> None:
    """Every step, the next turn of the chat right behind it, and a reset."""
    for step in planned:
        answer = await engine.run(step)
        if step.name == "chat":
            messages = [
                *step.body["messages"],
                {"role": "assistant", "content": answer},
                {"role": "user", "content": text(20, 30)},
            ]
            body = step.body | {"messages": messages}
            await engine.run(CaptureStep(name="next turn", path=step.path, body=body))
    await engine.post("/reset_prefix_cache", {})
    first = planned[0]
    await engine.run(msgspec.structs.replace(first, name="after a reset"))
    await engine.run(msgspec.structs.replace(first, name="again after a reset"))


def _hex(messages: Sequence[Sequence[bytes]]) -> list[list[str]]:
    return [[frame.hex() for frame in frames] for frames in messages]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.real_vllm.capture", description=__doc__)
    install.add_flags(parser)
    parser.add_argument("--images", action="store_true", help="requests with images")
    parser.add_argument("--write", action="store_true", help=f"write it to {FOLDER.name}")
    args = parser.parse_args()
    python, model, installed = install.prepare(args, images=args.images)
    file = FOLDER / f"vllm-{install.VERSION}{'-images' if args.images else ''}.json"

    async def bounded() -> dict[str, Any]:
        async with asyncio.timeout(TOTAL_TIMEOUT_S):
            return await capture(python, model, images=args.images)

    result = {
        "engine": installed["vllm"],
        "block_tokens": replicas.BLOCK_TOKENS,
        "blocks": (IMAGE_BLOCKS if args.images else BLOCKS) - 1,
        **asyncio.run(bounded()),
    }
    for life in result["lives"]:
        for row in life["requests"]:
            print(f"{row['name']:24} {row['cached_tokens']:4} of {row['prompt_tokens']} cached")
    if args.write:
        FOLDER.mkdir(exist_ok=True)
        file.write_text(json.dumps(result, separators=(",", ":")) + "\n")
        print(f"wrote {file.relative_to(rig.ROOT)}, {file.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
