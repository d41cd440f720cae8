"""State synchronization between replicas through a stream in Redis or Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import random
import secrets
import socket
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from extproc import distribution
from extproc.config.settings import PeerSyncSection
from extproc.errors import ConfigError
from extproc.routing import peer_sync
from extproc.routing.director import Director
from extproc.server import admin_access
from extproc.server.pool_registry import PoolRegistry

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.credentials import CredentialProvider

_log = logging.getLogger("extproc.server")

#: Facts in one entry of the stream (count), some 100 KB with long prompts.
_MAX_EVENTS = 500

#: Entries read at once (count).
_MAX_ENTRIES = 100

#: Milliseconds that a read waits for news.
_BLOCK_MS = 1000

#: Seconds that the server may take to answer, beyond that.
_RESPONSE_TIMEOUT_S = 2.0

#: Seconds between attempts to reach a server that is away, at first and at most.
_BACK_OFF_S, _MAX_BACK_OFF_S = 0.1, 5.0

_FIELD = b"m"

_CREDENTIALS_FIELD = "peer_sync.password_file"


class RedisPeerChannel:
    """Channel between this replica and its peers.

    Raises:
        ConfigError: The client is not installed, or the URL is none.
    """

    def __init__(
        self, settings: PeerSyncSection, registry: PoolRegistry, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._clock = clock
        self._supervisor = registry.supervisor
        self._writing, self._reading = build_client(settings), build_client(settings)
        self._waiting = asyncio.Event()
        name = f"{socket.gethostname()}_{secrets.token_hex(4)}"
        # Pickers that lost the same server do not come back in step.
        self._rng = random.Random(name)
        self._event_log = peer_sync.PeerEventLog(name, self._waiting.set)
        self.replica = peer_sync.PeerReplica(name, self._find_director, silent_s=settings.silent_s)
        self._failing_tasks: set[str] = set()
        self._flushed_at = -math.inf

    async def run(self) -> None:
        """Publish and receive until cancelled; then publish the departure."""
        try:
            async with asyncio.TaskGroup() as tasks:
                keep = self._supervisor.keep
                tasks.create_task(
                    keep("peer_sync", self._publish_open_requests, instance="beat"),
                    name="peer sync heartbeat",
                )
                for task_name, once in (("tell", self._publish), ("listen", self._receive)):
                    repeated = functools.partial(self._repeat, task_name, once)
                    tasks.create_task(
                        keep("peer_sync", repeated, instance=task_name),
                        name=f"peer sync {task_name}",
                    )
        finally:
            self._event_log.publish_left()
            with contextlib.suppress(*_connection_errors()):
                async with asyncio.timeout(_RESPONSE_TIMEOUT_S):
                    await self._flush()
            for connection in (self._writing, self._reading):
                with contextlib.suppress(*_connection_errors()):
                    async with asyncio.timeout(_RESPONSE_TIMEOUT_S):
                        await connection.aclose()

    async def _publish_open_requests(self) -> None:
        """Publish open requests, and drop silent peers."""
        while True:
            # Pools come and go.
            runtimes = self._registry.by_name.items()
            peer_sync.connect(
                [(name, runtime.parts.director) for name, runtime in runtimes], self._event_log
            )
            self._event_log.publish_open()
            self._notify_capacity(self.replica.drop_silent(self._clock()))
            self._supervisor.record_success("peer_sync", "beat")
            await asyncio.sleep(self._settings.beat_s)

    async def _repeat(self, task_name: str, once: Callable[[], Any]) -> None:
        """Repeat a task, with back-off while the server is away."""
        wait_s = _BACK_OFF_S
        while _is_running():
            began = self._clock()
            try:
                await once()
            except _connection_errors() as error:
                if task_name not in self._failing_tasks:
                    self._failing_tasks.add(task_name)
                    _log.warning("peer sync: cannot %s: %s", task_name, type(error).__name__)
                if self._clock() - began > _MAX_BACK_OFF_S:
                    wait_s = _BACK_OFF_S
                await asyncio.sleep(wait_s * (0.5 + self._rng.random()))
                wait_s = min(2.0 * wait_s, _MAX_BACK_OFF_S)

    def _log_recovery(self, task_name: str) -> None:
        self._supervisor.record_success("peer_sync", task_name)
        if task_name in self._failing_tasks:
            self._failing_tasks.remove(task_name)
            _log.info("peer sync: can %s again", task_name)

    async def _publish(self) -> None:
        """Write queued events, until that fails; events of a failed write are lost.

        At once after a pause, and not sooner than `flush_s` after the last time.
        """
        while _is_running():
            await self._waiting.wait()
            await asyncio.sleep(max(0.0, self._flushed_at + self._settings.flush_s - self._clock()))
            self._waiting.clear()
            await self._flush()
            self._flushed_at = self._clock()
            self._log_recovery("tell")

    async def _flush(self) -> None:
        """Write all queued events in a round trip."""
        pipeline = self._writing.pipeline(transaction=False)
        while (message := self._event_log.take(_MAX_EVENTS)) is not None:
            pipeline.xadd(
                self._settings.stream,
                {_FIELD: peer_sync.encode(message)},
                maxlen=self._settings.max_entries,
                approximate=True,
            )
        await pipeline.execute()

    async def _receive(self) -> None:
        """Read new entries of the stream until that fails; entries until a retry are lost."""
        stream, client = self._settings.stream, self._reading
        last = await self._newest_entry()
        self._log_recovery("listen")
        while _is_running():
            streams: Any = await client.xread({stream: last}, count=_MAX_ENTRIES, block=_BLOCK_MS)
            for _, entries in streams or ():
                for entry, fields in entries:
                    handle = functools.partial(self._on_entry, fields.get(_FIELD, b""))
                    # Any client with access to the stream may have written these bytes.
                    self._supervisor.call("peer_sync", handle, instance="an entry of the stream")
                    last = entry
            if not streams and _entry_order(await self._newest_entry()) < _entry_order(last):
                # Not even an own heartbeat is read: the stream was lost, and its ids began anew, as
                # after a failover to a server whose clock is behind.
                last = b"0-0"

    async def _newest_entry(self) -> bytes:
        newest: Any = await self._reading.xrevrange(self._settings.stream, count=1)
        return newest[0][0] if newest else b"0-0"

    def _on_entry(self, data: bytes) -> None:
        message = peer_sync.decode(data)
        if message is not None:
            self._notify_capacity(self.replica.apply_message(message, self._clock()))

    def _notify_capacity(self, pools: set[str]) -> None:
        """Notify flow control: requests of peers ended, so capacity may be free."""
        for name in pools:
            flow_controller = self._registry.flow_controllers.get(name)
            if flow_controller is not None:
                flow_controller.notify_capacity()

    def _find_director(self, pool: str) -> Director | None:
        runtime = self._registry.by_name.get(pool)
        return None if runtime is None else runtime.parts.director

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Gauges for the metrics page, by name."""
        return {
            "extproc_peer_sync_peers": lambda: float(self.replica.pickers),
            "extproc_peer_sync_inflight_requests": lambda: float(self.replica.open),
        }


