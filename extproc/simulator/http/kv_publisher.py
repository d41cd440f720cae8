"""Publisher of KV events as in vLLM: batches over XPUB, earlier ones from a ROUTER socket."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from extproc import distribution, errors
from extproc.simulator import faults, kv, prompt

if TYPE_CHECKING:
    import zmq

#: Batches that can be sent again (count); the default of vLLM.
_BUFFER_STEPS = 10_000

#: Blocks whose tokens are remembered until they are stored (count).
_MAX_NOTED = 200_000

_END = (1 << 64) - 1


class KvPublisherSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Ports and form of the events of a simulated engine.

    Attributes:
        port: TCP port of events; 0 picks a free one.
        replay_port: TCP port of the replay socket; 0 picks a free one.
        form: Form of events: `map` as vLLM from 0.24, with the topic in replays; or `array`.
        rank: Data-parallel rank that batches name.
        topic: First frame of each message.
        connect: Address to connect to, as in `tcp://10.0.0.1:5557`, instead of listening; the rank is
            added to its port.
    """

    port: int = 0
    replay_port: int = 0
    form: Literal["map", "array"] = "map"
    rank: int = 0
    topic: bytes = b""
    connect: str = ""

    def of_rank(self, rank: int) -> KvPublisherSettings:
        """Those of a rank, whose ports follow the first rank's; free ones stay free."""
        return msgspec.structs.replace(
            self,
            port=self.port and self.port + rank,
            replay_port=self.replay_port and self.replay_port + rank,
            rank=self.rank + rank,
        )


class _Block(msgspec.Struct, frozen=True):
    """Content of a block."""

    tokens: bytes
    adapter: str
    salt: str


