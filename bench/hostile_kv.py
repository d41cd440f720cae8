"""An engine whose KV events, or rendered prompts, are hostile.

python -m bench.hostile_kv KIND EVENTS_PORT REPLAY_PORT [--host IP]

KIND is one of `EVENTS` or of `RENDERED`. The metrics pages and answers are those of an honest engine. One
that renders publishes a single block, so that the size of blocks is known. `all` takes another kind for each
connection and each prompt, and hostile pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping

import msgspec

from bench.hostile_engine import FRAMES, GAUGES, HostileEngine, say

#: Greeting of ZMTP 3.0 without security, and the last command of its handshake.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type"

_MORE, _LONG, _COMMAND = 1, 2, 4

#: Bytes of a batch at most, as the picker takes it, and blocks and tokens of an event.
_BATCH_BYTES, _BLOCKS, _TOKENS = 1 << 20, 8192, 131_072

#: Seconds between two messages, or parts of one that drips, and until a connection has another kind.
_PAUSE_S, _DRIP_S, _TURN_S = 0.0005, 0.2, 5.0

_MORE_LONG = bytes((_MORE | _LONG,))

_pack = msgspec.msgpack.encode

#: Parts of messages, without an end.
Publisher = Callable[[], Iterator[bytes]]


def frame(data: bytes, flags: int = 0) -> bytes:
    """A frame of ZMTP, its length in eight bytes."""
    return bytes((flags | _LONG,)) + len(data).to_bytes(8) + data


def message(number: int, payload: bytes) -> bytes:
    """A batch as vLLM sends it: topic, number, events."""
    return frame(b"kv", _MORE) + frame((number % (1 << 64)).to_bytes(8), _MORE) + frame(payload)


def batch(*events: object) -> bytes:
    """Events in the form of arrays."""
    return _pack([0.0, list(events)])


def stored(
    hashes: list[int], tokens: int, size: int, *, parent: int | None = None, **fields: object
) -> dict[str, object]:
    """Blocks stored, with as many equal tokens."""
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent}
    return {**event, "token_ids": [7] * tokens, "block_size": size, **fields}


def _number(make: Callable[[int], bytes]) -> Publisher:
    """Batches with numbers that follow each other."""
    return lambda: (message(at, make(at)) for at in itertools.count())


def _repeat(payload: bytes) -> Publisher:
    return _number(lambda _: payload)


def _fresh(at: int, count: int) -> list[int]:
    """Hashes that were not published before."""
    return list(range(at * count + 1, (at + 1) * count + 1))


def _endless() -> Iterator[bytes]:
    yield from itertools.repeat(frame(b"x", _MORE))


def _dripping() -> Iterator[bytes]:
    yield from (bytes((byte,)) for byte in message(0, batch()))


def _jumping() -> Iterator[bytes]:
    for at in itertools.count():
        yield message(at * at * 7919 % (1 << 40), batch({"type": "AllBlocksCleared"}))


#: What an engine publishes, by kind.
EVENTS: Mapping[str, Publisher] = {
    "garbage": _repeat(bytes(range(256)) * 400),
    "empty batches": _repeat(batch()),
    "many events": _repeat(batch(*[["BlockRemoved", [1]]] * 65_000)),
    "many unknown events": _repeat(batch(*[["x"]] * 65_000)),
    "blocks of one token": _number(lambda at: batch(stored(_fresh(at, 90_000), 90_000, 1))),
    "long blocks": _repeat(batch(stored([1], _TOKENS, _TOKENS))),
    "many tokens": _number(lambda at: batch(stored(_fresh(at, _BLOCKS), _TOKENS, 16))),
    "orphans": _number(lambda at: batch(stored(_fresh(at, 64), 1024, 16, parent=1 << 63 | at))),
    "loops": _number(lambda at: batch(*[stored([at % 7, 3], 32, 16, parent=at % 5)] * 500)),
    "adapters": _number(
        lambda at: batch(stored(_fresh(at, 1), 16, 16, lora_name=f"{at}" + "a" * 100_000))
    ),
    "extra keys": _number(
        lambda at: batch(
            stored(_fresh(at, 128), 2048, 16, extra_keys=[["k" * 40] * 64 for _ in range(128)])
        )
    ),
    "media": _number(
        lambda at: batch(
            *(stored(_fresh(at, 1), 16, 16, medium=f"tier {at} {n}") for n in range(1000))
        )
    ),
    "nested": _repeat(b"\x92\xc0\x91" + b"\x91" * 500_000),
    "wrong types": _repeat(
        batch({"type": "BlockStored", "block_hashes": [1e308], "block_size": "16"})
    ),
    "huge numbers": _repeat(batch(stored([(1 << 64) - 1], 16, (1 << 64) - 1))),
    "cleared": _repeat(batch(*[{"type": "AllBlocksCleared"}] * 1000)),
    "jumps": _jumping,
    "gaps": lambda: (message(2 * at, batch()) for at in itertools.count()),
    "too long": _repeat(bytes(_BATCH_BYTES + 1)),
    "frames without end": _endless,
    "a frame of 2^62 bytes": lambda: iter((bytes((_LONG,)) + (1 << 62).to_bytes(8), b"x" * 1000)),
    "drip": _dripping,
    "commands": lambda: itertools.repeat(frame(b"\x04PING\0\0", _COMMAND)),
    "silence": lambda: iter(()),
}

#: What a replay socket sends where that is something else.
REPLAYS: Mapping[str, Publisher] = {"gaps": lambda: iter([message((1 << 64) - 1, b"")])}

_TOKEN_IDS = b'{"token_ids":[%b]}'


def _numbers(number: bytes, size_bytes: int = 2_000_000) -> bytes:
    return _TOKEN_IDS % b",".join([number] * (size_bytes // (len(number) + 1)))


def _features(count: int, length: int, identifier: str) -> bytes:
    places = [{"offset": at, "length": length} for at in range(count)]
    features = {
        "mm_hashes": {"image": [identifier] * count},
        "mm_placeholders": {"image": places},
    }
    return json.dumps({"token_ids": [7] * 1000, "features": features}).encode()


#: Answers to a request to render, by kind; None: it drips and never ends.
RENDERED: Mapping[str, bytes | None] = {
    "one-digit tokens": _numbers(b"1"),
    "numbers": _numbers(b"4294967295"),
    "large numbers": _numbers(b"9" * 400),
    "floats": _numbers(b"1e308"),
    "longer than taken": _numbers(b"1", 50_000_000),
    "nested": _TOKEN_IDS % (b"[" * 2_000_000),
    "many keys": b"{%b}" % b",".join(b'"k%d":0' % at for at in range(300_000)),
    "many prompts": b"[%b]" % b",".join([_TOKEN_IDS % b"1"] * 150_000),
    "many images": _features(400, 1, "i"),
    "images of 2^60 tokens": _features(40, 1 << 60, "i" * 250),
    "long identifiers": _features(4, 16, "i" * 10_000),
    "invalid UTF-8": b'{"token_ids":[1],"features":{"mm_hashes":{"\xff":["\xfe"]}}}',
    "drip": None,
    **FRAMES,
}


class HostileKvEngine(HostileEngine):
    """Answers requests, and renders as its kind says.

    Args:
        kind: Of its events or rendered prompts.
    """

    def __init__(self, kind: str) -> None:
        super().__init__("all" if kind == "all" else "half")
        self._is_all = kind == "all"
        self._is_quiet = kind in RENDERED
        self._rendered = itertools.cycle(RENDERED if self._is_all else [kind])
        self._kinds = itertools.cycle(EVENTS if self._is_all else [kind])

    async def answer(self, writer: asyncio.StreamWriter, path: str) -> None:
        """Answer a request for a path."""
        if path == "/metrics" and not self._is_all:
            say(writer, GAUGES)
        elif path.endswith(("/render", "/tokenize")):
            await self._render(writer)
        else:
            await super().answer(writer, path)

    async def _render(self, writer: asyncio.StreamWriter) -> None:
        kind = next(self._rendered)
        rendered = RENDERED.get(kind, b"{}")
        if kind in FRAMES:
            writer.write(FRAMES[kind])
        elif rendered is not None:
            say(writer, rendered)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
            while True:
                writer.write(b"[")
                await writer.drain()
                await asyncio.sleep(_DRIP_S)

    async def publish(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Publish to one subscriber."""
        await self._speak(reader, writer, b"XPUB")

    async def replay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send events again, without an end."""
        await self._speak(reader, writer, b"ROUTER")

    async def _speak(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket_type: bytes
    ) -> None:
        kind = next(self._kinds)
        publish = EVENTS.get(kind, _repeat(batch(stored([1], 16, 16))))
        if socket_type == b"ROUTER":
            publish = REPLAYS.get(kind, publish)
        turn_s = _TURN_S if self._is_all else None
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(turn_s):
                ready = frame(_READY + len(socket_type).to_bytes(4) + socket_type, _COMMAND)
                writer.write(_GREETING + ready)
                await reader.readexactly(64)
                for part in publish():
                    is_whole = socket_type == b"XPUB" or not part.startswith(_MORE_LONG)
                    writer.write(part if is_whole else frame(b"", _MORE) + part)
                    await writer.drain()
                    await asyncio.sleep(_DRIP_S if len(part) == 1 else _PAUSE_S)
                    if self._is_quiet:
                        break
                await reader.read()
        writer.close()


async def main(kind: str, events_port: int, replay_port: int, host: str) -> None:
    """Serve until the process ends."""
    engine = HostileKvEngine(kind)
    await asyncio.start_server(engine.publish, host, events_port)
    await asyncio.start_server(engine.replay, host, replay_port)
    server = await asyncio.start_server(engine.serve, host, 0)
    print("listening on {}:{}".format(*server.sockets[0].getsockname()[:2]), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    where = sys.argv[sys.argv.index("--host") + 1] if "--host" in sys.argv else "127.0.0.1"
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), where))
