"""Peer synchronization without a store: every replica reads the events of every other one.

`GET /internal/requests` on the admin port answers with a body without end, the
frames of `peer_stream`. The first ones hold all open requests. A replica applies what it reads from
addresses that it resolved itself, and nothing that is sent to it, so no stranger can make endpoints
look busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from aiohttp import web

from extproc.config.settings import PeerSyncSection
from extproc.errors import describe_connection_error
from extproc.routing import peer_sync
from extproc.server.peer_addresses import MAX_ADDRESSES, PeerAddresses
from extproc.server.peer_channel import PeerAwayError, PeerChannel, PeerStreamError
from extproc.server.peer_stream import PeerStream, encode_frame
from extproc.server.pool_registry import PoolRegistry

_log = logging.getLogger("extproc.server")

#: Path by which replicas read each other's requests.
PATH = "/internal/requests"

_MEDIA_TYPE = "application/vnd.msgpack"

#: Seconds between two looks for peers, and at least: a peer that connects is looked for at once.
_RESOLVE_S, _RESOLVE_PAUSE_S = 5.0, 0.5

#: Seconds in which a connection must be made.
_CONNECT_TIMEOUT_S = 2.0

#: Unsent bytes of a reader above which it is cut off.
MAX_UNSENT_BYTES: Final = 1 << 20


#: Reasons for which a peer that starts or leaves cannot be read.
_AWAY = frozenset({"closed", "refused", "timeout", "unreachable"})


class HttpPeerChannel(PeerChannel):
    """Channel that serves a stream to each peer, and reads one of each.

    Args:
        addresses: The peers.
        failures: Connections that failed, ended or were too slow, by reason; updated here.
    """

    def __init__(
        self,
        settings: PeerSyncSection,
        registry: PoolRegistry,
        clock: Callable[[], float],
        *,
        addresses: PeerAddresses,
        failures: Counter[str],
    ) -> None:
        super().__init__(settings, registry, clock)
        self._addresses = addresses
        self._failures = failures
        self._is_closed = False
        self._readers: set[_PeerReader] = set()
        self._has_new_reader = asyncio.Event()
        #: Addresses that a connection is wanted to, and those that have a task.
        self._wanted: set[str] = set()
        self._followed: set[str] = set()
        #: Names of the peers that are read, and of those known by a second address, by address.
        self._pickers: dict[str, str] = {}
        self._aliases: dict[str, str] = {}

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """HTTP routes by which peers read from this replica."""
        return (web.get(PATH, self._serve),)

    async def flush(self) -> None:
        """Send all events that wait: encoded once for all readers, and written without a task."""
        while (message := self.event_log.take(peer_sync.MAX_FACTS)) is not None:
            if self._readers:
                frame = encode_frame(message)
                # As aiohttp would frame it, whose own writes are coroutines.
                chunk = b"%x\r\n%b\r\n" % (len(frame), frame)
                for reader in tuple(self._readers):
                    self._write(reader, chunk)

    async def receive(self) -> None:
        """Read from all peers, and look for others, until cancelled."""
        unresolved: frozenset[str] = frozenset()
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self.wait_synced()
                self._has_new_reader.clear()
                self._wanted = set(await self._addresses.resolve())
                for name in self._addresses.unresolved - unresolved:
                    _log.warning("peer sync: peers %s cannot be resolved", name)
                unresolved = self._addresses.unresolved
                self._forget_aliases()
                for address in self._wanted - self._followed - self._aliases.keys():
                    self._followed.add(address)
                    follow = functools.partial(self._follow, address)
                    tasks.create_task(
                        self.supervisor.keep("peer_sync", follow, instance=address),
                        name=f"peer sync read {address}",
                    )
                self.log_recovery("receive")
                await asyncio.sleep(_RESOLVE_PAUSE_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RESOLVE_S):
                        await self._has_new_reader.wait()

    async def close(self) -> None:
        """End the streams of all readers, and serve no other."""
        self._is_closed = True
        for reader in tuple(self._readers):
            reader.closed.set()
            if not reader.is_current:
                reader.transport.abort()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        """Serve the events of this replica to a peer until it or this replica leaves."""
        if self._is_closed or len(self._readers) >= MAX_ADDRESSES:
            return web.Response(status=503, text="stopping, or too many readers\n")
        response = web.StreamResponse(headers={"content-type": _MEDIA_TYPE})
        await response.prepare(request)
        if request.transport is None:
            return response
        reader = _PeerReader(request.transport)
        self._readers.add(reader)
        # A replica that starts reads from all others at once: it can be read from now on.
        self._has_new_reader.set()
        self.retry()
        try:
            with contextlib.suppress(ConnectionError):  # the reader left
                # Later events may overtake these, as messages may arrive in any order.
                for message in self.event_log.snapshot():
                    await response.write(encode_frame(message))
                    await asyncio.sleep(0)  # requests are routed in between
                reader.is_current = True
                await reader.closed.wait()
        finally:
            self._readers.discard(reader)
            # What is written leaves, and nothing waits for a reader that does not read.
            reader.transport.close()
        return response

    def _write(self, reader: _PeerReader, chunk: bytes) -> None:
        """Write to a reader; one that is slow is cut off, and reads what is open when it comes back."""
        transport = reader.transport
        if transport.is_closing():
            reader.closed.set()
        elif transport.get_write_buffer_size() <= MAX_UNSENT_BYTES:
            transport.write(chunk)
        else:
            # A start that it missed would be missing as long as the request is open.
            self._failures["slow"] += 1
            transport.abort()
            reader.closed.set()

    def _forget_aliases(self) -> None:
        """Forget second addresses of peers that are not read any more by the first."""
        read = set(self._pickers.values())
        aliases = self._aliases.items()
        self._aliases = {a: name for a, name in aliases if name in read and a in self._wanted}

    async def _follow(self, address: str) -> None:
        """Read from a peer while its address is known."""
        task_name = f"read {address}"
        try:
            read = functools.partial(self._read, address)
            await self.repeat(task_name, read, is_wanted=lambda: address in self._wanted)
        finally:
            self._followed.discard(address)
            self.forget_task(task_name)

    async def _read(self, address: str) -> None:
        """Read the stream of a peer to its end.

        Raises:
            PeerStreamError: It ended without a farewell.
        """
        target = self._addresses.target(address, path=PATH, accept=_MEDIA_TYPE)
        stream = PeerStream(target.request, functools.partial(self._on_message, address))
        try:
            reason = await self._read_to_end(stream, target.host, target.port)
        except TimeoutError:
            reason = "timeout"
        except ConnectionRefusedError:
            reason = "refused"
        except OSError as error:
            reason = describe_connection_error(error)
        finally:
            stream.end("")
            self._pickers.pop(address, None)
        if reason:
            self._failures["status" if reason.startswith("status ") else reason] += 1
            raise PeerAwayError(reason) if reason in _AWAY else PeerStreamError(reason)

    async def _read_to_end(self, stream: PeerStream, host: str, port: int) -> str:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await loop.create_connection(lambda: stream, host, port)
        return await stream.wait_ended(silent_s=self.settings.silent_s)

    def _on_message(self, address: str, data: bytes) -> str | None:
        """Apply a message; returns the reason to end the stream, empty for none to log."""
        message = peer_sync.decode(data)
        if message is None:
            return "malformed"
        picker = self._pickers.get(address)
        if picker is None:
            if message.picker == self.event_log.picker:
                self._addresses.record_own(address)
                self._wanted.discard(address)
                return ""
            if message.picker in self._pickers.values():
                self._aliases[address] = message.picker
                self._wanted.discard(address)
                return ""
            self._pickers[address] = message.picker
            self.log_recovery(f"read {address}")
        elif message.picker != picker:
            return "malformed"
        elif not self.replica.is_alive(picker):
            # Its open requests were dropped after a silence, and it says them once on a connection.
            return "silent"
        self.apply_message(message, instance=address)
        if message.facts and isinstance(message.facts[-1], peer_sync.PickerLeft):
            self._wanted.discard(address)
            return ""
        return None


class _PeerReader:
    """A peer that reads events of this replica.

    Attributes:
        is_current: It was sent all requests that were open when it came.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.closed = asyncio.Event()
        self.is_current = False
