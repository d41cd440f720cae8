"""Peer synchronization: publishes events of this replica, and applies those of others.

Subclasses carry the messages: `redis_peer_channel` and `http_peer_channel`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import logging
import math
import random
import re
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from aiohttp import web

from extproc.config.settings import PeerSyncSection
from extproc.routing import peer_sync
from extproc.routing.director import Director
from extproc.server.pool_registry import PoolRegistry

_log = logging.getLogger("extproc.server")

#: Seconds between attempts to reach what is away, at first and at most.
_BACK_OFF_S, _MAX_BACK_OFF_S = 0.1, 5.0

#: Seconds that a peer may be away before it is logged: one that starts or leaves is for a moment.
_ROLLOUT_S = 10.0

#: Seconds between two looks whether the endpoints of this replica are known.
_SYNC_PAUSE_S = 0.05

#: Seconds that the last message may take.
RESPONSE_TIMEOUT_S: Final = 2.0


#: Code of an error that its class does not name, such as WRONGTYPE, at the start of its text (Redis),
#: which stands behind the command where several were sent together.
_ERROR_CODE = re.compile(r"(?:^|caused error: \(.)([A-Z]{3,20}) ")

#: Words in which Redis explains an error without a code of its own; the rest may quote a password.
_ERROR_WORDS = re.compile(
    r"unknown command|DB index is out of range|invalid DB index|SELECT is not allowed in cluster mode"
    r"|max number of clients reached|without any password configured|Client names cannot contain spaces",
    re.IGNORECASE,
)


class PeerStreamError(ConnectionError):
    """The stream of a peer cannot be read; the message is a reason without its bytes."""


class PeerAwayError(PeerStreamError):
    """A peer cannot be reached, as during a rollout."""


class PeerChannel(abc.ABC):
    """Channel between this replica and its peers.

    Attributes:
        replica: Requests of the peers.
        connection_errors: Exceptions of a peer or server that is away, restarts or is full.
    """

    connection_errors: tuple[type[Exception], ...] = (OSError, TimeoutError)

    def __init__(
        self, settings: PeerSyncSection, registry: PoolRegistry, clock: Callable[[], float]
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.supervisor = registry.supervisor
        self._registry = registry
        self._waiting = asyncio.Event()
        name = f"{socket.gethostname()}_{secrets.token_hex(4)}"
        # Pickers that lost the same server do not come back in step.
        self._rng = random.Random(name)
        self.event_log = peer_sync.PeerEventLog(name, self._waiting.set)
        self.replica = peer_sync.PeerReplica(name, self._find_director, silent_s=settings.silent_s)
        self._failing_tasks: set[str] = set()
        self._retry = asyncio.Event()
        self._num_retries = 0
        self._flushed_at = -math.inf
        registry.add_change_listener(self._connect_pools)

    async def run(self) -> None:
        """Publish and receive until cancelled; then publish the departure."""
        try:
            async with asyncio.TaskGroup() as tasks:
                keep = self.supervisor.keep
                tasks.create_task(
                    keep("peer_sync", self._publish_open_requests, instance="beat"),
                    name="peer sync heartbeat",
                )
                for task_name, once in (("publish", self._publish), ("receive", self.receive)):
                    repeated = functools.partial(self.repeat, task_name, once)
                    tasks.create_task(
                        keep("peer_sync", repeated, instance=task_name),
                        name=f"peer sync {task_name}",
                    )
        finally:
            self.event_log.publish_left()
            with contextlib.suppress(*self.connection_errors):
                async with asyncio.timeout(RESPONSE_TIMEOUT_S):
                    await self.flush()
            await self.close()

    async def wait_synced(self) -> None:
        """Wait until endpoints are known: what is open at peers can only be charged to these."""
        while not self._registry.synced:  # noqa: ASYNC110 - no event exists for it
            await asyncio.sleep(_SYNC_PAUSE_S)

    def publish_open(self) -> None:
        """Record the list of open requests in the event log."""
        self.event_log.publish_open()

    @abc.abstractmethod
    async def flush(self) -> None:
        """Send all events that wait; those of a failed attempt are lost until a repair."""

    @abc.abstractmethod
    async def receive(self) -> None:
        """Receive messages until that fails."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Close all connections."""

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """HTTP routes by which peers read from this replica."""
        return ()

    async def repeat(
        self,
        task_name: str,
        once: Callable[[], Awaitable[None]],
        *,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Repeat a task while it is wanted, with back-off while what it talks to is away."""
        wait_s, failing_since = _BACK_OFF_S, math.inf
        while is_running() and is_wanted():
            began, num_retries = self.clock(), self._num_retries
            try:
                await once()
            except self.connection_errors as error:
                now = self.clock()
                if now - began > _MAX_BACK_OFF_S:
                    wait_s, failing_since = _BACK_OFF_S, now
                failing_since = min(failing_since, now)
                may_log = not isinstance(error, PeerAwayError) or now - failing_since >= _ROLLOUT_S
                if may_log and task_name not in self._failing_tasks:
                    self._failing_tasks.add(task_name)
                    _log.warning("peer sync: cannot %s: %s", task_name, _reason_of(error))
                await asyncio.sleep(_BACK_OFF_S * (0.5 + self._rng.random()))
                if num_retries == self._num_retries:
                    await self._wait_retry((wait_s - _BACK_OFF_S) * (0.5 + self._rng.random()))
                wait_s = min(2.0 * wait_s, _MAX_BACK_OFF_S)

    def request_flush(self) -> None:
        """Let the next flush come soon though no event waits."""
        self._waiting.set()

    def retry(self) -> None:
        """Let tasks that wait after a failure try again, as what was away may be there."""
        self._num_retries += 1
        self._retry.set()
        self._retry.clear()

    async def _wait_retry(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._retry.wait()

    def log_recovery(self, task_name: str) -> None:
        """Record that a task works."""
        self.supervisor.record_success("peer_sync", task_name)
        if task_name in self._failing_tasks:
            self._failing_tasks.remove(task_name)
            _log.info("peer sync: can %s again", task_name)

    def forget_task(self, task_name: str) -> None:
        """Forget that a task failed, which is not repeated any more."""
        self._failing_tasks.discard(task_name)

    def apply_message(self, message: peer_sync.PeerMessage, *, instance: str) -> None:
        """Apply a message of a peer; a failure is counted and logged."""
        # A peer, or any client with access to a store, may have written it.
        self.supervisor.call(
            "peer_sync", functools.partial(self._apply_message, message), instance=instance
        )

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Gauges for the metrics page, by name."""
        return {
            "extproc_peer_sync_peers": lambda: float(self.replica.pickers),
            "extproc_peer_sync_inflight_requests": lambda: float(self.replica.open),
        }

    async def _publish_open_requests(self) -> None:
        """Publish open requests, and drop silent peers."""
        self._connect_pools()
        while True:
            self.publish_open()
            self._notify_capacity(self.replica.drop_silent(self.clock()))
            self.supervisor.record_success("peer_sync", "beat")
            await asyncio.sleep(self.settings.beat_s)

    def _connect_pools(self) -> None:
        """Connect pools before their first request: peers get all requests of a pool."""
        runtimes = self._registry.by_name.items()
        peer_sync.connect(
            [(name, runtime.parts.director) for name, runtime in runtimes], self.event_log
        )

    async def _publish(self) -> None:
        """Send queued events, until that fails.

        At once after a pause, and not sooner than `flush_s` after the last time.
        """
        while is_running():
            await self._waiting.wait()
            await asyncio.sleep(max(0.0, self._flushed_at + self.settings.flush_s - self.clock()))
            self._waiting.clear()
            await self.flush()
            self._flushed_at = self.clock()
            self.log_recovery("publish")

    def _apply_message(self, message: peer_sync.PeerMessage) -> None:
        self._notify_capacity(self.replica.apply_message(message, self.clock()))

    def _notify_capacity(self, pools: set[str]) -> None:
        """Notify flow control: requests of peers ended, so capacity may be free."""
        for name in pools:
            flow_controller = self._registry.flow_controllers.get(name)
            if flow_controller is not None:
                flow_controller.notify_capacity()

    def _find_director(self, pool: str) -> Director | None:
        runtime = self._registry.by_name.get(pool)
        return None if runtime is None else runtime.parts.director


def _reason_of(error: Exception) -> str:
    """Reason of a failure: of others not the text, which may quote a URL with a password."""
    if isinstance(error, PeerStreamError):
        return str(error)
    text = str(error)
    if words := _ERROR_WORDS.search(text):
        return f"{type(error).__name__}: {words[0]}"
    code = _ERROR_CODE.search(text)
    return f"{type(error).__name__} {code[1] if code else _cause_of(error)}".rstrip()


def _cause_of(error: BaseException | None) -> str:
    """Cause of an error in our words, or those of the system or OpenSSL; empty where it has none."""
    while error is not None:
        if isinstance(error, PeerStreamError):
            return str(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message
        if isinstance(error, ssl.SSLError) and error.reason:
            return error.reason
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return ""


def is_running() -> bool:
    """True while this task is not cancelled; a client may swallow a cancellation."""
    task = asyncio.current_task()
    return task is None or not task.cancelling()