def build_peer_channel(
    settings: PeerSyncSection, registry: PoolRegistry, clock: Callable[[], float]
) -> RedisPeerChannel | None:
    """Build the channel; None where state synchronization is disabled.

    Raises:
        ConfigError: The client is not installed, or the URL is none.
    """
    return RedisPeerChannel(settings, registry, clock) if settings.url else None


def require(settings: PeerSyncSection) -> None:
    """Refuse settings that cannot work: no client package, an invalid URL, no readable password.

    Raises:
        ConfigError: What is missing or wrong.
    """
    if settings.url:
        build_client(settings)  # which connects when it is used
        admin_access.read_token(settings.password_file, where=_CREDENTIALS_FIELD)


def _entry_order(entry: bytes) -> tuple[int, int]:
    """Order of an entry in its stream, by its id."""
    milliseconds, _, number = entry.partition(b"-")
    return int(milliseconds), int(number)


def _is_running() -> bool:
    """True while this task is not cancelled; the client may swallow a cancellation."""
    task = asyncio.current_task()
    return task is None or not task.cancelling()


def build_client(settings: PeerSyncSection) -> Redis:
    """Build a client of the store, which connects when it is used.

    Raises:
        ConfigError: The extra is not installed, or a setting is wrong.
    """
    try:
        from redis import asyncio as client  # noqa: PLC0415 - an extra, not for everybody
        from redis.asyncio.retry import Retry  # noqa: PLC0415 - the same
        from redis.backoff import NoBackoff  # noqa: PLC0415 - the same
    except ImportError:
        raise ConfigError(
            "peer_sync.url",
            wanted="the Python package redis",
            got="it is not installed",
            fix=f"{distribution.install_command('redis')}, or leave peer_sync.url empty",
        ) from None
    try:
        url, provider = _credentials(settings)
        return client.Redis.from_url(
            url,
            protocol=2,
            credential_provider=provider,
            retry=Retry(NoBackoff(), 0),  # ours has no end
            socket_connect_timeout=_RESPONSE_TIMEOUT_S,
            socket_timeout=_BLOCK_MS / 1000.0 + _RESPONSE_TIMEOUT_S,
        )
    except ValueError:
        raise ConfigError(
            "peer_sync.url",
            wanted="redis://, rediss:// or unix:// with host and port, or a path",
            got="another URL",  # it may carry a password
            fix="write it as redis://:password@host:6379/0",
        ) from None


def _credentials(settings: PeerSyncSection) -> tuple[str, CredentialProvider | None]:
    """Return the URL to connect to, and the reader of the password; None without a password file.

    Raises:
        ConfigError: Both `url` and `password_file` hold a password.
        ValueError: The URL cannot be parsed.
    """
    if not settings.password_file:
        return settings.url, None
    from redis.credentials import CredentialProvider  # noqa: PLC0415 - see `_client`

    parts = urllib.parse.urlsplit(settings.url)
    if parts.password is not None:
        raise ConfigError(
            _CREDENTIALS_FIELD,
            wanted="one source of the password",
            got="a password in peer_sync.url as well",
            fix="remove it from the URL",
        )
    username = urllib.parse.unquote(parts.username or "")

    class PasswordFile(CredentialProvider):
        """Reads the password at every connection; the client asks once for each."""

        async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
            try:
                password = admin_access.read_token(settings.password_file, where=_CREDENTIALS_FIELD)
            except ConfigError as error:
                # As a server that is away: logged once, tried again.
                raise OSError(str(error)) from None
            return (username, password) if username else (password,)

    host = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit(parts._replace(netloc=host)), PasswordFile()


def _connection_errors() -> tuple[type[Exception], ...]:
    """Exceptions of calls to a server that is away, restarts or is full."""
    from redis.exceptions import RedisError  # noqa: PLC0415 - see `_client`

    return (RedisError, OSError, TimeoutError)