class KvPublisher:
    """Publishes what a pool of blocks stores and removes.

    Args:
        settings: Ports and form.
        pool: Blocks of the engine.

    Raises:
        ConfigError: The extra `kv-events` is not installed.

    Attributes:
        port: Port of events, once bound.
        replay_port: Port of the replay socket, once bound.
        seq: Number of the next batch.
    """

    def __init__(
        self,
        settings: KvPublisherSettings,
        pool: kv.BlockPool,
        *,
        block_tokens: int,
        trouble: faults.Faults,
    ) -> None:
        self._settings = settings
        self._block_tokens = block_tokens
        self._trouble = trouble
        self._log = pool.log_changes()
        self._noted: OrderedDict[int, _Block] = OrderedDict()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=_BUFFER_STEPS)
        self.seq = 0
        self.port = 0
        self.replay_port = 0
        self._zmq = _load_zmq()
        self._context: zmq.Context[Any] = self._zmq.Context()
        self._pub = self._context.socket(self._zmq.XPUB)
        self._num_subscriptions = 0
        self._router = self._zmq.asyncio.Context(self._context).socket(self._zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(self._zmq.LINGER, 0)

    def bind(self, host: str) -> None:
        """Listen on both ports, or connect and listen for replays; on an error close the sockets.

        Raises:
            ConfigError: A port is taken, or the host is none to listen on.
        """
        try:
            if self._settings.connect:
                address, _, port = self._settings.connect.rpartition(":")
                self._pub.connect(f"{address}:{int(port) + self._settings.rank}")
            else:
                self.port = self._bind(self._pub, host, self._settings.port, "--kv-events-port")
            replay_port = self._settings.replay_port
            self.replay_port = self._bind(self._router, host, replay_port, "--kv-replay-port")
        except (errors.ConfigError, self._zmq.ZMQError):
            self.close()
            raise

    def _bind(self, socket: Any, host: str, port: int, flag: str) -> int:
        is_ipv6 = ":" in host
        socket.setsockopt(self._zmq.IPV6, is_ipv6)
        url = f"tcp://[{host}]" if is_ipv6 else f"tcp://{host}"
        try:
            if not port:
                return int(socket.bind_to_random_port(url))
            socket.bind(f"{url}:{port}")
        except self._zmq.ZMQError as error:
            raise errors.ConfigError(
                flag,
                wanted=f"port {port} to be free on {host}",
                got=error.strerror,
                fix="name another port, or an IP address of this machine as --host",
            ) from error
        return port

    def note(self, hashes: Sequence[int], text: bytes, *, adapter: str, salt: str) -> None:
        """Note the content of blocks that a request may store.

        Args:
            hashes: One per full block.
            text: The text that they are of.
            adapter: LoRA adapter; empty for the base model.
            salt: Salt of the request; empty for none.
        """
        size, noted = self._block_tokens * prompt.BYTES_PER_TOKEN, self._noted
        for position, key in enumerate(hashes):
            start = position * size
            noted[key] = _Block(text[start : start + size], adapter, "" if position else salt)
            noted.move_to_end(key)  # a prefix that others noted before may be stored again
        while len(noted) > _MAX_NOTED:
            noted.popitem(last=False)

    def flush(self) -> None:
        """Publish the changes since the last call as a batch."""
        if not self._log:
            return
        events = list(self._events(self._log))
        self._log.clear()
        payload = msgspec.msgpack.encode([0.0, events, self._settings.rank])
        fault = self._trouble.hit(faults.KV_EVENT_KINDS, time.monotonic())
        seq = self.seq.to_bytes(8)
        self._buffer.append((self.seq, payload))
        self.seq += 1
        if fault is None:
            self.send((self._settings.topic, seq, payload))
        elif fault.kind == "kv-garble":
            self.send((self._settings.topic, seq, payload[: len(payload) // 2]))

    def send(self, frames: Sequence[bytes]) -> None:
        """Publish frames as they are."""
        self._pub.send_multipart(frames)

    @property
    def num_subscriptions(self) -> int:
        """Subscriptions that have come in (count, ever): what is published now reaches them."""
        while self._pub.poll(0):
            self._num_subscriptions += self._pub.recv()[:1] == b"\x01"
        return self._num_subscriptions

    async def run(self) -> None:
        """Answer requests for earlier batches until cancelled."""
        topic = (self._settings.topic,) if self._settings.form == "map" else ()
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, start = frames[0], int.from_bytes(frames[2])
            for seq, payload in list(self._buffer):
                if seq >= start:
                    await self._router.send_multipart(
                        (client, b"", *topic, seq.to_bytes(8), payload)
                    )
            await self._router.send_multipart((client, b"", *topic, _END.to_bytes(8), b""))

    def close(self) -> None:
        """Close both sockets."""
        self._router.close(linger=0)
        self._pub.close(linger=0)
        self._context.term()

    def _events(self, changes: Sequence[kv.BlockChange]) -> Iterator[Any]:
        """Events of changes; chains of stored blocks are one."""
        stored: list[tuple[int, _Block]] = []
        first: int | None = None
        for key, parent, is_stored, medium in changes:
            on_device = medium == kv.DEVICE
            block = self._noted.get(key) if is_stored and on_device else None
            follows = stored and parent == stored[-1][0] and is_stored and block is not None
            if stored and not (follows and block and block.adapter == stored[-1][1].adapter):
                yield self._stored(stored, first)
                stored = []
            if block is not None:
                if not stored:
                    first = parent
                stored.append((key, block))
            elif key == kv.ALL_BLOCKS:
                yield self._form("AllBlocksCleared")
            elif not is_stored:
                yield self._form("BlockRemoved", block_hashes=[key], medium=medium)
            elif not on_device:
                yield self._copied(key)
        if stored:
            yield self._stored(stored, first)

    def _copied(self, key: int) -> Any:
        """A copy in the memory of the host, named by its hash alone."""
        return self._form(
            "BlockStored",
            block_hashes=[key],
            parent_block_hash=None,
            token_ids=[],
            block_size=0,
            lora_id=None,
            medium=kv.HOST,
        )

    def _stored(self, stored: Sequence[tuple[int, _Block]], parent: int | None) -> Any:
        adapter = stored[0][1].adapter
        extras = [
            [name for name in (block.adapter, block.salt) if name] or None for _, block in stored
        ]
        return self._form(
            "BlockStored",
            block_hashes=[key for key, _ in stored],
            parent_block_hash=parent,
            token_ids=[word for _, block in stored for word in prompt.token_ids(block.tokens)],
            block_size=self._block_tokens,
            lora_id=1 if adapter else None,
            medium=kv.DEVICE,
            lora_name=adapter or None,
            extra_keys=extras,
        )

    def _form(self, tag: str, **fields: Any) -> Any:
        if self._settings.form == "array":
            return [tag, *fields.values()]
        return {"type": tag, **fields}


def _load_zmq() -> Any:
    try:
        import zmq  # noqa: PLC0415 - an extra, not for everybody
        import zmq.asyncio  # noqa: PLC0415 - the same
    except ImportError:
        raise errors.ConfigError(
            "KV events",
            wanted="the Python package pyzmq",
            got="none",
            fix=distribution.install_command("kv-events"),
        ) from None
    return zmq
