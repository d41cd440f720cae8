"""The ext_proc servicer: one coroutine per stream, one turn per event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import NamedTuple

import grpc

from extproc.errors import ProtocolError
from extproc.protocol.events import Event
from extproc.server import memory, reading
from extproc.server.stream import Shared, Stream, opened
from extproc.wire import codec

_log = logging.getLogger("extproc.server")

Context = grpc.aio.ServicerContext[Event, bytes]

#: Seconds in which a data plane reads that streams ended; busy ones take some ms.
_APART_S = 0.5


class _Open(NamedTuple):
    """A stream that is open."""

    stream: Stream
    context: Context
    reads: reading.Reads[Event]

    def end(self, task: asyncio.Task[None]) -> None:
        """End it where it waits for more, else once it has said what it is saying.

        gRPC ends no call of which a write was cancelled: it tries to begin the answer again
        (GRPC_CALL_ERROR_TOO_MANY_OPERATIONS), and the client waits for an end that never comes.
        """
        self.stream.over = True
        if self.reads.waits:
            task.cancel()


class Servicer:
    """Translates streams to turns.

    Args:
        shared: What all streams have in common.
    """

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._crowds = memory.Crowds(memory.trimmer())
        self._streams: dict[asyncio.Task[None], _Open] = {}

    async def process(self, _: AsyncIterator[Event], context: Context) -> None:
        """Serve one stream to its end."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("process runs inside a task of the gRPC server")
        tallies = self.shared.tallies
        tallies.streams_open += 1
        self._crowds.count(tallies.streams_open)
        stream = opened(self.shared)
        reads = reading.Reads(context.read, self._ends)
        self._streams[task] = _Open(stream, context, reads)
        turn = (
            stream.turn
            if tallies.streams_open <= self.shared.settings.max_streams
            else stream.turn_away
        )
        end = "error"
        try:
            while not stream.over:
                event = await reads
                if not isinstance(event, Event):
                    break
                # No await beyond this point, until the answers are written.
                for reply in turn(event):
                    await context.write(codec.encode(reply))
                if stream.held is not None:
                    await _resume(stream, context)
            end = "ok"
        except asyncio.CancelledError:
            # The client left, or we are closing: then the stream ends with OK, and the data
            # plane goes on without us instead of cutting the answer.
            end = "cancelled"
            if not self.shared.closing:
                raise
            task.uncancel()
        except ProtocolError as error:
            end = "protocol"
            _log.warning("stream ended: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except grpc.aio.BaseError:
            # A write after the peer left; the end arrives as an error instead of a cancellation.
            end = "cancelled"
        finally:
            del self._streams[task]
            tallies.streams_open -= 1
            self._crowds.count(tallies.streams_open)
            tallies.streams[end] += 1
            stream.finish()

    def _ends(self) -> bool:
        """Whether streams are ended by us, and not by their clients."""
        return self.shared.closing

    async def release(self, within_s: float, *, apart_s: float = _APART_S) -> None:
        """End every open stream with OK: Envoy goes on without the processor.

        A stream whose request is not decided yet ends as soon as it is: without an answer Envoy
        would go on without an endpoint. After GOAWAY gRPC closes a connection at once with its last
        stream, and the data plane loses what it has not read yet if it writes to the connection
        then, as Envoy does for each end it reads. So its oldest stream ends last and alone.

        Args:
            within_s: Seconds that requests have to become complete.
            apart_s: Seconds between the ends on a connection and the last of them.
        """
        self.shared.closing = True
        last: dict[str, asyncio.Task[None]] = {}
        others = 0
        for task, one in list(self._streams.items()):
            if one.stream.picked and last.setdefault(one.context.peer(), task) is not task:
                one.end(task)
                others += 1
        if others:
            await asyncio.wait(last.values(), timeout=apart_s)
        for task in last.values():
            if task in self._streams:
                self._streams[task].end(task)
        if self._streams:
            await asyncio.wait(self._streams, timeout=within_s)


async def _resume(stream: Stream, context: Context) -> None:
    """Wait with a request that is held, and answer it."""
    held = stream.held
    if held is None:
        return
    answer = await held.answer
    del held  # its prompt must not wait for the peer
    for reply in stream.resume(answer):
        await context.write(codec.encode(reply))


def register(server: grpc.aio.Server, servicer: Servicer) -> None:
    """Serve ext_proc on a server. The codec functions are the (de)serialisers."""
    handler: grpc.RpcMethodHandler[Event, bytes] = grpc.stream_stream_rpc_method_handler(
        servicer.process, request_deserializer=codec.decode, response_serializer=None
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(codec.SERVICE, {codec.METHOD: handler}),)
    )
